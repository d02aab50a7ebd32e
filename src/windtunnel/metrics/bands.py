"""Bands: between which values a measured server would lie, around what a run says.

A server whose steps all take f times as long, under a load that comes f times as slowly, does the same f times as
slowly: time scales. So the factors of ``metrics.evidence`` hold for every latency where loads scale with the capacity,
and their inverses for the capacity, exactly and without another simulation. At the same rate latencies change more,
the nearer the load is to the capacity: that takes simulations of both ends (``metrics.ends``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from math import exp, isfinite, isinf, log
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment.slo import FIRST_TOKEN
from windtunnel.metrics.ends import End
from windtunnel.metrics.evidence import ENDS, Doubt, Factors, doubt, separate_workers, server_key, span
from windtunnel.metrics.steps import Steps, unroll
from windtunnel.metrics.summary import LATENCIES, clean, client_json
from windtunnel.metrics.usage import Uncertainty, uncertainty
from windtunnel.simulate.overheads import Agreement, read_agreement
from windtunnel.simulate.run import Run

LEVEL = 0.9
CHECKED = ("ttft", "tpot")
"""Latencies whose bands were checked: the means of closed loops."""
COST = "cost_per_million_output_tokens"
AT_ENDS = ("request_throughput", "output_throughput", "goodput", "attainment", COST)
"""Figures whose ends at an unchanged load the document has."""


@dataclass(frozen=True)
class Bands:
    """The bands of a run."""

    doubt: Doubt
    uncertainty: Uncertainty
    said: Mapping[str, Any]
    """What ``client_json`` or ``summary_json`` says about the run."""
    perfect: Mapping[str, Any] | None = None
    """The same with perfect kernels: no band goes below it."""
    request_rate: float | None = None
    """Requests per second of the load; None where it has no rate."""
    capacity: float | None = None
    """Requests per second that can be served, as simulated; None where that is not known."""
    ends: tuple[End, End] | None = None
    """The unchanged load on servers at the faster and at the slower end of the 90 % band; None where that was not
    simulated."""
    unchanged_rate: bool = False
    """Whether statistics have the band of the ends, instead of the one under a scaled load."""
    not_found: Mapping[str, str] = field(default_factory=dict)
    """What a further simulation was to find (``roofline``, ``capacity``, ``unchanged rate``), and why not."""

    def __repr__(self) -> str:
        shown = (
            f"{name} {text}" for name in ("ttft", "tpot", "e2el") if name in self.said and (text := self.shown(name))
        )
        return f"Bands(means on a real server: {', '.join(shown)}; confidence {self.doubt.grade[0]})"

    def factors(self, latency: str, level: float = LEVEL) -> Factors:
        """Factors on a latency (ttft, tpot, itl, e2el, queue) at both ends, under a load that is scaled likewise."""
        first, steps = (self.doubt.factors(name, level) for name in ("first_token", "steps"))
        if latency in FIRST_TOKEN:
            return first
        if latency != "e2el":
            return steps
        whole, part = (self.said[name]["mean"] for name in ("e2el", "ttft"))
        share = min(part / whole, 1.0) if whole and part else 0.0
        low, high = (share * one + (1 - share) * other for one, other in zip(first, steps, strict=True))
        return low, high

    def around(self, latency: str, statistic: str, level: float = LEVEL) -> Factors | None:
        """Seconds at both ends around a statistic (mean, p50 …) of a latency; the upper one is infinite where the load
        is too much there. None where the run has no value, or where the ends of this level were not simulated."""
        value = self.said[latency][statistic]
        if value is None or not isfinite(value):
            return None
        if self.unchanged_rate and self.ends:
            found = [end.latency(latency, statistic) for end in self.ends]
            known = [value, *(each for each in found if each is not None)]
            return (min(known), max(known)) if level == LEVEL else None
        least = self.perfect[latency][statistic] if self.perfect else None
        low, high = (factor * value for factor in self.factors(latency, level))
        return max(low, min(least or 0.0, value)), high

    def expected(self, statistic: str) -> float | None:
        """Best estimate of a statistic of the time per token on a measured server: with steps as much longer or shorter
        as servers like it were measured (``evidence.Doubt.shift``), read between the simulated figure and that at the
        end of the band on the same side, as a power of the factor. None where no evidence was shown to help."""
        value, shift = self.said["tpot"][statistic], self.doubt.shift
        if not shift or not value:
            return None
        ends = self.around("tpot", statistic)
        factors = self.doubt.factors("steps", LEVEL)
        for end, factor in zip(ends or (), factors, strict=False):
            if shift * log(factor) > 0 and isfinite(end) and end > 0 and self.unchanged_rate and self.ends:
                return float(value * (end / value) ** min(shift / log(factor), 1.0))
        return float(value * exp(shift))

    def expected_first(self, statistic: str) -> float | None:
        """Best estimate of a statistic of the time to first token; None where no evidence was shown to help."""
        value, shift = self.said["ttft"][statistic], self.doubt.first_shift
        return float(value * exp(shift)) if shift and value else None

    def shown(self, latency: str, level: float = LEVEL) -> str:
        """The band of a latency's mean as per cent: ``-4…+19 %``."""
        value, ends = self.said[latency]["mean"], self.around(latency, "mean", level)
        if not ends or not value:
            return ""
        if isinf(ends[1]):
            if self.ends and self.ends[0].overloaded:
                return "overloaded"
            return f"{100 * (ends[0] / value - 1):+.0f} %…overloaded"
        return span((ends[0] / value, ends[1] / value))

    @property
    def attainment(self) -> Factors | None:
        """Share of requests within the goal at the same rate, at the slower and at the faster end; None where
        that is not known."""
        return self._at_ends("attainment")

    @property
    def cost(self) -> Factors | None:
        """USD per million output tokens at the cheaper and at the dearer end; None where no price is known. The hour
        costs what it costs: where the load comes as slowly as the server works, a token costs as many times more."""
        value = self.said.get(COST)
        if value is None:
            return None
        if self.unchanged_rate and self.ends:
            return self._at_ends(COST)
        low, high = self.doubt.factors("steps", LEVEL)
        return low * value, high * value

    def _at_ends(self, name: str) -> Factors | None:
        """The least and the most of a figure that the run has as well, under an unchanged load."""
        values = [end.said[name] for end in self.ends or () if end.said[name] is not None]
        own = self.said.get(name)
        known = [*values, *(() if own is None else (own,))]
        return (min(known), max(known)) if values else None

    @property
    def share(self) -> float | None:
        """How much of the capacity the load uses, as a share."""
        return self.request_rate / self.capacity if self.request_rate and self.capacity else None

    def capacity_ends(self, level: float = LEVEL) -> Factors | None:
        """Requests per second that can be served, at both ends."""
        low, high = self.doubt.factors("steps", level)
        return (self.capacity / high, self.capacity / low) if self.capacity else None

    @property
    def overloaded(self) -> str | None:
        """Whether the load is more than can be served: ``overloaded``, or ``overloaded at the upper end``."""
        if self.share is None:
            return None
        if self.share >= 1:
            return "overloaded"
        return "overloaded at the upper end" if self.share * self.doubt.factors("steps", LEVEL)[1] >= 1 else None

    def words(self) -> list[tuple[str, str]]:
        """What the ranges are, for a reader who wants to know: names and sentences."""
        steps, first = (self.doubt.factors(name, 0.5) for name in ("steps", "first_token"))
        at = "this load at this rate" if self.unchanged_rate else "the same load relative to each server's capacity"
        found = [
            ("ranges", f"90 % of comparable servers, {at}; half of them: TPOT {span(steps)}, TTFT {span(first)}"),
            ("evidence", self.doubt.words),
            ("checked", "on averages of closed loops, open loads and percentiles on few servers (docs/uncertainty.md)"),
        ]
        if expected := self.expected("mean"):
            moved = f"steps ×{exp(self.doubt.shift):.2f}, as {self.doubt.shifted_as}"
            token = self.expected_first("mean")
            ttft = "" if token is None else f", TTFT {1e3 * token:.3g} ms"
            found.append(("expected", f"mean TPOT {1e3 * expected:.3g} ms{ttft}: {moved}"))
        if isfinite(self.uncertainty.error):
            kernels, host = 100 * self.uncertainty.kernels, 100 * self.uncertainty.host
            found.append(("model error", f"per step: kernels ±{kernels:.0f} %, host work ±{host:.1f} %"))
        if self.attainment:
            least, most = (f"{100 * share:.1f}" for share in self.attainment)
            shares = f"{least} %" if least == most else f"{least} to {most} %"
            found.append(("within goal", f"{shares} of requests on a real server, at this rate"))
        if (ends := self.capacity_ends()) and self.capacity and self.share is not None:
            upper = self.share * self.capacity / ends[0]
            lower = self.share * self.capacity / ends[1]
            said = f"{100 * self.share:.0f} % used, {100 * lower:.0f} % to {100 * upper:.0f} % on a real server"
            state = f": {self.overloaded}" if self.overloaded else ""
            found.append(("capacity", f"{self.capacity:.3g} requests/s; {said}{state}"))
        return [*found, *((name, f"not found, {why}") for name, why in self.not_found.items())]

    def to_json(self) -> dict[str, Any]:
        """For the document of a run: seconds, [low, high]; ``level`` says which band the statistics have."""
        found: dict[str, Any] = {
            "level": LEVEL,
            "at": "rate" if self.unchanged_rate else "share",
            "evidence": self.doubt.words,
            "grade": list(self.doubt.grade),
            "known_bad": self.doubt.warning,
            "checked": [f"{name}.mean" for name in CHECKED],
            "step_error": {"kernels": self.uncertainty.kernels, "host": self.uncertainty.host},
            "factors": {
                name: {f"{100 * level:.0f}": list(self.factors(name, level)) for level in ENDS} for name in LATENCIES
            },
            "words": dict(self.words()),
            "shown": {name: self.shown(name) for name in LATENCIES},
            **{name: {key: self._pair(name, key) for key in self.said[name]} for name in LATENCIES},
        }
        if self.doubt.shift:
            values = {name: self.expected(name) for name in self.said["tpot"]}
            found["expected"] = {"steps": exp(self.doubt.shift), "tpot": values}
        if self.doubt.first_shift:
            found["expected"]["ttft"] = {name: self.expected_first(name) for name in self.said["ttft"]}
        if self.attainment:
            found["attainment"] = list(self.attainment)
        if self.cost:
            found[COST] = list(self.cost)
        if self.ends:
            figures = {name: self._at_ends(name) for name in AT_ENDS}
            found["at_unchanged_rate"] = {
                **{name: list(pair) for name, pair in figures.items() if pair},
                "overloaded": [end.overloaded for end in self.ends],
            }
        if ends := self.capacity_ends():
            found["capacity"] = {
                "request_rate": self.capacity,
                "ends": list(ends),
                "share": self.share,
                "overloaded": self.overloaded,
            }
        if self.not_found:
            found["not_found"] = dict(self.not_found)
        document: dict[str, Any] = clean(found)
        return document

    def _pair(self, latency: str, statistic: str) -> list[float] | None:
        ends = self.around(latency, statistic)
        return list(ends) if ends else None


