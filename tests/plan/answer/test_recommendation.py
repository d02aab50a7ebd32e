"""The answer in sentences."""

from dataclasses import replace

import pytest

from plan.chosen import answer
from plan.planning import question, small_space
from windtunnel.plan.answer.recommendation import (
    Riskier,
    _kind,
    goal,
    hardware,
    on_servers,
    riskier,
    riskier_sentence,
    sentence,
)
from windtunnel.plan.objective import LeastForRate, Purchase
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.store import Store
from windtunnel.plan.trial import trial
from windtunnel.plan.workers import in_turn


def test_how_sure_in_words() -> None:
    assert on_servers(0.9) == "on 9 of 10 real servers"
    assert on_servers(0.5) == "on about half of real servers"
    assert on_servers(0.85) == "on 85 % of real servers"
    assert on_servers(None) == "as simulated"


def test_hardware_in_words() -> None:
    one = small_space().deployment({"device": "l40s", "max_model_len": 2048, "quantization": "fp8"})
    assert hardware(one) == "1 × L40S (one replica of 1 GPU)"
    wide = small_space().deployment({"device": "h100", "tensor_parallel_size": 2, "max_model_len": 2048})
    many = replace(wide, pools=(replace(wide.pools[0], replicas=3),))
    assert hardware(many) == "6 × H100 SXM (3 replicas of 2 GPUs, TP 2)"
    assert hardware(one, weights=True) == "1 × L40S (one replica of 1 GPU, fp8 weights)"


def test_the_goal_in_words() -> None:
    assert goal(question()) == "90 % of requests with ttft ≤ 400 ms and tpot ≤ 30 ms"
    assert goal(question(goodput=())) == "the queue does not grow"


def test_the_sentence_names_what_to_buy_the_price_and_the_servers() -> None:
    found = answer(objective=LeastForRate(7.0, Constraints()))
    said = sentence(found, found.entries[1])
    assert said.startswith(
        "Buy 6 × H100 SXM (3 replicas of 2 GPUs, TP 2) for $21.60/h ($15,768 a month): meets the goal"
    )
    assert said.endswith("as simulated.")


@pytest.mark.parametrize("confidence", [0.9, 0.5])
def test_the_riskier_answer_is_cheaper_and_holds_at_even_odds_only(confidence: float) -> None:
    enumeration, objective = small_space().enumerate(with_price=True), LeastForRate(300.0, Constraints())
    asked = question(confidence=confidence)
    with Store() as store:
        found = search(enumeration, asked, objective, store=store)
        risk = riskier(found, store, in_turn())
    if confidence == 0.5:
        assert risk is None
        return
    assert found.best is not None
    winner = found.measured(found.best)[0]
    if risk is None:  # the same answer at both
        assert search(enumeration, replace(asked, confidence=0.5), objective).best is not None
        return
    assert risk.deployment.price_per_hour < winner.price_per_hour
    assert trial(replace(asked, confidence=0.5), risk.deployment, 300.0).met
    assert not trial(asked, risk.deployment, 300.0).met
    assert risk.safe is None or trial(asked, risk.safe, 300.0).met


def test_the_risky_sentence_does_not_contradict_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that take more than the winner's to be as safe are no reason to say that more is needed."""
    enumeration, objective = small_space().enumerate(with_price=True), LeastForRate(300.0, Constraints())
    monkeypatch.setattr("windtunnel.plan.answer.recommendation._needed", lambda *_: None)
    with Store() as store:
        found = search(enumeration, question(confidence=0.9), objective, store=store)
        risk = riskier(found, store, in_turn())
    assert found.best is not None and risk is not None
    winner = found.measured(found.best)[0]
    assert risk.safe == (winner if _kind(winner) == _kind(risk.deployment) else None)


def test_the_riskier_sentence_says_what_it_costs_to_be_as_safe() -> None:
    one = small_space().deployment({"device": "l40s", "max_model_len": 2048})
    two = replace(one, pools=(replace(one.pools[0], replicas=2),))
    said = riskier_sentence(Riskier(one, two), 0.9)
    assert said is not None and said.startswith("Cheaper but risky: 1 × L40S (one replica of 1 GPU), $0.79/h")
    assert "9 of 10 real servers need 2 GPUs, $1.58/h" in said
    assert "far more" in str(riskier_sentence(Riskier(one, None), 0.9))
    assert riskier_sentence(None, 0.9) is None


def test_whole_nodes_and_a_spare_replica_are_said() -> None:
    found = answer(objective=LeastForRate(7.0, Constraints(), purchase=Purchase(True, 1)))
    said = sentence(found, found.entries[1])
    assert said.startswith(
        "Buy 8 × H100 SXM in one node of 8 (3 replicas of 2 GPUs, TP 2, and 1 spare) for $28.80/h ($21,024 a month): "
    )
    assert said.endswith("as simulated, also when one replica of a pool fails.")
