"""DeepSeek sparse attention (DeepSeek-V3.2, GLM-5): shape, least cost, and tables of whole modules over (requests,
keys) or (chunk, context).

Modules that take an earlier layer's choice of tokens (GLM-5.2) were measured in SGLang alone. Those of other engines
are their whole modules less the indexer, which takes its share of the time of the faster of both modules (modelled).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import between
from windtunnel.perf.between.planes import Plane, extend, named_kernel, plane_of
from windtunnel.perf.database import Columns, Measured, Table
from windtunnel.perf.kernel import STORED_BYTES, Kernel, cache_format, first_of, pairs
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes


@dataclass(frozen=True)
class SparseAttention(Kernel):
    """DeepSeek sparse attention as a whole module: projections, indexer, choice of ``top_k`` tokens, latent attention
    over them; ``phase``, ``a`` and ``b`` as for Attention. Without heads of an indexer (GLM-5.2) the choice is an
    earlier layer's."""

    error_family: ClassVar[str] = "sparse"

    phase: str
    hidden: int
    heads: int
    """Of one GPU."""
    q_lora_rank: int
    kv_lora_rank: int
    nope: int
    rope: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    top_k: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections."""
    index_dtype: str = "fp8"
    """Of the cached keys of the index."""
    backend: str = ""
    """Whose kernel; empty: the one with most measurements."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Projections, scores and values of the chosen tokens, and the index over all."""
        keys = np.minimum(b + a, self.top_k) if self.phase == "prefill" else np.minimum(b, self.top_k)
        indexed = a * b if self.phase == "decode" else pairs(a, b, 0)
        chosen = 2.0 * self.heads * (2 * self.kv_lora_rank + self.rope) * keys * a
        return 2.0 * self._weights * a + chosen + 2.0 * self.index_heads * self.index_head_dim * indexed

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Weights, latent vectors of the chosen tokens, keys of the index, hidden states in and out."""
        decode = self.phase == "decode"
        keys = np.minimum(b, self.top_k) if decode else (a + b) / np.maximum(a, 1.0)
        latent = keys * (self.kv_lora_rank + self.rope) * STORED_BYTES[self.kv_dtype]
        index = (b if decode else (a + b) / np.maximum(a, 1.0)) * self.index_head_dim
        index *= STORED_BYTES[self.index_dtype]
        return self._weights * STORED_BYTES[self.dtype] + a * (latent + index + 4.0 * self.hidden)

    @property
    def _weights(self) -> float:
        """Of the projections: down, up, absorbed, out, and the indexer's."""
        down = self.hidden * (self.q_lora_rank + self.kv_lora_rank + self.rope)
        up = self.q_lora_rank * self.heads * (self.nope + self.rope)
        absorbed = self.kv_lora_rank * self.heads * (self.nope + self.v_head_dim)
        index = self.q_lora_rank * self.index_heads * self.index_head_dim + self.hidden * self.index_head_dim
        return float(down + up + absorbed + index + self.heads * self.v_head_dim * self.hidden)

    def describe(self) -> str:
        """Heads, latent size, tokens chosen, and format of the cache."""
        index = "" if self.index_heads else " no indexer"
        return f"heads={self.heads} latent={self.kv_lora_rank} top {self.top_k}{index} kv={self.kv_dtype}"

    @property
    def efficiency_family(self) -> str:
        """That of latent attention."""
        return f"latent_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of sparse modules."""
        return known.table(SparseTable).times(self, a, b)


TABLES = {"decode": "dsa_generation_module_perf", "prefill": "dsa_context_module_perf"}
MODULES = {"decode": "dsa_generation_module", "prefill": "dsa_context_module"}
WITHOUT_INDEXER = "_skip_indexer"
TEXTS = ("op_name", "architecture", "kv_cache_dtype", "gemm_type", "kernel_source")
ENGINES = ("sglang", "vllm", "trtllm")
INDEX_HEAD_DIM = 128

ARCHITECTURES = {
    "GlmMoeDsaForCausalLM": (6144, 2048, 192, 256, 32),
    "DeepseekV32ForCausalLM": (7168, 1536, 128, 128, 64),
}
"""Architecture in the tables -> hidden size, query rank, key and value size of a head, heads of the indexer
(config.json of GLM-5 and DeepSeek-V3.2)."""

GROUP = 64
"""Contexts in the prefill tables are rounded to this many tokens: they differ by a token or two between chunks."""

GRAPH_REQUESTS = 256
"""SGLang's decodes of more requests were launched one by one: they do not tell the indexer's share."""

Key = tuple[str, str, bool, str, int, str, str]
"""Engine, phase, whether with an indexer, architecture, local heads, dtype of the cache, dtype of the projections."""


