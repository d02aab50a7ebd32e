"""Prompts computed in turn: never fewer in time than a prefill side makes, and seats that never bind change nothing."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plan.planning import LENGTHS, chat, question, small_space
from windtunnel.deployment import Deployment, Pool, usual_handover
from windtunnel.deployment.handover import find_handover
from windtunnel.perf.batch_times import BatchTimes, Times, linear
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.classes import fastest, no_better
from windtunnel.plan.goodput.closed import SAME
from windtunnel.plan.goodput.objective import NO_MINIMUM
from windtunnel.plan.goodput.prefill_queue import (
    SMALL,
    computed,
    dealt,
    late_in_turn,
    lately,
    least_attention,
    least_seconds,
    seconds_of_prompts,
)
from windtunnel.plan.goodput.side_jobs import prefill_alone
from windtunnel.plan.space import Space
from windtunnel.plan.trial import tables_for
from windtunnel.workload import Gamma, Workload, prefix_repetition, scale_time

Floats = NDArray[np.float64]

LIMIT = 0.06
FIFTY = np.array([50.0])
PLAIN = scale_time(chat(300), 1 / 90)
SHARED = scale_time(prefix_repetition(Gamma(1.0), LENGTHS, 300, prefix_tokens=400), 1 / 90)
LIMITS: dict[str, Any] = {
    "num_gpu_blocks_override": (4000,),
    "enforce_eager": (True,),
    "max_num_batched_tokens": (256, 2048),
    "max_num_seqs": (1, 8, 48, 64, 128),
}


def space(engine: str, **more: Any) -> PoolSpace:
    side = small_space(device=("h100",), tensor_parallel_size=(1,), engine=(engine,), **LIMITS | more)
    return PoolSpace(side, side, handover=find_handover(usual_handover(engine.partition("-")[0])))


def late_from(deployment: Deployment, load: Workload, work: Floats, times: Times) -> Floats:
    """Output tokens of requests from each on that are late for certain."""
    return late_in_turn(deployment, load, seconds_of_prompts(deployment, load, work, times), LIMIT)


def in_time(deployment: Deployment, load: Workload, work: Floats, times: Times) -> float:
    """Output tokens per second that are not late for certain."""
    return float(load.output_tokens.sum() - late_from(deployment, load, work, times)[0]) / load.duration


@pytest.mark.parametrize("engine", ["vllm-0.22", "sglang-0.5"])
@pytest.mark.parametrize("workload", [PLAIN, SHARED], ids=["plain", "shared"])
def test_no_prefill_side_has_more_in_time(engine: str, workload: Workload) -> None:
    whole, asked = space(engine), question(workload, goodput=("ttft:60", "tpot:12"), attainment=NO_MINIMUM)
    (prefills, _), (decodes, _) = (whole.side(role, with_price=False) for role in ("prefill", "decode"))
    closes = 0
    for first in (1, 2, 3):
        dealt_out, runs = dealt(workload, first), []
        for _, pool in prefills:
            deployment = whole.deployment(pool, decodes[0][1], (first, 1))
            times, alone = tables_for(asked, deployment)[0].times, prefill_alone(asked, deployment)
            work = computed(workload, dealt_out, pool)
            late = late_from(deployment, workload, work, times)
            lost = np.cumsum(np.where(alone.kept, 0, workload.output_tokens)[::-1])[::-1]
            assert (lost >= late[:-1] - 1e-9).all()
            most = in_time(deployment, workload, work, times)
            closes += most < 0.95 * workload.output_tokens.sum() / workload.duration
            runs.append((deployment.pools[0], times, alone))
        same = 0
        for one, other in combinations(runs[::-1] + runs, 2):
            if no_better(one[:2], other[:2], one[2].most) == SAME and one is not other:
                same += 1
                assert np.array_equal(one[2].requests.first_token, other[2].requests.first_token)
        assert same
    assert closes


@pytest.mark.parametrize("engine", ["vllm-0.22", "sglang-0.5"])
def test_no_prompt_finds_more_in_a_small_cache(engine: str) -> None:
    """60 beginnings, and room for some 40 prompts."""
    workload = scale_time(prefix_repetition(Gamma(1.0), LENGTHS, 400, num_prefixes=60, prefix_tokens=400), 1 / 60)
    whole = space(engine, num_gpu_blocks_override=(1100,))
    asked = question(workload, goodput=("ttft:60", "tpot:12"), attainment=NO_MINIMUM)
    (prefills, _), (decodes, _) = (whole.side(role, with_price=False) for role in ("prefill", "decode"))
    for first in (1, 2):
        mine = dealt(workload, first)
        anything = computed(workload, mine)
        for _, pool in prefills:
            alone = prefill_alone(asked, whole.deployment(pool, decodes[0][1], (first, 1)))
            work = computed(workload, mine, pool)
            assert lately(pool, workload) and (work >= anything).all()
            assert (alone.requests.cached_tokens <= workload.prompt_tokens - work + 1).all()
            assert (workload.prompt_tokens - work).sum() < 0.8 * (workload.prompt_tokens - anything).sum()


@pytest.mark.parametrize(("model", "experts"), [("Llama-3.1-8B", False), ("Qwen/Qwen3-30B-A3B", True)])
def test_no_ranks_have_more_in_time(model: str, experts: bool) -> None:
    load = scale_time(chat(1500), 1 / 1500)
    ranks: dict[str, Any] = {"data_parallel_size": (2,), "max_model_len": (2048,), "max_num_seqs": (1, 16)}
    side = Space(
        model,
        LIMITS | ranks | {"device": ("h100",), "engine": ("vllm-0.22",), "enable_expert_parallel": (experts,)},
    )
    whole = PoolSpace(side, side, handover=find_handover(usual_handover("vllm")))
    asked = question(load, goodput=("ttft:60", "tpot:12"), attainment=NO_MINIMUM)
    (prefills, _), (decodes, _) = (whole.side(role, with_price=False) for role in ("prefill", "decode"))
    for first in (1, 2):
        for _, pool in prefills:
            deployment = whole.deployment(pool, decodes[0][1], (first, 1))
            times, work = tables_for(asked, deployment)[0].times, computed(load, dealt(load, first))
            assert isinstance(times, BatchTimes) and (len(times.expert_tokens) > 1) == experts
            most = in_time(deployment, load, work, times)
            assert prefill_alone(asked, deployment).tokens <= most * (1 + 1e-9)
            assert first > 1 or most < 0.9 * load.output_tokens.sum() / load.duration


@pytest.mark.parametrize("ranks", [1, 2])
def test_nobody_is_faster_than_who_stands_for_all(ranks: int) -> None:
    """However many tokens the captured graphs of each reach."""
    limits: dict[str, Any] = {"data_parallel_size": (ranks,), "max_num_seqs": (16, 64, 128), "enforce_eager": (False,)}
    side = Space("Qwen/Qwen3-30B-A3B", LIMITS | limits | {"device": ("h100",), "max_model_len": (2048,)})
    whole = PoolSpace(side, side, handover=find_handover(usual_handover("vllm")))
    asked = question(PLAIN, goodput=("ttft:60",))
    (prefills, _), (decodes, _) = (whole.side(role, with_price=False) for role in ("prefill", "decode"))
    pools = [pool for _, pool in prefills if pool.engine.max_num_batched_tokens == 256]
    each = [(pool, tables_for(asked, whole.deployment(pool, decodes[0][1], (1, 1)))[0].times) for pool in pools]
    assert len(each) == 3
    found = fastest(each[0], each[1:])
    assert found is not None and fastest(each[1], [each[0]]) is None
    assert fastest((replace_blocks(each[0][0], 3999), each[0][1]), each[1:]) is None
    draw, sooner = np.random.default_rng(5), 0
    for _ in range(300):
        chunks = [[(int(draw.integers(1, 240 // n)), 64)] * n for n in draw.integers(1, 9, ranks)]
        batches: list[Any] = [(0, 0, each_rank) for each_rank in chunks]
        steps = [times.lockstep(batches) if ranks > 1 else times.batch(*batches[0]) for _, times in each]
        least = found.lockstep(batches) if ranks > 1 else found.batch(*batches[0])
        assert least <= min(steps) * (1 + 1e-12)
        sooner += least < max(steps)
    assert sooner


def replace_blocks(pool: Pool, blocks: int) -> Pool:
    """The pool with other KV blocks."""
    return replace(pool, engine=replace(pool.engine, num_gpu_blocks_override=blocks))


def test_by_hand() -> None:
    """1 ms a token: prompts of 50, 30 and 10 tokens at 0, 10 and 85 ms end at 50, 80 and 95 ms: 50, 70 and 10 later.
    Half of the second's is the first's: it ends at 65 ms, 55 after it came."""
    times = linear(0.0, 0.001, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64)
    assert isinstance(times, BatchTimes)
    assert least_seconds(times, FIFTY, FIFTY, 8) == pytest.approx(0.05)
    ones = np.ones(3, dtype=np.int64)
    load = Workload.from_columns(
        arrival=np.array([0.0, 0.01, 0.085]), prompt_tokens=np.array([50, 30, 10]), output_tokens=2 * ones
    )
    whole = space("vllm-0.22")
    prefill, decode = (whole.side(role, with_price=False)[0][0][1] for role in ("prefill", "decode"))
    alone = whole.deployment(prefill, decode, (1, 1))
    work = computed(load, dealt(load, 1))
    assert work.tolist() == [50, 30, 10]
    assert in_time(alone, load, work, times) * load.duration == pytest.approx(4)
    half = replace(load, begins=(np.array([-1, 0, -1]), np.array([0, 15, 0])))
    assert computed(half, dealt(half, 1)).tolist() == [50, 15, 10]
    assert computed(half, dealt(half, 2)).tolist() == [50, 30, 10]
    assert in_time(alone, half, computed(half, dealt(half, 1)), times) * load.duration == pytest.approx(6)


def test_attention_lies_under_all_chunks() -> None:
    """However the last tokens of a prompt are cut, if no more than the first and the last part are small."""
    whole = space("vllm-0.22")
    prefill, decode = (whole.side(role, with_price=False)[0][-1][1] for role in ("prefill", "decode"))
    times = tables_for(question(PLAIN, goodput=("ttft:60",)), whole.deployment(prefill, decode, (1, 1)))[0].times
    assert isinstance(times, BatchTimes)
    draw, closest = np.random.default_rng(3), np.inf
    for _ in range(300):
        size, part = int(draw.integers(2, 1900)), int(draw.integers(SMALL, 256))
        begin = int(draw.integers(size))
        least = float(least_attention(times, np.array([size - begin], float), np.array([size], float))[0])
        taken, at = 0.0, begin
        while at < size:
            chunk = min(int(draw.integers(1, part + 1)) if at == begin else part, size - at)
            taken += times.prefill(chunk, at)
            at += chunk
        assert least <= taken * (1 + 1e-9)
        closest = min(closest, taken / least if least > 0 else np.inf)
    assert closest < 2


def test_few_prompts_share_the_fixed_time_of_a_step() -> None:
    """10 ms a step and 1 ms a token: 50 of the 64 tokens of a step take 50/64 of its 74 ms, and one prompt 60 ms."""
    times = linear(0.01, 0.001, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64)
    assert isinstance(times, BatchTimes)
    assert least_seconds(times, FIFTY, FIFTY, 8) == pytest.approx(0.074 * 50 / 64)
    assert least_seconds(times, FIFTY, FIFTY, 1) == pytest.approx(0.060)
