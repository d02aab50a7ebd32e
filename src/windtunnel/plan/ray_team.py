"""Ray: the same jobs on a cluster. Ray is the extra ``ray``; nothing here is imported without it."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.plan.executors import Team, WorkerLost

RETRIES = 10
"""How often Ray itself runs a job again whose worker or node is gone."""


def on_ray(address: str | None = None, workers: int | None = None, ship: bool | None = None) -> Team:
    """A team on a Ray cluster; without an address Ray starts on this machine, and stops with this process.

    With ``ship`` this package is sent to the workers, so that they run the code of this process; otherwise they read it
    where this process does, and find its compiled code. By default it is sent to clusters that have an address. The
    dependencies must be there.

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
    """What a task does."""
    return fn(*args, **kwargs)


class RayExecutor(Executor):
    """Runs calls as Ray tasks of one CPU each; a task whose worker or node dies is run again elsewhere."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(called)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of a call; WorkerLost where its workers died more often than Ray tries."""
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
