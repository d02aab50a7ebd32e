"""Points: which numbers of replicas of a candidate are worth a simulation, and how much of one."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.metrics import good_requests, request_metrics
from windtunnel.plan.doubt import tightened
from windtunnel.plan.outcome import Outcome, measure, only_good
from windtunnel.plan.question import Question
from windtunnel.plan.trial import LEAST, Tables, as_asked, missed, of_the_last, simulated, with_paid_gpus
from windtunnel.policy.scaling import Foresight
from windtunnel.simulate.run import FINISHED, REJECTED, Requests, Run
from windtunnel.workload import Workload, head

Floats = NDArray[np.float64]

OFFERED, STOPPED, SIMULATED = "offered", "stopped", "simulated"
"""Rules that close a number of replicas: all that is asked for would be too little; what was lost by a moment of the
run leaves too little; the whole run was not better."""
LOST = 2.0
"""A beginning that may end a run asks for this many times the tokens whose loss decides."""
MORE, WORTH = 1.03, 0.9
"""How many times those a like run must have lost by then, and the longest beginning that pays, as a share of all."""


class Closed(NamedTuple):
    """Why a number of replicas is not better than the best."""

    replicas: int
    rule: str
    score: float
    """What it has at most; exactly, where it was simulated."""


def try_counts(least: int, most: int, likely: int, asked: Callable[[int], bool], fails: Callable[[int], bool]) -> None:
    """Try numbers of replicas, from a likely one on, so that all others are closed too.

    Args:
        asked: whether the load asks for enough on this many; what it closes is closed for more of them as well.
        fails: tries a number; whether too few requests are good, which is then so with fewer.
    """
    fails = cache(fails)
    start = min(max(likely, least), most)
    while start > least and not asked(start):
        start = max(least, start // 2)
    if not asked(start):
        return
    first = start
    if fails(start):
        found = _first_that_holds(start, most, asked, fails)
        if found is None:
            return
        first = found
    else:
        for count in range(start - 1, least - 1, -1):
            if asked(count) and fails(count):
                break
    for count in range(first + 1, most + 1):
        if not asked(count):
            return
        fails(count)


def _first_that_holds(bad: int, most: int, asked: Callable[[int], bool], fails: Callable[[int], bool]) -> int | None:
    """The least number above ``bad`` that does not fail, by strides that double and bisection; None where the load asks
    for too little on those."""
    good, stride = None, 1
    while good is None:
        if bad == most:
            return None
        count, stride = min(bad + stride, most), 2 * stride
        while not asked(count):  # what is between may still pay
            if count - bad <= 1:
                return None
            count = (bad + count) // 2
        bad, good = (count, None) if fails(count) else (bad, count)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (middle, good) if fails(middle) else (bad, middle)
    return good


def good_run(
    question: Question,
    deployment: Deployment,
    rate: float,
    tables: Tables,
    beats: Callable[[float, float], bool],
    seen: Callable[[Run], None] | None = None,
    only_count: bool = False,
    lost: Floats | None = None,
    late: Floats | None = None,
) -> Outcome:
    """A run at the load's own arrivals, ended where what was lost so far decides; under several draws of the load the
    one with the fewest good tokens. Of a run that is not good enough only its good tokens are counted.

    Args:
        question, deployment, rate, tables: what is simulated.
        beats: whether that many good tokens per second, at a share of good requests, would still be good enough.
        seen: is given every run, of a beginning where that ends it.
        only_count: do not measure more than good tokens of those that are good enough either.
        lost, late: see ``beginning``; ``late`` is not of other draws.
    """
    worst: Outcome | None = None
    for draw in tightened(deployment, tables, question).each_draw():
        surely = late if not question.draws else None
        found = _one_run(draw, deployment, rate, tables, beats, seen, only_count, lost, surely)
        if worst is None or (found.good_rate, found.good_share) < (worst.good_rate, worst.good_share):
            worst = found
        if found.stopped:
            break
    assert worst is not None
    return as_asked(worst, question)


def _one_run(
    question: Question,
    deployment: Deployment,
    rate: float,
    tables: Tables,
    beats: Callable[[float, float], bool],
    seen: Callable[[Run], None] | None,
    only_count: bool,
    lost: Floats | None,
    late: Floats | None,
) -> Outcome:
    workload = question.workload
    count = beginning(workload, beats, lost, late)
    if count is not None and not _looks_ahead(deployment):
        begun = simulated(question, deployment, first_of(workload, count), tables)
        most = at_most(begun.requests, workload, question, late)
        if not beats(*most):
            if seen is not None:
                seen(begun)
            return only_good(rate, *most, stopped=True)
    run = simulated(question, deployment, workload, tables)
    if seen is not None:
        seen(run)
    good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, question.slo)
    assert good is not None
    reached = float(run.requests.output_tokens[good].sum()) / workload.duration, float(good.mean())
    found = only_good(rate, *reached) if only_count or not beats(*reached) else measure(run, question, rate)
    return with_paid_gpus(found, run, deployment)


def _looks_ahead(deployment: Deployment) -> bool:
    """Whether what happens depends on requests that are yet to come."""
    scalings = (deployment.autoscaler(pool) for pool in deployment.pools)
    return any(scaling is not None and isinstance(scaling.rule, Foresight) for scaling in scalings)


def beginning(
    workload: Workload, beats: Callable[[float, float], bool], lost: Floats | None = None, late: Floats | None = None
) -> int | None:
    """How many requests to simulate first: those that ask for LOST times what may be lost, or those by which a like run
    had lost a little more than that. None where that is too much of the load, or too little to pay.

    Args:
        lost: output tokens of the bad requests of a like run so far, by request.
        late: output tokens that are lost among requests from each on, whatever those before them did, and 0.
    """
    asked = np.cumsum(workload.output_tokens)
    total, seconds = float(asked[-1]), workload.duration
    low, high = 0.0, 1.0  # the share of the tokens whose loss is too much
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if beats((1 - middle) * total / seconds, 1.0) else (low, middle)
    like = lost is not None and len(lost) == len(asked)
    so_far = lost if lost is not None and like else asked / LOST
    enough = so_far + (0.0 if late is None else late[1:]) >= (MORE if like else 1.0) * high * total
    count = int(np.argmax(enough)) + 1 if enough.any() else len(asked)
    return count if LEAST <= count <= (WORTH if like else 1 / LOST) * len(workload) else None


def first_of(workload: Workload, count: int) -> Workload:
    """Its first requests, kept for the next run of them."""
    return of_the_last(_first, f"{workload.digest} {count}", lambda: head(workload, count), 2)


_first: dict[str, Workload] = {}


def lost_so_far(workload: Workload, good: NDArray[np.bool_]) -> Floats:
    """Output tokens of bad requests, up to each."""
    return np.cumsum(np.where(good, 0, workload.output_tokens)).astype(np.float64)


def at_most(begun: Requests, workload: Workload, question: Question, late: Floats | None = None) -> tuple[float, float]:
    """Good tokens per second and the share of good requests that a run can still reach, from its first requests: those
    that have missed a limit for certain when the next one comes are lost, and all others but those that come ``late``
    count as good."""
    count = len(begun.arrival)
    now = float(workload.arrival[count])
    lost = begun.status == REJECTED
    for name, limit in question.slo.limits.items():
        lost = lost | missed(begun, name, limit, now)
    tokens = float(workload.output_tokens.sum()) - float(workload.output_tokens[:count][lost].sum())
    tokens -= 0.0 if late is None else float(late[count])
    return tokens / workload.duration, 1.0 - float(lost.sum()) / len(workload)
