"""Speculative decoding by expected acceptance: what a step costs, divided by the tokens that it yields.

A step verifies ``drafts`` + 1 tokens of each request, after a draft layer as large as one of the model's ran ``drafts``
times with its own pass through the head (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2). The
simulated request gains one token a step, so the tables hold the time of a real step over ``accepted``: a request's
progress is then exact in expectation, also where prefill chunks come between. Attention reads the cached tokens once
for all tokens of a request.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from windtunnel.perf.answer import Answer
from windtunnel.perf.axes import Axes

Ask = Callable[[int], Answer]
"""Times with so many tokens for each request."""


def per_token(ask: Ask, ax: Axes, drafted: float) -> Answer:
    """Seconds per generated token of an operator that every token passes; ``drafted``: its share in one draft pass."""
    if not ax.drafts:
        return ask(1)
    verified, alone = ask(ax.drafts + 1), ask(1)
    seconds = (verified.seconds + ax.drafts * drafted * alone.seconds) / ax.accepted
    return replace(verified, seconds=seconds, sources=np.maximum(verified.sources, alone.sources))


def per_request(found: Answer, ax: Axes) -> Answer:
    """The same for decode attention, which a verification asks once."""
    if not ax.drafts:
        return found
    return replace(found, seconds=found.seconds * (1.0 + ax.drafts * ax.draft_share) / ax.accepted)
