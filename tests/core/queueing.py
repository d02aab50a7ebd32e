"""The compiled core as a queue: arrivals and lengths in, times out, with batch times that are linear in tokens."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.metrics import Interval, spread
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, VllmV1

Floats = NDArray[np.float64]

REPLICATIONS = 40
WARM_UP = 0.1
"""Share of each replication that is left out at its start."""
SYNCHRONOUS = VllmV1(async_scheduling=False)
"""A step is planned when the one before it has ended: what theory means by a server."""


def serve(
    arrival: Floats,
    prompt: Any = 1,
    output: Any = 1,
    *,
    base: float = 0.0,
    token: float = 0.0,
    kv_token: float = 0.0,
    pair: float = 0.0,
    limits: Limits,
    priority: Any = 0,
    policy: Any = SYNCHRONOUS,
    replicas: int = 1,
    stages: int = 1,
    router: int = 0,
    uniforms: Floats | None = None,
) -> Record:
    """Serve requests whose batches take base + token·tokens + kv_token·(KV read) + pair·(query-key pairs) seconds.

    With several ``stages`` they take as long in each.
    """
    n = len(arrival)
    lengths, outputs = np.broadcast_to(prompt, n).astype(np.int64), np.broadcast_to(output, n).astype(np.int64)
    demand = Demand(
        arrival=np.asarray(arrival, dtype=np.float64),
        prompt_tokens=lengths,
        output_tokens=outputs,
        overruns=np.zeros(n, dtype=np.bool_),
        refused=np.zeros(n, dtype=np.bool_),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        priority=np.broadcast_to(priority, n).astype(np.int64),
    )
    times = linear(
        base,
        token,
        kv_token,
        pair,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    sends = np.zeros((max(stages - 1, 1), limits.max_num_batched_tokens + 1))
    tables = StageTimes((times,) * stages, sends) if stages > 1 else times
    fleet = Fleet((limits,), (policy,), (tables,), (replicas,), (1,), (False,))
    return run(fleet, demand, router, np.zeros(n) if uniforms is None else uniforms)


def poisson(rng: np.random.Generator, rate: float, n: int) -> Floats:
    """Arrivals of a Poisson process."""
    return np.cumsum(rng.exponential(1 / rate, n))


def sojourn(record: Record) -> Floats:
    """Time from arrival to last token of each request."""
    times: Floats = record.requests["finish"] - record.requests["arrival"]
    return times


def estimate(
    one: Callable[[np.random.Generator], Record],
    statistic: Callable[[Floats], Any] = np.mean,
    value: Callable[[Record], Floats] = sojourn,
    replications: int = REPLICATIONS,
) -> Interval:
    """A statistic of requests over independent replications without their warm-up, with its 95 % interval."""
    found = []
    for seed in range(replications):
        values = value(one(np.random.default_rng([seed, 17])))
        found.append({"statistic": float(statistic(values[int(WARM_UP * len(values)) :]))})
    return spread(found)["statistic"]


def check(found: Interval, theory: float, precision: float = 0.01, bias: float = 0.0) -> None:
    """Within 3 half-widths (6 σ) of the theory, and so precise that a wrong model cannot hide in the noise.

    ``bias`` is how far the simulated system is known to be from the theory's.
    """
    assert found.half_width <= precision * theory
    assert abs(found.mean - theory) <= 3 * found.half_width + bias


def poisson_shares(rate: float, states: int) -> Floats:
    """Probability of k arrivals in a time of 1, k < states."""
    return np.array([math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for k in range(states)])


def stationary(chain: Floats) -> Floats:
    """Shares of the states of a Markov chain."""
    system = chain.T - np.eye(len(chain))
    system[-1] = 1.0  # in place of one balance, which follows from the others
    shares: Floats = np.linalg.solve(system, np.eye(len(chain))[-1])
    return shares
