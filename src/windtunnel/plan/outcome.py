"""Outcome: the results of one deployment at one rate, as plain numbers that a database can keep."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics import (
    LATENCIES,
    Distribution,
    Growth,
    Steps,
    Window,
    clean,
    good_requests,
    output_tokens,
    queue_growth,
    request_metrics,
    token_gaps,
    trimmed_window,
    unroll,
    usage,
    verdicts,
    window_of,
)
from windtunnel.plan.question import Question
from windtunnel.simulate.run import FINISHED, Requests, Run
from windtunnel.workload.graph import waiting_rows

GROWTH, TREND, WAIT_SHARE = 0.005, 0.6, 0.1
"""See ``queue_grows``."""
INFINITE = math.inf
LATER = ("good_rate", "good_share", "gpus")
"""Numbers that outcomes in older stores lack."""
TIGHTEST = "tightest limit"
"""Margin of requests' tightest limits, where a request has several."""


class Margin(NamedTuple):
    """One limit and the value of the run."""

    name: str
    """``ttft_p99``, ``ttft p90`` for a limit of each request at the attainment, ``queue growth``."""
    value: float
    limit: float

    @property
    def stretch(self) -> float:
        """Value / limit: ≤ 1 where the limit holds."""
        return self.value / self.limit


@dataclass(frozen=True)
class Outcome:
    """Seconds, shares and rates over the measured window; see ``metrics.measured_window``."""

    rate: float
    met: bool
    """Every limit holds and the queue does not grow."""
    stopped: bool
    """Stopped early: the limits could not hold any more. All but rate and met then describe the beginning only."""
    stretch: float
    """The least factor by which all limits must be multiplied to hold: ≤ 1 if they do."""
    margins: tuple[Margin, ...]
    attainment: float
    latencies: Mapping[str, Mapping[str, float]]
    """ttft, tpot, itl, e2el, queue → mean, p50, p90, p95, p99."""
    output_throughput: float
    energy_per_token: float
    """GPU energy per output token (J)."""
    busy: float
    kv: float
    mfu: float
    mbu: float
    preemptions: int
    good_rate: float = math.nan
    """Output tokens per second of all good requests, warm-up included, over the time of the arrivals; of a run that was
    stopped, what it could reach at most."""
    good_share: float = math.nan
    """Share of all requests that are good; as ``good_rate``."""
    gpus: float = math.nan
    """GPUs that are paid where an autoscaler starts and stops replicas: their mean over the run."""

    def binding(self) -> Margin | None:
        """The limit that is nearest to being broken, or broken most."""
        known = [margin for margin in self.margins if not math.isnan(margin.value)]
        return max(known, key=lambda margin: margin.stretch, default=None)

    def share_of(self, gpus: int) -> float:
        """The share of a deployment's GPUs that is paid; 1 unless an autoscaler stops some."""
        return 1.0 if math.isnan(self.gpus) else self.gpus / gpus

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has neither infinity nor NaN: both are null."""
        document: dict[str, Any] = clean({**asdict(self), "margins": [list(margin) for margin in self.margins]})
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Outcome":
        """Read the document of ``to_json``. Raises KeyError or TypeError for anything else."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name not in LATER}
        values |= {name: document.get(name) for name in LATER}
        for name in ("attainment", "output_throughput", "energy_per_token", "busy", "kv", "mfu", "mbu", *LATER):
            values[name] = math.nan if values[name] is None else float(values[name])
        for name in ("rate", "stretch"):
            values[name] = INFINITE if values[name] is None else float(values[name])
        values["latencies"] = {
            name: {key: math.nan if value is None else value for key, value in statistics.items()}
            for name, statistics in values["latencies"].items()
        }
        values["margins"] = tuple(
            Margin(name, INFINITE if value is None else value, limit) for name, value, limit in values["margins"]
        )
        return cls(**values)


def only_good(rate: float, good_rate: float, good_share: float, *, stopped: bool = False) -> Outcome:
    """What is kept of a run that is not good enough: its good tokens, or how many they can be at most."""
    nothing = dict.fromkeys(
        ("attainment", "output_throughput", "energy_per_token", "busy", "kv", "mfu", "mbu"), math.nan
    )
    return Outcome(
        rate=rate, met=False, stopped=stopped, stretch=INFINITE, margins=(), latencies={}, preemptions=0,
        good_rate=good_rate, good_share=good_share, **nothing,
    )  # fmt: skip


