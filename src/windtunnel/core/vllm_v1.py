"""vLLM's v1 schedulers in the compiled core, where requests and blocks need only be counted.

Prefix caching, priorities and thresholds have rules of their own: ``vllm_v1_full``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.full_records import arrays as full_arrays
from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import enqueue_last
from windtunnel.core.pipeline_records import arrays as pipeline_arrays
from windtunnel.core.records import NONE, State
from windtunnel.core.steady import steady_run
from windtunnel.core.step import conclude, decide, pass_over, step
from windtunnel.policy import VllmV1

__all__ = ["Arrays", "arrays", "conclude", "decide", "enqueue", "pass_over", "steady_run", "step", "update_bound"]


SETTINGS = (
    "chunked_prefill",
    "reserve_full_prompt",
    "async_scheduling",
    "stop_at_last_token",
    "skip_unfit_prompts",
    "long_prefill_token_threshold",
    "adaptive_threshold",
    "threshold_when_alone",
    "prefix_caching",
    "plain_blocks_first",
    "return_victim_tokens",
    "track_place",
    "go_on_after_own_preemption",
)
"""Fields of VllmV1 that a pool has, too."""


class Arrays(NamedTuple):
    """What only these schedulers read and write."""

    unused: Any


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Any:
    """The arrays of a run, and the pools' settings; those of ``pipeline`` where a pool has several stages, those of
    ``vllm_v1_full`` where one needs its rules."""
    if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies):
        return pipeline_arrays(fleet, demand, pools, lanes)
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        pool["max_num_seqs"] = policy.max_num_active_seqs or limits.max_num_seqs
        pool["watermark_blocks"] = policy.watermark_blocks(limits)
        pool["by_priority"] = policy.admission_order == "priority"
        pool["evict_worst"] = policy.victim == "lowest_priority"
        pool["hash_block_size"] = demand.hash_block_size
        for name in SETTINGS:
            pool[name] = getattr(policy, name)
    if all(is_plain(policy) for policy in fleet.policies):
        return Arrays(np.zeros(0, dtype=np.int64))
    return full_arrays(fleet, demand, pools, lanes)


def is_plain(policy: VllmV1) -> bool:
    """Whether it is enough to count blocks and running requests, because one is like the other."""
    in_order = policy.admission_order == "fcfs" and policy.victim == "newest"
    whole = policy.long_prefill_token_threshold == 0 and (policy.chunked_prefill or not policy.skip_unfit_prompts)
    return in_order and whole and not policy.prefix_caching


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    enqueue_last(state.lanes[lane], state.requests, r)


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish anybody before the clock of its heap's top. One step of slack covers
    rounding.
    """
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.queue_head != NONE or lane.partial != NONE or lane.leaving != NONE:
            group.bound = group.now
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            steps = next_finish(state.heap, lane) - lane.clock - 1
            group.bound = min(group.bound, group.now + float(steps) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a step that computes only discarded tokens is in flight
