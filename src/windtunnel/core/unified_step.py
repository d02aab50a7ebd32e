"""One step of a group of lanes under the unified scheduler."""

from typing import Any

from windtunnel.core.heap import remove_at
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import add_stall, receive_token
from windtunnel.core.lookup import lockstep_tokens, rank_time, step_time
from windtunnel.core.records import IDLE, NONE, STEPPED, State
from windtunnel.core.step import write_row
from windtunnel.core.unified_lane import depart, start_decoding, stop_decoding
from windtunnel.core.unified_schedule import schedule


@kernel
def group_time(state: State, pool: Any, group: Any) -> float:
    """Seconds of the step that the group's lanes have scheduled; see BatchTimes.batch and BatchTimes.lockstep."""
    lanes, queues = state.lanes, state.own.queues
    first = group.first_lane
    gpu, largest, total, sequences = 0.0, 0, 0, 1
    for i in range(first, first + group.num_lanes):
        lane = lanes[i]
        decodes = lane.decodes if queues[i].decoding else 0
        kv_tokens = lane.kv_tokens if queues[i].decoding else 0
        gpu = max(gpu, rank_time(pool, state.floats, state.integers, lane, state.requests, decodes, kv_tokens))
        tokens = max(decodes + lane.chunk_tokens, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, decodes + lane.chunks)
    if group.num_lanes > 1:
        experts = lockstep_tokens(pool, state.integers, largest, total, group.num_lanes)
        gpu = gpu + state.floats[pool.expert_tokens + experts]
    return step_time(pool, state.floats, gpu, sequences)


@kernel
def log_step(state: State, pool: Any, group: Any, lane: Any, queue: Any, transfer: float) -> None:
    """Record the lane's scheduled step: one row, and one more for each further chunk."""
    requests, more = state.requests, state.own.more
    row = write_row(state, group, lane, group.now, 1)
    row.decodes = lane.decodes if queue.decoding else 0
    row.kv_tokens = lane.kv_tokens if queue.decoding else 0
    row.used_blocks = pool.num_blocks - lane.free
    row.waiting = lane.waiting
    row.transfer = transfer
    if queue.decoding:
        r = queue.returned
        while r != NONE:
            row.discarded += 1
            r = more[r].next_returned
    r = lane.first_chunk
    for i in range(lane.chunks):
        if i > 0:
            row = write_row(state, group, lane, group.now, 0)
            row.decodes, row.kv_tokens = 0, 0
            row.used_blocks = pool.num_blocks - lane.free
            row.waiting = lane.waiting
        row.chunk_tokens = requests[r].chunk
        row.chunk_context = requests[r].context
        r = requests[r].next_chunk


@kernel
def finish_decodes(state: State, pool: Any, rules: Any, lane: Any, queue: Any, end: float) -> None:
    """Advance the clock by the step's decodes and let those go whose last token this was."""
    if lane.clock >= queue.opens_at_clock:
        queue.opens_at_clock = lane.clock + rules.interval
    queue.forming = 0
    queue.decoded_at = end
    lane.clock += 1
    lane.kv_tokens += lane.decodes
    r = queue.returned
    while r != NONE:
        add_stall(state.stalls, state.counters, state.requests[r], r, end)
        state.own.more[r].has_returned = 0
        r = state.own.more[r].next_returned
    queue.returned = NONE
    heap = state.heap
    while lane.heap_size > 0 and heap[lane.heap] >> 32 <= lane.clock:
        r = heap[lane.heap] & 0xFFFFFFFF
        remove_at(heap, lane, 0)
        stop_decoding(state, pool, rules, lane, queue, r)
        depart(state, pool, rules, lane, r, end)


@kernel
def finish_chunks(state: State, pool: Any, rules: Any, lane: Any, queue: Any, end: float) -> None:
    """Advance the step's chunks; a finished prefill yields a token at ``end``. The others stay part-way."""
    queue.last_prefill_time = end - queue.started
    more = state.own.more
    r = queue.part_way
    queue.part_way, queue.part_way_tail = NONE, NONE
    while r != NONE:
        request = state.requests[r]
        following = more[r].next_part_way
        request.context += request.chunk
        if request.context < request.prompt + request.generated:
            more[r].next_part_way = NONE
            if queue.part_way == NONE:
                queue.part_way = r
            else:
                more[queue.part_way_tail].next_part_way = r
            queue.part_way_tail = r
        else:
            finish_prefill(state, pool, rules, lane, queue, r, end)
        r = following


@kernel
def finish_prefill(state: State, pool: Any, rules: Any, lane: Any, queue: Any, r: int, end: float) -> None:
    """A request has caught up."""
    request = state.requests[r]
    receive_token(state.stalls, state.counters, request, r, end)
    request.last_token = end
    if request.generated == request.output:
        depart(state, pool, rules, lane, r, end)
    else:
        start_decoding(state, pool, rules, lane, queue, r)


@kernel
def balance(state: State, rules: Any, group: Any) -> None:
    """Whether the ranks admit in the next step; see reference.balance."""
    lanes, queues = state.lanes, state.own.queues
    first, last = group.first_lane, group.first_lane + group.num_lanes
    together, decoding = True, True
    for i in range(first, last):
        together &= lanes[i].waiting > queues[i].on_host
        decoding &= lanes[i].decodes > 0
    unbalanced = 0 if together else queues[first].unbalanced + 1
    due = unbalanced >= rules.balance_timeout or not decoding
    queues[first].unbalanced = 0 if due else unbalanced
    for i in range(first, last):
        queues[i].held = 0 if together or due else 1


@kernel
def begin_boundary(state: State, group: Any) -> None:
    """Nobody has left at this time yet."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].released = 0
        state.lanes[i].left = NONE


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    lanes, queues, rules = state.lanes, state.own.queues, state.own.rules[group.pool]
    first, last = group.first_lane, group.first_lane + group.num_lanes
    scheduled, evicted = False, False
    if rules.balance_timeout > 0 and group.num_lanes > 1:
        balance(state, rules, group)
    for i in range(first, last):
        schedule(state, pool, rules, lanes[i], queues[i], group.now)
        scheduled |= queues[i].decoding > 0 or lanes[i].chunks > 0
        evicted |= queues[i].evicted > 0
    begin_boundary(state, group)
    if not scheduled:
        return STEPPED if evicted else IDLE
    waits = 0.0
    for i in range(first, last):
        queue = queues[i]
        transfer = 0.0
        if queue.decoding or lanes[i].chunks > 0:
            transfer = float(queue.moved) * rules.swap_time
            queue.moved = 0
        log_step(state, pool, group, lanes[i], queue, transfer)
        waits = max(waits, transfer)
    end = group.now + (group_time(state, pool, group) + waits)
    for i in range(first, last):
        queues[i].started = group.now
        if queues[i].decoding:
            finish_decodes(state, pool, rules, lanes[i], queues[i], end)
        if lanes[i].chunks > 0:
            finish_chunks(state, pool, rules, lanes[i], queues[i], end)
        group.released += lanes[i].released
    group.now, group.end = end, end
    return STEPPED
