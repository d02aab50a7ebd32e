"""How much the host has behind SGLang's trees, and what rounds wait for it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import rank_time
from windtunnel.core.compiled import part
from windtunnel.core.records import Group, Pool, State
from windtunnel.core.schedulers.sglang.tree.radix import LEFT

FIRST_LAYER = 1.0 / 32
"""Of loading and computing what does not overlap: one layer of those that models usually have."""


def set_host(fleet: Any, lanes: NDArray[Any], pool_of_lane: NDArray[np.int64]) -> None:
    """Write down what each lane has on the host: an even share of the store behind its replica."""
    for pool, tiers in enumerate(fleet.tiers):
        mine = np.flatnonzero(pool_of_lane == pool)
        for tier in tiers:
            page = fleet.policies[pool].page_size
            share = tier.chunks * tier.chunk_tokens // int(fleet.lanes[pool])
            lanes["host"][mine] = lanes["host_free"][mine] = share // page * page
            lanes["write_after"][mine] = 0 if tier.on_eviction else tier.write_after + 1
            lanes["load_s"][mine] = tier.read_s


@part
def waits(state: State, pool: Pool, i: int, start: float) -> float:  # noqa: ARG001 - as in every scheduler
    """Extra seconds of a round that waits for KV from host memory. A layer is loaded while the layer before it is
    computed, so that of the shorter of both only one layer's share adds to the longer (``LayerDoneCounter``)."""
    lane = state.lanes[i]
    if lane.loading == 0 or lane.load_s == 0.0:
        return 0.0
    loads = lane.load_s * float(lane.loading)
    computes = rank_time(pool, state.floats, state.integers, lane, state.seats[i])
    return max(loads - computes, 0.0) + min(loads, computes) * FIRST_LAYER


@part
def has_nodes(tree: Any, wanted: int) -> bool:
    """Whether at least ``wanted`` nodes are free."""
    if tree is None:
        return True
    return tree.room[LEFT] >= wanted


@part
def room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the trees can take what a step adds: a leaf and three splits for each that ends or is admitted, and three
    for one that waits and is looked at."""
    wanted = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        wanted += 12 * pool.max_num_seqs + 3 * state.lanes[i].waiting + 8
    return has_nodes(state.extra.tree, wanted)
