"""Token gaps request by request, rebuilt from the steps of the replica that served it."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.steps import Steps
from windtunnel.run import FINISHED

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""A step's end and a token's time are the same event, rounded apart (s)."""


def token_gaps_by_request(steps: Steps) -> list[Floats]:
    """For each request the gaps between its tokens (s): output_tokens − 1 of them, none unless it finished.

    Its tokens are the ends of all steps of its replica from its first token to its last, but for those during which it
    was preempted. Where ranks of a replica step on their own, the log does not say which one served a request: then the
    gaps of a request whose steps cannot be told apart are left empty.
    """
    requests, stalls = steps.run.requests, steps.run.stalls
    ends = _ends_by_replica(steps)
    stalled: dict[int, list[int]] = {}
    for index, request in enumerate(stalls.request.tolist()):
        stalled.setdefault(request, []).append(index)
    gaps = []
    for index, identity in enumerate(requests.id.tolist()):
        served = requests.status[index] == FINISHED and requests.replica[index] >= 0
        tokens = np.zeros(0)
        if served:
            times = ends[int(requests.replica[index])]
            low, high = requests.first_token[index] - TOLERANCE, requests.finish[index] + TOLERANCE
            tokens = times[np.searchsorted(times, low) : np.searchsorted(times, high)]
            for stall in stalled.get(identity, ()):
                after, until = stalls.last_token[stall] + TOLERANCE, stalls.resumed_token[stall] - TOLERANCE
                tokens = tokens[(tokens <= after) | (tokens >= until)]
        gaps.append(np.diff(tokens) if len(tokens) == requests.output_tokens[index] else np.zeros(0))
    return gaps


def _ends_by_replica(steps: Steps) -> list[Floats]:
    """Distinct ends of the steps of each replica, in order; ranks in lockstep end together."""
    owner = steps.run.iterations.replica[steps.row]
    order = np.lexsort((steps.end, owner))
    cuts = np.searchsorted(owner[order], np.arange(len(steps.run.manifest["replicas"]) + 1))
    ends = steps.end[order]
    found = []
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        times = ends[low:high]
        found.append(times[np.diff(times, prepend=-np.inf) > TOLERANCE])
    return found
