"""Vidur's batch times: its components, composed as its ExecutionTime does, from any source of an operator's ms.

Source of the rules: vidur/execution_time_predictor and vidur/entities/execution_time.py of microsoft/vidur at 7d47513.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from oracle.vllm_v1.batch import Batch

from benchmarks.vidur_parity.given import Given
from windtunnel.errors import InputError

Milliseconds = Callable[[str, tuple[int, ...]], float]
"""Of an operator at a key: (tokens), (batch size, KV) for decodes, (KV, chunk²) for prefills."""

IN_ATTENTION = ("attn_pre_proj", "attn_post_proj", "attn_rope", "input_layernorm")
IN_MLP = ("mlp_up_proj", "mlp_down_proj", "mlp_act", "add")


def from_tables(path: Path) -> Milliseconds:
    """Vidur's prediction tables. Raises InputError for a key outside of them, as Vidur does."""
    file = np.load(path, allow_pickle=False)
    tables: dict[str, dict[tuple[int, ...], float]] = {
        name.removesuffix(".key"): dict(
            zip(map(tuple, file[name].tolist()), file[f"{name.removesuffix('.key')}.ms"].tolist(), strict=True)
        )
        for name in file.files
        if name.endswith(".key")
    }

    def milliseconds(operator: str, key: tuple[int, ...]) -> float:
        try:
            return tables[operator][key]
        except KeyError as error:
            raise InputError(f"{path.name}: {operator} has no {key}") from error

    return milliseconds


def rounded(tokens: int, to: int) -> int:
    """Up to a multiple."""
    return -(-tokens // to) * to


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a batch in one stage of a run's pipeline; all stages are alike but for the send."""

    given: Given
    milliseconds: Milliseconds

    def __call__(self, batch: Batch, *, sends: bool = False) -> float:
        """Of a batch; ``sends``: this stage sends it on."""
        exact = sum(part.tokens for part in batch.scheduled)
        tokens = (rounded(exact, 8),)
        reduce = self._all_reduce(tokens)
        attention = sum(self.milliseconds(name, tokens) for name in IN_ATTENTION) + reduce
        attention += self.milliseconds("attn_kv_cache_save", (exact,)) + self._decodes(batch) + self._prefills(batch)
        mlp = sum(self.milliseconds(name, tokens) for name in IN_MLP) + reduce
        if self.given.model["post_attn_norm"]:
            mlp += self.milliseconds("post_attention_layernorm", tokens)
        total = (attention + mlp) * (self.given.model["num_layers"] // self.given.stages)
        if sends:
            total += self.milliseconds("send_recv", tokens)
        return float(total / 1000)

    def _all_reduce(self, tokens: tuple[int]) -> float:
        if self.given.tp == 1:
            return 0.0
        settings = self.given.predictor
        skew = settings["nccl_cpu_skew_overhead_per_device_ms"] * self.given.tp**1.25
        return float(self.milliseconds("all_reduce", tokens) + settings["nccl_cpu_launch_overhead_ms"] + skew)

    def _decodes(self, batch: Batch) -> float:
        """Of all decodes, by their number and mean context; the token of this step counts."""
        known = [part.start + 1 for part in batch.decodes]
        if not known:
            return 0.0
        cached = rounded(sum(known) // len(known), self.given.predictor["kv_cache_prediction_granularity"])
        return self.milliseconds("attn_decode", (len(known), cached)) * self._batching("decode", len(known))

    def _prefills(self, batch: Batch) -> float:
        """Of all chunks as one: contexts added up, lengths as the root of the sum of squares."""
        if not batch.chunks:
            return 0.0
        step = self.given.predictor["kv_cache_prediction_granularity"]
        cached = sum(rounded(context, step) for _, context in batch.chunks)
        length = round(sqrt(sum(tokens**2 for tokens, _ in batch.chunks)))
        return self.milliseconds("attn_prefill", (cached, length**2)) * self._batching("prefill", len(batch.chunks))

    def _batching(self, phase: str, count: int) -> float:
        more = self.given.predictor[f"attention_{phase}_batching_overhead_fraction"]
        return 1.0 + float(more) * (count > 1 and self.given.grouped)
