"""Ties: of deployments that cost as much as the winner, the one with the most headroom wins."""

from dataclasses import replace

from plan.planning import chat, question, small_space
from windtunnel.plan.answer.ties import settle
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.store import Store
from windtunnel.plan.trial import trial

ENUMERATION = small_space(device=("h100",), router=("round_robin", "least_outstanding", "vllm_dp")).enumerate()


def test_no_neighbour_of_the_winner_costs_as_much_and_has_more_headroom() -> None:
    with Store() as store:
        found = search(ENUMERATION, question(), LeastForRate(200.0, Constraints()), store=store)
        settled = settle(found, store)
    assert found.best is not None and settled.best is not None and settled.best.held is not None
    assert settled.best.promise == found.best.promise
    own = settled.contenders[settled.best.index].candidate
    assert settled.measured(settled.best)[0].replicas > 1
    for one in settled.contenders.values():
        differing = sum(one.candidate.settings[axis] != value for axis, value in own.settings.items())
        if differing == 1 and one.candidate.scaled(1).price_per_hour == own.scaled(1).price_per_hour:
            count = settled.measured(settled.best)[0].replicas
            assert trial(question(), one.candidate.scaled(count), 200.0).stretch >= settled.best.held.stretch


def test_other_objectives_have_no_ties_to_settle() -> None:
    with Store() as store:
        found = search(ENUMERATION, question(), RatePerDollar(), store=store)
        assert settle(found, store) is found


def test_every_draw_must_carry_the_rate() -> None:
    """The answer for several draws holds in each of them, and is none that one of them asks less for."""
    draws = tuple((seed, chat(300, seed)) for seed in (1, 2, 3))
    asked = replace(question(), draws=draws)
    assert asked.digest != question().digest
    objective = LeastForRate(200.0, Constraints())
    found = search(ENUMERATION, asked, objective)
    assert found.best is not None
    deployment, rate = found.measured(found.best)
    stretches = [trial(one, deployment, rate).stretch for one in asked.each_draw()]
    assert max(stretches) <= 1 and trial(asked, deployment, rate).stretch == max(stretches)
    alone = [search(ENUMERATION, one, objective).best for one in asked.each_draw()]
    assert found.best.promise <= min(one.promise for one in alone if one)
