"""Questions, draws and surveys: rates of a grid, digests of what matters, words, and who is worth a look."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plan.chosen import answer, outcome
from plan.planning import chat, question, server, single_tokens
from windtunnel.deployment import SLO, PercentileLimit
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.plan import survey as surveys
from windtunnel.plan.bound import Bound, rate_bound, step_bound
from windtunnel.plan.capacity import Draws, climb, highest, rate_levels
from windtunnel.plan.elimination import Asked, Entry, Report
from windtunnel.plan.outcome import measure
from windtunnel.plan.question import Question
from windtunnel.plan.store import Store
from windtunnel.plan.survey import SHARES, Surveyed, SurveyJob, SurveyReport, promising, run_survey, survey
from windtunnel.plan.what_if import WhatIf, _regret
from windtunnel.plan.workers import in_turn
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Fixed, Gamma, Workload, generate
from windtunnel.workload.agents.agentx import Rules, agentx


def test_rates_are_powers_of_one_and_the_tolerance() -> None:
    """Of 1.5: 1.5, 2.25, 3.375; and downwards 0.667."""
    asked = question(tolerance=0.5)
    assert [asked.rate(level) for level in (-1, 0, 1, 2)] == pytest.approx([2 / 3, 1.0, 1.5, 2.25])
    assert [asked.level(rate) for rate in (0.7, 1.0, 1.49, 1.5, 2.2, 2.25, 3.3)] == [-1, 0, 0, 1, 1, 2, 2]
    for level in range(-60, 60):
        assert asked.level(asked.rate(level)) == level, "a rate of the grid is its own level, however it rounds"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attainment": 0.0}, "attainment=0: must be a share"), ({"attainment": 1.01}, "attainment=1.01"),
        ({"tolerance": 9e-5}, "tolerance=9e-05"), ({"tolerance": 0.51}, "tolerance=0.51"), ({"seed": -1}, "seed=-1"),
        ({"confidence": 0.04}, "confidence=0.04"), ({"confidence": 0.96}, "confidence=0.96"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        question(**values)
    kept: tuple[dict[str, Any], ...] = (
        {"attainment": 1.0},
        {"tolerance": 1e-4},
        {"tolerance": 0.5},
        {"confidence": 0.05},
    )
    for ends in kept:
        question(**ends)


def test_the_digest_knows_what_outcomes_depend_on_and_nothing_else() -> None:
    asked = question(chat(50))
    others = (
        {"attainment": 0.8}, {"seed": 1}, {"confidence": 0.5}, {"perf": "roofline"}, {"slo": SLO(ttft=1.0)},
        {"workload": chat(50, 1)},
    )  # fmt: skip
    digests = {asked.digest, *(replace(asked, **values).digest for values in others)}
    assert len(digests) == 1 + len(others)
    assert replace(asked, tolerance=0.05).digest == asked.digest, "how finely rates are told apart changes no trial"
    shared = [asked.shares_times(replace(asked, **values)) for values in others]
    assert shared == [True, True, False, False, True, True]
    spec = replace(asked, slo=SLO(tpot=0.5, percentiles=(PercentileLimit("ttft", 99, 2.0),))).spec()
    assert (spec["goodput"], spec["slo"], spec["confidence"]) == ({"tpot": 0.5}, [["ttft", 99, 2.0]], None)


def test_draws_in_words() -> None:
    assert Draws((), 0.1).words == "not found: the load is too short to fill the replicas"
    assert Draws((1.5, 1.5), 0.1).words == "1.5 requests/s in 2 random draws of the load"
    assert Draws((1.0, 2.0, 3.0), 0.1).words == "1 to 3 requests/s in 3 random draws of the load"


def test_bisection_asks_as_little_as_it_must() -> None:
    for best in range(-3, 12):
        asked: list[int] = []

        def holds(step: int, best: int = best, asked: list[int] = asked) -> bool:
            asked.append(step)
            assert len(asked) < 20, "it goes on for ever"
            return step <= best

        assert highest(holds, 0, 8) == (None if best < 0 else min(best, 8))
        asked.clear()
        assert climb(holds, 0, 8) == (None if best < 0 else min(best, 8))
        assert len(asked) == len(set(asked)), "no step is asked twice"
        assert {-1: 1, 0: 2}.get(best, len(asked)) == len(asked)
        assert all(0 <= step <= 8 for step in asked)


def test_promising_candidates_of_each_kind_come_first() -> None:
    """By promise 1 before 0; a third differs from the second in its router alone and is no other; the rest are out."""
    found = answer()
    one, two = found.contenders[0], found.contenders[1]
    router = replace(two.candidate, index=2, deployment=replace(two.candidate.deployment, router="random"))
    (pool,) = two.candidate.deployment.pools
    budget = replace(pool, engine=replace(pool.engine, max_num_batched_tokens=512))
    like = replace(two.candidate, index=3, deployment=replace(two.candidate.deployment, pools=(budget,)))
    contenders = {0: one, 1: two, 2: replace(two, candidate=router), 3: replace(two, candidate=like), 4: one, 5: one}
    promises = {0: 1.0, 1: 3.0, 2: 3.0, 3: 2.0}
    entries = {index: Entry(index, "bounded", promise) for index, promise in promises.items()}
    entries |= {4: Entry(4, "impossible", 9.0), 5: Entry(5, "refused", 9.0)}
    found = replace(found, contenders=contenders, entries=entries)
    assert [candidate.index for candidate in promising(found, 9)] == [1, 0, 3], "like another of its kind: last"
    assert [candidate.index for candidate in promising(found, 2)] == [1, 0]
    assert SHARES == (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def test_what_is_lost_by_keeping_another_winner() -> None:
    """The best has 2.0; one that is not among the candidates has lost everything, and of costs everything and more."""
    found = answer()
    with Store() as store:
        assert _regret(found, 1, store) == 0.0
        assert _regret(found, 99, store) == 1.0
        costs = replace(found, entries={1: replace(found.entries[1], promise=-4.0)})
        assert _regret(costs, 99, store) == math.inf
    document = WhatIf({"chat": found, "code": replace(found, entries={})}, {"chat": {"chat": 0.0}}).to_json()
    assert document["best"] == {"chat": found.contenders[1].candidate.settings, "code": None}
    assert document["values"] == {"chat": 2.0, "code": None}


def test_lines_under_a_table_by_hand() -> None:
    """Steps of 2 + T below three tokens and 1 + 2·T from there on, with 0.5 s of the host: the hull's edges, the flat
    line at its least and the one from the origin."""
    times = linear(2.0, 1.0, 0.0, 0.0, max_num_batched_tokens=8, max_num_seqs=8, max_model_len=64)
    tokens = np.array([0.0, 3, 4, 5, 7, 9, 11, 13, 15])
    host = np.full(len(times.host_serial), 0.5)
    times = replace(times, decode_tokens=tokens, mixed_tokens=tokens, host_serial=host)
    lines = step_bound(times)
    found = sorted(zip(lines.base.tolist(), lines.per_token.tolist(), strict=True))
    assert found == [(0.5, pytest.approx(5 / 3)), (2.5, pytest.approx(1.0)), (3.5, 0.0)]
    assert (lines.max_num_batched_tokens, lines.max_num_seqs) == (8, 8)


def test_several_pools_add_up_and_sides_are_as_fast_as_the_slower() -> None:
    """A replica serves 8 of these in 0.108 s; two of them and two of another pool four times as many."""
    deployment, tables = server(8, 0.1, 0.001)
    (pool,) = deployment.pools
    twice = replace(deployment, pools=(replace(pool, replicas=2, name="a"), replace(pool, replicas=2, name="b")))
    found = rate_bound(twice, Question(single_tokens(100)), (*tables, *tables))
    assert found.rate == pytest.approx(4 * 8 / 0.108)
    assert found.replicas == 2
    assert found.per_replica == pytest.approx(16 / 0.108)


def test_a_cache_that_is_read_again_and_again_is_a_bound() -> None:
    """Ten tokens of output after a prompt of ten: 9 steps read 10 to 18 tokens, 126, and the prompt is written once;
    a cache of 32 tokens holds them for 136 / 32 = 4.25 steps of 0.1 s, more than 9 decodes + 1 prompt over 8 places."""
    deployment, tables = server(8, 0.1)
    (pool,) = deployment.pools
    small = replace(pool, engine=replace(pool.engine, num_gpu_blocks_override=3))
    load = generate(Gamma(1.0), Both(Fixed(10), Fixed(10)), 50)
    found = rate_bound(replace(deployment, pools=(small,)), Question(load), tables)
    assert found.rate == pytest.approx(1 / (0.1 * 136 / 32))
    roomy = rate_bound(deployment, Question(load), tables)
    assert roomy.rate == pytest.approx(1 / (0.1 * 10 / 8)), "10 parts over 8 places"
    (table,) = tables
    sampled = replace(table, times=replace(table.times, sequences=0.002 * np.arange(9, dtype=np.float64)))
    found = rate_bound(deployment, Question(load), (sampled,))
    assert found.rate == pytest.approx(1 / (0.1 * 10 / 8 + 0.002 * 10)), "each of the 10 parts is sampled, too"


def test_how_far_limits_miss_a_request_alone() -> None:
    """A prompt of 20 takes one step of 0.1 + 0.02 s, a token 0.101: limits of half of that need twice the time."""
    deployment, tables = server(8, 0.1, 0.001)
    load = generate(Gamma(1.0), Both(Fixed(20), Fixed(3)), 50)

    def stretch(slo: SLO) -> Bound:
        return rate_bound(deployment, Question(load, slo=slo), tables)

    assert stretch(SLO(ttft=0.06)).stretch == pytest.approx(2.0)
    assert stretch(SLO(ttft=0.06)).rate == 0.0
    assert stretch(SLO(tpot=0.0505)).stretch == pytest.approx(2.0)
    assert stretch(SLO(e2el=0.161)).stretch == pytest.approx(2.0)
    assert stretch(SLO(percentiles=(PercentileLimit("ttft", 50, 0.06),))).stretch == pytest.approx(2.0)
    kept = stretch(SLO(ttft=0.24))
    assert kept.stretch == pytest.approx(0.5) and kept.rate > 0


def test_requests_that_do_not_fit_miss_their_limits() -> None:
    """Of 64 tokens a prompt of 64 has no room for an answer; of one in two such, nine of ten good are out of reach."""
    deployment, tables = server(8, 0.1)
    load = generate(Gamma(1.0), Both(Fixed(20), Fixed(3)), 50)
    long = replace(load, prompt_tokens=np.where(np.arange(50) % 2, 64, 20))
    assert rate_bound(deployment, Question(long, slo=SLO(ttft=9.0)), tables).stretch == math.inf
    half = rate_bound(deployment, Question(long, slo=SLO(ttft=9.0), attainment=0.4), tables)
    assert half.stretch == pytest.approx(0.1 / 9)
    with pytest.raises(InputError, match="no request fits max_model_len=64"):
        rate_bound(deployment, Question(replace(load, prompt_tokens=np.full(50, 64))), tables)


def test_what_is_not_said_is_usual() -> None:
    asked = Question(chat(50))
    assert (asked.attainment, asked.tolerance, asked.perf, asked.seed, asked.confidence) == (0.9, 0.01, "auto", 0, None)
    assert asked.slo == SLO()
    assert rate_levels(question(tolerance=0.5), 1000.0) == (0, 17), "1.5^0 is a thousandth, 1.5^17 is 985"


def test_one_replica_is_surveyed_at_shares_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 requests/s 5, 10, 20, … and 90, each once on the grid of powers of 1.5."""
    told: list[tuple[int, float]] = []

    def ask(_: object, known: object, pools: str, what: tuple[Any, float], report: Report) -> Any:
        told.append((what[0].replicas, what[1]))
        assert (known, pools) == ({"key": 7}, "pools of one")
        report.reused += 1
        return what[1]

    monkeypatch.setattr(surveys, "ask", ask)
    monkeypatch.setattr(surveys, "tables_for", lambda *_: ())
    monkeypatch.setattr(surveys, "rate_bound", lambda one, *_: Bound(100.0 * one.replicas, 0.5, 1))
    monkeypatch.setattr(surveys, "deployment_key", lambda one, _: "pools of one" if one.replicas == 1 else "of more")
    candidate = answer().contenders[1].candidate
    candidate = replace(candidate, deployment=candidate.scaled(3))
    back = run_survey(SurveyJob(question(tolerance=0.5), (candidate,), {"key": 7}))  # type: ignore[dict-item]
    rates = [1.5**level for level in (3, 5, 7, 8, 9, 10, 11)]
    assert [replicas for replicas, _ in told] == [1] * 7
    assert [rate for _, rate in told] == pytest.approx(rates)
    (one,) = back.surveyed
    outcomes: tuple[Any, ...] = one.outcomes
    assert (one.index, outcomes) == (1, tuple(rate for _, rate in told))
    assert back.report.reused == 7


