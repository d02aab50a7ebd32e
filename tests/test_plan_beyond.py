"""Beyond the search: Pareto fronts, other loads, spaces too large, bottlenecks, and what is advised."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import chat, question, small_space

from windtunnel.deployment import Deployment
from windtunnel.plan.advice import advise
from windtunnel.plan.bottleneck import bottlenecks
from windtunnel.plan.constraints import Constraints
from windtunnel.plan.drift import drift
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.pareto import front
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.tpe import suggest
from windtunnel.plan.trial import whole_run
from windtunnel.workload import Both, Fixed, Gamma, generate

SETTINGS: dict[str, Any] = {"device": "h100", "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def deployment(**settings: Any) -> Deployment:
    return small_space().deployment(SETTINGS | settings)


def found(asked: Question, rate: float, **settings: Any) -> list[str]:
    return [finding.name for finding in bottlenecks(whole_run(asked, deployment(**settings), rate))]


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30))
def test_the_front_is_what_nothing_dominates(rows: list[tuple[int, int, int]]) -> None:
    values = np.array(rows, dtype=np.float64).reshape(-1, 3)
    kept = set(front(values).tolist())
    for place, row in enumerate(values):
        beaten = any((other <= row).all() and (other < row).any() for other in values)
        assert (place in kept) == (not beaten)


def test_the_front_leaves_out_what_is_unknown() -> None:
    assert front(np.array([[1.0, np.nan], [2.0, 2.0]])).tolist() == [1]


def test_each_bottleneck_is_found_where_it_was_made() -> None:
    load = question(chat(400), goodput=())
    assert "batch cap" in found(load, 60.0, max_num_seqs=4)
    assert "KV memory" in found(load, 80.0, num_gpu_blocks_override=300)
    long = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(4)), 300), goodput=())
    assert "token budget" in found(long, 60.0, max_num_batched_tokens=256)
    assert "spare time" in found(load, 0.2)
    assert "spare time" not in found(load, 60.0)
    mixed = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(100)), 300), goodput=())
    assert "prefill interference" in found(mixed, 8.0, device="l40s")
    growing = question(generate(Gamma(1.0), Both(Fixed(100), Fixed(1500)), 100), goodput=())
    assert "preemptions" in found(growing, 50.0, num_gpu_blocks_override=400)
    assert "communication" in found(load, 30.0, device="l40s", tensor_parallel_size=4)
    finding = bottlenecks(whole_run(load, deployment(max_num_seqs=4), 60.0))[0]
    assert "max_num_seqs=4" in finding.evidence


def test_a_run_of_nothing_has_no_bottleneck() -> None:
    asked = question(generate(Gamma(1.0), Both(Fixed(4000), Fixed(4)), 50), goodput=())
    assert bottlenecks(whole_run(asked, deployment(), 1.0)) == ()


def test_other_loads_have_other_winners_and_regrets() -> None:
    enumeration = small_space(max_num_seqs=(4, 64), tensor_parallel_size=(1,)).enumerate()
    prompts = generate(Gamma(1.0), Both(Fixed(1500), Fixed(4)), 300, 1)
    cases = {"chat": (question(), RatePerDollar()), "prompts": (question(prompts), RatePerDollar())}
    seen = drift(enumeration, cases)
    for name in cases:
        assert seen.regrets[name][name] == 0.0
    exact = {n: search(enumeration, q, o, top=len(enumeration.candidates)) for n, (q, o) in cases.items()}
    for old in cases:
        winner, best = seen.answers[old].best, seen.answers["prompts"].best
        assert winner is not None and best is not None
        value = exact["prompts"].entries[winner.index].promise
        assert seen.regrets[old]["prompts"] == pytest.approx(1 - max(value, 0) / best.promise)
    assert set(seen.to_json()["regrets"]) == set(cases)


def test_optuna_finds_a_good_one_in_few_suggestions() -> None:
    pytest.importorskip("optuna")
    space = small_space()
    exact = search(space.enumerate(), question(), RatePerDollar()).best
    answer = suggest(space, question(), RatePerDollar(), suggestions=20)
    assert exact is not None and answer.best is not None
    assert 0.8 * exact.promise <= answer.best.promise <= exact.promise
    assert len(answer.entries) <= 20


def test_the_advice_names_limits_and_the_next_cheaper() -> None:
    enumeration = small_space().enumerate()
    answer = search(enumeration, question(), LeastForRate(60.0, Constraints()), top=2)
    advice = advise(answer, lambda seed: chat(300, seed), range(2))
    assert advice is not None
    assert advice.entry == answer.best
    assert advice.binding is None or advice.binding.stretch > 1
    assert advice.interval is not None and advice.interval.runs == 2
    assert advice.findings
    assert advice.cheaper
    many = replace(advice.deployment, router="round_robin")
    assert ("least_outstanding" in advice.routing) == (many.replicas > 1)
