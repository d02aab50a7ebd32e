"""vLLM's v0 scheduler in the compiled core."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE, State, attributes
from windtunnel.core.vllm_v0_queue import queue_last
from windtunnel.core.vllm_v0_records import (
    FAILURE,
    LANE_V0,
    NO_END,
    NO_ROOM_ON_HOST,
    NO_WAY_BACK,
    NO_WAY_TO_DISPLACE,
    NUM_LISTS,
    REQUEST_V0,
    RULES,
    UNKNOWN,
    Arrays,
    CachedArrays,
)
from windtunnel.core.vllm_v0_shelves import block_tables
from windtunnel.core.vllm_v0_steady import steady_run
from windtunnel.core.vllm_v0_step import conclude, decide, pass_over, step
from windtunnel.errors import InputError
from windtunnel.policy.vllm_v0 import no_end, no_room_on_host, no_way_back, no_way_to_displace, patience

__all__ = [
    "Arrays",
    "arrays",
    "check",
    "conclude",
    "decide",
    "enqueue",
    "pass_over",
    "steady_run",
    "step",
    "update_bound",
]


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Any:
    """The arrays of a run, and the pools' settings; those of ``vllm_v0_cached`` where a pool has a prefix cache.

    Raises:
        InputError: ranks in lockstep, or pools of which only some cache prefixes.
    """
    rules = np.zeros(len(pools), dtype=RULES)
    for i, (limits, policy) in enumerate(zip(fleet.limits, fleet.policies, strict=True)):
        if fleet.lockstep[i]:
            raise InputError("vLLM's v0 scheduler knows no ranks in lockstep: set data_parallel_size=1, or use v1")
        if policy.prefix_caching != fleet.policies[0].prefix_caching:
            raise InputError("prefix_caching: must be the same for all pools with vLLM's v0 scheduler")
        pools[i]["hash_block_size"] = demand.hash_block_size
        pools[i]["watermark_blocks"] = policy.watermark_blocks(limits)
        rules[i] = _rules(limits, policy)
    extras = np.zeros(len(lanes), dtype=LANE_V0)
    extras["cpu_free"] = [policy.num_cpu_blocks for _, policy in _of_each_lane(fleet)]
    for name in ("decoding", "decoded"):
        extras[name] = -np.inf
    for name in ("swapped_head", "swapped_tail", "evicted_head", "evicted_tail"):
        extras[name] = NONE
    requests = np.zeros(len(demand.arrival), dtype=REQUEST_V0)
    requests["hit"] = UNKNOWN
    if demand.priority is not None:
        requests["priority"] = demand.priority
    lists = np.full((len(lanes), NUM_LISTS, 2), NONE, dtype=np.int64)
    failure = np.zeros(1, dtype=FAILURE)
    caching = any(policy.prefix_caching for policy in fleet.policies)
    tables = block_tables(_of_each_lane(fleet), demand, requests, caching)
    kind: Any = CachedArrays if caching else Arrays
    return kind(attributes(rules), attributes(extras), attributes(requests), lists, attributes(failure), *tables)


def _rules(limits: Any, policy: Any) -> tuple[Any, ...]:
    values = {
        "by_priority": policy.admission_order == "priority" and not policy.chunked_prefill,
        "prompt_limit": policy.prompt_limit(limits),
        "long_threshold": policy.long_threshold(limits),
        "patience": patience(limits),
    }
    return tuple(values.get(name, getattr(policy, name, None)) for name in RULES.names or ())


def _of_each_lane(fleet: Any) -> list[tuple[Any, Any]]:
    pools = zip(fleet.limits, fleet.policies, fleet.replicas, fleet.lanes, strict=True)
    return [(limits, policy) for limits, policy, replicas, lanes in pools for _ in range(replicas * lanes)]


def check(own: Arrays, names: Sequence[str] | None = None) -> None:
    """Raise InputError if an engine has ended by itself; ``names`` of the requests, if they are not just numbered."""
    failure = own.failure[0]
    setting = int(failure["setting"])
    request = names[failure["request"]] if names else str(failure["request"])
    if failure["kind"] == NO_ROOM_ON_HOST:
        raise no_room_on_host(setting, request)
    if failure["kind"] == NO_WAY_TO_DISPLACE:
        raise no_way_to_displace(request)
    if failure["kind"] == NO_WAY_BACK:
        raise no_way_back(request)
    if failure["kind"] == NO_END:
        raise no_end(setting)


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    queue_last(state.lanes[lane], state.requests, r)
    state.lanes[lane].waiting += 1
    state.own.lanes[lane].unsorted_queue = 1


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish anybody before the clock of its heap's top, nor preempt and then ignore
    anybody before its free blocks are used up. One step of slack covers rounding.
    """
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    group.bound = np.inf
    if lane.waiting > 0 or lane.running > lane.decodes or extra.disordered:
        group.bound = group.now
    elif lane.decodes > 0:
        shortest = state.floats[pool.shortest_step + lane.decodes]
        rounds = (lane.free - 1) // lane.decodes
        steps = min(next_finish(state.heap, lane) - lane.clock, pool.block_size * rounds) - 1
        group.bound = group.now + float(max(steps, 0)) * shortest
