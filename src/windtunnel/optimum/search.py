"""Search: good schedules of many requests, without chunks, evictions and pauses.

First, requests begin as soon as their whole future fits memory (the look-ahead of MC-SF, arXiv 2502.07115), in several
orders, with a number of places, and of prompts in a batch or at a pace: fewer places end requests one after the other
rather than all at the end, and a pace keeps peaks of memory apart. From the best of them, or a simulated schedule that
is better, simulated annealing moves and swaps beginnings, of many requests those of one window after the other. What
it finds is a schedule like any other: ``check`` says when its requests end under the true batch times.
"""

import time
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from windtunnel.optimum.anneal import NEVER, Batches, Facts, anneal, fill, look_ahead
from windtunnel.optimum.bounds import last_moments, to_last_token
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.rules import AS_BEGUN, keeps
from windtunnel.optimum.schedule import Batch, Schedule, as_early_as_possible

Integers = NDArray[np.int64]
Watch = Callable[[float], None]
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03)
"""Of the requests, or of the places if those are fewer, that are tried as places."""
BEGINS = (1, 2, 4, 8, 10**9)
"""Prompts in a batch, at most."""
PACES = (1.0, 1.05, 1.15, 1.4)
"""Beginnings, in multiples of the pace at which memory is full all the time."""
FIRST_ARRIVAL = 6
"""Place of the first arrival among the weights of ``Facts``."""
FIRST = 0.3
"""Share of the time for the first schedules of all orders."""
MOVES = 2048
"""From one look at the clock to the next."""
HOT, COLD = 0.3, 1e-3
"""First and last warmth, as shares of a request's part of the value."""
COOLINGS = 6
"""Within the time: each begins where the one before was best."""
WINDOW = 150
"""Requests that may move at once; of more, the others stand still, and the window moves on."""
LEAST_SECONDS = 0.5
"""Of a window."""


def begin_by(problem: Problem, start: Integers) -> Schedule:
    """The schedule in which each request begins in a batch and computes until its last token."""
    batches: list[dict[int, int]] = [{} for _ in range(int((start + problem.output_tokens).max()))]
    for i in np.argsort(start, kind="stable").tolist():
        batches[start[i]][i] = int(problem.prompt_tokens[i])
        for b in range(start[i] + 1, start[i] + int(problem.output_tokens[i])):
            batches[b][i] = 1
    return as_early_as_possible(problem, [Batch(0.0, tokens) for tokens in batches if tokens])


def begins_of(problem: Problem, schedule: Schedule) -> Integers | None:
    """The batch in which each request begins; None where that does not say all: there are chunks, evictions, pauses."""
    if not keeps(problem, schedule, AS_BEGUN):
        return None
    start = np.full(len(problem), NEVER)
    for number, batch in enumerate(schedule.batches):
        for i in batch.tokens:
            if start[i] == NEVER:
                start[i] = number
    return start


def search(
    problem: Problem,
    cost: Cost,
    objective: Objective,
    seconds: float,
    seed: int = 0,
    *,
    known: Schedule | None = None,
    watch: Watch | None = None,
) -> Schedule | None:
    """A good schedule under a linear cost, after this many seconds at most (and the first of all orders).

    Many requests are moved by rolling horizon: those of one window after the other, between all others.

    ``known``: a schedule to begin with, where it is better and of the kind. ``watch``: told the value under the linear
    cost of every better one. None where a prompt needs chunks.
    """
    if problem.prompt_tokens.max() > problem.prefill_tokens:
        return None
    deadline, rng = time.monotonic() + seconds, np.random.default_rng(seed)
    facts = _facts(problem, cost, objective)
    found = _first(problem, facts, deadline - seconds * (1 - FIRST))
    if known is not None and (begun := begins_of(problem, known)) is not None:
        found = min((start for start in (begun, found) if start is not None), key=lambda start: _value(start, facts))
    if found is None:
        return None
    later = float(facts.weights[1:3].sum() * problem.arrival.sum())
    tell = (lambda value: watch(value - later)) if watch and objective.goodput is None else _silent
    if len(problem) > WINDOW:
        return begin_by(problem, _rolled(found, facts, deadline, rng, tell))
    first = facts.weights[FIRST_ARRIVAL]
    return begin_by(problem, _annealed(found, facts, _empty(_room(found, facts), first), deadline, rng, tell))


