"""Random cases for SGLang's scheduler."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.perf.batch_times import BatchTimes, StageTimes, Times, linear
from windtunnel.policy import Limits, Sglang
from windtunnel.policy.drafts import Drafts, rates_of
from windtunnel.policy.tiers import Tier


@dataclass(frozen=True)
class SglangCase:
    """One small simulation."""

    limits: Limits
    policy: Sglang
    times: Times
    replicas: int
    lanes: int
    lockstep: bool
    router: int
    arrival: Any
    prompt: Any
    output: Any
    declared: Any
    hash_ids: Any
    hash_block_size: int
    max_concurrency: int
    priority: Any
    tiers: tuple[Tier, ...] = ()


def two_ranks(policy: Sglang, times: Times, arrival: Any, output: int, seats: int = 8) -> SglangCase:
    """Two ranks in lockstep, to which prompts of 20 tokens go in turn."""
    n = len(arrival)
    return SglangCase(
        limits=Limits(seats, 64, 400, 4000, 1),
        policy=policy,
        times=times,
        replicas=1,
        lanes=2,
        lockstep=True,
        router=0,
        arrival=np.array(arrival),
        prompt=np.full(n, 20),
        output=np.full(n, output),
        declared=np.full(n, output),
        hash_ids=(np.zeros(n + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)),
        hash_block_size=16,
        max_concurrency=0,
        priority=np.zeros(n, dtype=np.int64),
    )


def small_case(seed: int) -> SglangCase:
    """Either version; little memory, shared beginnings, every order, chunks mixed or not, pages, priorities, closed
    loops, several replicas."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    seqs, chunked, longest = pick(1, 2, 4, 8, 16, 40), pick(False, True), 200
    newer, radix = pick(False, True), pick(False, True)
    of_both = ("fcfs", "lpm", "dfs-weight", "lof", "random")
    orders = (*of_both, *(("hrrn", "shortest-prefill-first", "routing-key") if newer and radix else ()))
    policy = Sglang(
        version="0.4.6",
        chunked_prefill=chunked,
        max_prefill_tokens=pick(16, 60, 200),
        schedule_policy="fcfs",
        radix_cache=radix,
        schedule_conservativeness=pick(0.0, 0.3, 1.0, 2.0),
        enable_mixed_chunk=pick(False, True),
        ignore_eos=pick(False, True),
        disable_overlap_schedule=pick(False, True),
    )
    policy = replace(policy, **newer_settings(pick)) if newer else policy
    policy = replace(
        policy, schedule_policy=pick(*(orders if not policy.enable_priority_scheduling else ("fcfs", "lof")))
    )
    if newer and policy.async_scheduling and not policy.exact_release:
        policy = replace(policy, **delayer(pick))
    limits = Limits(seqs, longest, longest, int(rng.integers(8, 121)), pick(1, 4))
    budget = seqs + pick(1, 5, 40, 200) if chunked else policy.longest_round(limits)
    limits = replace(limits, max_num_batched_tokens=budget)
    lanes, n, gap = pick(1, 1, 1, 2), int(rng.integers(1, 61)), pick(0.0, 1.0, 8.0)
    prompt = rng.integers(1, pick(4, 40, 100) + 1, n)
    output = rng.integers(1, pick(2, 20, 60) + 1, n)
    declared = np.minimum(output + pick(0, 0, 10) * rng.integers(0, 3, n), policy.longest_request(limits) - prompt)
    size = pick(1, 4, 16)
    tiers = host_memory(seed, limits) if policy.takes_stores else ()
    if not tiers and policy.takes_drafts:
        policy = policy.with_drafts(drafts(seed))
    rounds = {"max_num_batched_tokens": budget, "max_num_seqs": seqs, "max_model_len": longest, "ranks": lanes}
    return SglangCase(
        limits=limits,
        policy=policy,
        times=linear(pick(0.5, 1.0), 0.01, 0.001, 1e-5, per_expert_token=0.01, **rounds),
        replicas=pick(1, 1, 2, 3),
        lanes=lanes,
        lockstep=lanes > 1 and pick(False, True),
        router=pick(0, 1, 2, 3),
        arrival=np.cumsum(pick(rng.integers(0, 3, n) * gap, rng.exponential(gap + 1e-9, n))),
        prompt=prompt,
        output=np.minimum(output, declared),
        declared=declared,
        hash_ids=shared_beginnings(rng, prompt, size, pick(1, 3, 1000)),
        hash_block_size=size,
        max_concurrency=pick(0, 0, 1, 5),
        priority=rng.integers(0, 4, n),
        tiers=tiers,
    )


