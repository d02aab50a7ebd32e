"""Goodput: how many requests can keep their limits at most."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import SLO
from windtunnel.optimum.bounds import last_moments, linear_costs, to_first_token, to_last_token
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
ROUNDING = 1 + 1e-9


def least_missed(problem: Problem, limits: SLO) -> float:
    """Share of requests that miss a limit in any schedule of a problem."""
    return max(_least_missed(problem, cost, limits) for cost in linear_costs(problem))


def _least_missed(problem: Problem, cost: Cost, limits: SLO) -> float:
    """Under one cost: those that would miss it alone; and of the others the fewest that a machine drops which has each
    request's share of the work to do between its arrival and its last moment."""
    last, first = to_last_token(problem, cost), to_first_token(problem, cost)
    ttft, tpot = (inf if limit is None else limit for limit in (limits.ttft, limits.tpot))
    ends = last_moments(problem, limits)
    possible = (first.alone <= ttft * ROUNDING) & (problem.arrival + last.alone <= ends * ROUNDING)
    possible &= (problem.output_tokens == 1) | (cost.base + cost.per_token + cost.per_sequence <= tpot * ROUNDING)
    kept = int(possible.sum())
    for work, moments in ((first, problem.arrival + ttft), (last, ends)):
        here = possible & np.isfinite(moments)
        for share in work.shares():
            in_time = _most_in_time(problem.arrival[here], share[here], moments[here] * ROUNDING)
            kept = min(kept, int(possible.sum() - here.sum()) + in_time)
    return 1.0 - kept / len(problem)


def _most_in_time(arrival: Floats, work: Floats, due: Floats) -> int:
    """How many jobs one machine can end in time at most.

    Arrivals are moved forward until they have the order of the last moments. Then the most are in time if jobs are
    taken in that order, and whenever one would be late, that one is dropped without which the others end first (Kise,
    Ibaraki and Mine, Operations Research 26, 1978).
    """
    order = np.argsort(due, kind="stable")
    released = np.minimum.accumulate(arrival[order][::-1])[::-1]
    kept: list[int] = []
    now = -inf
    for place, job in enumerate(order.tolist()):
        kept.append(place)
        now = max(now, released[place]) + work[job]
        if now > due[job]:
            ends = _ends_without(released[kept], work[order[kept]])
            dropped = int(np.argmin(ends))
            now = float(ends[dropped])
            del kept[dropped]
    return len(kept)


def _ends_without(released: Floats, work: Floats) -> Floats:
    """When one machine ends jobs, in this order, without each of them."""
    done = np.concatenate([[0.0], np.cumsum(work)])
    before = np.concatenate([[-inf], done[1:] + np.maximum.accumulate(released - done[:-1])])[:-1]
    after = done[-1] - done[1:]
    latest = np.concatenate([np.maximum.accumulate((released - done[:-1])[::-1])[::-1] + done[-1], [-inf]])[1:]
    ends: Floats = np.maximum(before + after, latest)
    return ends
