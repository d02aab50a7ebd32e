"""The unified scheduler, ``policy.Policy``: InferMax's one loop with parameters (arXiv 2411.07447).

Decodes are one group: in each step of a lane all of them take part, or none. So the lane's clock counts the steps in
which they do. Several prompts may be part-way; a request on the host stands in no seat.
"""

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.compiled import compiled, part
from windtunnel.core.hooks import HOOKS, address, call_token_budget
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.pipelines import turns
from windtunnel.core.pipelines.stages import PIPE_OF_LANE, pipes
from windtunnel.core.pipelines.turns import blocks_due, equal_rounds, given_tokens, latest_end
from windtunnel.core.queues import HOST_OF_LANE
from windtunnel.core.records import NONE, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.schedulers.unified_seats import (
    CONTINUOUS,
    LOOK_AHEAD,
    ON_DEMAND,
    add_end,
    add_prefill,
    admit,
    asked_block,
    balance,
    blocks_with,
    bring_back,
    can_return,
    clear,  # noqa: F401 - as in every scheduler
    count_decode,
    enqueue,
    evict,
    finish_seat,
    has_prompts,
    head_tokens,
    is_long_enough,
    is_open,
    join,
    let_go,
    may_stage,
    occupied,
    opens,
    remove_end,
    stage,
    stand_in,  # noqa: F401 - as in every scheduler
    start_decoding,
    unstage,
    waits,
)
from windtunnel.core.schedulers.unified_turns import (
    bring_forward,
    discarded,
    fill_places,
    is_stuck,
    leave_out,
    release_step,
    resume,
    steady_rounds,
    update_bound_of_rounds,
)
from windtunnel.core.seats import ENDS, NEVER, NOW, WHO, end_decodes, skip_decodes
from windtunnel.core.step import begin_boundary, emit_first, launch_counted, nothing
from windtunnel.policy.settings import Limits
from windtunnel.policy.unified import RESERVING, Allocation, Batching, Policy

__all__ = ["enqueue", "given_tokens", "join", "latest_end", "let_go", "may_stage", "occupied", "stage", "unstage"]

UNLIMITED = 1 << 60

SETTINGS = (
    *("mixed", "chunked_prefill", "look_ahead_margin", "decodes_ask_for_a_block", "host_blocks", "pass_over"),
    *("reschedule_interval", "padded_prefills", "admit_after_eviction", "decide_on_arrival"),
    *("swap_time_per_block", "max_queue_delay", "queue_ratio", "delay_factor", "queue_look_time"),
)
"""Fields of Policy that a pool has, too, the last five as floats."""

VICTIMS = {
    "newest": (1, 0, 0),
    "oldest": (-1, 0, 0),
    "shortest": (0, -1, 0),
    "longest": (0, 1, 0),
    "lowest_priority": (0, 0, 1),
}
"""How much a request's seat, context and priority count when one has to go: the one with the largest sum does."""

ORDERS = {
    "fcfs": (0, 0, 0),
    "priority": (0, 0, 1),
    "shortest_prompt": (1, 0, 0),
    "longest_prompt": (-1, 0, 0),
    "shortest_output": (0, 1, 0),
    "longest_output": (0, -1, 0),
    "shortest_job": (1, 1, 0),
    "longest_job": (-1, -1, 0),
}
"""How much its prompt, declared output and priority count in the queue: the smallest sum comes first."""

POOL_FIELDS: Fields = [
    *((name, np.int64) for name in (*SETTINGS[:-5], *HOOKS)),
    *((name, np.float64) for name in SETTINGS[-5:]),
    *((name, np.int64) for name in ("victim_seat", "victim_context", "victim_priority")),
    *((name, np.int64) for name in ("key_prompt", "key_output", "key_priority", "keyed")),
    *((name, np.int64) for name in ("prefill_first", "allocation", "reserves", "watermark_blocks", "batching")),
    *((name, np.int64) for name in ("max_num_prefill_tokens", "long_prefill_token_threshold", "balance_timeout")),
    *((name, np.int64) for name in ("max_num_partial_prefills", "max_long_partial_prefills")),
    *((name, np.int64) for name in ("prefills_together", "prefills_at_most", "stages")),
    *((name, np.int64) for name in ("places", "by_arrival")),  # of one step, not of all that run; the order of those
]

