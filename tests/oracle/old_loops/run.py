"""Runs of the old loops, as ``core.engine.run`` and ``core.disaggregation.handover.run`` made them."""

from typing import Any

import numpy as np

from oracle.old_loops.loops import CANDIDATE, FULL, MORE_COUNTERS, closed_loop, open_loop
from oracle.old_loops.tandem import CLOSED, MORE_COUNTS, Transfers, coupled_loop
from windtunnel.core.disaggregation import handover
from windtunnel.core.disaggregation.handover import Crossing, Handed
from windtunnel.core.disaggregation.order import order_of
from windtunnel.core.dispatch import check
from windtunnel.core.engine import Demand, Fleet, Record, arrivals_of, new_state, with_room
from windtunnel.core.hooks import raise_failures
from windtunnel.core.records import JUMPS, NONE, RELEASES, ROWS, STALLS, State
from windtunnel.core.routing import sends_kv


def run(fleet: Fleet, demand: Demand, router: int, uniforms: Any, jumps: bool = True) -> Record:
    """Mixed pools."""
    state = with_old_counters(new_state(fleet, demand, uniforms, router))
    state.counters[JUMPS] = jumps
    if demand.closed or sends_kv(fleet, demand):
        arrivals = arrivals_of(demand)
        state.releases["time"][: len(arrivals)] = demand.arrival[arrivals]
        state.releases["request"][: len(arrivals)] = arrivals
        state.counters[RELEASES] = len(arrivals)
        while closed_loop(state, router, demand.max_concurrency) == FULL:
            state = with_room(state)
    else:
        while open_loop(state, router) == FULL:
            state = with_room(state)
    raise_failures((*fleet.policies, fleet, fleet.routing))
    check(state)
    rows, stalls = state.rows[: state.counters[ROWS]], state.stalls[: state.counters[STALLS]]
    return Record(state.requests, rows, stalls, state.groups["replica"][state.lanes["group"]], state.lanes["rank"])


def with_old_counters(state: State) -> State:
    """With the entries that only these loops have."""
    counters = np.zeros(MORE_COUNTERS, dtype=np.int64)
    counters[: len(state.counters)] = state.counters
    counters[CANDIDATE] = NONE
    return state._replace(counters=counters)


def run_disaggregated(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[int, int],
    uniforms: Any,
    crossing: Crossing,
    jumps: bool = True,
    in_step: bool = False,
) -> Handed:
    """Prefill and decode pools."""
    handover.require_handing(fleet, crossing.rules)
    pools = np.concatenate([handover.of_role(fleet, name) for name in ("prefill", "decode")])
    ordered = handover.pools_of(fleet, pools)
    columns = handover._rows(demand, crossing.rules, 0)
    state = with_old_counters(new_state(ordered, columns, uniforms[0]))
    state = handover._begun(state, ordered, demand)
    new = handover._transfers(ordered, demand, crossing)
    counts = np.zeros(MORE_COUNTS, dtype=np.int64)
    counts[: len(new.counts)] = new.counts
    counts[CLOSED] = demand.closed
    arrivals, order = arrivals_of(demand), order_of(state.groups)
    transfers = Transfers(*new[:-1], counts, arrivals, order)
    state.counters[JUMPS], transfers.order.in_step[0] = jumps, in_step
    sides = handover._sides(state, (ordered, ordered), columns, demand, routers, uniforms)
    for side in sides:
        side["counters"] = state.counters.copy()
    stages = True if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies) else None
    while True:
        first, second = (state._replace(**side) for side in sides)
        if coupled_loop(state, transfers, first, second, routers, demand.max_concurrency, stages) != FULL:
            break
        state = with_room(state)
    raise_failures((*fleet.policies, fleet))
    check(state)
    limit, none = demand.max_concurrency, np.zeros(0, dtype=np.int64)
    passing = handover.Passing(ordered, pools, state, new, order, none, sides, arrivals, routers, limit, stages)
    return handover.record_of(passing, demand, crossing)
