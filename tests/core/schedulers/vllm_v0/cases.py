"""Random cases for vLLM's v0 scheduler: its equal steps are made at once and singly."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from equality import _contents, _integer_times, _linear_times, _random_times, _sessions
from hypothesis import strategies as st

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.perf.batch_times import Times
from windtunnel.policy import Limits, VllmV0, generated


@dataclass(frozen=True)
class Case:
    """One simulation."""

    limits: Limits
    policy: VllmV0
    times: Times
    replicas: int
    router: int
    uniforms: Any
    arrival: Any
    prompt: Any
    output: Any
    priority: Any
    follow: Any
    think_time: Any
    max_concurrency: int
    hash_ids: tuple[Any, Any]
    hash_block_size: int
    sample_of: Any = None


@st.composite
def policies(draw: st.DrawFn, num_blocks: int) -> VllmV0:
    """Any settings, most of them so that something runs short."""
    chunked, swaps, caching = draw(st.booleans()), draw(st.sampled_from([False, False, True])), draw(st.booleans())
    partial = draw(st.sampled_from([1, 1, 2, 3, 5])) if chunked else 1
    return VllmV0(
        chunked_prefill=chunked,
        prefix_caching=caching,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
        preemption_mode="swap" if swaps else "recompute",
        num_cpu_blocks=draw(st.sampled_from([num_blocks, 4 * num_blocks, 60 * num_blocks])) if swaps else 0,
        swap_latency=draw(st.sampled_from([0.0, 1.0])),
        swap_seconds_per_block=draw(st.sampled_from([0.0, 0.25, 0.001])),
        delay_factor=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        admission_order="fcfs" if chunked else draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        max_num_partial_prefills=partial,
        max_long_partial_prefills=draw(st.integers(1, partial)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 8, 30])) if chunked else 0,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tiny block pools, tied times, overload, closed loops, sessions, prompts that never fit."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_num_seqs = draw(st.sampled_from([1, 2, 4, 8, 16]))
    budget = max_num_seqs + draw(st.sampled_from([0, 1, 5, 16, 64, 200]))
    num_blocks = draw(st.integers(4, 120))
    limits = Limits(max_num_seqs, budget, draw(st.sampled_from([32, 100, 400])), num_blocks, block_size)
    n = draw(st.integers(1, 60))
    gap = draw(st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    arrival: Any = (
        np.cumsum(rng.integers(0, 3, n) * gap) if draw(st.booleans()) else np.cumsum(rng.exponential(gap + 1e-9, n))
    )
    loop = draw(st.sampled_from(["open", "open", "concurrency", "sessions", "both"]))
    follow = np.full(n, -1)
    think_time: Any = np.zeros(n)
    if loop in ("sessions", "both"):
        follow = _sessions(rng, n)
        think_time = rng.integers(0, 3, n) * float(gap)
    prompt = rng.integers(1, draw(st.sampled_from([3, 30, limits.max_model_len])) + 1, n)
    hash_block_size = draw(st.sampled_from([1, 3, 4, 16]))
    return Case(
        limits=limits,
        policy=draw(policies(num_blocks)),
        times=draw(st.sampled_from([_integer_times, _linear_times, _random_times]))(limits, 1, rng),
        replicas=draw(st.sampled_from([1, 1, 2, 4])),
        router=draw(st.integers(0, 3)),
        uniforms=rng.random(n),
        arrival=arrival,
        prompt=prompt,
        output=rng.integers(1, draw(st.sampled_from([2, 20, limits.max_model_len])) + 1, n),
        priority=rng.integers(0, draw(st.sampled_from([1, 3, 20])), n),
        follow=follow,
        think_time=think_time,
        max_concurrency=draw(st.integers(1, 12)) if loop in ("concurrency", "both") else 0,
        hash_ids=_contents(rng, prompt, hash_block_size, draw(st.sampled_from([0.0, 0.3, 0.9]))),
        hash_block_size=hash_block_size,
    )


@st.composite
def groups(draw: st.DrawFn) -> Case:
    """Requests of one to four sequences each, which share blocks, on engines that swap where memory is short."""
    case = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = min(case.limits.max_num_seqs, 4)
    counts = rng.integers(1, most + 1, len(case.prompt))
    rows = np.repeat(np.arange(len(counts)), counts)
    n = len(rows)
    policy = replace(
        case.policy,
        forks=True,
        chunked_prefill=False,
        prefix_caching=False,
        admission_order="fcfs",
        max_num_partial_prefills=1,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=0,
        preemption_mode="swap" if draw(st.integers(0, 2)) == 0 else "auto",
        num_cpu_blocks=draw(st.sampled_from([case.limits.num_blocks, 60 * case.limits.num_blocks])),
    )
    output = case.output[rows] if draw(st.booleans()) else rng.integers(1, int(case.output.max()) + 1, n)
    return replace(
        case,
        policy=policy,
        uniforms=rng.random(n),
        arrival=np.asarray(case.arrival, dtype=np.float64)[rows],
        prompt=case.prompt[rows],
        output=output,
        priority=case.priority[rows],
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        hash_ids=_contents(rng, case.prompt[rows], case.hash_block_size, 0.0),
        sample_of=np.cumsum(counts)[rows] - counts[rows],
    )


def lengths(case: Case) -> list[tuple[int, int]]:
    """(prompt, tokens that it really generates) of each request; 0: refused."""
    rows = zip(case.prompt.tolist(), case.output.tolist(), strict=True)
    return [(p, max(generated(p, o, case.limits), 0)) for p, o in rows]


def by_core(case: Case, jumps: bool) -> Record:
    """The case, with equal steps made at once or singly."""
    rows = lengths(case)
    demand = Demand(
        arrival=np.array(case.arrival, dtype=np.float64),
        prompt_tokens=np.array([p for p, _ in rows]),
        output_tokens=np.array([o for _, o in rows]),
        overruns=np.zeros(len(rows), dtype=bool),
        refused=np.array([o == 0 for _, o in rows]),
        follow=case.follow,
        think_time=case.think_time,
        max_concurrency=case.max_concurrency,
        priority=case.priority,
        hash_ids=case.hash_ids,
        hash_block_size=case.hash_block_size,
        sample_of=case.sample_of,
    )
    fleet = Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (1,), (False,))
    return run(fleet, demand, case.router, case.uniforms, jumps)
