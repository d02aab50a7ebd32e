"""Try a scheduler of one's own: ask it once, without a run, and print what it decides in one."""

import sys
from collections.abc import Sequence
from inspect import getattr_static
from typing import Any

import numpy as np

from windtunnel.core.engine import Demand, Fleet, new_state
from windtunnel.core.schedulers.user import ask_once
from windtunnel.core.schedulers.user_asking import EVICTED, HOLD, KEPT, NAMED
from windtunnel.core.seats import ENDS, NEVER, WHO
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Decision, Limits, UserScheduler, VllmV1


@dataclass(frozen=True, eq=False, kw_only=True)
class Ask:
    """A request in front of a scheduler that is tried."""

    prompt_tokens: int
    max_tokens: int
    generated: int = 0
    """Tokens that it has received."""
    num_computed_tokens: int | None = None
    """In the cache, of one that runs; None: all but the last token generated, or nothing of its prompt."""
    output_tokens: int | None = None
    """Output after which it really ends; None: ``max_tokens``."""
    id: int | None = None
    """None: its place among those that run and those that wait behind them."""
    arrival: float = 0.0
    priority: int = 0
    preemptions: int = 0

    @property
    def computed(self) -> int:
        """Tokens in the cache while it runs."""
        if self.num_computed_tokens is not None:
            return self.num_computed_tokens
        return self.prompt_tokens + self.generated - 1 if self.generated else 0


def step(
    scheduler: Any, *, waiting: Sequence[Ask] = (), running: Sequence[Ask] = (), limits: Limits, now: float = 0.0
) -> Decision:
    """Ask a scheduler for one decision, as a run would, and check it.

    Args:
        scheduler: an object with ``schedule`` or ``schedule_columns``.
        waiting: in order of arrival.
        running: in order of admission.
        limits: what it may use.
        now: when the step starts (s).

    Returns the decision, whose requests are those given here.

    Raises:
        InputError: the decision breaks a rule, the scheduler raises something, or the requests do not fit the limits.
    """
    asks = [*running, *waiting]
    if not asks:
        raise InputError("waiting and running are empty: a scheduler is asked only where it sees a request")
    state = new_state(_fleet(scheduler, limits), _demand(asks), np.zeros(len(asks)))
    _place(state, running, waiting, limits, now)
    asked = KEPT[int(state.extra.call[0])]
    if not ask_once(state, 0):
        asked.require_right()
        asked.require_none_left(state)
    own = state.extra
    named, evicted, hold = (int(own.numbers[k]) for k in (NAMED, EVICTED, HOLD))
    pairs = zip(own.names[:named].tolist(), own.tokens[:named].tolist(), strict=True)
    tokens: Any = {asks[row]: amount for row, amount in pairs}
    evict: Any = [asks[row] for row in own.evict[:evicted].tolist()]
    return Decision(tokens, evict, hold=bool(hold))


