"""Executors: where jobs run. Any ``concurrent.futures.Executor`` will do; a team can make a new one when it breaks."""

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

from windtunnel.errors import InputError

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class WorkerLost(RuntimeError):  # noqa: N818 - it says what happened
    """A worker died with a job, through no fault of the job's."""


@dataclass(frozen=True)
class Team:
    """Executors of one kind, and how many jobs they run at a time."""

    make: Callable[[], Executor]
    workers: int
    remote: bool = False
    """Jobs travel over a network: bigger ones pay."""

    def __post_init__(self) -> None:
        """Refuse a team of nobody."""
        if self.workers < 1:
            raise InputError(f"workers={self.workers}: must be ≥ 1")


def processes(workers: int | None = None) -> Team:
    """Processes on this machine, one for each of its CPUs by default.

    They fork from a clean server that has imported what jobs need, so that no lock of a running thread is copied.
    """
    count = workers if workers is not None else available_cpus()

    def make() -> Executor:
        context = get_context("forkserver")
        context.set_forkserver_preload(["windtunnel.plan.race"])
        return ProcessPoolExecutor(count, mp_context=context)

    return Team(make, count)


def in_turn() -> Team:
    """No other process: jobs run where they are submitted, one after the other."""
    return Team(InTurn, 1)


def given(executor: Executor, workers: int) -> Team:
    """An executor of your own; when it breaks, the search ends with its error."""
    return Team(lambda: executor, workers)


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InTurn(Executor):
    """Runs a job when it is submitted."""

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """The finished future of a call."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
