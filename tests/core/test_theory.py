"""Exact statements about whole schedules: closed forms, conservation, symmetry, scaling and bounds."""

from dataclasses import fields, replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from equality import Case, by_core, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from core.queueing import SYNCHRONOUS, Floats, poisson, serve, sojourn
from windtunnel.core.engine import Record
from windtunnel.core.records import GONE, REFUSED
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.policy import Limits, VllmV1, can_ever_run, generated

BASE, TOKEN, KV, PAIR = 0.02, 1e-4, 1e-7, 1e-9
COSTS: dict[str, Any] = {"base": BASE, "token": TOKEN, "kv_token": KV}


def wide(**changes: int) -> Limits:
    """Room for everything, but for what is given."""
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 2**16, "max_model_len": 4096, "num_blocks": 2**14}
    return Limits(**{**sizes, **changes}, block_size=16)


def decodes(requests: int, prompt: int, output: int) -> float:
    """Seconds of all steps after the first of equal requests that decode together."""
    return sum(BASE + TOKEN * requests + KV * requests * (prompt + k) for k in range(1, output))


@pytest.mark.parametrize(("n", "prompt", "output"), [(1, 64, 1), (1, 64, 50), (16, 512, 200), (100, 128, 33)])
@pytest.mark.parametrize("policy", [SYNCHRONOUS, VllmV1()], ids=("synchronous", "asynchronous"))
def test_equal_requests_at_once(n: int, prompt: int, output: int, policy: VllmV1) -> None:
    """T_prefill(n·I) + Σ_k T_decode(n, I + k)."""
    found = serve(np.zeros(n), prompt, output, **COSTS, pair=PAIR, limits=wide(), policy=policy)
    first = BASE + TOKEN * n * prompt + PAIR * n * prompt**2
    assert found.requests["first_token"] == pytest.approx(first, rel=1e-12)
    assert found.requests["finish"] == pytest.approx(first + decodes(n, prompt, output), rel=1e-12)


@pytest.mark.parametrize(("n", "cap"), [(64, 16), (60, 16)])
def test_a_cap_on_requests_makes_waves(n: int, cap: int) -> None:
    found = serve(np.zeros(n), 64, 20, **COSTS, limits=wide(max_num_seqs=cap))
    waves = [min(cap, n - start) for start in range(0, n, cap)]
    total = sum(BASE + TOKEN * 64 * size + decodes(size, 64, 20) for size in waves)
    assert found.requests["finish"].max() == pytest.approx(total, rel=1e-12)


def test_memory_makes_waves() -> None:
    """Blocks for 10 requests of 64 + 16 − 1 tokens: no more are admitted until these have ended."""
    found = serve(
        np.zeros(40), 64, 16, **COSTS, limits=wide(num_blocks=50), policy=replace(SYNCHRONOUS, watermark=0.15)
    )
    assert found.requests["preemptions"].sum() == 0
    assert found.requests["finish"].max() == pytest.approx(
        4 * (BASE + TOKEN * 64 * 10 + decodes(10, 64, 16)), rel=1e-12
    )


@pytest.mark.parametrize("budget", [256, 300, 1000])
def test_a_token_budget_is_used_up_in_every_step(budget: int) -> None:
    """Prompts alone: ⌈ΣI/C⌉ steps, which together compute every token once."""
    n, prompt = 50, 192
    found = serve(np.zeros(n), prompt, 1, base=BASE, token=TOKEN, limits=wide(max_num_batched_tokens=budget))
    total = ceil(n * prompt / budget) * BASE + n * prompt * TOKEN
    assert found.requests["finish"].max() == pytest.approx(total, rel=1e-12)


