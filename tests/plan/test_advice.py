"""Advice: limits, routing and the next cheaper candidate."""

from dataclasses import replace

import pytest

from plan.planning import chat, question, small_space
from windtunnel.plan.advice import advise
from windtunnel.plan.capacity import Draws
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints


def test_the_advice_names_limits_and_the_next_cheaper() -> None:
    enumeration = small_space().enumerate()
    answer = search(enumeration, question(), LeastForRate(60.0, Constraints()), top=2)
    advice = advise(answer, lambda seed: chat(300, seed), range(2))
    assert advice is not None
    assert advice.entry == answer.best
    assert advice.binding is None or advice.binding.stretch > 1
    assert advice.draws is not None and len(advice.draws.rates) == 2
    assert advice.findings
    assert advice.cheaper
    many = replace(advice.deployment, router="round_robin")
    assert ("least_outstanding" in advice.routing) == (many.replicas > 1)


def test_requests_that_are_too_few_for_the_rate_are_named() -> None:
    answer = search(small_space().enumerate(), question(), LeastForRate(60.0, Constraints()), top=1)
    for rates, said in (((55.0, 61.0), True), ((60.0, 61.0), False), ((), False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("windtunnel.plan.advice.capacity_draws", lambda *_, rates=rates: Draws(rates, 0.05))
            advice = advise(answer, lambda seed: chat(300, seed), range(2))
        assert advice is not None
        text = "holds at 55 requests/s, not at 60: raise --num-prompts"
        assert (text in advice.too_few) == said
