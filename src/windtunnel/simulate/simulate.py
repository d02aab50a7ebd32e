"""simulate(deployment, workload, seed) → Run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.disaggregation import handover
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.engine import run as run_core
from windtunnel.core.records import GONE, IGNORED, NONE, REFUSED
from windtunnel.core.stores.chunks import require_taking
from windtunnel.core.texts.kinds import computed_again, reuse_by_kind, why_again
from windtunnel.deployment import Deployment, Pool, engine_scheduler, warnings
from windtunnel.deployment.footprint import footprint
from windtunnel.deployment.memory import KVBudget, kv_blocks, room_notes, state_notes
from windtunnel.errors import InputError
from windtunnel.files import cache_folder
from windtunnel.perf.batch_times import StageTimes, Times
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated, draft_share
from windtunnel.policy import Limits, PythonScheduler, Settings, UserScheduler
from windtunnel.policy.named import Router, Scheduler, find_router, find_scheduler
from windtunnel.policy.scaling import Foresight, Variant
from windtunnel.policy.tiers import Tier
from windtunnel.simulate.disaggregation import (
    Sending,
    about_waits,
    between_of,
    handovers_of,
    routers_of,
)
from windtunnel.simulate.images import about_images, inputs_of, with_images
from windtunnel.simulate.looks import seen_late
from windtunnel.simulate.measured import within
from windtunnel.simulate.notes import about_load, about_the_unfinished
from windtunnel.simulate.overheads import ENGINE_CLOCK, ClientPath, Overheads, at_client, at_engine
from windtunnel.simulate.run import (
    ABORTED,
    FINISHED,
    REJECTED,
    SCHEMA_VERSION,
    UNFINISHED,
    Iterations,
    Requests,
    Run,
    Stalls,
)
from windtunnel.simulate.samples import groups_of, refused_together, swapped
from windtunnel.version import __version__
from windtunnel.workload.columns import Workload
from windtunnel.workload.texts import tree

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
        seed: of the random streams of the simulation itself (the random router, which drafts are right).
        perf: where kernel times come from: ``auto``, ``measured`` or ``roofline``.
        cache: keep batch-time tables on disk, and read them from there.
        corrections: what batch times account for beyond the sum of measured kernels; ablations switch some off.
        tables: the batch-time tables of each pool where they are at hand; ``perf`` and ``cache`` then mean nothing.
        overheads: host work beyond that of the tables, and the client's path, whose clock then counts.
        policies: the scheduler of each pool where it is not the one of its engine.
        scheduler: makes a scheduler in Python for each rank, instead of all these; see ``policy.PythonScheduler``.

    Raises:
        InputError: the model does not fit, or a name is unknown.
    """
    named = policies if policies and not scheduler else schedulers_of(deployment, scheduler)
    known = batch_times(deployment, perf, cache, corrections) if tables is None else tables
    named, tables = step_by_step(deployment.pools, with_images(deployment, workload, named, perf, corrections), known)
    times = tuple(with_own_ends(overheads, *row) for row in zip(tables, named, strict=True))
    router, budgets = find_router(deployment.router), [kv_blocks(pool) for pool in deployment.pools]
    fleet = replace(fleet_of(deployment, times, budgets, named, router), seed=seed, **comes_and_goes(deployment, seed))
    client = overheads.client and overheads.client.streaming(deployment.pools[-1].engine.stream_interval)
    demand, cut, delays = _asked(workload, fleet, client, deployment)
    notes = [*warnings(deployment), *(note for table in tables for note in table.notes), *workload.notes]
    notes += about_images(deployment, workload, named) + about_load(demand, cut, fleet, workload)
    notes += _memory_notes(deployment, budgets, demand)
    if not demand.knows_contents:
        fleet = replace(fleet, policies=tuple(policy.without_known_prefixes() for policy in fleet.policies))
    between = between_of(deployment, budgets, demand) if deployment.disaggregated else None
    record, said = _record(fleet, demand, routers_of(deployment), seed, between)
    requests, accounts = seen_late(_requests(workload, record, fleet), deployment), _accounts(record, demand, fleet)
    notes += [*said, *(about_the_unfinished(requests, fleet) if workload.measured is None else ())]
    requests = at_client(requests, workload, delays, client) if client else requests
    run = Run(
        requests=requests,
        iterations=Iterations.of(record.rows, record.gains),
        stalls=Stalls(*(record.stalls[name].copy() for name in ("request", "last_token", "resumed_token"))),
        manifest=manifest_of(deployment, workload, seed, tables, budgets, fleet, overheads, notes) | accounts,
        times=times,
        sources=tuple(table.sources for table in tables),
        groups=tuple(table.groups for table in tables),
        doubts=tuple(table.doubts for table in tables),
        handovers=handovers_of(requests, record, fleet) if isinstance(record, handover.Handed) else None,
    )
    return run if workload.measured is None else within(run, workload.measured)


