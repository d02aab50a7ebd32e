"""Annealing: the kernel of ``search``. A schedule is the batch in which each request begins; it then computes in every
batch until its last token. Any such schedule is within the limits, or the move that leads to it is not made.

Compiled like the core, and plain Python with NUMBA_DISABLE_JIT=1: nothing is allocated, all arrays are handed in.
"""

from math import exp, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, entry

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
NEVER = -1
MISSES = 12
"""Waiting requests that are tried in a batch, of those that do not fit."""


class Facts(NamedTuple):
    """The problem, in arrays of one number a request unless said otherwise."""

    prompt: Integers
    output: Integers
    arrival: Floats
    latest: Floats
    """When a request must have its last token to be good (s)."""
    gap: Floats
    """What a second between its first and its last token costs."""
    cost: Floats
    """Of five numbers: base, per_token, per_kv_token, per_pair, per_sequence."""
    limits: Integers
    """Of six: tokens of a batch, requests, blocks, block size; the longest output; tokens of prompts in a batch."""
    weights: Floats
    """Of seven: makespan, sum of finishes, sum of first tokens, requests that miss a limit; limits on TTFT and TPOT;
    the first arrival."""


class Batches(NamedTuple):
    """What the requests that have a place bring to each batch."""

    tokens: Integers
    prompts: Integers
    """Tokens of prompts among them."""
    requests: Integers
    blocks: Integers
    seconds: Floats
    """Beside the base."""
    released: Floats
    """Last arrival of those that begin in it."""
    ends: Floats
    since: Floats
    """Last arrival of others, which do not move, that begin in it; the earliest moment it may begin."""
    weight: Floats
    """What a second of its end costs by those others."""


