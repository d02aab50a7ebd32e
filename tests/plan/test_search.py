"""The search: what brute force finds, with a part of its simulations, whatever the objective and the workers."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from plan.chosen import outcome
from plan.planning import chat, question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import (
    Asked,
    BoundJob,
    BoundReport,
    Contender,
    Entry,
    Job,
    Report,
    Standing,
    WarmUp,
)
from windtunnel.plan.objective import EnergyPerToken, LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import Progress, _Hunt, search, search_widening
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints, Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.workers import InTurn, Team, given, in_turn, processes

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
    undecided: int = 0


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


# --- the parts of a search, by hand -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worth:
    """An objective whose candidates can reach 1 to the rate of their bound, each worth itself."""

    low: int = 1
    high: int = 1

    def climb(self, _: object, bound: Bound, __: object) -> "Worth | None":
        return Worth(1, int(bound.rate)) if bound.rate else None

    def promise(self, step: int) -> float:
        return float(step)

    @property
    def hope(self) -> float:
        return self.promise(self.high)

    def shortage(self, *_: object) -> str:
        return ""


def hunt(rates: tuple[float, ...], top: int = 1, team: Team | None = None, **more: Any) -> _Hunt:
    """A search for the best of candidates whose bounds are known."""
    candidates = ENUMERATION.candidates[: len(rates)]
    pruned = Counter({"does not fit": 5})
    found = _Hunt(
        Enumeration(candidates, pruned), QUESTION, cast(Any, Worth()), top, more.pop("store", None) or Store(),
        team or in_turn(), more.pop("watch", None),
    )  # fmt: skip
    for place, (candidate, rate) in enumerate(zip(candidates, rates, strict=True)):
        found.contenders[candidate.index] = Contender(candidate, Bound(rate, 1.5 if rate == 0 else 0.5, 1))
        found.pools[candidate.index] = f"pools {place}"
    return found


def test_jobs_take_their_time_but_leave_enough_for_all_workers() -> None:
    """A quarter of a second, over a network a whole one; of what is left half for each worker, 64 at most."""
    two, far = hunt((), team=Team(InTurn, 2)), hunt((), team=Team(InTurn, 2, remote=True))
    for pace, left, size, remotely in (
        (0.0, 1000, 1, 1), (0.01, 1000, 25, 64), (0.05, 1000, 5, 20), (0.001, 1000, 64, 64), (0.01, 40, 10, 10),
        (0.01, 7, 1, 1), (0.01, 0, 1, 1), (9.0, 1000, 1, 1),
    ):  # fmt: skip
        two.pace = far.pace = pace
        assert (two._chunk(left), far._chunk(left)) == (size, remotely)
    assert (hunt((), top=0).top, hunt((), top=3).top) == (1, 3)


def test_rounds_double_at_every_second_one_and_meet_one_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """By promise, of equals the first; the third to be tried holds 12, so those of 12 and less are not tried."""
    rates = (10.0, 20.0, 0.0, 30.0, 20.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 12.5, 18.0)
    found = hunt(rates)
    order = [candidate.index for candidate in ENUMERATION.candidates[: len(rates)]]
    rounds: list[list[int]] = []

    def tried(waiting: list[Contender], standard: Standing | None) -> None:
        assert standard == (Standing(12.0, order[4]) if len(rounds) >= 3 else None)
        rounds.append([order.index(one.candidate.index) for one in waiting])
        if len(rounds) == 3:
            found.standards = (Standing(12.0, order[4]),)
        for one in waiting:
            found.entries[one.candidate.index] = Entry(one.candidate.index, "beaten", 1.0)

    monkeypatch.setattr(found, "_round", tried)
    found.eliminate()
    assert rounds == [[3], [1], [4, 12], [10, 9], [8, 7, 6]]
    left = {order.index(index): entry for index, entry in found.entries.items() if entry.status != "beaten"}
    assert {place: (entry.status, entry.promise) for place, entry in left.items()} == {
        0: ("bounded", 10.0), 2: ("impossible", -math.inf), 5: ("bounded", 12.0), 11: ("bounded", 12.0),
    }  # fmt: skip


def test_what_comes_back_is_counted_kept_and_shown() -> None:
    seen: list[Progress] = []
    with Store() as store:
        found = hunt((9.0, 8.0, 7.0, 0.0), top=2, store=store, watch=lambda one: seen.append(replace(one)))
        first, second, third, _ = found.contenders.values()
        places = [one.candidate.index for one in (first, second, third)]
        assert store.claim(QUESTION.digest, ["pools 0", "pools 1", "pools 2"]) == {"pools 0", "pools 1", "pools 2"}
        entries = [
            Entry(places[0], "exact", 5.0, 2), Entry(places[1], "exact", -math.inf), Entry(places[2], "exact", 6.0, 3),
        ]  # fmt: skip
        asked = {name: Asked("pools 0", 1, outcome(1, 1.0, 0.1, 0.01), 0.5) for name in "abc"}
        job = Job(QUESTION, cast(Any, Worth()), (first, second, third), None, {})
        found._take(job, Report(entries=entries, asked=asked, reused=4, seconds=0.6))
        assert found.pace == pytest.approx(0.2), "seconds a candidate"
        assert found.standards == (Standing(6.0, places[2]), Standing(5.0, places[0]))
        assert {row["key"] for row in store.trials(QUESTION.digest)} == {"a", "b", "c"}
        assert store._connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)
        found._show()
        (shown,) = seen
        assert (shown.candidates, shown.cannot_run, shown.bounds, shown.trials, shown.reused) == (4, 5, 4, 3, 4)
        assert (shown.by_status, shown.best, shown.lost_workers) == ({"exact": 3}, entries[2], 0)


def test_candidates_that_another_search_asks_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three at a time the second is another's: it stays in front of the rest, and where all are, nothing is handed
    in."""
    with Store() as store:
        found = hunt((9.0, 8.0, 7.0, 6.0), store=store)
        waiting = list(found.contenders.values())
        monkeypatch.setattr(found, "_chunk", lambda _: 3)
        jobs: list[Job] = []
        monkeypatch.setattr(found.workers, "submit", jobs.append)
        theirs = {"pools 1"}
        monkeypatch.setattr(store, "claim", lambda _, pools: set(pools) - theirs)
        claimed, left = found._hand_in(waiting, Standing(1.0, 0))
        assert (claimed, left) == (True, [waiting[1], waiting[3]])
        (job,) = jobs
        assert (job.contenders, job.standard, job.known) == ((waiting[0], waiting[2]), Standing(1.0, 0), {})
        theirs |= {"pools 3"}
        assert found._hand_in(left, None) == (False, left)
        assert len(jobs) == 1


