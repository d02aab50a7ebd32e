"""Random prefill and decode pools on the core and in the reference's event loop."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from equality import Impatient, stages_of
from equality import cases as vllm_cases
from equality_unified import Impatient as ImpatientUnified
from equality_unified import cases as unified_cases
from hypothesis import assume
from hypothesis import strategies as st
from oracle import handover as reference
from oracle.loop import Replica, least_outstanding, round_robin, vllm_dp
from oracle.mixed_records import record_of, requests_of
from oracle.replica import Group, table_time

from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE
from windtunnel.deployment import HANDOVERS, Handover, Link
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Settings, VllmV1, can_ever_run

ROUTERS = {0: round_robin, 2: least_outstanding, 3: vllm_dp}
ROLES = ("prefill", "decode")
PROMPT, STEPS = 8, {"max_num_batched_tokens": 64, "max_num_seqs": 64, "max_model_len": 64}
SYNCHRONOUS = VllmV1(async_scheduling=False)


def tandem(first: float, second: float, seats: int = 1, policy: Settings = SYNCHRONOUS) -> Fleet:
    """A prefill replica whose every step takes ``first`` seconds for one prompt, and a decode replica with seats."""
    limits = tuple(Limits(count, 64, 64, 6000, 16) for count in (1, seats))
    times = tuple(linear(step, 0.0, 0.0, 0.0, **STEPS) for step in (first, second))
    return Fleet(limits, (SYNCHRONOUS, policy), times, (1, 1), (1, 1), (False, False), roles=ROLES)


def equal_requests(arrival: Any, output: int = 2, **more: Any) -> Demand:
    """Requests that differ in their arrival only."""
    n = len(arrival)
    none, tokens = np.zeros(n, dtype=bool), np.full(n, output)
    columns: dict[str, Any] = {"max_concurrency": 0, "max_tokens": tokens}
    columns |= {"think_time": np.zeros(n), "follow": np.full(n, -1)} | more
    return Demand(arrival, np.full(n, PROMPT), tokens, none, none, **columns)


@dataclass(frozen=True)
class Case:
    """A prefill pool, a decode pool, what is between them, and requests."""

    fleet: Fleet
    demand: Demand
    routers: tuple[int, int]
    crossing: Crossing


@st.composite
def links(draw: st.DrawFn) -> Link:
    """Links of any kind."""
    sharing: Any = draw(st.sampled_from(["fifo", "fair"]))
    contention: Any = draw(st.sampled_from(["none", "source", "destination", "both"]))
    return Link(latency=draw(st.sampled_from([0.0, 0.25, 3.0])), sharing=sharing, contention=contention)


@st.composite
def rules(draw: st.DrawFn) -> Handover:
    """The named rules, or any mixture."""
    named, stay = draw(st.sampled_from([None, *HANDOVERS.values()])), draw(st.sampled_from([0, 0, 2, 20]))
    if named is not None:
        reserved = min(named.reserved_decode_tokens, draw(st.integers(0, 20)))
        return replace(named, reserved_decode_tokens=reserved, max_local_prefill_length=stay)
    transfer: Any = draw(st.sampled_from(["pull", "push", "chunked"]))
    return Handover(
        transfer,
        draw(st.sampled_from(["prefill", "relayed", "decode"])),
        gate="before_prefill" if transfer == "chunked" else draw(st.sampled_from(["before_prefill", "after_prefill"])),
        reserved_decode_tokens=draw(st.sampled_from([0, 0, 1, 7])),
        reservation=draw(st.sampled_from(["memory", "seats", "seats_and_few"])),
        max_local_prefill_length=stay,
        proxy=draw(st.sampled_from([0.0, 0.5])),
    )


def takes(policy: Any) -> bool:
    """Whether a decode pool may have these rules."""
    return isinstance(policy, VllmV1) or policy.preemption != "swap"


@st.composite
def cases(draw: st.DrawFn, kind: str = "any") -> Case:
    """Little memory on either side, tied times, closed loops, sessions, ranks in lockstep or not.

    ``kind``: ``vllm``, ``unified`` or ``any``; ``cached``: vLLM, and both pools cache prefixes (one thing to compile).
    """
    kinds: dict[str, Any] = {"vllm": vllm_cases(), "unified": unified_cases(), "cached": vllm_cases()}
    both = [draw(kinds[draw(st.sampled_from(["vllm", "unified"])) if kind == "any" else kind]) for _ in ROLES]
    if kind == "cached":
        size = both[0].limits.block_size
        both = [replace(one, policy=replace(one.policy, prefix_caching=True)) for one in both]
        both[1] = replace(both[1], limits=replace(both[1].limits, block_size=size))
    first, second = both
    if not takes(second.policy):
        second = replace(
            second, policy=replace(second.policy, preemption="recompute", host_blocks=0, swap_time_per_block=0.0)
        )
    if first.limits.block_size != second.limits.block_size and isinstance(second.policy, VllmV1):
        plain = replace(second.policy, prefix_caching=False)  # one cache has blocks of one size
        second = replace(second, policy=plain)
    between, asked = draw(links()), draw(rules())
    if asked.first_token == "decode" and isinstance(second.policy, VllmV1):
        # a prompt of one token that is evicted in its first step over there would want none: vLLM ≤ 0.10 stops at that
        second = replace(second, policy=replace(second.policy, return_victim_tokens=True))
    pools: Any = [
        (one.limits, one.policy, one.times, min(one.replicas, 3), one.lanes, one.lockstep) for one in (first, second)
    ]
    names = ("limits", "policies", "times", "replicas", "lanes", "lockstep")
    columns: Any = dict(zip(names, zip(*pools, strict=True), strict=True))
    fleet = Fleet(**columns, roles=ROLES)
    demand = demand_of(first, fleet)
    size = draw(st.sampled_from([0.0, 0.125, 0.25]))
    work: Any = demand.prompt_tokens * size
    return Case(fleet, demand, (draw(routers()), draw(routers())), Crossing(between, asked, work * 10, work))


@st.composite
def in_stages(draw: st.DrawFn, fleet: Fleet, roles: tuple[str, ...]) -> Fleet:
    """The fleet, of vLLM's schedulers, with its pools of these roles in several stages."""
    policies, tables = list[Any](fleet.policies), list(fleet.times)
    for place, role in enumerate(fleet.roles):
        policies[place] = replace(policies[place], prefix_caching=False)
        if role in roles:
            assume(not fleet.lockstep[place])
            times = draw(stages_of(fleet.limits[place]))
            one = replace(policies[place], pipeline_parallel_size=len(times.stages), prefill_schedule_interval=1)
            assume(role == "prefill" or one.keeps_turns)
            policies[place], tables[place] = one, times
    return replace(fleet, policies=tuple(policies), times=tuple(tables))


