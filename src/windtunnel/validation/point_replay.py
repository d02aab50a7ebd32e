"""Measured points replayed: every point simulated, and its means next to those that were measured."""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool, preset
from windtunnel.deployment.versions import preset_note
from windtunnel.errors import InputError
from windtunnel.metrics import request_metrics, time_share, unroll
from windtunnel.perf.tabulate.host import BEFORE_V1_ANSWER
from windtunnel.simulate.run import Requests
from windtunnel.validation.comparison import PLAIN, Options, by_group, points_json, relative_error, summarise
from windtunnel.validation.markdown import per_cent
from windtunnel.validation.measured_points import MEANS, MeasuredPoint


@dataclass(frozen=True)
class Replayed:
    """A point and its simulation."""

    point: MeasuredPoint
    simulated: dict[str, float] = field(default_factory=dict)
    """Metric → seconds."""
    modelled: float = float("nan")
    """Share of the step time that is modelled, not measured."""
    warnings: tuple[str, ...] = ()
    reason: str = ""
    """Why it was not simulated."""

    def error(self, metric: str) -> float:
        """Relative error of a metric that both have, else NaN."""
        return relative_error(self.point.measured.get(metric, float("nan")), self.simulated.get(metric, float("nan")))


def replay(point: MeasuredPoint, options: Options = PLAIN) -> Replayed:
    """Simulate one point; one that cannot be simulated, or never ends, says why."""
    try:
        pool = point.pool()
        run = (_offline(pool, options) if point.offline else options).run(
            Deployment((pool,)), point.workload, point.client
        )
    except InputError as reason:
        return Replayed(point, reason=str(reason))
    if not np.isfinite(run.requests.finish).all():
        return Replayed(point, reason="; ".join(run.manifest["warnings"]) or "some requests never end")
    note = preset_note(point.engine, point.version)
    warnings = (*filter(None, [note]), *run.manifest["warnings"])
    return Replayed(point, means(run.requests), time_share(unroll(run))["modelled"], warnings)


def _offline(pool: Pool, options: Options) -> Options:
    """Without the server around the engine, whose host work the tables hold."""
    host = options.overheads.host
    if not preset(pool.engine.preset).before_v1:
        return options
    alone = replace(host, serial_per_sequence=host.serial_per_sequence - BEFORE_V1_ANSWER)
    return replace(options, overheads=replace(options.overheads, host=alone))


def means(requests: Requests) -> dict[str, float]:
    """The metrics of MEANS, as ``measured_points`` defines them."""
    metrics = request_metrics(requests)
    tokens = float((requests.output_tokens - 1).sum())
    return {
        "latency": float(np.max(requests.finish) - np.min(requests.arrival)),
        "ttft": float(np.mean(metrics.ttft)),
        "tpot": float((metrics.e2el - metrics.ttft).sum()) / tokens if tokens else float("nan"),
        "e2el": float(np.mean(metrics.e2el)),
    }


GROUPINGS: dict[str, Callable[[MeasuredPoint], str]] = {
    "all": lambda _: "all",
    "device and engine": lambda point: f"{point.device}, {point.engine}",
    "model": lambda point: point.model,
    "device, engine and model": lambda point: f"{point.device}, {point.engine}, {point.model}",
}


def groups(results: Sequence[Replayed]) -> list[dict[str, Any]]:
    """Coverage and errors by each grouping; one with a single group is left out."""

    def errors(known: Sequence[Replayed]) -> dict[str, Any]:
        found = {metric: np.array([one.error(metric) for one in known], dtype=float) for metric in MEANS}
        finite = {metric: values[np.isfinite(values)] for metric, values in found.items()}
        return {metric: dict(summarise(values)) for metric, values in finite.items() if len(values)}

    return by_group(results, GROUPINGS, errors)


def row(result: Replayed) -> dict[str, Any]:
    """One point, flat."""
    point = result.point
    found: dict[str, Any] = {
        "id": point.id,
        "model": point.model,
        "device": point.device,
        "engine": point.engine,
        "version": point.version,
        "requests": len(point.workload),
        "tensor_parallel_size": point.settings.get("tensor_parallel_size", 1),
        "modelled": result.modelled,
    }
    for metric in point.measured:
        found[f"{metric}_measured"] = point.measured[metric]
        found[f"{metric}_simulated"] = result.simulated.get(metric, float("nan"))
        found[f"{metric}_error"] = result.error(metric)
    return found | {"warnings": list(result.warnings), "reason": result.reason}


def document(results: Sequence[Replayed]) -> dict[str, Any]:
    """Everything for JSON, latencies in seconds."""
    return points_json(results, groups=groups(results), points=[row(result) for result in results])


def text(results: Sequence[Replayed]) -> str:
    """Coverage, errors by group, warnings, and why points were not simulated."""
    metrics = [metric for metric in MEANS if any(metric in result.point.measured for result in results)]
    head = "".join(f" {metric} median APE | MAPE | bias |" for metric in metrics)
    lines = [f"| | points | simulated |{head}", "|---|---:|---:|" + "---:|" * (3 * len(metrics))]
    for one in groups(results):
        cells = [
            per_cent(one[metric][name] if metric in one else None, name == "bias")
            for metric in metrics
            for name in ("median_ape", "mape", "bias")
        ]
        lines.append(f"| {one['group']} | {one['rows']} | {one['simulated']} | {' | '.join(cells)} |")
    said: dict[str, int] = {}
    for result in results:
        for sentence in result.warnings or ([f"Not simulated: {result.reason}"] if result.reason else []):
            said[sentence] = said.get(sentence, 0) + 1
    notes = [f"{count:,} points: {sentence}." for sentence, count in said.items()]
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)
