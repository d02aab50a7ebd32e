"""LoRA adapters of the running requests; an engine holds at most ``max_loras`` of them.

Where no pool limits them ``adapters`` is None, and what asks for it vanishes when it is compiled.
"""

from typing import Any

from windtunnel.core.compiled import part
from windtunnel.core.records import Array, Lane, Pool, Request
from windtunnel.core.seats import EMPTY, ENDS, WHO


@part
def add_adapter(lane: Lane, adapters: Any, adapter: int) -> None:
    """A running request has this adapter."""
    if adapters is not None:
        for k in range(lane.adapters):
            if adapters[k] == adapter:
                return
        if adapter > 0:
            adapters[lane.adapters] = adapter
            lane.adapters += 1


@part
def count_adapters(lane: Lane, requests: Array, seats: Array, adapters: Any) -> None:
    """Which adapters the running requests have."""
    if adapters is not None:
        lane.adapters = 0
        for i in range(lane.top):
            if seats[ENDS, i] != EMPTY:
                add_adapter(lane, adapters, requests[seats[WHO, i]].adapter)


@part
def lacks_adapter(pool: Pool, lane: Lane, adapters: Any, request: Request) -> bool:
    """Whether a waiting request brings an adapter that would be one too many."""
    if adapters is None:
        return False
    new = request.adapter > 0
    for k in range(lane.adapters):
        new &= adapters[k] != request.adapter
    return new and 0 < pool.max_loras <= lane.adapters
