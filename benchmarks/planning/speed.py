"""Speed of a search by several teams: what a simulation costs when more workers run at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from windtunnel.plan.objective import Objective
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.space import Candidate, Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.trial import trial
from windtunnel.plan.workers import Lasting, Team

AGAIN = 100
"""Repeats of the trial that shows what the cores alone do."""
HEADS = ("workers", "simulations", "wall s", "CPU ms per simulation", "growth", "one trial again", "speed-up")


@dataclass(frozen=True)
class Speed:
    """One search of a space on warm workers."""

    simulations: int
    wall: float
    cpu: float
    """CPU seconds of a simulation, tables read from disk included."""
    again: float
    """CPU seconds of one and the same trial while all workers repeat it: nothing but the cores is shared."""


@dataclass(frozen=True, eq=False)
class Race:
    """A search, to be run by one team after the other."""

    enumeration: Enumeration
    question: Question
    objective: Objective

    def run(self, team: Team) -> Speed:
        """Every candidate to the end, then one trial again and again on every worker."""
        with Store() as store:
            began = time.perf_counter()
            top = len(self.enumeration.candidates)
            found = search(self.enumeration, self.question, self.objective, top=top, team=team, store=store)
            wall = time.perf_counter() - began
            cpu = sum(row["cpu_seconds"] for row in store.trials())
        executor, candidate = team.make(), self.enumeration.candidates[0]
        alike = [executor.submit(repeated, self.question, candidate) for _ in range(team.workers)]
        again = sum(future.result() for future in alike) / len(alike)
        return Speed(found.trials, wall, cpu / found.trials, again)


def repeated(question: Question, candidate: Candidate) -> float:
    """CPU seconds of one trial of a candidate, the mean of many."""
    trial(question, candidate.deployment, 1.0)
    began = time.process_time()
    for _ in range(AGAIN):
        trial(question, candidate.deployment, 1.0)
    return (time.process_time() - began) / AGAIN


def speed(race: Race, repeats: int, teams: Sequence[tuple[str, Team]]) -> None:
    """Print the same search by several teams in turn, on warm workers: the least of all repeats, since what others do
    on the machine only adds."""
    lasting = [(name, _lasting(team)) for name, team in teams]
    for _, team in lasting:
        race.run(team)
    measured = [[race.run(team) for _, team in lasting] for _ in range(repeats)]
    print(f"| executor | {' | '.join(HEADS)} |")
    print(f"|---|{'---:|' * len(HEADS)}")
    best = [
        Speed(runs[0].simulations, *(min(getattr(run, name) for run in runs) for name in ("wall", "cpu", "again")))
        for runs in zip(*measured, strict=True)
    ]
    for (name, team), one in zip(lasting, best, strict=True):
        print(
            f"| {name} | {team.workers} | {one.simulations} | {one.wall:.2f} | {1e3 * one.cpu:.2f} "
            f"| {one.cpu / best[0].cpu - 1:+.1%} | {one.again / best[0].again - 1:+.1%} "
            f"| {best[0].wall / one.wall:.2f} |",
            flush=True,
        )


def _lasting(team: Team) -> Team:
    executor = Lasting(team.make())
    return Team(lambda: executor, team.workers, team.remote)
