"""What an autoscaler sees of the replicas of its pool, read from the records."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Fleet, Floats, Integers
from windtunnel.core.fleet.remains import are_among
from windtunnel.core.fleet.roster import STARTING, UP, Crew
from windtunnel.core.records import AGAIN, AT_DOOR, NONE, QUEUED, ROUTED_AHEAD, State
from windtunnel.core.seats import EMPTY, ENDS, WHO
from windtunnel.dataclass import dataclass
from windtunnel.policy.look import Look, Traffic

TIMES = ("arrival", "first_token", "finish")


@dataclass(frozen=True)
class Measured:
    """A replica at a time that the loop has just reached."""

    ranks: int
    waiting: Integers
    """Prompt tokens of each request that waits for memory, or to be computed."""
    used_blocks: int
    """Blocks that requests hold."""
    num_blocks: int
    """Of each rank."""
    block_size: int
    max_model_len: int

    @classmethod
    def of(
        cls, state: State, fleet: Fleet, pool: int, lanes: Integers, time: float, some: tuple[int, int]
    ) -> "Measured":
        """Of a replica; ``some``: requests before the first of these have ended, others from the second on not come."""
        limits, (first, last) = fleet.limits[pool], some
        rows: Any = state.requests[first:last]
        mine = are_among(rows["lane"], lanes) & (rows["state"] == QUEUED)
        waiting = first + np.flatnonzero(mine)
        waiting = waiting[waiting_rows(state, lanes, waiting)]
        used = sum(used_blocks(state, pool, int(i), time, limits.num_blocks) for i in lanes)
        prompts: Integers = state.requests["prompt"][waiting]
        return cls(len(lanes), prompts, used, limits.num_blocks, limits.block_size, limits.max_model_len)

    @property
    def load(self) -> tuple[float, float]:
        """(Prompt tokens that wait for a rank, by max_model_len; the share of its blocks that requests hold or wait
        for.)"""
        blocks = int((-(-self.waiting // self.block_size)).sum()) + self.used_blocks
        return self.tokens / (self.max_model_len * self.ranks), blocks / (self.num_blocks * self.ranks)

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return int(self.waiting.sum())


def waiting_rows(state: State, lanes: Integers, rows: Integers) -> NDArray[np.bool_]:
    """Which of these rows of the requests of some lanes wait: they are queued, and not in part computed."""
    seats = state.seats[lanes]
    seated = seats[:, WHO][seats[:, ENDS] < EMPTY]
    part_way = seats[:, WHO][seats[:, ENDS] == EMPTY + 1]
    found: NDArray[np.bool_] = ~np.isin(rows, np.concatenate([seated, part_way]))
    if state.stores is not None:
        found &= state.stores.rows["kept"][rows] == 0  # those have blocks, and wait for KV or a seat
    return found & (state.requests["state"][rows] == QUEUED)


def used_blocks(state: State, pool: int, i: int, time: float, num_blocks: int) -> int:
    """Blocks that the requests of a lane hold at ``time``, when its latest decision has been made."""
    lane, group = state.lanes[i], state.groups[state.lanes["group"][i]]
    total = int(state.pools["num_blocks"][pool])
    leaves_later = group["now"] > time and lane["released"] > 0
    free = int(lane["free_before" if leaves_later else "free"])
    if not leaves_later and lane["gives_back"] == group["now"] > time:
        free -= int(lane["given_back"])
    return round((total - free) * num_blocks / total)


def traffic(state: State, each: Crew, lanes: Integers, since: float, time: float, last: int) -> Traffic | None:
    """What the requests of the replica of these ``lanes`` have seen since a time; None where none came or ended.
    ``last``: requests from there on have not come."""
    rows: Any = state.requests[each.low_before : last]
    rows = rows[are_among(rows["lane"], lanes)]
    came, begun, ended = (rows[(rows[name] > since) & (rows[name] <= time)] for name in TIMES)
    spoke = ended[np.isfinite(ended["first_token"])]
    gaps = int((spoke["output"] - 1).sum())
    if not (len(came) and len(begun) and gaps > 0):
        return None
    return Traffic(
        rate=len(came) / (time - since),
        prompt=float(spoke["prompt"].mean()),
        answer=float(spoke["output"].mean()),
        ttft=float((begun["first_token"] - begun["arrival"]).mean()),
        token=float((spoke["finish"] - spoke["first_token"]).sum()) / gaps,
        seats=each.limits.max_num_seqs * len(lanes),
    )


def look(
    each: Crew, measured: Sequence[Measured], at_door: int, arrived: float, coming: float, seen: tuple[Traffic, ...]
) -> Look:
    """What the autoscaler of a pool sees; requests/s ``arrived`` and ``coming``, and what is ``seen``: see Look."""
    up = [one for one, life in zip(measured, each.lives, strict=True) if life.state == UP]
    waiting = sum(one.tokens for one in measured) + at_door
    used, ranks = sum(one.used_blocks for one in up), sum(one.ranks for one in up)
    return Look(
        replicas=sum(life.state in (STARTING, UP) for life in each.lives),
        queued=waiting / (max(len(up), 1) * each.limits.max_model_len),
        kv=used / (each.limits.num_blocks * ranks) if ranks else 0.0,
        arrived=arrived,
        before=each.rate_before,
        coming=coming,
        role=each.role,
        loads=tuple(one.load for one in up),
        traffic=seen,
    )


def rate_between(came: Floats, start: float, end: float) -> float:
    """Requests/s; ``came``: when they come, in order."""
    return float(np.searchsorted(came, end) - np.searchsorted(came, start)) / (end - start)


def times_of_arrival(requests: Any, count: int, since: float) -> Floats:
    """When requests have come that others release, in order, from ``since`` on; ``count``: of requests, which have a
    row for each side, and those that a decode replica prefills are on that side alone."""
    known = (requests["lane"] != NONE) | np.isin(requests["state"], (AT_DOOR, AGAIN, ROUTED_AHEAD))
    arrival = requests["arrival"][:count]
    found: Floats = np.sort(arrival[known.reshape(-1, count).any(axis=0) & (arrival >= since)])
    return found
