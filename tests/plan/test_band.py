"""Band: the answer at both ends of what the evidence leaves open, and at a stated confidence."""

import math
from dataclasses import replace

import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.plan.band import band_of
from windtunnel.plan.capacity import capacity
from windtunnel.plan.doubt import doubt_of, slowed, tightened, told_apart
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import tables_of, trial

ONE = small_space().deployment({"device": "h100", "max_model_len": 2048, "max_num_seqs": 16})


def test_the_same_share_of_slower_servers_is_a_slower_load_under_looser_limits() -> None:
    """Time scales: steps f times as long under limits L are steps as simulated under L / f, at f times the rate."""
    asked = question(chat(200), goodput=("tpot:30", "e2el:3000"))
    sure, tables = replace(asked, confidence=0.9), tables_of(ONE, "modelled")
    factor = doubt_of(ONE, tables, asked).below("steps", 0.9)
    assert factor > 1
    slow = trial(sure, ONE, 10.0)
    fast = trial(replace(asked, slo=SLO(tpot=0.03 / factor, e2el=3.0 / factor)), ONE, 10.0 * factor)
    for name in ("tpot", "e2el", "ttft"):
        assert slow.latencies[name]["p90"] == pytest.approx(factor * fast.latencies[name]["p90"], rel=1e-6)
    assert slow.attainment == fast.attainment


def test_limits_on_the_first_token_are_tighter_where_it_comes_later_still() -> None:
    asked = replace(question(), confidence=0.9)
    tables = tables_of(ONE, "modelled")
    found = doubt_of(ONE, tables, asked)
    later = found.below("first_token", 0.9) / found.below("steps", 0.9)
    assert tightened(ONE, tables, asked).slo.ttft == pytest.approx(0.4 / later)
    assert tightened(ONE, tables, asked).slo.tpot == 0.03
    assert doubt_of(ONE, slowed(ONE, tables, asked), asked).steps == pytest.approx(found.steps)


def test_the_surer_the_answer_is_to_be_the_less_a_deployment_can_take() -> None:
    rates = [capacity(ONE, replace(question(), confidence=share)).rate for share in (0.05, None, 0.9, 0.95)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_a_search_at_a_confidence_keeps_the_limits_at_it_and_is_another_study() -> None:
    enumeration, objective = small_space(device=("h100",)).enumerate(), LeastForRate(200.0, Constraints())
    plain, sure = question(), replace(question(), confidence=0.95)
    assert plain.digest != sure.digest
    counts = []
    for asked in (plain, sure):
        answer = search(enumeration, asked, objective)
        assert answer.best is not None
        deployment, rate = answer.measured(answer.best)
        assert trial(asked, deployment, rate).met
        counts.append(answer.objective.value(answer.best.promise))
    assert counts[0] <= counts[1]


def test_the_band_of_replicas_contains_the_answer_and_holds_at_its_ends() -> None:
    answer = search(small_space(device=("h100",)).enumerate(), question(), LeastForRate(200.0, Constraints()), top=3)
    band = band_of(answer)
    assert band.replicas is not None and answer.best is not None
    low, said, high = band.replicas
    assert low is not None and said is not None and high is not None
    assert low <= said <= high
    assert answer.measured(answer.best)[0].replicas == said
    slow = replace(answer.question, confidence=0.95)
    candidate = answer.contenders[answer.best.index].candidate
    assert trial(slow, candidate.scaled(high), 200.0).met
    assert not trial(slow, candidate.scaled(high - 1), 200.0).met
    fast, middle, worst = band.attainment
    assert fast >= middle >= worst
    assert band.confident is not None
    half, most = band.confident
    assert half is not None and most is not None
    assert low <= half <= most <= high
    for count, share in ((half, 0.5), (most, 0.9)):
        asked = replace(answer.question, confidence=share)
        assert trial(asked, candidate.scaled(count), 200.0).met
        assert count == 1 or not trial(asked, candidate.scaled(count - 1), 200.0).met
    assert ("for which it is too much" in dict(band.words())["attainment"]) == (high > said)
    sure = f"half of the servers need {half}, nine of ten at most {most}"
    assert dict(band.words())["replicas"] == f"{said}, {low} to {high} at 90 %; {sure}"


def test_the_band_of_a_capacity_has_no_replicas() -> None:
    answer = search(small_space(device=("h100",)).enumerate(), question(), RatePerDollar(), top=2)
    band = band_of(answer)
    assert band.replicas is None
    assert band.rates is not None
    assert band.rates[0] >= band.rates[1] >= band.rates[2] > 0
    fast, said, slow = (f"{100 * share:.1f} %" for share in band.attainment)
    shown = f"{said}; at this rate {fast} at the faster end, {slow} at the slower"
    beyond = ", for which it is too much" * (band.rates[2] < band.rates[1])
    assert dict(band.words())["attainment"] == shown + beyond
    assert band.cost == pytest.approx([band.price_per_hour / 3600 / rate * 1e6 for rate in band.rates])
    assert "per million requests at capacity" in dict(band.words())["cost"]


def test_what_errs_alike_cancels_between_deployments() -> None:
    other = small_space().deployment({"device": "l40s", "max_model_len": 2048})
    wide = small_space().deployment({"device": "h100", "tensor_parallel_size": 2, "max_model_len": 2048})
    alone = doubt_of(ONE, tables_of(ONE, "modelled"), question()).steps
    assert told_apart(ONE, ONE) == 0.0
    assert 0 < told_apart(ONE, wide) < math.expm1(alone[-1] - alone[0])
    assert told_apart(ONE, other) > told_apart(ONE, wide)


def test_a_confidence_is_a_share_that_the_evidence_knows() -> None:
    with pytest.raises(InputError, match=r"confidence=0.99: must be a share from 0.05 to 0.95"):
        question(confidence=0.99)
