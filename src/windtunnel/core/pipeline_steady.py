"""Fast-forward of a pipeline: rounds in which each slot makes one step that differs only in its contexts."""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import fits
from windtunnel.core.pipeline_step import nobody_leaves
from windtunnel.core.records import NONE, ROWS, State
from windtunnel.core.step import write_row

NEVER = 1 << 60


@kernel
def rounds_possible(state: State, pool: Any, lane: Any, pipe: Any) -> int:
    """How many rounds may run before something but memory changes; 0 if the next step must be made singly.

    A head of the queue that does not fit stays so, because free blocks only shrink and seats and budgets are constant.
    """
    own, requests = state.own, state.requests
    if lane.partial != NONE or pipe.flying < pipe.depth - 1 or not nobody_leaves(state, pipe):
        return 0
    rounds = NEVER
    for i in range(pipe.first_slot, pipe.first_slot + pipe.stages):
        slot = own.slots[i]
        if slot.decodes > 0:
            rounds = min(rounds, next_finish(own.heap, slot) - slot.clock - 1)
        if lane.queue_head != NONE:
            head = lane.queue_head
            in_flight = own.last_step[head] >= pipe.step - pipe.flying
            if in_flight or fits(pool, lane, requests[head], pool.max_num_batched_tokens - slot.decodes):
                return 0
    return 0 if rounds == NEVER else rounds


@kernel
def last_decision(state: State, group: Any, pipe: Any) -> float:
    """When the last step of the next round is decided: all but the latest in flight have ended then."""
    time = group.now
    for n in range(pipe.step - pipe.flying, pipe.step + pipe.stages - pipe.depth):
        time = max(time, state.own.flights[pipe.first_flight + n % pipe.depth].end)
    return time


@kernel
def blocks_of_round(state: State, pool: Any, pipe: Any) -> int:
    """New blocks of the next round."""
    need = 0
    for i in range(pipe.first_slot, pipe.first_slot + pipe.stages):
        slot = state.own.slots[i]
        if slot.decodes > 0:
            need += state.own.phases[slot.phase + slot.clock % pool.block_size]
    return need


@kernel
def begin_lines(own: Any, pipe: Any) -> None:
    """What is constant in a run for each slot in each stage; the line in its tokens is drawn when it is asked for."""
    for k in range(pipe.stages):
        decodes = own.slots[pipe.first_slot + k].decodes
        for s in range(pipe.stages):
            stage = own.stages[pipe.first_stage + s]
            line = own.lines[pipe.first_line + k * pipe.stages + s]
            line.tokens = own.floats[stage.decode_tokens + decodes]
            line.sequences = own.floats[stage.sequences + decodes]
            line.overlapped = own.floats[stage.host_overlapped + decodes]
            line.serial = own.floats[stage.host_serial + decodes]
            line.above = 0


@kernel
def draw(own: Any, stage: Any, line: Any, decodes: int, kv_tokens: int) -> None:
    """Find the context knots around the slot's tokens; see ``core.lookup.decode_time``."""
    j = own.integers[stage.context_index + (kv_tokens // decodes) // 16]
    knot = own.integers[stage.context_knots + j]
    width = decodes * (own.integers[stage.context_knots + j + 1] - knot)
    at = stage.decode_attention + decodes * stage.num_contexts + j
    line.base = decodes * knot
    line.above = line.base + width if j < stage.num_contexts - 2 else NEVER
    line.low = own.floats[at]
    line.slope = (own.floats[at + 1] - line.low) / float(width)


@kernel
def pass_stages_decoding(own: Any, pipe: Any, slot: Any, start: float) -> float:
    """Send the slot's decodes through the stages from ``start`` on; see ``core.pipeline_step.pass_stages``."""
    decodes, kv_tokens = slot.decodes, slot.kv_tokens
    first_line = pipe.first_line + pipe.step % pipe.stages * pipe.stages
    arrival, end = start, start
    for s in range(pipe.stages):
        line = own.lines[first_line + s]
        if kv_tokens >= line.above:
            draw(own, own.stages[pipe.first_stage + s], line, decodes, kv_tokens)
        gpu = (line.tokens + (line.low + line.slope * float(kv_tokens - line.base))) + line.sequences
        end = max(arrival, own.stage_free[pipe.first_free + s]) + (max(gpu, line.overlapped) + line.serial)
        own.stage_free[pipe.first_free + s] = end
        if s < pipe.stages - 1:
            arrival = end + own.sends[pipe.sends + s * pipe.sends_row + decodes]
    return end


@kernel
def make_step(own: Any, pool: Any, group: Any, lane: Any, pipe: Any) -> float:
    """The next step of a round; returns when its first stage begins."""
    slot = own.slots[pipe.first_slot + pipe.step % pipe.stages]
    flight = own.flights[pipe.first_flight + pipe.step % pipe.depth]
    start = 0.0
    flight.end = 0.0
    if slot.decodes > 0:
        start = max(group.now, slot.tokens_known) if pool.async_scheduling else group.now
        start = max(start, own.stage_free[pipe.first_free])
        lane.free -= own.phases[slot.phase + slot.clock % pool.block_size]
        end = pass_stages_decoding(own, pipe, slot, start)
        slot.clock += 1
        slot.kv_tokens += slot.decodes
        slot.tokens_known = end
        slot.last_end = end
        slot.last_step = pipe.step
        flight.end = end
    pipe.step += 1
    group.now = max(group.now, own.flights[pipe.first_flight + pipe.step % pipe.depth].end)
    return start


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Run as many rounds as possible while steps are decided before ``until`` (if an arrival could join them)."""
    lane, rows, counters = state.lanes[group.first_lane], state.rows, state.counters
    pipe = state.own.pipes[group.first_lane]
    rounds = rounds_possible(state, pool, lane, pipe)
    if rounds < 1 or len(rows) - counters[ROWS] <= pipe.stages:
        return 0
    joinable = lane.queue_head == NONE and lane.running < pool.max_num_seqs
    limit = until  # of the first round in any case: its rows say who waited when it was decided
    begin_lines(state.own, pipe)
    first_row = counters[ROWS]
    done = 0
    while done < rounds and last_decision(state, group, pipe) < limit:
        if blocks_of_round(state, pool, pipe) > lane.free:
            break
        for _ in range(pipe.stages):
            lane_number = pipe.step % pipe.stages
            slot = state.own.slots[pipe.first_slot + lane_number]
            kv_tokens = slot.kv_tokens
            start = make_step(state.own, pool, group, lane, pipe)
            if done == 0 and slot.decodes > 0:
                row = write_row(state, group, lane, start, 0)
                row.lane = lane.rank * pipe.stages + lane_number
                row.decodes = slot.decodes
                row.kv_tokens = kv_tokens
                row.used_blocks = pool.num_blocks - lane.free
                row.waiting = lane.waiting + lane.ghosts
        done += 1
        limit = until if joinable else np.inf
    if done > 0:
        for k in range(first_row, counters[ROWS]):
            rows[k].steps = done
        lane.released = 0
        group.released = 0
        pipe.empty = 0
    return done
