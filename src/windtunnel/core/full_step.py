"""One step of a group where every rule of vLLM's v1 schedulers may hold."""

from typing import Any

from windtunnel.core.admission import admit
from windtunnel.core.eviction import add_partial, drop_partial, resume_held
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import finish_decodes, finish_prefill, stop_decoding, unlink
from windtunnel.core.prefix_cache import give_back
from windtunnel.core.records import GONE, IDLE, NONE, PREFILLING, QUEUED, STEPPED, State
from windtunnel.core.running import NO_ROOM, most_tokens, schedule_in_turn, schedule_together
from windtunnel.core.step import begin_boundary, group_time, log_step

Array = Any


@kernel
def schedule(state: State, pool: Any, i: int, start: float, end: float) -> bool:
    """Decide the next step of lane ``i``; returns whether anybody was preempted."""
    lane = state.lanes[i]
    lane.chunks = 0
    lane.chunk_tokens = 0
    most = most_tokens(pool, lane)
    preempted = False
    budget = schedule_together(state, pool, i, most)
    if budget == NO_ROOM:
        budget, preempted = schedule_in_turn(state, pool, i, most, end)
    if not preempted:
        admit(state, pool, i, budget, most, start)
    return preempted


@kernel
def finish_chunks(state: State, pool: Any, i: int, end: float) -> None:
    """Advance the step's chunks; a finished prefill yields a token at ``end``.

    The tokens of a request that had to go in the same step count as computed.
    """
    lane, requests, own = state.lanes[i], state.requests, state.own
    shelf = own.shelves[i]
    r = lane.first_chunk
    for _ in range(lane.chunks):
        request = requests[r]
        following = request.next_chunk
        if request.state == QUEUED:
            request.context = request.chunk
        elif request.state == PREFILLING:
            request.context += request.chunk
            if request.context == request.prompt + request.generated:
                drop_partial(lane, shelf, own.holdings, r)
                own.holdings[r].certain = request.context
                finish_prefill(pool, lane, requests, state.heap, state.phases, r, end, state.stalls, state.counters)
                shelf.silent = 0
            elif not own.holdings[r].part_way:
                add_partial(lane, shelf, own.holdings, r)
        r = following


@kernel
def in_order(requests: Array, holdings: Array, first: int) -> int:
    """Requests linked by next_leaving, newest first for the most part, brought into the order of the running list."""
    head, tail = NONE, NONE
    reverse = NONE
    while first != NONE:
        following = requests[first].next_leaving
        requests[first].next_leaving = reverse
        reverse, first = first, following
    while reverse != NONE:
        r = reverse
        reverse = requests[r].next_leaving
        requests[r].next_leaving = NONE
        if head == NONE:
            head = tail = r
        elif holdings[tail].sequence < holdings[r].sequence:
            requests[tail].next_leaving = r
            tail = r
        elif holdings[r].sequence < holdings[head].sequence:
            requests[r].next_leaving = head
            head = r
        else:
            before = head
            while holdings[requests[before].next_leaving].sequence < holdings[r].sequence:
                before = requests[before].next_leaving
            requests[r].next_leaving = requests[before].next_leaving
            requests[before].next_leaving = r
    return head


@kernel
def release(state: State, pool: Any, i: int) -> int:
    """The last tokens in flight have arrived: free seats and blocks. Returns how many requests left."""
    lane, requests = state.lanes[i], state.requests
    r = in_order(requests, state.own.holdings, lane.leaving)
    lane.left = r
    count = 0
    while r != NONE:
        request = requests[r]
        if not request.evicted:
            if request.counts:
                stop_decoding(pool, lane, state.phases, request)
            unlink(lane, requests, r)
            give_back(state, pool, i, r, request.context, request.prompt + request.output - 1, False)
        request.state = GONE
        count += 1
        r = request.next_leaving
    lane.outstanding -= count
    lane.released_ghosts = lane.ghosts
    lane.ghosts = 0
    lane.leaving = lane.leaving_next
    lane.leaving_next = NONE
    return count


@kernel
def arrive(state: State, pool: Any, group: Any, now: float) -> None:
    """The group's clock reaches ``now``, where the output of the older step in flight arrives."""
    group.now = now
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].released = release(state, pool, i)
        group.released += state.lanes[i].released


@kernel
def take_effect(state: State, pool: Any, group: Any, end: float) -> None:
    """The step that ends at ``end`` is on its way: move to the time at which the next one is decided."""
    lanes = state.lanes
    arrives = not pool.async_scheduling or group.end > group.now
    before = end if not pool.async_scheduling else group.end
    if not pool.async_scheduling or not arrives:
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            lanes[i].leaving = lanes[i].leaving_next
            lanes[i].leaving_next = NONE
    if arrives:
        arrive(state, pool, group, before)
    else:
        begin_boundary(group, lanes)
    group.end = end


@kernel
def gives_up(state: State, pool: Any, group: Any) -> bool:
    """Whether no lane goes on: requests of equal priority and arrival may preempt each other for ever."""
    stuck = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.lanes[i].running + state.lanes[i].waiting > 0:
            if state.own.shelves[i].silent <= 4 * pool.max_model_len + 1000:
                return False
            stuck = True
    return stuck


@kernel
def decide(state: State, pool: Any, group: Any) -> tuple[bool, bool]:
    """Decide the next step of every lane; returns whether anything is scheduled, and whether anybody was preempted."""
    start = max(group.now, group.end)
    scheduled, preempted = False, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, shelf = state.lanes[i], state.own.shelves[i]
        preempted |= schedule(state, pool, i, start, group.end)
        scheduled |= lane.decodes + lane.chunks > 0
        shelf.silent = shelf.silent + 1 if lane.running + lane.waiting > 0 else 0
    return scheduled, preempted


@kernel
def conclude(state: State, pool: Any, group: Any, end: float) -> int:
    """The step that was decided ends at ``end``: log it, let its results take effect, move the clock."""
    start = max(group.now, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        log_step(state, pool, group, lane, start)
        if lane.decodes > 0:
            finish_decodes(pool, lane, state.requests, state.heap, state.phases, end)
            state.own.shelves[i].silent = 0
        if lane.chunks > 0:
            finish_chunks(state, pool, i, end)
        resume_held(state, pool, i)
    take_effect(state, pool, group, end)
    return IDLE if gives_up(state, pool, group) else STEPPED


@kernel
def pass_over(state: State, pool: Any, group: Any, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        resume_held(state, pool, i)
    if group.end > group.now:
        arrive(state, pool, group, group.end)
        return STEPPED
    begin_boundary(group, state.lanes)
    return STEPPED if preempted and not gives_up(state, pool, group) else IDLE


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    scheduled, preempted = decide(state, pool, group)
    if not scheduled:
        return pass_over(state, pool, group, preempted)
    return conclude(state, pool, group, max(group.now, group.end) + group_time(state, pool, group))
