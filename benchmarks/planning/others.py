"""Other searches: points drawn at random, and Optuna's TPE (extra ``optuna``), with ten times as many simulations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.errors import InputError
from windtunnel.plan.elimination import BoundJob, Contender, Job, Standing, eliminate, find_bounds
from windtunnel.plan.objective import Objective
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.space import Candidate
from windtunnel.plan.tpe import suggest
from windtunnel.plan.workers import Team

if TYPE_CHECKING:
    from benchmarks.planning.__main__ import Case

TIMES = 10
"""Simulations of another search for each of ours; one suggestion of TPE counts as one."""
SEEDS = range(3)


def at_random(
    candidates: Sequence[Candidate], question: Question, objective: Objective, simulations: int, seed: int
) -> tuple[float, int]:
    """The best score of candidates in random order, each tried as far as it may beat the best, and how many simulations
    that took: as many as allowed, or those of all candidates."""
    best: Standing | None = None
    tried = 0
    for place in np.random.default_rng(seed).permutation(len(candidates)):
        one = candidates[int(place)]
        found = find_bounds(BoundJob((question,), (one,)))
        if one.index in found.bounds:
            report = eliminate(Job(question, objective, (Contender(one, found.bounds[one.index][0]),), best, {}))
            tried += len(report.asked)
            entry = report.entries[0]
            if entry.status == "exact" and entry.step is not None and entry.standing.beats(best):
                best = entry.standing
        if tried >= simulations:
            break
    return (best.score if best else -np.inf), tried


def others(cases: "Sequence[Case]", requests: int, team: Team) -> None:
    """A row for each space: our best, and by how much the others' are worse; of TPE nothing where it is missing."""
    print(
        "| space | points | ours: simulations, value | at random: simulations, worse by | TPE: simulations, worse by |"
    )
    print("|---|---:|---:|---:|---:|")
    for case in cases:
        asked, enumeration = case.question(requests), case.space.enumerate(with_price=case.objective.needs_price)
        found = search(enumeration, asked, case.objective, team=team)
        assert found.best is not None
        best, most = found.best.promise, TIMES * found.trials
        drawn = [at_random(enumeration.candidates, asked, case.objective, most, seed) for seed in SEEDS]
        try:
            answers = [suggest(case.space, asked, case.objective, suggestions=most, seed=seed) for seed in SEEDS]
        except InputError:
            answers = []
        parzen = [(one.best.promise if one.best else -np.inf, one.trials) for one in answers]
        cells = [
            f"{', '.join(str(count) for _, count in runs)}: {', '.join(_worse(best, score) for score, _ in runs)}"
            for runs in (drawn, parzen)
        ]
        value = f"{found.trials}, {case.objective.value(best):.4g} {case.objective.unit}"
        print(
            f"| {case.space.model}, {case.trace}, {case.objective.name} | {enumeration.size} | {value} "
            f"| {' | '.join(cells)} |",
            flush=True,
        )


def _worse(best: float, score: float) -> str:
    """By how much a score is below the best; costs are negative scores."""
    if not np.isfinite(score):
        return "nothing found"
    return f"{(best - score) / abs(best):.1%}"
