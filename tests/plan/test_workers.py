"""Executors: jobs come back whatever dies, on processes of this machine and on Ray."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import pytest

import windtunnel
from plan.planning import question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import Progress, search
from windtunnel.plan.workers import (
    ATTEMPTS,
    InTurn,
    RayExecutor,
    Team,
    WorkerLost,
    Workers,
    available_cpus,
    given,
    in_turn,
    on_ray,
    processes,
)


def die_once(flag: Path) -> str:
    """Kills its own process the first time."""
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(flag: Path) -> str:
    """Kills its own process the first time, in the middle of handing in its result."""

    def half(pipe: Connection, data: bytes) -> None:
        os.write(pipe.fileno(), bytes(data[: len(data) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    if not flag.exists():
        flag.touch()
        Connection._send = half  # type: ignore[attr-defined]
    return "done"


def unsendable(_: int) -> object:
    return lambda: None


def fail(_: int) -> None:
    raise InputError("no")


def hold(folder: Path) -> None:
    """Says who works, and works for ever."""
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(0.1)


HELD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_workers import hold
from windtunnel.plan.workers import Workers, processes
workers = Workers(processes(2), hold)
for _ in range(2):
    workers.submit(Path(sys.argv[1]))
list(workers.results(600))
"""


def started_by(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, perhaps not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(fine: Callable[[], bool]) -> None:
    """Wait for what must come; after a minute it does not."""
    for _ in range(600):
        if fine():
            return
        time.sleep(0.1)
    raise AssertionError("does not come")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_one_that_searches(tmp_path: Path, blow: signal.Signals) -> None:
    place = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    with subprocess.Popen((sys.executable, "-c", HELD, str(tmp_path), *place)) as searching:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        started = started_by(searching.pid)
        searching.send_signal(blow)
    assert started >= {int(path.name) for path in tmp_path.iterdir()}
    until(lambda: all(map(is_gone, started)))


def drain(workers: Workers[Any, Any]) -> list[Any]:
    found = []
    while workers.under_way:
        found += [result for _, result in workers.results(1.0)]
    workers.stop()
    return found


def test_a_job_whose_worker_dies_is_done_again(tmp_path: Path) -> None:
    workers: Workers[Path, str] = Workers(processes(2), die_once)
    for name in ("a", "b"):
        workers.submit(tmp_path / name)
    assert drain(workers) == ["done", "done"]
    assert workers.lost >= 1


def test_a_worker_that_dies_with_half_a_result_handed_in_keeps_nobody_waiting(tmp_path: Path) -> None:
    workers: Workers[Path, str] = Workers(processes(2), die_half_way)
    for name in ("a", "b"):
        workers.submit(tmp_path / name)
    found: list[str] = []

    def drained() -> bool:
        found.extend(result for _, result in workers.results(0.1))
        return not workers.under_way

    until(drained)
    workers.stop()
    assert found == ["done", "done"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_processes_end_in_the_middle_of_their_jobs_when_they_are_stopped(tmp_path: Path) -> None:
    workers: Workers[Path, None] = Workers(processes(2), hold)
    for _ in range(2):
        workers.submit(tmp_path)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    workers.stop()
    until(lambda: all(is_gone(int(path.name)) for path in tmp_path.iterdir()))


def test_a_result_that_cannot_be_sent_is_an_error_of_its_job() -> None:
    workers: Workers[int, object] = Workers(processes(1), unsendable)
    workers.submit(1)
    with pytest.raises((AttributeError, PicklingError), match="unsendable"):
        drain(workers)


def test_a_job_that_kills_every_worker_ends_the_search() -> None:
    workers: Workers[int, None] = Workers(processes(1), die)
    workers.submit(1)
    with pytest.raises(WorkerLost, match=f"died {ATTEMPTS} times"):
        drain(workers)


def test_errors_of_jobs_come_through() -> None:
    for team in (Team(InTurn, 1), processes(1)):
        workers: Workers[int, None] = Workers(team, fail)
        workers.submit(1)
        with pytest.raises(InputError, match="no"):
            drain(workers)


def test_an_executor_that_takes_no_jobs_is_replaced() -> None:
    made: list[Executor] = []

    class Gone(InTurn):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            raise EOFError

    def make() -> Executor:
        made.append(Gone() if len(made) < 2 else InTurn())
        return made[-1]

    workers: Workers[int, str] = Workers(Team(make, 1), str)
    workers.submit(7)
    assert drain(workers) == ["7"]
    assert len(made) == 3


def test_a_team_of_nobody_is_refused() -> None:
    with pytest.raises(InputError, match="workers=0"):
        processes(0)


@pytest.mark.long
def test_a_ray_cluster_that_loses_a_node_gives_the_same_answer() -> None:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    from windtunnel.plan.workers import on_ray

    enumeration = small_space().enumerate()
    alone = search(enumeration, question(), RatePerDollar(), top=3)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    try:
        team = on_ray(cluster.address, 2, ship=False)
        assert len(ray.nodes()) == 2
        killed: list[int] = []

        def watch(progress: Progress) -> None:
            if progress.trials >= 5 and not killed:
                killed.append(progress.trials)
                cluster.remove_node(second, allow_graceful=False)

        found = search(enumeration, question(), RatePerDollar(), top=3, team=team, watch=watch)
        assert killed
        assert repr(found.entries) == repr(alone.entries)
    finally:
        ray.shutdown()
        cluster.shutdown()


class Breaking(Executor):
    """Breaks at its first so many calls, and counts how often it was shut down."""

    def __init__(self, breaks: list[OSError]) -> None:
        self.breaks = breaks
        self.ended: list[tuple[bool, bool]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.breaks:
            raise self.breaks.pop()
        return InTurn().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended.append((wait, cancel_futures))


@pytest.mark.parametrize(("breaks", "lost"), [(0, 0), (1, 1), (ATTEMPTS - 1, ATTEMPTS - 1)])
def test_an_executor_that_breaks_while_it_is_given_a_job_is_replaced(breaks: int, lost: int) -> None:
    broken = [OSError("no") for _ in range(breaks)]
    made: list[Breaking] = []

    def make() -> Executor:
        made.append(Breaking(broken))
        return made[-1]

    workers: Workers[int, int] = Workers(Team(make, 2), lambda job: job + 1)
    workers.submit(4)
    assert [result for _, result in workers.results(1.0)] == [5]
    assert workers.lost == lost
    assert [one.ended for one in made] == [[(False, True)]] * lost + [[]]
    workers.stop()
    assert made[-1].ended == [(False, True)]


def test_nobody_takes_jobs_after_so_many_attempts() -> None:
    broken = [OSError("no") for _ in range(ATTEMPTS)]
    workers: Workers[int, int] = Workers(Team(lambda: Breaking(broken), 2), lambda job: job)
    with pytest.raises(WorkerLost, match="no process takes jobs any more: no"):
        workers.submit(4)
    assert broken == []


@pytest.mark.parametrize(
    ("workers", "held", "room"), [(3, 0, 4), (3, 3, 1), (3, 4, 0), (3, 9, 0), (2, 0, 3), (1, 0, 1), (1, 1, 0)]
)
def test_one_job_waits_beside_those_that_are_worked_on(workers: int, held: int, room: int) -> None:
    """With one worker, in this process, none does."""
    found: Workers[int, int] = Workers(Team(InTurn, workers), lambda job: job)
    for job in range(held):
        found.submit(job)
    assert found.room == room


def test_a_job_whose_workers_die_is_submitted_five_times() -> None:
    jobs: list[int] = []

    class Dying(InTurn):
        def submit(self, _: Any, /, *args: Any, **__: Any) -> Future[Any]:
            jobs.append(args[0])
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool())
            return future

    workers: Workers[int, int] = Workers(Team(Dying, 1), lambda job: job)
    workers.submit(4)
    with pytest.raises(WorkerLost, match="died 5 times"):
        drain(workers)
    assert (jobs, workers.lost) == ([4] * 5, 5)


def test_the_first_result_is_not_kept_waiting_by_others_and_nobody_waits_for_ever() -> None:
    class Slow(InTurn):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return Future() if args[0] < 0 else super().submit(fn, *args, **kwargs)

    slow = Slow()
    workers: Workers[int, str] = Workers(Team(InTurn, 2), str, slow)
    assert workers.executor is slow, "an executor that is given is taken"
    workers.submit(-1)
    began = time.monotonic()
    assert list(workers.results(0.01)) == []
    workers.submit(7)
    assert list(workers.results(30.0)) == [(7, "7")]
    assert time.monotonic() - began < 15


def test_processes_do_the_jobs_that_they_have_before_they_are_shut_down() -> None:
    executor = processes(1).make()
    futures = [executor.submit(str, number) for number in (7, 8)]
    executor.shutdown()
    assert [future.result(0) for future in futures] == ["7", "8"]


def test_teams_have_as_many_workers_as_there_are_cpus_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda which: {0, 5, 7} if which == 0 else {1}, raising=False)
    assert (available_cpus(), processes().workers, processes(2).workers) == (3, 3, 2)
    assert [(team.workers, team.remote) for team in (in_turn(), given(InTurn(), 4))] == [(1, False), (4, False)]
    monkeypatch.delattr("os.sched_getaffinity")
    for known, count in ((6, 6), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda known=known: known)
        assert available_cpus() == count


# --- what Ray is told -------------------------------------------------------------------------------------------------


class TaskError(Exception):
    """As Ray's of a call that raised."""

    def __init__(self, cause: object) -> None:
        self.cause = cause


class NotedRay:
    """As much of Ray as is used: notes what it is told, and runs calls at once."""

    def __init__(self, cpus: dict[str, float], begun: bool = False) -> None:
        self.cpus, self.begun = cpus, begun
        self.told: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []
        self.exceptions = SimpleNamespace(RayTaskError=TaskError)

    def is_initialized(self) -> bool:
        return self.begun

    def init(self, **settings: Any) -> None:
        self.told.append(settings)

    def cluster_resources(self) -> dict[str, float]:
        return self.cpus

    def remote(self, **settings: Any) -> Callable[..., Any]:
        self.tasks.append(settings)
        return lambda fn: SimpleNamespace(
            remote=lambda *args: SimpleNamespace(future=lambda: InTurn().submit(fn, *args))
        )


PACKAGE = Path(windtunnel.__file__).parent


def test_ray_starts_here_without_an_address_and_takes_the_code_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = NotedRay({"CPU": 3.7, "GPU": 9.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    teams = [on_ray(), on_ray(workers=2), on_ray(ship=True)]
    assert [(team.make, team.workers, team.remote) for team in teams] == [
        (RayExecutor, 3, True), (RayExecutor, 2, True), (RayExecutor, 3, True),
    ]  # fmt: skip
    here = {"address": None, "log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    folder = {"env_vars": {"PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}/elsewhere"}}
    assert ray.told == [
        here | {"num_cpus": None, "runtime_env": folder},
        here | {"num_cpus": 2, "runtime_env": folder},
        here | {"num_cpus": None, "runtime_env": {"py_modules": [str(PACKAGE)]}},
    ]


def test_a_cluster_with_an_address_is_sent_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = NotedRay({})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert [on_ray("there", 5).workers, on_ray("there", ship=False).workers] == [5, 1]
    there = {
        "address": "there", "num_cpus": None, "log_to_driver": False, "logging_level": logging.ERROR,
        "include_dashboard": None,
    }  # fmt: skip
    assert ray.told == [
        there | {"runtime_env": {"py_modules": [str(PACKAGE)]}},
        there | {"runtime_env": {"env_vars": {"PYTHONPATH": str(PACKAGE.parent)}}},
    ]
    for cpus, workers in ((0.5, 1), (2.0, 2)):
        begun = NotedRay({"CPU": cpus}, begun=True)
        monkeypatch.setitem(sys.modules, "ray", begun)
        assert (on_ray("there").workers, begun.told) == (workers, []), "it has been started already"


def test_a_cluster_that_is_not_there_and_ray_that_is_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = NotedRay({})
    monkeypatch.setattr(ray, "init", lambda **_: die_of(ConnectionError("nobody answers")), raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(InputError, match="address='there': no Ray cluster there: nobody answers"):
        on_ray("there")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="Ray is not installed"):
        on_ray()


def die_of(error: Exception) -> None:
    raise error


def test_calls_are_tasks_of_one_cpu_and_errors_are_the_calls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's error is the one of the call that it carries, where that is one; what else fails is a worker that is
    lost."""
    ray = NotedRay({})
    monkeypatch.setitem(sys.modules, "ray", ray)
    executor = RayExecutor()
    assert ray.tasks == [{"num_cpus": 1, "max_retries": 10}]
    assert executor.submit(int, "11", base=3).result(0) == 4
    own = InputError("no")
    assert executor.submit(die_of, TaskError(own)).exception(0) is own
    unknown = TaskError("a text")
    assert executor.submit(die_of, unknown).exception(0) is unknown
    lost = executor.submit(die_of, OSError("gone")).exception(0)
    assert isinstance(lost, WorkerLost) and str(lost) == "gone"
