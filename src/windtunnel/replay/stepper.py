"""One scheduler of the core, one step at a time: decided, looked at, and concluded when its caller says that it ends.

The functions of a run, without its jumps over equal steps, and without its tables of batch times.
"""

from typing import Any

from windtunnel.core.compiled import entry
from windtunnel.core.dispatch import conclude, decide, pass_over, room
from windtunnel.core.engine import Demand, Fleet, new_state, with_room
from windtunnel.core.loop import deliver
from windtunnel.core.records import CHOSEN, ROWS, STALLS, Array, Lane, State
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, SEQUENCE, TOKENS, WHO
from windtunnel.perf.batch_times import linear
from windtunnel.policy.settings import Limits, Settings
from windtunnel.policy.tiers import Tier

ONLY = 0
"""The lane, its group and its pool."""


@entry
def deliver_to(state: State, r: int, time: float, lane: int) -> None:
    """Request ``r`` arrives."""
    state.counters[CHOSEN] = lane
    deliver(state, r, time)


@entry
def has_room(state: State) -> bool:
    """Whether the scheduler's own arrays can take one more step."""
    return room(state, state.pools[ONLY], state.groups[ONLY])


@entry
def decide_only(state: State, time: float) -> tuple[bool, bool]:
    """Decide the next step at ``time``, with an empty log."""
    state.groups[ONLY].now = time
    state.counters[ROWS] = 0
    state.counters[STALLS] = 0
    return decide(state, state.pools[ONLY], state.groups[ONLY])


@entry
def conclude_only(state: State, end: float) -> None:
    """The decided step is on its way and ends at ``end``."""
    conclude(state, state.pools[ONLY], state.groups[ONLY], end)


@entry
def pass_over_only(state: State, preempted: bool) -> None:
    """Nothing was scheduled."""
    pass_over(state, state.pools[ONLY], state.groups[ONLY], preempted)


class Stepper:
    """A lane with its requests, or ranks in lockstep; times are in any unit."""

    def __init__(
        self, limits: Limits, policy: Settings, demand: Demand, lanes: int = 1, tiers: tuple[Tier, ...] = ()
    ) -> None:
        """Raises InputError where the core does not know the settings."""
        times = linear(0.0, 0.0, 0.0, 0.0, max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1)
        fleet = Fleet((limits,), (policy,), (times,), (1,), (lanes,), (lanes > 1,), tiers=(tiers,) if tiers else ())
        self.state = new_state(fleet, demand, demand.arrival)

    @property
    def lane(self) -> Lane:
        """The lane's record."""
        return self.state.lanes[ONLY]

    @property
    def requests(self) -> Array:
        """The requests' records."""
        return self.state.requests

    def running(self) -> dict[int, int]:
        """Who has a seat, in order of admission, and the clock at which each ends (NEVER: it prefills)."""
        who, ends = self.state.seats[ONLY, [WHO, ENDS], : self.lane["top"]].tolist()
        return {r: end for r, end in zip(who, ends, strict=True) if end != EMPTY}

    def chunks(self) -> list[tuple[int, int, int]]:
        """(Admission that it belongs to, tokens, context) of each chunk in the step that was decided."""
        rows: Any = self.state.seats[ONLY, [SEQUENCE, TOKENS, CONTEXT], : self.lane["chunks"]]
        return [tuple(chunk) for chunk in rows.T.tolist()]

    @property
    def now(self) -> float:
        """When the next step is decided."""
        return float(self.state.groups[ONLY]["now"])

    def deliver(self, r: int, time: float, lane: int = ONLY) -> None:
        """Request ``r`` joins the queue; a clock that is behind ``time`` goes on to it."""
        deliver_to(self.state, r, float(time), lane)

    def decide(self, time: float) -> tuple[bool, bool]:
        """Decide the next step at ``time``: whether anything is scheduled, and whether any request was preempted.

        Then either ``conclude`` or ``pass_over`` must follow.
        """
        while not has_room(self.state):
            self.state = with_room(self.state)
        scheduled, preempted = decide_only(self.state, float(time))
        return scheduled, preempted

    def conclude(self, end: float) -> None:
        """What was decided runs, and ends at ``end``."""
        conclude_only(self.state, float(end))

    def pass_over(self, preempted: bool) -> None:
        """Nothing was scheduled: time goes on to the end of the step in flight, if there is one."""
        pass_over_only(self.state, preempted)