def with_own_ends(overheads: Overheads, table: Tabulated, policy: Settings) -> Times:
    """The batch times of a pool, of a pipeline with the user's rule for its stages. Raises InputError where there are
    none."""
    times, end = overheads.applied(table.pipeline or table.times), getattr(policy, "stage_end", None)
    if end is None:
        return times
    if not isinstance(times, StageTimes):
        raise InputError("stage_end: is asked of the stages of a pipeline: use pipeline_parallel_size > 1")
    return replace(times, end=end)


def comes_and_goes(deployment: Deployment, seed: int) -> dict[str, Any]:
    """What a fleet says of replicas that start, stop or fail."""
    failures = sorted(failure for fault in deployment.faults for failure in deployment.failures(fault, seed))
    on_failure = deployment.faults[0].on_failure if deployment.faults else "retry"
    scaling = tuple(deployment.autoscaler(pool) for pool in deployment.pools)
    return {"scaling": scaling, "failures": tuple(failures), "on_failure": on_failure}


def _require_known_arrivals(demand: Demand, fleet: Fleet) -> None:
    """Raise InputError for an autoscaler with foresight where nobody knows when requests will come, and for one that
    sizes servers which do both halves of the work where these do one."""
    if demand.closed and any(scaling and isinstance(scaling.rule, Foresight) for scaling in fleet.scaling):
        raise InputError("autoscale: policy=foresight knows when requests come, and these wait: use forecast")
    halves = [scaling for scaling, role in zip(fleet.scaling, fleet.roles, strict=False) if role != "mixed"]
    if any(scaling and isinstance(scaling.rule, Variant) for scaling in halves):
        raise InputError("autoscale: policy=variant sizes servers that do both prefill and decode: use planner")


def _accounts(record: Record, demand: Demand, fleet: Fleet) -> dict[str, Any]:
    """What stores, and replicas that come and go, did in the whole run, and what prompts found; nothing where there are
    none."""
    stores = [use._asdict() for use in record.tiers]
    lives = record.lives._asdict() | {"pools": [one._asdict() for one in record.lives.pools]} if record.lives else None
    cached, ran = record.requests["cached_tokens"].astype(np.int64), ~np.isnan(record.requests["scheduled"])
    reuse = reuse_by_kind(demand, cached)
    again = computed_again(demand, cached, ran, fleet.limits[0].block_size)
    one_cache = not isinstance(record, handover.Handed) and any(policy.prefix_caching for policy in fleet.policies)
    why = why_again(demand, record.requests, ran, fleet.limits[0].block_size) if one_cache else {}
    found = {"stores": stores, "lives": lives, "reuse": reuse, "computed_again": again, "why_again": why}
    found["swapped"] = swapped(record)
    return {name: value for name, value in found.items() if value}


def _memory_notes(deployment: Deployment, budgets: list[KVBudget], demand: Demand) -> list[str]:
    rows = list(zip(deployment.pools, budgets, strict=True))
    return [note for row in rows for note in (*room_notes(*row), *state_notes(*row, demand.knows_contents))]


def _record(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[Router, Router],
    seed: int,
    between: tuple[handover.Crossing, Sending] | None,
) -> tuple[Record, list[str]]:
    """What happened, and what to say of it."""
    uniforms, numbers = router_stream(seed).random((2, len(demand.arrival))), (routers[0].number, routers[1].number)
    changes = any(fleet.scaling) or bool(fleet.failures)
    if between:
        crossing, sending = between
        asked = routers[1].route_score, routers[1].routing
        if changes:
            from windtunnel.core.fleet.pools import run as run_pools

            handed = run_pools(fleet, demand, numbers, uniforms, crossing, sending, decode_router=asked)
        else:
            handed = handover.run(fleet, demand, numbers, uniforms, crossing, decode_router=asked, folds=True)
        return handed, about_waits(crossing.rules, handed)
    if changes:
        from windtunnel.core.fleet.service import run as run_service

        return run_service(fleet, demand, numbers[0], uniforms[0]), []
    return run_core(fleet, demand, numbers[0], uniforms[0], folds=True), []


def router_stream(seed: int) -> np.random.Generator:
    """The numbers that random routers draw."""
    return np.random.default_rng([seed, crc32(b"router")])


def schedulers_of(deployment: Deployment, make: Callable[[], PythonScheduler] | None = None) -> list[Settings]:
    """The settings of each pool's scheduler; of what ``make`` makes, in the place of all of them."""
    return [_scheduler_of(pool, make or _named(pool)) for pool in deployment.pools]


