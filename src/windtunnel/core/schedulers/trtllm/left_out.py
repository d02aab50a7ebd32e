"""Generations that TensorRT-LLM leaves out of a step, because tokens or memory lack: their next token comes after a
pause. Those whose last token is in flight may be in one more step, whose token is dropped."""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.log import write_stall
from windtunnel.core.records import Array, Lane, Pool, State
from windtunnel.core.schedulers.trtllm.capacity import OUT
from windtunnel.core.schedulers.trtllm.drafts import takes_part
from windtunnel.core.seats import EMPTY, ENDS, LEAVING, NOW, WHO, context_of, count, ends_at


@part
def leave_out(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Generations that get no token in this step leave the sums; the next token of each comes after a pause."""
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if seats[NOW, i] != OUT or not ends < EMPTY:
            continue
        request = requests[seats[WHO, i]]
        if ends > lane.clock:
            count(pool, lane, seats, context_of(lane, request, ends), -1)
            if not request.returned:
                request.returned = 1
                lane.returned += 1
                request.last_token = max(request.last_token, lane.end)
        elif request.late:
            count(pool, lane, seats, context_of(lane, request, ends), -1)
            request.late = 0


@part
def discarded(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Generations of this step whose token is dropped or comes after a pause."""
    lane, seats, dropped = state.lanes[i], state.seats[i], 0
    if lane.step_decodes > 0:
        for k in range(lane.leaving):
            dropped += state.requests[seats[WHO, seats[LEAVING, k]]].late
    if lane.returned > 0:
        for seat in range(lane.top):
            if takes_part(lane, seats, seat):
                dropped += state.requests[seats[WHO, seat]].returned
    return dropped


@compiled
def rejoin(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Generations that were left out may take part in the next step, and end one step later."""
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if seats[NOW, i] == OUT and lane.clock <= ends < EMPTY:
            context = context_of(lane, requests[seats[WHO, i]], ends + 1)
            ends_at(lane, seats, i, ends + 1)
            count(pool, lane, seats, context, 1)


@compiled
def resume(state: State, lane: Lane, seats: Array, end: float) -> None:
    """Generations that were left out before get a token again."""
    for i in range(lane.top):
        r = seats[WHO, i]
        if state.requests[r].returned and takes_part(lane, seats, i):
            state.requests[r].returned = 0
            lane.returned -= 1
            write_stall(state, r, state.requests[r].last_token, end)
