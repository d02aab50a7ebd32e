"""Bounds: what no schedule can beat, by formula, for any number of requests.

Every batch takes at least a linear cost (``costs_below``), and each request brings work that no schedule avoids: its
tokens, the pairs of its prompt, the KV that its decodes read, and its share of each batch's base by what it uses of a
limit (tokens of a batch, places, memory). Chunked prefill, pauses, evictions and other orders do not change that work
or add to it, so the bounds hold for all schedulers, at any arrivals.
"""

from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum.cost import Cost, costs_below
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
KEPT = 2
"""Pairs of cost and limit that completions are bounded by, of each measure that ranks them."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in seconds: from the first arrival to the last token, and of means over requests."""

    makespan: float
    mean_e2el: float
    mean_ttft: float
    mean_tpot: float

    def of(self, objective: Objective) -> float:
        """The bound of a weighted sum."""
        return objective.sum_of(self.makespan, self.mean_e2el, self.mean_ttft, self.mean_tpot)


@dataclass(frozen=True)
class Work:
    """What requests bring up to an event, their first or last token, under one cost."""

    own: Floats
    """Seconds beside the base of batches."""
    steps: Integers
    """Batches that a request takes part in at least, one after the other."""
    uses: tuple[tuple[Integers, int], ...]
    """(what each request uses of a limit, summed over batches; the limit)."""
    base: float

    @property
    def alone(self) -> Floats:
        """Seconds of each request if there were no other."""
        return self.base * self.steps + self.own

    def shares(self) -> list[Floats]:
        """For each limit, seconds of each request: its work, and its share of the base of batches."""
        return [self.own + self.base * used / limit for used, limit in self.uses]


def bounds(problem: Problem, engines: int = 1, cached: bool = False) -> Bounds:
    """Lower bounds for any schedule of a problem, on this many engines that share the requests in any way.

    ``cached``: an evicted request may find what it had computed in a prefix cache.

    Raises InputError for batch times of which no linear cost is known.
    """
    costs = linear_costs(problem)
    last = [to_last_token(problem, cost, cached) for cost in costs]
    first = [to_first_token(problem, cost) for cost in costs]
    return Bounds(
        makespan=_makespan(problem, last, engines),
        mean_e2el=_mean(problem.arrival, last, engines),
        mean_ttft=_mean(problem.arrival, first, engines),
        mean_tpot=_mean_tpot(problem, costs, cached),
    )


def _mean_tpot(problem: Problem, costs: tuple[Cost, ...], cached: bool) -> float:
    """Least mean seconds per token after the first: each takes at least a batch that computes one token and reads the
    request's context. A request that is served alone reaches it."""
    prompt, output = (of[problem.output_tokens > 1] for of in (problem.prompt_tokens, problem.output_tokens))
    if not len(output):
        return 0.0
    least = [
        cost.base + cost.per_token + cost.per_sequence + per_context(cost, cached) * (prompt + output / 2)
        for cost in costs
    ]
    return float(np.max(least, axis=0).mean())


def linear_costs(problem: Problem) -> tuple[Cost, ...]:
    """The linear costs below the batch times of a problem; a bound holds for each."""
    return costs_below(problem.times, problem.limits.max_num_batched_tokens, problem.limits.max_num_seqs)


def per_context(cost: Cost, cached: bool = False) -> float:
    """Seconds that a token of context costs each decode at least.

    A decode that reads c ≥ 2 tokens may be replaced by computing them again, c tokens and c² pairs, with a cache by a
    chunk of one token, 2c − 1 pairs.
    """
    again = 1.5 * cost.per_pair if cached else cost.per_token / 2 + 2 * cost.per_pair
    return min(cost.per_kv_token, again)


def to_last_token(problem: Problem, cost: Cost, cached: bool = False) -> Work:
    """What requests bring up to their last token; ``cached`` as of ``bounds``."""
    prompt, output, limits = problem.prompt_tokens, problem.output_tokens, problem.limits
    contexts = (output - 1) * prompt + output * (output - 1) // 2  # of all decodes, each with its own token
    own = (
        cost.per_token * (prompt + output - 1)
        + cost.per_pair * prompt.astype(np.float64) ** 2
        + cost.per_sequence * output
        + per_context(cost, cached) * contexts
    )
    uses = (
        (prompt + output - 1, limits.max_num_batched_tokens),
        (prompt, problem.prefill_tokens),
        (output, limits.max_num_seqs),
        (
            _blocks_up_to(prompt + output - 1, limits.block_size) - _blocks_up_to(prompt - 1, limits.block_size),
            limits.num_blocks,
        ),
    )
    return Work(own, _chunks(problem) + output - 1, uses, cost.base)


