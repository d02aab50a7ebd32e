"""Measured points replayed: every point simulated, and its means next to those that were measured.

A file may know the mean of all lengths alone, and have it for every request. Requests that are all as long as the mean
are in flight together, and a server that is nearly full is predicted saturated: their lengths are drawn instead, DRAWS
times, as the built-in workload ``sharegpt`` draws them.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Lognormal

DRAWS = 3
"""Times that the lengths of a point are drawn; its latencies are means over all."""
SIGMA = 1.0
"""Of the logarithm of lengths, as assumed for ``sharegpt``."""
LONGEST = 1024
"""Tokens of the longest prompt and answer: what vLLM's benchmark keeps of ShareGPT has at most as many in a prompt."""
MANY = 50
"""Requests of which some would differ."""
ROUND = (8, 10)
"""Lengths that are asked for are multiples of one of these."""


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
    drawn, found = of_means(point), list[dict[str, float]]()
    try:
        pool = point.pool()
        chosen = _offline(pool, options) if point.offline else options
        for workload in [with_lengths(point.workload, draw) for draw in range(DRAWS)] if drawn else [point.workload]:
            run = chosen.run(Deployment((pool,)), workload, point.client)
            if not np.isfinite(run.requests.finish).all():
                return Replayed(point, reason="; ".join(run.manifest["warnings"]) or "some requests never end")
            found.append(means(run.requests, each=drawn))
    except InputError as reason:
        return Replayed(point, reason=str(reason))
    notes = filter(None, [preset_note(point.engine, point.version), DRAWN if drawn else None])
    simulated = {metric: fmean(one[metric] for one in found) for metric in MEANS}
    return Replayed(point, simulated, time_share(unroll(run))["modelled"], (*notes, *run.manifest["warnings"]))


DRAWN = (
    "all requests are equally long, no round number: taken for means, around which lengths are drawn "
    '("lengths": "equal" in a point keeps them)'
)


def of_means(point: MeasuredPoint) -> bool:
    """Whether the lengths of a point's requests are means: many that came one by one, all equal, of lengths that nobody
    asks for."""
    load = point.workload
    if point.equal_lengths or point.offline or len(load) < MANY or float(np.ptp(load.arrival)) == 0.0:
        return False
    lengths = (load.prompt_tokens, load.output_tokens)
    equal = all(int(np.ptp(tokens)) == 0 for tokens in lengths)
    return equal and not any(all(int(tokens[0]) % one == 0 for tokens in lengths) for one in ROUND)


def with_lengths(load: Workload, draw: int) -> Workload:
    """The load with other lengths of the same means."""
    random = np.random.default_rng(draw)
    prompts, answers = (
        _around(float(np.mean(tokens)), len(load), random) for tokens in (load.prompt_tokens, load.output_tokens)
    )
    return Workload.from_columns(arrival=load.arrival, prompt_tokens=prompts, output_tokens=answers, name=load.name)


def _around(tokens: float, requests: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Lengths with this mean of tokens."""
    drawn = Lognormal(tokens, SIGMA, LONGEST).draw(requests, random)
    scaled: NDArray[np.int64] = np.maximum(np.rint(drawn * (tokens / drawn.mean())), 2).astype(np.int64)
    return scaled


def _offline(pool: Pool, options: Options) -> Options:
    """Without the server around the engine, whose host work the tables hold."""
    host = options.overheads.host
    if not preset(pool.engine.preset).before_v1:
        return options
    alone = replace(host, serial_per_sequence=host.serial_per_sequence - BEFORE_V1_ANSWER)
    return replace(options, overheads=replace(options.overheads, host=alone))


def means(requests: Requests, each: bool = False) -> dict[str, float]:
    """The metrics of MEANS, as ``measured_points`` defines them; ``each``: with the mean of all requests' own time per
    token, as vLLM's benchmark has it, which is the same where all are equally long."""
    metrics = request_metrics(requests)
    tokens = float((requests.output_tokens - 1).sum())
    weighed = float((metrics.e2el - metrics.ttft).sum()) / tokens if tokens else float("nan")
    return {
        "latency": float(np.max(requests.finish) - np.min(requests.arrival)),
        "ttft": float(np.mean(metrics.ttft)),
        "tpot": float(np.mean(metrics.tpot)) if each else weighed,
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
