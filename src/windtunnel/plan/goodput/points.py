"""Points: which numbers of replicas of a candidate are worth a simulation, and how much of one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from windtunnel.deployment import Deployment
from windtunnel.plan.doubt import tightened
from windtunnel.plan.outcome import Outcome, measure
from windtunnel.plan.question import Question
from windtunnel.plan.trial import LEAST, Tables, missed, simulated
from windtunnel.simulate.run import REJECTED, Requests
from windtunnel.workload import Workload, head

OFFERED, STOPPED, SIMULATED = "offered", "stopped", "simulated"
"""Rules that close a number of replicas: all that is asked for would be too little; what was lost by a moment of the
run leaves too little; the whole run was not better."""
LOST = 2.0
"""A beginning that may end a run asks for this many times the tokens whose loss decides."""


class Closed(NamedTuple):
    """Why a number of replicas is not better than the best."""

    replicas: int
    rule: str
    score: float
    """What it has at most; exactly, where it was simulated."""


def in_turn(likely: int, least: int, most: int) -> Iterator[int]:
    """Numbers of replicas: from the likely one upwards, and then downwards from it."""
    first = min(max(likely, least), most)
    yield from range(first, most + 1)
    yield from range(first - 1, least - 1, -1)


def good_run(
    question: Question, deployment: Deployment, rate: float, tables: Tables, beats: Callable[[float, float], bool]
) -> Outcome:
    """A run at the load's own arrivals, ended where what was lost so far decides; under several draws of the load the
    one with the fewest good tokens.

    ``beats``: whether that many good tokens per second, at a share of good requests, would still be good enough.
    """
    worst: Outcome | None = None
    for draw in tightened(deployment, tables, question).each_draw():
        found = _one_run(draw, deployment, rate, tables, beats)
        if worst is None or (found.good_rate, found.good_share) < (worst.good_rate, worst.good_share):
            worst = found
        if found.stopped:
            break
    assert worst is not None
    return worst


def _one_run(
    question: Question, deployment: Deployment, rate: float, tables: Tables, beats: Callable[[float, float], bool]
) -> Outcome:
    workload = question.workload
    count = _beginning(workload, beats)
    if count is not None:
        begun = simulated(question, deployment, head(workload, count), tables)
        most = at_most(begun.requests, workload, question)
        if not beats(*most):
            found = measure(begun, question, rate, stopped=True)
            return replace(found, good_rate=most[0], good_share=most[1])
    return measure(simulated(question, deployment, workload, tables), question, rate)


def _beginning(workload: Workload, beats: Callable[[float, float], bool]) -> int | None:
    """How many requests to simulate first: those that ask for LOST times what may be lost; None where that is more than
    half of the load, or too few to pay."""
    asked = np.cumsum(workload.output_tokens)
    total, seconds = float(asked[-1]), workload.duration
    low, high = 0.0, 1.0  # the share of the tokens whose loss is too much
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if beats((1 - middle) * total / seconds, 1.0) else (low, middle)
    count = int(np.searchsorted(asked, LOST * high * total)) + 1
    return count if LEAST <= count <= len(workload) // 2 else None


def at_most(begun: Requests, workload: Workload, question: Question) -> tuple[float, float]:
    """Good tokens per second and the share of good requests that a run can still reach, from its first requests: those
    that have missed a limit for certain when the next one comes are lost, and all others count as good."""
    count = len(begun.arrival)
    now = float(workload.arrival[count])
    lost = begun.status == REJECTED
    for name, limit in question.slo.limits.items():
        lost = lost | missed(begun, name, limit, now)
    tokens = float(workload.output_tokens.sum()) - float(workload.output_tokens[:count][lost].sum())
    return tokens / workload.duration, 1.0 - float(lost.sum()) / len(workload)