def _named(pool: Pool) -> Scheduler:
    return find_scheduler(pool.engine.scheduler) if pool.engine.scheduler else engine_scheduler(pool.engine)


def _scheduler_of(pool: Pool, found: Scheduler) -> Settings:
    settings = UserScheduler(found, engine_scheduler(pool.engine)) if callable(found) else found
    return settings.with_stages(pool.engine.pipeline_parallel_size)


def batch_times(
    deployment: Deployment, perf: str = "auto", cache: bool = True, corrections: Corrections = ALL
) -> list[Tabulated]:
    """The tables of every pool, for more than one simulation of a deployment; arguments as of ``simulate``.

    Raises InputError for a model that does not fit, before hours are spent on its tables.
    """
    for pool in deployment.pools:
        kv_blocks(pool)
    return [tabulate(pool, perf, cache_folder() if cache else None, corrections) for pool in deployment.pools]


def step_by_step(
    pools: Sequence[Pool], policies: Sequence[Settings], tables: Sequence[Tabulated]
) -> tuple[list[Settings], list[Tabulated]]:
    """The schedulers with what their pools draft, and the batch times of steps that verify it: those of tables are
    divided by the tokens that a step yields."""
    chosen = [policy.with_drafts(pool.drafts) for policy, pool in zip(policies, pools, strict=True)]
    found = []
    for pool, policy, table in zip(pools, chosen, tables, strict=True):
        ranks = pool.engine.data_parallel_size if pool.lockstep else 1
        of_step = (pool.engine.num_speculative_tokens, pool.engine.acceptance_length or 1.0, ranks, draft_share(pool))
        found.append(table.of_steps(*of_step) if policy.drafts else table)
    return chosen, found


def fleet_of(
    deployment: Deployment,
    times: tuple[Times, ...],
    budgets: list[KVBudget],
    policies: Sequence[Settings],
    router: Router,
) -> Fleet:
    """The replicas with their limits, schedulers and batch times, and what their router goes by."""
    pools = deployment.pools
    gpus = pools[0].engine.world_size // pools[0].engine.data_parallel_size
    token_bytes = budgets[0].block_bytes * gpus / budgets[0].block_size
    of_ranks = tuple(limits(*row) for row in zip(pools, budgets, policies, strict=True))
    rows = zip(policies, of_ranks, budgets, pools, strict=True)
    return Fleet(
        limits=of_ranks,
        policies=tuple(
            settings.with_host(limit, budget.block_bytes, pool.device.pcie_bandwidth).in_role(pool.role)
            for settings, limit, budget, pool in rows
        ),
        times=times,
        replicas=tuple(pool.replicas for pool in pools),
        lanes=tuple(pool.engine.data_parallel_size for pool in pools),
        lockstep=tuple(pool.lockstep for pool in pools),
        roles=tuple(pool.role for pool in pools),
        balancers=tuple(pool.engine.balancer for pool in pools),
        tiers=_tiers(pools, budgets, policies),
        route_score=router.route_score,
        routing=router.routing.with_kv(token_bytes) if router.routing else None,
    )


