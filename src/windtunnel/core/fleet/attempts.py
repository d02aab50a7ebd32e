"""What a client keeps of a request between prefill and decode pools whose replica has failed: its tokens, of which the
prompt of the next attempt is made, and when they came."""

from dataclasses import field
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.disaggregation.handover import Handed
from windtunnel.core.engine import Fleet
from windtunnel.core.fleet.remains import Received, received
from windtunnel.core.fleet.tail import Tail
from windtunnel.core.records import NONE, STALLS, State
from windtunnel.dataclass import dataclass
from windtunnel.policy.settings import Settings


@dataclass
class Attempt:
    """What became of a request between its arrival and the failure of what it was on, as its client keeps it."""

    tokens: int
    last: float
    """When the client got the last of them."""
    told: float
    """When it got the first one; NaN: not yet."""
    handed: NDArray[Any]
    """[1] of HANDED."""
    seen: NDArray[Any]
    """[1] of REQUEST: of the replica that computed the prompt."""
    preemptions: int
    stalls: list[tuple[float, float]] = field(default_factory=list)


def longest_prompt(fleet: Fleet) -> int:
    """Tokens of a prompt that any prefill pool can compute."""
    return min(
        min(policy.longest_prompt(limits), policy.longest_request(limits) - 1, limits.num_blocks * limits.block_size)
        for policy, limits, role in zip(fleet.policies, fleet.limits, fleet.roles, strict=True)
        if role == "prefill"
    )


def received_there(
    state: State, handed: Any, requests: list[int], tail: Tail, policy: Settings, time: float
) -> dict[int, Received]:
    """What the clients of these requests have of what a decode replica with these latest steps has made."""
    rows, n, found = state.requests, len(handed), {}
    for r in requests:
        row = n + r
        if not handed["stays"][r]:
            if not (handed["joined"][r] <= time or rows["preemptions"][row] > 0):
                found[r] = Received(1, float(rows["last_token"][row]))
                continue
            rows["first_token"][row] = handed["prefill_end"][r]
        mine = tail.of_lane(state, int(rows["lane"][row]), policy)
        one = received(state, row, mine, policy.turns, policy.counts_tokens_late, time)
        if one.tokens == 1 and not handed["stays"][r]:  # nothing since it joined, or the next is on its way
            last = float(rows["last_token"][row])
            one = Received(1, last if last <= time else one.last)
        found[r] = one
    return found


def tokens_of(handed: Any, r: int, first_token: str, rest: Received | None) -> Received:
    """What the client of a request has of its attempt; ``rest``: what the decode replica, if there is one, made."""
    if handed["stays"][r]:
        return rest or Received(0, nan)
    if not handed["goes"][r]:
        return Received(0, nan)
    if first_token == "decode":
        return Received(rest.tokens - 1, rest.last) if rest and rest.tokens > 1 else Received(0, nan)
    known = float(handed["prefill_end" if first_token == "prefill" else "joined"][r])
    if isnan(known):
        return Received(0, nan)
    return rest or Received(1, known)


def attempt_of(state: State, handed: Any, r: int, first_token: str, had: Received, time: float) -> Attempt:
    """What is kept of an attempt that ends at ``time``."""
    n = len(handed)
    stays, goes = bool(handed["stays"][r]), bool(handed["goes"][r])
    stalls = [stall for row in (r, n + r) for stall in stalls_of(state, row) if stall[1] <= time]
    told, again = nan, goes and first_token == "decode"
    if again:
        mine = stalls_of(state, n + r)
        told = min((end for _, end in mine if end <= time), default=nan)
        stalls = [stall for stall in stalls if stall[1] != told]
    elif goes:
        told = float(handed["prefill_end" if first_token == "prefill" else "joined"][r])
    seen: Any = np.array(state.requests[[n + r if stays else r]])
    if not goes and stays:
        told = float(seen["first_token"][0])
    rows: Any = state.requests
    preemptions = int(rows["preemptions"][n + r]) + (0 if stays else int(rows["preemptions"][r]))
    return Attempt(had.tokens, had.last, told, np.array(handed[[r]]), seen, preemptions, stalls)


def stalls_of(state: State, row: int) -> list[tuple[float, float]]:
    """The pauses of a row of the requests."""
    stalls: Any = state.stalls[: state.counters[STALLS]]
    mine = stalls[stalls["request"] == row]
    return list(zip(mine["last_token"].tolist(), mine["resumed_token"].tolist(), strict=True))


def whole_record(
    record: Handed, kept: dict[int, list[Attempt]], outputs: NDArray[np.int64], lanes: NDArray[np.int64]
) -> NDArray[Any]:
    """Write into the record of the last attempts what those before had; returns all stalls. ``lanes``: their numbers in
    the fleet that was asked for."""
    table: Any = record.requests
    handed: Any = record.handovers
    table["output"] = outputs
    added: list[tuple[float, float, int]] = []
    for r, attempts in kept.items():
        begins = [one.told for one in attempts[1:]] + [float(table["first_token"][r])]
        for one, begin in zip(attempts, begins, strict=True):
            added += [(*stall, r) for stall in one.stalls]
            if not isnan(begin):
                added.append((one.last, begin, r))
        first = attempts[0]
        table["first_token"][r] = first.told
        for name in ("scheduled", "cached_tokens"):
            table[name][r] = first.seen[name][0]
        table["preemptions"][r] += len(attempts) + sum(one.preemptions for one in attempts)
        handed[r] = first.handed[0]
        lane = int(first.seen["lane"][0] if first.handed["stays"][0] else first.handed["prefill_lane"][0])
        handed["prefill_lane"][r] = NONE if lane == NONE else lanes[lane]
    stalls: Any = record.stalls[record.stalls["request"] != NONE]
    return np.concatenate([stalls, np.array(added, dtype=stalls.dtype)]) if added else stalls
