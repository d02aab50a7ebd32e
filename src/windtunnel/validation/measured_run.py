"""Measured runs of real engines, one folder each with ``run.json`` and ``requests.jsonl``."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.versions import nearest_preset, preset_note
from windtunnel.errors import InputError, unknown
from windtunnel.files import parse_json
from windtunnel.files import read_text as text_of
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.simulate.overheads import client_of
from windtunnel.validation.measurement import Measurement, Requests, Series, check_requests, doubts
from windtunnel.validation.shared_prompts import HASH_BLOCK, of_hit_rate, of_repeats, repeated_after
from windtunnel.workload.columns import Workload

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2el_s")
SERIES = ("t_s", "running", "waiting")
SETTINGS = frozenset(field.name for field in fields(Engine)) - {"preset", "kernel_version"}


WAY_OUT = "give hash_ids of every request, or prefix_cache_hit_rate in run.json"
"""Where it is not known what prompts shared."""


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """One measured run: the server and what was measured."""

    model: str
    device: str
    engine: str
    """Name of the engine, as in the kernel database."""
    version: str
    settings: Mapping[str, Any]
    """vLLM's argument names → values; what was not recorded is absent."""
    measurement: Measurement

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.measurement.name

    def pool(self) -> Pool:
        """What is simulated: the recorded settings on the preset nearest to the recorded version.

        Raises InputError for what cannot be simulated.
        """
        return _pool(self.model, self.device, self.engine, self.version, self.settings)

    def require_known_prompts(self) -> None:
        """Raise InputError where the lengths of prompts come again, so that they were probably cached, and nothing
        tells what they shared: without hits, no simulated time would mean anything."""
        if again := self.measurement.prompts_again:
            raise InputError(
                f"{self.name}: prompt lengths come again after {again} requests, so their prompts were probably "
                f"cached: add --same-prompts to replay them as the same prompts, or {WAY_OUT}"
            )


def _pool(model: str, on: str, engine: str, version: str, settings: Mapping[str, Any]) -> Pool:
    for name in settings:
        if name not in SETTINGS:
            raise unknown("engine setting", name, SETTINGS)
    return Pool(load_model(model), device(on), Engine(preset=nearest_preset(engine, version), **settings))


def find_measured_runs(folder: Path) -> list[Path]:
    """Folders of measured runs below ``folder``, or itself. Raises InputError when there are none."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise InputError(f"{str(folder)!r}: no measured runs: give a folder of folders with run.json, requests.jsonl")
    return found


def read_measured_run(folder: Path, *, same_prompts: bool = False) -> MeasuredRun:
    """Read one folder; ``same_prompts``: where the lengths of prompts come again and nothing tells what they shared,
    they were the same prompts. Raises InputError naming the file, and the wrong or missing line or key."""
    path = folder / "run.json"
    document = parse_object(read_text(path), str(path))
    served = _served(document, path)
    note = preset_note(served["engine"], served["version"])
    return MeasuredRun(**served, measurement=_measurement(folder, document, served["settings"], note, same_prompts))


def read_measured_pool(path: Path) -> tuple[Pool, str]:
    """The server that a run.json names, and what to know of its preset. Raises InputError as ``read_measured_run``."""
    served = _served(parse_object(read_text(path), str(path)), path)
    pool = _pool(served["model"], served["device"], served["engine"], served["version"], served["settings"])
    return pool, preset_note(served["engine"], served["version"])


def _served(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What served, by the fields of ``MeasuredRun``."""
    engine = dict(_get(document, "engine", dict, path))
    return {
        "model": _get(document, "model", str, path),
        "device": _get(document, "device", str, path),
        "engine": _get(engine, "name", str, path),
        "version": _get(engine, "version", str, path),
        "settings": {
            key: value for key, value in engine.items() if key not in ("name", "version") and value is not None
        },
    }


def _measurement(
    folder: Path, document: Mapping[str, Any], settings: Mapping[str, Any], note: str, same_prompts: bool
) -> Measurement:
    source = folder / str(document.get("requests", "requests.jsonl"))
    columns, recorded, notes = _read_requests(source)
    found = Requests(
        arrival=columns["arrival_s"],
        output_tokens=columns["output_tokens"].astype(np.int64),
        ttft=columns["ttft_s"],
        e2el=columns["e2el_s"],
    )
    check_requests(found, str(source), "ttft_s and e2el_s")
    notes += [*filter(None, [note]), *(f"{source.name}: {doubt}" for doubt in doubts(found))]
    if (said := document.get("num_requests")) is not None and said != len(found.arrival):
        notes.append(f"run.json tells of {said} requests, {source.name} holds {len(found.arrival)}: those are replayed")
    prompts = columns["prompt_tokens"].astype(np.int64)
    caches = bool(settings.get("enable_prefix_caching"))
    alike, unknown_hits, again = _hash_ids(document, recorded, prompts, caches, same_prompts)
    notes += unknown_hits
    name, logged = str(document.get("id", folder.name)), document.get("series")
    return Measurement(
        name=name,
        workload=Workload.from_columns(
            arrival=found.arrival,
            prompt_tokens=prompts,
            output_tokens=found.output_tokens,
            name=name,
            **alike,
        ),
        side=found.side(),
        requests=found,
        series=_read_series(folder / str(logged)) if logged else None,
        client=client_of(str(document.get("clock", ""))),
        notes=tuple(notes),
        prompts_again=again,
    )


