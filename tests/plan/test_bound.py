"""Bounds: no step is faster than its bound, and no capacity above its own."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.planning import chat, question, server, single_tokens, small_space
from windtunnel.deployment import SLO, PercentileLimit
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.bound import rate_bound, step_bound
from windtunnel.plan.capacity import capacity
from windtunnel.plan.outcome import measure
from windtunnel.plan.question import Question
from windtunnel.plan.trial import tables_of, whole_run
from windtunnel.workload import Both, Fixed, Gamma, Workload, generate

SETTINGS = {"device": "h100", "max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_step_is_shorter_than_its_lines(data: st.DataObject) -> None:
    deployment = small_space().deployment(SETTINGS)
    times = tables_of(deployment, "modelled")[0].times
    lines = step_bound(times)
    decodes = data.draw(st.integers(0, 30))
    cached = data.draw(st.integers(decodes, decodes * 2000)) if decodes else 0
    chunks = data.draw(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 1500)), max_size=2))
    if not decodes and not chunks:
        return
    tokens, requests = decodes + sum(n for n, _ in chunks), decodes + len(chunks)
    least = lines.base + lines.per_token * tokens + lines.per_kv_token * cached + lines.per_sequence * requests
    assert times.batch(decodes, cached, chunks) >= least.max() * (1 - 1e-12)


def test_the_bound_of_a_simple_server_is_its_rate() -> None:
    deployment, tables = server(8, 0.1, 0.001)
    assert rate_bound(deployment, Question(single_tokens(100)), tables).rate == pytest.approx(8 / 0.108)


@pytest.mark.parametrize("device", ["h100", "l40s"])
@pytest.mark.parametrize("seqs", [4, 64])
@pytest.mark.parametrize("goodput", [(), ("ttft:400", "tpot:30"), ("tpot:15",)])
def test_no_capacity_is_above_its_bound(device: str, seqs: int, goodput: tuple[str, ...]) -> None:
    deployment = small_space().deployment(SETTINGS | {"device": device, "max_num_seqs": seqs})
    asked = question(chat(2000), goodput)
    bound = rate_bound(deployment, asked, tables_of(deployment, "modelled"))
    if bound.rate == 0:
        assert bound.stretch > 1
        assert not measure(whole_run(asked, deployment, 1e-3), asked, 1e-3).met
        return
    beyond = asked.rate(asked.level(bound.rate) + 5)
    assert not measure(whole_run(asked, deployment, beyond), asked, beyond).met
    assert capacity(deployment, asked).rate <= bound.rate


def test_limits_on_gaps_lower_the_bound() -> None:
    """Steps of 0.1 + 0.01·D seconds keep 0.13 s for three decodes at a time: 9 of 10 tokens of a request are such."""
    deployment, tables = server(8, 0.1, 0.01)
    load = generate(Gamma(1.0), Both(Fixed(1), Fixed(10)), 100)
    free = rate_bound(deployment, Question(load), tables).rate
    assert free == pytest.approx(1 / (0.1 * 10 / 8 + 0.01 * 10))
    for slo, share in ((SLO(tpot=0.13), 0.9), (SLO(percentiles=(PercentileLimit("itl", 95, 0.13),)), 0.95)):
        found = rate_bound(deployment, Question(load, slo=slo), tables).rate
        assert found == pytest.approx(1 / (0.1 * share * 9 / 3 + 0.01 * 10))


# --- by hand ----------------------------------------------------------------------------------------------------------


def load(prompt: int, output: int, count: int = 100, **more: Any) -> Workload:
    return generate(Gamma(1.0), Both(Fixed(prompt), Fixed(output)), count, **more)


def made(token_ms: list[float], **changes: Any) -> BatchTimes:
    """Tables whose steps take so many ms with 1, 2, … tokens."""
    seconds = np.array([0.0, *token_ms]) / 1e3
    size = len(token_ms)
    plain = linear(0.0, 0.0, 0.0, 0.0, max_num_batched_tokens=size, max_num_seqs=4, max_model_len=64)
    return replace(plain, **({"decode_tokens": seconds, "mixed_tokens": seconds} | changes))


def test_lines_under_a_table_by_hand() -> None:
    """Steps of 10, 11, 16, 20 ms: from 10 to 11 ms a line of 9 + 1·n, then one of 2 + 4.5·n through 11 and 20 ms (16
    lies above); the flat line of 10 ms, and from the origin 5 ms a token, as four take 20."""
    found = step_bound(made([10, 11, 16, 20]))
    lines = sorted(zip((found.base * 1e3).tolist(), (found.per_token * 1e3).tolist(), strict=True))
    assert lines == [pytest.approx(each) for each in ((0.0, 5.0), (2.0, 4.5), (9.0, 1.0), (10.0, 0.0))]
    assert (found.per_kv_token, found.per_sequence) == (0.0, 0.0)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (4, 4)


def test_lines_begin_at_zero_or_above_and_do_not_fall() -> None:
    """A line of −4 + 8·n would begin below zero; a table that falls has no line down."""
    steep = step_bound(made([4, 12]))
    assert sorted(zip((steep.base * 1e3).tolist(), (steep.per_token * 1e3).tolist(), strict=True)) == [
        pytest.approx((0.0, 4.0)), pytest.approx((4.0, 0.0)),
    ]  # fmt: skip
    falling = step_bound(made([12, 10, 14]))
    assert sorted(zip((falling.base * 1e3).tolist(), (falling.per_token * 1e3).tolist(), strict=True)) == [
        pytest.approx((0.0, 14 / 3)), pytest.approx((2.0, 4.0)), pytest.approx((10.0, 0.0)),
    ]  # fmt: skip


def test_the_quicker_of_decodes_and_mixed_steps_and_what_a_request_and_a_cached_token_take() -> None:
    base = made([10, 10])
    sequences = np.array([0.0, 3e-3, 4e-3, 9e-3, 8e-3])
    attention = np.zeros_like(base.decode_attention)
    attention[1:, 1:] = 2e-6 * np.arange(1, len(attention))[:, None] * base.context_knots[1:]
    attention[2, -1] /= 2
    slower = replace(base, mixed_tokens=base.mixed_tokens * 1.5, sequences=sequences, decode_attention=attention)
    found = step_bound(slower)
    assert found.base.max() == pytest.approx(10e-3)
    assert found.per_sequence == pytest.approx(2e-3)  # of two or four, 2 ms each
    assert found.per_kv_token == pytest.approx(1e-6)
    waiting = replace(base, host_serial=np.array([0.0, 5e-3, 3e-3, 4e-3, 4e-3]))
    assert step_bound(waiting).base.tolist() == pytest.approx((step_bound(base).base + 3e-3).tolist())
    shared = replace(base, expert_tokens=np.array([0.0, 6e-3, 8e-3]))
    assert step_bound(shared).per_token.tolist() == pytest.approx((step_bound(base).per_token + 4e-3).tolist())


def test_what_a_request_computes_bounds_the_rate() -> None:
    """Prompts of 20 tokens and 5 answers, in steps of 0.1 s + 1 ms a token with 64 tokens or eight requests: 24 tokens
    in 5 parts; so 5/8 of a step each, or 24/64."""
    deployment, tables = server(8, 0.1, 0.001)
    found = rate_bound(deployment, Question(load(20, 5)), tables)
    assert found.rate == pytest.approx(1 / (0.1 * 5 / 8 + 24e-3))
    wide, more = server(64, 0.1, 0.001)
    assert rate_bound(wide, Question(load(40, 2)), more).rate == pytest.approx(1 / (0.1 * 41 / 64 + 41e-3))
    three = replace(deployment, pools=(replace(deployment.pools[0], replicas=3),))
    thrice = rate_bound(three, Question(load(20, 5)), tables)
    assert thrice.rate == pytest.approx(3 * found.rate)
    assert thrice.replicas == 3
    assert thrice.per_replica == pytest.approx(found.rate)


def test_a_small_cache_bounds_the_rate() -> None:
    """Of ten blocks one is kept free, and 144 tokens are left; a request reads 20 + 21 + 22 + 23, and its prompt is
    there once more."""
    deployment, tables = server(64, 0.1, 0.0)
    pool = deployment.pools[0]
    few = replace(pool, engine=replace(pool.engine, num_gpu_blocks_override=10))
    found = rate_bound(replace(deployment, pools=(few,)), Question(load(20, 5)), tables)
    assert found.rate == pytest.approx(1 / (0.1 * (20 + 21 + 22 + 23 + 20) / (9 * 16)))


def test_how_far_limits_must_be_loosened_for_a_request_alone() -> None:
    """A prompt of 20 tokens takes a step of 0.1 + 0.02 s, then four steps of 0.101 s."""
    deployment, tables = server(8, 0.1, 0.001)

    def stretch(slo: SLO, attainment: float = 0.9, **more: Any) -> float:
        asked = Question(load(20, 5, **more), slo=slo, attainment=attainment)
        return rate_bound(deployment, asked, tables).stretch

    assert stretch(SLO(ttft=0.06)) == pytest.approx(2.0)
    assert stretch(SLO(tpot=0.202)) == pytest.approx(0.5)
    assert stretch(SLO(e2el=0.524)) == pytest.approx(1.0)
    assert stretch(SLO(percentiles=(PercentileLimit("ttft", 50, 0.24),))) == pytest.approx(0.5)
    assert stretch(SLO(ttft=0.06, percentiles=(PercentileLimit("ttft", 50, 0.03),))) == pytest.approx(4.0)
    assert stretch(SLO(percentiles=(PercentileLimit("queue", 50, 0.01),))) == 0.0
    assert stretch(SLO()) == 0.0
    assert stretch(SLO(ttft=0.06), max_concurrency=4) == 0.0  # what a closed loop measures is not known before
    none = rate_bound(deployment, Question(load(20, 5), slo=SLO(ttft=0.06)), tables)
    assert none.rate == 0.0
    single = Question(load(20, 1), slo=SLO(tpot=1e-9))
    assert rate_bound(deployment, single, tables).stretch == 0.0  # has no time per token


def test_requests_that_do_not_fit_miss_their_limits() -> None:
    """A context of 64: of ten requests one has a prompt of 64 tokens, which leaves no room; a share of 0.9 is kept, of
    0.95 not. It arrives when the others are measured."""
    deployment, tables = server(8, 0.1, 0.001)
    prompts = [20] * 19 + [64, 20]
    made_ = Workload.from_columns(arrival=np.arange(21.0), prompt_tokens=prompts, output_tokens=5)
    kept = Question(made_, slo=SLO(ttft=1.0), attainment=0.9)
    assert rate_bound(deployment, kept, tables).stretch == pytest.approx(0.12)
    assert rate_bound(deployment, replace(kept, attainment=0.95), tables).stretch == math.inf
    long = Workload.from_columns(arrival=np.arange(21.0), prompt_tokens=64, output_tokens=[5] * 21)
    with pytest.raises(InputError, match="no request fits max_model_len=64 and the "):
        rate_bound(deployment, Question(long), tables)


def test_limits_that_no_step_keeps_leave_no_rate() -> None:
    """Steps of 0.1 s at least: a limit of 0.1 s on gaps at any percentile leaves no room."""
    deployment, tables = server(8, 0.1, 0.01)
    for slo in (
        SLO(percentiles=(PercentileLimit("itl", 50, 0.1),)),
        SLO(percentiles=(PercentileLimit("tpot", 50, 0.1),)),
    ):
        assert rate_bound(deployment, Question(load(1, 10), slo=slo), tables).rate == 0.0
        assert rate_bound(deployment, Question(load(1, 2), slo=slo), tables).rate == 0.0, "of one decode, too"
        alone = rate_bound(deployment, Question(load(1, 1), slo=slo), tables)
        assert alone.rate == pytest.approx(1 / (0.1 / 8 + 0.01)), "without one there are no gaps"
    found = rate_bound(
        deployment, Question(load(1, 10), slo=SLO(percentiles=(PercentileLimit("tpot", 50, 0.13),))), tables
    )
    assert found.rate == pytest.approx(1 / (0.1 * 0.5 * 9 / 3 + 0.01 * 10))


def test_shared_prompts_count_one_token() -> None:
    """With ids of blocks a prompt may be cached, all but one token."""
    deployment, tables = server(8, 0.1, 0.001)
    plain = load(20, 5)
    shared = replace(plain, hash_ids=(np.arange(101), np.zeros(100, np.int64)), hash_block_size=16)
    assert rate_bound(deployment, Question(shared), tables).rate == pytest.approx(1 / (0.1 * 5 / 8 + 5e-3))
    pool = deployment.pools[0]
    off = replace(deployment, pools=(replace(pool, engine=replace(pool.engine, enable_prefix_caching=False)),))
    assert rate_bound(off, Question(shared), tables).rate == pytest.approx(1 / (0.1 * 5 / 8 + 24e-3))


def test_pools_apart_are_bounded_by_either_side() -> None:
    """Prompts of 20 tokens: 20/64 of a step of 0.1 s and 20 ms are 51.25 ms. Four decodes: half a step of eight, and
    4 ms, are 54 ms. Alone a prompt takes 0.12 s, in the slower of the prefill pools 0.22 s, and a token 0.101 s."""
    deployment, tables = server(8, 0.1, 0.001)
    slow = server(8, 0.2, 0.001)[1]
    (pool,) = deployment.pools

    def found(prefill: int, decode: int, slo: SLO = SLO()) -> Any:  # noqa: B008 - frozen
        pools = (
            replace(pool, name="a", role="prefill", replicas=prefill),
            replace(pool, name="b", role="decode", replicas=decode),
        )
        return rate_bound(replace(deployment, pools=pools), Question(load(20, 5), slo=slo), (*tables, *tables))

    assert found(2, 4).rate == pytest.approx(2 / 0.05125)
    assert (found(2, 4).replicas, found(2, 4).per_replica) == (2, pytest.approx(1 / 0.05125))
    assert found(4, 2).rate == pytest.approx(2 / 0.054)
    for slo in (SLO(ttft=0.06), SLO(tpot=0.0505), SLO(e2el=0.262)):
        assert found(1, 1, slo).stretch == pytest.approx(2.0)
    pools = tuple(
        replace(pool, name=name, role=role) for name, role in (("a", "prefill"), ("b", "prefill"), ("c", "decode"))
    )
    for of_pools in ((*tables, *slow, *tables), (*slow, *tables, *tables)):
        asked = Question(load(20, 5), slo=SLO(ttft=0.06))
        assert rate_bound(replace(deployment, pools=pools), asked, of_pools).stretch == pytest.approx(2.0)
    both = replace(deployment, pools=(pool, replace(pool, name="b")))
    assert rate_bound(both, Question(load(20, 5), slo=SLO(ttft=0.06)), (*slow, *tables)).stretch == pytest.approx(2.0)


def test_ranks_and_stages_of_a_replica_work_together() -> None:
    deployment, tables = server(8, 0.1, 0.001)
    (pool,) = deployment.pools
    engine = replace(pool.engine, data_parallel_size=3, pipeline_parallel_size=2)
    six = replace(deployment, pools=(replace(pool, engine=engine),))
    alone = rate_bound(deployment, Question(load(20, 5)), tables).rate
    assert rate_bound(six, Question(load(20, 5)), tables).rate == pytest.approx(6 * alone)


def test_cached_tokens_that_are_read_take_time() -> None:
    """20 + 21 + 22 + 23 tokens at 0.1 ms each: 8.6 ms a request, and in four steps of 0.101 s."""
    deployment, _ = server(8, 0.1, 0.001)
    times = linear(0.1, 0.001, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64)
    decodes = np.arange(len(times.decode_attention), dtype=np.float64)
    attention = np.outer(decodes, times.context_knots.astype(np.float64))
    times = replace(times, decode_attention=1e-4 * attention)
    tables = (Tabulated(times, {}, {}, ()),)
    assert rate_bound(deployment, Question(load(20, 5)), tables).rate == pytest.approx(1 / (0.0625 + 0.024 + 0.0086))
    asked = Question(load(20, 5), slo=SLO(tpot=0.101 + 0.0086 / 4))
    assert rate_bound(deployment, asked, tables).stretch == pytest.approx(1.0)


def test_a_prompt_beyond_the_token_budget_takes_several_steps() -> None:
    deployment, _ = server(8, 0.1, 0.001)
    times = linear(0.1, 0.001, 0.0, 0.0, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=64)
    asked = Question(load(20, 5), slo=SLO(ttft=0.11))
    assert rate_bound(deployment, asked, (Tabulated(times, {}, {}, ()),)).stretch == pytest.approx(2.0)


def test_limits_that_are_just_kept_leave_a_rate() -> None:
    """Steps of an eighth of a second; of no time where they take none."""
    deployment, tables = server(8, 0.125)
    found = rate_bound(deployment, Question(load(20, 1), slo=SLO(ttft=0.125)), tables)
    assert found.stretch == 1.0
    assert found.rate == pytest.approx(1 / (0.125 * 20 / 64))
    at_once, none = server(8, 0.0)
    assert rate_bound(at_once, Question(load(20, 5)), none).rate == math.inf
    missed = Question(load(20, 1), slo=SLO(ttft=0.12))
    assert rate_bound(deployment, missed, tables).rate == 0.0


def test_the_requests_with_the_fewest_steps_keep_the_limit() -> None:
    """Four requests of one decode and one of ten, which may miss it; of nine tenths of five that is one, too. So 0.8 of
    a step for each request, in steps of one at a time, which just keep it, and 3.8 tokens."""
    deployment, tables = server(8, 0.125, 1 / 64)
    uneven = Workload.from_columns(
        arrival=np.arange(5.0), prompt_tokens=[1] * 5, output_tokens=[2, 11, 2, 2, 2], name="uneven"
    )
    for share in (0.8, 0.9):
        found = rate_bound(deployment, Question(uneven, slo=SLO(tpot=9 / 64), attainment=share), tables)
        assert found.rate == pytest.approx(1 / (0.125 * 0.8 + 3.8 / 64))


def test_a_request_that_fills_the_cache_to_the_last_token_fits() -> None:
    """Two blocks of 16 besides the one that is kept free: a prompt of 30, and of three answers two are kept."""
    deployment, tables = server(8, 0.1)
    (pool,) = deployment.pools
    small = replace(deployment, pools=(replace(pool, engine=replace(pool.engine, num_gpu_blocks_override=3)),))
    assert rate_bound(small, Question(load(30, 3)), tables).rate == pytest.approx(1 / (0.1 * (30 + 31 + 30) / 32))
    with pytest.raises(InputError, match="the 32 tokens of KV cache"):
        rate_bound(small, Question(load(30, 4)), tables)
    last = rate_bound(deployment, Question(load(63, 9)), tables)
    assert last.rate == pytest.approx(1 / (0.1 * 63 / 64)), "one token of output is left of a context of 64"


def test_sessions_are_not_judged_before_they_are_simulated() -> None:
    deployment, tables = server(8, 0.1, 0.001)
    two = Workload.from_columns(
        arrival=np.arange(20.0), prompt_tokens=[20] * 20, output_tokens=5, session=[0, 0, *range(2, 20)], think_time=1.0
    )
    assert rate_bound(deployment, Question(two, slo=SLO(ttft=0.06)), tables).stretch == 0.0
