"""Goodput at a load's own arrivals: what brute force over every number of replicas finds, with a certificate."""

import math
from dataclasses import replace
from typing import Any

import pytest

from plan.answer.checker import wrong
from plan.planning import chat, question, small_space
from windtunnel.errors import InputError
from windtunnel.metrics import good_requests, request_metrics
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.answer.recommendation import goal, sentence
from windtunnel.plan.bound import Bound
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput
from windtunnel.plan.goodput.points import at_most, try_counts
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import tables_for, whole_run
from windtunnel.simulate.run import FINISHED
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import head, scale_time, with_concurrency

ENUMERATION = small_space(max_num_seqs=(4, 64)).enumerate(with_price=True)
BUSY = scale_time(chat(600), 1 / 60)
"""Sixty requests a second: several replicas pay."""
LIMITS = Constraints(max_gpus=12)


def asked(minimum: float = NO_MINIMUM, **more: Any) -> Question:
    return question(BUSY, attainment=minimum, **more)


def by_hand(objective: Goodput, asked: Question) -> tuple[float, int, int]:
    """The best score with its candidate and replicas, every number of them simulated whole."""
    best = (-math.inf, 0, 0)
    for candidate in ENUMERATION.candidates:
        one = candidate.scaled(1)
        for count in range(1, LIMITS.max_gpus // one.gpus + 1):  # type: ignore[operator]
            run = whole_run(asked, candidate.scaled(count), asked.workload.request_rate)
            good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, asked.slo)
            assert good is not None
            tokens = float(run.requests.output_tokens[good].sum()) / asked.workload.duration
            weight = one.price_per_hour / 3600 if objective.per_dollar else one.gpus
            score = tokens / (count * weight) if good.mean() >= asked.attainment else -math.inf
            best = max(best, (score, -candidate.index, -count))
    return best[0], -best[1], -best[2]


@pytest.mark.parametrize("per_dollar", [False, True])
@pytest.mark.parametrize("minimum", [NO_MINIMUM, 0.99])
def test_the_search_finds_what_every_number_of_replicas_finds(per_dollar: bool, minimum: float) -> None:
    objective = Goodput(LIMITS, per_dollar)
    answer = search(ENUMERATION, asked(minimum), objective)
    score, index, count = by_hand(objective, asked(minimum))
    best = answer.best
    assert best is not None
    assert (best.index, answer.measured(best)[0].replicas) == (index, count)
    assert best.promise == pytest.approx(score, rel=1e-12)
    assert wrong(certificate(answer), BUSY.arrival.tolist(), BUSY.output_tokens.tolist()) == []


ELASTIC = ("none", "policy=hpa kv=0.2 least=1 most=4 interval=2 startup=1", "policy=foresight rps=25 most=4 interval=2")


@pytest.mark.parametrize("per_dollar", [False, True])
def test_an_autoscaler_pays_for_what_is_up(per_dollar: bool) -> None:
    """Against every number of replicas, and every autoscaler, simulated whole."""
    enumeration = small_space(max_num_seqs=(64,), max_num_batched_tokens=(1024,), autoscale=ELASTIC).enumerate()
    objective, best = Goodput(LIMITS, per_dollar), (-math.inf, 0)
    for candidate in enumeration.candidates:
        one, scaling = candidate.scaled(1), candidate.deployment.scaling
        for count in range(1, 12 // one.gpus + 1) if scaling is None else [4]:
            run = whole_run(asked(), candidate.scaled(count), BUSY.request_rate)
            good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, asked().slo)
            assert good is not None
            lives = run.manifest.get("lives") or {"paid_s": [count], "seconds": 1}
            replicas = sum(lives["paid_s"]) / lives["seconds"]
            weight = replicas * (one.price_per_hour / 3600 if per_dollar else one.gpus)
            tokens = float(run.requests.output_tokens[good].sum()) / BUSY.duration
            best = max(best, (tokens / weight, -candidate.index))
    answer = search(enumeration, asked(), objective, top=9)
    assert answer.best is not None and answer.best.held is not None
    assert answer.best.promise == pytest.approx(best[0], rel=1e-12) and -answer.best.index == best[1]
    assert wrong(certificate(answer), BUSY.arrival.tolist(), BUSY.output_tokens.tolist()) == []
    for entry in answer.ranking:
        scaled = answer.contenders[entry.index].candidate.deployment.scaling is not None
        assert entry.held is not None and scaled == (entry.held.share_of(4) < 1.0)


def test_replicas_of_an_autoscaler_are_no_axis() -> None:
    with pytest.raises(InputError, match="replicas: are an autoscaler's to start"):
        small_space(autoscale=ELASTIC, replicas=(1, 2))
    with pytest.raises(InputError, match="unknown policy of autoscale 'hpaa': did you mean 'hpa'"):
        small_space(autoscale=("policy=hpaa",))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(ENUMERATION, asked(), Goodput(LIMITS))


