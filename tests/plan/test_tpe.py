"""Optuna's suggestions, against the exact search; and what becomes of suggestions that are chosen."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from plan.chosen import outcome
from plan.planning import question, small_space
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import Asked, BoundJob, BoundReport, Entry, Job, Report, Standing
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.store import Store
from windtunnel.plan.tpe import suggest


def test_optuna_finds_a_good_one_in_few_suggestions() -> None:
    pytest.importorskip("optuna")
    space = small_space()
    exact = search(space.enumerate(), question(), RatePerDollar()).best
    answer = suggest(space, question(), RatePerDollar(), suggestions=20)
    assert exact is not None and answer.best is not None
    assert 0.8 * exact.promise <= answer.best.promise <= exact.promise
    assert len(answer.entries) <= 20
    by_index = {candidate.index: candidate.settings for candidate in space.enumerate().candidates}
    found = {index: contender.candidate.settings for index, contender in answer.contenders.items()}
    assert found == {index: by_index[index] for index in found}


class Pruned(Exception):  # noqa: N818 - Optuna's name
    """As Optuna's of a suggestion without a value."""


class Sampler:
    """As much of Optuna as is used: suggests these places on the axes, and notes the values."""

    def __init__(self, places: list[tuple[int, ...]]) -> None:
        self.places, self.values = places, list[float | None]()
        self.TrialPruned, self.samplers, self.told = Pruned, self, list[Any]()
        self.logging = SimpleNamespace(WARNING=30, set_verbosity=lambda _: None)

    def TPESampler(self, seed: int | None = None) -> object:  # noqa: N802 - Optuna's name
        return "sampler", seed

    def create_study(self, **settings: object) -> "Sampler":
        self.told.append(settings)
        return self

    def optimize(self, value: Any, n_trials: int | None = None) -> None:
        self.told.append(n_trials)
        for places in self.places:
            rest = list(places)
            one = SimpleNamespace(suggest_categorical=lambda _, choices, rest=rest: list(choices)[rest.pop(0)])
            try:
                self.values.append(value(one))
            except Pruned:
                self.values.append(None)


def test_suggestions_are_tried_against_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 × 3 × 2 points one is tried twice, one is beaten, one holds nowhere, and three cannot run: three GPUs divide
    no heads, four are too many, and one is refused a bound."""
    axes = {"device": ("h100", "l40s"), "tensor_parallel_size": (1, 3, 4), "max_num_seqs": (8, 16)}
    space = replace(small_space(), axes=axes | {"max_num_batched_tokens": (1024,)}, constraints=Constraints(max_gpus=2))
    places: list[tuple[int, ...]] = [
        (0, 0, 1, 0),
        (1, 0, 0, 0),
        (0, 0, 1, 0),
        (1, 0, 1, 0),
        (0, 1, 0, 0),
        (0, 2, 0, 0),
        (0, 0, 0, 0),
    ]
    entries = {
        1: Entry(1, "exact", 2.0, 3),
        6: Entry(6, "beaten", 1.5),
        7: Entry(7, "exact", -math.inf, missed=outcome(1, 1.0, 1.0, 1.0)),
    }
    jobs: list[Job] = []

    def find(job: BoundJob) -> BoundReport:
        (candidate,) = job.candidates
        if candidate.index == 0:
            return BoundReport(refused={0: "no"})
        bound = Bound(float(candidate.index), 0.5, 1)
        return BoundReport(bounds={candidate.index: (bound,)}, pools={candidate.index: "pools"})

    def eliminate(job: Job) -> Report:
        jobs.append(job)
        entry = entries[job.contenders[0].candidate.index]
        asked = {f"key {entry.index}": Asked("pools", 1, outcome(1, 1.0, 0.1, 0.01), 0.5)}
        return Report(entries=[entry], asked=asked, reused=2)

    monkeypatch.setattr("windtunnel.plan.tpe.find_bounds", find)
    monkeypatch.setattr("windtunnel.plan.tpe.eliminate", eliminate)
    sampler = Sampler(places)
    monkeypatch.setitem(sys.modules, "optuna", sampler)
    asked, objective = question(), RatePerDollar()
    with Store() as store:
        found = suggest(space, asked, objective, suggestions=9, store=store, seed=5)
        assert {row["key"] for row in store.trials()} == {"key 1", "key 6", "key 7"}
    assert sampler.told == [{"direction": "maximize", "sampler": ("sampler", 5)}, 9]
    assert sampler.values == [2.0, 1.5, 2.0, None, None, None, None]
    assert [job.standard for job in jobs] == [None, Standing(2.0, 1), Standing(2.0, 1)]
    assert [len(job.known) for job in jobs] == [0, 1, 2]
    assert found.entries == entries
    assert {index: one.bound.rate for index, one in found.contenders.items()} == {1: 1.0, 6: 6.0, 7: 7.0}
    points = list(space.points())
    assert {index: one.candidate.settings for index, one in found.contenders.items()} == {
        index: points[index] for index in (1, 6, 7)
    }
    assert [one.index for one in found.enumeration.candidates] == [1, 6, 7]
    assert sorted(found.enumeration.pruned.values()) == [1, 1, 1]
    assert (found.enumeration.pruned["more than max_gpus=2"], found.enumeration.pruned["no"]) == (1, 1)
    assert (found.trials, found.reused, found.top, found.best) == (3, 6, 1, entries[1])
    assert (found.question, found.objective) == (asked, objective)
    assert math.isnan(found.seconds)


def test_the_sampler_begins_at_zero_and_a_store_is_made_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler([])
    monkeypatch.setitem(sys.modules, "optuna", sampler)
    found = suggest(small_space(), question(), RatePerDollar(), suggestions=1)
    assert sampler.told == [{"direction": "maximize", "sampler": ("sampler", 0)}, 1]
    assert (found.entries, found.trials, found.reused) == ({}, 0, 0)
