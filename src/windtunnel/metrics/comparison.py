"""Comparison: variants of one scenario under the same seeds, each beside the first one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from windtunnel.metrics.goodness import Verdict
from windtunnel.metrics.spread import Interval
from windtunnel.metrics.summary import Summary, clean
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
    Measure("preemptions", "preemptions", "", 1.0),
    Measure("utilisation.kv", "KV cache", "%", 1e2),
)
"""What tables and plots of a comparison show. Every number of a run's document is compared."""


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
    """The same of what it has more than the first variant, seed by seed; zeros for the first."""
    first: Summary
    """The run of the first seed."""
    timeline: Timeline
    """Of the same run."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Variants of one scenario, of which the first is what the others are compared with."""

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
        """The columns that have a value in some variant; goodput has none without limits."""
        return tuple(
            measure
            for measure in MEASURES
            if not all(math.isnan(variant.intervals[measure.name].mean) for variant in self.variants)
        )

    def meets_goals(self, attainment: float | None = None) -> bool:
        """Whether every run keeps the percentile limits, and the share of good requests if one is given."""
        kept = all(verdict.met for variant in self.variants for verdict in variant.verdicts)
        shares = (document["attainment"] for variant in self.variants for document in variant.documents)
        return kept and (attainment is None or all(share is not None and share >= attainment for share in shares))

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
                    "runs": list(variant.documents),
                }
                for variant in comparison.variants
            ],
            "warnings": list(comparison.warnings),
        }
    )
    return document


def plain(value: Any) -> Any:
    """A setting as JSON has it: what JSON does not know as its text."""
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    known = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)
