"""Of what the tokens were that prompts found in a cache: the session's earlier prompts, its answers, or other texts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.core.records import NONE, Array

KINDS = ("history", "answers", "others")
"""Earlier prompts of the same session; what the server answered in it; prompts of others, such as a system prompt."""


def reuse_by_kind(demand: Any, cached_tokens: NDArray[np.int64]) -> dict[str, int]:
    """Tokens found by all requests, by KINDS; nothing where it is not known what prompts share."""
    if demand.begins is None:
        return {}
    above, begins = demand.begins
    sessions = np.full(len(above), NONE) if demand.sessions is None else demand.sessions
    found = np.zeros(len(KINDS), np.int64)
    count(above, begins, sessions, demand.prompt_tokens, np.ascontiguousarray(cached_tokens, np.int64), found)
    return dict(zip(KINDS, found.tolist(), strict=True))


def computed_again(demand: Any, cached_tokens: NDArray[np.int64], ran: NDArray[np.bool_], block: int) -> int:
    """Tokens of whole blocks that prompts share with earlier texts, and for which they found nothing: evicted before
    their reuse, on another replica, or not computed yet. An answer's last token never is. ``ran``: who was admitted."""
    if demand.begins is None:
        return 0
    above, begins = demand.begins
    whole = (above != NONE) & (begins == (demand.prompt_tokens + demand.output_tokens)[above])
    shared = np.minimum(begins - whole, demand.prompt_tokens - 1) // block * block
    return int(np.maximum(shared - cached_tokens, 0)[ran].sum())


@entry
def count(above: Array, begins: Array, sessions: Array, prompts: Array, cached: Array, found: Array) -> None:
    """Add up who wrote the first ``cached`` tokens of each prompt."""
    for r in range(len(above)):
        end, owner = cached[r], r
        while end > 0:
            start = min(begins[owner], end)
            own = owner == r or (sessions[owner] == sessions[r] and sessions[r] != NONE)
            answered = max(end - max(start, prompts[owner]), 0) if owner != r else 0
            found[1] += answered
            found[0 if own else 2] += end - start - answered
            end, owner = start, above[owner]
