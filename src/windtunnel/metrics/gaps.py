"""Token gaps request by request, rebuilt from the steps of the lane that served it."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.steps import Steps
from windtunnel.run import FINISHED

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""A step's end and a token's time are the same event, rounded apart (s)."""


def token_gaps_by_request(steps: Steps) -> list[Floats]:
    """For each request the gaps between its tokens (s): output_tokens − 1 of them, none unless it finished.

    Its tokens are the ends of all steps of its lane from its first token to its last, but for those during which it
    was preempted. The lane is the one of its replica whose steps give it the right number of tokens.
    """
    requests, stalls = steps.run.requests, steps.run.stalls
    ends = _ends_by_lane(steps)
    stalled: dict[int, list[tuple[float, float]]] = {}
    for request, *times in zip(
        stalls.request.tolist(), stalls.last_token.tolist(), stalls.resumed_token.tolist(), strict=True
    ):
        stalled.setdefault(request, []).append((times[0], times[1]))
    names = ("id", "replica", "status", "output_tokens", "first_token", "finish")
    gaps = []
    for identity, replica, status, number, first, last in zip(
        *(getattr(requests, name).tolist() for name in names), strict=True
    ):
        found = np.zeros(0)
        for lane in ends.get(replica, ()) if status == FINISHED else ():
            tokens = _tokens(lane, first, last, stalled.get(identity, []))
            if len(tokens) == number and abs(tokens[0] - first) < TOLERANCE and abs(tokens[-1] - last) < TOLERANCE:
                found = np.diff(tokens)
                break
        gaps.append(found)
    return gaps


def _tokens(ends: Floats, first: float, last: float, stalls: list[tuple[float, float]]) -> Floats:
    """The ends of steps from the first token to the last, without those inside a stall."""
    tokens = ends[np.searchsorted(ends, first - TOLERANCE) : np.searchsorted(ends, last + TOLERANCE)]
    for after, until in stalls:
        tokens = tokens[(tokens <= after + TOLERANCE) | (tokens >= until - TOLERANCE)]
    return tokens


def _ends_by_lane(steps: Steps) -> dict[int, list[Floats]]:
    """Ends of the steps of each lane, in order, by replica."""
    log = steps.run.iterations
    owner, lane = log.replica[steps.row], log.lane[steps.row]
    key = owner * (int(lane.max(initial=0)) + 1) + lane
    order = np.lexsort((steps.end, key))
    firsts = np.flatnonzero(np.diff(key[order], prepend=-1))
    found: dict[int, list[Floats]] = {}
    for low, high in pairwise([*firsts.tolist(), len(order)]):
        found.setdefault(int(owner[order[low]]), []).append(steps.end[order[low:high]])
    return found
