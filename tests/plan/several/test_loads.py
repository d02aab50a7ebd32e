"""Loads: the common deployment is the one that brute force finds, by the worst and by every weighted mean."""

import math

import pytest

from plan.planning import chat, question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.objective import LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.several.loads import combined, common, regret
from windtunnel.plan.several.models import Models
from windtunnel.plan.space import Constraints
from windtunnel.plan.what_if import what_if
from windtunnel.workload import Both, Fixed, Gamma, generate

ENUMERATION = small_space(max_num_seqs=(4, 64)).enumerate(with_price=True)
LONG = generate(Gamma(1.0), Both(Fixed(1200), Fixed(20)), 200, 3)
LOADS = {"chat": question(chat(200), tolerance=0.05), "long": question(LONG, ("ttft:600", "tpot:60"), tolerance=0.05)}
OBJECTIVES: dict[str, dict[str, Objective]] = {
    "rate": dict.fromkeys(LOADS, RatePerDollar()),
    "cost": {"chat": LeastForRate(30.0, Constraints()), "long": LeastForRate(12.0, Constraints())},
}


def cases(name: str) -> dict[str, tuple[Question, Objective]]:
    return {load: (asked, OBJECTIVES[name][load]) for load, asked in LOADS.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_common_best_is_that_of_brute_force(name: str) -> None:
    found = what_if(ENUMERATION, cases(name)).answers
    whole = [
        search(ENUMERATION, asked, objective, top=len(ENUMERATION.candidates)).entries
        for asked, objective in cases(name).values()
    ]
    for weights in (None, (1.0, 1.0), (9.0, 1.0), (1.0, 30.0)):
        together = common(found, weights)
        scores = {index: combined([one[index].promise for one in whole], weights) for index in whole[0]}
        best = max(scores, key=lambda index: (scores[index], -index))
        assert (together.index, together.score) == (best, scores[best])
        assert together.best is not None
        assert [one.promise for one in together.best.values()] == [one[best].promise for one in whole]
        assert all(together.lost(load) >= 0 for load in LOADS)


def test_alone_it_is_the_answer_of_the_load_that_binds() -> None:
    together = common(what_if(ENUMERATION, cases("cost")).answers)
    alone = together.alone()
    assert alone.best is not None and alone.best.index == together.index
    assert alone.best.promise == together.score
    document = together.to_json()
    assert document["of"] == "the worst"
    assert document["value"] == max(one["value"] for one in document["loads"].values())


def test_what_nothing_can_serve_has_no_common_best() -> None:
    impossible = {"never": (question(chat(200), ("ttft:1",)), RatePerDollar())}
    together = common(what_if(ENUMERATION, cases("rate") | impossible).answers)
    assert together.best is None and together.index is None
    assert together.score == -math.inf
    assert together.to_json() == {"settings": None}
    assert together.alone().best is None


def test_weights_are_one_for_each_load() -> None:
    answers = dict.fromkeys(("a", "b"), search(ENUMERATION, LOADS["chat"], RatePerDollar()))
    for weights in ((1.0,), (1.0, 0.0), (1.0, math.inf)):
        with pytest.raises(InputError, match="must be a number > 0 for each of 2 loads"):
            common(answers, weights)


def test_regret_is_a_share_lost_or_a_cost_more() -> None:
    assert regret(3.0, 4.0) == 0.25
    assert regret(-math.inf, 4.0) == 1.0
    assert regret(-5.0, -4.0) == 0.25
    assert regret(-math.inf, -4.0) == math.inf
    assert regret(-math.inf, -math.inf) == 0.0


def test_models_are_compared_load_by_load() -> None:
    small, large = (
        what_if(small_space(device=(device,), max_num_seqs=(64,)).enumerate(with_price=True), cases("cost")).answers
        for device in ("l40s", "h100")
    )
    found = Models({"small": small, "large": large})
    assert found.loads == ("chat", "long")
    for load in found.loads:
        costs = {model: -found.score(model, load) for model in ("small", "large")}
        cheapest = min(costs, key=costs.__getitem__)
        assert found.best(load) == cheapest
        for model, cost in costs.items():
            assert found.regret(model, load) == pytest.approx(cost / costs[cheapest] - 1)
            assert found.to_json()[model][load]["value"] == cost


def test_a_model_that_serves_nothing_loses_everything() -> None:
    answer = search(ENUMERATION, question(chat(200), ("ttft:1",)), RatePerDollar())
    other: SearchResult = search(ENUMERATION, LOADS["chat"], RatePerDollar())
    assert math.isnan(Models({"one": {"chat": answer}}).regret("one", "chat"))
    assert Models({"one": {"chat": answer}, "two": {"chat": other}}).regret("one", "chat") == 1.0
