"""Padded batches, ``policy.WholeBatches``: one is made when nothing runs, and runs to its end.

Its requests have the first seats, in order of arrival. The clock counts the steps in which they decode, and those that
have all their tokens do so as well, as padding, until the longest output has ended. Each holds the same memory: that
for the longest prompt and the longest declared output together.

In a pipeline each stage has an engine that makes batches of its requests, with its share of the memory. What a step
means for them is known when it has passed all stages: ``finish`` is called then.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.pipelines import engines
from windtunnel.core.pipelines.stages import PIPE_OF_LANE, clear_pipe, pipes
from windtunnel.core.queues import pop_first, put_last
from windtunnel.core.records import NONE, ROWS, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.seats import EMPTY, ENDS, NEVER, WHO, add_chunk, end_decodes, ends_at, sit
from windtunnel.core.step import begin_boundary, depart, emit_first, launch_counted, nothing

POOL_FIELDS: Fields = [
    ("max_queue_delay", np.float64),
    ("places", np.int64),  # requests of a batch at most
    ("answer_singly", np.int64),
    ("stages", np.int64),
]

LANE_FIELDS: Fields = [
    *(
        (name, np.int64)
        for name in (
            "longest",  # tokens of the longest prompt of the batch
            "prefilled",  # its requests that have computed their prompt
            "padding",  # those that have all their tokens
            "held",  # blocks
        )
    ),
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = [("max_tokens", np.int32)]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    pipe: Any
    """core.pipelines.stages.Pipe, or None where a step has a single stage."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools."""
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        pool["stages"] = policy.pipeline_parallel_size
        pool["num_blocks"] = limits.num_blocks // policy.pipeline_parallel_size
        pool["places"] = policy.places(limits)
        pool["answer_singly"], pool["max_queue_delay"] = policy.answer_singly, policy.max_queue_delay
    requests["max_tokens"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    piped = any(policy.pipeline_parallel_size > 1 for policy in fleet.policies)
    return Extra(pipes(fleet, lanes) if piped else None)


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing."""
    if state.extra.pipe is not None:
        clear_pipe(state, state.extra.pipe, i)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Put an arriving request into the queue."""
    enqueue_in(state, lane, r, state.extra.pipe)


@part
def enqueue_in(state: State, lane: Lane, r: int, pipe: Any) -> None:
    """The queue is that of the lane, or in a pipeline that of the least busy engine."""
    if pipe is not None:
        lane = engines.hand_over(state, lane, r)
    put_last(lane, state.requests, r)
    if pipe is not None:
        engines.interrupt(state, lane)


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """It keeps nothing for others."""


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """It takes nothing of others."""


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Likewise."""


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:  # noqa: ARG001 - as in every scheduler
    """Likewise."""
    return False


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests of the batch whose answers have not left."""
    return int(state.lanes[i].running)


# A step.


@part
def opens(pool: Pool, lane: Lane, requests: Array) -> float:
    """When a batch is made of what waits, while nothing runs."""
    return requests[lane.head].arrival + pool.max_queue_delay if lane.waiting < pool.places else 0.0


@compiled
def make_batch(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Take as many waiting requests as memory holds when each has the size of the largest."""
    prompt = output = 0
    while lane.head != NONE and lane.top < pool.places:
        head = requests[lane.head]
        longest, declared = max(prompt, head.prompt), max(output, head.max_tokens)
        each = blocks_of(pool, min(longest + declared, pool.max_model_len) - 1)
        if each * (lane.top + 1) > pool.num_blocks and lane.top > 0:
            break
        prompt, output = longest, declared
        sit(lane, seats, pop_first(lane, requests))
        lane.held = each * lane.top
    lane.free -= lane.held
    lane.longest, lane.next_end = prompt, NEVER


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``: a batch's prompts, as many as a step holds when all are as long as the
    longest, then its decodes."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv = 0, 0, 0, 0
    if lane.top == 0 and lane.head != NONE and start >= opens(pool, lane, requests):
        make_batch(pool, lane, requests, seats)
    if lane.prefilled < lane.top:
        rows = max(pool.max_num_batched_tokens // lane.longest, 1)
        for seat in range(lane.prefilled, min(lane.prefilled + rows, lane.top)):
            add_chunk(lane, seats, lane.longest, 0, 0)
            if np.isnan(requests[seats[WHO, seat]].scheduled):
                requests[seats[WHO, seat]].scheduled = start
    elif lane.top > 0:
        lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
    return False


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step: nobody takes the tokens of padding. In a pipeline the first stage may begin with it after the
    decision."""
    lane, now = state.lanes[i], state.groups[state.lanes[i].group].now
    for seat in range(lane.prefilled, lane.prefilled + lane.chunks):
        request = state.requests[state.seats[i, WHO, seat]]
        if request.scheduled == now:
            request.scheduled = max(start, now)
    launch_counted(state, pool, i, start, lane.padding if lane.step_decodes > 0 else 0, 0.0)


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """A request has all its tokens; its answer may leave, its place and memory stay."""
    lane, seats = state.lanes[i], state.seats[i]
    lane.padding += 1
    if pool.answer_singly:
        r = seats[WHO, seat]
        seats[ENDS, seat] = EMPTY
        lane.running -= 1
        state.requests[r].finish = end
        depart(lane, state.requests, r)


@compiled
def end_prompts(state: State, pool: Pool, i: int, end: float) -> None:
    """The prompts of this step yield a token each; after the last of them all decode."""
    lane, seats = state.lanes[i], state.seats[i]
    for seat in range(lane.prefilled, lane.prefilled + lane.chunks):
        r = seats[WHO, seat]
        emit_first(state, r, end)
        left = state.requests[r].output - state.requests[r].generated
        seats[ENDS, seat] = lane.clock
        if left > 0:
            ends_at(lane, seats, seat, lane.clock + left)
        else:
            ended(state, pool, i, seat, end)
    lane.prefilled += lane.chunks
    if lane.prefilled == lane.top:
        lane.decodes, lane.kv_tokens = lane.top, lane.top * lane.longest


@compiled
def end_batch(state: State, pool: Pool, i: int, end: float) -> None:
    """All have all their tokens: those answers leave that have not, and all memory is free."""
    lane, seats = state.lanes[i], state.seats[i]
    for seat in range(lane.top):
        r = seats[WHO, seat]
        if not pool.answer_singly:
            state.requests[r].finish = end
            depart(lane, state.requests, r)
        seats[ENDS, seat] = EMPTY
    lane.free += lane.held
    lane.running = lane.top = lane.first = lane.prefilled = lane.padding = lane.held = 0
    lane.decodes = lane.kv_tokens = 0


@part
def finish(state: State, pool: Pool, i: int, end: float) -> None:
    """The results of the lane's step take effect."""
    lane = state.lanes[i]
    if lane.step_decodes > 0:
        end_decodes(state, pool, i, state.seats[i], lane.clock, end, ended)
    elif lane.chunks > 0:
        end_prompts(state, pool, i, end)
    lane.end = end
    if 0 < lane.top == lane.padding:
        end_batch(state, pool, i, end)


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, False: nobody has to go)."""
    return steps.decide(state, pool, group, schedule)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, launch, finish, nothing)


@part
def pass_over(state: State, pool: Pool, group: Group, goes_on: bool) -> int:
    """Nothing is scheduled."""
    return steps.pass_over(state, pool, group, goes_on, nothing)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.extra.pipe)


@part
def step_through(state: State, pool: Pool, group: Group, pipe: Any) -> int:
    """A step of one stage, or of one of several engines."""
    if pipe is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, nothing)
    return engines.step(state, pool, group, pipe, schedule, nothing, launch, nothing_yet, finish, stay)


@part
def nothing_yet(state: State, pool: Pool, i: int, end: float) -> None:
    """A step has begun."""


@part
def stay(state: State, pool: Pool, i: int) -> None:
    """Nobody leaves before a step has ended."""


# Many steps at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:  # noqa: ARG001 - as in every scheduler
    """What the next steps of lane ``i`` have in common; see ``core.jump``. Nobody joins a batch."""
    lane = state.lanes[i]
    if lane.top == 0:
        return (FOREVER if lane.head == NONE else 0), 0, True
    return (lane.next_end - lane.clock - 1 if lane.decodes > 0 else 0), 0, False


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Equal steps leave nothing else behind; the clock counts those with decodes."""
    lane = state.lanes[i]
    if lane.decodes == 0:
        lane.clock -= steps


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps as possible, or let time pass until a batch is made."""
    return jump_through(state, pool, group, until, state.extra.pipe)


@part
def steady_alone(state: State, pool: Pool, i: int, now: float, until: float) -> tuple[int, bool]:  # noqa: ARG001 - see there
    """What the next steps of an engine have in common; see ``core.pipelines.engines``."""
    possible, _, joins = steady(state, pool, i)
    return possible, joins


@part
def padding_of(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Decodes of a batch whose tokens nobody takes."""
    return int(state.lanes[i].padding)


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, pipe: Any) -> int:
    """Equal steps of one stage, or equal rounds of several engines."""
    if pipe is None:
        return jump_together(state, pool, group, until)
    return engines.equal_rounds(state, pool, group, pipe, until, steady_alone, jumped, padding_of)


