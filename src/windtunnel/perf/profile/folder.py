"""A profile folder: Vidur's CSV files, ``compute/DEVICE/MODEL/{mlp,attention,head}.csv`` and
``network/NODE/{all_reduce,send_recv}.csv`` and ``cpu_overhead/…csv``, and what ``windtunnel profile`` adds in
``profile.json``."""

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.files import parse_json, read_text
from windtunnel.perf.estimators.points import Points, points_of
from windtunnel.perf.profile.shapes import ATTENTION, BITS_8, EVERY_TOKEN_OPERATOR, HEAD, HOST, Shape

MANIFEST = "profile.json"
TIME = "time_stats.{}.median"

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Profile:
    """Points of every operator of one model on one device."""

    device: str
    shape: Shape
    points: Mapping[tuple[str, int], Points]
    """(operator, shards) → points; all_reduce by the GPUs that take part, in tokens of this model; send_recv, likewise,
    by 2 for two GPUs of one node and 1 for one of each of two nodes."""
    files: tuple[Path, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """The manifest of ``windtunnel profile``; empty for Vidur's folders."""

    @property
    def shards(self) -> tuple[int, ...]:
        """Degrees of tensor parallelism with all operators that the model needs."""
        degrees = sorted({tp for _, tp in self.points})
        return tuple(tp for tp in degrees if all((name, tp) in self.points for name in self.shape.needed))


def read_profile(folder: Path, device: tuple[str, ...] = (), shape: Shape | None = None) -> Profile:
    """The profile of a model on a device.

    Args:
        folder: a root with ``compute``, or a model's own folder in it.
        device: names of the one that is wanted, where there are several.
        shape: which model, where there are several.

    Raises:
        InputError: nothing fits, or a file is not what it should be; the message names it.
    """
    candidates = sorted(_models(folder))
    if not candidates:
        raise InputError(f"profile {str(folder)!r}: holds no mlp.csv: give a folder of windtunnel profile or of Vidur")
    chosen = _of_device(folder, candidates, device)
    read = [(path, _read_mlp(path / "mlp.csv")) for path in chosen]
    fitting = [(path, table) for path, table in read if shape is None or _shape(path, table, shape) == shape]
    if not fitting:
        raise InputError(
            f"profile {str(folder)!r}: has no model of this shape ({shape}); it has "
            + ", ".join(path.name for path in chosen)
        )
    if len(fitting) > 1 and shape is None:
        raise InputError(f"profile {str(folder)!r}: holds several models; name the folder of one, e.g. {fitting[0][0]}")
    path, table = fitting[0]
    return _profile(path, table, shape)


def _models(folder: Path) -> Iterable[Path]:
    if (folder / "mlp.csv").is_file():
        return [folder]
    return (path.parent for path in folder.glob("**/mlp.csv"))


def _of_device(folder: Path, models: list[Path], wanted: tuple[str, ...]) -> list[Path]:
    """The models of one device."""
    by_device: dict[str, list[Path]] = {}
    for path in models:
        by_device.setdefault(_device(path), []).append(path)
    for name, paths in by_device.items():
        if is_device(name, wanted):
            return paths
    if len(by_device) > 1:
        raise InputError(
            f"profile {str(folder)!r}: mixed devices ({', '.join(sorted(by_device))}), and none is the deployment's "
            f"{wanted[0] if wanted else '(not given)'}; name the folder of one"
        )
    return models


def is_device(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a folder's device is one of these names; case, dashes and blanks do not matter."""
    return _plain(name) in {_plain(one) for one in wanted}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _root(path: Path) -> Path | None:
    """The folder above ``compute``."""
    return next((above.parent for above in path.absolute().parents if above.name == "compute"), None)


def _device(path: Path) -> str:
    """The folder's name below ``compute``; without one, that of the model's folder's parent."""
    root = _root(path)
    if root is None:
        return path.absolute().parent.name
    return path.absolute().relative_to(root / "compute").parts[0]


def _profile(path: Path, mlp: Columns, wanted: Shape | None) -> Profile:
    root, device = _root(path), _device(path)
    about = _manifest(root or path, device)
    shape, files = _shape(path / "mlp.csv", mlp, wanted), [path / "mlp.csv"]
    found: dict[tuple[str, int], Points] = {}
    tokens, shards = mlp["num_tokens"], mlp["num_tensor_parallel_workers"].astype(int)
    for name in EVERY_TOKEN_OPERATOR:
        _add(found, path / "mlp.csv", mlp, name, shape, shards, tokens, "tokens")
    if (path / "attention.csv").is_file():
        files.append(path / "attention.csv")
        _attention(found, files[-1], shape)
    if (path / "head.csv").is_file():
        files.append(path / "head.csv")
        table = _table(files[-1], ("num_tokens", "num_tensor_parallel_workers"))
        for name in HEAD:
            degrees = table["num_tensor_parallel_workers"].astype(int)
            _add(found, files[-1], table, name, shape, degrees, table["num_tokens"], "tokens")
    for file in sorted((root or path).glob("network/*/*.csv")):
        if file.stem in ("all_reduce", "send_recv") and _belongs(file, device, root or path):
            files.append(file)
            _collectives(found, file, shape)
    for file in sorted((root or path).glob("cpu_overhead/**/*.csv")):
        if device.partition("_")[0] in str(file.relative_to(root or path)) and root is not None:
            name = path.absolute().relative_to(root / "compute" / device).as_posix()
            files += [file] * _host(found, file, shape, name)
    profile = Profile(device, shape, found, tuple(files), about)
    missing = [name for name in shape.needed if not any(operator == name for operator, _ in found)]
    if missing or not profile.shards:
        what = ", ".join(missing) or "an operator at every degree of tensor parallelism"
        raise InputError(f"profile {str(path)!r}: lacks {what}: measure it, or take another folder")
    return profile


def _belongs(file: Path, device: str, root: Path) -> bool:
    """Whether a node's network is the device's: Vidur calls them ``a100_pairwise_nvlink``."""
    nodes = list((root / "network").iterdir())
    return len(nodes) == 1 or file.parent.name.partition("_")[0] == device.partition("_")[0]


def _manifest(root: Path, device: str) -> dict[str, Any]:
    path = root / MANIFEST
    if not path.is_file():
        return {}
    document = parse_json(read_text(path))
    if not isinstance(document, dict) or document.get("format") != "windtunnel profile":
        raise InputError(f"{str(path)!r}: not a manifest of windtunnel profile; take it away, or measure again")
    if document.get("units") != "ms":
        raise InputError(f"{str(path)!r}: units {document.get('units')!r}: times of a profile are in ms")
    if document.get("device") != device:
        raise InputError(
            f"{str(path)!r}: mixed devices: it was measured on {document.get('device')!r}, the folder says {device!r}"
        )
    return document


def _attention(found: dict[tuple[str, int], Points], file: Path, shape: Shape) -> None:
    keys = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", "num_tensor_parallel_workers")
    table = _table(file, keys)
    prefill = table["is_prefill"] > 0
    shards = table["num_tensor_parallel_workers"].astype(int)
    columns = {
        "prefill": (prefill & (table["batch_size"] == 1), table["prefill_chunk_size"]),
        "decode": (~prefill, table["batch_size"]),
        "tokens": (np.ones(len(prefill), dtype=bool), np.maximum(table["prefill_chunk_size"], table["batch_size"])),
    }
    for name, phase in ATTENTION.items():
        chosen, a = columns[phase]
        if TIME.format(name) in table:
            part = {key: column[chosen] for key, column in table.items()}
            b = part["kv_cache_size"] if phase != "tokens" else None
            _add(found, file, part, name, shape, shards[chosen], a[chosen], phase, b)


def _collectives(found: dict[tuple[str, int], Points], file: Path, shape: Shape) -> None:
    """Bytes become tokens of the model; of all-reduces those with the most GPUs of a group on a node: all of them, but
    for what several hosts measured together."""
    table = _table(file, ("num_workers", "size", "devices_per_node"))
    by = "num_workers" if file.stem == "all_reduce" else "devices_per_node"
    workers, in_node = table["num_workers"], table["devices_per_node"]
    if by == "num_workers":
        kept = np.array([each == in_node[workers == group].max() for each, group in zip(in_node, workers, strict=True)])
    else:
        kept = in_node <= 2
    part = {key: column[kept] for key, column in table.items()}
    tokens = part["size"] / (2.0 * shape.n_embd)
    _add(found, file, part, file.stem, shape, part[by].astype(int), tokens, "tokens")


def _host(found: dict[tuple[str, int], Points], file: Path, shape: Shape, model: str) -> bool:
    """Host work of steps of this model, by requests; whether the file has any."""
    table = _table(file, ("batch_size", "tensor_parallel_degree"), tuple(HOST.values()), ("model_name", model))
    for name, column in HOST.items() if len(table["batch_size"]) else ():
        if column in table:
            part = {TIME.format(name): table[column]}
            shards = table["tensor_parallel_degree"].astype(int)
            _add(found, file, part, name, shape, shards, table["batch_size"], "tokens")
    return len(table["batch_size"]) > 0


def _add(
    found: dict[tuple[str, int], Points],
    file: Path,
    table: Columns,
    name: str,
    shape: Shape,
    shards: NDArray[np.int64],
    a: NDArray[np.float64],
    phase: str,
    b: NDArray[np.float64] | None = None,
) -> None:
    """The points of an operator, by shards; rows without a time, and times of zero, are left out."""
    column = table.get(TIME.format(name))
    if column is None:
        return
    _check(file, name, column)
    measured = ~np.isnan(column) & (column > 0)
    for tp in np.unique(shards[measured]).tolist():
        these = measured & (shards == tp)
        kernel = shape.kernel(name, tp)
        at = a[these], np.zeros(these.sum()) if b is None else b[these]
        found[name, tp] = points_of(kernel, phase, *at, column[these] / 1000.0).distinct()


def _check(file: Path, name: str, column: NDArray[np.float64]) -> None:
    if np.isnan(column).all():
        raise InputError(f"{str(file)!r}: {name}: every time is NaN or missing; measure it again")
    bad = np.flatnonzero((column < 0) | np.isinf(column))
    if len(bad):
        raise InputError(f"{str(file)!r}: row {bad[0] + 2}: {name} takes {column[bad[0]]} ms: must be ≥ 0 and finite")


def _read_mlp(path: Path) -> Columns:
    names = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp")
    return _table(path, (*names, "num_tokens", "num_tensor_parallel_workers"))


def _shape(path: Path, table: Columns, wanted: Shape | None) -> Shape:
    """The model's shape; Vidur pads the vocabulary, which then is as wanted."""
    names = ("n_embd", "n_head", "n_kv_head", "n_expanded_embd", "use_gated_mlp", "vocab_size")
    rows = {tuple(int(table[name][i]) for name in names) for i in range(len(table["n_embd"]))}
    if len(rows) != 1:
        raise InputError(f"{str(path)!r}: rows of {len(rows)} models: one file has one model")
    sizes = dict(zip(names, next(iter(rows)), strict=True))
    head = int(table["head_dim"][0]) if "head_dim" in table else sizes["n_embd"] // sizes["n_head"]
    gated, vocabulary = bool(sizes.pop("use_gated_mlp")), sizes.pop("vocab_size")
    sizes |= {name: int(table[name][0]) for name in OPTIONAL if name in table}
    weights = BITS_8[int(table["weights"][0])] if "weights" in table else "bfloat16"
    found = Shape(**sizes, use_gated_mlp=gated, vocab_size=vocabulary, head_dim=head, weights=weights)
    return found.as_of(wanted)


OPTIONAL = tuple(field.name for field in fields(Shape) if field.default == 0)
"""Columns of models that Vidur does not know."""
STEADY = 0.25
"""By which share a point may differ when it is measured again: more is no property of a kernel."""
WAITED = 0.1
"""Seconds that threads may wait for a CPU in each second of a measurement."""
TRUTHS = {"True": 1.0, "False": 0.0, "true": 1.0, "false": 0.0, "": np.nan}


def _table(
    path: Path, needed: tuple[str, ...], also: tuple[str, ...] = (), only: tuple[str, str] | None = None
) -> Columns:
    """The number columns of a CSV file: those needed, medians, and ``also``; ``only``: rows with this text in a column.

    Raises InputError for a column that is missing, or a text where a number is needed.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        rows = list(reader)
    missing = [name for name in (*needed, *(only[:1] if only else ())) if name not in names]
    if missing:
        raise InputError(f"{str(path)!r}: has no column {missing[0]!r}: not a file of a profile")
    if not rows:
        raise InputError(f"{str(path)!r}: has no rows; measure again")
    if only is not None:
        rows = [row for row in rows if row[names.index(only[0])] == only[1]]
    found: dict[str, NDArray[Any]] = {}
    for i, name in enumerate(names):
        median = name.startswith("time_stats.") and name.endswith(".median")
        if not (median or name in (*needed, *also, "head_dim", "weights", *OPTIONAL)):
            continue
        if wrong := next((n for n, row in enumerate(rows) if row[i : i + 1] and row[i].lower() == "nan"), None):
            raise InputError(
                f"{str(path)!r}: row {wrong + 2}: {name} is nan: measure it again, or leave the cell empty"
            )
        try:
            found[name] = np.array([TRUTHS[row[i]] if row[i] in TRUTHS else float(row[i]) for row in rows])
        except (ValueError, IndexError) as error:
            raise InputError(f"{str(path)!r}: column {name!r} holds what is no number ({error})") from error
    for name in needed:
        if np.isnan(found[name]).any():
            raise InputError(f"{str(path)!r}: column {name!r} has an empty cell: every row needs its keys")
    return found


def unsteady(about: Mapping[str, Any]) -> str:
    """Why times of a profile are not to be trusted: others had the CPU, or points that were measured twice differ."""
    waited = float(about.get("waited_for_cpu", 0.0))
    if waited > WAITED:
        return f"threads waited {waited:.2g} s for a CPU in each second: the machine was busy: profile an idle one"
    differ = list(about.get("repeats_differ", {}).values())
    usual = float(np.median(differ)) if differ else 0.0
    if usual <= STEADY:
        return ""
    return f"points that were measured twice differ by {100 * usual:.0f} %: the machine was busy: profile an idle one"


def stamp(files: Iterable[Path]) -> str:
    """Changes when a file does."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(json.dumps([path.name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
    return digest.hexdigest()[:16]
