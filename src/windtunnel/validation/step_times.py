"""Step times: the decode steps of a measured run against the simulated ones.

A request that decodes from its first to its last token passes output_tokens − 1 steps, so the steps per second of each
bin of time follow from all requests together by least squares. Bins in which no request got its first token, and all
that ran had been running, are pure decode: ``windtunnel.perf.explain`` gives the time of their mean batch (ranks
in lockstep share the requests evenly, which a real balancer does not quite).
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.perf.explain import Batch, explain
from windtunnel.validation.measurement import Measurement

BIN = 2.0
"""Seconds in which the rate of steps counts as constant."""

SMOOTH = 0.02
"""Weight of equal rates in neighbouring bins, as a share of the requests' own; keeps empty bins defined."""

FEWEST = 4
"""With fewer running requests a bin is left out."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """A stretch of pure decode: where, how many requests with how many cached tokens, and seconds per step."""

    at: float
    running: int
    cached_tokens: int
    measured: float


def step_rates(measurement: Measurement, edges: Floats) -> Floats:
    """Steps per second in each bin."""
    first, last, tokens = _spans(measurement)
    overlap = np.clip(np.minimum(last[:, None], edges[1:]) - np.maximum(first[:, None], edges[:-1]), 0.0, None)
    weight = SMOOTH * float(np.sqrt(overlap.sum(axis=0).max()))
    smooth = weight * np.diff(np.eye(len(edges) - 1), axis=0)
    wanted = np.concatenate([tokens - 1, np.zeros(len(smooth))])
    rates: Floats = np.linalg.lstsq(np.vstack([overlap, smooth]), wanted, rcond=None)[0]
    return rates


def decode_bins(measurement: Measurement, width: float = BIN) -> Iterator[Bin]:
    """The bins of a measurement in which nothing but decode happens; none where only statistics were measured."""
    first, last, tokens = _spans(measurement)
    edges = np.arange(0.0, last.max(initial=0.0) + width, width)
    for low, high, rate in zip(edges[:-1], edges[1:], step_rates(measurement, edges), strict=True):
        middle = 0.5 * (low + high)
        on = (first <= middle) & (last > middle)
        if ((first >= low) & (first < high)).any() or on.sum() < FEWEST or rate <= 0:
            continue
        done = (middle - first[on]) / (last[on] - first[on])
        cached = measurement.workload.prompt_tokens[on] + done * tokens[on]
        yield Bin(middle, int(on.sum()), int(cached.sum()), 1.0 / float(rate))


def steps_table(measurement: Measurement, pool: Pool, width: float = BIN, perf: str = "auto") -> str:
    """Measured and simulated steps as Markdown."""
    ranks = pool.engine.data_parallel_size
    head = ("at, s", "running", "cached tokens", "measured step, ms", "simulated", "difference, ms", "error")
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for one in decode_bins(measurement, width):
        decodes = min(-(-one.running // ranks), pool.engine.resolved("max_num_seqs"))
        batch = Batch(decodes=decodes, kv_tokens=one.cached_tokens // ranks)
        simulated = explain(pool, batch, perf).total_seconds
        off = f"{(simulated - one.measured) * 1e3:+.1f} | {(simulated / one.measured - 1) * 100:+.0f} % |"
        lines.append(
            f"| {one.at:.0f} | {one.running} | {one.cached_tokens:,} | {one.measured * 1e3:.1f} | "
            f"{simulated * 1e3:.1f} | {off}"
        )
    return "\n".join(lines) + "\n"


def _spans(measurement: Measurement) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """First and last token of each request, and its output tokens."""
    known = measurement.requests
    if known is None:
        return np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)
    return known.arrival + known.ttft, known.arrival + known.e2el, known.output_tokens
