"""Elimination: standings, and one warm-up for each kind of scheduler."""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from plan.chosen import outcome
from plan.planning import question, small_space
from windtunnel.errors import InputError
from windtunnel.plan import elimination
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import (
    BoundJob,
    Contender,
    Entry,
    Job,
    Report,
    Standing,
    best_of,
    bound_jobs,
    eliminate,
    find_bounds,
    threshold,
    warm_up,
    warm_ups,
    work,
)
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.space import Candidate
from windtunnel.plan.trial import trial_key

QUESTION = question(attainment=0.9, tolerance=0.03)


def test_each_kind_of_scheduler_is_warmed_up_once() -> None:
    schedulers = (None, "sarathi", "orca", "vllm-0.8-v0", "vllm-0.32")
    space = small_space(scheduler=schedulers, pipeline_parallel_size=(1, 2), max_num_batched_tokens=(2048,))
    found = warm_ups(QUESTION, space.enumerate().candidates)
    kinds = [(job.candidate.settings["scheduler"], job.candidate.settings["pipeline_parallel_size"]) for job in found]
    alone = [(name, stages) for name in (None, "sarathi", "vllm-0.8-v0") for stages in (1, 2)]
    assert kinds == alone
    warm_up(found[0])


def test_bounds_of_candidates_that_differ_in_their_limits_are_found_together_the_largest_first() -> None:
    space = small_space(tensor_parallel_size=(1, 2), max_num_seqs=(16, 64), max_num_batched_tokens=(1024, 2048))
    candidates = space.enumerate().candidates
    jobs = bound_jobs((QUESTION,), candidates, workers=1)
    found = [[one.settings for one in job.candidates] for job in jobs]
    assert sorted(one.index for job in jobs for one in job.candidates) == [one.index for one in candidates]
    assert all(len({each["tensor_parallel_size"] for each in few}) == 1 for few in found)
    for few in found:
        sizes = [(each["max_num_batched_tokens"], each["max_num_seqs"]) for each in few]
        assert sizes == sorted(sizes, reverse=True)
    assert max(len(job.candidates) for job in bound_jobs((QUESTION,), candidates, workers=4)) == len(candidates) // 8


def test_of_equal_scores_the_first_wins() -> None:
    assert best_of((Standing(1.0, 7), Standing(1.0, 3), Standing(2.0, 9)), 2) == (Standing(2.0, 9), Standing(1.0, 3))
    assert Standing(1.0, 3).beats(Standing(1.0, 7))
    assert not Standing(1.0, 7).beats(Standing(1.0, 7))
    assert Standing(0.0, 1).beats(None)


# --- one candidate, by hand -------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Steps 1 to 8, each worth its number."""

    low: int = 1
    high: int = 8

    def trial(self, step: int) -> Any:
        return None, float(step)

    def promise(self, step: int) -> float:
        return float(step)

    def score(self, step: int, outcome: Outcome) -> float:
        assert outcome.rate == step
        return step + 0.5


class Chosen:
    """An objective with those steps, or none."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps = steps

    def climb(self, *_: Any) -> Steps | None:
        return self.steps

    def shortage(self, *_: Any) -> str:
        return "too few"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were simulated; up to the fifth they hold."""
    steps: list[int] = []

    def ask(*told: Any) -> Outcome:
        what = told[3]
        steps.append(int(what[1]))
        return outcome(what[1], 1.0, 0.1, 0.01, met=what[1] <= 5)

    monkeypatch.setattr(elimination, "ask", ask)
    monkeypatch.setattr(elimination, "deployment_key", lambda *_: "key")
    return steps


def entry_of(standard: Standing | None, steps: Steps | None, rate: float = 9.0) -> Entry:
    """Of the candidate whose place is 1."""
    contender = Contender(Candidate(1, {}, cast(Any, None)), Bound(rate, 2.5 if rate == 0 else 0.5, 1))
    job = Job(QUESTION, cast(Any, Chosen(steps)), (contender,), standard, {})
    (entry,) = eliminate(job).entries
    return entry


def test_without_a_standard_the_highest_step_is_found(tried: list[int]) -> None:
    entry = entry_of(None, Steps())
    assert (entry.index, entry.status, entry.step, entry.promise) == (1, "exact", 5, 5.5)
    assert entry.held is not None and entry.missed is not None
    assert (entry.held.rate, entry.missed.rate) == (5, 6)
    assert tried[0] == 1
    assert len(set(tried)) == len(tried) <= 5
    whole = entry_of(None, Steps(high=5))
    assert (whole.step, whole.missed) == (5, None)


def test_without_a_step_that_holds_it_is_known_that_none_does(tried: list[int]) -> None:
    entry = entry_of(None, Steps(low=6))
    assert (entry.status, entry.step, entry.promise) == ("exact", None, -math.inf)
    assert entry.missed is not None and entry.missed.rate == 6
    assert tried == [6]


