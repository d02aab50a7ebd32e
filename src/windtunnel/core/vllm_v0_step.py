"""One step of a lane of vLLM's v0 scheduler: decide, look up how long it takes, let the results take effect."""

from typing import Any

import numpy as np

from windtunnel.core.heap import push
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import finish_decodes, leave, receive_token, start_decoding, unlink
from windtunnel.core.lookup import rank_time, step_time
from windtunnel.core.records import DECODING, GONE, IDLE, IGNORED, LEAVING, NONE, STEPPED, State
from windtunnel.core.step import write_row
from windtunnel.core.vllm_v0_blocks import free
from windtunnel.core.vllm_v0_cache import mark_computed
from windtunnel.core.vllm_v0_chunked import join_lists, serve_chunked
from windtunnel.core.vllm_v0_default import serve_default
from windtunnel.core.vllm_v0_lane import fail, failed
from windtunnel.core.vllm_v0_passes import begin_step, prefills, return_swapped
from windtunnel.core.vllm_v0_queue import queue_evicted
from windtunnel.core.vllm_v0_records import NO_END, has_tables
from windtunnel.core.vllm_v0_tables import DEVICE

Array = Any


@kernel
def decide(state: State, pool: Any, group: Any) -> tuple[bool, bool]:
    """Decide the next step; returns whether anything is scheduled, and whether anybody else was preempted or ignored.

    Nothing is scheduled in an engine that has ended, or ends here.
    """
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    if failed(state, group):
        return False, False
    begin_step(state, pool, state.own.rules[group.pool], lane, extra)
    schedule(state, pool, state.own.rules[group.pool], lane, extra, state.own.lists[group.first_lane], group.now)
    if failed(state, group):
        return False, False
    order_chunks(state.requests, lane, extra)
    return lane.chunks > 0 or extra.serves_decodes > 0, extra.preempted + extra.ignored > 0


@kernel
def conclude(state: State, pool: Any, group: Any, end: float) -> int:
    """The step that was decided ends at ``end``: log it, let its results take effect, move the clock."""
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    rules, start = state.own.rules[group.pool], group.now
    log_step(state, pool, group, lane, extra, start, transfer_time(rules, extra))
    if has_tables(state):
        mark_computed(state.own.cells, state.own.touched, state.own.shelves[2 * group.first_lane + DEVICE])
    if extra.serves_decodes:
        finish_decodes(pool, lane, state.requests, state.heap, state.phases, end)
        extra.decoding, extra.decoded = start, end
    finish_stalls(state, extra, end)
    finish_prefills(state, pool, lane, extra, start, end)
    notice_circles(state, pool, rules, lane, extra, start)
    arrive(state, pool, group, lane, extra, end)
    return STEPPED


@kernel
def pass_over(state: State, pool: Any, group: Any, changed: bool) -> int:
    """Nothing is scheduled. Whoever was ignored leaves a moment later."""
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    now = np.nextafter(group.now, np.inf) if extra.ignored > 0 else group.now
    arrive(state, pool, group, lane, extra, now)
    return STEPPED if changed else IDLE


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    scheduled, changed = decide(state, pool, group)
    if failed(state, group):
        return stand_still(group, lane)
    if not scheduled:
        return pass_over(state, pool, group, changed)
    seconds = batch_time(state, pool, lane, extra) + transfer_time(state.own.rules[group.pool], extra)
    return conclude(state, pool, group, group.now + seconds)


