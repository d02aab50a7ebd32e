"""The Pareto front that the page of a search draws."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.report.plan_figures import front


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30))
def test_the_front_is_what_nothing_dominates(rows: list[tuple[int, int, int]]) -> None:
    values = np.array(rows, dtype=np.float64).reshape(-1, 3)
    kept = set(front(values).tolist())
    for place, row in enumerate(values):
        beaten = any((other <= row).all() and (other < row).any() for other in values)
        assert (place in kept) == (not beaten)


def test_the_front_leaves_out_what_is_unknown() -> None:
    assert front(np.array([[1.0, np.nan], [2.0, 2.0]])).tolist() == [1]
