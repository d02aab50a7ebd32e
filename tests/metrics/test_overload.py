"""Overload is told from random queues and from offline batches."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import overload_warning
from windtunnel.simulate.run import Requests


def served_in_turn(arrival: np.ndarray, seconds: float) -> Requests:
    """A queue with one server: each request takes ``seconds``."""
    scheduled, free = np.empty(len(arrival)), 0.0
    for i, time in enumerate(arrival):
        scheduled[i] = max(time, free)
        free = scheduled[i] + seconds
    return handmade.requests(arrival=arrival, scheduled=scheduled, first_token=scheduled, finish=scheduled + seconds)


@pytest.mark.parametrize("demand", [1.1, 1.5, 3.0])
def test_overload_is_found_and_sized(demand: float) -> None:
    arrival = np.cumsum(np.random.default_rng(1).exponential(1.0, 2000))
    text = overload_warning(served_in_turn(arrival, demand))
    assert text is not None
    assert float(text.split("demand is about ")[1].split()[0]) == pytest.approx(demand, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_a_loaded_but_stable_queue_is_not_overloaded(seed: int) -> None:
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1.0, 3000))
    assert overload_warning(served_in_turn(arrival, 0.8)) is None


def test_offline_batches_and_short_runs_are_not_judged() -> None:
    assert overload_warning(served_in_turn(np.zeros(500), 1.0)) is None
    assert overload_warning(served_in_turn(np.arange(20.0), 9.0)) is None
