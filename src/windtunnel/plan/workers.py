"""Workers: where jobs run. Processes, Ray or any ``concurrent.futures.Executor``; a broken one is replaced.

Ray is the extra ``ray``; it is imported only by those who ask for it.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from threading import Lock, Thread, local
from traceback import format_exception
from typing import Any, Generic, ParamSpec, TypeVar, cast

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class WorkerLost(RuntimeError):  # noqa: N818 - it says what happened
    """A worker died with a job, through no fault of the job's."""


@dataclass(frozen=True)
class Team:
    """A way to make executors, and how many jobs each runs at a time."""

    make: Callable[[], Executor]
    workers: int
    remote: bool = False
    """Jobs travel over a network, so larger ones pay off."""

    def __post_init__(self) -> None:
        """Refuse a team without workers."""
        if self.workers < 1:
            raise InputError(f"workers={self.workers}: must be ≥ 1")


def processes(workers: int | None = None) -> Team:
    """Processes on this machine, by default one per CPU."""
    count = workers if workers is not None else available_cpus()
    return Team(partial(Processes, count), count)


class Processes(Executor):
    """Runs jobs in processes, each of which has a thread here and a pipe between them.

    They share no lock and no queue: one that dies, wherever it was, closes its pipe, and only its job is lost. Of
    ``ProcessPoolExecutor`` all would wait for the rest of a result that was half written, or for a lock. Processes
    fork from a clean server that has imported what jobs need, so that no lock of a running thread is copied.
    """

    def __init__(self, count: int) -> None:
        self._threads, self._own, self._lock = ThreadPoolExecutor(count), local(), Lock()
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["windtunnel.plan.elimination"])
        self._seen, self._life = self._context.Pipe(duplex=False)
        """The processes end when the second, which this one holds alone, is closed: by it, or because it ends."""

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """The future of a call; BrokenProcessPool when the process ends before it."""
        return self._threads.submit(self._run, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after their jobs if ``wait``, at once otherwise."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        self._life.close()

    def _run(self, job: Callable[[], Result]) -> Result:
        own = self._own.__dict__
        try:
            if "pipe" not in own:
                own["pipe"] = self._start()
            own["pipe"].send(job)
            result, error = own["pipe"].recv()
        except (EOFError, OSError) as gone:
            own.clear()
            raise BrokenProcessPool("a process ended before its job") from gone
        if error is not None:
            raise error
        return cast(Result, result)

    def _start(self) -> Connection:
        with self._lock:
            ours, theirs = self._context.Pipe()
            self._context.Process(target=serve, args=(theirs, self._seen), daemon=True).start()
            theirs.close()
        return ours


def serve(jobs: Connection, life: Connection) -> None:
    """Run the jobs of a pipe; end when the other end of ``life`` is closed, in the middle of a job as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began the jobs hears of it

    def watch() -> None:
        wait_for([life])
        os._exit(1)

    Thread(target=watch, daemon=True).start()
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        try:
            jobs.send((job(), None))
        except BaseException as error:  # the job's, or of a result that cannot be sent
            error.add_note("".join(format_exception(error)))
            jobs.send((None, error))


class Lasting(Executor):
    """An executor that outlives the searches that use it, so that its workers stay warm."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand a call on."""
        return self.executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stay."""


@contextmanager
def lasting(team: Team) -> Iterator[Team]:
    """A team whose workers serve one search after the other. What a search that ends leaves behind is done first."""
    executor = team.make()
    try:
        yield Team(lambda: Lasting(executor), team.workers, team.remote)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def in_turn() -> Team:
    """No other process: jobs run in this one, one after the other."""
    return Team(InTurn, 1)


def given(executor: Executor, workers: int) -> Team:
    """Your own executor; when it breaks, the search ends with its error."""
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


Job = TypeVar("Job")

BROKEN = (BrokenProcessPool, EOFError, OSError)
"""What an executor raises whose processes are gone; the latter two while it starts one."""
ATTEMPTS = 5
"""How often a job is submitted before the search gives up on it."""


class Workers(Generic[Job, Result]):
    """Runs ``work(job)`` on a team; a broken executor is replaced and its jobs are submitted again."""

    def __init__(self, team: Team, work: Callable[[Job], Result], executor: Executor | None = None) -> None:
        self.team, self.work = team, work
        self.executor = executor or team.make()
        self.under_way: dict[Future[Result], tuple[Job, int]] = {}
        self.lost = 0
        """Executors that broke."""

    def submit(self, job: Job, attempt: int = 1) -> None:
        """Submit a job; to a new executor if this one has just broken."""
        try:
            self.under_way[self.executor.submit(self.work, job)] = (job, attempt)
        except BROKEN as error:
            if attempt >= ATTEMPTS:
                raise WorkerLost(f"no process takes jobs any more: {error}") from error
            self._replace()
            self.submit(job, attempt + 1)

    @property
    def room(self) -> int:
        """How many more jobs keep all workers busy, with one waiting."""
        return max(0, self.team.workers + 1 - len(self.under_way)) if self.team.workers > 1 else 1 - len(self.under_way)

    def results(self, patience: float) -> Iterator[tuple[Job, Result]]:
        """The jobs that are done, after waiting up to ``patience`` seconds for the first.

        Raises whatever a job raised, and WorkerLost when workers die repeatedly at the same job.
        """
        done, _ = wait(self.under_way, timeout=patience, return_when=FIRST_COMPLETED)
        broken = [future for future in done if isinstance(future.exception(), BrokenProcessPool | WorkerLost)]
        for future in done:
            if future not in broken:
                job, _ = self.under_way.pop(future)
                yield job, future.result()
        if broken:
            self._resubmit()

    def _resubmit(self) -> None:
        """Replace the executor and submit all its jobs again."""
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
        """Cancel jobs that have not begun, and shut the executor down."""
        self.executor.shutdown(wait=False, cancel_futures=True)


RAY_RETRIES = 10
"""How often Ray itself runs a job again whose worker or node is gone."""


def on_ray(address: str | None = None, workers: int | None = None, ship: bool | None = None) -> Team:
    """A team on a Ray cluster; without an address Ray starts on this machine, and stops with this process.

    With ``ship`` this package is sent to the workers, so that they run the code of this process; otherwise they import
    it from the same folder, and find its compiled code there. By default it is sent to clusters that have an address.
    The dependencies must be installed on the workers.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("executor 'ray': Ray is not installed: pip install 'windtunnel[ray]'") from error
    if not ray.is_initialized():
        package = Path(__file__).parents[1]
        sent = address is not None if ship is None else ship
        environment = {"py_modules": [str(package)]} if sent else {"env_vars": {"PYTHONPATH": _path(package.parent)}}
        try:
            ray.init(
                address=address,
                num_cpus=workers if address is None else None,
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if address is None else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"address={address!r}: no Ray cluster there: {error}") from error
    cpus: float = ray.cluster_resources().get("CPU", 1)
    count = workers or max(1, int(cpus))
    return Team(RayExecutor, count, remote=True)


def _path(first: Path) -> str:
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that a Ray task makes."""
    return fn(*args, **kwargs)


class RayExecutor(Executor):
    """Runs calls as Ray tasks of one CPU each; a task whose worker or node dies is run again elsewhere."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._task = ray.remote(num_cpus=1, max_retries=RAY_RETRIES)(called)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of a call; WorkerLost once its workers died more often than Ray retries."""
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()
        self._task.remote(fn, args, kwargs).future().add_done_callback(lambda inner: self._pass_on(inner, outer))
        return outer

    def _pass_on(self, inner: "Future[Any]", outer: "Future[Any]") -> None:
        error = inner.exception()
        if error is None:
            outer.set_result(inner.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            outer.set_exception(error.cause if isinstance(error.cause, Exception) else error)
        else:
            outer.set_exception(WorkerLost(str(error)))
