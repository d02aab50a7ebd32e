"""Draws: a winner carries more random draws of the load than the search asked, or the answer says how close it is."""

import pytest

from plan.planning import chat, question, small_space
from windtunnel.plan.answer.draws import close, missed_draws, searched_again, too_close
from windtunnel.plan.capacity import Draws
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import trial

ENUMERATION = small_space(device=("h100",), router=("round_robin", "least_outstanding")).enumerate()
MORE = tuple((seed, chat(300, seed)) for seed in range(1, 9))


def test_a_winner_that_misses_a_draw_makes_way_for_one_that_carries_all() -> None:
    """At the highest rate that the first draw lets the winner carry, some other draw is missed."""
    for rate in (190.0, 195.0, 200.0, 205.0, 210.0, 215.0, 220.0):
        found = search(ENUMERATION, question(), LeastForRate(rate, Constraints()))
        if missed := missed_draws(found, MORE):
            break
    again = searched_again(found, MORE)
    whole = search(ENUMERATION, again.question, again.objective)
    assert again.best == whole.best and again.entries.keys() == whole.entries.keys()
    assert missed_draws(again, MORE) == 0
    assert found.best is not None and again.best is not None and again.best.promise <= found.best.promise
    deployment, at = again.measured(again.best)
    assert trial(again.question, deployment, at).met
    said = too_close(found, missed, 9)
    assert said is not None and f"carries it in only {9 - missed} of 9 random draws" in said
    assert too_close(found, 0, 9) is None


def test_other_objectives_have_no_rate_to_carry() -> None:
    found = search(ENUMERATION, question(), RatePerDollar())
    assert missed_draws(found, MORE) == 0


@pytest.mark.parametrize(
    ("rates", "said"),
    [((20.2, 21.0, 21.8), True), ((22.2, 23.0, 23.8), False), ((20.0, 20.0, 20.0), False), ((20.2, 21.8), False)],
)
def test_a_rate_within_the_spread_of_the_draws_is_close(rates: tuple[float, ...], said: bool) -> None:
    """Of 20.2, 21 and 21.8 (s = 0.8) another draw is above 21 − 1.886 · 0.8 · √(4/3) = 19.3 nine times in ten."""
    assert (close(20.0, Draws(rates, 0.01)) is not None) == said
    assert close(20.0, None) is None
