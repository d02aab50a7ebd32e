"""Drafts that the next step verifies: their blocks, their part in admission, and which of them are right.

How many are right is a number of the request and of the place in its answer, so it is the same whoever runs beside it,
and whatever is preempted.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import blocks_of, find, settle
from windtunnel.core.compiled import part
from windtunnel.core.records import Array, Fields, Lane, Pool, Request

POOL_FIELDS: Fields = [
    (name, np.int64)
    for name in (
        "num_speculative_tokens",
        "lookahead",  # tokens beyond those of a step that a request has blocks for
        "draft_slots",  # of the budget, beside a request's tokens
        "drops_last_hit",
        "first_rate",  # in ``Drafts.rates``
        "first_mark",  # in ``Drafts.marks``
    )
]


AT_LEAST = 4
"""Drafts that are looked at at once."""


class Drafts(NamedTuple):
    """Which drafts are right."""

    rates: Array
    """How likely the first one is right, the first two, …: of one pool after the other."""
    marks: Array
    """For each rate how many of the 2³² draws are below it, and at least AT_LEAST for each pool."""
    seed: Array
    """[1]"""
    first: Array
    """[n + 1] where each request begins in the two that follow; [0]: they are empty."""
    hits: Array
    """For each place of an answer the leading drafts that are right there; empty: drawn from ``rates``."""
    proposals: Array
    """For each number of known tokens how many drafts a request has then; empty: all."""


def drafts_of(fleet: Any, demand: Any, pools: NDArray[Any]) -> Drafts:
    """Write the settings into the pools, and make the arrays."""
    rates: list[float] = []
    marks: list[int] = []
    for pool, policy in zip(pools, fleet.policies, strict=True):
        for name in ("num_speculative_tokens", "lookahead", "draft_slots", "drops_last_hit"):
            pool[name] = getattr(policy.drafts, name)
        pool["first_rate"] = len(rates)
        pool["first_mark"] = len(marks)
        rates += policy.drafts.rates
        marks += marks_of(policy.drafts.rates)
    recorded = demand.drafts or (np.zeros(1, np.int64), np.zeros(0, np.int8), np.zeros(0, np.int8))
    seed = np.array([fleet.seed], dtype=np.int64)
    return Drafts(np.array(rates), np.array(marks), seed, *recorded)


def marks_of(rates: tuple[float, ...]) -> list[int]:
    """For each rate how many of the 2³² draws are below it: ``share < rate`` in whole numbers. At least AT_LEAST."""
    return [int(np.ceil(rate * 4294967296.0)) for rate in rates] + [0] * (AT_LEAST - len(rates))


@part
def blocks_ahead(pool: Pool, tokens: int) -> int:
    """Blocks of a request with this many tokens, and of those beyond them that its drafter writes."""
    return blocks_of(pool, min(tokens + pool.lookahead, pool.max_model_len))


@part
def is_padded(pool: Pool, lane: Lane, tokens: int, begun: int) -> bool:
    """Whether a waiting request that only decodes gets drafts like all others: where no prompt is part-way, and
    anything runs, or is there of it."""
    if tokens != 1 or not lane.pads or begun + 1 + pool.num_speculative_tokens > pool.max_model_len:
        return False
    return bool(lane.step_decodes + lane.chunks > 0 or begun > 0)


@part
def find_for_drafter(pool: Pool, lane: Lane, request: Request, cache: Any, r: int) -> tuple[int, int]:
    """As ``find``; EAGLE's drafter needs what its target computes in the last block, which is therefore left out."""
    holding = cache.holdings[r]
    settle(cache, cache.followers, lane)
    known = holding.version == lane.version
    found, idle = find(pool, lane, request, cache, r)
    if known or found == 0 or not pool.drops_last_hit:
        return found, idle
    if cache.items[cache.tables[holding.table + found - 1]].references == 0:
        holding.idle -= 1
    holding.found -= 1
    return holding.found, holding.idle


MASK = 0xFFFFFFFF


@part
def mixed(x: int) -> int:
    """A number of 32 bits as good as random (lowbias32 of C. Wellons' hash prospector)."""
    x = int(x)  # in plain Python it may have a width
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


@part
def num_accepted(pool: Pool, drafts: Drafts, request: Request, r: int, place: int, count: int) -> int:
    """How many of the first ``count`` drafts are right after this many tokens of an answer."""
    if len(drafts.hits) > 0:
        return min(int(drafts.hits[drafts.first[r] + place]), count)
    drawn = mixed(mixed((drafts.seed[0] + request.id) & MASK) ^ mixed(place + 1))
    share, right = float(drawn) / 4294967296.0, 0
    while right < count and share < drafts.rates[pool.first_rate + right]:
        right += 1
    return right


@part
def num_proposed(pool: Pool, drafts: Drafts, request: Request, r: int) -> int:
    """How many drafts a request has when this many of its tokens are known."""
    if len(drafts.proposals) > 0:
        return int(drafts.proposals[drafts.first[r] + request.generated])
    return pool.num_speculative_tokens
