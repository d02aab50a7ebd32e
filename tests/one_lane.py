"""The worked example of docs/architecture.md: three requests in one lane, step by step, in plain Python.

``NUMBA_DISABLE_JIT=1 python tests/one_lane.py`` prints its table; a debugger steps through every function of the core.
"""

import sys
from collections.abc import Iterator

import numpy as np
from numba import config

from windtunnel.core.dispatch import jump, step
from windtunnel.core.engine import Demand, Fleet, new_state
from windtunnel.core.loop import deliver
from windtunnel.core.records import CHOSEN, IDLE, ROWS, State
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, NEVER, PHASES, TOKENS, WHO, context_of
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1

NAMES = "abc"
PROMPTS, OUTPUTS = (5, 3, 10), (9, 2, 10)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, num_blocks=16, block_size=4)
HEADER = (
    "| | now, ms | clock | seats | `decodes` | `kv_tokens` | `free` | `PHASES` |\n|---|--:|--:|---|--:|--:|--:|---|\n"
)


def one_lane() -> State:
    """A lane of a synchronous vLLM without a prefix cache, whose queue holds the three requests."""
    nothing = np.zeros(len(NAMES))
    times = linear(0.010, 0.001, 0.0, 0.0, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64)
    policy = VllmV1(async_scheduling=False, prefix_caching=False)
    demand = Demand(
        arrival=nothing,
        prompt_tokens=np.array(PROMPTS),
        output_tokens=np.array(OUTPUTS),
        overruns=nothing.astype(bool),
        refused=nothing.astype(bool),
        follow=np.full(len(NAMES), -1),
        think_time=nothing,
        max_concurrency=0,
    )
    state = new_state(Fleet((LIMITS,), (policy,), (times,), (1,), (1,), (False,)), demand, nothing)
    for r in range(len(NAMES)):
        state.counters[CHOSEN] = 0
        deliver(state, r, 0.0)
    return state


def seats_of(state: State) -> Iterator[str]:
    """Each seat: its request, the clock at which it ends, its context."""
    lane, seats = state.lanes[0], state.seats[0]
    for i in range(lane.top):
        ends, r = seats[ENDS, i], seats[WHO, i]
        request = state.requests[r]
        if ends == EMPTY:
            yield "hole"
        elif ends == NEVER:
            yield f"{NAMES[r]} (prefill, context {request.context})"
        else:
            yield f"{NAMES[r]} (ends {ends}, context {context_of(lane, request, ends)})"


def line(state: State, done: str) -> str:
    """The lane as it stands, as a row of the table."""
    lane, seats = state.lanes[0], state.seats[0]
    phases = " ".join(str(count) for count in seats[PHASES, : LIMITS.block_size])
    now = f"{1000 * state.groups[0].now:.0f}"
    seated = ", ".join(seats_of(state))
    return (
        f"| {done} | {now} | {lane.clock} | {seated} | {lane.decodes} | {lane.kv_tokens} | {lane.free} | {phases} |\n"
    )


def decodes(count: int) -> str:
    """In words."""
    return f"{count} decodes" if count > 1 else f"{count} decode"


def step_made(state: State) -> str:
    """What the latest step computed."""
    lane, seats = state.lanes[0], state.seats[0]
    chunks = [
        f"{tokens} tokens at {context}"
        for tokens, context in zip(seats[TOKENS, : lane.chunks], seats[CONTEXT, : lane.chunks], strict=True)
    ]
    return "step: " + ", ".join([decodes(lane.step_decodes), *chunks] if lane.step_decodes else chunks)


def table() -> str:
    """The lane before each step, and after each run of equal steps."""
    state = one_lane()
    pool, group = state.pools[0], state.groups[0]
    lines = [HEADER, line(state, "three requests wait")]
    while True:
        if jump(state, pool, group, np.inf):
            row = state.rows[state.counters[ROWS] - 1]
            lines.append(line(state, f"jump: {row.steps} step{'s' if row.steps > 1 else ''} of {decodes(row.decodes)}"))
        elif step(state, pool, group) == IDLE:
            return "".join(lines)
        else:
            lines.append(line(state, step_made(state)))


if __name__ == "__main__":
    if not config.DISABLE_JIT:  # type: ignore[attr-defined]
        sys.exit("set NUMBA_DISABLE_JIT=1: only then can Python call the parts of the core")
    sys.stdout.write(table())
