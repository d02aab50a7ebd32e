"""Measured points: JSON lines with one measurement of a server each, in either of two forms.

- **A batch**: ``batch`` requests of ``input_tokens`` and ``output_tokens``, submitted together to ``framework`` on
  ``device``; ``latency_s`` until the last token.
- **A run**: ``requests`` names a file of requests (``arrival_s``, ``prompt_tokens``, ``output_tokens``) next to this
  one, ``engine`` what served them as in ``run.json``; means over the run as ``ttft_mean_s``, ``e2el_mean_s``, and
  ``tpot_mean_s``: all time after first tokens over all tokens after the first. ``"lengths": "equal"`` where requests
  of one odd length were equal, and are not means (``point_replay``).

Both are ``../shared/truth``'s (static_batches and apex-llama-3.1-70b), whose pages describe every key. Keys that are
not named here are kept for grouping only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.versions import nearest_preset, version_key
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.simulate.overheads import client_of
from windtunnel.validation.measured_run import SETTINGS, json_lines
from windtunnel.workload.columns import Workload

UNSTATED = {"vllm": "0.6.0", "trtllm": "0.11.0", "sglang": "0.5.0"}
"""Version of an engine whose point does not state one: those of the results of September 2024."""

MEANS = {"latency": "latency_s", "ttft": "ttft_mean_s", "tpot": "tpot_mean_s", "e2el": "e2el_mean_s"}
"""Metric → key of a point."""

FLASHINFER = ("0.8", "0.11.1")
"""First release of vLLM whose image samples with FlashInfer, and the first after it whose image does not; a server is
taken for such an image unless its ``engine`` says otherwise (``flashinfer_sampler``)."""


@dataclass(frozen=True)
class MeasuredPoint:
    """One measurement: the server, its requests and their latencies (seconds)."""

    id: str
    model: str
    device: str
    engine: str
    """Name of the engine, as in the kernel database."""
    version: str
    settings: Mapping[str, Any]
    """vLLM's argument names → values; what was not recorded is absent."""
    workload: Workload
    measured: Mapping[str, float]
    """Metric → seconds, of MEANS."""
    client: str = ""
    """Whose clock it is, as of ``Measurement``."""
    offline: bool = False
    """No server: a batch was handed to the engine."""
    equal_lengths: bool = False
    """Requests were as long as they all are in the file: not the mean of what they were."""

    def pool(self) -> Pool:
        """What is simulated. Raises InputError for what cannot be."""
        for name in self.settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        settings = dict(self.settings)
        first, last = map(version_key, FLASHINFER)
        if self.engine == "vllm" and first <= version_key(self.version) < last:
            settings.setdefault("flashinfer_sampler", True)
        engine = Engine(preset=nearest_preset(self.engine, self.version), **settings)
        return Pool(load_model(self.model), device(self.device), engine)


def read_measured_points(path: Path) -> list[MeasuredPoint]:
    """Every point of a file. Raises InputError naming the line and key that is wrong or missing."""
    points = [
        _run(entry, path, where) if "requests" in entry else _batch(entry, where) for where, entry in json_lines(path)
    ]
    if not points:
        raise InputError(f"{path}: no points")
    return points


def _batch(entry: Mapping[str, Any], where: str) -> MeasuredPoint:
    batch, prompt, output = (_count(entry, name, where) for name in ("batch", "input_tokens", "output_tokens"))
    engine = _text(entry, "framework", where)
    settings = {"tensor_parallel_size": _count(entry, "tensor_parallel_size", where)}
    if entry.get("dtype"):
        settings["dtype"] = entry["dtype"]
    latency = _seconds(entry, where)
    if "latency" not in latency:
        raise InputError(f"{where}: latency_s={entry.get('latency_s')!r}: must be a number of seconds > 0")
    model, on = _text(entry, "model", where), _text(entry, "device", where)
    shape = f"b{batch}_{prompt}x{output}"
    return MeasuredPoint(
        id=str(entry.get("id") or f"{on}_{engine}_{model.split('/')[-1]}_{shape}_tp{settings['tensor_parallel_size']}"),
        model=model,
        device=on,
        engine=engine,
        version=str(entry.get("framework_version") or UNSTATED.get(engine, "0")),
        settings=settings,
        workload=Workload.from_columns(
            arrival=np.zeros(batch), prompt_tokens=np.full(batch, prompt), output_tokens=np.full(batch, output)
        ),
        measured=latency,
        offline=True,
    )


def _run(entry: Mapping[str, Any], path: Path, where: str) -> MeasuredPoint:
    engine = entry.get("engine")
    if not isinstance(engine, dict):
        raise InputError(f"{where}: engine={engine!r}: must be a JSON object with name, version and settings")
    name, version = _text(engine, "name", where), str(engine.get("version") or "")
    settings = {key: value for key, value in engine.items() if key not in ("name", "version") and value is not None}
    measured = _seconds(entry, where)
    if not measured:
        raise InputError(f"{where}: no means: give one of {', '.join(MEANS.values())}")
    source = path.parent / _text(entry, "requests", where)
    return MeasuredPoint(
        id=str(entry.get("id", source.stem)),
        model=_text(entry, "model", where),
        device=_text(entry, "device", where),
        engine=name,
        version=version or UNSTATED.get(name, "0"),
        settings=settings,
        workload=_requests(source),
        measured=measured,
        client=client_of(str(entry.get("clock", ""))),
        equal_lengths=_equal(entry, where),
    )


def _equal(entry: Mapping[str, Any], where: str) -> bool:
    said = entry.get("lengths")
    if said not in (None, "equal"):
        raise InputError(f'{where}: lengths={said!r}: must be "equal", or left out')
    return said is not None


def _requests(path: Path) -> Workload:
    rows = []
    for where, entry in json_lines(path):
        arrival = entry.get("arrival_s")
        if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < float("inf"):
            raise InputError(f"{where}: arrival_s={arrival!r}: must be a number ≥ 0")
        rows.append((float(arrival), *(_count(entry, key, where) for key in ("prompt_tokens", "output_tokens"))))
    if not rows:
        raise InputError(f"{path}: no requests")
    arrivals, prompts, outputs = zip(*rows, strict=True)
    return Workload.from_columns(
        arrival=np.array(arrivals), prompt_tokens=prompts, output_tokens=outputs, name=path.stem, sort=True
    )


def _seconds(entry: Mapping[str, Any], where: str) -> dict[str, float]:
    found = {}
    for metric, key in MEANS.items():
        value = entry.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{where}: {key}={value!r}: must be a number of seconds > 0")
        found[metric] = float(value)
    return found


def _count(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}: {key}={value!r}: must be an integer ≥ 1")
    return value


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {key}={value!r}: must be given as text")
    return value
