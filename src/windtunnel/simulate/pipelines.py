"""Pipelines of releases whose steps do not keep turns (vLLM ≤ 0.20): on the reference engine."""

from typing import Any, cast

from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.pipeline import unsupported
from windtunnel.errors import InputError
from windtunnel.perf.stage_times import StageTimes
from windtunnel.policy import VllmV1
from windtunnel.reference.loop import Replica
from windtunnel.reference.pipeline import Pipeline, table_passage
from windtunnel.reference.vllm_v1 import Scheduler
from windtunnel.simulate.on_reference import record_of, requests_of, run_replicas


def beyond_the_core(fleet: Fleet) -> list[str]:
    """The settings that keep a fleet of pipelines from the compiled core; none for any other fleet."""
    pipelines = [policy for policy in fleet.policies if policy.pipeline_parallel_size > 1]
    if len(pipelines) < len(fleet.policies):
        return []
    return sorted({name for policy in pipelines for name in unsupported(policy)})


def run_pipelines(fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    """Simulate a fleet of pipelines; ``router`` and ``uniforms`` as for the core.

    Raises:
        InputError: ranks in lockstep.
    """
    replicas = [_replica(fleet, pool) for pool, count in enumerate(fleet.replicas) for _ in range(count)]
    requests = requests_of(demand)
    run_replicas(replicas, requests, fleet, demand, router, uniforms)
    return record_of(requests, replicas)


def _replica(fleet: Fleet, pool: int) -> Replica:
    limits, policy, times = fleet.limits[pool], fleet.policies[pool], fleet.times[pool]
    policy.check(limits)
    if fleet.lockstep[pool]:
        raise InputError("pipelines of ranks in lockstep are not simulated: use data_parallel_size=1 with experts")
    passage, rules = table_passage(cast(StageTimes, times)), cast(VllmV1, policy)  # no others have stages
    return Replica([Pipeline(Scheduler(limits, rules), rules, passage) for _ in range(fleet.lanes[pool])])
