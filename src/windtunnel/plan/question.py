"""Question: the load and limits under which candidates are compared."""

import json
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.errors import InputError
from windtunnel.perf import require_source
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.workload import Workload, at_rate, repeat, with_lanes, with_sessions
from windtunnel.workload.agents.agentx import Rules, agentx

TURNS_OF_LANE, SESSIONS_OF_TRIAL = 3, 60
"""Sessions of a trial for each lane, since few would measure how they begin and end; and at least, where there are
as many."""
_in_play: dict[str, Workload] = {}
"""The load of the latest number of lanes: a trial makes it, and measures by it."""
MOST_REQUESTS = 50_000
"""Requests up to which a load of sessions is repeated for more lanes."""


@dataclass(frozen=True, eq=False)
class Question:
    """A load, the limits that must hold under it, and how finely rates are distinguished.

    A rate is reached by scaling all gaps between the requests by one factor: all deployments and rates see the same
    requests in the same order (common random numbers), and a trace keeps its shape.

    ``in_lanes``: of sessions that all start at once no rate can be asked, but how many of them are in play. What is
    called a rate here and elsewhere is then that number.
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
    replay: Rules | None = None
    """Of AgentX, which plays the load's sessions in as many lanes as are asked for; None: they are played in order."""
    in_lanes: bool = False
    """Whether loads are numbers of sessions in play (lanes) instead of requests per second."""

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
        if self.in_lanes and not self.slo:
            raise InputError(
                "lanes: clients that wait for answers never overload a server: give limits, e.g. ttft:5000"
            )

    def rate(self, level: int) -> float:
        """Requests per second at a level of the grid of rates: (1 + tolerance)^level; in lanes, the level."""
        if self.in_lanes:
            return float(level)
        return math.exp(level * math.log1p(self.tolerance))

    def level(self, rate: float) -> int:
        """The highest level whose rate is at most ``rate`` (> 0)."""
        if self.in_lanes:
            return max(math.floor(rate), 1)
        level = math.floor(math.log(rate) / math.log1p(self.tolerance))
        return level + 1 if self.rate(level + 1) <= rate else level

    def at(self, rate: float) -> Workload:
        """The requests at this mean rate; infinite: all at once. In lanes: this number of sessions in play, of three
        times that number or more, or as AgentX plays them."""
        if not self.in_lanes:
            return at_rate(self.workload, rate)
        key = f"{self.workload.digest} {rate!r} {self.replay} {self.seed}"
        if key not in _in_play and self.replay is not None:
            _in_play.clear()
            _in_play[key] = agentx(self.workload, self.replay, math.floor(rate), self.seed)
        elif key not in _in_play:
            wanted = max(TURNS_OF_LANE * math.floor(rate), SESSIONS_OF_TRIAL)
            found = repeat(self.workload, math.ceil(TURNS_OF_LANE * rate / self._sessions))
            _in_play.clear()
            _in_play[key] = with_lanes(with_sessions(found, wanted), math.floor(rate))
        return _in_play[key]

    @property
    def unit(self) -> str:
        """Of what is called a rate: ``requests/s`` or ``lanes``."""
        return "lanes" if self.in_lanes else "requests/s"

    @property
    def most(self) -> float:
        """The highest number of lanes that is tried; infinite for rates, which bounds limit."""
        if not self.in_lanes:
            return math.inf
        return float(max(self._sessions * max(MOST_REQUESTS // len(self.workload), 1) // TURNS_OF_LANE, 1))

    @property
    def calls_of_lane(self) -> float:
        """Requests per second of a lane whose requests take no time at all; infinite without think times."""
        think = float(self.workload.think_time.sum())
        return len(self.workload) / think if think > 0 else math.inf

    @cached_property
    def _sessions(self) -> int:
        session = self.workload.session
        return len(np.unique(session[session >= 0])) + int(np.count_nonzero(session < 0))

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
            **({"in_lanes": True} if self.in_lanes else {}),
            **({"replay": asdict(self.replay)} if self.replay else {}),
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the outcome of a trial depends on, besides the deployment and the rate."""
        parts: tuple[Any, ...] = (self.workload.digest, asdict(self.slo), self.attainment, *self._times, self.seed)
        parts += tuple((seed, workload.digest) for seed, workload in self.draws)
        parts += ("in lanes",) if self.in_lanes else ()
        parts += (repr(self.replay),) if self.replay else ()
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
