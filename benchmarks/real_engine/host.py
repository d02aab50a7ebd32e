"""What an engine adds to its operators: its steps of a model of almost nothing, less that model's operators."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.real_engine.replay import LIMITS
from windtunnel.perf.batch_times import BatchTimes

Floats = NDArray[np.float64]
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""A model of as many layers, experts and words, whose products take next to no time."""
CONTEXT = 22
"""Tokens that a decode has behind it, in the steps that are compared."""


def with_host(wide: BatchTimes, narrow: BatchTimes, engine: BatchTimes) -> BatchTimes:
    """Operators of a model, and what the engine adds to those of a narrow one: in a step, for each request, and in a
    step with prompts for each token. ``engine``: fitted to its steps of the narrow model."""
    seqs, most = LIMITS["max_num_seqs"], LIMITS["max_num_batched_tokens"]
    added = np.array([_alone(engine, n) - _alone(narrow, n) for n in range(1, seqs + 1)])
    numbers = np.arange(1.0, seqs + 1)
    request = max(float(np.polyfit(numbers, added, 1)[0]), 0.0)
    sizes = np.unique(np.geomspace(1, most, 24).astype(int))
    prompts = np.array([engine.batch(0, 0, [(n, 0)]) - _operators(narrow).batch(0, 0, [(n, 0)]) for n in sizes])
    tokens = np.arange(most + 1.0)
    decode = np.interp(tokens, numbers, added - request * numbers)
    bare, there = _operators(wide), tokens > 0
    return replace(
        bare,
        decode_tokens=np.maximum(bare.decode_tokens + decode, 0.0) * there,
        mixed_tokens=np.maximum(bare.mixed_tokens + np.interp(tokens, sizes, prompts - request), 0.0) * there,
        host_serial=request * np.arange(seqs + 1.0),
    )


def _alone(times: BatchTimes, decodes: int) -> float:
    return float(_operators(times).batch(decodes, decodes * CONTEXT, []))


def _operators(times: BatchTimes) -> BatchTimes:
    """Without host work."""
    zeros = np.zeros_like(times.host_serial)
    return replace(times, host_serial=zeros, host_overlapped=zeros)
