"""Looks: a scheduler that does not look for new requests in every step lets them wait (SGLang's
``--scheduler-recv-interval``, SchedulerRecvSkipper in managers/scheduler_recv_skipper.py of 0.5)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.simulate.run import FINISHED, Requests

Which = NDArray[np.bool_]


def seen_late(requests: Requests, deployment: Deployment) -> Requests:
    """Requests that wait for the next look, half an interval of decode steps on average, where they come while others
    are served; an idle scheduler looks all the time. They take no more time from then on: what they would leave to
    others meanwhile is left out."""
    late = np.zeros(len(requests.id))
    for place, pool in enumerate(deployment.pools):
        interval = pool.engine.scheduler_recv_interval
        own = (requests.pool == place) & (requests.status == FINISHED)
        if interval > 1 and own.any():
            late[own] = (
                0.5
                * (interval - 1)
                * _step(requests, own)
                * (pool.engine.acceptance_length or 1.0)
                * _met(requests, own)
            )
    if not late.any():
        return requests
    return replace(
        requests,
        scheduled=requests.scheduled + late,
        first_token=requests.first_token + late,
        finish=requests.finish + late,
    )


def _step(requests: Requests, own: Which) -> float:
    """Seconds of a decode step that yields a token of each request, on average over these."""
    tokens = np.maximum(requests.output_tokens[own] - 1, 0).sum()
    return float((requests.finish[own] - requests.first_token[own]).sum() / tokens) if tokens else 0.0


def _met(requests: Requests, own: Which) -> Which:
    """Which of them come while their replica serves others."""
    met = np.zeros(int(own.sum()), dtype=np.bool_)
    replicas = requests.replica[own]
    for replica in np.unique(replicas):
        here = replicas == replica
        begun, ended = np.sort(requests.scheduled[own][here]), np.sort(requests.finish[own][here])
        came = requests.arrival[own][here]
        met[here] = np.searchsorted(begun, came, side="left") > np.searchsorted(ended, came, side="right")
    return met
