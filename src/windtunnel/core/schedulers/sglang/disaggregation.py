"""SGLang's prefill and decode servers (srt/disaggregation of 0.5.23): requests that go to other lanes, or come here.

A decode server gives a request memory before its prompt is computed, and keeps some for every request that it has. One
that is retracted there keeps its KV on the host, and is the first to get memory again.
"""

from windtunnel.core.compiled import part
from windtunnel.core.log import write_stall
from windtunnel.core.records import PREFILLING, Array, Lane, Pool, State
from windtunnel.core.schedulers.sglang.memory import BEYOND, MAX_ESTIMATED_NEW_TOKENS, allocate, give_back, paged
from windtunnel.core.seats import WHO, ends_at


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the tokens of a request that has left."""
    give_back(state.extra.tree, pool, lane, state.requests[r], r, 0)


@part
def longest_declared(lane: Lane, requests: Array, seats: Array) -> int:
    """Most tokens that a running request may have in the end."""
    longest = 0
    for i in range(lane.top):
        request = requests[seats[WHO, i]]
        longest = max(longest, request.prompt + min(request.declared, MAX_ESTIMATED_NEW_TOKENS))
    return longest


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:  # noqa: ARG001 - as in all schedulers
    """Whether a request from elsewhere gets memory in lane ``i``, or one that was retracted gets it again: beside what
    is reserved for those that are here, or what the longest of them may need when all others are retracted
    (disaggregation/decode.py, ``pop_preallocated`` and ``resume_retracted_reqs``)."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    request = requests[r]
    retractable = lane.kv_tokens + lane.top
    alone = longest_declared(lane, requests, seats) - retractable if lane.top > 0 else 0
    room = lane.free - max(reserved * (lane.top + lane.staged), alone)
    if request.preemptions > 0:
        return request.prompt + request.generated + reserved <= room
    declared = request.prompt + min(request.declared, MAX_ESTIMATED_NEW_TOKENS) - retractable
    return max(request.prompt + reserved, declared) <= room


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it."""
    request, extra = state.requests[r], state.extra
    allocate(extra.tree, extra.fault, pool, state.lanes[i], paged(pool, request.prompt + request.generated - 1), 0)


@part
def unstage(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take that memory back."""
    lane.free += paged(pool, state.requests[r].prompt + state.requests[r].generated - 1)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Let a request, whose KV is in the lane's memory, decode from the next round on."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    request.filled, request.came, request.state = request.prompt + request.generated - 1, 1, PREFILLING
    seat = lane.top
    seats[WHO, seat], seats[BEYOND, seat] = r, request.declared - request.output
    request.ends = lane.clock + request.output - request.generated + (lane.flying_decodes > 0)
    ends_at(lane, seats, seat, request.ends)
    lane.top += 1
    lane.running += 1
    lane.joined += 1
    lane.kv_tokens += request.filled


@part
def count_new(lane: Lane, requests: Array, seats: Array) -> int:
    """Requests of the next decode round that have come from elsewhere."""
    found = 0
    if lane.joined > 0:
        for i in range(lane.step_decodes):
            found += requests[seats[WHO, i]].came
    return found


@part
def resume(state: State, lane: Lane, seats: Array, end: float) -> None:
    """Those get their first token here."""
    if lane.joined > 0:
        for i in range(lane.top):
            r = seats[WHO, i]
            if state.requests[r].came:
                state.requests[r].came = 0
                write_stall(state, r, state.requests[r].last_token, end)
        lane.joined = 0


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests in the running batch, those that have ended and not left it yet included."""
    return int(state.lanes[i].top)
