"""vLLM's v1 schedulers in the compiled core with every rule: prefix cache, priorities, thresholds."""

from windtunnel.core.full_records import Arrays, arrays
from windtunnel.core.full_steady import steady_run
from windtunnel.core.full_step import conclude, decide, pass_over, step
from windtunnel.core.kernel import kernel
from windtunnel.core.records import State
from windtunnel.core.vllm_v1 import update_bound
from windtunnel.core.waiting import put

__all__ = ["Arrays", "arrays", "conclude", "decide", "enqueue", "pass_over", "steady_run", "step", "update_bound"]


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request into its place in the queue."""
    pool = state.pools[state.groups[state.lanes[lane].group].pool]
    put(pool, state.lanes[lane], state.requests, state.own.holdings, r, False)
