"""Envelope: what a step takes at least, as lines under the batch-time tables."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import BatchTimes

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Envelope:
    """For every line i and every batch of D decodes with S cached tokens and T tokens in all, over N ≤ D + chunks
    requests: step ≥ base[i] + per_token[i]·T + per_kv_token·S + per_sequence·N, per rank, in seconds."""

    base: Floats
    per_token: Floats
    per_kv_token: float
    per_sequence: float
    max_num_batched_tokens: int
    max_num_seqs: int


def envelope(times: BatchTimes) -> Envelope:
    """The lines under a rank's tables: the edges of the lower convex hull of the token-level times that start at or
    above zero, the flat one and the one from the origin. Prefill attention counts as nothing."""
    tokens = np.minimum(times.decode_tokens, times.mixed_tokens)[1:]
    sizes = np.arange(1, len(tokens) + 1, dtype=np.float64)
    corner = _hull(sizes, tokens)
    slope = np.diff(tokens[corner]) / np.diff(sizes[corner])
    start = tokens[corner][:-1] - slope * sizes[corner][:-1]
    kept = (slope >= 0) & (start >= 0)
    base = np.concatenate((start[kept], [tokens.min(), 0.0]))
    per_token = np.concatenate((slope[kept], [0.0, float((tokens / sizes).min())]))
    experts = times.expert_tokens[1:]
    shared = float((experts / np.arange(1, len(experts) + 1)).min()) if len(experts) else 0.0
    return Envelope(
        base=base + float(times.host_serial[1:].min()),
        per_token=per_token + shared,
        per_kv_token=_per_kv_token(times),
        per_sequence=float((times.sequences[1:] / np.arange(1, len(times.sequences))).min()),
        max_num_batched_tokens=times.max_num_batched_tokens,
        max_num_seqs=times.max_num_seqs,
    )


def _per_kv_token(times: BatchTimes) -> float:
    """The least decode attention per request and cached token; between knots the table is linear, so it holds there."""
    contexts = times.context_knots[1:].astype(np.float64)
    decodes = np.arange(1, len(times.decode_attention), dtype=np.float64)
    return float((times.decode_attention[1:, 1:] / (decodes[:, None] * contexts[None, :])).min())


def _hull(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Corners of the lower convex hull of points whose x grows (Andrew's monotone chain)."""
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners)