class SparseTable(Table):
    """The sparse-attention module tables of one database."""

    def times(self, kernel: SparseAttention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds of a module with its projections, or None without a table."""
        engine = self._engine(kernel.phase, indexes=True)
        if engine is None:
            return None
        if kernel.index_heads:
            return self._of_engine(engine, kernel, a, b)
        whole = replace(kernel, index_heads=_index_heads(kernel), index_head_dim=INDEX_HEAD_DIM)
        if self.once(self._table, engine, kernel.phase, False) is not None:
            return self._least(engine, kernel, whole, a, b)
        return self._without_indexer(engine, kernel, whole, a, b)

    def _least(self, engine: str, kernel: SparseAttention, whole: SparseAttention, a: Floats, b: Floats) -> KernelTimes:
        """As measured, but no longer than the module with its indexer: what is longer waited for its host (chunks on
        H200)."""
        found, longest = self._of_engine(engine, kernel, a, b), self._of_engine(engine, whole, a, b)
        held = longest.seconds < found.seconds
        sources = np.where(held, np.maximum(longest.sources, INTERPOLATED), found.sources).astype(np.int8)
        distance = np.where(held, longest.distance, found.distance)
        return KernelTimes(np.where(held, longest.seconds, found.seconds), sources, distance)

    def _without_indexer(
        self, engine: str, kernel: SparseAttention, whole: SparseAttention, a: Floats, b: Floats
    ) -> KernelTimes:
        """As the engine's whole module, less the indexer's share in an engine that measured both; without any such
        engine scaled by least times."""
        found = self._of_engine(engine, whole, a, b).modelled()
        other = self._engine(kernel.phase, indexes=False)
        share = f"the share that it takes in {other}'s" if other else "its share of their least times"
        self.note(f"sparse attention that shares an index: {engine}'s modules with an indexer, less {share}")
        if other is None:
            least = kernel.bound(self.device, a, b) / whole.bound(self.device, a, b)
            return replace(found, seconds=found.seconds * least)
        graphed = np.minimum(a, GRAPH_REQUESTS) if kernel.phase == "decode" else a
        with_it = self._of_engine(other, whole, graphed, b).seconds
        indexer = 1.0 - self._least(other, kernel, whole, graphed, b).seconds / with_it
        return replace(found, seconds=found.seconds - indexer * np.minimum(found.seconds, with_it))

    def _of_engine(self, engine: str, kernel: SparseAttention, a: Floats, b: Floats) -> KernelTimes:
        """As an engine measured it. Between two measured numbers of heads a power of the number; beyond them the
        nearest, scaled by least times."""
        rows, (architecture, kv_dtype, dtype) = self._part(engine, kernel)
        table = (engine, kernel.phase, kernel.index_heads > 0, architecture)

        def of(heads: int, priced: int) -> KernelTimes:
            return self._of(replace(kernel, heads=priced), (*table, heads, kv_dtype, dtype), a, b)

        return between(np.unique(rows["num_heads"]), kernel.heads, of)

    def _of(self, kernel: SparseAttention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        """As the module with a measured number of heads."""
        measured = _kernel(kernel, key)
        plane = self.once(self._plane, measured, key)
        found = extend(plane, self.device, measured, kernel, (a, b), (a, b))
        chunked = (b > 0) & (kernel.phase == "prefill")
        sources = np.where(chunked, np.maximum(found.sources, INTERPOLATED), found.sources)
        found = replace(found, sources=sources)
        return found if measured == kernel else found.modelled()

    def _plane(self, measured: SparseAttention, key: Key) -> Plane:
        engine, phase, indexes, architecture, heads, kv_dtype, dtype = key
        columns = self.once(self._table, engine, phase, indexes)
        assert columns is not None
        rows = columns.where(architecture=architecture, num_heads=heads, kv_cache_dtype=kv_dtype, gemm_type=dtype)
        rows = named_kernel(self, rows, phase, measured.backend, "sparse attention")
        if phase == "prefill":
            rows = rows.take(rows["step"] % GROUP == 0)
        return plane_of(measured, self.device, rows, phase)

    def _engine(self, phase: str, indexes: bool) -> str | None:
        """The first engine with a table: the deployment's own, or another."""
        engines = self.engines(*ENGINES)
        return next((each for each in engines if self.once(self._table, each, phase, indexes) is not None), None)

    def _table(self, engine: str, phase: str, indexes: bool) -> Columns | None:
        """An engine's modules with an indexer, or without one; None where it has no row of them."""
        backend = None if engine == self.backend else engine
        found = self.database.read("sparse_attention", TABLES[phase], TEXTS, backend)
        return (found.where(op_name=MODULES[phase] + ("" if indexes else WITHOUT_INDEXER)) or None) if found else None

    def _part(self, engine: str, kernel: SparseAttention) -> tuple[Columns, tuple[str, str, str]]:
        """Rows of the nearest architecture and formats, and these: of the cache, and of the projections."""
        columns = self.once(self._table, engine, kernel.phase, kernel.index_heads > 0)
        assert columns is not None
        known = [name for name in ARCHITECTURES if name in columns.values("architecture")]
        architecture = _nearest(known, kernel)
        part = columns.where(architecture=architecture)
        kv_dtype = first_of((cache_format(kernel.kv_dtype), "bfloat16"), part.values("kv_cache_dtype"))
        part = part.where(kv_cache_dtype=kv_dtype)
        dtype = first_of((kernel.dtype, "fp8_block", "bfloat16"), part.values("gemm_type"))
        return part.where(gemm_type=dtype), (architecture, kv_dtype, dtype)


def _kernel(kernel: SparseAttention, key: Key) -> SparseAttention:
    _, _, indexes, architecture, heads, kv_dtype, dtype = key
    hidden, rank, nope, value, index_heads = ARCHITECTURES[architecture]
    return replace(
        kernel,
        heads=heads,
        kv_dtype=kv_dtype,
        dtype=dtype,
        hidden=hidden,
        q_lora_rank=rank,
        nope=nope,
        v_head_dim=value,
        index_heads=index_heads if indexes else 0,
        index_dtype="fp8",
    )


def _nearest(known: Sequence[str], kernel: SparseAttention) -> str:
    """The architecture whose hidden size is nearest."""
    return min(known, key=lambda name: abs(ARCHITECTURES[name][0] - kernel.hidden))


def _index_heads(kernel: SparseAttention) -> int:
    """Heads of the indexer that the kernel's architecture has in other layers."""
    return ARCHITECTURES[_nearest(tuple(ARCHITECTURES), kernel)][4]