LANE_FIELDS: Fields = [
    *HOST_OF_LANE,
    *((name, np.int64) for name in ("on_host", "free_host")),  # requests on the host; blocks
    *((name, np.int64) for name in ("moved", "returned")),  # blocks since the last step; requests that then decode anew
    ("forming", np.int64),  # no request of the present batch has decoded yet
    ("opens_at_clock", np.int64),  # reschedule_interval steps after the last one that looked at the queue
    ("num_ends", np.int64),  # in its row of Own.ends
    ("unbalanced", np.int64),  # of the first rank: steps in which not all ranks had a request to admit
    ("last_prefill_time", np.float64),
    # the step that is being scheduled
    ("started", np.float64),
    *((name, np.int64) for name in ("held", "evicted")),  # other ranks are not ready to admit; a request had to go
    *((name, np.int64) for name in ("decode_need", "asked", "chunk_need")),  # blocks; asked for in vain by a decode
    *((name, np.int64) for name in ("part_ways", "long_part_ways")),  # prompts that are part-way after it
    ("looked", np.int64),  # the queue was gone through
    ("silent", np.int64),  # of a pipeline: decisions since the last token
    ("aside", np.int64),  # and requests that find no place in this step
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    ("key", np.float64),
    ("priority", np.int64),
    ("max_tokens", np.int32),  # declared
    ("returned", np.int8),  # from the host, or was left out of a step, and has not decoded since
    ("last_step", np.int32),  # of a pipeline: the latest one that computed any of its prompt
    ("aside", np.int8),  # finds no place in this step; 2: and was left out of one before
]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    ends: Array
    """[lanes, max_num_seqs] of each running request the clock at its declared end · 2³² + its number, the last first;
    empty without look-ahead."""
    pipe: Any
    """core.pipelines.stages.Pipe, or None where a step has a single stage."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the rules into the pools, and make the arrays of a run.

    Raises:
        InputError: a policy cannot run within its limits.
    """
    for pool, policy, limits, in_step in zip(pools, fleet.policies, fleet.limits, fleet.lockstep, strict=True):
        policy.check(limits)
        for name, value in _rules(policy, limits).items():
            pool[name] = value
        pool["balance_timeout"] = policy.balance_timeout if in_step else 0
    pool_of_lane = np.repeat(np.arange(len(pools)), fleet.num_lanes)
    lanes["swapped_head"] = lanes["swapped_tail"] = NONE
    lanes["free_host"] = pools["host_blocks"][pool_of_lane]
    requests["max_tokens"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    requests["priority"] = 0 if demand.priority is None else demand.priority
    looks_ahead = (pools["allocation"] == LOOK_AHEAD).any()
    piped = any(policy.pipeline_parallel_size > 1 for policy in fleet.policies)
    lanes["clock"] = int(piped)
    return Extra(
        ends=np.zeros((len(lanes), pools["max_num_seqs"].max() if looks_ahead else 0), dtype=np.int64),
        pipe=pipes(fleet, lanes) if piped else None,
    )


def _rules(policy: Policy, limits: Limits) -> dict[str, Any]:
    """A policy as numbers, by field of the pool; where it is stricter than the limits, its own hold."""
    victim, order = VICTIMS[policy.victim], ORDERS[policy.admission_order]
    return {
        **{name: getattr(policy, name) for name in SETTINGS},
        **{name: address(name, policy) for name in HOOKS},
        **dict(zip(("victim_seat", "victim_context", "victim_priority"), victim, strict=True)),
        **dict(zip(("key_prompt", "key_output", "key_priority"), order, strict=True)),
        "keyed": any(order) or policy.admission_key is not None,
        "prefill_first": policy.group_order == "prefill_first",
        "allocation": get_args(Allocation).index(policy.allocation),
        "reserves": policy.allocation in RESERVING,
        "watermark_blocks": policy.watermark_blocks(limits),
        "batching": get_args(Batching).index(policy.batching),
        "max_num_batched_tokens": policy.tokens(limits),
        "max_num_seqs": policy.most_running(limits),
        "places": policy.places(limits),
        "stages": policy.pipeline_parallel_size,
        "by_arrival": policy.running_order == "arrival",
        "max_num_prefill_tokens": policy.prefill_tokens(limits),
        "long_prefill_token_threshold": policy.long_prefill_token_threshold or UNLIMITED,
        "max_num_partial_prefills": policy.max_num_partial_prefills or UNLIMITED,
        "max_long_partial_prefills": policy.max_long_partial_prefills or UNLIMITED,
        **{name: getattr(policy, name)(limits) for name in ("prefills_together", "prefills_at_most")},
    }


# What a step computes.


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the lane's next step: who decodes, prefills, is admitted, has to go; whether any request had to."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    extra, ends = state.extra, state.extra.ends[i]
    lane.started, lane.evicted, lane.looked = start, 0, 0
    if lane.running == 0:
        lane.forming = 1
    if lane.swapped_head != NONE:
        bring_back(pool, lane, requests, seats, ends, extra.pipe)
    tokens = pool.max_num_batched_tokens
    if pool.token_budget != 0:
        waiting = lane.waiting - lane.on_host
        tokens = call_token_budget(pool.token_budget, lane.decodes, lane.kv_tokens, lane.free, waiting, tokens)
    for turn in range(2):
        prefills = pool.mixed or (pool.prefill_first > 0) == (turn == 0)
        make_room(pool, lane, requests, seats, ends, extra.pipe, tokens, pool.mixed or not prefills, prefills)
        lane.free -= lane.chunk_need
        left, kept = tokens, lane.decode_need + lane.asked
        if not pool.prefill_first:
            lane.free -= lane.decode_need
            left, kept = tokens - lane.step_decodes, 0
        admits = not lane.evicted or pool.admit_after_eviction
        if prefills and lane.head != NONE and admits and lane.swapped_head == NONE:
            left = min(left, pool.max_num_prefill_tokens) - lane.chunk_tokens
            if is_open(pool, lane, requests, state.groups[lane.group].now):
                lane.looked = 1
                admit(pool, lane, requests, seats, ends, extra.pipe, left, kept)
        if pool.prefill_first and lane.step_decodes > 0:
            if lane.decodes > tokens - lane.chunk_tokens:
                lane.step_decodes, lane.step_kv = 0, 0
            else:
                lane.free -= lane.decode_need
        if pool.mixed or lane.step_decodes + lane.chunks > 0:
            break
    leave_out(pool, lane, requests, seats, extra.pipe)
    return lane.evicted > 0


@part
def make_room(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    ends: Array,
    pipe: Any,
    tokens: int,
    decodes: bool,
    prefills: bool,
) -> None:
    """What running requests compute in this step; others are evicted until there are blocks for it."""
    while True:
        lane.chunks, lane.chunk_tokens, lane.chunk_need, lane.part_ways, lane.long_part_ways = 0, 0, 0, 0, 0
        if prefills and has_prompts(lane, seats, pipe):
            first = lane.decodes if decodes and not pool.prefill_first else 0
            plan_chunks(pool, lane, requests, seats, pipe, min(tokens - first, pool.max_num_prefill_tokens))
        lane.step_decodes, lane.step_kv, lane.decode_need, lane.asked = 0, 0, 0, 0
        if decodes:
            fill_places(pool, lane, requests, seats, pipe)
        if decodes and 0 < lane.decodes <= tokens - lane.chunk_tokens:
            lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
            lane.decode_need = blocks_due(pool, lane, seats, pipe)
            lane.asked = asked_block(pool, lane, requests, seats, pipe)
        if lane.decode_need + lane.asked + lane.chunk_need <= lane.free:
            return
        evict(pool, lane, requests, seats, ends, pipe)


@compiled
def plan_chunks(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any, left: int) -> None:
    """The next chunk of each part-way prompt, in order of admission."""
    for i in range(lane.first, lane.top):
        if seats[ENDS, i] != NEVER:
            continue
        request = requests[seats[WHO, i]]
        context = request.context
        tokens = min(request.prompt + request.generated - context, pool.long_prefill_token_threshold, max(left, 0))
        if waits(pool, lane, pipe, request):
            tokens = 0
        add_prefill(pool, lane, seats, request, i, tokens)
        lane.chunk_need += blocks_with(pool, request, context + tokens) - blocks_with(pool, request, context)
        left -= tokens


# What it leaves behind.


@part
def decoded(pool: Pool, lane: Lane) -> None:
    """Decodes took part in the steps up to the lane's clock: no batch is forming, and the queue was looked at when it
    was due."""
    lane.forming = 0
    overdue = lane.clock - 1 - lane.opens_at_clock
    if overdue >= 0:
        lane.opens_at_clock += (overdue // pool.reschedule_interval + 1) * pool.reschedule_interval


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """A decode gets its last token."""
    lane, seats, extra = state.lanes[i], state.seats[i], state.extra
    request = state.requests[seats[WHO, seat]]
    count_decode(pool, lane, seats, extra.pipe, lane.clock, request.prompt + request.output - 1, -1)
    finish_seat(pool, lane, state.requests, seats, extra.ends[i], extra.pipe, seat, end)


@part
def end_chunks(state: State, pool: Pool, lane: Lane, seats: Array, ends: Array, pipe: Any, end: float) -> None:
    """Advance the prefills; a finished one yields a token at ``end``."""
    lane.last_prefill_time = end - lane.started
    for i in range(lane.first, lane.top):
        if seats[ENDS, i] != NEVER:
            continue
        r = seats[WHO, i]
        request = state.requests[r]
        request.context += seats[NOW, i]
        if seats[NOW, i] > 0:
            request.last_step = lane.clock - 1
        if request.context < request.prompt + request.generated:
            continue
        emit_first(state, r, end)
        if request.generated == request.output:
            seats[ENDS, i] = lane.clock
            finish_seat(pool, lane, state.requests, seats, ends, pipe, i, end)
            continue
        start_decoding(pool, lane, seats, pipe, request, i)
        if pool.allocation == LOOK_AHEAD and lane.step_decodes == 0:  # one token less is left, on the same clock
            remove_end(lane, ends, r)
            add_end(lane, ends, request, r)
    skip_decodes(lane, seats)


@part
def transfer(state: State, pool: Pool, i: int, start: float) -> float:  # noqa: ARG001 - as in every scheduler
    """Seconds that the lane's step waits until the queue is gone through, and for blocks that move to the host or
    back."""
    lane = state.lanes[i]
    if lane.step_decodes + lane.chunks == 0:
        return 0.0
    looks = pool.queue_look_time if lane.looked else 0.0
    return looks + float(lane.moved) * pool.swap_time_per_block


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step; decodes that came back from the host end a stall."""
    lane = state.lanes[i]
    resumed = lane.returned if lane.step_decodes > 0 else 0
    launch_counted(state, pool, i, start, resumed, transfer(state, pool, i, start))
    if lane.step_decodes + lane.chunks > 0:
        lane.moved = 0


@part
def finish(state: State, pool: Pool, i: int, end: float) -> bool:
    """The results of the lane's step take effect; False: a later step is decided only when it knows them."""
    lane, seats, extra = state.lanes[i], state.seats[i], state.extra
    if lane.step_decodes > 0:
        lane.end, lane.silent = end, 0
        decoded(pool, lane)
        resume(state, pool, lane, seats, extra.pipe, end)
        end_decodes(state, pool, i, seats, lane.clock, end, ended)
    if lane.chunks > 0:
        end_chunks(state, pool, lane, seats, extra.ends[i], extra.pipe, end)
    return False


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request had to go)."""
    if pool.balance_timeout > 0 and group.num_lanes > 1:
        balance(pool, group, state.lanes)
    return steps.decide(state, pool, group, schedule)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, launch, finish, nothing)


@part
def pass_over(state: State, pool: Pool, group: Group, evicted: bool) -> int:
    """Nothing is scheduled."""
    return steps.pass_over(state, pool, group, evicted, nothing)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.extra.pipe)


@part
def step_through(state: State, pool: Pool, group: Group, pipe: Any) -> int:
    """A step of one stage, or of all stages of a pipeline."""
    if pipe is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, transfer)
    if pool.decide_on_arrival:
        return turns.step_on_arrival(
            state, pool, group, pipe, schedule, discarded, finish, release_step, is_stuck, bring_forward
        )
    return turns.step(state, pool, group, pipe, schedule, discarded, finish, release_step, is_stuck)


# Many steps at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """What the next steps of lane ``i`` have in common; see ``core.jump``. Where a look at the queue takes time, none
    is like another while anything waits."""
    slow = pool.queue_look_time > 0.0
    if slow and state.lanes[i].head != NONE:
        return 0, 0, False
    steps, tokens, joins = steady_steps(state, pool, i)
    return steps, tokens, joins or slow


@part
def steady_steps(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """The same where it takes none."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    lane.spare = 1 if pool.decodes_ask_for_a_block else 0  # a run stops where the newest decode could ask in vain
    if lane.returned > 0 or pool.token_budget != 0 or can_return(pool, lane, requests, seats, None):
        return 0, 0, False
    if lane.running > lane.decodes:
        steps, tokens = steady_chunk(pool, lane, requests, seats)
        return steps, tokens, False
    if lane.decodes == 0:
        return (FOREVER if lane.head == NONE else 0), 0, True
    steps = lane.next_end - lane.clock - 1
    if not may_open(pool, lane):
        return steps, 0, False
    if pool.reschedule_interval > 1:
        steps = min(steps, lane.opens_at_clock - lane.clock)
    if lane.head != NONE and head_may_join(pool, lane, requests, seats, state.extra.ends[i]):
        return 0, 0, False
    joins = pool.queue_ratio > 0.0 or lane.head == NONE or pool.keyed or pool.pass_over
    return steps, 0, joins and (pool.reschedule_interval == 1 or pool.queue_ratio > 0.0)


@part
def may_open(pool: Pool, lane: Lane) -> bool:
    """Whether the queue may open while the present requests run."""
    if lane.swapped_head != NONE or lane.running >= pool.max_num_seqs or not (pool.mixed or pool.prefill_first):
        return False
    return pool.batching == CONTINUOUS or lane.forming > 0


@compiled
def head_may_join(pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array) -> bool:
    """Whether the head of the queue might be admitted in a run of decodes.

    One that lacks a place, tokens or memory lacks them until a request leaves: free blocks only get fewer.
    """
    waiting = lane.waiting - lane.on_host
    if pool.delay_factor > 0.0 or pool.batching != CONTINUOUS:
        return True
    looks = (pool.reschedule_interval == 1 and pool.queue_ratio == 0.0) or is_long_enough(pool, lane)
    if not looks or pool.max_num_seqs - lane.running < min(pool.prefills_together, waiting):
        return False
    kept, taken = 0, 0
    if pool.mixed:
        kept = blocks_due(pool, lane, seats, None)
        if pool.prefill_first:
            kept += asked_block(pool, lane, requests, seats, None)
        else:
            taken = lane.decodes
    if lane.free - kept - pool.watermark_blocks < 1:
        return False
    left = min(pool.max_num_batched_tokens - taken, pool.max_num_prefill_tokens)
    if pool.pass_over or pool.allocation == LOOK_AHEAD:
        return True
    return left > 0 and head_tokens(pool, lane, requests, ends, left, kept) != 0


@compiled
def steady_chunk(pool: Pool, lane: Lane, requests: Array, seats: Array) -> tuple[int, int]:
    """(Steps in which one long prompt takes all tokens that the decodes leave, tokens of each); 0 if it does not."""
    skip_decodes(lane, seats)
    unlike = not pool.mixed or pool.prefill_first or pool.delay_factor > 0.0 or pool.reschedule_interval > 1
    if unlike or pool.batching != CONTINUOUS or lane.running - lane.decodes > 1:
        return 0, 0
    request = requests[seats[WHO, lane.first]]
    known = request.prompt + request.generated
    tokens = min(pool.max_num_batched_tokens - lane.decodes, pool.max_num_prefill_tokens)
    if tokens <= 0 or tokens > pool.long_prefill_token_threshold:
        return 0, 0
    steps = (known - request.context - 1) // tokens
    return (min(steps, lane.next_end - lane.clock - 1) if lane.decodes > 0 else steps), tokens


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:  # noqa: ARG001 - as in every scheduler
    """What equal steps leave behind, if they had decodes."""
    if state.lanes[i].decodes > 0:
        decoded(pool, state.lanes[i])


@part
def opening(pool: Pool, group: Group, lanes: Array, requests: Array) -> float:
    """When the first queue of a group opens in which nothing runs; infinite if something does, or nothing waits."""
    now = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = lanes[i]
        if lane.running > 0 or lane.swapped_head != NONE:
            return np.inf
        if lane.head != NONE:
            now = min(now, opens(pool, lane, requests))
    return now


@part
def wait(state: State, pool: Pool, group: Group, until: float) -> int:
    """Let time pass until a batch starts; whether there is one to wait for. Steps of a pipeline in flight are empty."""
    opened = opening(pool, group, state.lanes, state.requests)
    if not group.now < opened < np.inf:
        return 0
    group.now = group.end = min(opened, until)
    begin_boundary(group, state.lanes)
    if pool.stages > 1:
        lane = state.lanes[group.first_lane]
        lane.flying = lane.empty = lane.due = 0
    return 1


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps, or rounds of a pipeline, as possible; see ``core.jump`` and ``core.pipelines``."""
    return jump_through(state, pool, group, until, state.extra.pipe)


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, pipe: Any) -> int:
    """Equal steps of one stage, or equal rounds of a pipeline."""
    if pipe is None:
        return jump_together(state, pool, group, until)
    done = 0 if pool.decide_on_arrival else equal_rounds(state, pool, group, pipe, until, steady_rounds)
    return done if done > 0 else wait(state, pool, group, until)


@part
def jump_together(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps as possible, or let time pass until a batch starts."""
    lanes, first, last = state.lanes, group.first_lane, group.first_lane + group.num_lanes
    balanced, decoding, waits = pool.balance_timeout > 0 and group.num_lanes > 1, True, False
    for i in range(first, last):
        waits |= lanes[i].head != NONE
    done = 0
    if not (balanced and waits):
        done = equal_steps(state, pool, group, until, steady, jumped, pool.allocation != ON_DEMAND)
    if done == 0:
        return wait(state, pool, group, until)
    for i in range(first, last):
        if lanes[i].decodes == 0:  # the clock counts steps with decodes
            lanes[i].clock -= done
            decoding = False
    if balanced:
        lanes[first].unbalanced = (lanes[first].unbalanced + done) % pool.balance_timeout if decoding else 0
    return done


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish any request before the clock of its next end; one step of slack covers
    rounding. A group that waits for a batch to fill begins when the queue opens.
    """
    update_bound_through(state, pool, group, state.extra.pipe)


@part
def update_bound_through(state: State, pool: Pool, group: Group, pipe: Any) -> None:
    """No request leaves the group, of one stage or of several, before ``bound``."""
    if pipe is not None:
        update_bound_of_rounds(state, pool, group, pipe)
        opened = opening(pool, group, state.lanes, state.requests)
        group.bound = opened if group.now < opened < np.inf else group.bound
        return
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.waiting > 0 or lane.running > lane.decodes:
            opened = opening(pool, group, state.lanes, state.requests)
            group.bound = opened if group.now < opened < np.inf else group.now
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            group.bound = min(group.bound, group.now + float(lane.next_end - lane.clock - 1) * shortest)