@pytest.mark.parametrize(
    ("standard", "first", "status", "promise"),
    [
        (Standing(3.0, 0), 4, "exact", 5.5),  # an equal score of an earlier place is not beaten
        (Standing(3.0, 2), 3, "exact", 5.5),  # of a later place it is
        (Standing(4.5, 0), 5, "exact", 5.5),
        (Standing(5.0, 0), 6, "beaten", 5.0),
        (Standing(8.0, 2), 8, "beaten", 7.0),
        (Standing(8.0, 0), None, "bounded", 8.0),
        (Standing(0.0, 0), 1, "exact", 5.5),
    ],
)
def test_the_lowest_step_that_would_beat_the_best_is_tried_first(
    tried: list[int], standard: Standing, first: int | None, status: str, promise: float
) -> None:
    entry = entry_of(standard, Steps())
    assert (entry.status, entry.promise) == (status, promise)
    assert tried[:1] == ([] if first is None else [first])
    if status == "beaten":
        assert len(tried) == 1
        assert entry.missed is not None and entry.missed.rate == first


def test_what_its_bound_rules_out_is_not_tried(tried: list[int]) -> None:
    none, refused = entry_of(None, None, rate=0.0), entry_of(None, None)
    assert (none.status, none.promise, none.stretch) == ("impossible", -math.inf, 2.5)
    assert (refused.status, refused.promise, refused.reason) == ("refused", -math.inf, "too few")
    assert tried == []


def test_the_standard_is_that_of_the_last_place_that_counts() -> None:
    ranked = (Standing(3.0, 1), Standing(2.0, 5), Standing(1.0, 0))
    assert threshold(ranked, 1) == ranked[0]
    assert threshold(ranked, 3) == ranked[2]
    assert threshold(ranked, 4) is None
    assert best_of(ranked, 2) == ranked[:2]
    assert Entry(4, "bounded", 1.5).standing == Standing(1.5, 4)


def test_trials_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is known is reused, one that this report has is not counted again."""
    made: list[float] = []

    def trial(*told: Any) -> Outcome:
        rate = told[2]
        made.append(rate)
        return outcome(rate, 1.0, 0.1, 0.01)

    monkeypatch.setattr(elimination, "trial", trial)
    monkeypatch.setattr(elimination, "tables_for", lambda *_: ())
    deployment = small_space().deployment({"device": "h100", "max_model_len": 2048, "replicas": 3})
    report, known = Report(), outcome(2.0, 7.0, 0.1, 0.01)
    key = trial_key(QUESTION, "pools", deployment, 2.0)
    for rate in (1.0, 2.0, 1.0, 2.0):
        found = elimination.ask(QUESTION, {key: known}, "pools", (deployment, rate), report)
        assert found.output_throughput == (7.0 if rate == 2.0 else 1.0)
    assert (made, report.reused, len(report.asked)) == ([1.0], 2, 1)
    (asked,) = report.asked.values()
    assert (asked.pools, asked.replicas, asked.outcome.rate) == ("pools", 3, 1.0)
    assert 0 <= asked.cpu_seconds < 5


def test_bounds_are_found_for_every_question_from_tables_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def tables(*told: Any) -> Any:
        read.append(told[0])
        if len(read) == 2:
            raise InputError("no room")
        return "tables"

    monkeypatch.setattr(elimination, "tables_to_bound", tables)
    one, two = small_space().enumerate().candidates[:2]
    routed = replace(one, index=99, deployment=replace(one.deployment, router="least_outstanding"))
    names = {one.deployment.pools: "pools", two.deployment.pools: "others"}
    monkeypatch.setattr(elimination, "deployment_key", lambda of, perf: f"{names[of.pools]} {perf}")
    monkeypatch.setattr(elimination, "rate_bounds", lambda _, asked, found: (*asked, found))
    other = question(perf="roofline")
    report = work(BoundJob((QUESTION, other), (one, routed, two)))
    assert isinstance(report, elimination.BoundReport)
    bounds: dict[int, Any] = dict(report.bounds)
    assert bounds == dict.fromkeys((one.index, 99), (QUESTION, other, "tables"))
    assert report.refused == {two.index: "no room"}
    assert report.pools == dict.fromkeys((one.index, 99), "pools modelled")
    assert read == [QUESTION, QUESTION]
    assert find_bounds(BoundJob((QUESTION,), ())) == elimination.BoundReport()


def test_what_cannot_run_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise InputError("no such device")

    monkeypatch.setattr(elimination, "deployment_key", refuse)
    contender = Contender(Candidate(4, {}, cast(Any, None)), Bound(9.0, 0.5, 1))
    report = work(Job(QUESTION, cast(Any, Chosen(Steps())), (contender,), None, {}))
    assert isinstance(report, Report)
    (entry,) = report.entries
    assert (entry.index, entry.status, entry.promise, entry.reason) == (4, "refused", -math.inf, "no such device")
    assert 0 <= report.seconds < 60
    assert (report.asked, report.reused) == ({}, 0)


def test_the_first_eight_requests_compile_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def simulated(deployment: Any, few: Any, **how: Any) -> None:
        told.append((deployment, len(few), how))
        raise InputError("is reported later")

    monkeypatch.setattr(elimination, "simulate", simulated)
    (job,) = warm_ups(QUESTION, small_space().enumerate().candidates[:1])
    assert work(job) is None
    how = {"perf": QUESTION.perf, "overheads": QUESTION.overheads}
    assert told == [(job.candidate.deployment, 8, how)]
