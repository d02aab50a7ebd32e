"""Prompts that wait for others (``prefill_schedule_interval``)."""

from typing import Any

from windtunnel.core.compiled import part
from windtunnel.core.records import Array, Lane, Pool
from windtunnel.core.seats import ENDS, NEVER, WHO


@part
def begin_interval(pool: Pool, lane: Lane, requests: Array, seats: Array, drafts: Any, ranks: int) -> None:
    """Prompts get nothing before enough steps have passed, while somebody decodes and the queue is not held up."""
    lane.prefills = lane.holds_prompts = lane.deferred = 0
    if ranks > 1:
        due = lane.executed % pool.prefill_schedule_interval == 0
    else:
        passed = lane.executed + 1 - lane.last_prefill_step
        due = not pool.interval_when_alone or passed >= pool.prefill_schedule_interval
    if pool.prefill_schedule_interval > 1 and not lane.capacity_bound and not due:
        part_ways = 0
        for i in range(lane.first, lane.top):
            catches_up = seats[ENDS, i] == NEVER
            if drafts is not None:
                catches_up = catches_up and requests[seats[WHO, i]].context < requests[seats[WHO, i]].seated_with
            part_ways += 1 if catches_up else 0
        lane.holds_prompts = 1 if lane.running > part_ways else 0


@part
def note_interval(pool: Pool, lane: Lane, preempted: bool) -> None:
    """What a step means for the next one's prompts."""
    if pool.prefill_schedule_interval > 1:
        if lane.prefills:
            lane.last_prefill_step = lane.executed
        if not lane.holds_prompts and not preempted:
            lane.capacity_bound = 1 if lane.waiting - lane.loads > lane.deferred else 0


@part
def end_interval(pool: Pool, lane: Lane, ranks: int, preempted: bool) -> None:
    """A step is decided; one of several ranks counts when it is launched."""
    lane.executed += 1 if ranks == 1 and lane.step_decodes + lane.chunks > 0 else 0
    note_interval(pool, lane, preempted)
