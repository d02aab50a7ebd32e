"""Capacity: closed forms, none and infinite, the grid of rates, and the search for the highest step."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.planning import chat, question, server, single_tokens, small_space
from windtunnel.deployment import SLO, parse_slo
from windtunnel.errors import InputError
from windtunnel.plan.capacity import Capacity, capacity, capacity_draws, climb, highest
from windtunnel.plan.question import Question
from windtunnel.plan.trial import trial
from windtunnel.workload import AllAtOnce, Both, Fixed, generate, with_concurrency

COUNT = 20_000


def crommelin(rate: float, service: float, wait: float) -> float:
    """P(waiting time ≤ wait) of M/D/1 (Crommelin 1932)."""
    total = 0.0
    for j in range(int(wait / service) + 1):
        x = rate * (wait - j * service)
        total += math.exp(x) * (-x) ** j / math.factorial(j)
    return (1 - rate * service) * total


def md1_rate(service: float, sojourn: float, share: float) -> float:
    """The rate at which this share of M/D/1 requests stays no longer than ``sojourn``."""
    low, high = 0.0, 1 / service
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if crommelin(middle, service, sojourn - service) >= share else (low, middle)
    return low


@pytest.mark.parametrize(("batch", "base", "token"), [(1, 0.1, 0.0), (4, 0.1, 0.0), (8, 0.1, 0.001)])
def test_without_limits_it_is_what_the_server_can_serve(batch: int, base: float, token: float) -> None:
    deployment, tables = server(batch, base, token)
    asked = Question(single_tokens(COUNT), tolerance=0.0025)
    most = batch / (base + token * batch)
    assert capacity(deployment, asked, tables).rate == pytest.approx(most, rel=0.01)
    assert trial(asked, deployment, 0.99 * most, tables).met
    beyond = trial(asked, deployment, 1.01 * most, tables)
    assert not beyond.met
    assert beyond.margins[-1].name == "queue growth"


def test_a_limit_on_a_percentile_gives_the_rate_of_theory() -> None:
    deployment, tables = server(1, 0.1)
    slo = SLO(percentiles=parse_slo(["ttft_p90=0.5"]))
    rates = [
        capacity(deployment, Question(single_tokens(60_000, seed), slo=slo, tolerance=0.0025, seed=seed), tables).rate
        for seed in range(3)
    ]
    assert np.mean(rates) == pytest.approx(md1_rate(0.1, 0.5, 0.9), rel=0.01)
    assert np.std(rates, ddof=1) / np.mean(rates) < 0.02


def test_seeds_agree() -> None:
    deployment, tables = server(4, 0.1)
    slo = SLO(percentiles=parse_slo(["ttft_p90=0.5"]))
    asked = Question(single_tokens(COUNT), slo=slo, tolerance=0.0025)
    rates = [
        capacity(deployment, replace(asked, workload=single_tokens(COUNT, seed), seed=seed), tables).rate
        for seed in range(4)
    ]
    assert (max(rates) - min(rates)) / np.mean(rates) < 0.03
    assert np.std(rates, ddof=1) / np.mean(rates) < 0.02


def test_the_interval_is_that_of_the_draws() -> None:
    deployment = small_space().deployment({"device": "h100", "max_model_len": 2048})
    found = capacity_draws(deployment, question(), lambda seed: chat(300, seed), range(3))
    assert len(found.rates) == 3
    assert found.interval.low < capacity(deployment, question()).rate < found.interval.high
    assert "random draws" in found.words
    longer = capacity_draws(deployment, question(), lambda seed: chat(1000, seed), range(3))
    least = sorted(longer.rates)[1]
    carried = capacity_draws(deployment, question(), lambda seed: chat(1000, seed), range(3), least)
    assert carried.rates == tuple(max(rate, least) for rate in longer.rates)


def test_a_load_that_fills_nothing_is_lengthened_or_said_to_be_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = small_space().deployment({"device": "h100", "max_model_len": 2048})
    asked = question(goodput=("ttft:60000", "tpot:1000"))
    assert capacity(deployment, replace(asked, workload=chat(50))).at_bound
    found = capacity_draws(deployment, asked, lambda seed: chat(50, seed), range(2))
    assert len(found.rates) == 2
    monkeypatch.setattr("windtunnel.plan.capacity.LONGEST", 50)
    short = capacity_draws(deployment, asked, lambda seed: chat(50, seed), range(2))
    assert short.rates == ()
    assert "too short" in short.words


def test_a_closed_loop_that_the_server_keeps_up_with_has_no_limit() -> None:
    deployment, tables = server(8, 0.1)
    loop = with_concurrency(single_tokens(500), 4)
    found = capacity(deployment, Question(loop, slo=SLO(e2el=0.35)), tables)
    assert found.answer == "infinite"
    assert math.isinf(found.rate)
    assert found.missed is None


def test_no_rate_where_a_request_alone_misses() -> None:
    deployment, tables = server(4, 0.1)
    without = capacity(deployment, Question(single_tokens(500), slo=SLO(ttft=0.09)), tables)
    assert (without.answer, without.trials) == ("none", 0)
    burst = generate(AllAtOnce(), Both(Fixed(1), Fixed(1)), 100)
    pairs = replace(burst, arrival=np.repeat(np.arange(50.0), 2))
    one, one_tables = server(1, 0.1)
    found = capacity(one, Question(pairs, slo=SLO(ttft=0.15)), one_tables)
    assert found.answer == "none"
    assert found.missed is not None
    assert found.missed.stretch == pytest.approx(0.2 / 0.15)


def test_a_load_without_a_rate_cannot_be_scaled() -> None:
    deployment, tables = server(4, 0.1)
    with pytest.raises(InputError, match="no rate to scale"):
        capacity(deployment, Question(generate(AllAtOnce(), Both(Fixed(1), Fixed(1)), 100)), tables)


def test_every_rate_keeps_the_shape_of_the_load() -> None:
    asked = question()
    slow, fast = asked.at(1.0), asked.at(4.0)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)
    assert fast.arrival * 4 == pytest.approx(slow.arrival)
    assert fast.request_rate == pytest.approx(4.0)


@given(st.floats(1e-3, 1e4), st.floats(0.001, 0.3))
def test_a_rate_lies_on_its_level_or_above(rate: float, tolerance: float) -> None:
    asked = Question(single_tokens(60), tolerance=tolerance)
    level = asked.level(rate)
    assert asked.rate(level) <= rate < asked.rate(level + 1)


@given(st.integers(-5, 40), st.integers(0, 30), st.integers(0, 30))
def test_the_search_finds_the_highest_step(limit: int, low: int, more: int) -> None:
    asked: list[int] = []

    def holds(step: int) -> bool:
        asked.append(step)
        return step <= limit

    high = low + more
    expected = min(limit, high) if limit >= low else None
    assert highest(holds, low, high) == expected
    assert len(asked) <= math.log2(more + 2) + 1
    asked.clear()
    assert climb(holds, low, high) == expected
    assert len(set(asked)) == len(asked)
    if limit <= low:
        assert len(asked) <= 1 + (limit == low)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attainment": 0.0}, "attainment=0: must be"),
        ({"tolerance": 0.0}, "tolerance=0: must be"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        question(**settings)


def test_a_capacity_in_words() -> None:
    assert [Capacity(rate, None, None, 0).answer for rate in (0.0, math.inf, 12.3456)] == [
        *("none", "infinite", "12.35 requests/s"),
    ]


def test_a_load_is_repeated_fourfold_until_it_fills_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loads of 50 requests 800 fill them: found once, and kept for the next draw; seeds are the load's own."""
    asked: list[tuple[int, int]] = []

    def found(_: Any, question: Question) -> Capacity:
        asked.append((len(question.workload), question.seed))
        return Capacity(7.0 + question.seed, None, None, 1, at_bound=len(question.workload) < 800)

    monkeypatch.setattr("windtunnel.plan.capacity.capacity", found)
    deployment = server(4, 0.1)[0]
    drawn = capacity_draws(deployment, question(), lambda seed: chat(50, seed), (1, 2))
    assert asked == [(50, 1), (200, 1), (800, 1), (800, 2)]
    assert (drawn.rates, drawn.step) == ((8.0, 9.0), 0.01)
    asked.clear()
    monkeypatch.setattr("windtunnel.plan.capacity.LONGEST", 200)
    assert capacity_draws(deployment, question(), lambda seed: chat(50, seed), (1, 2)).rates == ()
    assert asked == [(50, 1), (200, 1)]
