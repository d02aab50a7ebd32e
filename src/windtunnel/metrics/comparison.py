"""Comparison: variants of one scenario under the same seeds, each against the first, with intervals over the seeds."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.metrics.ends import End
from windtunnel.metrics.evidence import Factors
from windtunnel.metrics.pairs import Divergence
from windtunnel.metrics.requests import Verdict
from windtunnel.metrics.summary import Summary, clean, summary_json
from windtunnel.metrics.timeline import Timeline

SCHEMA_VERSION = 1


class Measure(NamedTuple):
    """One line of a comparison."""

    name: str
    """Dotted name in the document of ``summary_json``."""
    title: str
    unit: str
    scale: float
    """Turns the document's value into the unit."""


MEASURES = (
    Measure("ttft.mean", "TTFT, mean", "ms", 1e3),
    Measure("ttft.p99", "TTFT, p99", "ms", 1e3),
    Measure("tpot.mean", "TPOT, mean", "ms", 1e3),
    Measure("tpot.p99", "TPOT, p99", "ms", 1e3),
    Measure("e2el.mean", "E2EL, mean", "ms", 1e3),
    Measure("e2el.p99", "E2EL, p99", "ms", 1e3),
    Measure("request_throughput", "throughput", "requests/s", 1.0),
    Measure("output_throughput", "output", "tokens/s", 1.0),
    Measure("goodput", "goodput", "requests/s", 1.0),
    Measure("cost_per_hour", "cost, an hour", "$", 1.0),
    Measure("cost_per_million_output_tokens", "cost, output", "$/M tokens", 1.0),
    Measure("preemptions", "preemptions", "", 1.0),
    Measure("utilisation.kv", "KV cache", "%", 1e2),
    Measure("gap.makespan.gap", "gap, makespan", "%", 1e2),
    Measure("gap.mean-e2el.gap", "gap, E2EL", "%", 1e2),
    Measure("gap.mean-ttft.gap", "gap, TTFT", "%", 1e2),
    Measure("gap.mean-tpot.gap", "gap, TPOT", "%", 1e2),
)
"""What tables and plots of a comparison show. Every number of a run's document is compared."""


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, with the half width of its two-sided confidence interval (NaN for a single seed)."""

    mean: float
    half_width: float
    runs: int

    @property
    def differs(self) -> bool:
        """Whether zero lies outside the interval; of a single run, whether its value is not zero."""
        return abs(self.mean) > (0.0 if math.isnan(self.half_width) else self.half_width)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width


@dataclass(frozen=True)
class Ends:
    """Between which values a variant's differences lie on 90 % of measured servers.

    The baseline is as simulated, and the variant's steps take as many times longer or less long than simulated as
    ratios of measured servers leave open. What both have in common cancels out: steps that take f times as long in
    both, under a load that comes f times as slowly, are the same runs in slow motion.
    """

    divergence: Divergence
    differences: Mapping[str, Factors]
    """By dotted name: the least and the most; infinite where the variant is overloaded at an end."""


def ends_of(
    values: Mapping[str, Interval],
    differences: Mapping[str, Interval],
    first: Mapping[str, Any],
    ends: Sequence[End],
    divergence: Divergence,
) -> Ends:
    """The ends of a variant's differences: their means over the seeds, moved as the first seed's run moves.

    Up by as much, and down in the same proportion: the runs of other seeds may be much shorter than the first one's,
    and no time is below 0.

    Args:
        values: the variant's means over the seeds, by name.
        differences: those minus the baseline's.
        first: what ``summary_json`` says of the variant's first run.
        ends: the same run with the factors of ``divergence`` on its steps.
        divergence: what measured servers leave open.
    """
    own, others = _scalars(first), [_scalars(end.with_infinities()) for end in ends]
    found = {}
    for name, difference in differences.items():
        moved = [0.0, *(_moved(values[name].mean, own[name], other[name]) for other in others if name in other)]
        known = [by for by in moved if not math.isnan(by)]
        found[name] = (difference.mean + min(known), difference.mean + max(known))
    return Ends(divergence, found)


def _moved(value: float, before: float, after: float) -> float:
    """By how much a value changes where the first seed's goes from ``before`` to ``after``."""
    return value * (after / before - 1) if 0 <= after < before else after - before