def measure(run: Run, question: Question, rate: float, *, stopped: bool = False) -> Outcome:
    """Measure a run at ``rate``, without warm-up and drain: requests that arrive after the first tenth of the arrival
    span; in lanes, until the last session takes its place, after which fewer are in play; of AgentX, its window."""
    steps = unroll(run)
    arrival = run.requests.arrival
    if question.in_lanes and question.replay is None:
        arrival = arrival[~waiting_rows(question.at(rate).waits)]
    trimmed = trimmed_window(arrival) if question.replay is None else None
    window = trimmed or window_of(run, steps.ends)
    measured = window.holds(run.requests.arrival)
    latencies = _latencies(steps, window, measured)
    good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, question.slo)
    margins = _margins(run.requests, measured, latencies, question)
    stretches = [margin.stretch for margin in margins]
    undefined = not measured.any() or any(math.isnan(stretch) for stretch in stretches)
    stretch = INFINITE if undefined else max(stretches, default=0.0)
    growth = None if question.in_lanes else queue_growth(run.requests)
    growing = queue_grows(growth, run.requests)
    used, tokens = usage(steps, window), output_tokens(steps, window)
    kept = run.requests.status == FINISHED if good is None else good
    span = float(np.ptp(run.requests.arrival)) if len(kept) else 0.0
    return Outcome(
        rate=rate,
        met=stretch <= 1.0 and not growing and not stopped,
        stopped=stopped,
        stretch=stretch,
        margins=(*margins, *([Margin("queue growth", growth.slope, GROWTH)] if growth and growing else [])),
        attainment=float(good[measured].mean()) if good is not None and measured.any() else math.nan,
        latencies={name: dict(values.statistics()) for name, values in latencies.items()},
        output_throughput=tokens / window.seconds if window.seconds > 0 else math.nan,
        energy_per_token=3600 * used.energy_wh / tokens if tokens > 0 else math.nan,
        busy=used.busy,
        kv=used.kv,
        mfu=used.mfu,
        mbu=used.mbu,
        preemptions=int(run.requests.preemptions[measured].sum()),
        good_rate=float(run.requests.output_tokens[kept].sum()) / span if span > 0 else math.nan,
        good_share=float(kept.mean()) if len(kept) else math.nan,
    )


def _latencies(steps: Steps, window: Window, measured: NDArray[np.bool_]) -> dict[str, Distribution]:
    metrics = request_metrics(steps.run.requests)
    found = {name: Distribution(getattr(metrics, name)[measured]) for name in LATENCIES if name != "itl"}
    return {name: token_gaps(steps, window) if name == "itl" else found[name] for name in LATENCIES}


def queue_grows(growth: Growth | None, requests: Requests) -> bool:
    """Whether requests come faster than they are served.

    The median queueing delay of ten groups of requests in order of arrival rises by more than 0.005 s a second of
    arrivals (demand is more than 0.5 % above what is served), at a Kendall trend of at least 0.6, and in the last
    group is more than a tenth of a request's time in service. Fewer than 50 requests are not judged.
    """
    if growth is None:
        return False
    service = requests.finish - requests.scheduled
    least = WAIT_SHARE * float(np.nanmedian(service)) if np.isfinite(service).any() else 0.0
    return growth.slope > GROWTH and growth.trend >= TREND and growth.delay > least


def _margins(
    requests: Requests, measured: NDArray[np.bool_], latencies: Mapping[str, Distribution], question: Question
) -> list[Margin]:
    """Each limit with the value that it is compared with."""
    slo, share = question.slo, question.attainment
    found = [Margin(verdict.name, verdict.value, verdict.limit) for verdict in verdicts(latencies, slo)]
    if not slo.limits:
        return found
    stretches = request_stretches(requests, slo.limits)
    for name, limit in slo.limits.items():
        worst = at_share(stretches[name][measured], share)
        found.append(Margin(f"{name} p{100 * share:g}", worst * limit, limit))
    if len(slo.limits) > 1:
        together = np.max([values[measured] for values in stretches.values()], axis=0)
        found.append(Margin(TIGHTEST, at_share(together, share), 1.0))
    return found


def request_stretches(requests: Requests, limits: Mapping[str, float]) -> dict[str, NDArray[np.float64]]:
    """For each limit every request's latency / limit; infinite for a request that did not finish, 0 for what does not
    exist (the tpot of a single token)."""
    metrics = request_metrics(requests)
    finished = requests.status == FINISHED
    found = {}
    for name, limit in limits.items():
        values = getattr(metrics, name) / limit
        found[name] = np.where(finished, np.where(np.isnan(values), 0.0, values), INFINITE)
    return found


def at_share(values: NDArray[np.float64], share: float) -> float:
    """The smallest v such that at least this share of the values is ≤ v; NaN without values."""
    if len(values) == 0:
        return math.nan
    return float(np.partition(values, needed(len(values), share) - 1)[needed(len(values), share) - 1])


def needed(count: int, share: float) -> int:
    """How many of ``count`` are at least this share: the smallest whole k ≥ 1 with k / count ≥ share."""
    k = max(math.floor(share * count), 1)
    return k if k / count >= share else k + 1
