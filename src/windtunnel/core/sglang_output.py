"""What a round of SGLang gives: tokens, ends, its row in the log and its time."""

from typing import Any

from windtunnel.core.heap import push, remove_at
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of, receive_token
from windtunnel.core.lookup import lockstep_tokens, rank_time, step_time
from windtunnel.core.records import DECODING, GONE, NONE, ROWS, State
from windtunnel.core.sglang_memory import give_back, keep
from windtunnel.core.step import write_row

Array = Any


@kernel
def stop(lane: Any, request: Any) -> None:
    """Take a request out of the sums of the decodes, its context up to date."""
    request.context = request.offset + lane.clock
    lane.decodes -= 1
    lane.kv_tokens -= request.context


@kernel
def used_blocks(settings: Any, rank: Any) -> int:
    """KV blocks that requests hold; cached tokens that could be evicted count as free."""
    return blocks_of(settings.total_tokens - rank.available - rank.evictable, settings.block_size)


@kernel
def log_round(state: State, settings: Any, group: Any, i: int, start: float) -> None:
    """Record lane ``i``'s round: one row, and one more for each further chunk."""
    lane, rank, requests = state.lanes[i], state.own.ranks[i], state.requests
    rank.row = state.counters[ROWS]
    r = lane.first_chunk
    for k in range(max(lane.chunks, 1)):
        row = write_row(state, group, lane, start, 1 if k == 0 else 0)
        row.decodes = rank.decodes if k == 0 else 0
        row.kv_tokens = lane.kv_tokens if k == 0 and rank.decodes > 0 else 0
        row.used_blocks = used_blocks(settings, rank)
        row.waiting = lane.waiting
        if lane.chunks > 0:
            row.chunk_tokens = requests[r].chunk
            row.chunk_context = requests[r].context
            r = requests[r].next_chunk


@kernel
def round_time(state: State, pool: Any, group: Any) -> float:
    """Seconds of the round that the group's lanes have scheduled; see BatchTimes.batch and BatchTimes.lockstep."""
    floats, integers = state.floats, state.integers
    gpu, largest, total, sequences = 0.0, 0, 0, 1
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, decodes = state.lanes[i], state.own.ranks[i].decodes
        kv_tokens = lane.kv_tokens if decodes > 0 else 0
        gpu = max(gpu, rank_time(pool, floats, integers, lane, state.requests, decodes, kv_tokens))
        tokens = max(decodes + lane.chunk_tokens, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, decodes + lane.chunks)
    if group.num_lanes > 1:
        experts = lockstep_tokens(pool, integers, largest, total, group.num_lanes)
        gpu = gpu + floats[pool.expert_tokens + experts]
    return step_time(pool, floats, gpu, sequences)


@kernel
def emit_first(state: State, rank: Any, lane: Any, r: int, end: float) -> bool:
    """A prompt is done: its request gets a token at ``end``, and decodes from now on unless it was the last one."""
    own, request, entry = state.own, state.requests[r], state.own.entries[r]
    receive_token(state.stalls, state.counters, request, r, end)
    request.last_token = end
    if request.generated == request.output:
        give_back(own, rank, r, request.prompt + request.generated)
        return True
    keep(own, rank, r)
    request.state = DECODING
    request.context = entry.filled
    request.offset = request.context - lane.clock
    push(state.heap, lane, lane.clock + request.output - request.generated, r)
    return False


@kernel
def end_request(lane: Any, requests: Array, r: int, end: float) -> None:
    """The request is done and gone."""
    requests[r].state = GONE
    requests[r].finish = end
    requests[r].next_leaving = lane.left
    lane.left = r
    lane.released += 1


@kernel
def emit_decodes(state: State, rank: Any, lane: Any, end: float, batch: Array, size: int) -> int:
    """Those whose last token this was leave, in the order of the batch: ``size`` entries from the lane's seats on.
    Returns how many."""
    own, requests = state.own, state.requests
    ending, last = 0, NONE
    while lane.heap_size > 0 and state.heap[lane.heap] >> 32 <= lane.clock:
        last = state.heap[lane.heap] & 0xFFFFFFFF
        remove_at(state.heap, lane, 0)
        stop(lane, requests[last])
        requests[last].generated = requests[last].output
        end_request(lane, requests, last, end)
        ending += 1
    for i in range(size if ending > 1 else ending):  # one call: machine code that fits the cache is faster
        r = last if ending == 1 else batch[rank.seats + i]
        if requests[r].state == GONE and requests[r].finish == end:
            give_back(own, rank, r, requests[r].prompt + requests[r].output)
    return ending


@kernel
def update(state: State, i: int, end: float) -> None:
    """Lane ``i``'s round has run: a token for every request whose prompt is done."""
    own, lane, rank = state.own, state.lanes[i], state.own.ranks[i]
    if rank.decodes > 0:
        lane.clock += 1
        lane.kv_tokens += rank.decodes
        rank.last_decode = end
    for k in range(rank.seats, rank.seats + lane.chunks):
        r = own.batch[k]
        if r == rank.chunked:
            continue
        if emit_first(state, rank, lane, r, end):
            end_request(lane, state.requests, r, end)
        else:
            lane.decodes += 1
            lane.kv_tokens += state.requests[r].context
    if rank.decodes > 0:
        rank.ended += emit_decodes(state, rank, lane, end, own.running, rank.running)
    lane.outstanding -= lane.released
    lane.running = lane.outstanding - lane.waiting
