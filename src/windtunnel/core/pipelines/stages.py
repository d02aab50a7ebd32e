"""The stages of pipelines: records, and how a step passes through them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import flatten, rank_time, step_time
from windtunnel.core.compiled import part
from windtunnel.core.hooks import call_stage_end, hook
from windtunnel.core.records import (
    Array,
    Fields,
    Lane,
    Pool,
    State,
    attributes,
    records,
)
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import CONTEXT_STEP

PIPE_OF_LANE: Fields = [
    (name, np.int64)
    for name in (
        "flying",  # steps in flight
        "due",  # the oldest of them is the next to happen (where an arrival is looked at at once); see core.pipelines
        "asks",  # of a virtual engine: its next decision may find something
        "ordinal",  # and the number of its latest step among those of all engines; of the first one, of them all
        "depth",  # of them at most
        "empty",  # empty steps one after the other
        "first_slot",
        "first_flight",
        "first_stage",
        "first_line",
        "sends",  # first entry in the array of sends
        "sends_row",
    )
]

SLOT: Fields = [
    ("last_end", np.float64),  # of its latest step
    ("tokens_known", np.float64),  # end of its latest step if that sampled tokens that go on, else 0
    ("stage_free", np.float64),  # when the stage of this number has done its latest step
    ("decodes", np.int64),
    ("kv_tokens", np.int64),  # tokens in the cache of all decodes
]

LINE: Fields = [
    *((name, np.float64) for name in ("tokens", "low", "slope", "sequences", "overlapped", "serial")),
    ("begin", np.int64),  # tokens in the cache from which on this line holds
    ("above", np.int64),  # and from which on another one does
]
"""How long a stage takes for the decodes of one slot, as a line in their tokens in the cache."""


class Pipe(NamedTuple):
    """What only pipelines read and write."""

    slots: Array
    """SLOT records, one for each stage of each lane."""
    ends: Array
    """When each step in flight ends; 0 for an empty one."""
    lines: Array
    """For each slot one of each stage."""
    stages: Array
    """POOL records of all stages, with their tables in ``floats`` and ``integers``."""
    floats: Array
    integers: Array
    sends: Array
    """Seconds between stages, by tokens."""
    asks: Array
    """Of each stage the address of the user's function that says when it has done a step; 0: none. See core.hooks."""


def pipes(fleet: Any, lanes: NDArray[Any]) -> Pipe:
    """The pipelines of all lanes; sets the lanes' fields. Raises InputError for ranks in lockstep."""
    if any(fleet.lockstep):
        raise InputError("pipelines of ranks in lockstep are not simulated: use data_parallel_size=1 with experts")
    stages, floats, integers = flatten(tuple(table for times in fleet.times for table in times.stages))
    slot = flight = line = stage = sends = i = 0
    rows = zip(fleet.policies, fleet.times, fleet.replicas, fleet.lanes, fleet.num_engines, strict=True)
    for policy, times, replicas, ranks, engines in rows:
        count_of = policy.pipeline_parallel_size
        for _ in range(replicas * ranks):
            of_rank = lanes[i : i + engines]
            of_rank["depth"] = policy.max_concurrent_batches
            of_rank["first_slot"], of_rank["first_flight"], of_rank["first_line"] = slot, flight, line
            of_rank["first_stage"], of_rank["sends"], of_rank["sends_row"] = stage, sends, times.sends.shape[1]
            slot, flight, line = slot + count_of, flight + policy.max_concurrent_batches, line + count_of**2
            i += engines
        stage += count_of
        sends += times.sends.size
    asks = [own_end(times) for times in fleet.times for _ in times.stages]
    return Pipe(
        slots=attributes(records(slot, SLOT)),
        ends=np.zeros(flight),
        lines=attributes(records(line, LINE)),
        stages=attributes(stages),
        floats=floats,
        integers=integers,
        sends=np.concatenate([times.sends.ravel() for times in fleet.times]),
        asks=np.array(asks, dtype=np.int64),
    )


def own_end(times: Any) -> int:
    """The address of a pipeline's function that ends steps; 0 without one."""
    end = getattr(times, "end", None)
    return 0 if end is None else hook("stage_end", end).address


def clear_pipe(state: State, pipe: Pipe, i: int) -> None:
    """Nothing is in flight in the pipeline of lane ``i``."""
    lane: Any = state.lanes[i : i + 1]
    stages = int(state.pools["stages"][state.groups["pool"][lane["group"][0]]])
    slot, flight, line = (int(lane[name][0]) for name in ("first_slot", "first_flight", "first_line"))
    pipe.slots[slot : slot + stages] = np.zeros(1, dtype=pipe.slots.dtype)
    pipe.ends[flight : flight + int(lane["depth"][0])] = 0.0
    pipe.lines[line : line + stages**2] = np.zeros(1, dtype=pipe.lines.dtype)


