"""Fast-forward under the unified scheduler: runs of steps that differ only in context lengths.

A run needs that nobody joins or leaves. What blocks the head of the queue goes on to block it, because free blocks only
shrink while places and tokens stay the same; where that does not hold, steps are made singly.
"""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.lookup import decode_time, prefill_time, step_time
from windtunnel.core.records import NONE, ROWS, State
from windtunnel.core.steady import NEVER, run_decodes, run_mixed
from windtunnel.core.step import write_row
from windtunnel.core.unified_lane import can_return
from windtunnel.core.unified_queue import is_long_enough, opens
from windtunnel.core.unified_records import CONTINUOUS, LOOK_AHEAD, ON_DEMAND
from windtunnel.core.unified_schedule import asked_block, first_tokens, fits
from windtunnel.core.unified_step import begin_boundary


@kernel
def closed_for_long(rules: Any, lane: Any, queue: Any) -> bool:
    """Whether nobody can join while the present requests run."""
    if queue.swapped != NONE or lane.running >= rules.places:
        return True
    if not rules.mixed and not rules.prefill_first:
        return True
    return rules.batching != CONTINUOUS and not queue.forming


@kernel
def head_is_blocked(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> bool:
    """Whether the head of an open queue lacks a place, tokens or memory, and will as long as nobody leaves."""
    waiting = lane.waiting - queue.on_host
    if rules.places - lane.running < min(rules.together, waiting):
        return True
    need = state.phases[lane.phase + lane.clock % pool.block_size]
    kept = need + asked_block(state, pool, rules, lane) if rules.mixed and rules.prefill_first else 0
    room = lane.free - kept
    if rules.mixed and not rules.prefill_first:
        room -= need
        kept = need
    if room - rules.watermark_blocks < 1:
        return True
    if rules.pass_over or rules.allocation == LOOK_AHEAD:
        return False
    taken = lane.decodes if rules.mixed and not rules.prefill_first else 0
    left = min(rules.tokens - taken, rules.prefill_tokens)
    r = lane.queue_head
    tokens = first_tokens(rules, state.requests[r].prompt + state.requests[r].generated, left)
    return left <= 0 or not fits(state, pool, rules, lane, queue, r, tokens, left, kept)


@kernel
def steps_possible(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> int:
    """How many steps a lane that only decodes may run; 0 if the next one must be made singly."""
    unlike = queue.part_way != NONE or queue.returned != NONE or rules.token_budget != 0
    if unlike or can_return(state, pool, rules, lane, queue):
        return 0
    if lane.decodes == 0:
        return NEVER if lane.queue_head == NONE else 0
    steps = next_finish(state.heap, lane) - lane.clock
    if closed_for_long(rules, lane, queue):
        return steps
    return min(steps, steps_without_admission(state, pool, rules, lane, queue))


@kernel
def steps_without_admission(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> int:
    """Decode steps in which those who wait now stay in a queue that may open."""
    steps = NEVER if rules.interval == 1 else max(queue.opens_at_clock - lane.clock, 0)
    if lane.queue_head == NONE:
        return steps
    if rules.delay_factor > 0.0 or rules.batching != CONTINUOUS:
        return 0
    always = rules.interval == 1 and rules.queue_ratio == 0.0
    is_open = always or is_long_enough(rules, lane, lane.waiting - queue.on_host)
    return steps if not is_open or head_is_blocked(state, pool, rules, lane, queue) else 0


@kernel
def may_be_joined(rules: Any, lane: Any, queue: Any) -> bool:
    """Whether a request that arrives now could join, or open the queue to others: then a run stops at its arrival."""
    if lane.running == 0:
        return True
    if closed_for_long(rules, lane, queue):
        return False
    if rules.queue_ratio > 0.0 or lane.queue_head == NONE or rules.keyed or rules.pass_over:
        return rules.interval == 1 or rules.queue_ratio > 0.0
    return False


@kernel
def steady_row(state: State, pool: Any, group: Any, lane: Any) -> None:
    """Begin the lane's row with the state before the run; used_blocks and steps are set by the run."""
    row = write_row(state, group, lane, group.now, 0)
    row.decodes = lane.decodes
    row.kv_tokens = lane.kv_tokens
    row.waiting = lane.waiting
    row.used_blocks = pool.num_blocks - lane.free


@kernel
def one_chunk(rules: Any, lane: Any, queue: Any, request: Any) -> int:
    """Tokens of the only part-way prompt in each step of a run in which nobody else gets any; 0 if there is none."""
    if not rules.mixed or rules.prefill_first or rules.token_budget != 0 or rules.delay_factor > 0.0:
        return 0
    if rules.interval > 1 or rules.batching != CONTINUOUS or queue.returned != NONE:
        return 0
    tokens = min(rules.tokens - lane.decodes, rules.prefill_tokens)
    known = request.prompt + request.generated
    return tokens if tokens <= rules.threshold and known - request.context > tokens else 0


@kernel
def chunk_steps(state: State, lane: Any, queue: Any, tokens: int) -> int:
    """Steps before one in which somebody leaves, or the prompt of which each takes ``tokens`` ends."""
    request = state.requests[queue.part_way]
    if tokens == 0 or state.own.more[queue.part_way].next_part_way != NONE:
        return 0
    steps = (request.prompt + request.generated - request.context - 1) // tokens
    return min(steps, next_finish(state.heap, lane) - lane.clock - 1) if lane.decodes > 0 else steps


@kernel
def chunk_blocks(state: State, pool: Any, rules: Any, lane: Any, request: Any, tokens: int) -> int:
    """New blocks of the next such step."""
    need = state.phases[lane.phase + lane.clock % pool.block_size] if lane.decodes > 0 else 0
    if rules.allocation == ON_DEMAND:
        need += blocks_of(request.context + tokens, pool.block_size) - blocks_of(request.context, pool.block_size)
    return need


@kernel
def chunk_time(state: State, pool: Any, lane: Any, context: int, tokens: int) -> float:
    """Seconds of such a step; see BatchTimes.rank."""
    floats, integers = state.floats, state.integers
    time = floats[pool.mixed_tokens + lane.decodes + tokens]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, lane.decodes, lane.kv_tokens)
    time = time + prefill_time(pool, floats, integers, tokens, context)
    time = time + pool.prefill_base
    return step_time(pool, floats, time + floats[pool.sequences + lane.decodes + 1], lane.decodes + 1)


@kernel
def run_chunks(state: State, pool: Any, group: Any, rules: Any, lane: Any, queue: Any) -> int:
    """Steps of a single lane in which one long prompt takes all tokens that the decodes leave; returns how many."""
    request = state.requests[queue.part_way]
    tokens = one_chunk(rules, lane, queue, request)
    steps = chunk_steps(state, lane, queue, tokens)
    asked = 1 if rules.decodes_ask else 0  # stops where the last decode could ask in vain
    row = state.counters[ROWS]
    done = 0
    while done < steps:
        need = chunk_blocks(state, pool, rules, lane, request, tokens)
        if need + asked > lane.free:
            break
        lane.free -= need
        if done == 0:
            steady_row(state, pool, group, lane)
            state.rows[row].chunk_tokens, state.rows[row].chunk_context = tokens, request.context
        group.now = group.now + chunk_time(state, pool, lane, request.context, tokens)
        request.context += tokens
        if lane.decodes > 0:
            lane.clock += 1
            lane.kv_tokens += lane.decodes
        done += 1
    if done > 0:
        state.rows[row].steps = done
        if lane.decodes > 0:
            decoded(rules, lane, queue, done, group.now)
    return done


@kernel
def run_lanes(state: State, pool: Any, group: Any, rules: Any, until: float) -> int:
    """Steps in which every lane of the group only decodes, or does nothing."""
    lanes, queues, rows = state.lanes, state.own.queues, state.rows
    first, last = group.first_lane, group.first_lane + group.num_lanes
    steps, joinable = NEVER, False
    for i in range(first, last):
        steps = min(steps, steps_possible(state, pool, rules, lanes[i], queues[i]))
        joinable |= may_be_joined(rules, lanes[i], queues[i])
    balanced = rules.balance_timeout > 0 and group.num_lanes > 1
    if steps <= 1 or steps == NEVER or (balanced and somebody_waits(state, group)):
        return 0
    first_row = state.counters[ROWS]
    for i in range(first, last):
        steady_row(state, pool, group, lanes[i])
        if rules.decodes_ask:
            lanes[i].free -= 1  # a run stops where the last decode could ask in vain
    limit = until if joinable else np.inf
    if group.num_lanes == 1:
        done = run_decodes(state, pool, group, lanes[first], rows[first_row], steps - 1, limit, 0)
    else:
        done = run_mixed(state, pool, group, first_row, steps - 1, limit)
    for i in range(first, last):
        if rules.decodes_ask:
            lanes[i].free += 1
            rows[first_row + i - first].used_blocks -= 1
        rows[first_row + i - first].steps = done
        if done > 0 and lanes[i].decodes > 0:
            decoded(rules, lanes[i], queues[i], done, group.now)
    if done == 0:
        state.counters[ROWS] = first_row
    elif balanced:
        count_unbalanced(state, rules, group, done)
    return done


@kernel
def somebody_waits(state: State, group: Any) -> bool:
    """Whether any rank has a queue."""
    waits = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        waits |= state.lanes[i].queue_head != NONE
    return waits


@kernel
def count_unbalanced(state: State, rules: Any, group: Any, steps: int) -> None:
    """So many steps have passed in which nobody waited; see unified_step.balance."""
    first = group.first_lane
    decoding = True
    for i in range(first, first + group.num_lanes):
        decoding &= state.lanes[i].decodes > 0
    unbalanced = state.own.queues[first].unbalanced + steps
    state.own.queues[first].unbalanced = unbalanced % rules.balance_timeout if decoding else 0


@kernel
def decoded(rules: Any, lane: Any, queue: Any, steps: int, now: float) -> None:
    """What so many steps with decodes leave behind; see unified_step.finish_decodes."""
    queue.forming = 0
    queue.decoded_at = now
    first, last = lane.clock - steps, lane.clock - 1
    if queue.opens_at_clock <= last:
        opened = max(queue.opens_at_clock, first)
        queue.opens_at_clock = opened + ((last - opened) // rules.interval + 1) * rules.interval


@kernel
def wait_for_batch(state: State, rules: Any, group: Any, until: float) -> int:
    """Dynamic batching: let time pass until a queue opens or somebody arrives; 0 if there is nothing to wait for."""
    now = opening(state, rules, group)
    if not group.now < now < np.inf:
        return 0
    group.now = min(now, until)
    group.end = group.now
    return 1


@kernel
def opening(state: State, rules: Any, group: Any) -> float:
    """When the first queue of a group opens in which nobody runs; infinite if somebody does, or nobody waits."""
    now = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.running > 0 or state.own.queues[i].swapped != NONE:
            return np.inf
        if lane.queue_head != NONE:
            now = min(now, opens(state, rules, lane, state.own.queues[i]))
    return now


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Run as many equal steps as possible while ``now`` < ``until`` (which counts only if an arrival could join)."""
    rules = state.own.rules[group.pool]
    first = group.first_lane
    if group.num_lanes == 1 and state.own.queues[first].part_way != NONE:
        done = run_chunks(state, pool, group, rules, state.lanes[first], state.own.queues[first])
    else:
        done = run_lanes(state, pool, group, rules, until)
        if done == 0 and state.lanes[first].running == 0:
            done = wait_for_batch(state, rules, group, until)
    if done > 0:
        group.end = group.now
        begin_boundary(state, group)
    return done
