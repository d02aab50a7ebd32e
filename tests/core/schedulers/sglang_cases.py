"""Random cases for SGLang's scheduler: the reference beside the compiled core."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.policy import Limits, Sglang
from windtunnel.reference.loop import Loop, Replica, Router, least_outstanding, random_choice, round_robin, vllm_dp
from windtunnel.reference.replica import Group, table_time
from windtunnel.reference.request import Request
from windtunnel.reference.sglang_rank import SglangRank


@dataclass(frozen=True)
class SglangCase:
    """One simulation, small enough for the reference."""

    limits: Limits
    policy: Sglang
    times: BatchTimes
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


@st.composite
def sglang_cases(draw: st.DrawFn) -> SglangCase:
    """Little memory, shared beginnings, every order, chunks mixed or not, closed loops, several replicas."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    seqs = draw(st.sampled_from([1, 2, 4, 8, 16]))
    chunked = draw(st.booleans())
    longest = 200
    policy = Sglang(
        chunked_prefill=chunked,
        max_prefill_tokens=draw(st.sampled_from([16, 60, 200])),
        schedule_policy=draw(st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof"])),
        radix_cache=draw(st.booleans()),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        enable_mixed_chunk=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        disable_overlap_schedule=draw(st.booleans()),
    )
    blocks, block_size = draw(st.integers(8, 120)), draw(st.sampled_from([1, 4]))
    limits = Limits(seqs, longest, longest, blocks, block_size)
    budget = seqs + draw(st.sampled_from([1, 5, 40, 200])) if chunked else policy.longest_round(limits)
    limits = replace(limits, max_num_batched_tokens=budget)
    lanes = draw(st.sampled_from([1, 1, 1, 2]))
    n = draw(st.integers(1, 60))
    gap = draw(st.sampled_from([0.0, 1.0, 8.0]))
    prompt = rng.integers(1, draw(st.sampled_from([4, 40, 100])) + 1, n)
    output = rng.integers(1, draw(st.sampled_from([2, 20, 60])) + 1, n)
    cut = policy.longest_request(limits) - prompt
    declared = np.minimum(output + draw(st.sampled_from([0, 0, 10])) * rng.integers(0, 3, n), cut)
    size = draw(st.sampled_from([1, 4, 16]))
    return SglangCase(
        limits=limits,
        policy=policy,
        times=linear(
            draw(st.sampled_from([0.5, 1.0])),
            0.01,
            0.001,
            1e-5,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=longest,
            ranks=lanes,
            per_expert_token=0.01,
        ),
        replicas=draw(st.sampled_from([1, 1, 2, 3])),
        lanes=lanes,
        lockstep=lanes > 1 and draw(st.booleans()),
        router=draw(st.integers(0, 3)),
        arrival=np.cumsum(rng.integers(0, 3, n) * gap)
        if draw(st.booleans())
        else np.cumsum(rng.exponential(gap + 1e-9, n)),
        prompt=prompt,
        output=np.minimum(output, declared),
        declared=declared,
        hash_ids=shared_beginnings(rng, prompt, size, draw(st.sampled_from([1, 3, 1000]))),
        hash_block_size=size,
        max_concurrency=draw(st.sampled_from([0, 0, 1, 5])),
    )


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


def by_core(case: SglangCase) -> Record:
    """The case on the compiled core."""
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
    )
    fleet = Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))
    return run(fleet, demand, case.router, np.linspace(0, 0.99, n))


def by_reference(case: SglangCase) -> tuple[list[Request], list[Replica]]:
    """The case on the reference engine."""
    offsets, values = case.hash_ids
    size = case.hash_block_size
    requests = []
    for i, (a, p, o, d) in enumerate(zip(case.arrival, case.prompt, case.output, case.declared, strict=True)):
        ids = values[offsets[i] : offsets[i + 1]].tolist()
        tokens = tuple(one * size + k for one in ids for k in range(size))
        requests.append(Request(i, float(a), int(p), int(o), int(d), bool(d < 1), tokens=tokens))
    time = table_time(case.times)
    depth = 2 if case.policy.async_scheduling else 1

    def replica() -> Replica:
        ranks = [SglangRank(case.limits, case.policy) for _ in range(case.lanes)]
        return Replica([Group(ranks, time, depth)] if case.lockstep else [Group([rank], time, depth) for rank in ranks])

    replicas = [replica() for _ in range(case.replicas)]
    uniforms = np.linspace(0, 0.99, len(requests)).tolist()
    routers: list[Router] = [round_robin, random_choice(uniforms), least_outstanding, vllm_dp]
    Loop(replicas, routers[case.router], requests, max_concurrency=case.max_concurrency).run()
    return requests, replicas
