"""Overload is told from random queues and from offline batches."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import overload_warning
from windtunnel.metrics.overload import Growth, delay_growth, overloaded, steady_rate, too_short
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
    assert float(text.split("demand is ")[1].split()[0]) == pytest.approx(demand, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_a_loaded_but_stable_queue_is_not_overloaded(seed: int) -> None:
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1.0, 3000))
    assert overload_warning(served_in_turn(arrival, 0.8)) is None


def test_offline_batches_and_short_runs_are_not_judged() -> None:
    assert overload_warning(served_in_turn(np.zeros(500), 1.0)) is None
    assert overload_warning(served_in_turn(np.arange(20.0), 9.0)) is None


def test_growth_by_hand() -> None:
    """A hundred arrivals a second apart, each of which waits half a second longer; the last ten wait 45 to 49.5 s."""
    arrival = np.arange(100.0)
    growth = delay_growth(arrival, arrival / 2)
    assert growth == pytest.approx((0.5, 1.0, 47.25))
    falling = delay_growth(arrival, 50 - arrival / 2)
    assert falling == pytest.approx((-0.5, -1.0, 2.75))
    assert delay_growth(np.zeros(100), arrival) == (np.inf, 1.0, 94.5)
    assert delay_growth(np.zeros(100), np.ones(100)) == (0.0, 0.0, 1.0)


def test_fifty_requests_are_judged_and_those_never_scheduled_do_not_count() -> None:
    arrival = np.arange(51.0)
    assert delay_growth(arrival[:50], arrival[:50]) is not None
    assert delay_growth(arrival[:49], arrival[:49]) is None
    assert delay_growth(arrival, np.where(arrival < 49, arrival, np.nan)) is None


@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        ((0.02, 0.6, 1.0), True),
        ((0.0199, 1.0, 9.0), False),
        ((0.5, 0.59, 9.0), False),
        ((0.5, 1.0, 0.99), False),
        ((np.inf, 1.0, 9.0), False),
    ],
)
def test_each_sign_of_overload_is_needed(growth: tuple[float, float, float], expected: bool) -> None:
    assert overloaded(Growth(*growth)) is expected


def test_the_warning_names_what_was_found() -> None:
    arrival = np.arange(100.0)
    scheduled = 1.5 * arrival
    text = overload_warning(
        handmade.requests(arrival=arrival, scheduled=scheduled, first_token=scheduled, finish=scheduled + 1)
    )
    assert text is not None
    assert "demand is 1.5 times the capacity, and the queue grows (delay at the end 47 s)" in text


def test_the_steady_rate_is_what_a_loaded_server_finishes_in_a_second() -> None:
    """Arrivals at twice what is served: the server's own rate, also where they are over before the first ends."""
    served = served_in_turn(np.arange(0.0, 500.0, 0.5), 1.0)
    assert steady_rate(served) == pytest.approx(1.0, rel=0.02)
    assert too_short(served) is None
    burst = handmade.requests(arrival=[0.0, 0.1], scheduled=[0.0, 0.1], first_token=[5.0, 5.0], finish=[10.0, 10.0])
    assert steady_rate(burst) == pytest.approx(0.2)
    assert too_short(burst) == "2 prompts arrive within 0.1 s, too short to judge: raise --num-prompts"
    assert np.isnan(steady_rate(handmade.requests(arrival=[0.0])))
