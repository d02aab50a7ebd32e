"""A scheduler of the user's: at each step it is asked, and what it says is checked and carried out.

Decodes that go on are counted by the lane's clock, as in every scheduler here; one that is not named pauses: it stands
in a seat without an end, as prompts that are part-way do. ``user_asking`` puts the question to a Python object,
``user_columns`` puts it to a function of record arrays. Where nothing is visible, nothing is asked.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, entry, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.records import NONE, Array, Fields, Group, Lane, Pool, State, attributes
from windtunnel.core.schedulers.user_asking import (
    BESIDE,
    BROKEN,
    CAME,
    COUNT,
    KEPT,
    LANE_BITS,
    OBJECTS,
    OK,
    RAISED,
    WENT,
    WHAT_IS_NOTED,
    WHETHER_TAKEN,
    Asked,
    call_python,
)
from windtunnel.core.schedulers.user_columns import REQUEST_COLUMNS
from windtunnel.core.schedulers.user_decisions import carry_out, take_seat
from windtunnel.core.schedulers.user_questions import COUNTED, ask, look, note
from windtunnel.core.seats import (
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    WHO,
    blocks_due,
    context_of,
    count,
    end_decodes,
    ends_at,
    skip_decodes,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import depart, nothing

POOL_FIELDS: Fields = [("of_user", np.int64)]

LANE_FIELDS: Fields = [
    ("before", np.float64),  # when the latest step with decodes ends
    *(
        (name, np.int64)
        for name in (
            "asks",  # OBJECTS, IN_COLUMNS or MACHINE_CODE
            "chooses",  # whether it has a word in what a decode pool takes
            "allocates",  # whether it says how many blocks a request holds
            "holding",  # those that decode go on, and nothing is asked
            "wants_hold",  # whether the decision of this step asks for that; NONE: no decision was made
            "named",  # in the latest decision
            "ahead",  # whether a step has been decided and not begun
            "late",  # decodes of this step whose gap is a stall, or that were evicted before
            "beyond",  # decodes of requests whose last token is in flight, which the scheduler cannot know
            "some_left",
            "kept_blocks",  # of requests that are not here yet, or no longer
            "evictions",  # since a token was last computed
        )
    ),
]

REQUEST_FIELDS: Fields = [
    *((name, np.int64) for name in ("id", "priority", "known", "computed", "blocks", "evicted_at")),
    ("more", np.int64),  # blocks that it holds beyond those of its tokens
    ("max_tokens", np.int32),
    ("seat", np.int32),
    ("queued", np.int8),
    ("prefill_tokens", np.int32),  # known tokens when it was last admitted: from there on it decodes
    ("resumed", np.int8),  # admitted again, or come with its KV, and no token since
    ("beyond", np.int8),  # its last token is in flight, and it goes on (COUNTED) or was left out (LEFT_OUT)
]


class Extra(NamedTuple):
    """Questions and answers."""

    numbers: Any
    names: Any
    """[n + 1] the requests that a decision names, in order; ``tokens``: what each of them computes."""
    tokens: Any
    wanted: Any
    """[n + 1] blocks that each of them is to hold, where the scheduler allocates."""
    evict: Any
    """[most that run + 1] those that it evicts, the foremost of the queue first."""
    came: Any
    """[n + 1] requests that have come to a queue since the last question, with their lanes << 40; so ``sat`` of those
    that have sat down, ``went`` of those that are no longer shown, ``beside`` of those that have memory and wait for
    their KV."""
    sat: Any
    went: Any
    beside: Any
    waiting: Any
    """Columns of what waits, and of what runs, for schedulers that want them so; see ``schedulers.user_columns``."""
    running: Any
    limits: Any
    """[lanes + 1] each lane's limits; the first entry is what is left of them in this question."""
    functions: Any
    """[lanes] addresses of schedulers in machine code."""
    addresses: Any
    """Of the columns."""
    turns: Any
    """[n + 1] of those that such a scheduler names."""
    call: Any
    """[1] the address of ``schedulers.user_asking.Asked.call``."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Fill in the fields, make each rank's scheduler, and make the arrays of a run.

    Raises:
        InputError: a scheduler cannot be made, or has no ``schedule``.
    """
    n, most = len(requests), max(limits.max_num_seqs for limits in fleet.limits)
    requests["id"] = np.arange(n)
    requests["priority"] = 0 if demand.priority is None else demand.priority
    requests["max_tokens"] = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    requests["known"], requests["seat"] = requests["prompt"], NONE
    lanes["clock"], lanes["before"] = 1, -np.inf
    for pool, policy in zip(pools, fleet.policies, strict=True):
        pool["async_scheduling"] = policy.async_scheduling
    asked = Asked(fleet, lanes, requests)
    lanes["asks"], lanes["chooses"], lanes["allocates"] = asked.kinds, asked.choosing, asked.allocating
    many, some = (n + 1, most + 1) if (lanes["asks"] != OBJECTS).any() else (1, 1)

    def numbers(count: int) -> NDArray[np.int64]:
        return np.zeros(count, dtype=np.int64)

    extra = Extra(
        numbers=numbers(COUNT),
        names=numbers(n + 1),
        tokens=numbers(n + 1),
        wanted=numbers(n + 1),
        evict=numbers(most + 1),
        came=numbers(n + 1),
        sat=numbers(n + 1),
        went=numbers(n + 1),
        beside=numbers(n + 1),
        waiting=attributes(np.zeros(many, dtype=REQUEST_COLUMNS)),
        running=attributes(np.zeros(some, dtype=REQUEST_COLUMNS)),
        limits=attributes(asked.limits_of_lanes()),
        functions=asked.functions,
        addresses=numbers(3),
        turns=np.zeros(many),
        call=numbers(1),
    )
    extra.addresses[:] = [columns.ctypes.data for columns in (extra.waiting, extra.running, extra.limits)]
    asked.begin(extra)
    return extra


