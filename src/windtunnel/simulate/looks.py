"""Looks: a scheduler that does not look for new requests in every step lets them wait (SGLang's
``--scheduler-recv-interval``, SchedulerRecvSkipper in managers/scheduler_recv_skipper.py of 0.5), and so does one that
does not look for their KV (``--disaggregation-decode-polling-interval``, ``process_decode_queue`` in
disaggregation/decode.py)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.simulate.run import FINISHED, Requests

Floats = NDArray[np.float64]
Which = NDArray[np.bool_]


def seen_late(requests: Requests, deployment: Deployment) -> Requests:
    """Requests that wait for the next look, half an interval of decode steps on average, where they or their KV come
    while others are served; an idle scheduler looks all the time. They take no more time from then on: what they would
    leave to others meanwhile is left out."""
    late, held = np.zeros((2, len(requests.id)))
    for place, pool in enumerate(deployment.pools):
        own = (requests.pool == place) & (requests.status == FINISHED)
        polls = deployment.handover.polling_interval if pool.role == "decode" else 1
        for waits, interval, came, begun in (
            (late, pool.engine.scheduler_recv_interval, requests.arrival, requests.scheduled),
            (held, polls, requests.first_token, requests.first_token),
        ):
            if interval > 1 and own.any():
                step = _step(requests, own) * (pool.engine.acceptance_length or 1.0)
                waits[own] = 0.5 * (interval - 1) * step * _met(requests, own, came, begun)
    if not (late.any() or held.any()):
        return requests
    return replace(
        requests,
        scheduled=requests.scheduled + late,
        first_token=requests.first_token + late + held,
        finish=requests.finish + late + held,
    )


def _step(requests: Requests, own: Which) -> float:
    """Seconds of a decode step that yields a token of each request, on average over these."""
    tokens = np.maximum(requests.output_tokens[own] - 1, 0).sum()
    return float((requests.finish[own] - requests.first_token[own]).sum() / tokens) if tokens else 0.0


def _met(requests: Requests, own: Which, came: Floats, begun: Floats) -> Which:
    """Which of them come while their replica serves others, whom it has from ``begun`` on."""
    met = np.zeros(int(own.sum()), dtype=np.bool_)
    replicas = requests.replica[own]
    for replica in np.unique(replicas):
        here = replicas == replica
        from_, until = np.sort(begun[own][here]), np.sort(requests.finish[own][here])
        at = came[own][here]
        met[here] = np.searchsorted(from_, at, side="left") > np.searchsorted(until, at, side="right")
    return met
