"""Outcomes: values at a share of the requests, and JSON there and back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning import question, small_space

from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.outcome import Outcome, at_share, needed
from windtunnel.plan.search import search


@given(st.lists(st.floats(0, 9), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_the_value_at_a_share_is_the_least_that_so_many_keep(values: list[float], share: float) -> None:
    array = np.array(values)
    found = at_share(array, share)
    assert (array <= found).mean() >= share
    assert not any((array <= smaller).mean() >= share for smaller in values if smaller < found)
    assert needed(len(values), share) / len(values) >= share


def test_outcomes_survive_json() -> None:
    best = search(small_space().enumerate(with_price=True), question(tolerance=0.03), RatePerDollar()).best
    assert best is not None and best.held is not None and best.missed is not None
    for outcome in (best.held, best.missed):
        assert Outcome.from_json(outcome.to_json()) == outcome
