"""Crew: jobs under way on an executor, handed in again when workers die."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

from windtunnel.plan.executors import Team, WorkerLost

Job = TypeVar("Job")
Result = TypeVar("Result")

BROKEN = (BrokenProcessPool, EOFError, OSError)
"""What an executor raises whose processes are gone; the latter two while it starts one."""
ATTEMPTS = 5
"""How often a job is handed in before the search gives up on it."""


class Crew(Generic[Job, Result]):
    """Runs ``work(job)`` for jobs on a team; a broken executor is replaced and its jobs are handed in again."""

    def __init__(self, team: Team, work: Callable[[Job], Result], executor: Executor | None = None) -> None:
        self.team, self.work = team, work
        self.executor = executor or team.make()
        self.under_way: dict[Future[Result], tuple[Job, int]] = {}
        self.lost = 0
        """Executors that broke."""

    def submit(self, job: Job, attempt: int = 1) -> None:
        """Hand a job in; to a new executor where this one has just broken."""
        try:
            self.under_way[self.executor.submit(self.work, job)] = (job, attempt)
        except BROKEN as error:
            if attempt >= ATTEMPTS:
                raise WorkerLost(f"no process takes jobs any more: {error}") from error
            self._replace()
            self.submit(job, attempt + 1)

    @property
    def room(self) -> int:
        """Jobs that may be handed in before all workers are busy and have one more waiting."""
        return max(0, self.team.workers + 1 - len(self.under_way)) if self.team.workers > 1 else 1 - len(self.under_way)

    def results(self, patience: float) -> Iterator[tuple[Job, Result]]:
        """What has come back within so many seconds, at least one result if there is one by then.

        Raises whatever a job raised, and WorkerLost when workers die of the same job again and again.
        """
        done, _ = wait(self.under_way, timeout=patience, return_when=FIRST_COMPLETED)
        broken = [future for future in done if isinstance(future.exception(), BrokenProcessPool | WorkerLost)]
        for future in done:
            if future not in broken:
                job, _ = self.under_way.pop(future)
                yield job, future.result()
        if broken:
            self._again()

    def _again(self) -> None:
        """Replace the executor and hand in everything that it had."""
        jobs = list(self.under_way.values())
        self.under_way.clear()
        self._replace()
        for job, attempt in jobs:
            if attempt >= ATTEMPTS:
                raise WorkerLost(f"workers died {ATTEMPTS} times at the same jobs: is there too little memory?")
            self.submit(job, attempt + 1)

    def _replace(self) -> None:
        self.lost += 1
        self.executor.shutdown(wait=False, cancel_futures=True)
        time.sleep(0.05)
        self.executor = self.team.make()

    def stop(self) -> None:
        """Forget what has not begun, and let the executor go."""
        self.executor.shutdown(wait=False, cancel_futures=True)
