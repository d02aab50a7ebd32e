"""Run schedulers written in Python on the reference engine, and record what the compiled core would."""

from collections.abc import Callable
from typing import Any

from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.errors import InputError
from windtunnel.journal import record_of, requests_of, run_replicas
from windtunnel.perf.stage_times import StageTimes
from windtunnel.reference.custom import Custom, PythonScheduler
from windtunnel.reference.loop import Replica
from windtunnel.reference.replica import Group, table_time


def run_custom(make: Callable[[], PythonScheduler], fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    """Simulate a fleet whose ranks are scheduled by ``make()`` each; ``router`` and ``uniforms`` as for the core.

    Raises:
        InputError: a decision breaks a rule, or requests are left at the end. What ``schedule`` raises passes through.
    """
    replicas = [_replica(make, fleet, pool) for pool, count in enumerate(fleet.replicas) for _ in range(count)]
    requests = requests_of(demand)
    run_replicas(replicas, requests, fleet, demand, router, uniforms)
    left = [request.id for request in requests if not request.finished and not request.refused]
    if left:
        name = type(make()).__name__
        raise InputError(f"{name}: {len(left)} requests never finish, the first is {left[0]}: it is not scheduled")
    return record_of(requests, replicas)


def _replica(make: Callable[[], PythonScheduler], fleet: Fleet, pool: int) -> Replica:
    ranks = [Custom(make(), fleet.limits[pool]) for _ in range(fleet.lanes[pool])]
    times = fleet.times[pool]
    if isinstance(times, StageTimes):
        raise InputError(
            f"pipeline_parallel_size={len(times.stages)}: not simulated for a scheduler of your own; use 1"
        )
    time = table_time(times)
    if fleet.lockstep[pool]:
        return Replica([Group(ranks, time)])
    return Replica([Group([rank], time) for rank in ranks])
