"""Of what the tokens were that prompts found in a cache: the session's earlier prompts, its answers, system prompts, or
other texts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.core.records import NONE, Array

AGAIN = ("evicted", "elsewhere", "early")
"""Why what a prompt shares was computed again: it had been in the cache that was asked, and is gone; it was computed on
other replicas or ranks only; or nowhere yet."""

KINDS = ("history", "answers", "system", "others")
"""Earlier prompts of the same session; what the server answered in it; the prompts with which other sessions begin a
conversation; and other texts: later turns of other sessions, or of requests without any."""


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
    return 0 if demand.begins is None else int(_missed(demand, cached_tokens, ran, block).sum())


def _missed(demand: Any, cached_tokens: NDArray[Any], ran: NDArray[np.bool_], block: int) -> NDArray[np.int64]:
    above, begins = demand.begins
    whole = (above != NONE) & (begins == (demand.prompt_tokens + demand.output_tokens)[above])
    shared = np.minimum(begins - whole, demand.prompt_tokens - 1) // block * block
    return np.where(ran, np.maximum(shared - cached_tokens, 0), 0)


def why_again(demand: Any, requests: Any, ran: NDArray[np.bool_], block: int) -> dict[str, int]:
    """The tokens of ``computed_again`` by AGAIN; nothing where there are none.

    A cache has had a text's beginning if the one who wrote it, or another prompt with as much of it, was computed there
    before. ``requests``: a run's rows, with the lane that each was on.
    """
    if demand.begins is None:
        return {}
    missed = _missed(demand, requests["cached_tokens"], ran, block)
    rows, (above, begins) = np.flatnonzero(missed), demand.begins
    if len(rows) == 0:
        return {}
    owners, lane, asked = above[rows], requests["lane"], requests["scheduled"][rows]
    answer = begins[rows] > demand.prompt_tokens[owners]
    ready = np.where(answer, requests["finish"][owners], requests["first_token"][owners]) <= asked
    had = (ready & (lane[owners] == lane[rows])) | _had_by_others(above, begins, requests, ran, rows)
    parts = had, ready & ~had, ~ready & ~had
    return {name: int(missed[rows[part]].sum()) for name, part in zip(AGAIN, parts, strict=True)}


def _had_by_others(above: Any, begins: Any, requests: Any, ran: NDArray[np.bool_], rows: Any) -> NDArray[np.bool_]:
    """[rows] whether another prompt that begins with as much of the same text was computed on the same lane before."""
    others = np.flatnonzero(ran & (above != NONE))
    both = np.append(others, rows)
    lanes = int(requests["lane"].max()) + 2
    group = np.unique(above[both] * lanes + requests["lane"][both], return_inverse=True)[1]
    asks = np.arange(len(both)) >= len(others)
    time = np.append(requests["first_token"][others], requests["scheduled"][rows])
    order = np.lexsort((asks, time, group))
    height = int(begins.max()) + 2
    most = np.maximum.accumulate((group * height + np.where(asks, 0, begins[both] + 1))[order])
    found = np.empty(len(both), dtype=np.bool_)
    found[order] = most - group[order] * height > begins[both][order]
    return found[len(others) :]


@entry
def count(above: Array, begins: Array, sessions: Array, prompts: Array, cached: Array, found: Array) -> None:
    """Add up who wrote the first ``cached`` tokens of each prompt."""
    for r in range(len(above)):
        end, owner = cached[r], r
        while end > 0:
            start = min(begins[owner], end)
            own = owner == r or (sessions[owner] == sessions[r] and sessions[r] != NONE)
            if own:
                answered = max(end - max(start, prompts[owner]), 0) if owner != r else 0
                found[1] += answered
                found[0] += end - start - answered
            else:
                opens = above[owner] == NONE or sessions[above[owner]] != sessions[owner]
                opening = min(end, prompts[owner]) - start if opens and sessions[owner] != NONE else 0
                found[2] += max(opening, 0)
                found[3] += end - start - max(opening, 0)
            end, owner = start, above[owner]
