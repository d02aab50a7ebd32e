"""Rules of an autoscaler, and faults at random."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.policy.look import Look
from windtunnel.policy.scaling import (
    WHOLE_LINK,
    Autoscale,
    Failure,
    Faults,
    Forecast,
    Foresight,
    Hpa,
    Planner,
    Thresholds,
)
from windtunnel.scenario.pools import faults_of, scaling_of

LOOK = Look(replicas=2, queued=0.0, kv=0.0, arrived=9.0, before=7.0, coming=21.0)


def test_forecasts_follow_the_rate_and_foresight_knows_it() -> None:
    assert Forecast(rps=2.0).wanted(LOOK) == 5
    assert Forecast(rps=2.0, predictor="trend").wanted(LOOK) == 6
    assert Forecast(rps=2.0, predictor="trend").wanted(LOOK._replace(arrived=1.0)) == 0
    assert Foresight(rps=2.0).wanted(LOOK) == 11


def test_hpa_scales_by_the_ratio_that_asks_for_most() -> None:
    rule, four = Hpa(kv=0.5, queued=0.25), LOOK._replace(replicas=4)
    assert rule.wanted(four._replace(kv=0.75)) == 6
    assert rule.wanted(four._replace(kv=0.75, queued=0.5)) == 8
    assert [rule.wanted(four._replace(kv=kv)) for kv in (0.0, 0.3, 0.44, 0.46, 0.54, 0.56)] == [0, 3, 4, 4, 4, 5]
    assert Hpa(kv=0.5, tolerance=0.0).wanted(four._replace(kv=0.51)) == 5
    assert scaling_of("policy=hpa kv=0.7").rule == Hpa(kv=0.7)


def test_there_are_never_fewer_or_more_than_allowed() -> None:
    scaling = Autoscale(Forecast(rps=2.0), least=2, most=4)
    assert [scaling.wanted(LOOK._replace(arrived=rate)) for rate in (0.0, 5.0, 50.0)] == [2, 3, 4]


def test_words_make_a_rule_and_its_bounds() -> None:
    assert scaling_of("policy=forecast rps=2 predictor=trend most=4") == Autoscale(Forecast(2.0, "trend"), most=4)
    assert scaling_of("kv_up=0.7 interval=5") == Autoscale(Thresholds(kv_up=0.7), interval=5.0)
    assert faults_of(["at=600 on_failure=lost"]) == (Faults(at=600.0, on_failure="lost"),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scaling_of("policy=tresholds"), "unknown policy of autoscale 'tresholds': did you mean 'thresholds'"),
        (lambda: scaling_of("policy=forecast"), "autoscale: rps=0.0: must be > 0"),
        (lambda: scaling_of("rps=3"), "autoscale: unknown key 'rps'"),
        (lambda: scaling_of("least=9"), "autoscale: least=9, most=8: must be 1 ≤ least ≤ most"),
        (lambda: scaling_of("interval=0"), "autoscale: interval=0.0: must be seconds > 0"),
        (
            lambda: scaling_of("policy=planner target=cost"),
            "autoscale: unknown target 'cost': known: latency",
        ),
        (lambda: scaling_of("policy=planner up=0.05"), "autoscale: down=0.1, up=0.05: must be 0 ≤ down < up"),
        (lambda: faults_of(["at=5 part=wire"]), "fail: unknown part 'wire': known: link, replica"),
        (lambda: scaling_of("policy=hpa kv=0"), "autoscale: kv=0.0: must be a target > 0"),
        (lambda: scaling_of("policy=hpa tolerance=1"), "autoscale: tolerance=1.0: must be a share from 0 to below 1"),
        (lambda: scaling_of("policy=variant ttft=2"), "ttft=2.0, tpot=inf: give both, in seconds > 0, or neither"),
        (lambda: scaling_of("policy=variant ttft=0 tpot=0.1"), "ttft=0.0, tpot=0.1: give both, in seconds > 0"),
        (
            lambda: scaling_of("policy=variant alpha=1"),
            "gamma=(1.0, 0.0, 0.0): give all three, in seconds > 0, or none",
        ),
        (lambda: scaling_of("policy=variant slo_multiplier=1"), "autoscale: slo_multiplier=1.0: must be > 1"),
        (lambda: scaling_of("startup=-1"), "autoscale: startup=-1.0: must be seconds ≥ 0"),
        (lambda: scaling_of("kv_up=0.1"), "kv_down=0.1, kv_up=0.1: must be 0 ≤ down < up"),
        (lambda: faults_of(["down=5"]), "fail: give a time (at=600), or a mean time between failures"),
        (lambda: faults_of(["at=5 mtbf=5"]), "fail: give a time (at=600), or a mean time between failures"),
        (lambda: faults_of(["at=5 down=-5"]), "fail: down=-5.0: must be ≥ 0"),
        (lambda: faults_of(["at=5 on_failure=cry"]), "on_failure"),
        (lambda: Faults(replica=4, at=5.0).failures(4, 0), "fail: replica=4: there are 4, counted from 0"),
    ],
)
def test_wrong_words_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        make()


def test_random_failures_have_their_means_and_do_not_overlap() -> None:
    found = Faults(mtbf=100.0, down=25.0, until=1e6).failures(3, seed=4)
    times = np.array([one.time for one in found if one.replica == 1])
    downs = np.array([one.down for one in found if one.replica == 1])
    gaps = times[1:] - (times + downs)[:-1]
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(100, rel=0.05)
    assert downs.mean() == pytest.approx(25, rel=0.05)
    assert found == Faults(mtbf=100.0, down=25.0, until=1e6).failures(3, seed=4)
    assert Faults(at=7.0, down=inf).failures(1, 0) == [Failure(7.0, 0, inf)]
    assert Faults(at=7.0, down=1.0).failures(2, 0, 5) == [Failure(7.0, 5, 1.0)]
    assert Faults(at=7.0, down=1.0, part="link").failures(0, 0) == [Failure(7.0, WHOLE_LINK, 1.0, "link")]


def test_each_replica_and_link_has_failures_of_its_own() -> None:
    rule = Faults(mtbf=100.0, down=25.0, until=1e4)
    nics = replace(rule, part="link")
    times = [
        [one.time for one in rule.failures(1, 0)],
        [one.time for one in rule.failures(1, 0, 1)],
        [one.time for one in nics.failures(1, 0)],
        [one.time for one in nics.failures(0, 0)],
    ]
    assert len({time for each in times for time in each}) == sum(map(len, times))
    assert rule.failures(2, 0) == sorted(rule.failures(1, 0) + rule.failures(1, 0, 1))


def test_the_planner_goes_by_prompts_or_by_memory() -> None:
    """Dynamo's thresholds: any replica over the upper one, all below the lower one; at the upper one of a prompt queue
    it is over, of memory it is not."""
    rule, fast = Planner(), Planner(target="latency")

    def change(role: str, *loads: tuple[float, float], by: Planner = rule) -> int:
        return by.wanted(LOOK._replace(role=role, loads=loads)) - LOOK.replicas

    assert [change("prefill", (0.0, 0.9), (queue, 0.0)) for queue in (0.05, 0.1, 0.9, 1.0)] == [-1, 0, 0, 1]
    assert [change("decode", (9.0, 0.2), (0.0, kv)) for kv in (0.5, 0.6, 1.0, 1.1)] == [-1, 0, 0, 1]
    assert [change("prefill", (queue, 0.9), by=fast) for queue in (0.0, 0.05, 0.1)] == [-1, 0, 1]
    assert [change("decode", (9.0, kv), by=fast) for kv in (0.05, 0.1, 0.4, 0.5)] == [-1, 0, 0, 1]
    assert change("mixed", (0.0, 0.7)) == 0
    assert change("decode") == 0
    assert change("decode", (0.0, 0.7), by=Planner(up=0.65)) == 1
