"""Tables on disk: keyed by everything that made them, written atomically, never unpickled."""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from windtunnel.deployment import Pool
from windtunnel.deployment.engine import SCHEDULER_FLAGS
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import Database
from windtunnel.perf.tabulate.tables import PARTS, Axes, Sums, Tabulated, total

KEPT = 6 << 30
"""Bytes of tables that a cache keeps, one or two megabytes each; the oldest go first. A search over some models and
devices reads thousands, and each takes fifteen times as long to make as to read."""
SWEPT = "01"
"""First digits of the keys that make room when they are stored: one in eight, since thousands of files are listed."""


BESIDES = ("gpu_memory_utilization", "num_gpu_blocks_override", "scheduler", *SCHEDULER_FLAGS)
"""Settings of an engine that only its memory and its scheduler read: no batch takes longer for them."""


def cache_key(pool: Pool, source: str, database: Database | None, corrections: Corrections = ALL) -> str:
    """Name of a pool's tables: changes with the model, device, engine, source, corrections, this code, and the
    database's files."""
    model, engine = pool.model, pool.engine.spec()
    quantization = model.quantization
    made_of = {
        "model": [str(run) for run in model.layers],
        "sizes": [model.hidden_size, model.vocab_size, model.embedding_size, model.learned_positions, model.dtype],
        "layer_inputs": [model.layer_inputs, model.layer_input_rows],
        "stage": [model.embeds, model.samples],
        "quantization": [{**vars(each), "parts": sorted(each.parts)} for each in quantization.formats]
        if quantization
        else None,
        "device": {**vars(pool.device), "flops": dict(pool.device.flops)},
        "engine": {name: value for name, value in engine.items() if name not in BESIDES},
        "source": [source, _profile_stamp(source)],
        "corrections": asdict(corrections),
        "code": _code(),
        "database": None if database is None else [str(database.systems), database.version, database.stamp],
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _profile_stamp(source: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a profile; nothing for other sources."""
    if not source.startswith("profile:"):
        return []
    root = Path(source.removeprefix("profile:")).absolute()
    root = next((above.parent for above in root.parents if above.name == "compute"), root)
    found = ((path, path.stat()) for path in sorted(root.rglob("*")) if path.suffix in (".csv", ".json", ".npz"))
    return [(str(path), state.st_size, state.st_mtime_ns) for path, state in found]


DATA = ("efficiency.toml", "kernel_errors.toml")
"""Files that tables are made of."""


@cache
def _code() -> str:
    """Digest of every file that makes batch times, and of DATA."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256(np.__version__.encode())
    for file in [*sorted(folder.rglob("*.py")), *(folder.parent / "data" / name for name in DATA)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def load(folder: Path, key: str, ax: Axes) -> tuple[Tabulated | None, list[str]]:
    """The tables under a key, or None with what was wrong with the file, if there was one."""
    path = folder / f"{key}.npz"
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return _unpack(file, ax), []
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:  # InputError is a ValueError
        return None, [f"cached batch times {path.name} in {folder} cannot be read ({type(error).__name__}): rebuilt"]


def store(folder: Path, key: str, tabulated: Tabulated) -> list[str]:
    """Write tables under a key; what went wrong, if anything. Readers see the whole file or none."""
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{key}-", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            np.savez(file, allow_pickle=False, **_pack(tabulated))
        temporary.replace(folder / f"{key}.npz")
        if key[0] in SWEPT:
            _forget_oldest(folder)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return [f"batch times cannot be cached in {folder}: {error.strerror or error}"]
    return []


def _forget_oldest(folder: Path) -> None:
    """Keep the newest tables up to KEPT bytes; another process may forget the same ones."""
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        tables = [(one.stat(), one.path) for one in found if one.name.endswith(".npz")]
        files = sorted((state.st_mtime_ns, state.st_size, path) for state, path in tables)
        room = KEPT
        for _, size, path in reversed(files):
            room -= size
            if room < 0:
                Path(path).unlink(missing_ok=True)


def _pack(tabulated: Tabulated) -> dict[str, Any]:
    """Arrays by name. Tables of zeros are left out, and so is what can be added up again: the total of the sources.
    Equal tables are kept once."""
    arrays: dict[str, Any] = {"host_overlapped": tabulated.times.host_overlapped}
    arrays["host_serial"] = tabulated.times.host_serial
    whole: list[str] = []
    first: dict[bytes, str] = {}
    same: dict[str, str] = {}
    split = {
        **_prefixed("source", tabulated.sources),
        **_prefixed("group", tabulated.groups),
        **_prefixed("doubt", tabulated.doubts),
    }
    for name, times in split.items():
        arrays[f"{name}/prefill_base"] = np.float64(times.prefill_base)
        for part in PARTS:
            seconds = getattr(times, part)
            if name.startswith("group") and np.array_equal(seconds, getattr(tabulated.times, part)):
                whole.append(f"{name}/{part}")
            elif seconds.any():
                kept = first.setdefault(hashlib.sha256(seconds.tobytes()).digest(), f"{name}/{part}")
                if kept == f"{name}/{part}":
                    arrays[kept] = seconds
                else:
                    same[f"{name}/{part}"] = kept
    text: dict[str, Any] = {"provenance": tabulated.provenance, "notes": tabulated.notes, "split": list(split)}
    text |= {"whole": whole, "same": same}
    arrays["text"] = np.frombuffer(json.dumps(text).encode(), dtype=np.uint8)
    return arrays


def _prefixed(prefix: str, tables: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}:{name}": times for name, times in tables.items()}


def _unpack(file: Any, ax: Axes) -> Tabulated:
    text = json.loads(bytes(file["text"]))
    arrays = {name: file[name] for name in file.files}
    arrays |= {name: arrays[kept] for name, kept in text["same"].items()}
    found = {
        name: Sums(
            ax,
            {part: arrays[f"{name}/{part}"] for part in PARTS if f"{name}/{part}" in arrays},
            float(arrays[f"{name}/prefill_base"]),
        )
        for name in text["split"]
    }
    sources = {name[7:]: sums for name, sums in found.items() if name.startswith("source:")}
    groups = {name[6:]: sums for name, sums in found.items() if name.startswith("group:")}
    doubts = {name[6:]: sums for name, sums in found.items() if name.startswith("doubt:")}
    everything = total(sources)
    for name in text["whole"]:
        group, part = name.removeprefix("group:").split("/")
        groups[group].tables[part] = everything.tables[part]
    return Tabulated(
        times=everything.times(arrays["host_overlapped"], arrays["host_serial"]),
        sources={name: sums.times() for name, sums in sources.items()},
        groups={name: sums.times() for name, sums in groups.items()},
        doubts={name: sums.times() for name, sums in doubts.items()},
        provenance=tuple(text["provenance"]),
        notes=tuple(text["notes"]),
    )