def check(state: State) -> None:
    """Raise what a scheduler raised, or InputError for the rule that it broke."""
    KEPT[int(state.extra.call[0])].require_right()


def check_end(state: State) -> None:
    """Raise InputError for requests that a scheduler has left."""
    KEPT[int(state.extra.call[0])].require_none_left(state)


def renew(extra: Extra, r: int) -> None:
    """Another request than before stands in row ``r``."""
    KEPT[int(extra.call[0])].renew(r)


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing: its scheduler is a new one."""
    KEPT[int(state.extra.call[0])].clear(i)


def stand_in(state: State, i: int, r: int, row: int) -> None:
    """Lane ``i`` has ``row`` of the requests in place of ``r``; its scheduler is asked anew."""
    KEPT[int(state.extra.call[0])].stand_in(i, r, row)
    state.lanes["holding"][i] = 0


# The queue, linked in both directions.


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Put an arriving request into the queue."""
    request = state.requests[r]
    request.known = request.prompt + request.generated
    request.computed, request.blocks, request.context, request.queued, request.more = 0, 0, 0, 1, 0
    request.next, request.previous = NONE, lane.tail
    if lane.head == NONE:
        lane.head = r
        request.previous = NONE
    else:
        state.requests[lane.tail].next = r
    lane.tail = r
    lane.waiting += 1
    lane.holding = 0
    note(state.extra.came, state.extra.numbers, CAME, lane, r, request.lane)


# Requests that come from other lanes, or go to them.


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left: none if it was evicted with its last token on the way."""
    blocks = blocks_of(pool, state.requests[r].context)
    lane.free += blocks
    lane.kept_blocks -= blocks
    lane.holding = 0


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests that run."""
    return int(state.lanes[i].running)


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request from elsewhere gets memory in lane ``i``: by vLLM's rule (see ``schedulers.vllm``), and if the
    scheduler, where it has a word in that, takes it."""
    lane, request = state.lanes[i], state.requests[r]
    if lane.waiting + lane.ghosts > 0:
        return False
    known = request.prompt + request.generated
    wanted = blocks_of(pool, min(known, pool.max_model_len))
    wanted += blocks_of(pool, min(reserved, pool.max_model_len)) * (lane.running + lane.staged + 1)
    if wanted > lane.free or lane.chooses == 0:
        return wanted <= lane.free
    _, gone, held = look(state, pool, i)
    if gone >= pool.max_num_seqs or held >= pool.num_blocks or state.extra.numbers[BROKEN] != OK:
        return False
    lane.holding, lane.wants_hold = 0, min(lane.wants_hold, 0)
    request.known = known
    now, which = state.groups[lane.group].now, i + (int(r) << LANE_BITS)
    answer = call_python(state.extra.call[0], WHETHER_TAKEN, which, now, gone, held)
    if answer < 0:
        state.extra.numbers[BROKEN] = RAISED
    return bool(answer == 1)


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it: all tokens but the last known one."""
    lane, request = state.lanes[i], state.requests[r]
    request.known = request.prompt + request.generated
    request.context = request.computed = request.prefill_tokens = request.known - 1
    request.blocks = blocks_of(pool, request.context)
    lane.free -= request.blocks
    lane.kept_blocks += request.blocks
    note(state.extra.beside, state.extra.numbers, BESIDE, lane, r, i)


