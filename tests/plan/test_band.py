"""Band: the answer at both ends of what the evidence leaves open, and at a stated confidence."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plan.chosen import Chosen, answer, outcome
from plan.planning import chat, question, small_space
from windtunnel.deployment import SLO, Deployment
from windtunnel.errors import InputError
from windtunnel.plan import band as bands
from windtunnel.plan import doubt as doubts
from windtunnel.plan.band import band_of
from windtunnel.plan.capacity import Capacity, capacity
from windtunnel.plan.doubt import doubt_of, slowed, tightened, told_apart
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.question import Question
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
    sure = f"half of real servers need {half}, 9 of 10 at most {most}, 19 of 20 at most {high}"
    assert dict(band.words())["replicas"] == sure


def test_the_band_of_a_capacity_has_no_replicas() -> None:
    answer = search(small_space(device=("h100",)).enumerate(), question(), RatePerDollar(), top=2)
    band = band_of(answer)
    assert band.replicas is None
    assert band.rates is not None
    assert band.rates[0] >= band.rates[1] >= band.rates[2] > 0
    fast, said, slow = (f"{100 * share:.1f}" for share in band.attainment)
    assert dict(band.words())["within goal"] == f"{said} % of requests ({slow} to {fast} % on a real server)"
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


# --- by hand: three replicas of two GPUs at 3.6 USD win at 7 requests/s -----------------------------------------------


def said(monkeypatch: pytest.MonkeyPatch, found: Chosen, needed: dict[float | None, int]) -> Any:
    """The band where so many replicas serve the rate at each confidence, and others are 0.1 more, or less, certain."""

    def trial(asked: Question, deployment: Deployment, rate: float) -> Any:
        assert rate == 7.000049
        return replace(outcome(rate, 1.0, 0.1, 0.01), met=deployment.replicas >= needed[asked.confidence])

    rates = {0.05: 9.0, None: 7.0, 0.95: 5.0}
    shares = {0.05: 0.99, None: 0.9, 0.95: 0.5}
    monkeypatch.setattr(bands, "trial", trial)
    monkeypatch.setattr(bands, "tables_of", lambda *_: ())
    doubt = SimpleNamespace(words="as measured", grade=("low", "why"), warning="beware")
    monkeypatch.setattr(bands, "doubt_of", lambda *_: doubt)
    monkeypatch.setattr(bands, "capacity", lambda _, asked: Capacity(rates[asked.confidence], None, None, 1))
    monkeypatch.setattr(
        bands,
        "whole_trial",
        lambda asked, _, rate: replace(outcome(rate, 1.0, 0.1, 0.01), attainment=shares[asked.confidence]),
    )
    return band_of(found)


def test_a_band_of_replicas_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the winner's three are tried at most."""
    found = answer(objective=LeastForRate(7.0, cast(Any, None)))
    band = said(monkeypatch, found, {0.05: 2, None: 3, 0.95: 12, 0.5: 3, 0.9: 5})
    assert (band.replicas, band.confident, band.rates) == ((2, 3, 12), (3, 5), None)
    assert (band.evidence, band.known_bad, band.attainment) == ("as measured", "beware", (0.99, 0.9, 0.5))
    assert band.price_per_hour == pytest.approx(7.2), "of one replica of two GPUs"
    assert band.cost == pytest.approx((14.4, 21.6, 86.4))
    more = said(monkeypatch, found, {0.05: 1, None: 3, 0.95: 13, 0.5: 12, 0.9: 13})
    assert (more.replicas, more.confident) == ((1, 3, None), (12, None))
    none = said(monkeypatch, found, {0.05: 13, None: 13, 0.95: 13, 0.5: 13, 0.9: 13})
    assert (none.replicas, none.confident) == ((None,) * 3, (None,) * 2)


