"""vLLM's v1 schedulers in the compiled core."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import enqueue_last
from windtunnel.core.records import NONE, State
from windtunnel.core.steady import steady_run
from windtunnel.core.step import step

__all__ = ["Arrays", "arrays", "enqueue", "steady_run", "step", "update_bound"]


class Arrays(NamedTuple):
    """What only these schedulers read and write."""

    unused: Any


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:  # noqa: ARG001
    """The arrays of a run, and the pools' settings."""
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        policy.check_core()
        for name in ("chunked_prefill", "reserve_full_prompt", "async_scheduling"):
            pool[name] = getattr(policy, name)
        pool["watermark_blocks"] = policy.watermark_blocks(limits)
    return Arrays(np.zeros(0, dtype=np.int64))


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
