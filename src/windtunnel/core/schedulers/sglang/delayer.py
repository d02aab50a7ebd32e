"""When SGLang's prompts wait although they could run (managers/scheduler.py of 0.5.23, min_free_slots_delayer.py,
prefill_delayer.py): few seats are free, prompts ran a few rounds ago, or other ranks of attention have none.

With the prefill delayer each rank looks at its round up to the first prompt that may be admitted, and asks. Ranks tell
each other what they have, and all get the same answer. A prompt that is part-way asks too, and goes on whatever it is.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, PREFILL, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.schedulers.sglang.admission import places

DELAYER_OF_POOL: Fields = [
    *((name, np.int64) for name in ("delays", "delay_passes")),
    *((name, np.float64) for name in ("delay_watermark", "delay_queue_ratio", "delay_most")),
]
DELAYER_OF_LANE: Fields = [
    # of the round that is being filled
    *((name, np.int64) for name in ("held_off", "opened", "judged", "verdict", "most", "matched")),
    *((name, np.int64) for name in ("prefillable", "allowed", "asked_running", "asked_waiting")),
    *((name, np.int64) for name in ("attempts", "largest")),  # rounds with prompts, or that asked; see ``observe``
    *((name, np.int64) for name in ("delayed", "has_delayed")),  # of the first rank: rounds held; ever a reason to
    *((name, np.float64) for name in ("usage", "delayed_since")),
]
UNLIMITED = 1 << 60
WINDOW = 16
"""Latest attempts whose largest is remembered (SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE)."""


@part
def is_held_off(pool: Pool, lane: Lane) -> bool:
    """Whether no prompt may run in this round, for one ran a few rounds ago (``_should_defer_prefill``)."""
    if lane.interval_left == 0:
        return False
    if lane.top < pool.interval_from:
        lane.interval_left = 0
        return False
    lane.interval_left -= 1
    return True


@part
def may_prefill(extra: Any, pool: Pool, lane: Lane) -> bool:
    """Whether a prefill round is worth a look."""
    # A prefill pool has no decodes that would look again (srt/disaggregation/prefill.py).
    if pool.role == PREFILL or pool.preempts or (pool.newer and lane.top == 0):
        lane.full = 0
    if lane.chunked != NONE:
        return True
    if lane.full or lane.head == NONE:
        return False
    free = places(pool, lane, extra.turns)
    if lane.top > 0 and free < pool.slots_at_once:
        return False
    if free <= 0 and not pool.preempts:
        lane.full = 1
        return False
    return True


@part
def spread_interval(state: State, pool: Pool, group: Group) -> None:
    """Where one rank of attention ran prompts, all count the rounds until the next ones
    (``_arm_prefill_decode_interval``)."""
    prompts = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        prompts += state.lanes[i].chunks
    if prompts > 0:
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].interval_left = pool.interval


# The prefill delayer.


@part
def should_hold(
    pool: Pool, first: Lane, asking: int, ranks: int, running: int, waiting: int, most: int, now: float
) -> bool:
    """Whether prompts wait for those of other ranks, or for more seats or prompts: ``running``, ``waiting``, ``most``
    are the largest numbers of any rank."""
    if asking == 0:
        return False
    if asking < ranks:
        return True
    room = most if pool.most_prompts == UNLIMITED else pool.most_prompts
    wanted = min(int(float(running) * pool.delay_queue_ratio), room)
    late = first.delayed > 0 and now - first.delayed_since >= pool.delay_most
    too_few = wanted > 0 and waiting < wanted and not late
    if pool.max_num_seqs - running >= most and not too_few:
        return False
    before = first.has_delayed  # the first time does not count
    first.has_delayed = 1
    return bool(before)


@compiled
def negotiate(state: State, pool: Pool, group: Group) -> None:
    """Whether the prompts of all ranks may enter this round; at most ``delay_passes`` − 1 rounds in a row they do not
    (``_negotiate_should_allow_prefill_pure``)."""
    first = state.lanes[group.first_lane]
    asking, running, waiting, most, low = 0, 0, 0, 0, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.prefillable:
            asking += 1
            running, waiting = max(running, lane.asked_running), max(waiting, lane.asked_waiting)
            most = max(most, lane.largest)
            low |= lane.usage < pool.delay_watermark
    holds = not low and should_hold(pool, first, asking, group.num_lanes, running, waiting, most, group.now)
    if holds and first.delayed < pool.delay_passes - 1:
        if first.delayed == 0:
            first.delayed_since = group.now
        first.delayed += 1
    else:
        holds = False
        first.delayed = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].allowed = 0 if holds else 1


@part
def note_usage(pool: Pool, lane: Lane) -> None:
    """Before a round is looked at: how full memory is."""
    lane.prefillable, lane.allowed = 0, 1
    lane.usage = float(pool.num_blocks - lane.free) / float(pool.num_blocks)


@part
def observe(pool: Pool, lane: Lane, recent: Array, found: bool) -> None:
    """Remember the size of a round with prompts, or of what was refused (RecentPrefillBatchSizeTracker)."""
    size = lane.chunks + lane.step_decodes if found else 0
    if size == 0 and lane.prefillable:
        size = min(max(lane.asked_waiting, 1), max(pool.max_num_seqs - lane.asked_running, 1))
    if size == 0:
        return
    recent[lane.attempts % WINDOW] = size
    lane.attempts += 1
    lane.largest = 0
    for k in range(min(lane.attempts, WINDOW)):
        lane.largest = max(lane.largest, recent[k])