def test_a_band_of_pools_counts_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica of a pool for two of another: three at a time, and of the winner's nine four times as many."""
    found = answer(objective=LeastForRate(7.0, cast(Any, None)))
    contender = found.contenders[1]
    (pool,) = contender.candidate.deployment.pools
    pools = (replace(pool, name="a"), replace(pool, name="b", replicas=2))
    deployment = replace(contender.candidate.deployment, pools=pools)
    candidate = replace(contender.candidate, deployment=deployment)
    found = replace(found, contenders={**found.contenders, 1: replace(contender, candidate=candidate)})
    band = said(monkeypatch, found, {0.05: 4, None: 9, 0.95: 36, 0.5: 10, 0.9: 34})
    assert (band.replicas, band.confident) == ((6, 9, 36), (12, 36))
    assert said(monkeypatch, found, {0.05: 4, None: 9, 0.95: 37, 0.5: 10, 0.9: 37}).replicas == (6, 9, None)


def test_a_band_of_rates_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    band = said(monkeypatch, answer(), {})
    assert (band.rates, band.replicas, band.confident) == ((9.0, 7.0, 5.0), None, None)
    assert band.price_per_hour == pytest.approx(21.6), "of all six GPUs"
    assert band.could_be_better == ()
    assert band.cost == pytest.approx((666.67, 857.14, 1200.0), rel=1e-5), "6,000 µUSD a second"


class Steps:
    """Tables whose steps take so long, and that note their batches."""

    def __init__(self, seconds: float, most: int = 7) -> None:
        self.seconds, self.max_num_seqs = seconds, most
        self.batches: list[tuple[int, int, list[Any]]] = []

    def batch(self, *batch: Any) -> float:
        self.batches.append(batch)
        return self.seconds


@pytest.mark.parametrize(("most", "requests"), [(7, 3), (1, 1)])
def test_the_error_of_a_deployment_is_that_of_half_a_batch(
    monkeypatch: pytest.MonkeyPatch, most: int, requests: int
) -> None:
    """With a thousand tokens each, of the first pool."""
    monkeypatch.setattr(doubts, "least_certain", lambda pools, error, agreement: (list(pools), error, agreement))
    times, error, asked = Steps(0.2, most), Steps(0.05, most), question()
    tables = [cast(Any, SimpleNamespace(times=times, doubts={"error": error})), cast(Any, None)]
    found = cast(Any, doubt_of(ONE, tables, asked))
    assert found[0] == [ONE.pools[0].spec()]
    assert (found[1], found[2]) == (pytest.approx(0.25), asked.overheads.agreement)
    assert times.batches == error.batches == [(requests, 1000 * requests, [])]
    unknown = cast(Any, doubt_of(ONE, [cast(Any, SimpleNamespace(times=times, doubts={}))], asked))
    assert math.isnan(unknown[1])


def test_steps_and_first_tokens_at_a_confidence_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take twice as long on nine of ten servers and first tokens three times: a limit of 0.4 s is one of 0.267 s
    for steps that are twice as long already."""
    below = {("steps", 0.9): 2.0, ("first_token", 0.9): 3.0}
    monkeypatch.setattr(doubts, "doubt_of", lambda *_: SimpleNamespace(below=lambda *what: below[what]))
    tables = tables_of(ONE, "modelled")
    asked = question()
    assert slowed(ONE, tables, asked) is tables
    assert tightened(ONE, tables, asked) is asked
    sure = replace(asked, confidence=0.9)
    (slow,), (plain,) = slowed(ONE, tables, sure), tables
    assert slow.times.batch(4, 400, []) == pytest.approx(2 * plain.times.batch(4, 400, []))
    assert set(slow.doubts) == set(plain.doubts)
    for name, part in plain.doubts.items():
        assert slow.doubts[name].batch(4, 400, []) == pytest.approx(2 * part.batch(4, 400, []))
    assert tightened(ONE, tables, sure).slo.ttft == pytest.approx(0.4 / 1.5)
    monkeypatch.setattr(doubts, "divergence", lambda *_: SimpleNamespace(steps=(-0.1, 0.05, 0.3)))
    wide = small_space().deployment({"device": "h100", "tensor_parallel_size": 2, "max_model_len": 2048})
    assert told_apart(ONE, wide) == pytest.approx(math.exp(0.2) - 1)