def _read_requests(path: Path) -> tuple[dict[str, NDArray[np.float64]], list[Any] | None, list[str]]:
    """The columns of a requests file in order of arrival, the hash ids of its prompts, and what was left out of it."""
    rows, hashes, empty, others = [], [], 0, dict[str, None]()
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            empty += 1
            continue
        entry = parse_object(line, f"{path}:{number}")
        rows.append(_row(entry, f"{path}:{number}"))
        hashes.append(entry.get("hash_ids"))
        others |= dict.fromkeys(name for name in entry if name not in (*COLUMNS, "hash_ids", "itl_s"))
    if not rows:
        raise InputError(f"{path}: no requests")
    known = [row is not None for row in hashes]
    if any(known) and not all(known):
        raise InputError(f"{path}: hash_ids of {sum(known)} of {len(rows)} requests: give those of all, or of none")
    table = np.array(rows, dtype=np.float64)
    order = np.argsort(table[:, 0], kind="stable")
    notes = [f"{path.name}: {empty} empty lines: {len(rows)} requests in {len(rows) + empty} lines"] if empty else []
    if others:
        notes.append(f"{path.name}: not used: {', '.join(others)}")
    columns = {name: table[order, index] for index, name in enumerate(COLUMNS)}
    return columns, [hashes[row] for row in order] if any(known) else None, notes


def _hash_ids(
    document: Mapping[str, Any],
    recorded: list[Any] | None,
    prompts: NDArray[np.int64],
    caches: bool,
    same_prompts: bool,
) -> tuple[dict[str, Any], list[str], int]:
    """What says which prompts of a workload share prefixes: recorded ids, or what an engine's hit rate implies; what is
    not known; and, if that is which of them came again, after how many requests."""
    rate = document.get("prefix_cache_hit_rate")
    if recorded is not None:
        return {"hash_ids": recorded, "hash_block_size": int(document.get("hash_block_size", HASH_BLOCK))}, [], 0
    if rate is not None:
        said = (
            f"which prompts share prefixes is not recorded: as many do as its hit rate of {100 * rate:.0f} % takes"
            if isinstance(rate, int | float)
            else ""
        )
        return {"hash_ids": of_hit_rate(prompts, rate), "hash_block_size": HASH_BLOCK}, [said], 0
    if not caches:
        return {}, [], 0
    lag = repeated_after(prompts)
    if lag and same_prompts:
        ids = {"hash_ids": of_repeats(prompts, lag), "hash_block_size": HASH_BLOCK}
        return ids, [f"prompt lengths come again after {lag} requests: replayed as the same prompts"], 0
    if lag:
        return (
            {},
            [f"prompt lengths come again after {lag} requests: their prompts were probably cached; {WAY_OUT}"],
            lag,
        )
    return {}, [f"prefix caching was on: replayed without hits, the prompts' contents are not recorded; {WAY_OUT}"], 0


def _row(entry: Mapping[str, Any], where: str) -> list[float]:
    for name in COLUMNS:
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
            raise InputError(f"{where}: {name}={value!r}: must be a number ≥ 0")
        if name.endswith("_tokens") and (value != int(value) or value < 1):
            raise InputError(f"{where}: {name}={value!r}: must be an integer ≥ 1")
    if entry["e2el_s"] < entry["ttft_s"]:
        raise InputError(
            f"{where}: e2el_s={entry['e2el_s']}: must be ≥ ttft_s={entry['ttft_s']}; both are seconds from the arrival"
        )
    return [float(entry[name]) for name in COLUMNS]


def _read_series(path: Path) -> Series:
    """The engine's own log over time: JSON lines with t_s, running and waiting."""
    rows = []
    for where, entry in json_lines(path):
        for name in SERIES:
            value = entry.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InputError(f"{where}: {name}={value!r}: must be a number ≥ 0")
        rows.append([float(entry[name]) for name in SERIES])
    if not rows:
        raise InputError(f"{path}: an empty series: leave `series` out of run.json")
    table = np.array(sorted(rows))
    return Series(*(table[:, index] for index in range(len(SERIES))))


def read_text(path: Path) -> str:
    """The text of a file. Raises InputError if it cannot be read."""
    try:
        return text_of(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line of a file stands, and its JSON object; empty lines are passed over.

    Raises InputError for a file that cannot be read, and naming the line for one that is no object.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse_object(line, where)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object of a text. Raises InputError naming ``where``."""
    try:
        found = parse_json(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{where}: must be a JSON object")
    return found


def _get(document: Mapping[str, Any], key: str, kind: type[Any], path: Path) -> Any:
    value = document.get(key)
    if not isinstance(value, kind) or not value:
        raise InputError(f"{path}: {key}={value!r}: must be given as a {'string' if kind is str else 'JSON object'}")
    return value