@compiled
def put(i: int, at: int, sign: int, facts: Facts, batches: Batches) -> bool:
    """Add a request that begins in a batch, or take it out (sign −1); whether all limits are kept where it is."""
    prompt, size, cost = facts.prompt[i], facts.limits[3], facts.cost
    fits = True
    for k in range(facts.output[i]):
        b = at + k
        own = cost[1] + cost[2] * (prompt + k) + cost[4]
        tokens = 1
        if k == 0:
            own = cost[1] * prompt + cost[3] * prompt * prompt + cost[4]
            tokens = prompt
            batches.prompts[b] += sign * prompt
        batches.tokens[b] += sign * tokens
        batches.requests[b] += sign
        batches.blocks[b] += sign * ((prompt + k + size - 1) // size)
        batches.seconds[b] += sign * own
        if (
            batches.tokens[b] > facts.limits[0]
            or batches.prompts[b] > facts.limits[5]
            or batches.requests[b] > facts.limits[1]
            or batches.blocks[b] > facts.limits[2]
        ):
            fits = False
    return fits


@compiled
def value_of(start: Integers, facts: Facts, batches: Batches) -> float:
    """What is to be small; infinity past the last batch there is room for."""
    n, first = len(start), facts.weights[6]
    used = len(batches.tokens)
    for b in range(used):
        batches.released[b] = batches.since[b]
    for i in range(n):
        batches.released[start[i]] = max(batches.released[start[i]], facts.arrival[i])
    now, total = first, 0.0
    for b in range(used):
        if batches.requests[b] > 0:
            now = max(now, batches.released[b]) + facts.cost[0] + batches.seconds[b]
        batches.ends[b] = now
        total += batches.weight[b] * (now - first)
    weights = facts.weights
    total += weights[0] * (now - first)
    for i in range(n):
        begun, ended = batches.ends[start[i]], batches.ends[start[i] + facts.output[i] - 1]
        total += weights[1] * ended + weights[2] * begun + facts.gap[i] * (ended - begun)
        late = begun - facts.arrival[i] > weights[4] or ended > facts.latest[i]
        if late or ended - begun > weights[5] * (facts.output[i] - 1):
            total += weights[3]
    return float(total)


@compiled
def fits_at(i: int, at: int, facts: Facts, batches: Batches) -> bool:
    """Whether a request can begin in a batch, with all that run then."""
    size = facts.limits[3]
    of_prompts = batches.prompts[at] + facts.prompt[i]
    if batches.tokens[at] + facts.prompt[i] > facts.limits[0] or of_prompts > facts.limits[5]:
        return False
    for k in range(facts.output[i]):
        b = at + k
        if batches.requests[b] + 1 > facts.limits[1] or batches.tokens[b] + 1 > facts.limits[0]:
            return False
        if batches.blocks[b] + (facts.prompt[i] + k + size - 1) // size > facts.limits[2]:
            return False
    return True


@entry
def look_ahead(
    order: Integers, places: int, begins: int, pace: float, start: Integers, facts: Facts, batches: Batches
) -> bool:
    """Begin requests in an order, as soon as they have arrived and fit with all that run, to their ends.

    ``places``: requests at once at most; ``begins``: prompts in a batch at most; ``pace``: requests that have begun by
    a batch at most while others run, as a multiple of its number, so that their peaks do not come together.

    Whether there was room for all.
    """
    n, b, left = len(order), 0, len(order)
    now = facts.weights[6]
    for i in range(n):
        start[i] = NEVER
    while left > 0:
        if b + facts.limits[4] > len(batches.tokens):
            return False
        begun, misses, soonest = 0, 0, inf
        for place in range(n):
            i = order[place]
            if start[i] != NEVER:
                continue
            if facts.arrival[i] > now:
                soonest = min(soonest, facts.arrival[i])
                continue
            paced = n - left >= pace * (b + 1) and batches.requests[b] > 0
            if begun >= begins or paced or batches.requests[b] >= places or misses >= MISSES:
                break
            if fits_at(i, b, facts, batches):
                put(i, b, 1, facts, batches)
                start[i] = b
                begun += 1
                left -= 1
            else:
                misses += 1
        if batches.requests[b] == 0:
            if soonest == inf:
                return False
            now = soonest
        else:
            now += facts.cost[0] + batches.seconds[b]
            b += 1
    return True


@compiled
def proposed(start: Integers, i: int, draws: Floats, facts: Facts) -> int:
    """Another batch for a request: a few away, before or after another one, or with its end."""
    j = min(int(draws[2] * len(start)), len(start) - 1)
    kind = draws[0]
    at: int = start[j]
    if kind < 0.5:
        far = 1 + int(-log(draws[2] + 1e-12) * (1.0 + facts.output[i] * draws[3] * 0.5))
        at = start[i] + far if draws[4] < 0.5 else start[i] - far
    elif kind < 0.65:
        at += facts.output[j]
    elif kind < 0.8:
        at -= facts.output[i]
    elif kind < 0.9:
        at += facts.output[j] - facts.output[i]
    return at


@entry
def fill(start: Integers, facts: Facts, batches: Batches) -> float:
    """Put all requests into empty batches; the value of the schedule, infinity where a limit is broken."""
    fits = True
    for i in range(len(start)):
        fits = put(i, start[i], 1, facts, batches) and fits
    return value_of(start, facts, batches) if fits else inf


@entry
def anneal(
    start: Integers, best: Integers, least: float, draws: Floats, warmth: float, facts: Facts, batches: Batches
) -> float:
    """Move or swap requests at random, one move a row of draws; the warmer, the more often to a worse schedule.

    ``start`` is left where the search ended. What is better than ``least`` goes to ``best``, and its value is returned.
    """
    n, room = len(start), len(batches.tokens)
    value = value_of(start, facts, batches)
    for step in range(len(draws)):
        row = draws[step]
        i = min(int(row[1] * n), n - 1)
        other, was, other_was = NEVER, start[i], 0
        at = proposed(start, i, row, facts)
        if row[5] < 0.3:
            other = min(int(row[2] * n), n - 1)
            at, other_was = start[other], start[other]
        if at < 0 or at == was or at + facts.output[i] > room:
            continue
        if other != NEVER and was + facts.output[other] > room:
            continue
        put(i, was, -1, facts, batches)
        fits = True
        if other != NEVER:
            put(other, other_was, -1, facts, batches)
            fits = put(other, was, 1, facts, batches)
            start[other] = was
        fits = put(i, at, 1, facts, batches) and fits
        start[i] = at
        found = value_of(start, facts, batches) if fits else inf
        if found <= value or (fits and row[6] < exp((value - found) / warmth)):
            value = found
            if value < least:
                least = value
                for k in range(n):
                    best[k] = start[k]
            continue
        put(i, at, -1, facts, batches)
        if other != NEVER:
            put(other, was, -1, facts, batches)
            put(other, other_was, 1, facts, batches)
            start[other] = other_was
        put(i, was, 1, facts, batches)
        start[i] = was
    return least