def _silent(_: float) -> None:
    """Tell nobody."""


def _value(start: Integers, facts: Facts) -> float:
    """Of a schedule, under the linear cost."""
    return float(fill(start, facts, _empty(_room(start, facts), facts.weights[FIRST_ARRIVAL])))


def _room(start: Integers, facts: Facts) -> int:
    """Batches that a schedule and moves from it have."""
    return int((start + facts.output).max() * 1.25) + 16


def _facts(problem: Problem, cost: Cost, objective: Objective) -> Facts:
    n, limits, goodput = len(problem), problem.limits, objective.goodput
    makespan, e2el, ttft, tpot = objective.weights
    of_first, of_token, missed = np.inf, np.inf, 0.0
    if goodput is not None:
        of_first, of_token = (np.inf if limit is None else limit for limit in (goodput.ttft, goodput.tpot))
        e2el, missed = 1e-6, 1.0  # of equally good ones the earlier, so that the search sees where it goes
    longest, several = problem.output_tokens.max(), problem.output_tokens > 1
    gap = several * (tpot / max(several.sum(), 1)) / np.maximum(problem.output_tokens - 1, 1)
    latest = np.full(n, np.inf) if goodput is None else last_moments(problem, goodput)
    return Facts(
        problem.prompt_tokens,
        problem.output_tokens,
        problem.arrival,
        latest,
        gap,
        np.array([cost.base, cost.per_token, cost.per_kv_token, cost.per_pair, cost.per_sequence]),
        np.array(
            [
                *(limits.max_num_batched_tokens, limits.max_num_seqs, limits.num_blocks, limits.block_size),
                *(longest, problem.prefill_tokens),
            ]
        ),
        np.array([makespan, e2el / n, ttft / n, missed / n, of_first, of_token, problem.arrival.min()]),
    )


def _empty(room: int, first: float) -> Batches:
    """No request has a place in any of this many batches, none of which begins before the first arrival."""
    integers, floats = np.zeros((4, room), dtype=np.int64), np.zeros((5, room))
    floats[3] = first
    return Batches(*integers, *floats)


def _each(batches: Batches, part: slice, *, copied: bool = True) -> Batches:
    """Some batches, as copies or not."""
    return batches._replace(
        **{name: column[part].copy() if copied else column[part] for name, column in batches._asdict().items()}
    )


def _orders(facts: Facts) -> Iterator[Integers]:
    work = facts.cost[1] * (facts.prompt + facts.output) + facts.cost[0] * facts.output
    keys = (facts.prompt + facts.output, facts.output, work, facts.arrival, facts.prompt)
    longest = -facts.output
    for key in (longest, *keys) if facts.weights[0] > 0 else (*keys, longest):
        yield np.lexsort((facts.arrival, key))


def _first(problem: Problem, facts: Facts, deadline: float) -> Integers | None:
    """The best of all orders, places and prompts in a batch; None if none has room."""
    n = len(problem)
    most = min(problem.limits.max_num_seqs, n)
    places = sorted({max(int(share * most), 1) for share in SHARES}, reverse=True)
    pace = 1 / max(float(used.sum()) / limit / n for used, limit in to_last_token(problem, Cost(*facts.cost)).uses)
    rules = [(BEGINS[-1], np.inf), *((BEGINS[-1], pace * more) for more in PACES)]
    rules += [(begins, np.inf) for begins in BEGINS[:-1]]
    best: tuple[float, Integers] | None = None
    for number, order, (begins, most_begun) in product(places, list(_orders(facts)), rules):
        if begins > number and begins != BEGINS[-1]:
            continue
        if best is not None and time.monotonic() > deadline:
            return best[1]
        start = np.zeros(n, dtype=np.int64)
        room = int(problem.output_tokens.sum() / number * 3 + 2 * problem.output_tokens.max() + 3 * n / pace + n)
        if not look_ahead(order, number, begins, most_begun, start, facts, _empty(room, facts.weights[FIRST_ARRIVAL])):
            continue
        value = _value(start, facts)
        if best is None or value < best[0]:
            best = value, start
    return None if best is None else best[1]