@part
def num_stages(pool: Pool, pipe: Pipe | None) -> int:
    """Stages of a pipeline, 1 without one."""
    if pipe is None:
        return 1
    return pool.stages


@part
def end_of(at: int, s: int, decodes: int, chunk_tokens: int, arrival: float, free: float, seconds: float) -> float:
    """When stage ``s`` has done a step: after the one before, in ``seconds``, or as the user's function at ``at``
    says."""
    if at == 0:
        return max(arrival, free) + seconds
    return float(call_stage_end(at, s, decodes, chunk_tokens, arrival, free, seconds))


@part
def pass_stages(pool: Pool, lane: Lane, seats: Array, pipe: Pipe, start: float, waits: float) -> float:
    """Send the step that has been scheduled, whose first stage begins at ``start``, through the stages.

    Returns when the last one is done; see StageTimes. ``waits``: seconds that each of them takes longer.
    """
    sequences, tokens = lane.step_decodes + lane.chunks, lane.step_decodes + lane.chunk_tokens
    arrival, end = start, start
    for s in range(pool.stages):
        stage, slot = pipe.stages[lane.first_stage + s], pipe.slots[lane.first_slot + s]
        gpu = rank_time(stage, pipe.floats, pipe.integers, lane, seats)
        seconds = step_time(stage, pipe.floats, gpu, sequences) + waits
        at = pipe.asks[lane.first_stage + s]
        end = end_of(at, s, lane.step_decodes, lane.chunk_tokens, arrival, slot.stage_free, seconds)
        slot.stage_free = end
        if s < pool.stages - 1:
            arrival = end + pipe.sends[lane.sends + s * lane.sends_row + tokens]
    return end


@part
def begin_lines(pool: Pool, lane: Lane, pipe: Pipe) -> None:
    """What is constant in a run for each slot in each stage; the line in its tokens is drawn when it is asked for."""
    for k in range(pool.stages):
        decodes = pipe.slots[lane.first_slot + k].decodes
        for s in range(pool.stages):
            stage, line = pipe.stages[lane.first_stage + s], pipe.lines[lane.first_line + k * pool.stages + s]
            line.tokens, line.sequences = (
                pipe.floats[stage.decode_tokens + decodes],
                pipe.floats[stage.sequences + decodes],
            )
            line.overlapped = pipe.floats[stage.host_overlapped + decodes]
            line.serial = pipe.floats[stage.host_serial + decodes]
            line.above = 0


@part
def draw(pipe: Pipe, stage: Pool, line: Any, decodes: int, kv_tokens: int) -> None:
    """Find the context knots around a slot's tokens; see ``core.batch_time.decode_time``."""
    j = pipe.integers[stage.context_index + (kv_tokens // decodes) // CONTEXT_STEP]
    knot = pipe.integers[stage.context_knots + j]
    width = decodes * (pipe.integers[stage.context_knots + j + 1] - knot)
    at = stage.decode_attention + decodes * stage.num_contexts + j
    line.begin = decodes * knot
    line.above = line.begin + width if j < stage.num_contexts - 2 else 1 << 60
    line.low = pipe.floats[at]
    line.slope = (pipe.floats[at + 1] - line.low) / float(width)


@part
def pass_stages_decoding(pool: Pool, lane: Lane, pipe: Pipe, number: int, start: float) -> float:
    """Send the decodes of the slot whose turn it is through the stages from ``start`` on; see ``pass_stages``."""
    decodes, kv_tokens = lane.decodes, lane.kv_tokens
    first_line = lane.first_line + number * pool.stages
    arrival, end = start, start
    for s in range(pool.stages):
        line, slot = pipe.lines[first_line + s], pipe.slots[lane.first_slot + s]
        if kv_tokens >= line.above:
            draw(pipe, pipe.stages[lane.first_stage + s], line, decodes, kv_tokens)
        gpu = (line.tokens + (line.low + line.slope * float(kv_tokens - line.begin))) + line.sequences
        seconds = max(gpu, line.overlapped) + line.serial
        end = end_of(pipe.asks[lane.first_stage + s], s, decodes, 0, arrival, slot.stage_free, seconds)
        slot.stage_free = end
        if s < pool.stages - 1:
            arrival = end + pipe.sends[lane.sends + s * lane.sends_row + decodes]
    return end
