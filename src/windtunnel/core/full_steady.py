"""Fast-forward where every rule of vLLM's v1 schedulers may hold: when a run of equal steps is possible."""

from typing import Any

import numpy as np

from windtunnel.core.admission import head_tokens
from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.prefix_cache import offer
from windtunnel.core.records import NONE, State
from windtunnel.core.running import most_tokens
from windtunnel.core.steady import NEVER, run_steadily, steady_chunk


@kernel
def steps_possible(state: State, pool: Any, i: int, tokens: int) -> int:
    """How many steps lane ``i`` may run before something but memory changes; 0: the next step has to be made singly.

    Only one prompt may be part-way, and it has to take what the decodes leave of the budget. A head of the queue that
    cannot be admitted stays so: free blocks only get fewer, and so do the blocks that it finds.
    """
    lane, requests = state.lanes[i], state.requests
    if lane.leaving != NONE or state.own.shelves[i].held != NONE or tokens < 0:
        return 0
    if tokens > 0 and (pool.long_prefill_token_threshold > 0 or lane.partial != lane.tail):
        return 0
    if tokens == 0 and lane.queue_head != NONE:
        if pool.skip_unfit_prompts and not pool.chunked_prefill:
            return 0
        if head_tokens(state, pool, i, pool.max_num_batched_tokens - lane.decodes, most_tokens(pool, lane)) > 0:
            return 0
    steps = NEVER
    if lane.decodes > 0:
        steps = next_finish(state.heap, lane) - lane.clock
    if tokens > 0:
        request = requests[lane.partial]
        steps = min(steps, (request.prompt + request.generated - request.context - 1) // tokens)
    return steps


@kernel
def may_be_joined(pool: Any, lane: Any, tokens: int) -> bool:
    """Whether a request that arrives now could change what the next step does."""
    open_budget = pool.max_num_batched_tokens - lane.decodes - tokens > 0
    overtakes = pool.by_priority or pool.long_prefill_token_threshold > 0
    return (lane.queue_head == NONE or overtakes) and open_budget and lane.running < pool.max_num_seqs


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Run as many equal steps as possible while ``now`` < ``until`` (which counts only if an arrival could join)."""
    lanes, requests = state.lanes, state.requests
    first, last = group.first_lane, group.first_lane + group.num_lanes
    if pool.async_scheduling and group.end <= group.now:
        return 0
    steps = NEVER
    joinable = False
    for i in range(first, last):
        tokens = steady_chunk(pool, lanes[i], requests)
        steps = min(steps, steps_possible(state, pool, i, tokens))
        joinable |= may_be_joined(pool, lanes[i], tokens)
    done = run_steadily(state, pool, group, steps, until if joinable else np.inf)
    if done > 0:
        for i in range(first, last):
            if lanes[i].partial != NONE:
                offer(state, pool, i, lanes[i].partial, requests[lanes[i].partial].context)
    return done