def _tiers(
    pools: Sequence[Pool], budgets: Sequence[KVBudget], policies: Sequence[Settings]
) -> tuple[tuple[Tier, ...], ...]:
    """The stores of each pool as its schedulers see them; () without any."""
    if not any(pool.stores for pool in pools):
        return ()
    require_taking([pool.stores for pool in pools], policies)
    sizes = [
        budget.block_bytes * (pool.engine.world_size // pool.engine.data_parallel_size) / budget.block_size
        for pool, budget in zip(pools, budgets, strict=True)
    ]
    return tuple(
        tuple(
            store.tier_for(pool.engine, pool.device, size, budget.num_blocks * budget.block_size)
            for store in pool.stores
        )
        for pool, size, budget in zip(pools, sizes, budgets, strict=True)
    )


def limits(pool: Pool, budget: KVBudget, settings: Settings) -> Limits:
    """What one rank of the pool may use."""
    names = ("max_num_batched_tokens", "max_model_len", "block_size")
    return Limits(
        max_num_seqs=budget.max_num_seqs,
        num_blocks=budget.num_blocks - settings.unused_blocks,
        **{name: pool.engine.resolved(name) for name in names},
    )


def _asked(
    workload: Workload, fleet: Fleet, client: ClientPath | None, deployment: Deployment
) -> tuple[Demand, int, NDArray[np.float64]]:
    """(The requests as the engine sees them, how many are cut at max_model_len, what their client's path takes)."""
    delays, seen = np.zeros(0), workload
    if client:
        delays = client.delays(workload, deployment.pools[0].engine.api_servers)
        seen = at_engine(workload, delays, client)
    demand, cut = demand_of(seen, fleet, deployment.handover.reserved_decode_tokens)
    _require_known_arrivals(demand, fleet)
    if client and workload.max_concurrency:
        demand = replace(demand, turnaround=client.turnaround(workload, delays))
    return demand, cut, delays


def demand_of(workload: Workload, fleet: Fleet, reserved: int = 0) -> tuple[Demand, int]:
    """The requests as the core wants them, and how many are cut at max_model_len.

    A request is refused if it does not fit an empty engine of some pool, since any may get it; see
    ``policy.can_ever_run``. A prefill pool gets its prompt and one token; a decode pool keeps ``reserved`` tokens free
    when it takes a prompt, whose length it does not mind.
    """
    pools = list(zip(fleet.policies, fleet.limits, fleet.roles, strict=True))
    longest = [settings.longest_request(limit) for settings, limit, role in pools if role != "prefill"]
    room = min(longest) - workload.prompt_tokens
    output = np.minimum(workload.output_tokens, room)
    refused = output < 1
    for settings, limit, role in pools:
        tokens = workload.prompt_tokens + (np.minimum(output, 1) if role == "prefill" else output)
        refused |= -(-(tokens - 1) // limit.block_size) > limit.num_blocks
        refused |= tokens > settings.longest_request(limit)
        if role == "decode":
            refused |= workload.prompt_tokens + reserved > limit.num_blocks * limit.block_size
        else:
            refused |= workload.prompt_tokens > settings.longest_prompt(limit)
    groups = groups_of(workload, fleet)
    if groups is not None:
        refused = refused_together(workload, groups, fleet, output, refused)
    demand = Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=np.maximum(output, 0),
        overruns=output < np.minimum(workload.max_tokens, room),
        refused=refused,
        follow=workload.follow if workload.after is None else np.full(len(workload), NONE),
        after=workload.after,
        sessions=workload.session,
        lanes=workload.lanes,
        measured=workload.measured,
        think_time=workload.think_time,
        max_concurrency=workload.max_concurrency,
        max_tokens=np.minimum(workload.max_tokens, room),
        priority=workload.priority,
        images=inputs_of(workload),
        sample_of=groups,
        hash_block_size=workload.hash_block_size,
        begins=None if workload.texts is None else tree(workload.texts),
    )
    return demand, int(((output < workload.output_tokens) & ~refused).sum())


def _requests(workload: Workload, record: Record, fleet: Fleet) -> Requests:
    rows = record.requests
    lane = rows["lane"].astype(np.int64)
    pool_of_lane = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas)[record.replica_of_lane]
    return Requests(
        id=np.arange(len(rows)),
        arrival=rows["arrival"].copy(),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=rows["output"].astype(np.int64),
        max_tokens=workload.max_tokens,
        pool=np.where(lane == NONE, -1, pool_of_lane[lane]),
        replica=np.where(lane == NONE, -1, record.replica_of_lane[lane]),
        lane=np.where(lane == NONE, -1, record.rank_of_lane[lane]),
        status=_status(record),
        scheduled=rows["scheduled"].copy(),
        first_token=rows["first_token"].copy(),
        finish=rows["finish"].copy(),
        preemptions=rows["preemptions"].astype(np.int64),
        cached_tokens=rows["cached_tokens"].astype(np.int64),
    )


def _status(record: Record) -> Integers:
    state = record.requests["state"]
    status = np.where(np.isin(state, (REFUSED, IGNORED)), REJECTED, UNFINISHED)
    status[state == GONE] = FINISHED
    if record.lives:
        status[record.lives.lost] = ABORTED
    if isinstance(record, handover.Handed):
        status[record.lost] = ABORTED
    return status


def manifest_of(
    deployment: Deployment,
    workload: Workload,
    seed: int,
    tables: Sequence[Tabulated],
    budgets: list[KVBudget],
    fleet: Fleet,
    overheads: Overheads,
    notes: list[str],
) -> dict[str, Any]:
    """What a run says of what was simulated."""
    pools, replicas = [], []
    rows = zip(deployment.pools, budgets, fleet.limits, strict=True)
    for index, (pool, budget, limit) in enumerate(rows):
        lanes = pool.engine.data_parallel_size
        stages = pool.engine.pipeline_parallel_size
        replicas += [{"pool": index, "lanes": lanes, "lockstep": pool.lockstep, "stages": stages}] * pool.replicas
        pools.append(
            deployment.pool_spec(pool)
            | {
                "kv_blocks": limit.num_blocks,
                "block_size": budget.block_size,
                "max_num_seqs": limit.max_num_seqs,
                "gpus_per_replica": pool.engine.world_size,
                "gpus_per_node": pool.device.gpus_per_node,
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
