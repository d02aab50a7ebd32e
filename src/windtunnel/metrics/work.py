"""Work: FLOPs done and bytes moved by every row of the iteration log, from the footprint of its pool."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics.steps import Steps
from windtunnel.metrics.sums import sums

Floats = NDArray[np.float64]


def work(steps: Steps, footprint: Footprint) -> tuple[Floats, Floats]:
    """[heads] FLOPs over all GPUs of a rank, and bytes per GPU, of all steps of each head row.

    FLOPs: 2 per weight a token passes through, the head once per sampled request, attention 2·heads·head_dim for
    QKᵀ and for PV per (query, visible context) pair. Bytes: the weights once per step (of the routed experts those that
    at least one token visits, each token choosing at random), the cache of every request once, and its new tokens.
    Sums over a run of steps use the context in its middle: exact, as both are linear in it, except where a sliding
    window cuts in within the run; decodes are taken at their mean context.
    """
    log, heads = steps.run.iterations, steps.heads
    count = log.steps[heads].astype(np.float64)
    decodes = log.decodes[heads].astype(np.float64)
    middle = (count - 1) / 2
    context = (log.kv_tokens[heads] + decodes * middle) / np.maximum(decodes, 1)
    chunk = log.chunk_tokens.astype(np.float64)
    behind = log.chunk_context + chunk * np.where(log.steps > 0, (log.steps - 1) / 2, 0.0)
    tokens = steps.tokens.astype(np.float64)
    flops = footprint.linear_flops_per_token * tokens + footprint.head_flops * steps.batch
    moved = footprint.weight_bytes + _expert_bytes(footprint, tokens)
    for window, pair_flops, stored in footprint.attention:
        seen = decodes * _clip(context + 1, window)
        pairs, read = _chunk_pairs(chunk, behind, window), _clip(behind, window) * (chunk > 0)
        by_head = (sums(steps.head_of_row, values, len(heads)) for values in (pairs, read))
        chunk_pairs, chunk_read = by_head
        flops = flops + pair_flops * (seen + chunk_pairs)
        moved = moved + stored * (seen + chunk_read + tokens)
    runs = count * (steps.batch > 0)
    return flops * runs, moved * runs


def _clip(context: Floats, window: int) -> Floats:
    return np.minimum(context, window) if window else context


def _chunk_pairs(chunk: Floats, behind: Floats, window: int) -> Floats:
    """Σ over the i-th token of a chunk (i from 1) of min(behind + i, window)."""
    free = np.clip(window - behind, 0.0, chunk) if window else chunk
    return free * behind + free * (free + 1) / 2 + (chunk - free) * window


def _expert_bytes(footprint: Footprint, tokens: Floats) -> Floats:
    """Bytes of the experts that a step reads: 1 − (1 − top_k/num_experts)^tokens of them are visited."""
    visited = 1.0 - (1.0 - footprint.expert_share) ** (tokens * footprint.ranks)
    return footprint.expert_bytes * visited
