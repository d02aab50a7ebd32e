"""The reference engine in place of the compiled core: takes its demand and returns its record, some thousand requests a
second; for schedulers written in Python, and for pipelines of releases whose steps do not keep turns (vLLM ≤ 0.20)."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.pipeline import unsupported
from windtunnel.core.records import GONE, NONE, REFUSED, REQUEST, ROW, STALL, records
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes
from windtunnel.policy import VllmV1
from windtunnel.reference.custom import Custom, PythonScheduler
from windtunnel.reference.loop import (
    Loop,
    Replica,
    Router,
    least_outstanding,
    lowest_route_score,
    random_choice,
    round_robin,
    vllm_dp,
)
from windtunnel.reference.pipeline import Pipeline, table_passage
from windtunnel.reference.replica import Group, Step, table_time
from windtunnel.reference.request import Request
from windtunnel.reference.vllm_v1 import Scheduler


class Lane(NamedTuple):
    """One rank of one replica, and its steps; those of a pipeline belong to as many slots as it has stages."""

    replica: int
    rank: int
    slots: int
    steps: list[Step]


def run_custom(make: Callable[[], PythonScheduler], fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    """Simulate a fleet whose ranks are scheduled by ``make()`` each; ``router`` and ``uniforms`` as for the core.

    Raises:
        InputError: a decision breaks a rule, or requests are left at the end. What ``schedule`` raises passes through.
    """
    replicas = [_replica(make, fleet, pool) for pool, count in enumerate(fleet.replicas) for _ in range(count)]
    requests = requests_of(demand)
    run_replicas(replicas, requests, fleet, demand, router, uniforms)
    left = [request.id for request in requests if not request.finished and not request.refused]
    if left:
        name = type(make()).__name__
        raise InputError(f"{name}: {len(left)} requests never finish, the first is {left[0]}: it is not scheduled")
    return record_of(requests, replicas)


def _replica(make: Callable[[], PythonScheduler], fleet: Fleet, pool: int) -> Replica:
    ranks = [Custom(make(), fleet.limits[pool]) for _ in range(fleet.lanes[pool])]
    times = fleet.times[pool]
    if isinstance(times, StageTimes):
        raise InputError(
            f"pipeline_parallel_size={len(times.stages)}: not simulated for a scheduler of your own; use 1"
        )
    time = table_time(times)
    if fleet.lockstep[pool]:
        return Replica([Group(ranks, time)])
    return Replica([Group([rank], time) for rank in ranks])


def requests_of(demand: Demand) -> list[Request]:
    """The requests as the reference engine wants them, with the contents of their prompts where these are known."""
    limits = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    priority = np.zeros(len(limits), dtype=np.int64) if demand.priority is None else demand.priority
    columns = (demand.arrival, demand.prompt_tokens, demand.output_tokens, limits, demand.refused, priority)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    requests = [Request(i, *row) for i, row in enumerate(rows)]
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        places = np.arange(demand.hash_block_size)
        for request, (first, last) in zip(requests, pairwise(offsets.tolist()), strict=True):
            contents = (values[first:last, None] * demand.hash_block_size + places).ravel()
            request.tokens = tuple(contents[: request.prompt_tokens].tolist())
    return requests


def run_replicas(
    replicas: list[Replica], requests: list[Request], fleet: Fleet, demand: Demand, router: int, uniforms: Any
) -> None:
    """Simulate until nothing happens any more; ``router`` and ``uniforms`` as for the core."""
    follow = {i: int(f) for i, f in enumerate(demand.follow) if f != NONE}
    routers: list[Router] = [round_robin, random_choice(uniforms.tolist()), least_outstanding, vllm_dp]
    if fleet.route_score:
        routers.append(lowest_route_score(fleet.route_score))
    turnaround = [] if demand.turnaround is None else demand.turnaround.tolist()
    clients = (demand.think_time.tolist(), demand.max_concurrency, turnaround)
    Loop(replicas, routers[router], requests, follow, *clients).run()


def record_of(requests: list[Request], replicas: list[Replica]) -> Record:
    """What the core would have written."""
    lanes = list(_lanes(replicas))
    rows: list[dict[str, Any]] = []
    stalls = [(after, until, request.id) for request in requests for after, until in request.stalls]
    lane_of: dict[int, int] = {}
    for number, lane in enumerate(lanes):
        rows += _log(lane, stalls)
        lane_of |= {part.request.id: number for step in lane.steps for part in step.batch.scheduled}
    rows.sort(key=lambda row: (row["start"], row["replica"]))  # stable: ranks in lockstep and chunks stay together
    log = records(len(rows), ROW)
    for name in log.dtype.names or ():
        log[name] = [row.get(name, 0) for row in rows]
    return Record(
        requests=_table(requests, lane_of),
        rows=log,
        stalls=np.array(stalls, dtype=records(0, STALL).dtype),
        replica_of_lane=np.array([lane.replica for lane in lanes]),
        rank_of_lane=np.array([lane.rank for lane in lanes]),
    )


def _lanes(replicas: list[Replica]) -> Iterator[Lane]:
    for j, replica in enumerate(replicas):
        for k, group in enumerate(replica.groups):
            if isinstance(group, Pipeline):
                yield Lane(j, k, len(group.stages_free), group.journal)
                continue
            for rank in range(len(group.schedulers)):
                yield Lane(j, k + rank, 1, [step for step in group.journal if step.rank == rank])


def _log(lane: Lane, stalls: list[tuple[float, float, int]]) -> Iterator[dict[str, Any]]:
    """The rows of a lane. A decode that comes later than its slot's next one after its last token is a stall; one of a
    request that had already ended is a step too many, as asynchronous scheduling makes them."""
    last_token: dict[int, float] = {}
    previous: dict[int, float] = defaultdict(lambda: -np.inf)
    for step in lane.steps:
        slot = step.rank if lane.slots > 1 else 0
        decodes = [part.request for part in step.batch.decodes]
        late = [request for request in decodes if request.finish < step.end]
        paused = [request for request in decodes if last_token[request.id] < previous[slot] and request not in late]
        stalls += [(last_token[request.id], step.end, request.id) for request in paused]
        last_token |= {part.request.id: step.end for part in step.batch.scheduled if part.emits}
        row = {"start": step.start, "replica": lane.replica, "lane": lane.rank * lane.slots + slot}
        yield row | {
            "steps": 1,
            "decodes": len(decodes),
            "kv_tokens": sum(part.start for part in step.batch.decodes),
            "discarded": len(paused) + len(late),
            "used_blocks": step.used_blocks,
            "waiting": step.waiting,
            **_chunk(step, 0),
        }
        yield from (row | _chunk(step, i) for i in range(1, len(step.batch.chunks)))
        previous[slot] = step.end if decodes else previous[slot]


def _chunk(step: Step, i: int) -> dict[str, int]:
    if not step.batch.chunks:
        return {}
    tokens, context = step.batch.chunks[i]
    return {"chunk_tokens": tokens, "chunk_context": context}


def _table(requests: list[Request], lane_of: dict[int, int]) -> Any:
    table = records(len(requests), REQUEST)
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens"):
        table[name] = [getattr(request, name) for request in requests]
    table["output"] = [request.output_tokens for request in requests]
    table["lane"] = [lane_of.get(request.id, NONE) for request in requests]
    table["state"] = [REFUSED if request.refused else GONE if request.finished else 0 for request in requests]
    return table


def beyond_the_core(fleet: Fleet) -> list[str]:
    """The settings that keep a fleet of pipelines from the compiled core; none for any other fleet."""
    pipelines = [policy for policy in fleet.policies if policy.pipeline_parallel_size > 1]
    if len(pipelines) < len(fleet.policies):
        return []
    return sorted({name for policy in pipelines for name in unsupported(policy)})


def run_pipelines(fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    """Simulate a fleet of pipelines; ``router`` and ``uniforms`` as for the core.

    Raises:
        InputError: ranks in lockstep.
    """
    replicas = [_pipelines(fleet, pool) for pool, count in enumerate(fleet.replicas) for _ in range(count)]
    requests = requests_of(demand)
    run_replicas(replicas, requests, fleet, demand, router, uniforms)
    return record_of(requests, replicas)


def _pipelines(fleet: Fleet, pool: int) -> Replica:
    limits, policy, times = fleet.limits[pool], fleet.policies[pool], fleet.times[pool]
    policy.check(limits)
    if fleet.lockstep[pool]:
        raise InputError("pipelines of ranks in lockstep are not simulated: use data_parallel_size=1 with experts")
    passage, rules = table_passage(cast(StageTimes, times)), cast(VllmV1, policy)  # no others have stages
    return Replica([Pipeline(Scheduler(limits, rules), rules, passage) for _ in range(fleet.lanes[pool])])