def test_bounds_are_kept_for_every_question_and_refusals_are_said() -> None:
    other = question(chat(seed=7), attainment=0.9, tolerance=0.03)
    with Store() as store:
        found = hunt((), store=store)
        one, two = ENUMERATION.candidates[:2]
        bounds = (Bound(3.0, 0.5, 1), Bound(4.0, 0.6, 1))
        report = BoundReport({one.index: bounds}, {two.index: "no room"}, {one.index: "pools"})
        found._take_bounds(BoundJob((QUESTION, other), (one, two)), report)
        assert found.contenders == {one.index: Contender(one, bounds[0])}
        assert found.pools == {one.index: "pools"}
        refused = found.entries[two.index]
        assert (refused.status, refused.promise, refused.reason) == ("refused", -math.inf, "no room")
        for asked, bound in zip((QUESTION, other), bounds, strict=True):
            assert list(store.bounds(asked.digest).values()) == [("pools", bound)]


@pytest.mark.parametrize(("workers", "warmed"), [(1, 0), (2, 1)])
def test_kernels_are_compiled_once_where_several_would(
    monkeypatch: pytest.MonkeyPatch, workers: int, warmed: int
) -> None:
    jobs: list[Any] = []

    def work(job: Any) -> Any:
        jobs.append(job)
        if isinstance(job, WarmUp):
            return None
        return BoundReport(
            {one.index: (Bound(2.0, 0.5, 1),) for one in job.candidates},
            pools={one.index: "pools" for one in job.candidates},
        )

    monkeypatch.setattr("windtunnel.plan.search.work", work)
    with Store() as store:
        for times in (1, 0):
            found = _Hunt(
                Enumeration(ENUMERATION.candidates[:5], Counter()), QUESTION, OBJECTIVES["rate"], 1, store,
                Team(InTurn, workers), None,
            )  # fmt: skip
            jobs.clear()
            found.find_bounds([], lambda: False)
            assert [isinstance(job, WarmUp) for job in jobs[: warmed * times]] == [True] * warmed * times
            asked = sorted(one.index for job in jobs[warmed * times :] for one in job.candidates)
            assert asked == [one.index for one in ENUMERATION.candidates[:5]] * times, "then they are in the store"
            assert sorted(found.contenders) == [one.index for one in ENUMERATION.candidates[:5]]


def test_claims_are_renewed_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("windtunnel.plan.search.time.monotonic", lambda: clock[0])
    found, renewed = hunt(()), list[float]()
    monkeypatch.setattr(found.store, "renew", lambda: renewed.append(clock[0]))
    for clock[0] in (104.9, 105.1, 109.0, 110.2):
        found._show()
    assert renewed == [105.1, 110.2]


def test_a_search_that_is_stopped_says_what_it_left() -> None:
    """Whenever it is stopped: what was decided stands, and no candidate that is left promises more than is said."""
    looks: list[int] = []

    def after(most: float) -> Callable[[], bool]:
        looks.clear()

        def stop() -> bool:
            looks.append(1)
            return len(looks) > most

        return stop

    whole = find(OBJECTIVES["cost"], stop=after(math.inf))
    total = len(looks)
    assert whole.undecided == 0 and whole.could_be is None and whole.best is not None
    for most in (0, total // 2, total - 3):
        found = find(OBJECTIVES["cost"], stop=after(most))
        assert found.undecided == len(ENUMERATION.candidates) - len(found.entries)
        if len(found.contenders) == len(ENUMERATION.candidates) and found.undecided:
            own = found.best.promise if found.best else -math.inf
            assert found.could_be is not None and max(found.could_be, own) >= whole.best.promise
    assert find(OBJECTIVES["cost"], stop=after(0)).undecided == len(ENUMERATION.candidates)


def test_a_search_without_time_for_all_bounds_has_an_answer() -> None:
    looks: list[int] = []

    def enough() -> bool:
        looks.append(1)
        return len(looks) > 1

    def over() -> bool:
        return len(looks) > 1 and len(hurried) > 6

    hurried: list[int] = []
    whole = find(OBJECTIVES["cost"])
    found = find(
        OBJECTIVES["cost"], bounds_until=enough, watch=lambda progress: hurried.append(progress.bounds), stop=over
    )
    assert found.best is not None and found.undecided > 0
    assert found.best.promise == max(whole.entries[index].promise for index in found.entries)
    slow = find(OBJECTIVES["cost"], bounds_until=enough)
    assert slow.undecided == 0
    assert slow.best is not None and whole.best is not None and slow.best.promise == whole.best.promise