def to_first_token(problem: Problem, cost: Cost) -> Work:
    """What requests bring up to their first token."""
    prompt, limits = problem.prompt_tokens, problem.limits
    own = cost.per_token * prompt + cost.per_pair * prompt.astype(np.float64) ** 2 + cost.per_sequence
    uses = (
        (prompt, problem.prefill_tokens),
        (np.ones_like(prompt), limits.max_num_seqs),
        (-(-prompt // limits.block_size), limits.num_blocks),
    )
    return Work(own, _chunks(problem), uses, cost.base)


def _blocks_up_to(tokens: Integers, size: int) -> Integers:
    """Blocks that 1, 2, … tokens take, summed up to each: a batch that gives a token holds whole blocks."""
    full, rest = tokens // size, tokens % size
    return size * (full * (full + 1) // 2) + rest * (full + 1)


def _chunks(problem: Problem) -> Integers:
    """Batches that each prompt needs."""
    chunks: Integers = -(-problem.prompt_tokens // problem.prefill_tokens)
    return chunks


def _makespan(problem: Problem, works: list[Work], engines: int) -> float:
    """All that arrives from some moment on is computed after it: the largest of these bounds over all moments."""
    order = np.argsort(problem.arrival, kind="stable")
    arrival = problem.arrival[order]

    def from_here_on(values: NDArray[np.generic]) -> Floats:
        return np.cumsum(values[order][::-1].astype(np.float64))[::-1]

    best = 0.0
    for work in works:
        steps = np.max([np.ceil(from_here_on(used) / limit - 1e-9) for used, limit in work.uses], axis=0)
        if engines == 1:
            steps = np.maximum(steps, np.maximum.accumulate(work.steps[order][::-1])[::-1])
        together = (work.base * steps + from_here_on(work.own)) / engines
        alone = np.maximum.accumulate(work.alone[order][::-1])[::-1]
        best = max(best, float((arrival + np.maximum(together, alone)).max() - arrival[0]))
    return best


def most_batches(problem: Problem, cost: Cost, objective: Objective, value: float) -> int:
    """Batches up to the last event that counts, at most, in any schedule with this value or a better one.

    Raises InputError where nothing that counts has an end.
    """
    if objective.goodput is not None:
        return _batches_that_count(problem, cost, objective.goodput)
    work = to_first_token(problem, cost) if objective.first_tokens_only else to_last_token(problem, cost)
    linear = bounds(problem.with_times(cost))
    if objective.makespan:
        rest = objective.sum_of(0.0, linear.mean_e2el, linear.mean_ttft, linear.mean_tpot)
        last = (value - rest) / objective.makespan
    else:
        rest, weight = 0.0, objective.mean_ttft
        if objective.mean_e2el:
            rest = objective.sum_of(0.0, 0.0, linear.mean_ttft, linear.mean_tpot)
            weight = objective.mean_e2el
        earliest = earliest_events(problem.arrival, [work], 1) - problem.arrival.min()
        total = (value - rest) / weight * len(problem) + float((problem.arrival - problem.arrival.min()).sum())
        last = total - float(earliest[:-1].sum())
    return int((last - float(work.own.sum())) / cost.base + 1e-6)


def _batches_that_count(problem: Problem, cost: Cost, limits: SLO) -> int:
    """Batches that may begin before the last moment at which a request can still be good."""
    last = last_moments(problem, limits).max() - problem.arrival.min()
    if not np.isfinite(last):
        raise InputError("objective=goodput: without a limit on ttft or e2el no moment is too late: add one")
    return int(last / (cost.base + cost.per_token) + 1e-6)


def last_moments(problem: Problem, limits: SLO) -> Floats:
    """When each request must have its last token to be good (s)."""
    ttft, tpot, e2el = (np.inf if limit is None else limit for limit in (limits.ttft, limits.tpot, limits.e2el))
    decoding = np.where(problem.output_tokens > 1, tpot, 0.0) * np.maximum(problem.output_tokens - 1, 1)
    return problem.arrival + np.minimum(e2el, ttft + decoding)


def _mean(arrival: Floats, works: list[Work], engines: int) -> float:
    """Mean time from arrival to the event."""
    return float((earliest_events(arrival, works, engines) - np.sort(arrival)).mean())


def earliest_events(arrival: Floats, works: list[Work], engines: int) -> Floats:
    """The earliest times of the first, second, … event.

    The k-th event comes no earlier than the k-th of a machine that shares its time freely and serves the shortest
    remaining work first, which at every moment has ended the most (Schrage, 1968), nor than the k-th if all requests
    ran alone, nor than the batches that the k-th needs and the work of k requests. The larger of all these counts.
    """
    floors = [np.sort(arrival + work.alone) for work in works]
    shares = [share / engines for work in works for share in work.shares()]
    if arrival.min() == arrival.max():
        floors += [arrival[0] + np.cumsum(np.sort(share)) for share in shares]
        floors += [
            arrival[0] + work.base * np.sort(work.steps) + np.cumsum(np.sort(work.own)) / engines for work in works
        ]
    else:
        offline = [np.cumsum(np.sort(share)) for share in shares]
        by_sum = np.argsort([-row.sum() for row in offline])[:KEPT]
        by_last = np.argsort([-row[-1] for row in offline])[:KEPT]
        kept = sorted({int(i) for i in (*by_sum, *by_last)})
        floors += [_shortest_remaining_first(arrival, shares[i]) for i in kept]
    earliest: Floats = np.max(floors, axis=0)
    return earliest


def _shortest_remaining_first(arrival: Floats, work: Floats) -> Floats:
    """When one machine ends its jobs, in order, if the one with the least left to do always runs."""
    order = np.argsort(arrival, kind="stable")
    jobs = list(zip(arrival[order].tolist(), work[order].tolist(), strict=True))
    ends: list[float] = []
    left: list[float] = []
    now, place = jobs[0][0], 0
    while len(ends) < len(jobs):
        if not left:
            now = max(now, jobs[place][0])
        while place < len(jobs) and jobs[place][0] <= now:
            heappush(left, jobs[place][1])
            place += 1
        until = jobs[place][0] if place < len(jobs) else inf
        shortest = heappop(left)
        if now + shortest <= until:
            now += shortest
            ends.append(now)
        else:
            heappush(left, shortest - (until - now))
            now = until
    return np.array(ends)
