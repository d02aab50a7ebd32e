"""The points at which the tables of a pool are asked: padded token counts, contexts, chunk sizes."""

from dataclasses import dataclass

import numpy as np

from windtunnel.deployment import Pool, capture_sizes, preset
from windtunnel.perf.attention_table import flash_attention_2
from windtunnel.perf.batch_times import CONTEXT_STEP, Integers
from windtunnel.perf.causes import ALL, Causes

KNOTS_PER_OCTAVE = 16
"""Knots between a value and its double: linear interpolation between them is within 0.1 % of a parabola."""


@dataclass(frozen=True, eq=False)
class Axes:
    """Axes of the tables of one pool."""

    padded: Integers
    """[T + 1] tokens after padding to the captured graph."""
    graph_tokens: int
    """Largest captured graph, 0 without."""
    mixed_graph_tokens: int
    """The same for batches with prefill chunks: 0 where an engine captures decodes only."""
    one_call: bool
    """One attention kernel serves decodes and chunks of a batch together (FlashAttention 2)."""
    max_num_seqs: int
    context_knots: Integers
    chunk_knots: Integers
    ranks: int
    """Ranks in lockstep, 1 otherwise."""
    drafts: int = 0
    """Tokens that a draft proposes in a step."""
    accepted: float = 1.0
    """Tokens that a step yields in the mean: the tables hold the time per token."""
    draft_share: float = 0.0
    """A draft layer's share of the model's layers."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Largest batch in tokens."""
        return len(self.padded) - 1


def axes(pool: Pool, causes: Causes = ALL) -> Axes:
    """The axes for a pool's limits and captured graphs."""
    engine = pool.engine
    tokens = np.arange(engine.batched_tokens + 1)
    sizes = np.array(capture_sizes(engine, pool.device), dtype=np.int64)
    largest = int(sizes[-1]) if len(sizes) else 0
    padded = tokens.copy()
    if largest:
        padded[: largest + 1] = sizes[np.searchsorted(sizes, tokens[: largest + 1])]
        padded[0] = 0
    return Axes(
        padded=padded,
        graph_tokens=largest,
        mixed_graph_tokens=largest if preset(engine.preset).graphs_prefill else 0,
        one_call=causes.mixed_attention and flash_attention_2(pool.engine.backend, pool.device),
        max_num_seqs=min(engine.seqs, engine.batched_tokens),
        context_knots=octave_knots(engine.model_len, CONTEXT_STEP),
        chunk_knots=octave_knots(engine.batched_tokens, 1),
        ranks=engine.data_parallel_size if pool.lockstep else 1,
        drafts=engine.num_speculative_tokens,
        accepted=engine.acceptance_length or 1.0,
        draft_share=len(pool.model.draft_layers) / pool.model.num_layers,
    )


def octave_knots(last: int, step: int) -> Integers:
    """Multiples of ``step`` from 0 to at least ``last``: all of the first, then KNOTS_PER_OCTAVE in every doubling."""
    end = max(1, -(-last // step))
    knots, spacing, at = [], 1, 0
    while at < end:
        knots.append(at)
        if at >= 2 * KNOTS_PER_OCTAVE * spacing:
            spacing *= 2
        at += spacing
    return np.array([*knots, end], dtype=np.int64) * step
