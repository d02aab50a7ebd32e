"""The records of pipelines: the steps in flight, and a decode clock for each lane of them."""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.records import NONE, attributes
from windtunnel.core.tables import flatten
from windtunnel.errors import InputError
from windtunnel.policy import Limits, VllmV1

PIPE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "step",  # number of the next step
            "flying",  # steps in flight
            "empty",  # empty steps one after the other
            "stages",  # and lanes: step n belongs to lane n mod stages
            "depth",  # steps in flight at most
            "first_slot",
            "first_flight",
            "first_stage",
            "first_free",  # in stage_free
            "first_line",
            "sends",  # first entry in the array of sends
            "sends_row",
        )
    ],
    align=True,
)

SLOT = np.dtype(
    [
        ("last_end", np.float64),  # of its latest step
        ("tokens_known", np.float64),  # end of its latest step if that sampled tokens that go on, else 0
        ("clock", np.int64),  # steps so far in which decodes took part
        ("decodes", np.int64),
        ("kv_tokens", np.int64),  # tokens in the cache of all decodes
        ("last_step", np.int64),  # number of its latest step that was not empty
        ("heap", np.int64),  # first entry in the heap array
        ("heap_size", np.int64),
        ("phase", np.int64),  # first entry in the array of block phases
    ],
    align=True,
)
"""One lane of a pipeline: requests that decode in the same steps."""

FLIGHT = np.dtype([("end", np.float64), ("leaving", np.int64)], align=True)
"""A step in flight: when it ends (0: it is empty), and the requests whose last token it computes."""


LINE = np.dtype(
    [
        *((name, np.float64) for name in ("tokens", "low", "slope", "sequences", "overlapped", "serial")),
        ("base", np.int64),
        ("above", np.int64),  # tokens in the cache from which on another line holds
    ],
    align=True,
)
"""How long a stage takes for the decodes of one slot, as a line in their tokens in the cache."""


class Arrays(NamedTuple):
    """What only pipelines read and write."""

    pipes: Any
    """[lanes of the state]."""
    slots: Any
    flights: Any
    lines: Any
    """For each slot one of each stage."""
    heap: Any
    phases: Any
    stage_free: Any
    """When each stage of each pipeline has done its latest step."""
    stages: Any
    """POOL records of all stages, with their tables in ``floats`` and ``integers``."""
    floats: Any
    integers: Any
    sends: Any
    slot_of: Any
    """[n] index of the slot in which each request decodes."""
    last_step: Any
    """[n] number of the latest step that computed a part of a prompt, or of the last one before a preemption."""


SIMULATED = (
    "chunked_prefill",
    "reserve_full_prompt",
    "watermark",
    "async_scheduling",
    "pipeline_parallel_size",
)
"""Fields of VllmV1 that pipelines know; the others hold at their defaults."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:  # noqa: ARG001
    """The arrays of a run, and the pools' settings."""
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        check(limits, policy)
        for name in ("chunked_prefill", "reserve_full_prompt", "async_scheduling"):
            pool[name] = getattr(policy, name)
        pool["watermark_blocks"] = policy.watermark_blocks(limits)
    if any(fleet.lockstep):
        raise InputError("pipelines of ranks in lockstep are not simulated: use data_parallel_size=1 with experts")
    stages, floats, integers = flatten(tuple(table for times in fleet.times for table in times.stages))
    n = len(demand.arrival)
    pipes, sizes = _pipes(fleet)
    return Arrays(
        pipes=attributes(pipes),
        slots=attributes(_slots(fleet, sizes["slots"])),
        flights=attributes(_flights(sizes["flights"])),
        lines=attributes(np.zeros(sizes["lines"], dtype=LINE)),
        heap=np.zeros(sizes["heap"], dtype=np.int64),
        phases=np.zeros(sizes["phases"], dtype=np.int64),
        stage_free=np.zeros(sizes["slots"]),
        stages=stages,
        floats=floats,
        integers=integers,
        sends=np.concatenate([times.sends.ravel() for times in fleet.times]),
        slot_of=np.full(n, NONE, dtype=np.int64),
        last_step=np.full(n, NONE, dtype=np.int64),
    )


def check(limits: Limits, policy: VllmV1) -> None:
    """Raise InputError for what is not simulated in pipelines."""
    policy.check(limits)
    if policy.pipeline_parallel_size == 1:
        raise InputError("pools with and without a pipeline: not simulated together; simulate them one by one")
    for name in unsupported(policy):
        default = getattr(VllmV1, name)
        raise InputError(
            f"{name}={getattr(policy, name)!r}: not simulated by the compiled core in a pipeline, only by "
            f"windtunnel.simulate.pipelines; use {default!r}"
        )


def unsupported(policy: VllmV1) -> list[str]:
    """The settings that pipelines do not know in the compiled core."""
    names = (field.name for field in fields(policy) if field.name not in SIMULATED)
    return [name for name in names if getattr(policy, name) != getattr(VllmV1, name)]


def _pipes(fleet: Any) -> tuple[NDArray[Any], dict[str, int]]:
    """A record for every lane of the state, and the sizes of the arrays that they share."""
    pipes = np.zeros(sum(r * n for r, n in zip(fleet.replicas, fleet.lanes, strict=True)), dtype=PIPE)
    at = dict.fromkeys(("slots", "flights", "lines", "heap", "phases"), 0)
    i = first_stage = sends = 0
    for limits, policy, times, replicas, ranks in zip(
        fleet.limits, fleet.policies, fleet.times, fleet.replicas, fleet.lanes, strict=True
    ):
        stages, depth = policy.pipeline_parallel_size, policy.max_concurrent_batches
        for _ in range(replicas * ranks):
            pipe = pipes[i]
            pipe["step"], pipe["stages"], pipe["depth"] = 1, stages, depth
            pipe["first_slot"] = pipe["first_free"] = at["slots"]
            pipe["first_flight"], pipe["first_line"] = at["flights"], at["lines"]
            pipe["first_stage"] = first_stage
            pipe["sends"], pipe["sends_row"] = sends, times.sends.shape[1]
            at["slots"] += stages
            at["flights"] += depth
            at["lines"] += stages * stages
            at["heap"] += stages * limits.max_num_seqs
            at["phases"] += stages * limits.block_size
            i += 1
        first_stage += stages
        sends += times.sends.size
    return pipes, at


def _slots(fleet: Any, count: int) -> NDArray[Any]:
    slots = np.zeros(count, dtype=SLOT)
    slots["last_step"] = NONE
    i = heap = phase = 0
    for limits, policy, replicas, ranks in zip(fleet.limits, fleet.policies, fleet.replicas, fleet.lanes, strict=True):
        for _ in range(replicas * ranks * policy.pipeline_parallel_size):
            slots[i]["heap"], slots[i]["phase"] = heap, phase
            heap += limits.max_num_seqs
            phase += limits.block_size
            i += 1
    return slots


def _flights(count: int) -> NDArray[Any]:
    flights = np.zeros(count, dtype=FLIGHT)
    flights["leaving"] = NONE
    return flights
