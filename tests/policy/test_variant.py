"""The queueing model of llm-d's variant autoscaler, and what its tuner learns."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.policy.look import Look, Traffic
from windtunnel.policy.scaling import Autoscale, Variant
from windtunnel.policy.variant import START, Replica, Sizing, Tuner, guess

LOOK = Look(replicas=2, queued=0.0, kv=0.0, arrived=9.0, before=7.0, coming=21.0)
TRUE = np.array([20e-3, 2e-5, 1e-7])


def seen_of(rate: float, parameters: "np.ndarray[tuple[int], np.dtype[np.float64]]" = TRUE) -> Traffic:
    """What a replica with these parameters shows at a rate."""
    means = Replica(parameters, 200.0, 400.0, 64, 640).means(rate)
    return Traffic(rate, 200.0, 400.0, means.wait + means.prefill, means.token, 64)


def test_one_seat_and_one_place_to_wait_by_hand() -> None:
    """M/M/1/2 with a service of 1 s and 1 request/s: each of its three states has a third of the time."""
    alone = Replica(np.array([0.5, 0.0, 0.0]), 100.0, 1.0, 1, 1)
    assert alone.rates == pytest.approx([1.0])
    means = alone.means(1.0)
    assert means.throughput == pytest.approx(2 / 3)
    assert (means.wait, means.prefill, means.token) == pytest.approx((0.5, 0.5, 0.5))


def test_many_seats_serve_by_how_many_there_are() -> None:
    """A token for each of two requests: n / (n / 2 + (n / 2 + 1)). Where iterations take 1 s whatever is in them, two
    end twice as often as one."""
    pair = Replica(np.array([0.0, 1.0, 0.0]), 0.0, 1.0, 2, 0)
    assert pair.rates == pytest.approx([1 / 2, 2 / 3])
    one = replace(pair, parameters=np.array([1.0, 0.0, 0.0]), prompt=1.0)
    assert one.rates == pytest.approx([0.5, 1.0])
    found = one.means(0.5)  # states 1 : 1 : 1/2
    assert found.throughput == pytest.approx(0.5 * (1 - 0.2))
    assert found.wait == pytest.approx(0.0)


def test_a_replica_is_sized_to_its_limits() -> None:
    replica = Replica(TRUE, 200.0, 400.0, 64, 100)
    rate = replica.sized(1.0, 0.022)
    assert rate is not None
    assert replica.means(rate).token == pytest.approx(0.022, rel=1e-5)
    assert replica.sized(1.0, 0.020) is None
    most = replica.sized(1e9, 1e9)
    assert most is not None
    assert rate < most < replica.rates[-1]


def test_parameters_are_guessed_from_one_look() -> None:
    """TTFT α + (β + γ) · i, time per token α + β + γ · (i + (o + 1) / 2), α 0.9 of the latter."""
    alpha, beta, gamma = 0.018, 3e-5, 4.9e-6
    token = alpha + beta + gamma * (200 + 201 / 2)
    assert alpha == pytest.approx(0.9 * token, rel=0.06)
    alpha = 0.9 * token
    gamma = (token - alpha - beta) / (200 + 201 / 2)
    seen = Traffic(1.0, 200.0, 200.0, alpha + (beta + gamma) * 200, token, 64)
    assert guess(seen) == pytest.approx((alpha, beta, gamma))
    assert guess(seen._replace(ttft=alpha)) is None


def test_the_tuner_learns_what_makes_its_looks() -> None:
    near = TRUE * np.array([1.05, 0.9, 1.1])
    tuner, random = Tuner(near, np.diag((0.05 * near) ** 2), near), np.random.default_rng(0)
    for rate in random.uniform(0.2, 3.0, 60):
        tuner.learn(seen_of(rate))
    assert tuner.parameters is not None
    assert abs(tuner.parameters / TRUE - 1).max() < abs(near / TRUE - 1).max()
    for rate in (0.5, 2.5):
        shown, expected, first = seen_of(rate), seen_of(rate, tuner.parameters), seen_of(rate, near)
        assert expected.token == pytest.approx(shown.token, rel=5e-3)
        assert expected.ttft == pytest.approx(shown.ttft, rel=5e-3)
        assert abs(first.token / shown.token - 1) > 0.04


def test_a_guess_under_load_takes_the_others_for_memory_and_stays() -> None:
    """What the filter would mend is an outlier to it, as in the original."""
    tuner = Tuner()
    tuner.learn(seen_of(2.0))
    first = guess(seen_of(2.0))
    assert first is not None
    assert first[2] > 10 * TRUE[2]
    for rate in (0.5, 1.0, 2.0):
        tuner.learn(seen_of(rate))
    assert tuner.parameters == pytest.approx(first, rel=0)


def test_outliers_and_rates_beyond_the_model_teach_nothing() -> None:
    tuner = Tuner(TRUE, np.diag((0.05 * TRUE) ** 2), TRUE)
    tuner.learn(seen_of(1.0)._replace(token=0.4))
    tuner.learn(seen_of(1.0)._replace(rate=1e4))
    assert tuner.parameters == pytest.approx(TRUE, rel=0)
    fallback = Tuner()
    fallback.learn(seen_of(1.0)._replace(ttft=1e-3, rate=1e4))
    assert fallback.parameters == pytest.approx(START, rel=0)


def test_as_many_as_the_rate_needs() -> None:
    rule = Sizing(1.0, 0.025, 3.0)
    assert rule.wanted(LOOK) == 2
    one = seen_of(1.0)
    found = rule.wanted(LOOK._replace(traffic=(one,)))
    assert rule.tuner.parameters is not None
    rate = Replica(rule.tuner.parameters, 200.0, 400.0, 64, 100).sized(1.0, 0.025)
    assert rate is not None
    assert found == np.ceil(1.0 / rate)
    begun = Variant(alpha=0.02, beta=2e-5, gamma=1e-7).fresh()
    assert begun.wanted(LOOK._replace(traffic=(one,))) == 1
    assert isinstance(begun, Sizing)
    assert begun.tuner.parameters == pytest.approx(TRUE, rel=0.01)
    assert Sizing(1e-6, 1e-6, 3.0).wanted(LOOK._replace(traffic=(one,))) == 2
    assert rule.wanted(LOOK._replace(traffic=(one, one, one))) > found


def test_each_run_learns_anew() -> None:
    scaling = Autoscale(Variant())
    first, second = scaling.fresh(), scaling.fresh()
    first.wanted(LOOK._replace(traffic=(seen_of(1.0),)))
    assert isinstance(second, Sizing)
    assert second.tuner.parameters is None
    assert Variant().wanted(LOOK) == 2
    assert replace(scaling, most=1).wanted(LOOK) == 1
