"""Streamed: the figures of a run whose requests and steps are not kept, added up piece by piece."""

from collections.abc import Sequence
from dataclasses import field, fields
from math import fsum, inf
from typing import Any, Self

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.metrics.digest import ERROR, Digest
from windtunnel.metrics.gaps import TOLERANCE, Earlier, Floats, Integers, gaps_of_groups
from windtunnel.metrics.requests import Verdict, good_requests, request_metrics, verdicts
from windtunnel.metrics.steps import unroll
from windtunnel.metrics.summary import LATENCIES, SCHEMA_VERSION, clean
from windtunnel.simulate.run import FINISHED, REJECTED, Run

NAN = float("nan")


@dataclass(eq=False)
class Totals:
    """Of some replicas, or of all: counts are exact, and so are sums but for rounding."""

    total: int = 0
    finished: int = 0
    rejected: int = 0
    good: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Of the requests that were admitted."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Of those that finished."""
    busy_seconds: float = 0.0
    first: float = inf
    """First arrival."""
    last: float = -inf
    """Last event."""
    latencies: dict[str, Digest] = field(
        default_factory=lambda: {name: Digest() for name in (*LATENCIES, "normalised")}
    )

    @classmethod
    def of(cls, parts: Sequence[Self]) -> Self:
        """The totals of all these, whatever their order."""
        counts = [entry.name for entry in fields(cls) if entry.type in (int, "int")]
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            busy_seconds=fsum(part.busy_seconds for part in parts),
            first=min(part.first for part in parts),
            last=max(part.last for part in parts),
            latencies={name: Digest.of([part.latencies[name] for part in parts]) for name in parts[0].latencies},
        )


class Totaling:
    """Adds pieces of a run to its totals."""

    def __init__(self, slo: SLO | None = None) -> None:
        self.totals, self.slo = Totals(), slo
        self._earlier = Earlier()

    def add(self, run: Run, lane: Integers, time: Floats, finish: Floats) -> None:
        """A piece: its requests are those that have ended, its steps all that are new.

        ``lane``, ``time``, ``finish``: of the prefills that have ended, after which requests may decode.
        """
        totals, steps, requests = self.totals, unroll(run), run.requests
        metrics, done = request_metrics(requests), requests.status == FINISHED
        good = good_requests(metrics, done, self.slo)
        admitted = ~np.isnan(requests.scheduled)
        totals.total += len(done)
        totals.finished += int(done.sum())
        totals.rejected += int((requests.status == REJECTED).sum())
        totals.good += 0 if good is None else int(good.sum())
        totals.preemptions += int(requests.preemptions.sum())
        totals.prompt_tokens += int(requests.prompt_tokens[admitted].sum())
        totals.cached_tokens += int(requests.cached_tokens[admitted].sum())
        totals.output_tokens += int(requests.output_tokens[done].sum())
        for name, digest in totals.latencies.items():
            if name != "itl":
                digest.add(getattr(metrics, name))
        decodes = time + TOLERANCE < finish
        gaps, counts, _, self._earlier = gaps_of_groups(steps, lane[decodes], time[decodes], self._earlier)
        totals.latencies["itl"].add(gaps, counts)
        totals.latencies["itl"].add(run.stalls.resumed_token - run.stalls.last_token)
        totals.busy_seconds += steps.busy_seconds
        totals.first = min(totals.first, float(requests.arrival.min(initial=inf)))
        ends = (requests.arrival, requests.finish[done], steps.ends)
        totals.last = max(totals.last, *(float(times.max(initial=-inf)) for times in ends))


@dataclass(frozen=True, eq=False)
class StreamSummary:
    """The figures of a streamed run. Seconds, tokens, requests; NaN where a figure is undefined."""

    totals: Totals
    gpus: int
    lanes: int
    price: float
    """USD per hour of all GPUs; NaN where it is not known."""
    slo: SLO | None
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first arrival to the last event."""
        return max(self.totals.last - self.totals.first, 0.0)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Each percentile limit with the value of the run, which is within ``digest.ERROR``."""
        return verdicts(self.totals.latencies, self.slo)

    @property
    def meets_slo(self) -> bool:
        """Whether every percentile limit holds; true without any."""
        return all(verdict.met for verdict in self.verdicts)

    @property
    def attainment(self) -> float:
        """Share of all requests that finished and met every limit; NaN without any."""
        limited = self.slo is not None and self.slo.limits
        return self.totals.good / self.totals.total if limited and self.totals.total else NAN

    def per_second(self, amount: float) -> float:
        """An amount of the whole run, per second of it."""
        return amount / self.seconds if self.seconds > 0 else NAN

    def to_json(self) -> dict[str, Any]:
        """What ``summary_json`` has, as far as it is known, and ``percentile_error``."""
        totals, hours = self.totals, self.seconds / 3600
        limited = self.slo is not None and self.slo.limits
        cost = self.price * hours
        tokens = totals.output_tokens
        document: dict[str, Any] = clean(
            {
                "schema_version": SCHEMA_VERSION,
                "requests": {
                    "total": totals.total,
                    "finished": totals.finished,
                    "rejected": totals.rejected,
                    "aborted": 0,
                },
                **{name: dict(totals.latencies[name].statistics()) for name in LATENCIES},
                "percentile_error": ERROR,
                "request_throughput": self.per_second(totals.finished),
                "output_throughput": self.per_second(tokens),
                "goodput": self.per_second(totals.good) if limited else NAN,
                "attainment": self.attainment,
                "cost_usd": cost,
                "cost_per_hour": float(f"{self.price:.12g}"),
                "cost_per_million_output_tokens": cost * 1e6 / tokens if tokens else NAN,
                "max_wait": totals.latencies["queue"].max,
                "normalised_latency": totals.latencies["normalised"].mean,
                "utilisation": {"busy": self.per_second(totals.busy_seconds / self.lanes)},
                "preemptions": totals.preemptions,
                "prefix_cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else NAN,
                "prompt_tokens": totals.prompt_tokens,
                "cached_tokens": totals.cached_tokens,
                "warnings": list(self.warnings),
            }
        )
        return document
