"""Schedulers: the type of ``State.extra`` decides, when a loop is compiled, whose rules it follows.

So each scheduler's loop holds its own code alone, and costs nothing when another one grows. Where the pools of a
deployment have unlike schedulers, ``extra`` is the tuple of what each of them keeps, and a pool's ``scheduler`` says
which of them is its own: the loop then holds the code of these, and each sees the State as if it were alone. A
scheduler is a module of ``core.schedulers`` with

- ``POOL_FIELDS``, ``LANE_FIELDS``, ``REQUEST_FIELDS``: what it appends to the records,
- ``Extra``: a named tuple of what else it reads and writes, and ``arrays(fleet, demand, pools, lanes, requests)``,
  which makes it before a run and fills in the fields,
- the compiled functions below.

``SEATS_OF_STAGES`` says that each stage of a pipeline has a table of seats. Where its arrays may have to grow, it has
``room(state, pool, group)``, compiled, and ``with_more_room(extra)``; where requests sit behind ``lane.top``,
``seated``; where fields of requests are written late, ``show(state)``; where the real engine may die, ``check(state)``
raises the error, and ``check_end(state)`` what is wrong after the run. ``given_tokens`` and ``latest_end`` are for
``core.live``, where not all decodes take part in each step.
``let_go``, ``occupied``, ``may_stage``, ``stage`` and ``join`` are for prefill and decode pools alone.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import chosen_by_types, instructions, part
from windtunnel.core.records import Fields, Group, Lane, Pool, State, attributes
from windtunnel.core.seats import EMPTY, ENDS, WHO

SCHEDULERS = {
    "VllmV1": "vllm",
    "VllmV0": "vllm_v0.scheduler",
    "Policy": "unified",
    "Sglang": "sglang.scheduler",
    "Trtllm": "trtllm.executor",
    "UserScheduler": "user",
    "WholeBatches": "whole_batches",
}
"""Name of the class of a scheduler's settings in ``policy`` → its module in ``core.schedulers``, imported when it runs.
Only names stand here, so that an edit of one scheduler leaves what is compiled for the others as it is."""

OUT_OF_TURN, VLLM_WITH_DRAFTS = "vllm_out_of_turn", "vllm_v1.drafts"
"""The modules of settings of vLLM that keep no turns, and of those with speculation."""


# The schedulers of a run.


def scheduler_of(policy: Any) -> str:
    """The scheduler that has these settings."""
    name = SCHEDULERS[type(policy).__name__]
    if policy.drafts is not None and name == "vllm":
        return VLLM_WITH_DRAFTS
    return name if policy.keeps_turns else OUT_OF_TURN


def kind_of(policy: Any) -> tuple[str, bool, bool, bool]:
    """What a loop is compiled for: pools of one kind share what their scheduler keeps."""
    return scheduler_of(policy), policy.pipeline_parallel_size > 1, policy.prefix_caching, policy.drafts is not None


def kinds_of(policies: tuple[Any, ...]) -> tuple[list[ModuleType], NDArray[np.int64]]:
    """(The scheduler of each kind, the kind of each pool's settings)."""
    kinds = sorted(set(map(kind_of, policies)))  # so that the order of pools changes nothing that is compiled
    modules = [import_module(f"windtunnel.core.schedulers.{scheduler}") for scheduler, *_ in kinds]
    return modules, np.array([kinds.index(kind_of(policy)) for policy in policies])


def fields_of(policies: tuple[Any, ...], name: str) -> Fields:
    """What these schedulers append to the pools, lanes or requests; several share the fields that both name.

    The first one is then named after all of them: numba takes a record for a kind of any other that it begins with.
    """
    modules, _ = kinds_of(policies)
    if len(modules) == 1:
        return list(getattr(modules[0], name))
    found: dict[str, type[np.generic]] = {"_".join(module.__name__.rsplit(".", 1)[-1] for module in modules): np.int8}
    if name == "POOL_FIELDS":
        found["scheduler"] = np.int64
    for module in modules:
        for field, kind in getattr(module, name):
            if found.setdefault(field, kind) is not kind:
                raise TypeError(f"{field}: {kind.__name__} in {module.__name__}, {found[field].__name__} in another")
    return list(found.items())


def seats_of_stages(policies: tuple[Any, ...]) -> bool:
    """Whether each stage of a pipeline has a table of seats."""
    return any(hasattr(module, "SEATS_OF_STAGES") for module in kinds_of(policies)[0])


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Any:
    """Fill in the schedulers' fields, and make ``State.extra``.

    Where there are several, each makes its arrays as if all pools were its own, so that lanes keep their numbers, and
    no blocks stood in those of the others.

    Raises:
        InputError: a scheduler cannot run within its limits.
    """
    modules, kinds = kinds_of(fleet.policies)
    if len(modules) == 1:
        return modules[0].arrays(fleet, demand, pools, lanes, requests)
    kind_of_lane = np.repeat(kinds, fleet.num_lanes)
    extra = []
    for k, module in enumerate(modules):
        some_pools, some_lanes = pools.copy(), lanes.copy()
        some_lanes["free"][kind_of_lane != k] = 0
        extra.append(module.arrays(_as_if_all(fleet, kinds == k), demand, some_pools, some_lanes, requests))
        pools[kinds == k], lanes[kind_of_lane == k] = some_pools[kinds == k], some_lanes[kind_of_lane == k]
    pools["scheduler"] = kinds
    return tuple(extra)


def _as_if_all(fleet: Any, mine: NDArray[np.bool_]) -> Any:
    """The fleet with the first of these pools in place of all others, as far as a scheduler looks at them."""
    first = int(np.argmax(mine))
    chosen = [i if mine[i] else first for i in range(len(mine))]
    columns = {name: tuple(getattr(fleet, name)[i] for i in chosen) for name in ("limits", "policies", "times")}
    lockstep = tuple(np.logical_and(fleet.lockstep, mine))
    return replace(fleet, lockstep=lockstep, engines=fleet.num_engines, **columns)


def module_of(extra: Any) -> ModuleType:
    """The scheduler that these arrays are of."""
    return sys.modules[type(extra).__module__]


def several(extra: Any) -> bool:
    """Whether ``State.extra`` is of several schedulers."""
    return type(extra) is tuple


def with_more_room(extra: Any) -> Any:
    """Twice as much room in what the schedulers keep."""
    if several(extra):
        return tuple(map(with_more_room, extra))
    module = module_of(extra)
    return module.with_more_room(extra) if hasattr(module, "with_more_room") else extra


def check(state: State, rules: tuple[str, ...] = ("check", "check_end")) -> None:
    """Raise InputError if an engine died on the way; ``rules``: of the scheduler, the latter after a run."""
    for k, extra in enumerate(state.extra if several(state.extra) else (state.extra,)):
        pools = attributes(state.pools[state.pools["scheduler"] == k]) if several(state.extra) else state.pools
        for rule in rules:
            if hasattr(module_of(extra), rule):
                getattr(module_of(extra), rule)(state._replace(extra=extra, pools=pools))


def show(state: State) -> None:
    """Write what is known of requests into their fields, where Python looks for it between two calls of a loop."""
    for extra in state.extra if several(state.extra) else (state.extra,):
        if hasattr(module_of(extra), "show"):
            module_of(extra).show(state._replace(extra=extra))


def renew(state: State, r: int) -> None:
    """Another request than before stands in row ``r``."""
    for extra in state.extra if several(state.extra) else (state.extra,):
        if hasattr(module_of(extra), "renew"):
            module_of(extra).renew(extra, r)


def seen_by(state: State, pool: Pool) -> tuple[ModuleType, State]:
    """The pool's scheduler, and the state as if it were alone."""
    if several(state.extra):
        state = state._replace(extra=state.extra[pool.scheduler])
    return module_of(state.extra), state


# What a loop calls.


def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put the arriving request ``r`` into the queue of a lane."""
    scheduler, state = seen_by(state, pool)
    scheduler.enqueue(state, pool, lane, r)


def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step of a group, and move its clock; IDLE if there is nothing to do until an arrival."""
    scheduler, state = seen_by(state, pool)
    done: int = scheduler.step(state, pool, group)
    return done


def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """The first half of ``step``: whether anything is scheduled, and whether any request was preempted."""
    scheduler, state = seen_by(state, pool)
    scheduled, preempted = scheduler.decide(state, pool, group)
    return scheduled, preempted


def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The second half, if anything is scheduled: the step ends at ``end``."""
    scheduler, state = seen_by(state, pool)
    done: int = scheduler.conclude(state, pool, group, end)
    return done


def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """The second half, if nothing is scheduled."""
    scheduler, state = seen_by(state, pool)
    done: int = scheduler.pass_over(state, pool, group, preempted)
    return done


def transfer(state: State, pool: Pool, i: int, start: float) -> float:
    """Seconds that the step of lane ``i``, which begins at ``start``, takes longer than its batch."""
    scheduler, state = seen_by(state, pool)
    return float(scheduler.transfer(state, pool, i, start)) if hasattr(scheduler, "transfer") else 0.0


def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make equal steps while the group's ``now`` < ``until`` (which counts only if an arrival could join them).

    Returns how many; 0: the next step has to be made singly.
    """
    scheduler, state = seen_by(state, pool)
    done: int = scheduler.jump(state, pool, group, until)
    return done


def wait(state: State, pool: Pool, group: Group, until: float) -> int:
    """Let time pass up to ``until`` where a scheduler waits by itself; whether it does."""
    scheduler, state = seen_by(state, pool)
    return int(getattr(scheduler, "wait", never_waits)(state, pool, group, until))


def update_bound(state: State, pool: Pool, group: Group) -> None:
    """Set the group's ``bound``: no change can be seen from outside before it; infinite while the group is idle."""
    scheduler, state = seen_by(state, pool)
    scheduler.update_bound(state, pool, group)


def room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the scheduler's own arrays can take one more step."""
    scheduler, state = seen_by(state, pool)
    return bool(scheduler.room(state, pool, group)) if hasattr(scheduler, "room") else True


def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left and holds them."""
    scheduler, state = seen_by(state, pool)
    scheduler.let_go(state, pool, lane, r)


def occupied(state: State, pool: Pool, i: int) -> int:
    """Requests that have a seat in lane ``i``."""
    scheduler, state = seen_by(state, pool)
    return int(scheduler.occupied(state, pool, i))


def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request of another lane gets memory in lane ``i``, which keeps this many tokens for each."""
    scheduler, state = seen_by(state, pool)
    return bool(scheduler.may_stage(state, pool, i, r, reserved))


def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give it that memory."""
    scheduler, state = seen_by(state, pool)
    scheduler.stage(state, pool, i, r)


def unstage(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take that memory back: its KV will not come."""
    scheduler, state = seen_by(state, pool)
    if hasattr(scheduler, "unstage"):
        scheduler.unstage(state, pool, lane, r)


def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Let it decode from the next step on: its KV is here."""
    scheduler, state = seen_by(state, pool)
    scheduler.join(state, pool, i, r)


def seated(state: State, pool: Pool, lane: Lane) -> int:
    """How many seats of the lane's table, the first ones, may be of requests that are running."""
    scheduler, state = seen_by(state, pool)
    return int(scheduler.seated(state, pool, lane)) if hasattr(scheduler, "seated") else int(lane.top)


def given_tokens(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:
    """(The request in a seat of lane ``i``, the tokens that it has by the end of the step that was decided last).

    0 where it does not decode."""
    scheduler, state = seen_by(state, pool)
    rule = getattr(scheduler, "given_tokens", by_the_clock)
    r, tokens = rule(state, pool, i, seat)
    return int(r), int(tokens)


def latest_end(state: State, pool: Pool, group: Group) -> float:
    """When the step ends that was decided last."""
    scheduler, state = seen_by(state, pool)
    return float(getattr(scheduler, "latest_end", end_of_group)(state, pool, group))


@part
def by_the_clock(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:  # noqa: ARG001 - as in every scheduler
    """In a scheduler whose decodes all get a token when the lane's clock goes on."""
    lane, seats = state.lanes[i], state.seats[i]
    r, ends = int(seats[WHO, seat]), seats[ENDS, seat]
    return r, (0 if ends >= EMPTY else int(state.requests[r].output - max(ends - lane.clock, 0)))


@part
def never_waits(state: State, pool: Pool, group: Group, until: float) -> int:  # noqa: ARG001 - as in every scheduler
    """In a scheduler that computes what it can at once."""
    return 0


@part
def end_of_group(state: State, pool: Pool, group: Group) -> float:  # noqa: ARG001 - as in every scheduler
    """In a scheduler that has one step in flight at most."""
    return group.end


@part
def up_to_the_newest(state: State, pool: Pool, lane: Lane) -> int:  # noqa: ARG001 - as in every scheduler
    """In a scheduler whose seats are all below ``top``."""
    return lane.top


@part
def never_staged(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """In a scheduler that takes no requests of other lanes."""


@part
def no_transfer(state: State, pool: Pool, i: int, start: float) -> float:  # noqa: ARG001 - as in every scheduler
    """In a scheduler whose steps take as long as their batches."""
    return 0.0


@part
def always_room(state: State, pool: Pool, group: Group) -> bool:  # noqa: ARG001 - as in every scheduler
    """In a scheduler whose arrays never grow."""
    return True


@instructions
def _seen(_: Any, state: Any, extra: Any) -> Any:
    """The state with these arrays alone as ``extra``, its last field.

    LLVM takes minutes over a function that returns the 260 values of a State, so this is none.
    """
    from numba import types

    alone = types.NamedTuple((*state.types[:-1], extra), State)

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        whole, extra = arguments
        kept = [builder.extract_value(whole, i) for i in range(len(alone) - 1)]
        return context.make_tuple(builder, alone, [*kept, extra])

    return alone(state, extra), build


def _one_of(k: int, rule: Callable[..., Any], others: Callable[..., Any] | None) -> Callable[..., Any]:
    """The rule of the k-th scheduler for its pools, and for the rest that of the others, if there are any."""

    def alone(state: Any, pool: Any, *rest: Any) -> Any:
        return rule(_seen(state, state.extra[k]), pool, *rest)  # type: ignore[call-arg]

    def chosen(state: Any, pool: Any, *rest: Any) -> Any:
        if pool.scheduler == k:
            return rule(_seen(state, state.extra[k]), pool, *rest)  # type: ignore[call-arg]
        return others(state, pool, *rest)  # type: ignore[misc]

    return chosen if others else alone


def _compile(function: Callable[..., Any], absent: Callable[..., Any] | None = None) -> None:
    """Let compiled code call ``function``: it becomes that of the scheduler, by the compiler's type of a State."""

    def rule_of(extra: Any) -> Any:
        return getattr(sys.modules[extra.instance_class.__module__], function.__name__, absent)

    def chosen(state: Any, *_: Any) -> Any:
        from numba import types

        extra = state.types[state.fields.index("extra")]
        if isinstance(extra, types.BaseNamedTuple):
            rule = rule_of(extra)
            return getattr(rule, "py_func", rule)
        others = None
        for k in range(len(extra) - 1, 0, -1):
            others = part(_one_of(k, rule_of(extra[k]), others))
        return _one_of(0, rule_of(extra[0]), others)

    chosen_by_types(function, chosen, forceinline=True)


for _function in (
    enqueue,
    step,
    decide,
    conclude,
    pass_over,
    jump,
    update_bound,
    let_go,
    occupied,
    may_stage,
    stage,
    join,
):
    _compile(_function)
_compile(room, always_room)
_compile(transfer, no_transfer)
_compile(unstage, never_staged)
_compile(seated, up_to_the_newest)
_compile(given_tokens, by_the_clock)
_compile(latest_end, end_of_group)
_compile(wait, never_waits)
