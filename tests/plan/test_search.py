"""The search: what brute force finds, with a part of its simulations, whatever the objective and the workers."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plan.planning import chat, question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.objective import EnergyPerToken, LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import Progress, search, search_widening
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints, Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.workers import given, in_turn, processes

SPACE = small_space()
ENUMERATION = SPACE.enumerate(with_price=True)
QUESTION = question(attainment=0.9, tolerance=0.03)
OBJECTIVES: dict[str, Objective] = {
    "rate": RatePerDollar(),
    "cost": LeastForRate(30.0, Constraints()),
    "energy": EnergyPerToken(),
}


def find(objective: Objective, asked: Question = QUESTION, **more: Any) -> SearchResult:
    return search(ENUMERATION, asked, objective, **more)


@pytest.fixture(scope="module")
def brute() -> dict[str, SearchResult]:
    return {name: find(objective, top=len(ENUMERATION.candidates)) for name, objective in OBJECTIVES.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("top", [1, 3])
def test_the_best_are_those_of_brute_force(brute: dict[str, SearchResult], name: str, top: int) -> None:
    found, whole = find(OBJECTIVES[name], top=top), brute[name]
    assert [(e.index, e.promise) for e in found.ranking] == [(e.index, e.promise) for e in whole.ranking[:top]]
    assert found.trials < whole.trials
    for index, entry in found.entries.items():
        assert entry.promise >= whole.entries[index].promise


def test_every_candidate_has_an_entry(brute: dict[str, SearchResult]) -> None:
    for answer in (find(OBJECTIVES["rate"]), *brute.values()):
        assert set(answer.entries) == {candidate.index for candidate in ENUMERATION.candidates}
        assert answer.counts().total() == len(ENUMERATION.candidates)


def test_few_simulations_decide(brute: dict[str, SearchResult]) -> None:
    assert find(OBJECTIVES["rate"]).trials <= 0.25 * brute["rate"].trials
    assert find(OBJECTIVES["cost"]).trials <= 0.25 * brute["cost"].trials


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_winner_holds_and_fails_one_step_further(name: str) -> None:
    answer = find(OBJECTIVES[name])
    best = answer.best
    assert best is not None
    assert best.held is not None and best.held.met
    assert best.missed is None or not best.missed.met
    row = answer.to_json()["ranking"][0]
    assert row["value"] > 0
    assert row["request_rate"] == pytest.approx(answer.measured(best)[1])


def test_workers_change_nothing() -> None:
    """Not even which trials are simulated."""
    with Store() as first, Store() as second:
        one = find(OBJECTIVES["rate"], top=2, team=in_turn(), store=first)
        two = find(OBJECTIVES["rate"], top=2, team=processes(2), store=second)
        assert repr(one.entries) == repr(two.entries)
        assert {row["key"] for row in first.trials()} == {row["key"] for row in second.trials()}


def test_an_executor_of_your_own_runs_it() -> None:
    assert find(OBJECTIVES["cost"], team=given(in_turn().make(), 3)).best is not None


def test_what_is_stored_is_not_simulated_again() -> None:
    with Store() as store:
        first = find(OBJECTIVES["rate"], store=store)
        again = find(OBJECTIVES["rate"], store=store)
        assert (again.trials, again.reused) == (0, first.trials)
        assert again.best == first.best
        assert len(store.trials()) == first.trials


def test_bounds_under_other_loads_are_found_at_the_same_time() -> None:
    other = question(chat(seed=7), attainment=0.9, tolerance=0.03)
    with Store() as store:
        find(OBJECTIVES["rate"], store=store, others=(other,))
        others = store.bounds(other.digest)
        assert len(others) == len(ENUMERATION.candidates)
        again = find(OBJECTIVES["rate"], other, store=store)
    alone = find(OBJECTIVES["rate"], other)
    assert repr(again.contenders) == repr(alone.contenders)
    assert repr(again.entries) == repr(alone.entries)


def test_bounds_with_other_batch_times_are_not_taken_from_these_tables() -> None:
    other = replace(QUESTION, perf="roofline")
    with Store() as store:
        find(OBJECTIVES["rate"], store=store, others=(other, QUESTION))
        assert store.bounds(other.digest) == {}
        assert len(store.bounds(QUESTION.digest)) == len(ENUMERATION.candidates)


@dataclass(frozen=True)
class Liked:
    """As much of a result as the widening looks at."""

    best: Any
    contenders: dict[int, Any]
    trials: int = 3
    reused: int = 2
    seconds: float = 0.5


@pytest.mark.parametrize(("open_axes", "sizes"), [({"max_num_seqs"}, (16, 32, 64, 128)), (set(), (16, 32))])
def test_a_best_at_the_end_of_an_open_axis_is_searched_further(
    monkeypatch: pytest.MonkeyPatch, open_axes: set[str], sizes: tuple[int, ...]
) -> None:
    """A search that likes 64 requests best, and then as many as there are."""
    asked = []

    def liked(enumeration: Enumeration, *_: object, top: int, **__: object) -> Any:
        asked.append((top, tuple(one.settings["max_num_seqs"] for one in enumeration.candidates)))
        best = min(enumeration.candidates, key=lambda one: abs(one.settings["max_num_seqs"] - 64))
        contenders = {one.index: SimpleNamespace(candidate=one) for one in enumeration.candidates}
        return Liked(best, contenders)

    monkeypatch.setattr("windtunnel.plan.search.search", liked)
    space = replace(
        small_space(device=("h100",), tensor_parallel_size=(1,), max_num_seqs=(16, 32), max_num_batched_tokens=(256,)),
        open=frozenset(open_axes),
    )
    found = search_widening(space, QUESTION, OBJECTIVES["rate"], top=None)
    assert (found.trials, found.reused, found.seconds) == (3 * len(asked), 2, 0.5 * len(asked))
    assert asked == [(most, sizes[:most]) for most in range(2, len(sizes) + 1)]


def test_a_space_of_which_nothing_can_run_says_why() -> None:
    with pytest.raises(InputError, match="none of 3 configurations can run: 3 × "):
        search_widening(
            small_space(device=("l40s",), tensor_parallel_size=(3,), max_num_batched_tokens=(256,)),
            question(),
            RatePerDollar(),
        )


def test_impossible_limits_say_by_how_much() -> None:
    answer = find(OBJECTIVES["rate"], question(goodput=("ttft:1",)))
    assert answer.best is None
    assert answer.counts() == {"impossible": len(ENUMERATION.candidates)}
    closest = answer.closest()
    assert closest is not None and closest[1] > 1
    assert closest[1] == min(entry.stretch for entry in answer.entries.values())


def test_limits_that_fail_only_in_simulation_say_so_too() -> None:
    """Two at a time: alone every request keeps its limit, others another one it does not."""
    workload = chat(100)
    pairs = replace(workload, arrival=np.repeat(workload.arrival[::2], 2))
    alone = min(entry.stretch for entry in find(OBJECTIVES["rate"], question(pairs, ("ttft:1",))).entries.values())
    answer = find(OBJECTIVES["rate"], question(pairs, (f"ttft:{1.01 * alone}",), attainment=1.0))
    assert answer.best is None
    closest = answer.closest()
    assert closest is not None and 1 < closest[1] < 10


def test_constraints_limit_the_replicas() -> None:
    free = find(LeastForRate(60.0, Constraints()))
    best = free.best
    assert best is not None
    gpus = free.measured(best)[0].gpus
    tight = find(LeastForRate(60.0, Constraints(max_gpus=gpus - 1), count_gpus=True))
    fewer = tight.best
    assert fewer is None or tight.measured(fewer)[0].gpus < gpus


def test_progress_is_told() -> None:
    seen: list[Progress] = []
    answer = find(OBJECTIVES["rate"], watch=lambda progress: seen.append(replace(progress)))
    assert seen[-1].trials == answer.trials
    assert seen[-1].by_status == dict(answer.counts())
    assert seen[-1].best == answer.best
