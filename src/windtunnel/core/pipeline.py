"""vLLM's v1 scheduler with a pipeline of stages in the compiled core (EngineCore.step_with_batch_queue, 0.32).

Step n belongs to slot n mod stages: whoever decodes in it decodes next in step n + stages, at the earliest time at
which its token is known. So each slot has a decode clock of its own, and the slots share queue, seats and blocks.
"""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import enqueue_last
from windtunnel.core.pipeline_records import Arrays, arrays
from windtunnel.core.pipeline_steady import steady_run
from windtunnel.core.pipeline_step import nobody_leaves, step
from windtunnel.core.records import NONE, State

__all__ = ["Arrays", "arrays", "enqueue", "steady_run", "step", "update_bound"]


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    enqueue_last(state.lanes[lane], state.requests, r)


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:  # noqa: ARG001
    """No request leaves the group before ``bound``.

    A slot that only decodes cannot finish anybody before the clock of its heap's top, and each of its steps passes
    through all stages after the one before. One step of slack covers rounding.
    """
    own = state.own
    lane, pipe = state.lanes[group.first_lane], own.pipes[group.first_lane]
    group.bound = group.now
    if lane.queue_head != NONE or lane.partial != NONE or not nobody_leaves(state, pipe):
        return
    bound = np.inf
    for i in range(pipe.first_slot, pipe.first_slot + pipe.stages):
        slot = own.slots[i]
        if slot.decodes > 0:
            shortest = 0.0
            for s in range(pipe.first_stage, pipe.first_stage + pipe.stages):
                shortest += own.floats[own.stages[s].shortest_step + slot.decodes]
            steps = next_finish(own.heap, slot) - slot.clock - 1
            bound = min(bound, group.now + float(steps) * shortest)
    if bound < np.inf:
        group.bound = bound
    elif pipe.flying == 0:
        group.bound = np.inf
