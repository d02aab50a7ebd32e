"""Optuna's suggestions, against the exact search."""

import pytest

from plan.planning import question, small_space
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
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