def host_memory(seed: int, limits: Limits) -> tuple[Tier, ...]:
    """Half of the cases: a fifth to three times what the GPU keeps, written at each of the three times."""
    rng = np.random.default_rng([seed, 2])
    if rng.random() < 0.5:
        return ()
    tokens = int(limits.num_blocks * limits.block_size * rng.choice([0.2, 1.0, 3.0]))
    back, entered = bool(rng.random() < 0.4), int(rng.integers(0, 2))
    read_s = float(rng.choice([0.0, 0.01, 1.0]))
    host = Tier("host", tokens, 1, read_s, 0.0, 0.0, "replica", write_after=0 if back else entered, on_eviction=back)
    return (host,) if tokens else ()


def drafts(seed: int) -> Drafts | None:
    """Half of the cases: up to four, with EAGLE's tree or the plain one."""
    rng = np.random.default_rng([seed, 3])
    most, length = int(rng.integers(1, 5)), float(rng.random())
    if rng.random() < 0.5:
        return None
    return Drafts(most, str(rng.choice(["eagle", "draft_model"])), rates_of(1.0 + most * length, most))


def newer_settings(pick: Any) -> dict[str, Any]:
    """What only 0.5.23 has."""
    priorities, page = pick(False, False, True), pick(1, 1, 2, 8)
    return {
        "version": "0.5.23",
        "page_size": page,
        "radix_eviction_policy": pick("lru", "lru", "lfu", "slru", "priority", "fifo", "filo", "mru"),
        "prefill_max_requests": pick(0, 0, 1, 3),
        "prefill_decode_interval": pick(0, 0, 1, 4),
        "prefill_decode_interval_min_bs": pick(0, 2),
        "min_free_slots_delay": pick(0, 0, 2),
        "max_queued_requests": pick(0, 0, 1, 3),
        "enable_priority_scheduling": priorities,
        "schedule_low_priority_values_first": pick(False, True),
        "priority_scheduling_preemption_threshold": pick(0, 1),
        "retraction_policy": pick("default", "priority") if priorities else "default",
    }


def delayer(pick: Any) -> dict[str, Any]:
    """Ranks that wait for each other, for seats, or for more requests."""
    return {
        "enable_prefill_delayer": pick(False, False, True),
        "prefill_delayer_max_delay_passes": pick(1, 4, 30),
        "prefill_delayer_token_usage_low_watermark": pick(0.0, 0.0, 0.5),
        "prefill_delayer_queue_min_ratio": pick(0.0, 0.5),
        "prefill_delayer_max_delay_ms": pick(1000.0, 20_000.0),
    }


def small_pipeline(seed: int) -> SglangCase:
    """The same with two to four stages, and without what a pipeline does not have."""
    case, rng = small_case(seed), np.random.default_rng([seed, 1])
    stages = int(rng.choice([2, 2, 3, 4]))
    assert isinstance(case.times, BatchTimes)
    seconds = [replace(case.times, decode_tokens=case.times.decode_tokens * k) for k in rng.integers(1, 4, stages)]
    sends = np.full((stages - 1, case.limits.max_num_batched_tokens + 1), float(rng.choice([0.0, 0.25])))
    case = replace(case, policy=case.policy.with_drafts(None))
    without: dict[str, Any] = {"enable_mixed_chunk": False, "enable_prefill_delayer": False, "max_queued_requests": 0}
    policy = replace(case.policy, **without, pipeline_parallel_size=stages)
    return replace(case, tiers=(), policy=policy, times=StageTimes(tuple(seconds), sends), lockstep=False)


def shared_beginnings(rng: np.random.Generator, prompt: Any, size: int, variety: int) -> tuple[Any, Any]:
    """Hash ids of each prompt's full blocks: a path through a tree in which each node has ``variety`` children."""
    ids: dict[tuple[int, ...], int] = {}
    values, offsets = [], [0]
    for tokens in prompt.tolist():
        path: tuple[int, ...] = ()
        for _ in range(tokens // size):
            path = (*path, int(rng.integers(0, variety)))
            values.append(ids.setdefault(path, len(ids)))
        offsets.append(len(values))
    return np.array(offsets), np.array(values, dtype=np.int64)


def by_core(case: SglangCase, jumps: bool = True) -> Record:
    """The case on the core."""
    n = len(case.prompt)
    demand = Demand(
        arrival=np.array(case.arrival, dtype=np.float64),
        prompt_tokens=case.prompt,
        output_tokens=np.maximum(case.output, 0),
        overruns=np.zeros(n, dtype=bool),
        refused=case.declared < 1,
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=case.max_concurrency,
        max_tokens=case.declared,
        hash_ids=case.hash_ids,
        hash_block_size=case.hash_block_size,
        priority=case.priority,
        sessions=np.arange(n) % 4 - 1,
    )
    fleet = Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))
    fleet = replace(fleet, tiers=(case.tiers,)) if case.tiers else fleet
    return run(fleet, demand, case.router, np.linspace(0, 0.99, n), jumps)