def bands(
    run: Run,
    said: Mapping[str, Any] | None = None,
    *,
    perfect: Mapping[str, Any] | None = None,
    capacity: float | None = None,
    steps: Steps | None = None,
) -> Bands:
    """The bands of a run.

    Args:
        run: the run.
        said: what ``client_json`` says about it, or about a part of it.
        perfect: what ``client_json`` says about it with perfect kernels (``simulate.bounds``), where that is known.
        capacity: requests per second that can be served (``simulate.bounds``), where that is known.
        steps: the unrolled log, if the caller has it already.
    """
    found = uncertainty(steps or unroll(run))
    doubts = least_certain(run.manifest["pools"], found.error, _agreement(run))
    if run.manifest["pools"][0]["role"] != "mixed":
        server = server_key(run.manifest["pools"][-1])
        prompt = float(np.mean(run.requests.prompt_tokens)) if len(run.requests.prompt_tokens) else 0.0
        doubts = replace(doubts, separate=separate_workers(server, prompt))
    rate = run.manifest["workload"]["request_rate"]
    return Bands(doubts, found, said or client_json(run), perfect, rate, capacity)


def least_certain(pools: Iterable[Mapping[str, Any]], error: float, agreement: Agreement | None) -> Doubt:
    """The widest doubt of several pools, from what ``Pool.spec`` says of each."""
    doubts = [doubt(server_key(pool), error, agreement=agreement) for pool in pools]
    return max(doubts, key=lambda found: found.steps[-1] - found.steps[0])


def _agreement(run: Run) -> Agreement | None:
    return read_agreement(run.manifest["overheads"].get("agreement"), Path("run.json"))