@part
def unstage(state: State, pool: Pool, lane: Lane, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Take that memory back."""
    request = state.requests[r]
    lane.free += request.blocks
    lane.kept_blocks -= request.blocks
    request.context, request.computed, request.blocks = 0, 0, 0
    lane.holding, lane.wants_hold = 0, min(lane.wants_hold, 0)  # nor what was decided before it is carried out
    note(state.extra.went, state.extra.numbers, WENT, lane, r, request.lane)
    if lane.asks == OBJECTS or lane.chooses == 1:  # it may get memory here again before the next question
        call_python(state.extra.call[0], WHAT_IS_NOTED, 0, 0.0, 0, 0)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Let a request, whose KV is in the lane's memory, be named from the next step on."""
    lane, request = state.lanes[i], state.requests[r]
    lane.kept_blocks -= request.blocks
    lane.holding = 0
    take_seat(state, i, r)
    request.resumed = 1


# What a decision is made of, and whether there is one to make.


@part
def goes_on(pool: Pool, lane: Lane, seats: Array) -> bool:
    """Whether a decision is held, and no block lacks."""
    return lane.holding == 1 and blocks_due(pool, lane, seats) <= lane.free


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``, which starts at ``start``; returns whether any request was evicted."""
    lane, seats = state.lanes[i], state.seats[i]
    lane.chunks, lane.chunk_tokens, lane.late, lane.some_left, lane.step_decodes, lane.step_kv = 0, 0, 0, 0, 0, 0
    lane.wants_hold = NONE
    preempted = False
    if goes_on(pool, lane, seats):
        lane.free -= blocks_due(pool, lane, seats)
        lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
    elif ask(state, pool, i):
        preempted = carry_out(state, pool, i, start)
    lane.ahead = 1
    return preempted


# What follows.


@entry
def ask_once(state: State, i: int) -> bool:
    """Ask the scheduler of lane ``i``, and do nothing of what it says; whether that breaks no rule."""
    return bool(ask(state, state.pools[state.groups[state.lanes[i].group].pool], i))


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request was evicted)."""
    return steps.decide(state, pool, group, schedule)


@part
def begin_step(lane: Lane) -> None:
    """The decision is behind; one that chooses is asked again at each."""
    lane.ahead = 0
    if lane.chooses == 1:
        lane.refused = 0


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step; the clock goes on."""
    lane = state.lanes[i]
    discarded = lane.late + lane.beyond
    begin_step(lane)
    write_step(state, pool, state.groups[lane.group], lane, state.seats[i], start, discarded, 0.0)
    lane.clock += 1
    lane.kv_tokens += lane.decodes


@part
def begin_leaving(state: State, pool: Pool, i: int, seat: int, end: float) -> bool:
    """The last token of a request arrives at ``end``; whether it goes on until then, because it has declared more."""
    lane, seats = state.lanes[i], state.seats[i]
    r = seats[WHO, seat]
    request = state.requests[r]
    request.finish = end
    start_leaving(lane, seats, seat)
    if pool.async_scheduling and request.max_tokens > request.output:
        request.beyond = COUNTED
        lane.beyond += 1
        return True
    request.seat = NONE
    note(state.extra.went, state.extra.numbers, WENT, lane, r, i)
    return False


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """The last token of a decode is scheduled and arrives at ``end``; until then it keeps blocks and seat."""
    lane, seats = state.lanes[i], state.seats[i]
    request = state.requests[seats[WHO, seat]]
    if not begin_leaving(state, pool, i, seat, end):
        count(pool, lane, seats, request.prompt + request.output - 1, -1)


@compiled
def give_tokens(state: State, pool: Pool, i: int, end: float) -> None:
    """Prompts that are complete, and decodes after a pause, get a token at ``end``."""
    lane, seats = state.lanes[i], state.seats[i]
    for seat in range(lane.first, lane.top):
        if seats[ENDS, seat] != NEVER or seats[NOW, seat] == 0:
            continue
        r = seats[WHO, seat]
        request = state.requests[r]
        seats[NOW, seat] = 0
        if request.context < request.prompt + request.generated:
            continue
        request.generated += 1
        lane.evictions = 0
        if request.generated == 1:
            request.first_token = end
        elif request.resumed or request.last_token < lane.before:
            write_stall(state, r, request.last_token, end)
        request.resumed = 0
        request.last_token = end
        left = request.output - request.generated
        seats[ENDS, seat] = lane.clock + left
        if left > 0:
            ends_at(lane, seats, seat, lane.clock + left)
        if left > 0 or begin_leaving(state, pool, i, seat, end):
            count(pool, lane, seats, request.context, 1)
    skip_decodes(lane, seats)


@part
def finish(state: State, pool: Pool, i: int, end: float) -> None:
    """The results of the lane's step take effect, and a decision is held if it asks for that."""
    lane, seats = state.lanes[i], state.seats[i]
    before = lane.decodes
    if lane.decodes > lane.beyond:
        lane.evictions = 0
    end_decodes(state, pool, i, seats, lane.clock, end, ended)
    fewer = lane.decodes < before
    if lane.wants_hold != NONE:
        give_tokens(state, pool, i, end)
        all_go_on = lane.decodes == lane.named and lane.chunks == 0
        lane.holding = lane.wants_hold == 1 and lane.decodes > 0 and (lane.waiting + lane.ghosts == 0 or all_go_on)
    if (fewer and lane.wants_hold == NONE) or lane.some_left:
        end_hold(lane)
    if lane.step_decodes > 0:
        lane.before = end
    lane.end = end


@part
def end_hold(lane: Lane) -> None:
    """Some have left: a held decision ends where others wait."""
    if lane.waiting + lane.ghosts > 0 or lane.decodes == 0:
        lane.holding = 0


@part
def release_seat(state: State, pool: Pool, i: int, seat: int) -> None:
    """The last token of a request has arrived: free its seat and blocks."""
    lane, seats = state.lanes[i], state.seats[i]
    r = seats[WHO, seat]
    request = state.requests[r]
    request.context = request.prompt + request.output - 1
    if request.beyond == COUNTED:
        request.context = context_of(lane, request, seats[ENDS, seat])
        count(pool, lane, seats, request.context, -1)
        lane.beyond -= 1
    if request.beyond != 0:
        request.beyond, request.seat = 0, NONE
        note(state.extra.went, state.extra.numbers, WENT, lane, r, i)
    lane.free += request.more
    request.more = 0
    if request.holds:
        lane.kept_blocks += blocks_of(pool, request.context)
    else:
        lane.free += blocks_of(pool, request.context)
    stand_up(lane, seats, seat)
    depart(lane, state.requests, r)


@part
def release(state: State, pool: Pool, i: int, time: float) -> None:  # noqa: ARG001 - as in every scheduler
    """The last tokens in flight have arrived."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    some = lane.leaving + lane.ghosts > 0
    for k in range(lane.leaving):
        release_seat(state, pool, i, seats[LEAVING, k])
    lane.leaving = 0
    r, lane.ghost = lane.ghost, NONE
    while r != NONE:
        following = requests[r].next
        requests[r].beyond = 0
        lane.ghosts -= 1
        lane.released_ghosts += 1
        depart(lane, requests, r)
        r = following
    if some:
        lane.some_left = 1
        end_hold(lane)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, launch, finish, release)


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision."""
    begin_step(state.lanes[i])
    if arrives:
        release(state, pool, i, 0.0)


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    return steps.pass_over(state, pool, group, preempted and state.extra.numbers[BROKEN] == OK, skip)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return steps.step(state, pool, group, decide, conclude, pass_over, nothing)


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:  # noqa: ARG001 - as in every scheduler
    """What the next steps of lane ``i`` have in common; see ``core.jump``."""
    lane = state.lanes[i]
    if lane.running + lane.waiting + lane.ghosts == 0:
        return FOREVER, 0, True
    if lane.holding == 0 or lane.leaving > 0:
        return 0, 0, False
    return lane.next_end - lane.clock - 1, 0, True


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Equal steps have been made."""
    lane = state.lanes[i]
    if lane.decodes > 0:
        lane.before, lane.evictions = lane.end, 0


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many steps of held decisions as possible; see ``core.jump``."""
    return equal_steps(state, pool, group, until, steady, jumped)


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.head != NONE or lane.first < lane.top or lane.leaving + lane.ghosts > 0:
            group.bound = group.now
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            group.bound = min(group.bound, group.now + float(lane.next_end - lane.clock - 1) * shortest)
        elif group.end > group.now:
            group.bound = min(group.bound, group.end)
