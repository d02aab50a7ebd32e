"""Batch times fitted to the steps of an engine: decodes by their number, steps with prompts by their tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.real_engine.replay import LIMITS, Steps
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes
from windtunnel.perf.estimators.terms import relative_least_squares

Floats = NDArray[np.float64]
Features = list[tuple[int, int, int, int, float]]
"""(decodes, their cached tokens, tokens of chunks, Σ chunk · (context + half the chunk), seconds)."""


def features(rows: list[list[float]], found: Steps) -> Features:
    """Of every step."""
    return [_features(step, rows) for step in found["steps"]]


def _features(step: dict[str, Any], rows: list[list[float]]) -> tuple[int, int, int, int, float]:
    decodes = cached = tokens = pairs = 0
    for name, count in step["tokens"].items():
        context = step["computed"][name]
        if context >= rows[int(name)][1]:
            decodes, cached = decodes + 1, cached + context
        else:
            tokens, pairs = tokens + count, pairs + count * (2 * context + count)
    return decodes, cached, tokens, pairs, step["end"] - step["start"]


def step_times(rows: list[list[float]], found: Steps) -> BatchTimes:
    """Tables of a rank from its steps."""
    table = np.array(features(rows, found), dtype=float)
    alone, prompts = table[table[:, 2] == 0], table[table[:, 0] == 0]
    per_key = _per_key(alone)
    numbers = np.unique(alone[:, 0])
    flat = [np.median((alone[:, 4] - per_key * alone[:, 1])[alone[:, 0] == n]) for n in numbers]
    base, per_token, per_pair = _prompts(prompts)
    seqs, most = LIMITS["max_num_seqs"], LIMITS["max_num_batched_tokens"]
    tokens = np.arange(most + 1, dtype=float)
    decode = np.where(tokens > 0, np.interp(tokens, numbers, flat), 0.0)
    contexts = np.arange(0, LIMITS["max_model_len"] + CONTEXT_STEP, CONTEXT_STEP)
    chunks = np.arange(most + 1)
    zeros = np.zeros(seqs + 1)
    return BatchTimes(
        decode_tokens=decode,
        mixed_tokens=np.maximum(decode, base + per_token * tokens) * (tokens > 0),
        sequences=zeros,
        host_overlapped=zeros,
        host_serial=zeros,
        context_knots=contexts,
        decode_attention=per_key * np.arange(seqs + 1.0)[:, None] * contexts[None, :],
        chunk_knots=chunks,
        prefill_attention=per_pair * chunks[:, None] * (2.0 * contexts[None, :] + chunks[:, None]),
        prefill_base=0.0,
        expert_tokens=np.zeros(1),
        padded=np.arange(most + 1),
        graph_tokens=0,
    )


def _per_key(alone: Floats) -> float:
    """Seconds of each cached token, from groups of equal size at short and long contexts."""
    slopes = []
    for number in np.unique(alone[:, 0]):
        group = alone[alone[:, 0] == number]
        long = group[:, 1] > group[:, 1].max() / 2
        if group[:, 1].max() > 4 * group[:, 1].min() and long.any() and not long.all():
            near, far = np.median(group[~long], axis=0), np.median(group[long], axis=0)
            slopes.append((far[4] - near[4]) / (far[1] - near[1]))
    return max(float(np.median(slopes)), 0.0) if slopes else 0.0


def _prompts(steps: Floats) -> tuple[float, float, float]:
    """Base, seconds of a token and of a pair of tokens; the median of each length counts, so that a step that was
    interrupted does not."""
    sizes = np.unique(steps[:, 2:4], axis=0)
    middle = np.array([np.median(steps[(steps[:, 2:4] == size).all(axis=1), 4]) for size in sizes])
    x = np.stack([np.ones(len(sizes)), sizes[:, 0], sizes[:, 1]], axis=1)
    base, per_token, per_pair = np.maximum(relative_least_squares(x, middle), 0.0)
    return float(base), float(per_token), float(per_pair)