def test_few_points_are_simulated(found: SearchResult) -> None:
    points = sum(12 // candidate.scaled(1).gpus for candidate in ENUMERATION.candidates)
    assert found.trials < 0.6 * points


def test_a_certificate_that_was_changed_proves_nothing(found: SearchResult) -> None:
    whole = certificate(found)
    assert wrong(whole) == []
    rows = whole["candidates"]
    other = next(row for row in rows if row["candidate"] != whole["best"]["candidate"])
    better = {**other, "at_most": 2 * whole["best"]["score"]}
    assert wrong({**whole, "candidates": [better if row is other else row for row in rows]})
    assert wrong({**whole, "candidates": [row for row in rows if row is not other]})
    fewer = {**other, "replicas": other["replicas"][1:]}
    assert wrong({**whole, "candidates": [fewer if row is other else row for row in rows]})
    twice = [{**load, "output_tokens": 2 * load["output_tokens"]} for load in whole["loads"]]
    assert wrong({**whole, "loads": twice})
    assert wrong(whole, BUSY.arrival.tolist(), (2 * BUSY.output_tokens).tolist()) == ["the load is another"]


def test_what_a_beginning_leaves_is_never_less_than_what_the_run_reaches() -> None:
    one = asked()
    deployment = ENUMERATION.candidates[0].scaled(1)
    tables = tables_for(one, deployment)
    run = simulate(deployment, BUSY, tables=tables)
    good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, one.slo)
    assert good is not None
    tokens = float(BUSY.output_tokens[good].sum()) / BUSY.duration
    before = math.inf
    for count in (50, 150, 300, 599):
        begun = simulate(deployment, head(BUSY, count), tables=tables)
        most, share = at_most(begun.requests, BUSY, one)
        assert tokens <= most <= before
        assert good.mean() <= share
        before = most
    assert before < 0.9 * float(BUSY.output_tokens.sum()) / BUSY.duration


def test_a_load_without_times_or_limits_is_refused() -> None:
    closed = question(with_concurrency(chat(100), 4), attainment=NO_MINIMUM)
    with pytest.raises(InputError, match="requests that come at given times"):
        search(ENUMERATION, closed, Goodput(LIMITS))
    with pytest.raises(InputError, match="which requests are good"):
        search(ENUMERATION, question(BUSY, goodput=()), Goodput(LIMITS))


def test_the_answer_is_a_sentence(found: SearchResult) -> None:
    assert found.best is not None and found.best.held is not None
    text = sentence(found, found.best)
    assert text.startswith("Best goodput: ") and "tokens/s per GPU" in text
    assert goal(found.question) == "as many requests as pay, with ttft ≤ 400 ms and tpot ≤ 30 ms"


def test_replicas_may_be_an_axis() -> None:
    space = small_space(device=("l40s",), tensor_parallel_size=(1,), max_num_seqs=(64,), replicas=(1, 2, 3, 6))
    answer = search(space.enumerate(), asked(), Goodput(Constraints()), top=99)
    counts = [answer.measured(entry)[0].replicas for entry in answer.ranking]
    axis = {one.index: one.settings["replicas"] for one in space.enumerate().candidates}
    assert counts == [axis[entry.index] for entry in answer.ranking]
    assert {2, 3, 6} <= set(counts)
    assert wrong(certificate(answer)) == []


def test_of_several_draws_the_worst_counts() -> None:
    other = scale_time(chat(600, seed=5), 1 / 60)
    alone = [search(ENUMERATION, asked().under(one, 0), Goodput(LIMITS), top=99) for one in (BUSY, other)]
    both = search(ENUMERATION, replace(asked(), draws=((0, other),)), Goodput(LIMITS), top=99)
    for index, entry in both.entries.items():
        assert entry.promise <= min(one.entries[index].promise for one in alone) * (1 + 1e-12)


@pytest.mark.parametrize("likely", [1, 3, 9, 40])
@pytest.mark.parametrize("holds_from", [1, 2, 7, 30, 99])
@pytest.mark.parametrize("asked_to", [1, 5, 12, 60])
def test_every_number_is_closed(likely: int, holds_from: int, asked_to: int) -> None:
    tried: list[int] = []

    def fails(count: int) -> bool:
        tried.append(count)
        return count < holds_from

    try_counts(1, 60, likely, lambda count: count <= asked_to, fails)
    assert len(tried) == len(set(tried))
    assert set(range(holds_from, asked_to + 1)) <= set(tried) <= set(range(1, asked_to + 1))
    missed = [count for count in tried if count < holds_from]
    assert not missed or max(missed) == min(holds_from - 1, asked_to)
    assert len(missed) <= 12


def test_one_that_never_holds_costs_few_runs() -> None:
    hopeless = question(BUSY, ("ttft:20",), attainment=0.999)
    answer = search(ENUMERATION, hopeless, Goodput(Constraints()))
    assert answer.best is None
    assert 0 < answer.trials <= 24  # two candidates, up to 600 replicas each
    assert wrong(certificate(answer)) == []


def test_a_load_of_more_requests_than_replicas_can_be_is_searched() -> None:
    many = question(scale_time(chat(9000), 1 / 60), attainment=NO_MINIMUM)
    candidate = ENUMERATION.candidates[0]
    found = Goodput(Constraints(max_gpus=20_000)).climb(candidate, Bound(60.0, 0.5, 1), many)
    assert found is not None and found.low == -4096
