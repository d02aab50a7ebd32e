"""Recordings: measured runs of real engines, one folder each with ``run.json`` and ``requests.jsonl``."""

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
from windtunnel.workload.columns import Workload

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2el_s")
SETTINGS = frozenset(field.name for field in fields(Engine)) - {"preset", "kernel_version"}


@dataclass(frozen=True, eq=False)
class Recording:
    """One measured run: what served, what was asked, and how long each request took (seconds)."""

    name: str
    model: str
    device: str
    engine: str
    """Name of the engine, as in the kernel database."""
    version: str
    settings: Mapping[str, Any]
    """vLLM's argument names → values; what was not recorded is absent."""
    clock: str
    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft: NDArray[np.float64]
    e2el: NDArray[np.float64]

    def pool(self) -> Pool:
        """What is simulated: the recorded settings on the preset nearest to the recorded version.

        Prefix caching is not simulated: a run with it is replayed without, which ``notes`` says.

        Raises InputError for what cannot be simulated.
        """
        for name in self.settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        settings = {name: value for name, value in self.settings.items() if name != "enable_prefix_caching"}
        chosen = nearest_preset(self.engine, self.version)
        return Pool(load_model(self.model), device(self.device), Engine(preset=chosen, **settings))

    def notes(self) -> list[str]:
        """What the replay leaves out."""
        if self.settings.get("enable_prefix_caching"):
            return ["prefix caching was on: replayed without, the prompts' contents are not recorded"]
        return []

    def workload(self) -> Workload:
        """The requests as they arrived."""
        return Workload.from_columns(
            arrival=self.arrival, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, name=self.name
        )


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


def find_recordings(folder: Path) -> list[Path]:
    """Folders of recordings below ``folder``, or itself. Raises InputError when there are none."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise InputError(f"{str(folder)!r}: no recordings: give a folder of folders with run.json and requests.jsonl")
    return found


def read_recording(folder: Path) -> Recording:
    """Read one folder. Raises InputError naming the file, and the line or key that is wrong or missing."""
    path = folder / "run.json"
    document = _parse(_text(path), str(path))
    engine = dict(_get(document, "engine", dict, path))
    name, version = _get(engine, "name", str, path), _get(engine, "version", str, path)
    settings = {key: value for key, value in engine.items() if key not in ("name", "version") and value is not None}
    columns = _read_requests(folder / str(document.get("requests", "requests.jsonl")))
    return Recording(
        name=str(document.get("id", folder.name)),
        model=_get(document, "model", str, path),
        device=_get(document, "device", str, path),
        engine=name,
        version=version,
        settings=settings,
        clock=str(document.get("clock", "")),
        arrival=columns["arrival_s"],
        prompt_tokens=columns["prompt_tokens"].astype(np.int64),
        output_tokens=columns["output_tokens"].astype(np.int64),
        ttft=columns["ttft_s"],
        e2el=columns["e2el_s"],
    )


def _read_requests(path: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of a requests file, in order of arrival."""
    rows = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            rows.append(_row(line, f"{path}:{number}"))
    if not rows:
        raise InputError(f"{path}: no requests")
    table = np.array(rows, dtype=np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return {name: table[:, index] for index, name in enumerate(COLUMNS)}


def _row(line: str, where: str) -> list[float]:
    entry = _parse(line, where)
    for name in COLUMNS:
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
            raise InputError(f"{where}: {name}={value!r}: must be a number ≥ 0")
        if name.endswith("_tokens") and (value != int(value) or value < 1):
            raise InputError(f"{where}: {name}={value!r}: must be an integer ≥ 1")
    if entry["e2el_s"] < entry["ttft_s"]:
        raise InputError(f"{where}: e2el_s={entry['e2el_s']}: must be ≥ ttft_s={entry['ttft_s']}")
    return [float(entry[name]) for name in COLUMNS]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from error


def _parse(text: str, where: str) -> dict[str, Any]:
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
