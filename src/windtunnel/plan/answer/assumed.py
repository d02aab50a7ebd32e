"""Assumed: how much an answer depends on what prompts are assumed to share."""

import math

from windtunnel.plan.capacity import capacity
from windtunnel.plan.search_result import SearchResult
from windtunnel.workload import Workload


def with_nothing_shared(answer: SearchResult, load: Workload) -> str | None:
    """What the winner serves of the load if its prompts share nothing, in a sentence; None without a winner."""
    if answer.best is None:
        return None
    deployment = answer.measured(answer.best)[0]
    question = answer.question
    rate = capacity(deployment, question.under(load, question.seed)).rate
    served = {0.0: "nothing", math.inf: "any rate"}.get(rate, f"up to {rate:.3g} {question.unit}")
    return f"Cached prompts are an assumption: with none it serves {served} within the goal."