@part
def jump_together(state: State, pool: Pool, group: Group, until: float) -> int:
    """The lanes of a group make equal steps, or wait."""
    row, lanes = state.counters[ROWS], state.lanes
    done = equal_steps(state, pool, group, until, steady, jumped, True)
    if done == 0:
        return wait(state, pool, group, until)
    for k in range(group.num_lanes):
        lane = lanes[group.first_lane + k]
        state.rows[row + k].discarded = lane.padding
    return done


@part
def opening(pool: Pool, group: Group, lanes: Array, requests: Array) -> float:
    """When the first batch of a group is made in which nothing runs; infinite if something does, or nothing waits."""
    now = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if lanes[i].top > 0:
            return np.inf
        if lanes[i].head != NONE:
            now = min(now, opens(pool, lanes[i], requests))
    return now


@part
def wait(state: State, pool: Pool, group: Group, until: float) -> int:
    """Let time pass until a batch is made; whether there is one to wait for."""
    opened = opening(pool, group, state.lanes, state.requests)
    if pool.stages > 1 or not group.now < opened < np.inf:
        return 0
    group.now = group.end = min(opened, until)
    begin_boundary(group, state.lanes)
    return 1


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``: none of a batch before the next has all its tokens. One step of
    slack covers rounding."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.decodes > 0:
            shortest = shortest_step(state, pool, lane, state.extra.pipe)
            group.bound = min(group.bound, group.now + float(max(lane.next_end - lane.clock - 1, 0)) * shortest)
        elif lane.top > 0:
            group.bound = group.now
        elif lane.head != NONE:
            opened = opening(pool, group, state.lanes, state.requests)
            group.bound = min(group.bound, opened if group.now < opened < np.inf else group.now)


@part
def shortest_step(state: State, pool: Pool, lane: Lane, pipe: Any) -> float:
    """Seconds that a step of the lane's decodes takes at least."""
    if pipe is None:
        return float(state.floats[pool.shortest_step + lane.decodes])
    return engines.shortest_step(lane, pool, pipe)
