"""Doubt: what deployments do where their steps take longer, or less long, than simulated.

A confidence of 0.9 asks for what holds on 9 of 10 measured servers: every step takes as long as on the server of
that place among those of the evidence (``metrics.evidence``), and limits on the first token are as much tighter as
first tokens come later still. Confidences of 0.05 and 0.95 are the ends of the 90 % band.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from windtunnel.deployment import Deployment
from windtunnel.metrics.bands import least_certain
from windtunnel.metrics.evidence import Doubt
from windtunnel.metrics.pairs import divergence
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.question import Question

ENDS = (0.05, 0.95)
"""Confidences at the ends of the 90 % band."""
CONTEXT = 1000
"""Tokens in the cache of a request of the batch whose error stands for a deployment's."""


def doubt_of(deployment: Deployment, tables: Sequence[Tabulated], question: Question) -> Doubt:
    """What the evidence says about the least certain pool; the error is that of a decode step of half the requests of
    the first."""
    found, error = tables[0], math.nan
    if "error" in found.doubts:
        requests = max(found.times.max_num_seqs // 2, 1)
        parts = (table.batch(requests, CONTEXT * requests, []) for table in (found.doubts["error"], found.times))
        error = next(parts) / next(parts)
    return least_certain((pool.spec() for pool in deployment.pools), error, question.overheads.agreement)


def slowed(deployment: Deployment, tables: Sequence[Tabulated], question: Question) -> Sequence[Tabulated]:
    """The tables of a server at the question's confidence."""
    if question.confidence is None:
        return tables
    factor = doubt_of(deployment, tables, question).below("steps", question.confidence)
    return [
        replace(
            table.scaled(factor),
            doubts={name: part.scaled(factor) for name, part in table.doubts.items()},
        )
        for table in tables
    ]


def tightened(deployment: Deployment, tables: Sequence[Tabulated], question: Question) -> Question:
    """The question with limits on the first token as much tighter as it comes later than ``slowed`` steps say."""
    if question.confidence is None:
        return question
    found = doubt_of(deployment, tables, question)
    first, steps = (found.below(name, question.confidence) for name in ("first_token", "steps"))
    return replace(question, slo=question.slo.with_later_first_tokens(first / steps))


def told_apart(one: Deployment, other: Deployment) -> float:
    """The share by which two deployments must differ to be told apart with 90 % confidence: nothing where they are
    equal, else what ratios of two measured servers leave open."""
    if one == other:
        return 0.0
    steps = divergence(*([pool.spec() for pool in each.pools] for each in (one, other))).steps
    return math.expm1((steps[-1] - steps[0]) / 2)
