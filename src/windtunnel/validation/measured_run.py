"""Measured runs of real engines, one folder each with ``run.json`` and ``requests.jsonl``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import PRESETS, Engine, Pool
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.database import version_key
from windtunnel.validation.measurement import Measurement, Requests, Series, check_requests, doubts
from windtunnel.workload.columns import Workload

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2el_s")
SERIES = ("t_s", "running", "waiting")
SETTINGS = frozenset(field.name for field in fields(Engine)) - {"preset", "kernel_version"}


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

        A run with prefix caching is replayed without it, since the contents of the prompts are not recorded; the
        measurement's notes say so.

        Raises InputError for what cannot be simulated.
        """
        for name in self.settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        settings = {**self.settings, "enable_prefix_caching": False}
        chosen = nearest_preset(self.engine, self.version)
        return Pool(load_model(self.model), device(self.device), Engine(preset=chosen, **settings))


def nearest_preset(engine: str, version: str) -> str:
    """The preset of this engine whose version is the newest that is not newer, or else the oldest.

    Raises InputError when no version of the engine is simulated.
    """
    by_version = {version_key(preset.version): name for name, preset in PRESETS.items() if preset.backend == engine}
    if not by_version:
        known = ", ".join(sorted({preset.backend for preset in PRESETS.values()}))
        raise InputError(f"engine {engine!r} is not simulated: use one of {known}")
    older = [key for key in by_version if key <= version_key(version)]
    return by_version[max(older) if older else min(by_version)]


def find_measured_runs(folder: Path) -> list[Path]:
    """Folders of measured runs below ``folder``, or itself. Raises InputError when there are none."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise InputError(f"{str(folder)!r}: no measured runs: give a folder of folders with run.json, requests.jsonl")
    return found


def read_measured_run(folder: Path) -> MeasuredRun:
    """Read one folder. Raises InputError naming the file, and the wrong or missing line or key."""
    path = folder / "run.json"
    document = parse_object(read_text(path), str(path))
    engine = dict(_get(document, "engine", dict, path))
    name, version = _get(engine, "name", str, path), _get(engine, "version", str, path)
    settings = {key: value for key, value in engine.items() if key not in ("name", "version") and value is not None}
    return MeasuredRun(
        model=_get(document, "model", str, path),
        device=_get(document, "device", str, path),
        engine=name,
        version=version,
        settings=settings,
        measurement=_measurement(folder, document, settings),
    )


def _measurement(folder: Path, document: Mapping[str, Any], settings: Mapping[str, Any]) -> Measurement:
    source = folder / str(document.get("requests", "requests.jsonl"))
    columns, notes = _read_requests(source)
    found = Requests(
        arrival=columns["arrival_s"],
        output_tokens=columns["output_tokens"].astype(np.int64),
        ttft=columns["ttft_s"],
        e2el=columns["e2el_s"],
    )
    check_requests(found, str(source), "ttft_s and e2el_s")
    notes += [f"{source.name}: {doubt}" for doubt in doubts(found)]
    if (said := document.get("num_requests")) is not None and said != len(found.arrival):
        notes.append(f"run.json tells of {said} requests, {source.name} holds {len(found.arrival)}: those are replayed")
    if settings.get("enable_prefix_caching"):
        notes.append("prefix caching was on: replayed without, the prompts' contents are not recorded")
    name, logged = str(document.get("id", folder.name)), document.get("series")
    return Measurement(
        name=name,
        workload=Workload.from_columns(
            arrival=found.arrival,
            prompt_tokens=columns["prompt_tokens"].astype(np.int64),
            output_tokens=found.output_tokens,
            name=name,
        ),
        side=found.side(),
        requests=found,
        series=_read_series(folder / str(logged)) if logged else None,
        client_clock=str(document.get("clock", "")).startswith("client"),
        notes=tuple(notes),
    )


def _read_requests(path: Path) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """The columns of a requests file, in order of arrival, and what was left out of it."""
    rows, empty, others = [], 0, dict[str, None]()
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            empty += 1
            continue
        entry = parse_object(line, f"{path}:{number}")
        rows.append(_row(entry, f"{path}:{number}"))
        others |= dict.fromkeys(name for name in entry if name not in COLUMNS)
    if not rows:
        raise InputError(f"{path}: no requests")
    table = np.array(rows, dtype=np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    notes = [f"{path.name}: {empty} empty lines: {len(rows)} requests in {len(rows) + empty} lines"] if empty else []
    if others:
        notes.append(f"{path.name}: not used: {', '.join(others)}")
    return {name: table[:, index] for index, name in enumerate(COLUMNS)}, notes


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
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        entry = parse_object(line, f"{path}:{number}")
        for name in SERIES:
            value = entry.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InputError(f"{path}:{number}: {name}={value!r}: must be a number ≥ 0")
        rows.append([float(entry[name]) for name in SERIES])
    if not rows:
        raise InputError(f"{path}: an empty series: leave `series` out of run.json")
    table = np.array(sorted(rows))
    return Series(*(table[:, index] for index in range(len(SERIES))))


def read_text(path: Path) -> str:
    """The text of a file. Raises InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object of a text. Raises InputError naming ``where``."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(found, dict):
        raise InputError(f"{where}: must be a JSON object")
    return found


def _get(document: Mapping[str, Any], key: str, kind: type[Any], path: Path) -> Any:
    value = document.get(key)
    if not isinstance(value, kind) or not value:
        raise InputError(f"{path}: {key}={value!r}: must be given as a {'string' if kind is str else 'JSON object'}")
    return value
