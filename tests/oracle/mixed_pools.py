"""Mixed pools on the oracle: the core's demand in, a record as the core's out."""

from dataclasses import replace
from typing import Any

import numpy as np

from oracle.elastic_mixed import Elastic
from oracle.loop import Loop
from oracle.mixed_records import (
    balancer_of,
    clients_of,
    maker,
    no_collection,
    pools_in,
    record_of,
    requests_of,
    require_scheduled,
    router_of,
    used_tiers,
)
from oracle.stores import Shelf
from windtunnel.core.engine import Demand, Fleet, Record


def run_policies(fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    """Simulate a fleet of vLLM v1 and unified schedulers, and of those in Python; ``router`` and ``uniforms`` as for
    the core.

    Raises:
        InputError: another scheduler, a pipeline of ranks in lockstep, or a scheduler in Python that breaks a rule or
            leaves requests at the end. What ``schedule`` raises passes through.
    """
    with no_collection():
        if any(fleet.scaling) or fleet.failures:
            return _run_elastic(fleet, demand, router, uniforms.tolist())
        return _run_mixed(fleet, demand, router, uniforms)


def _run_mixed(fleet: Fleet, demand: Demand, router: int, uniforms: Any) -> Record:
    shelf = Shelf()
    make = maker(fleet, shelf)
    replicas = [make(number) for number in range(sum(fleet.replicas))]
    requests = requests_of(demand, fleet.policies)
    numbers = uniforms.tolist()
    clients = *clients_of(demand), balancer_of(fleet), numbers
    loop = Loop(replicas, router_of(fleet, demand, router, numbers), requests, *clients)
    loop.run()
    require_scheduled(loop, requests)
    return replace(record_of(requests, replicas), tiers=used_tiers(shelf))


def _run_elastic(fleet: Fleet, demand: Demand, router: int, uniforms: list[float]) -> Record:
    """Simulate mixed replicas that start, stop or fail."""
    shelf, requests = Shelf(), requests_of(demand, fleet.policies)
    loop = Elastic(
        maker(fleet, shelf),
        pools_in(fleet),
        router_of(fleet, demand, router, uniforms),
        requests,
        list(fleet.failures),
        fleet.on_failure,
        *clients_of(demand),
        balancer_of(fleet),
        uniforms,
    )
    loop.run()
    require_scheduled(loop, requests)
    record = record_of(requests, loop.replicas)
    first = np.searchsorted(record.replica_of_lane, np.arange(len(loop.replicas)))
    for request in requests:
        if request.retries and request.id in loop.places:
            replica, rank = loop.places[request.id]
            record.requests["lane"][request.id] = first[replica] + rank
    return replace(record, tiers=used_tiers(shelf), lives=loop.account())
