"""Question: the load and limits under which candidates are compared."""

import json
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.errors import InputError
from windtunnel.perf import require_source
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.workload import Workload, at_rate


@dataclass(frozen=True, eq=False)
class Question:
    """A load, the limits that must hold under it, and how finely rates are distinguished.

    A rate is reached by scaling all gaps between the requests by one factor: all deployments and rates see the same
    requests in the same order (common random numbers), and a trace keeps its shape.
    """

    workload: Workload
    _: KW_ONLY
    slo: SLO = field(default_factory=SLO)
    attainment: float = ATTAINMENT
    """Share of the measured requests that must finish and meet every limit of ``slo.limits``."""
    tolerance: float = 0.01
    """Rates are powers of 1 + tolerance; an answer holds at its rate, and fails at the next."""
    perf: str = "auto"
    overheads: Overheads = ENGINE_CLOCK
    seed: int = 0
    confidence: float | None = None
    """Share of measured servers on which the answer is to hold; None: as simulated."""
    draws: tuple[tuple[int, Workload], ...] = ()
    """Other draws of the load, seed and requests, under which the limits must hold as well."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        require_source(self.perf)
        if not 0.0 < self.attainment <= 1.0:
            raise InputError(f"attainment={self.attainment:g}: must be a share, > 0 and ≤ 1")
        if not 1e-4 <= self.tolerance <= 0.5:
            raise InputError(f"tolerance={self.tolerance:g}: must be a share between 0.0001 and 0.5, e.g. 0.01")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: must be ≥ 0")
        if self.confidence is not None and not 0.05 <= self.confidence <= 0.95:
            raise InputError(f"confidence={self.confidence:g}: must be a share from 0.05 to 0.95, e.g. 0.9")

    def rate(self, level: int) -> float:
        """Requests per second at a level of the grid of rates: (1 + tolerance)^level."""
        return math.exp(level * math.log1p(self.tolerance))

    def level(self, rate: float) -> int:
        """The highest level whose rate is at most ``rate`` (> 0)."""
        level = math.floor(math.log(rate) / math.log1p(self.tolerance))
        return level + 1 if self.rate(level + 1) <= rate else level

    def at(self, rate: float) -> Workload:
        """The requests at this mean rate; infinite: all at once."""
        return at_rate(self.workload, rate)

    def under(self, workload: Workload, seed: int) -> "Question":
        """This question about other requests, and no other draws of them."""
        return replace(self, workload=workload, seed=seed, draws=())

    def each_draw(self) -> Iterator["Question"]:
        """This question about each draw of its load, its own first."""
        yield self.under(self.workload, self.seed)
        for seed, workload in self.draws:
            yield self.under(workload, seed)

    def shares_times(self, other: "Question") -> bool:
        """Whether batches take as long under the other question: it may have another load and other limits."""
        return self._times == other._times

    @property
    def _times(self) -> tuple[Any, ...]:
        return self.perf, self.overheads.spec(), self.confidence

    def spec(self) -> dict[str, Any]:
        """The question for JSON."""
        return {
            "workload": self.workload.spec(),
            "goodput": self.slo.limits,
            "slo": [list(limit) for limit in self.slo.percentiles],
            "attainment": self.attainment,
            "tolerance": self.tolerance,
            "perf": self.perf,
            "seed": self.seed,
            "confidence": self.confidence,
            "draws": [seed for seed, _ in self.draws],
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the outcome of a trial depends on, besides the deployment and the rate."""
        parts: tuple[Any, ...] = (self.workload.digest, asdict(self.slo), self.attainment, *self._times, self.seed)
        parts += tuple((seed, workload.digest) for seed, workload in self.draws)
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