def test_surveys_are_without_limits_in_the_order_of_promise_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, most = answer(), list[int]()
    candidates = [found.contenders[index].candidate for index in (1, 0)]

    def ran(job: SurveyJob) -> SurveyReport:
        assert job.question.slo == SLO()
        (candidate,) = job.candidates
        trial = outcome(1.0, 1.0, 0.1, 0.01)
        asked = {f"key {candidate.index}": Asked("pools", 1, trial, 0.5)}
        return SurveyReport([Surveyed(candidate.index, (trial,))], Report(asked=asked))

    monkeypatch.setattr(surveys, "run_survey", ran)

    def chosen(_: object, number: int) -> Any:
        most.append(number)
        return candidates

    monkeypatch.setattr(surveys, "promising", chosen)
    with Store() as store:
        assert [one.index for one in survey(found, store, in_turn())] == [1, 0]
        assert {row["key"] for row in store.trials(replace(found.question, slo=SLO()).digest)} == {"key 0", "key 1"}
        survey(found, store, in_turn(), 3)
    assert most == [48, 3]


def test_of_agentx_lanes_are_played_anew_and_its_window_is_measured() -> None:
    rules = Rules(20.0, warm_up=1, system_idle=5.0)
    corpus = Workload.from_columns(
        session=np.repeat(range(3), 4), prompt_tokens=np.full(12, 40), output_tokens=5, think_time=2.0
    )
    asked = Question(corpus, slo=SLO(ttft=10.0), replay=rules, in_lanes=True, seed=3)
    assert asked.at(2.0).digest == agentx(corpus, rules, 2, 3).digest
    assert asked.under(corpus, 4).at(2.0).digest == agentx(corpus, rules, 2, 4).digest
    assert asked.digest != replace(asked, replay=None).digest
    assert asked.spec()["replay"]["seconds"] == 20.0
    deployment, tables = server(8, 0.1)
    run = simulate(deployment, asked.at(2.0), tables=tables)
    found, (start, end) = measure(run, asked, 2.0), run.manifest["window"]
    arrival = run.requests.arrival
    came = (arrival >= start) & (arrival <= end)
    assert 0 < came.sum() < len(arrival) < len(asked.at(2.0))
    assert (found.attainment, end - start) == (1.0, pytest.approx(20.0))
    # five tokens each, but for those that are cut off at either end
    assert found.output_throughput == pytest.approx(5 * came.sum() / 20.0, abs=5 * 2 / 20.0)