@dataclass(frozen=True, eq=False)
class Variant:
    """One scenario of a comparison, simulated under every seed."""

    name: str
    words: Mapping[str, Any]
    """The words of the scenario whose values are not the first variant's."""
    loads: tuple[str, ...]
    """Digest of the requests under each seed; equal to the first variant's unless words of the load differ."""
    documents: tuple[Mapping[str, Any], ...]
    """What ``summary_json`` says of each seed."""
    verdicts: tuple[Verdict, ...]
    """The percentile limits, all seeds one after the other."""
    intervals: Mapping[str, Interval]
    """Mean over the seeds of every number, by dotted name (``ttft.p99``)."""
    differences: Mapping[str, Interval]
    """Mean over the seeds of each number minus the first variant's under the same seed; zeros for the first."""
    first: Summary
    """The run of the first seed."""
    timeline: Timeline
    """Of the same run."""
    ends: Ends | None = None
    """Between which values the differences lie on measured servers; None of the first variant, of one that differs in
    nothing that takes time, and where that was not asked for."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Variants of one scenario, of which the others are compared with the first."""

    title: str
    seeds: tuple[int, ...]
    confidence: float
    """Probability with which an interval holds the true mean."""
    variants: tuple[Variant, ...]
    warnings: tuple[str, ...]

    @property
    def baseline(self) -> Variant:
        """The first variant."""
        return self.variants[0]

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The columns that have a value in some variant: goodput has none without limits, gaps only if asked for."""
        return tuple(
            measure
            for measure in MEASURES
            if measure.name in self.baseline.intervals
            and not all(math.isnan(variant.intervals[measure.name].mean) for variant in self.variants)
        )

    def meets_goals(self, attainment: float | None = None) -> bool:
        """Whether every run keeps the percentile limits, and the share of good requests if one is given."""
        kept = all(verdict.met for variant in self.variants for verdict in variant.verdicts)
        shares = (document["attainment"] for variant in self.variants for document in variant.documents)
        return kept and (attainment is None or all(share is not None and share >= attainment for share in shares))

    def span(self, variant: Variant, name: str) -> Factors | None:
        """What the variant's value is between, on measured servers, as shares of the baseline's mean; None where that
        mean is 0, or where it is not known."""
        base = self.baseline.intervals[name].mean
        if variant.ends is None or not base > 0:
            return None
        low, high = variant.ends.differences[name]
        return None if math.isnan(low) else (1 + low / base, 1 + high / base)

    def relative(self, variant: Variant, name: str) -> Interval:
        """The difference as a share of the baseline's mean: −0.1 is a tenth less. NaN where that mean is 0."""
        difference, base = variant.differences[name], abs(self.baseline.intervals[name].mean)
        share = 1 / base if base > 0 else math.nan
        return Interval(difference.mean * share, difference.half_width * share, difference.runs)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The document of ``windtunnel compare --json``; what is unknown or undefined is null."""

    def intervals(values: Mapping[str, Interval]) -> dict[str, dict[str, float]]:
        return {name: {"mean": each.mean, "low": each.low, "high": each.high} for name, each in values.items()}

    document: dict[str, Any] = clean(
        {
            "schema_version": SCHEMA_VERSION,
            "title": comparison.title,
            "baseline": comparison.baseline.name,
            "seeds": list(comparison.seeds),
            "confidence": comparison.confidence,
            "variants": [
                {
                    "name": variant.name,
                    "words": {word: plain(value) for word, value in variant.words.items()},
                    "intervals": intervals(variant.intervals),
                    "differences": intervals(variant.differences),
                    **({} if variant.ends is None else {"servers_90": _servers(variant.ends)}),
                    "runs": list(variant.documents),
                }
                for variant in comparison.variants
            ],
            "warnings": list(comparison.warnings),
        }
    )
    return document


def _servers(ends: Ends) -> dict[str, Any]:
    """Of measured servers: the evidence, and [low, high] of every difference; null at an overloaded end."""
    return {
        "evidence": ends.divergence.words,
        "pairs": ends.divergence.pairs,
        "factors": {name: list(ends.divergence.factors(name)) for name in ("steps", "first_token")},
        "differences": {name: list(pair) for name, pair in ends.differences.items()},
    }


def plain(value: Any) -> Any:
    """A setting as JSON has it; values that JSON does not know become their text."""
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    known = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def spread(documents: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> dict[str, Interval]:
    """Interval of every number in the ``summary_json`` documents of several seeds, by dotted name ("ttft.p99").

    mean ± t(n−1) · s / √n, s the sample standard deviation, t the quantile of Student's distribution; percentiles are
    treated as the scalars that they are for one run. A number that is null in any run has a NaN interval.

    Raises:
        InputError: no document, or a confidence outside (0, 1).
    """
    if not documents:
        raise InputError("spread over 0 runs: give at least one")
    return _intervals([_scalars(document) for document in documents], confidence)


def paired_spread(
    documents: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], confidence: float = 0.95
) -> dict[str, Interval]:
    """Interval of every number's difference from the baseline's under the same seed, as ``spread``.

    What both runs owe to the draw of their requests (common random numbers) cancels out of the difference.

    Raises:
        InputError: no documents, not as many as the baseline's, or a confidence outside (0, 1).
    """
    if not documents or len(documents) != len(baseline):
        raise InputError(f"paired spread of {len(documents)} runs and {len(baseline)} of the baseline: must be as many")
    pairs = [(_scalars(own), _scalars(base)) for own, base in zip(documents, baseline, strict=True)]
    return _intervals([{name: own[name] - base.get(name, math.nan) for name in own} for own, base in pairs], confidence)


def _intervals(rows: Sequence[Mapping[str, float]], confidence: float) -> dict[str, Interval]:
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence}: must lie between 0 and 1, e.g. 0.95")
    n = len(rows)
    factor = student_t(0.5 + confidence / 2, n - 1) / math.sqrt(n) if n > 1 else math.nan
    intervals = {}
    for name in rows[0]:
        values = np.array([row.get(name, math.nan) for row in rows])
        half = factor * float(values.std(ddof=1)) if n > 1 else math.nan
        intervals[name] = Interval(float(values.mean()), half, n)
    return intervals


def _scalars(document: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{prefix}{key}.")
        elif value is None:
            found[prefix + key] = math.nan
        elif isinstance(value, int | float) and key != "schema_version":
            found[prefix + key] = float(value)
    return found


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t for probability ≥ 0.5: bisection on its distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """P(T ≤ t), t ≥ 0, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2