def routers() -> Any:
    """Numbers of routers that the reference has without further ado."""
    return st.sampled_from(list(ROUTERS))


def demand_of(case: Any, fleet: Fleet) -> Demand:
    """The requests of a case, as far as both pools can have them."""
    longest = min(one.longest_request(limits) for one, limits in zip(fleet.policies, fleet.limits, strict=True))
    prompt = np.minimum(case.prompt, longest - 1)
    output = np.minimum(case.output, longest - prompt)
    declared = np.minimum(output + case.max_tokens - case.output, longest - prompt)
    refused = np.zeros(len(prompt), dtype=bool)
    for policy, limits in zip(fleet.policies, fleet.limits, strict=True):
        refused |= np.array([not can_ever_run(int(p), int(o), limits) for p, o in zip(prompt, declared, strict=True)])
        refused |= prompt + 1 > policy.longest_prompt(limits)
    return Demand(
        arrival=np.array(case.arrival, dtype=np.float64),
        prompt_tokens=prompt,
        output_tokens=output,
        overruns=declared > output,
        refused=refused,
        follow=case.follow,
        think_time=case.think_time,
        max_concurrency=case.max_concurrency,
        max_tokens=declared,
        priority=getattr(case, "priority", None),
        turnaround=getattr(case, "turnaround", None),
    )


def by_core(case: Case, jumps: bool = True, in_step: bool = False) -> Handed:
    """The case on the core."""
    uniforms = np.zeros((2, len(case.demand.arrival)))
    return run(case.fleet, case.demand, case.routers, uniforms, case.crossing, jumps, in_step)


