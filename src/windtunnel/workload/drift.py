"""What has changed between the load that was planned for and the one that is there."""

import math
from dataclasses import replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.workload.columns import Workload
from windtunnel.workload.describe import rate_cv

CERTAIN = 4.0
"""Standard errors: by chance a difference is as large once in 16,000 times."""
RELEVANT = 0.1
"""Smaller relative changes are not told, however certain."""
FEWEST = 20
"""Requests of which something can be said."""


@dataclass(frozen=True)
class Fit:
    """A load in a few numbers; None where one is not known."""

    requests: int
    seconds: float
    prompt_mean: float
    prompt_sd: float
    output_mean: float
    output_sd: float
    gap_cv: float | None = None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson."""
    sharing: float | None = None
    """Share of prompt tokens in blocks that an earlier prompt had as well."""
    rate_cv: float = 0.0
    """How much the rate varies between windows beyond chance, relative to its mean."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds if self.seconds > 0 else math.inf


@dataclass(frozen=True)
class Change:
    """What is no longer as planned."""

    what: str
    planned: float
    seen: float

    def __str__(self) -> str:
        ratio = f" ({100 * (self.seen / self.planned - 1):+.0f} %)" if self.planned > 0 else ""
        return f"{self.what}: {self.seen:.3g}, planned {self.planned:.3g}{ratio}"


def fit(workload: Workload, window: float | None = None) -> Fit:
    """The numbers of a load, whose rate may vary between windows of this many seconds.

    Raises InputError for fewer requests than anything can be said of.
    """
    arrival = np.sort(workload.arrival[~np.isnan(workload.arrival)])
    if len(arrival) < FEWEST:
        raise InputError(f"{len(arrival)} requests: at least {FEWEST} are needed to see a drift: widen the window")
    gaps = np.diff(arrival)
    varies = rate_cv(arrival, window) if window else math.nan
    return Fit(
        requests=len(gaps),  # of which the first arrival begins the first
        seconds=float(arrival[-1] - arrival[0]),
        prompt_mean=float(workload.prompt_tokens.mean()),
        prompt_sd=float(workload.prompt_tokens.std(ddof=1)),
        output_mean=float(workload.output_tokens.mean()),
        output_sd=float(workload.output_tokens.std(ddof=1)),
        gap_cv=float(gaps.std(ddof=1) / gaps.mean()) if gaps.mean() > 0 else None,
        sharing=sharing(workload, len(workload)),
        rate_cv=0.0 if math.isnan(varies) else varies,
    )


def sharing(workload: Workload, count: int) -> float | None:
    """Share of the first ``count`` prompts' tokens in blocks that an earlier one of them had; None: not known.

    The longer one looks, the more are found: only equal numbers of requests can be compared.
    """
    if workload.hash_ids is None:
        return None
    offsets, values = workload.hash_ids
    count = min(count, len(workload))
    found = values[: offsets[count]]
    repeated = len(found) - len(np.unique(found))
    return float(repeated * workload.hash_block_size / workload.prompt_tokens[:count].sum())


def drift(planned: Fit, seen: Fit) -> list[Change]:
    """What has changed beyond doubt, and by more than RELEVANT."""
    changes = []
    if math.isfinite(planned.rate):
        # a count of renewals varies as cv² times its mean; a plan's own arrivals are no more certain than those seen
        cv = max(planned.gap_cv or 1.0, seen.gap_cv or 1.0)
        counted = [one.rate / math.sqrt(one.requests) for one in (planned, seen)]
        error = math.hypot(cv * counted[0], cv * counted[1], planned.rate_cv * planned.rate)
        changes += _changed("rate", planned.rate, seen.rate, error)
    for what in ("prompt", "output"):
        of_planned, of_seen = getattr(planned, f"{what}_sd"), getattr(seen, f"{what}_sd")
        error = math.hypot(of_planned / math.sqrt(planned.requests), of_seen / math.sqrt(seen.requests))
        means = getattr(planned, f"{what}_mean"), getattr(seen, f"{what}_mean")
        changes += _changed(f"{what}_tokens", *means, error)
    if planned.gap_cv is not None and seen.gap_cv is not None:
        spread = math.sqrt(1 / planned.requests + 1 / seen.requests) * max(planned.gap_cv, seen.gap_cv, 1.0)
        changes += _changed("gap_cv", planned.gap_cv, seen.gap_cv, max(planned.gap_cv, seen.gap_cv) * spread)
    if planned.sharing is not None and seen.sharing is not None:
        error = math.sqrt(0.25 / planned.requests + 0.25 / seen.requests)
        changes += _changed("sharing", planned.sharing, seen.sharing, error)
    return changes


def _changed(what: str, planned: float, seen: float, error: float) -> list[Change]:
    difference = abs(seen - planned)
    if difference <= CERTAIN * error or difference <= RELEVANT * max(abs(planned), 1e-9):
        return []
    return [Change(what, planned, seen)]


def as_seen(planned: Workload, before: Fit, now: Fit) -> Workload:
    """The planned requests, arriving and as long as those that were seen: where only their numbers are known.

    Raises InputError where the planned requests all arrive at once.
    """
    if not math.isfinite(before.rate):
        raise InputError("the planned requests all arrive at once: plan with a rate to compare it with")
    prompt = np.maximum(1, np.round(planned.prompt_tokens * (now.prompt_mean / before.prompt_mean))).astype(np.int64)
    output = np.maximum(1, np.round(planned.output_tokens * (now.output_mean / before.output_mean))).astype(np.int64)
    return replace(
        planned,
        arrival=planned.arrival * (before.rate / now.rate),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=np.maximum(output, planned.max_tokens),
        hash_ids=None,
        hash_block_size=0,
    )