@dataclass(frozen=True, eq=False)
class Point:
    """One rate."""

    rate: float
    """Requests per second that arrive."""
    result: Summary
    keeps_up: bool
    """The queue does not grow, and the limits hold, where there are any."""
    ends: tuple[tuple[float, bool], ...] = ()
    """The same run in slow motion, on servers at the faster and at the slower end of the 90 % band: the rate that it is
    of there, and whether they keep up."""
    served: float = math.nan
    """Requests per second that finish while the server is loaded (``metrics.overload.steady_rate``)."""
    note: str | None = None
    """Why this rate cannot be judged by so few requests."""

    def to_json(self) -> dict[str, Any]:
        """For JSON: the rate, the verdict, and what ``run --json`` says."""
        found = {"request_rate": self.rate, "keeps_up": self.keeps_up, "served": self.served}
        document: dict[str, Any] = clean(found)
        return document | summary_json(self.result)


def knee(points: Sequence[Point]) -> Point | None:
    """The highest rate up to which the deployment keeps up at every one; None if it never does."""
    kept = list(takewhile(lambda point: point.keeps_up, points))
    return kept[-1] if kept else None


def knee_ends(points: Sequence[Point]) -> tuple[float | None, float | None] | None:
    """The knee on servers at the slower and at the faster end of the 90 % band, requests/s; None of an end that keeps
    up at no rate. None altogether where that is not known."""
    if not points or not points[0].ends:
        return None
    found = []
    for end in reversed(range(len(points[0].ends))):
        kept = list(takewhile(lambda one: one[1], (point.ends[end] for point in points)))
        found.append(kept[-1][0] if kept else None)
    return found[0], found[1]
