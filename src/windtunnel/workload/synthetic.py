"""Workloads made from an arrival process and a length distribution."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from windtunnel.errors import InputError
from windtunnel.workload.arrivals import Arrivals
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Lengths

MOST_REQUESTS = 50_000_000
"""A request takes about a kilobyte while it is simulated."""


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random stream of one purpose: streams of different purposes or seeds are independent."""
    if seed < 0:
        raise InputError(f"seed={seed}: must be ≥ 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, crc32(purpose.encode())])))


def check_count(name: str, value: int) -> None:
    """Refuse a number of requests: none, or more than fit into memory."""
    if value < 1:
        raise InputError(f"{name}={value}: must be ≥ 1")
    if value > MOST_REQUESTS:
        raise InputError(f"{name}={value}: must be ≤ {MOST_REQUESTS:,}: more do not fit into memory")


def generate(
    arrivals: Arrivals,
    lengths: Lengths,
    num_requests: int,
    seed: int = 0,
    *,
    max_concurrency: int = 0,
    name: str = "synthetic",
) -> Workload:
    """Requests with these arrivals and lengths.

    The two draw from their own streams, so another length distribution leaves the arrivals bit for bit as they
    were, and the other way round. ``max_concurrency`` > 0 closes the loop.
    """
    check_count("num_requests", num_requests)
    arrival = arrivals.times(num_requests, stream(seed, "arrivals"))
    prompt, output = lengths.sample(num_requests, stream(seed, "lengths"))
    return Workload.from_columns(
        arrival=arrival, prompt_tokens=prompt, output_tokens=output, max_concurrency=max_concurrency, name=name
    )