def _fleet(scheduler: Any, limits: Limits) -> Fleet:
    within = {name: getattr(limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    policy = UserScheduler(lambda: scheduler, VllmV1(async_scheduling=False))
    return Fleet((limits,), (policy,), (linear(0, 0, 0, 0, **within),), (1,), (1,), (False,))


def _demand(asks: Sequence[Ask]) -> Demand:
    most = np.array([ask.max_tokens for ask in asks])
    none = np.zeros(len(asks), dtype=bool)
    return Demand(
        arrival=np.array([ask.arrival for ask in asks], dtype=np.float64),
        prompt_tokens=np.array([ask.prompt_tokens for ask in asks]),
        output_tokens=np.array([ask.max_tokens if ask.output_tokens is None else ask.output_tokens for ask in asks]),
        overruns=none,
        refused=none,
        follow=np.full(len(asks), -1),
        think_time=np.zeros(len(asks)),
        max_concurrency=0,
        max_tokens=most,
        priority=np.array([ask.priority for ask in asks]),
    )


def _place(state: Any, running: Sequence[Ask], waiting: Sequence[Ask], limits: Limits, now: float) -> None:
    """Seat those that run, and line up those that wait."""
    requests, lane, seats = state.requests, state.lanes[:1], state.seats[0]
    asks = [*running, *waiting]
    requests["lane"] = 0
    for name in ("generated", "preemptions"):
        requests[name] = [getattr(ask, name) for ask in asks]
    requests["id"] = [row if ask.id is None else ask.id for row, ask in enumerate(asks)]
    requests["known"] = requests["prompt"] + requests["generated"]
    k, n = len(running), len(asks)
    if k > limits.max_num_seqs:
        raise InputError(f"running: {k} requests exceed max_num_seqs={limits.max_num_seqs}")
    for row, ask in enumerate(running):
        if not 0 <= ask.computed < ask.prompt_tokens + ask.generated:
            known = ask.prompt_tokens + ask.generated
            raise InputError(
                f"num_computed_tokens={ask.computed}: must be from 0 to {known - 1}, one less than it knows"
            )
        requests["context"][row] = ask.computed
        seats[WHO, row], seats[ENDS, row] = row, NEVER
    held = sum(limits.blocks(ask.computed) for ask in running)
    if held > limits.num_blocks:
        raise InputError(f"running: hold {held} blocks, more than num_blocks={limits.num_blocks}")
    lane["top"] = lane["running"] = k
    lane["free"], lane["waiting"] = limits.num_blocks - held, n - k
    requests["queued"][k:] = 1
    if n > k:
        lane["head"], lane["tail"] = k, n - 1
        requests["next"][k : n - 1], requests["previous"][k + 1 :] = np.arange(k + 1, n), np.arange(k, n - 1)
    state.groups["now"] = now
    KEPT[int(state.extra.call[0])].know(range(k, n), range(k), requests["id"])


def printing(kind: type) -> type:
    """A scheduler's class that prints each of its decisions to the standard error, a line each."""
    methods: dict[str, Any] = {}
    if hasattr(kind, "schedule_columns"):
        alone = isinstance(getattr_static(kind, "schedule_columns"), staticmethod)
        columns: Any = kind.schedule_columns

        def schedule_columns(self: Any, now: float, waiting: Any, running: Any, limits: Any) -> bool:
            held = columns(*([] if alone else [self]), now, waiting, running, limits)
            named = [one for one in (*running, *waiting) if one["tokens"]]
            tokens = {int(one["id"]): int(one["tokens"]) for one in named}
            evict = [int(one["id"]) for one in running if one["evict"]]
            used = int(running["num_blocks"].sum())
            _say(kind, now, len(waiting), len(running), used, limits["num_blocks"], tokens, evict, held)
            return bool(held)

        methods["schedule_columns"] = schedule_columns
    else:

        def schedule(self: Any, now: float, waiting: Any, running: Any, limits: Limits) -> Any:
            decision = super(made, self).schedule(now, waiting, running, limits)
            if isinstance(decision, Decision):
                tokens = {one.id: amount for one, amount in decision.tokens.items()}
                evict = [one.id for one in decision.evict]
                used = sum(one.num_blocks for one in running)
                _say(kind, now, len(waiting), len(running), used, limits.num_blocks, tokens, evict, decision.hold)
            return decision

        methods["schedule"] = schedule
    made: Any = type(kind.__name__, (kind,), methods)
    return made  # type: ignore[no-any-return]


def _say(kind: type, now: float, waiting: int, running: int, used: int, blocks: int, tokens: dict[int, int],
         evict: list[int], hold: bool) -> None:  # fmt: skip
    """Print one decision."""
    parts = [f"{one}: {amount}" for one, amount in tokens.items()]
    said = [", ".join(parts) or "nothing", f"evict {', '.join(map(str, evict))}" * bool(evict), "hold" * bool(hold)]
    seen = f"{waiting} waiting, {running} running, {used:,} of {blocks:,} blocks"
    sys.stderr.write(f"{now:.6f} s {kind.__name__}: {seen} → {'; '.join(filter(None, said))}\n")