def by_reference(case: Case) -> tuple[reference.Disaggregated, list[Any]]:
    """The case in the reference's event loop, and what happened on either side."""

    def replica(pool: int) -> Replica:
        policy: Any = case.fleet.policies[pool]
        kind: Any = Impatient if isinstance(policy, VllmV1) else ImpatientUnified
        ranks = [kind(case.fleet.limits[pool], policy) for _ in range(case.fleet.lanes[pool])]
        time, depth = table_time(case.fleet.times[pool]), 1 + policy.async_scheduling  # type: ignore[arg-type]
        lockstep = case.fleet.lockstep[pool]
        return Replica([Group(ranks, time, depth)] if lockstep else [Group([rank], time, depth) for rank in ranks])

    sides = [[replica(pool) for _ in range(case.fleet.replicas[pool])] for pool in (0, 1)]
    demand = case.demand
    follow = {i: int(f) for i, f in enumerate(demand.follow) if f >= 0}
    turnaround = [] if demand.turnaround is None else demand.turnaround.tolist()
    clients = (follow, demand.think_time.tolist(), demand.max_concurrency, turnaround)
    between = reference.Crossing(case.crossing.link, case.crossing.rules, case.crossing.work.tolist())
    chosen = ROUTERS[case.routers[0]], ROUTERS[case.routers[1]]
    loop = reference.Disaggregated(sides[0], sides[1], chosen, requests_of(demand), between, clients)
    loop.run()
    requests = (loop.prefills, list(loop.decodes.values()))
    return loop, [record_of(*side) for side in zip(requests, sides, strict=True)]


def differences(case: Case, jumps: bool, in_step: bool) -> list[str]:
    """What is not equal. Raises StuckError where the reference would try for ever."""
    expected, sides = by_reference(case)
    record, found = by_core(case, jumps, in_step), []

    def compare(name: str, r: int, ours: Any, theirs: Any) -> None:
        if not np.array_equal(ours, theirs, equal_nan=True):
            found.append(f"{name} of {r}: {ours} in the core, {theirs} in the reference")

    again = case.crossing.rules.first_token == "decode"
    for r, one in enumerate(record.requests):
        before, after, way = expected.prefills[r], expected.decodes.get(r), expected.passages[r]
        goes = expected.goes(r)
        if expected.stays(r):
            before, after = expected.decodes.get(r, before), None
        last: Any = after if goes else before
        done = bool(last and last.finished)
        compare("state", r, bool(one["state"] == GONE), done)
        for name in ("arrival", "scheduled", "cached_tokens"):
            if name != "arrival" or before.scheduled >= 0:  # without a place yet it has no arrival that anybody saw
                compare(name, r, one[name], getattr(before, name))
        if done:
            compare("finish", r, one["finish"], last.finish)
        for name in ("prefill_end", "asked", "admitted", "transfer_start", "transfer_end", "joined"):
            compare(name, r, record.handovers[name][r], getattr(way, name))
        compare("preemptions", r, one["preemptions"], before.preemptions + (after.preemptions if after else 0))
    stalls = [stall for side in sides for stall in side.stalls.tolist()]
    if not again:
        compare("stalls", -1, sorted(record.stalls.tolist()), sorted(stalls))
    for side, replicas in enumerate((range(case.fleet.replicas[0]), range(case.fleet.replicas[0], 99))):
        rows = record.rows[np.isin(record.rows["replica"], list(replicas))]
        for name in ("decodes", "discarded"):
            compare(name, side, (rows[name] * np.maximum(rows["steps"], 1)).sum(), sides[side].rows[name].sum())
    return found


def steps_of(fleet: Fleet, record: Handed) -> Any:
    """Every single step: replica, rank, start, duration, decodes, in order of the first three.

    Which of its pipeline's slots a step has is not compared: the reference counts what it decides in vain, and where
    nothing decodes nothing depends on it.
    """
    rows = record.rows
    pool = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas)
    lanes = np.where(fleet.lockstep, fleet.lanes, 1)[pool]
    found = iteration_times(rows, fleet.times, pool, lanes)
    of = rows[found.row]
    stages = np.array([policy.pipeline_parallel_size for policy in fleet.policies])[pool]
    ranks = of["lane"] // stages[of["replica"]]
    steps = np.array([of["replica"], ranks, found.start, found.duration, of["decodes"]], dtype=np.float64)
    return steps[:, np.lexsort(steps[2::-1])]


def assert_nothing_is_left(loop: reference.Disaggregated) -> None:
    """No place, block or seat is held when all is over, and nobody waits for one."""
    assert loop.in_flight == 0 or not loop.max_concurrency
    for group in loop.groups:
        for scheduler in group.schedulers:
            assert scheduler.used_blocks == scheduler.coming == scheduler.num_waiting == scheduler.num_running == 0
    for lane in (lane for lanes in loop.reservation for lane in lanes):
        assert (len(lane.asking), len(lane.ready), lane.staged) == (0, 0, 0)