@kernel
def schedule(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """Decide the lane's next step: prefills first and alone, or, with chunks, after all others."""
    for turn in range(2):
        if turn == rules.chunked_prefill:
            if rules.chunked_prefill or extra.swapped_head == NONE:
                prefills(state, pool, rules, lane, extra, start)
            if lane.chunks > 0 and not rules.chunked_prefill:
                return
            continue
        if rules.chunked_prefill:
            serve_chunked(state, pool, rules, lane, extra, lists, start)
        else:
            serve_default(state, pool, rules, lane, extra, lists, start)
        if extra.lacking == 0:
            return_swapped(state, pool, rules, lane, extra, start)
    queue_evicted(lane, extra, state.requests)
    if rules.chunked_prefill:
        join_lists(state, pool, lane, extra, lists)


@kernel
def stand_still(group: Any, lane: Any) -> int:
    """Nobody leaves an engine that has ended."""
    group.released = 0
    lane.released = 0
    lane.released_ghosts = 0
    return IDLE


@kernel
def notice_circles(state: State, pool: Any, rules: Any, lane: Any, extra: Any, start: float) -> None:
    """Too many steps in a row that gave nobody a token never end; see ``policy.vllm_v0.patience``."""
    if extra.serves_decodes or extra.ignored > 0 or extra.emitted > 0:
        extra.fruitless = 0
        return
    extra.fruitless += 1
    if extra.fruitless > rules.patience:
        fail(state, lane.first_chunk, NO_END, start, pool.max_num_batched_tokens)


@kernel
def order_chunks(requests: Array, lane: Any, extra: Any) -> None:
    """New prefills come before all others in the batch."""
    if extra.new_chunk != NONE:
        requests[extra.last_new_chunk].next_chunk = lane.first_chunk
        lane.first_chunk = extra.new_chunk


@kernel
def transfer_time(rules: Any, extra: Any) -> float:
    """Seconds that the step waits for blocks on their way; see VllmV0.transfer_time."""
    if extra.blocks_out + extra.blocks_in == 0:
        return 0.0
    transfers = int(extra.blocks_out > 0) + int(extra.blocks_in > 0)
    return rules.swap_latency * transfers + rules.swap_seconds_per_block * (extra.blocks_out + extra.blocks_in)


@kernel
def batch_time(state: State, pool: Any, lane: Any, extra: Any) -> float:
    """Seconds of the batch; see BatchTimes.batch."""
    decodes = lane.decodes if extra.serves_decodes else 0
    gpu = rank_time(pool, state.floats, state.integers, lane, state.requests, decodes, lane.kv_tokens)
    return step_time(pool, state.floats, gpu, decodes + lane.chunks)


@kernel
def log_step(state: State, pool: Any, group: Any, lane: Any, extra: Any, start: float, transfer: float) -> None:
    """Record the scheduled step: one row, and one more for each further chunk."""
    requests = state.requests
    r = lane.first_chunk
    for i in range(max(lane.chunks, 1)):
        row = write_row(state, group, lane, start, 1 if i == 0 else 0)
        row.decodes = lane.decodes if i == 0 and extra.serves_decodes else 0
        row.kv_tokens = lane.kv_tokens if i == 0 and extra.serves_decodes else 0
        row.used_blocks = pool.num_blocks - lane.free
        row.waiting = lane.waiting
        if i == 0:
            row.discarded = extra.late
            row.transfer = transfer
        if lane.chunks > 0:
            row.chunk_tokens = requests[r].chunk
            row.chunk_context = requests[r].context
            r = requests[r].next_chunk


@kernel
def finish_stalls(state: State, extra: Any, end: float) -> None:
    """The tokens of decodes that had paused arrive."""
    for i in range(extra.first_stall, extra.first_stall + extra.late):
        state.stalls[i].resumed_token = end


@kernel
def finish_prefills(state: State, pool: Any, lane: Any, extra: Any, start: float, end: float) -> None:
    """Advance the step's chunks; a finished prefill yields a token at ``end``."""
    requests = state.requests
    r = lane.first_chunk
    for _ in range(lane.chunks):
        request = requests[r]
        following = request.next_chunk
        request.context += request.chunk
        state.own.requests[r].accessed = start
        if request.context == request.prompt + request.generated:
            emit(state, pool, lane, r, end)
            extra.emitted += 1
        r = following


@kernel
def emit(state: State, pool: Any, lane: Any, r: int, end: float) -> None:
    """The token that a prefill ends with: the request's first one, or the end of a stall."""
    request, mine = state.requests[r], state.own.requests[r]
    mine.prefilling = 0
    mine.joined = end
    receive_token(state.stalls, state.counters, request, r, end)
    if request.generated == request.output:
        leave(pool, lane, state.requests, state.phases, r, end)
        return
    request.state = DECODING
    start_decoding(pool, lane, state.phases, request)
    push(state.heap, lane, lane.clock + request.output - request.generated, r)


@kernel
def arrive(state: State, pool: Any, group: Any, lane: Any, extra: Any, now: float) -> None:
    """The group's clock reaches ``now``: who has ended leaves."""
    requests = state.requests
    group.now = now
    group.end = now
    lane.left = lane.leaving_next
    lane.leaving_next = NONE
    lane.released = 0
    lane.released_ghosts = 0
    if has_tables(state) and lane.left != NONE:
        free_in_order(state, pool, lane, extra)
    r = lane.left
    while r != NONE:
        request = requests[r]
        if request.state == LEAVING:
            leave_lane(state, pool, lane, extra, r)
        elif request.state == IGNORED:
            lane.waiting -= 1
            lane.released_ghosts += 1
        lane.released += 1
        r = request.next_leaving
    lane.outstanding -= lane.released
    group.released = lane.released


@kernel
def free_in_order(state: State, pool: Any, lane: Any, extra: Any) -> None:
    """Those who have ended give their blocks back in the order of the running list."""
    r = lane.head
    while r != NONE:
        following = state.requests[r].next
        if state.requests[r].state == LEAVING:
            mine = state.own.requests[r]
            mine.accessed = max(mine.accessed, extra.decoding)
            leave_lane(state, pool, lane, extra, r)
        r = following


@kernel
def leave_lane(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """A request that has ended leaves the running list and its blocks."""
    unlink(lane, state.requests, r)
    free(state, pool, lane, extra, r)
    state.requests[r].state = GONE
