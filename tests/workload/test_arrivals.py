from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.workload import AllAtOnce, Arrivals, Constant, Gamma, Modulated, Poisson, Ramp, Renewal, Replay
from windtunnel.workload.quantiles import Quantiles
from windtunnel.workload.synthetic import stream

N = 200_000


def gaps(process: Arrivals, n: int = N, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.diff(process.times(n, stream(seed, "test")), prepend=0.0)


@pytest.mark.parametrize("rate", [0.25, 7.0])
@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_gamma_gaps_have_exactly_the_mean_and_spread_they_should(rate: float, burstiness: float) -> None:
    found = gaps(Gamma(rate, burstiness)) * rate
    error = 1 / np.sqrt(burstiness * N)  # standard error of the mean gap
    assert abs(found.mean() - 1) < 4 * error
    assert found.std() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_poisson_gaps_are_exponential_and_not_clipped() -> None:
    found = np.sort(gaps(Poisson(2.0))) * 2.0
    distance = np.abs(np.arange(1, N + 1) / N - (1 - np.exp(-found))).max()
    assert distance < 1.63 / np.sqrt(N)  # Kolmogorov-Smirnov at 1 %
    assert (found > 3).mean() == pytest.approx(np.exp(-3), rel=0.05)


def test_infinite_burstiness_is_constant() -> None:
    assert gaps(Gamma(4.0, float("inf")), 10).tolist() == [0.25] * 10


@pytest.mark.parametrize(
    "process", [Gamma(3.0, 0.5, exact_duration=True), Renewal(3.0, Quantiles((0, 1), (1, 9)), True)]
)
def test_exact_duration_ends_on_the_second(process: Arrivals) -> None:
    assert process.times(600, stream(0, "test"))[-1] == pytest.approx(200.0, abs=1e-9)


def test_constant_starts_at_zero_and_all_at_once_is_zero() -> None:
    assert Constant(4.0).times(4, stream(0, "x")).tolist() == [0, 0.25, 0.5, 0.75]
    assert AllAtOnce().times(3, stream(0, "x")).tolist() == [0, 0, 0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps_follow_vllms_rule_of_the_request_number(strategy: str) -> None:
    n = 101
    found = 1 / gaps(Ramp(1.0, 16.0, strategy, float("inf")), n)
    assert found[0] == pytest.approx(1)
    assert found[-1] == pytest.approx(16)
    assert found[50] == pytest.approx(8.5 if strategy == "linear" else 4.0)


def test_a_single_request_ramp_has_the_start_rate() -> None:
    assert Ramp(2.0, 8.0, burstiness=float("inf")).times(1, stream(0, "x")).tolist() == [0.5]


def test_renewal_gaps_follow_their_table_with_an_exact_mean() -> None:
    table = Quantiles((0, 0.5, 0.9, 1), (0.01, 0.1, 1.0, 100.0))
    found = gaps(Renewal(5.0, table))
    assert found.mean() == pytest.approx(0.2, rel=0.03)
    assert np.quantile(found, 0.9) / np.quantile(found, 0.5) == pytest.approx(10, rel=0.05)


def test_modulation_moves_load_between_windows_and_keeps_the_mean_rate() -> None:
    process = Modulated(Poisson(10.0), (1.0, 3.0, 0.0, 4.0), 50.0)
    times = process.times(N, stream(2, "test"))
    rounds = int(times[-1] // 200)
    counts = np.histogram(times % 200, bins=4, range=(0, 200))[0] / rounds / 50
    assert counts == pytest.approx([5, 15, 0, 20], rel=0.02, abs=0.3)
    assert N / times[-1] == pytest.approx(10, rel=0.01)


def test_a_flat_profile_changes_nothing() -> None:
    plain = Poisson(3.0).times(500, stream(0, "x"))
    bent = Modulated(Poisson(3.0), (2.0, 2.0, 2.0), 7.0).times(500, stream(0, "x"))
    np.testing.assert_allclose(bent, plain, rtol=1e-12)


def test_replay_scales_time_and_does_not_invent_requests() -> None:
    replay = Replay(np.array([0.0, 1.0, 5.0]), 0.5)
    assert replay.times(2, stream(0, "x")).tolist() == [0, 0.5]
    with pytest.raises(InputError, match="num_requests=4: the replayed trace has 3; repeat"):
        replay.times(4, stream(0, "x"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "request_rate=0: must be finite requests per second > 0"),
        (lambda: Poisson(-1.0), "request_rate=-1"),
        (lambda: Poisson(float("nan")), "request_rate=nan"),
        (lambda: Gamma(float("inf")), "request_rate=inf: .*AllAtOnce"),
        (lambda: Gamma(1.0, 0.0), "burstiness=0: must be > 0"),
        (lambda: Gamma(1.0, float("nan")), "burstiness=nan"),
        (lambda: Constant(0.0), "request_rate=0"),
        (lambda: Ramp(0.0, 1.0), "ramp_up_start_rps=0"),
        (lambda: Ramp(1.0, 0.0), "ramp_up_end_rps=0"),
        (lambda: Ramp(1.0, 2.0, "linaer"), "unknown ramp-up strategy 'linaer': did you mean 'linear'"),
        (lambda: Ramp(1.0, 2.0, burstiness=-1.0), "burstiness=-1"),
        (lambda: Renewal(0.0, Quantiles((0, 1), (1, 2))), "request_rate=0"),
        (lambda: Modulated(Poisson(1.0), (), 1.0), "profile"),
        (lambda: Modulated(Poisson(1.0), (0.0,), 1.0), "profile"),
        (lambda: Modulated(Poisson(1.0), (1.0, -1.0), 1.0), "profile"),
        (lambda: Modulated(Poisson(1.0), (2.0, -1.0), 1.0), "profile"),
        (lambda: Modulated(Poisson(1.0), (1.0,), 0.0), "window=0"),
        (lambda: Replay(np.array([1.0, 0.0])), "not decrease"),
        (lambda: Replay(np.array([-1.0, 0.0])), "≥ 0"),
        (lambda: Replay(np.array([0.0]), 0.0), "factor=0"),
        (lambda: Quantiles((0, 0.5), (1, 2)), "must rise from 0 to 1"),
        (lambda: Quantiles((0, 1), (2, 1)), "not fall"),
        (lambda: Quantiles((0, 1), (0, 1)), "> 0"),
    ],
)
def test_impossible_processes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@given(st.integers(1, 50), st.floats(0.01, 100), st.floats(0.05, 20), st.integers(0, 9))
def test_times_never_decrease_and_are_repeatable(n: int, rate: float, burstiness: float, seed: int) -> None:
    processes: list[Arrivals] = [
        Gamma(rate, burstiness),
        Ramp(rate, rate * 2, "exponential", burstiness),
        Modulated(Gamma(rate, burstiness), (1.0, 0.0, 2.5), 3.0),
        Renewal(rate, Quantiles((0, 0.5, 1), (0.01, 1, 50))),
    ]
    for process in processes:
        times = process.times(n, stream(seed, "test"))
        assert times.shape == (n,)
        assert (np.diff(times, prepend=0.0) >= 0).all()
        assert times.tolist() == process.times(n, stream(seed, "test")).tolist()


def test_quantiles_know_their_exact_mean() -> None:
    table = Quantiles((0, 0.3, 0.8, 1), (1.0, 2.0, 2.0, 40.0))
    grid = (np.arange(1_000_000) + 0.5) / 1_000_000
    assert table.mean == pytest.approx(float(table.at(grid).mean()), rel=1e-6)


def test_processes_as_they_are_without_settings() -> None:
    """Poisson, with arrivals that end where they end; linear ramps; replays at their own pace."""
    rate, once = 4.0, stream(3, "x").exponential(0.25, 50)
    assert Gamma(rate).times(50, stream(3, "x")).tolist() == Poisson(rate).times(50, stream(3, "x")).tolist()
    assert Gamma(rate).times(50, stream(3, "x"))[-1] != pytest.approx(12.5)
    assert Renewal(rate, Quantiles((0, 1), (1, 9))).times(50, stream(3, "x"))[-1] != pytest.approx(12.5)
    assert gaps(Gamma(rate)).std() == pytest.approx(once.std(), rel=0.5)
    assert Ramp(1.0, 2.0) == Ramp(1.0, 2.0, "linear", 1.0)
    assert Replay(np.array([0.0, 3.0])).times(2, stream(0, "x")).tolist() == [0.0, 3.0]
    assert Replay(np.array([0.0, 3.0])).times(0, stream(0, "x")).tolist() == []


def test_a_profile_by_hand() -> None:
    """Requests every second; of each 20 s the first half has three times the rate of the second: 1.5 and 0.5 a second,
    so that 15 come until 10 s."""
    times = Modulated(Constant(1.0), (3.0, 1.0), 10.0).times(42, stream(0, "x"))
    assert [times[at] for at in (0, 3, 15, 16, 20, 23, 40, 41)] == pytest.approx([0, 2, 10, 12, 20, 22, 40, 40 + 2 / 3])


def test_gaps_too_small_to_tell_apart_are_refused() -> None:
    with pytest.raises(InputError, match="burstiness: so small that all 3 requests come at once: use a larger one"):
        Gamma(1.0, 1e-300, exact_duration=True).times(3, stream(0, "x"))


def test_tables_of_quantiles_by_hand() -> None:
    """Between levels the logarithm is linear: 1 to 100 passes 10 half-way, with a mean of 99 / ln 100."""
    table = Quantiles((0, 0.5, 1), (1.0, 100.0, 100.0))
    assert table.at(np.array([0.0, 0.25, 0.5, 0.9, 1.0])).tolist() == pytest.approx([1, 10, 100, 100, 100])
    assert table.mean == pytest.approx(0.5 * 99 / np.log(100) + 0.5 * 100)
    for levels, values in (
        ((0.1, 1), (1, 2)),
        ((0, 0.9), (1, 2)),
        ((0, 1), (1,)),
        ((0,), (1,)),
        ((0, 0, 1), (1, 1, 2)),
    ):
        with pytest.raises(InputError, match=r"rise from 0 to 1|rising levels"):
            Quantiles(levels, values)
