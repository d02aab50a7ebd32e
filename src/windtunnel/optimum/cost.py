"""Cost: a linear batch time; tables from below by such costs."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import pairwise
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes

Floats = NDArray[np.float64]
SIZES = (1, 16, 64, 256, 1024, 4096, 16384)
"""Tokens of the batches at which tables are touched from below; a bound holds for each, and the best is taken."""
ROUNDING = 1 - 1e-12
"""Keeps a cost below the table where floating point would let them touch."""


class BatchTime(Protocol):
    """What says how long a batch takes: a Cost, or the tables of an engine."""

    def batch(self, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> float:
        """Seconds of a batch; see ``BatchTimes``."""


@dataclass(frozen=True)
class Cost:
    """base + per_token·T + per_kv_token·(S + D) + per_pair·Σ n(2c + n) + per_sequence·N seconds, for D decodes with S
    tokens in the cache, prefill chunks of n tokens at context c, T tokens and N requests.

    InferMax's four terms (arXiv 2411.07447), and one for the requests of a batch.
    """

    base: float
    per_token: float
    per_kv_token: float = 0.0
    per_pair: float = 0.0
    per_sequence: float = 0.0

    def __post_init__(self) -> None:
        for value in astuple(self):
            if not (isfinite(value) and value >= 0):
                raise InputError(f"coefficient {value}: must be ≥ 0 and finite, in seconds")
        if not any(astuple(self)):
            raise InputError("coefficients: all are 0: batches must take time, e.g. 0.02 1e-4 1e-6")

    def batch(self, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> float:
        """Seconds of a batch."""
        tokens = decodes + sum(n for n, _ in chunks)
        pairs = sum(n * (2 * context + n) for n, context in chunks)
        time = self.base + self.per_token * tokens + self.per_kv_token * (kv_tokens + decodes)
        return time + self.per_pair * pairs + self.per_sequence * (decodes + len(chunks))


def costs_below(times: BatchTime, max_num_batched_tokens: int, max_num_seqs: int) -> tuple[Cost, ...]:
    """Linear costs of which each is at most the time of any batch within the limits.

    Token-level operators and the work by requests are touched from below by lines, at several sizes of a batch. Decode
    attention is at least per_kv_token·(S + D), and prefill attention at least per_pair·n(2c + n), the smallest ratio in
    the table: between knots the table is a chord, never below a line, and never below the convex n².
    """
    if isinstance(times, Cost):
        return (times,)
    if not isinstance(times, BatchTimes):
        raise InputError("the bound needs a Cost or the tables of one stage: use pipeline_parallel_size=1")
    tokens = np.minimum(times.decode_tokens, times.mixed_tokens)[: max_num_batched_tokens + 1]
    serial = times.host_serial[: max_num_seqs + 1]
    sequences = times.sequences[: max_num_seqs + 1] + serial
    overlapped = times.host_overlapped[: max_num_seqs + 1] + serial
    kv, pair = _per_kv_token(times, max_num_seqs), _per_pair(times)
    rows = []
    for size in SIZES:
        base, per_token = line_below(tokens, min(size, max_num_batched_tokens))
        more, per_sequence = line_below(sequences, min(size, max_num_seqs))
        rows.append((base + more, per_token, kv, pair, per_sequence))
    base, per_sequence = line_below(overlapped, max_num_seqs)
    rows.append((base, 0.0, 0.0, 0.0, per_sequence))
    found = dict.fromkeys(tuple(value * ROUNDING for value in row) for row in rows if any(row))
    if not found:
        raise InputError("batch times are all 0: no schedule takes time, and there is nothing to bound")
    return tuple(Cost(*row) for row in found)


def line_below(values: Floats, at: int) -> tuple[float, float]:
    """(base ≥ 0, slope ≥ 0) of the line below ``values[x]``, x ≥ 1, that is highest at ``at``, of two the steeper."""
    if len(values) < 2:
        return 0.0, 0.0
    place = min(at + 0.5, len(values) - 1.25)
    best = (float(values[1:].min()), 0.0)
    for base, slope in _hull(np.arange(1, len(values)), values[1:]):
        if base >= 0 and slope >= 0 and base + slope * place > best[0] + best[1] * place:
            best = (base, slope)
    steepest = float((values[1:] / np.arange(1, len(values))).min())
    return best if best[0] + best[1] * place >= steepest * place else (0.0, steepest)


def _hull(x: NDArray[np.int64], y: Floats) -> Iterator[tuple[float, float]]:
    """(base, slope) of the edges of the lower convex hull."""
    kept: list[tuple[int, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(kept) > 1 and _turns_down(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    for (left, low), (right, high) in pairwise(kept):
        slope = (high - low) / (right - left)
        yield low - slope * left, slope


def _turns_down(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) >= (c[1] - b[1]) * (b[0] - a[0])


def _per_kv_token(times: BatchTimes, max_num_seqs: int) -> float:
    decodes = np.arange(1, max_num_seqs + 1)[:, None]
    read = decodes * (times.context_knots[None, :] + 1.0)
    tables = (times.decode_attention, times.mixed_attention)
    return float(min((table[1 : max_num_seqs + 1] / read).min() for table in tables))


def _per_pair(times: BatchTimes) -> float:
    n, context = times.chunk_knots[1:, None].astype(np.float64), times.context_knots[None, :]
    return float((times.prefill_attention[1:] / (n * (2.0 * context + n))).min())