def _annealed(
    start: Integers, facts: Facts, others: Batches, deadline: float, rng: np.random.Generator, tell: Watch = _silent
) -> Integers:
    """The best schedule that moves from this one lead to until the deadline; ``others`` is what stands still."""
    begun, best = time.monotonic(), start.copy()
    least, cooled = np.inf, -1.0
    while (now := time.monotonic()) < deadline:
        cooling, share = divmod(COOLINGS * (now - begun) / (deadline - begun), 1.0)
        if cooling != cooled:
            cooled, place, batches = cooling, best.copy(), _each(others, slice(None))
            least = fill(place, facts, batches)
        warmth = least / len(start) * HOT * (COLD / HOT) ** share
        before = least
        least = anneal(place, best, least, rng.random((MOVES, 7)), warmth, facts, batches)
        if least < before:
            tell(least)
    return best


def _rolled(start: Integers, facts: Facts, deadline: float, rng: np.random.Generator, tell: Watch) -> Integers:
    """Change one window of beginnings after the other, each half into the one before, until the deadline.

    Where all that counts is the last batch, moves within a window shorten nothing: there its requests are put into
    another order, and all begin again as soon as they fit.
    """
    if not (facts.weights[1:4].any() or facts.gap.any()):
        return _reordered(start, facts, deadline, rng, tell)
    n, least = len(start), _value(start, facts)
    first = 0
    while (now := time.monotonic()) < deadline:
        movable = np.argsort(start, kind="stable")[first : first + WINDOW]
        windows = 2 * n / WINDOW
        until = min(now + max((deadline - now) / windows, LEAST_SECONDS), deadline)
        found = start.copy()
        found[movable] = _in_window(start, movable, facts, until, rng)
        if (value := _value(found, facts)) < least:
            start, least = found, value
            tell(least)
        first = first + WINDOW // 2 if first + WINDOW < n else 0
    return start


def _reordered(start: Integers, facts: Facts, deadline: float, rng: np.random.Generator, tell: Watch) -> Integers:
    """Begin as soon as they fit in orders near that of the best schedule, until the deadline."""
    n, least = len(start), _value(start, facts)
    room = 2 * _room(start, facts)
    while time.monotonic() < deadline:
        order = np.argsort(start, kind="stable")
        first = int(rng.integers(0, n))
        window = order[first : first + int(rng.integers(2, WINDOW))]
        order[first : first + len(window)] = window[np.argsort(rng.random(len(window)) * facts.output[window])]
        found = np.zeros(n, dtype=np.int64)
        empty = _empty(room, facts.weights[FIRST_ARRIVAL])
        if look_ahead(order, n, BEGINS[-1], np.inf, found, facts, empty) and (value := _value(found, facts)) < least:
            start, least = found, value
            tell(least)
    return start


def _in_window(start: Integers, movable: Integers, facts: Facts, until: float, rng: np.random.Generator) -> Integers:
    """Better beginnings of these requests, between all others, which stand still."""
    _, e2el, ttft = facts.weights[:3]
    fixed = np.setdiff1d(np.arange(len(start)), movable)
    batches = _empty(_room(start, facts), facts.weights[FIRST_ARRIVAL])
    fill(start[fixed], _some(facts, fixed), batches)
    np.maximum.at(batches.since, start[fixed], facts.arrival[fixed])
    np.add.at(batches.weight, start[fixed], ttft - facts.gap[fixed])
    np.add.at(batches.weight, (start + facts.output)[fixed] - 1, e2el + facts.gap[fixed])
    low, end = int(start[movable].min()), int((start + facts.output)[movable].max())
    high = min(end + (end - low) // 4 + 16, len(batches.tokens))
    window = _each(batches, slice(low, high), copied=False)
    window.weight[-1] += batches.weight[high:].sum()  # all that ends later, if the window takes longer
    whole = _empty(_room(start, facts), facts.weights[FIRST_ARRIVAL])
    fill(start, facts, whole)
    weights = facts.weights.copy()
    weights[FIRST_ARRIVAL] = whole.ends[low - 1] if low else weights[FIRST_ARRIVAL]
    window.since[:] = np.maximum(window.since, weights[FIRST_ARRIVAL])
    return low + _annealed(start[movable] - low, _some(facts, movable)._replace(weights=weights), window, until, rng)


def _some(facts: Facts, which: Integers) -> Facts:
    """The facts of some requests."""
    kept = {name: getattr(facts, name)[which] for name in ("prompt", "output", "arrival", "latest", "gap")}
    return facts._replace(**kept)