def busy_seconds(record: Record) -> float:
    """Length of the union of all requests' stays."""
    order = np.argsort(record.requests["arrival"], kind="stable")
    arrival, finish = record.requests["arrival"][order], record.requests["finish"][order]
    before = np.concatenate(([-np.inf], np.maximum.accumulate(finish)[:-1]))
    return float(np.maximum(finish - np.maximum(arrival, before), 0.0).sum())


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_the_engine_works_while_anybody_is_there(rate: float) -> None:
    """Work conservation: batches take Σ (BASE + TOKEN·tokens + KV·reads), and together as long as the busy periods."""
    rng = np.random.default_rng(int(rate))
    n = 2000
    prompt, output = rng.integers(1, 700, n), rng.integers(1, 90, n)
    found = serve(poisson(rng, rate, n), prompt, output, **COSTS, limits=wide())
    steps = int(found.rows["steps"].sum())
    reads = sum(int(out) * (int(inp) + (int(out) + 1) / 2) for inp, out in zip(prompt, output - 1, strict=True))
    work = steps * BASE + TOKEN * int((prompt + output - 1).sum()) + KV * reads
    assert work == pytest.approx(busy_seconds(found), rel=1e-9)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 5.0, 50.0]))
@settings(max_examples=25, deadline=None)
def test_littles_law(seed: int, rate: float) -> None:
    """L = λW on every path: requests in steps, integrated over time, are the requests' times from first step to end.

    The left side comes from the log of steps, the right side from the requests.
    """
    rng = np.random.default_rng(seed)
    n = 200
    prompt, output = rng.integers(1, 300, n), rng.integers(1, 60, n)
    found = serve(poisson(rng, rate, n), prompt, output, base=BASE, limits=wide())
    held = BASE * float((found.rows["steps"] * found.rows["decodes"]).sum() + (found.rows["chunk_tokens"] > 0).sum())
    stays = found.requests["finish"] - found.requests["scheduled"]
    assert held == pytest.approx(float(stays.sum()), rel=1e-9)


def scaled(case: Case, factor: float) -> Case:
    """The case with every time multiplied."""
    tables: dict[str, Any] = {}
    for field in fields(BatchTimes):
        value = getattr(case.times, field.name)
        if field.name == "prefill_base" or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
            tables[field.name] = value * factor
    return replace(
        case,
        times=replace(case.times, **tables),
        arrival=case.arrival * factor,
        think_time=case.think_time * factor,
        turnaround=case.turnaround * factor,
    )


@given(cases(), st.sampled_from([0.25, 2.0, 1024.0]))
@settings(max_examples=60, deadline=None)
def test_time_has_no_unit(case: Case, factor: float) -> None:
    """All times multiplied by a power of two: the same schedule, bit for bit.

    Not with vLLM's data-parallel balancer, which looks every 0.1 s.
    """
    assert isinstance(case.times, BatchTimes)
    if case.router == 3 or case.lanes > 1:
        alone = replace(case.times, expert_tokens=np.zeros(1))
        case = replace(case, router=0, lanes=1, lockstep=False, times=alone)
    found, stretched = by_core(case), by_core(scaled(case, factor))
    for name in ("scheduled", "first_token", "finish"):
        assert np.array_equal(found.requests[name] * factor, stretched.requests[name], equal_nan=True)
    for name in ("preemptions", "lane", "state"):
        assert np.array_equal(found.requests[name], stretched.requests[name])
    for name in ("steps", "decodes", "kv_tokens", "chunk_tokens", "used_blocks", "waiting"):
        assert np.array_equal(found.rows[name], stretched.rows[name])


def makespan_bound(case: Case, a0: float, a1: float, a2: float) -> float:
    """No schedule of requests that are all there at time 0 ends earlier (if a1 ≥ a2, so that no refill pays).

    Steps: the longest request alone, tokens within the budget, the area that requests fill in the memory over the
    steps, places in the batch. Work: every token once, every decode reads what is in the cache and its own token.
    """
    limits = case.limits
    asked = [(int(p), int(o)) for p, o in zip(case.prompt, case.output, strict=True)]
    rows = [(p, generated(p, o, limits)) for p, o in asked if can_ever_run(p, o, limits)]
    work = sum(p + o - 1 for p, o in rows)
    reads = sum(p + k for p, o in rows for k in range(1, o))
    area = sum(p + k - 1 for p, o in rows for k in range(1, o + 1))
    steps = max(
        max((ceil(p / limits.max_num_batched_tokens) + o - 1 for p, o in rows), default=0),
        ceil(work / limits.max_num_batched_tokens),
        ceil(area / (limits.num_blocks * limits.block_size)),
        ceil(sum(o for _, o in rows) / limits.max_num_seqs),
    )
    return a0 * steps + a1 * work + a2 * reads


