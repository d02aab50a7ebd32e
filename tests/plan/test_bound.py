"""Bounds: no step is faster than its bound, and no capacity above its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.planning import chat, question, server, single_tokens, small_space
from windtunnel.deployment import SLO, PercentileLimit
from windtunnel.plan.bound import rate_bound, step_bound
from windtunnel.plan.capacity import capacity
from windtunnel.plan.outcome import measure
from windtunnel.plan.question import Question
from windtunnel.plan.trial import tables_of, whole_run
from windtunnel.workload import Both, Fixed, Gamma, generate

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
