"""simulate(deployment, workload, seed) → Run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.engine import run as run_core
from windtunnel.core.records import GONE, IGNORED, NONE, REFUSED
from windtunnel.deployment import Deployment, Pool, engine_scheduler, warnings
from windtunnel.deployment.footprint import footprint
from windtunnel.deployment.memory import KVBudget, kv_blocks, state_notes
from windtunnel.perf.batch_times import Times
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.tabulate.cache import cache_folder
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import Limits, Settings
from windtunnel.policy.named import find_router, find_scheduler
from windtunnel.reference.custom import PythonScheduler
from windtunnel.simulate.notes import about_load, about_the_unfinished
from windtunnel.simulate.on_reference import beyond_the_core, run_custom, run_pipelines
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads, at_client, at_engine
from windtunnel.simulate.run import FINISHED, REJECTED, SCHEMA_VERSION, UNFINISHED, Iterations, Requests, Run, Stalls
from windtunnel.version import __version__
from windtunnel.workload.columns import Workload

Integers = NDArray[np.int64]


def simulate(
    deployment: Deployment,
    workload: Workload,
    seed: int = 0,
    *,
    perf: str = "auto",
    cache: bool = True,
    corrections: Corrections = ALL,
    tables: Sequence[Tabulated] | None = None,
    overheads: Overheads = ENGINE_CLOCK,
    policies: Sequence[Settings] | None = None,
    scheduler: Callable[[], PythonScheduler] | None = None,
) -> Run:
    """Simulate every request of a workload on a deployment until the last one has ended.

    Args:
        deployment: what serves.
        workload: what is asked.
        seed: of the random streams of the simulation itself (the random router).
        perf: where kernel times come from: ``auto``, ``measured`` or ``roofline``.
        cache: keep batch-time tables on disk, and read them from there.
        corrections: what batch times account for beyond the sum of measured kernels; ablations switch some off.
        tables: the batch-time tables of each pool where they are at hand; ``perf`` and ``cache`` then mean nothing.
        overheads: host work beyond that of the tables, and the client's path, whose clock then counts.
        policies: the scheduler of each pool where it is not the one of its engine.
        scheduler: makes a scheduler in Python for each rank, instead of all these; it runs on the reference engine.

    Raises:
        InputError: the model does not fit, or a name is unknown.
    """
    router, route_score = find_router(deployment.router)
    own, named = _schedulers(deployment)
    if tables is None:
        tables = batch_times(deployment, perf, cache, corrections)
    times = tuple(overheads.host.applied(table.pipeline or table.times) for table in tables)
    budgets = [kv_blocks(pool) for pool in deployment.pools]
    fleet = replace(_fleet(deployment, times, budgets, policies or named), route_score=route_score)
    client = overheads.client
    delays = client.delays(workload) if client else np.zeros(0)
    seen = at_engine(workload, delays, client) if client else workload
    demand, cut = _demand(seen, fleet.limits[0], fleet.policies[0])
    if client and workload.max_concurrency:
        demand = replace(demand, turnaround=client.turnaround(workload, delays))
    notes = [*warnings(deployment), *(note for table in tables for note in table.notes), *workload.notes]
    notes += [*about_load(demand, cut, fleet), *_state_notes(deployment, budgets, demand)]
    if demand.hash_ids is None:
        fleet = replace(fleet, policies=tuple(policy.without_known_prefixes() for policy in fleet.policies))
    record, slowly = _record(fleet, demand, router, seed, scheduler or own)
    requests = _requests(workload, record)
    notes += [*slowly, *about_the_unfinished(requests, fleet)]
    return Run(
        requests=at_client(requests, workload, delays, client) if client else requests,
        iterations=_iterations(record),
        stalls=Stalls(*(record.stalls[name].copy() for name in ("request", "last_token", "resumed_token"))),
        manifest=_manifest(deployment, workload, seed, tables, budgets, fleet, overheads, notes),
        times=times,
        sources=tuple(table.sources for table in tables),
        groups=tuple(table.groups for table in tables),
        doubts=tuple(table.doubts for table in tables),
    )


def _state_notes(deployment: Deployment, budgets: list[KVBudget], demand: Demand) -> list[str]:
    rows = zip(deployment.pools, budgets, strict=True)
    return [note for row in rows for note in state_notes(*row, demand.hash_ids is not None)]


def _record(
    fleet: Fleet, demand: Demand, router: int, seed: int, scheduler: Callable[[], PythonScheduler] | None
) -> tuple[Record, list[str]]:
    """What happened, in the core or in the reference engine where it alone has the rules, and a note if that is so."""
    uniforms = np.random.default_rng([seed, crc32(b"router")]).random(len(demand.arrival))
    if scheduler:
        return run_custom(scheduler, fleet, demand, router, uniforms), []
    if beyond := beyond_the_core(fleet):
        note = f"{', '.join(beyond)} in a pipeline: simulated by the reference engine, which takes its time"
        return run_pipelines(fleet, demand, router, uniforms), [note]
    return run_core(fleet, demand, router, uniforms), []


def _schedulers(deployment: Deployment) -> tuple[Callable[[], PythonScheduler] | None, list[Settings]]:
    """What makes the user's scheduler, if there is one, and the settings of each pool's scheduler otherwise."""
    settings: list[Settings] = []
    for pool in deployment.pools:
        found = find_scheduler(pool.engine.scheduler) if pool.engine.scheduler else engine_scheduler(pool.engine)
        if callable(found):
            return found, [engine_scheduler(pool.engine) for pool in deployment.pools]
        settings.append(found)
    return None, settings


def batch_times(
    deployment: Deployment, perf: str = "auto", cache: bool = True, corrections: Corrections = ALL
) -> list[Tabulated]:
    """The tables of every pool, for more than one simulation of a deployment; arguments as of ``simulate``."""
    return [tabulate(pool, perf, cache_folder() if cache else None, corrections) for pool in deployment.pools]


def _fleet(
    deployment: Deployment,
    times: tuple[Times, ...],
    budgets: list[KVBudget],
    policies: Sequence[Settings],
) -> Fleet:
    pools = deployment.pools
    of_ranks = tuple(limits(*row) for row in zip(pools, budgets, policies, strict=True))
    rows = zip(policies, of_ranks, budgets, pools, strict=True)
    return Fleet(
        limits=of_ranks,
        policies=tuple(
            settings.with_host(limit, budget.block_bytes, pool.device.pcie_bandwidth)
            for settings, limit, budget, pool in rows
        ),
        times=times,
        replicas=tuple(pool.replicas for pool in pools),
        lanes=tuple(pool.engine.data_parallel_size for pool in pools),
        lockstep=tuple(pool.lockstep for pool in pools),
    )


def limits(pool: Pool, budget: KVBudget, settings: Settings) -> Limits:
    """What one rank of the pool may use."""
    names = ("max_num_batched_tokens", "max_model_len", "block_size")
    return Limits(
        max_num_seqs=budget.max_num_seqs,
        num_blocks=budget.num_blocks - settings.unused_blocks,
        **{name: pool.engine.resolved(name) for name in names},
    )


def _demand(workload: Workload, limit: Limits, settings: Settings) -> tuple[Demand, int]:
    """The requests as the core wants them, and how many are cut at max_model_len.

    A request is refused if it does not fit an empty engine; see ``policy.can_ever_run``.
    """
    room = settings.longest_request(limit) - workload.prompt_tokens
    output = np.minimum(workload.output_tokens, room)
    blocks = -(-(workload.prompt_tokens + output - 1) // limit.block_size)
    refused = (output < 1) | (blocks > limit.num_blocks) | (workload.prompt_tokens > settings.longest_prompt(limit))
    demand = Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=np.maximum(output, 0),
        overruns=output < np.minimum(workload.max_tokens, room),
        refused=refused,
        follow=workload.follow,
        think_time=workload.think_time,
        max_concurrency=workload.max_concurrency,
        max_tokens=np.minimum(workload.max_tokens, room),
        priority=workload.priority,
        hash_ids=workload.hash_ids,
        hash_block_size=workload.hash_block_size,
    )
    return demand, int(((output < workload.output_tokens) & ~refused).sum())


def _requests(workload: Workload, record: Record) -> Requests:
    rows = record.requests
    finished = rows["state"] == GONE
    lane = rows["lane"].astype(np.int64)
    return Requests(
        id=np.arange(len(rows)),
        arrival=rows["arrival"].copy(),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=rows["output"].astype(np.int64),
        max_tokens=workload.max_tokens,
        pool=np.where(lane == NONE, -1, 0),
        replica=np.where(lane == NONE, -1, record.replica_of_lane[lane]),
        lane=np.where(lane == NONE, -1, record.rank_of_lane[lane]),
        status=np.where(finished, FINISHED, np.where(np.isin(rows["state"], (REFUSED, IGNORED)), REJECTED, UNFINISHED)),
        scheduled=rows["scheduled"].copy(),
        first_token=rows["first_token"].copy(),
        finish=rows["finish"].copy(),
        preemptions=rows["preemptions"].astype(np.int64),
        cached_tokens=rows["cached_tokens"].astype(np.int64),
    )


def _iterations(record: Record) -> Iterations:
    rows = record.rows

    def integers(name: str) -> Integers:
        return rows[name].astype(np.int64)

    return Iterations(
        replica=integers("replica"),
        lane=integers("lane"),
        start=rows["start"].copy(),
        steps=integers("steps"),
        decodes=integers("decodes"),
        kv_tokens=integers("kv_tokens"),
        chunk_tokens=integers("chunk_tokens"),
        chunk_context=integers("chunk_context"),
        used_blocks=integers("used_blocks"),
        waiting=integers("waiting"),
        discarded=integers("discarded"),
        transfer=rows["transfer"].copy(),
    )


def _manifest(
    deployment: Deployment,
    workload: Workload,
    seed: int,
    tables: Sequence[Tabulated],
    budgets: list[KVBudget],
    fleet: Fleet,
    overheads: Overheads,
    notes: list[str],
) -> dict[str, Any]:
    pools, replicas = [], []
    rows = zip(deployment.pools, budgets, fleet.limits, strict=True)
    for index, (pool, budget, limit) in enumerate(rows):
        lanes = pool.engine.data_parallel_size
        stages = pool.engine.pipeline_parallel_size
        replicas += [{"pool": index, "lanes": lanes, "lockstep": pool.lockstep, "stages": stages}] * pool.replicas
        pools.append(
            pool.spec()
            | {
                "kv_blocks": limit.num_blocks,
                "block_size": budget.block_size,
                "max_num_seqs": limit.max_num_seqs,
                "gpus_per_replica": pool.engine.world_size,
                "lockstep": pool.lockstep,
                "memory": _memory(budget),
                "footprint": asdict(footprint(pool)),
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "windtunnel": __version__,
        "seed": seed,
        "deployment": deployment.spec(),
        "workload": workload.spec(),
        "pools": pools,
        "replicas": replicas,
        "provenance": [list(table.provenance) for table in tables],
        "warnings": list(dict.fromkeys(notes)),
        "overheads": overheads.spec(),
        "schedulers": [str(settings) for settings in fleet.policies],
    }


def _memory(budget: KVBudget) -> dict[str, int]:
    names = ("weight_bytes", "activation_bytes", "graph_bytes", "reserve_bytes", "window_bytes", "state_bytes")
    return {name: getattr(budget, name) for name in (*names, "available_bytes")}