@given(cases())
@settings(max_examples=60, deadline=None)
def test_no_schedule_beats_the_bound(case: Case) -> None:
    costs = (0.5, 0.01, 0.001)
    sizes = {name: getattr(case.limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    case = replace(
        case,
        policy=replace(case.policy, prefix_caching=False),
        times=linear(*costs, 0.0, **sizes),
        replicas=1,
        lanes=1,
        lockstep=False,
        router=0,
        arrival=np.zeros(len(case.prompt)),
        follow=np.full(len(case.prompt), -1),
        max_concurrency=0,
    )
    requests = by_core(case).requests
    ended = requests["state"] == GONE
    left = ~ended & (requests["state"] != REFUSED)  # as a prompt behind a threshold that it may not be cut at
    if ended.any() and not left.any():
        assert requests["finish"][ended].max() >= makespan_bound(case, *costs) * (1 - 1e-12)


def test_the_bound_is_reached_where_only_requests_count() -> None:
    """Equal requests in full waves of decodes: the bound may not be too low either."""
    n, cap, prompt, output = 64, 16, 1, 30
    found = serve(np.zeros(n), prompt, output, base=0.5, token=0.01, kv_token=0.001, limits=wide(max_num_seqs=cap))
    steps = n * output // cap
    reads = sum(prompt + k for k in range(1, output)) * n
    bound = 0.5 * steps + 0.01 * n * (prompt + output - 1) + 0.001 * reads
    assert found.requests["finish"].max() == pytest.approx(bound, rel=1e-12)


def random_load(seed: int, n: int = 300) -> tuple[Floats, Any, Any]:
    rng = np.random.default_rng(seed)
    return poisson(rng, 3.0, n), rng.integers(1, 900, n), rng.integers(1, 120, n)


@pytest.mark.parametrize("seed", range(3))
def test_replicas_are_alike(seed: int) -> None:
    """Every request twice, in turn to two replicas: each twin fares as on one replica alone."""
    load = random_load(seed)
    alone = serve(*load, **COSTS, limits=wide(max_num_seqs=8))
    twins = serve(*(np.repeat(column, 2) for column in load), **COSTS, limits=wide(max_num_seqs=8), replicas=2)
    assert np.array_equal(np.repeat(sojourn(alone), 2), sojourn(twins))


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_that_never_binds_changes_nothing(seed: int) -> None:
    load = random_load(seed)
    found = [
        serve(*load, **COSTS, limits=wide(), policy=replace(SYNCHRONOUS, chunked_prefill=chunked))
        for chunked in (True, False)
    ]
    assert np.array_equal(sojourn(found[0]), sojourn(found[1]))


@pytest.mark.parametrize(
    "policy",
    [VllmV1(async_scheduling=False, chunked_prefill=False), VllmV1(), VllmV1(watermark=0.1, reserve_full_prompt=False)],
)
def test_without_contention_schedulers_are_alike(policy: VllmV1) -> None:
    """Requests that come one after the other's end: nothing is left to decide."""
    _, prompt, output = random_load(4, 60)
    arrival = np.linspace(0.0, 59_000.0, 60)
    found = [serve(arrival, prompt, output, **COSTS, limits=wide(), policy=each) for each in (SYNCHRONOUS, policy)]
    assert sojourn(found[0]) == pytest.approx(sojourn(found[1]), rel=1e-12)
