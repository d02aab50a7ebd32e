"""SGLang's overlap schedule: a round is decided before the outcome of the one in flight is known (0.4.6.post5:
managers/scheduler.py, ``event_loop_overlap``; scheduler_output_processor_mixin.py).

What takes part in a round counts as computed when it is launched (``lane.decodes`` and ``lane.kv_tokens``, of all that
are not known to have ended); the clock of the lane, tokens, ends and the tree go on when it has run.
"""

from typing import Any

from windtunnel.core.heap import ends_alone, next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.records import DECODING, PREFILLING, State
from windtunnel.core.sglang_output import emit_decodes, emit_first, end_request


@kernel
def launch(state: State, i: int) -> None:
    """Lane ``i``'s round that was decided and logged is in flight from now on; the one before it has run."""
    own, lane, rank = state.own, state.lanes[i], state.own.ranks[i]
    rank.flying = lane.chunks + rank.decodes > 0
    rank.flying_row = rank.row
    rank.flying_prompts = 0
    for k in range(rank.seats, rank.seats + lane.chunks):
        if own.batch[k] != rank.chunked:
            own.flying_prompts[rank.seats + rank.flying_prompts] = own.batch[k]
            rank.flying_prompts += 1
    rank.flying_decodes = rank.decodes
    lane.kv_tokens += rank.decodes
    rank.flying_ends = 0
    if rank.decodes > 0 and next_finish(state.heap, lane) <= lane.clock + 1:
        note_ends(state, lane, rank)


@kernel
def note_ends(state: State, lane: Any, rank: Any) -> None:
    """Who ends with the decode that is launched: a retraction may sort the running batch before that is known."""
    own, requests = state.own, state.requests
    if ends_alone(state.heap, lane):
        own.flying_ends[rank.seats] = state.heap[lane.heap] & 0xFFFFFFFF
        rank.flying_ends = 1
        return
    for k in range(rank.seats, rank.seats + rank.running):
        request = requests[own.running[k]]
        if request.state == DECODING and request.offset + lane.clock + 2 == request.prompt + request.output:
            own.flying_ends[rank.seats + rank.flying_ends] = own.running[k]
            rank.flying_ends += 1


@kernel
def land(state: State, i: int, end: float) -> None:
    """Lane ``i``'s round in flight has run at ``end``, when the next one, if any, was decided and logged.

    Who ends now takes part in that one if it decodes; the place of its token there is free when it has run.
    """
    own, lane, rank = state.own, state.lanes[i], state.own.ranks[i]
    rank.available += rank.late
    late = 1 if rank.decodes > 0 else 0
    ended = 0
    if rank.flying_decodes > 0:
        lane.clock += 1
        rank.last_decode = end
    for k in range(rank.seats, rank.seats + rank.flying_prompts):
        r = own.flying_prompts[k]
        if state.requests[r].state == PREFILLING and emit_first(state, rank, lane, r, end):  # or it was retracted
            end_request(lane, state.requests, r, end)
            lane.decodes -= 1
            lane.kv_tokens -= own.entries[r].filled
            ended += 1
    if rank.flying_ends > 0:
        ended += emit_decodes(state, rank, lane, end, own.flying_ends, rank.flying_ends)
    lane.kv_tokens -= late * ended
    rank.late = late * ended
    rank.ended += ended
    state.rows[rank.row].discarded += rank.late
    lane.outstanding -= lane.released
    lane.running = lane.outstanding - lane.waiting


@kernel
def launch_group(state: State, group: Any, end: float) -> None:
    """The rounds that were decided end at ``end``. The one before them ends first; if there is none, the round after
    them is decided at once."""
    if group.end > group.now:
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            land(state, i, group.end)
            group.released += state.lanes[i].released
        group.now = group.end
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        launch(state, i)
    group.end = end
