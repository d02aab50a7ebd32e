"""Compressed attention (DeepSeek-V4): shape, least cost, and tables of whole modules over (requests, keys) or (chunk,
context)."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import between
from windtunnel.perf.between.planes import Plane, extend, one_kernel, plane_of
from windtunnel.perf.database import Columns, Measured, Table
from windtunnel.perf.kernel import STORED_BYTES, Kernel, first_of, pairs
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes

SPARSE_RATIO = 4
"""The ratio with an indexer, and with two sums for each token."""

INDEX_SCALE_BYTES = 4


@dataclass(frozen=True)
class CompressedAttention(Kernel):
    """DeepSeek-V4's compressed attention as a whole module: projections, compressors, indexer where the ratio is 4,
    attention to window and compressed entries; ``phase``, ``a`` and ``b`` as for Attention."""

    error_family: ClassVar[str] = "compressed"

    phase: str
    hidden: int
    heads: int
    """Of one GPU, as the groups of output heads."""
    groups: int
    head_dim: int
    rope: int
    q_lora_rank: int
    o_lora_rank: int
    window: int
    ratio: int
    """Tokens of a compressed entry; 0: there is the window alone."""
    index_heads: int
    index_head_dim: int
    top_k: int
    """Compressed entries that the indexer chooses."""
    kv_dtype: str = "fp8"
    dtype: str = "bfloat16"
    """Of the projections."""
    index_dtype: str = "fp8"
    """Of the cached keys of the index."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Projections, scores and values over window and entries, and the index over all entries."""
        decode, ratio = self.phase == "decode", max(self.ratio, 1)
        near = a * np.minimum(b, self.window) if decode else pairs(a, b, self.window)
        every = (a * b if decode else pairs(a, b, 0)) / ratio * (self.ratio > 0)
        chosen = every
        if self._indexed:
            most = ratio * self.top_k
            chosen = (a * np.minimum(b, most) if decode else pairs(a, b, most)) / ratio
        index = 2.0 * self.index_heads * self.index_head_dim * every * self._indexed
        weights = self._stored_weights + self._wide_weights
        return 2.0 * weights * a + 4.0 * self.heads * self.head_dim * (near + chosen) + index

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Weights, the entries seen, the index, hidden states in and out."""
        decode = self.phase == "decode"
        near = a * np.minimum(b, self.window) if decode else a + np.minimum(b, self.window)
        every = np.zeros_like(near)
        if self.ratio:
            every = (a * b if decode else a + b) / self.ratio
        chosen = np.minimum(every, a * self.top_k) if self._indexed else every
        index = every * self._index_bytes * self._indexed
        weights = self._stored_weights * STORED_BYTES[self.dtype] + 2.0 * self._wide_weights
        return weights + (near + chosen) * self._entry_bytes + index + 4.0 * self.hidden * a

    @property
    def _indexed(self) -> bool:
        return self.ratio == SPARSE_RATIO

    @property
    def _index_bytes(self) -> float:
        scales = INDEX_SCALE_BYTES if self.index_dtype == "fp8" else 0
        return self.index_head_dim * STORED_BYTES[self.index_dtype] + scales

    @property
    def _entry_bytes(self) -> float:
        """8-bit entries keep rotated numbers in 16 bits (584 bytes with their scales; see ``model.compressed``)."""
        if self.kv_dtype.startswith("fp8"):
            return self.head_dim + self.rope + -(-(self.head_dim - self.rope) // 64) + 1.0
        return 2.0 * self.head_dim

    @property
    def _stored_weights(self) -> float:
        """Weights that quantisation covers: to latent query and key, queries, both output projections, index
        queries."""
        down = self.hidden * (self.q_lora_rank + self.head_dim)
        queries = self.q_lora_rank * self.heads * self.head_dim
        out = self.heads * self.head_dim * self.o_lora_rank + self.groups * self.o_lora_rank * self.hidden
        index = self.q_lora_rank * self.index_heads * self.index_head_dim * self._indexed
        return float(down + queries + out + index)

    @property
    def _wide_weights(self) -> float:
        """Weights in 16 bits: compressors (a value and a score for each number), and those of index heads."""
        if self._indexed:
            return float(self.hidden * (4 * (self.head_dim + self.index_head_dim) + self.index_heads))
        return float(2 * self.hidden * self.head_dim * (self.ratio > 0))

    def describe(self) -> str:
        """Heads, ratio, and format of the cache."""
        kind = f"1/{self.ratio}" if self.ratio else "window"
        return f"heads={self.heads}×{self.head_dim} {kind} kv={self.kv_dtype}"

    @property
    def efficiency_family(self) -> str:
        """Families differ by phase."""
        return f"compressed_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of compressed modules."""
        return known.table(CompressedTable).times(self, a, b)


TABLES = {
    (phase, ratio): f"dsv4_{kind}_{'generation' if phase == 'decode' else 'context'}_module_perf"
    for phase in ("decode", "prefill")
    for ratio, kind in ((4, "csa"), (128, "hca"))
}
"""Phase and compression ratio -> table."""

WINDOW_ALONE = 128
"""No table has layers with a window alone: they take the ratio whose modules have no indexer either, with contexts no
longer than the window."""

ENGINES = ("vllm", "sglang", "trtllm")

MODELS = {64: (4096, 1024, 512), 128: (7168, 1536, 1024)}
"""Heads of the whole model in the tables -> hidden size, query rank, entries chosen by the indexer (config.json of
DeepSeek-V4-Flash and -Pro)."""

HEADS_OF_GROUP = 8

Key = tuple[int, int, int, str]
"""Ratio in the tables, heads of the whole model, local heads, dtype of the projections."""


class CompressedTable(Table):
    """The compressed-attention module tables of one database."""

    def times(self, kernel: CompressedAttention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds of a module with its projections, or None without a table. Between two measured numbers of heads a
        power of the number; beyond them the nearest, scaled by least times, as are other sizes (modelled)."""
        ratio = kernel.ratio or WINDOW_ALONE
        found = self.once(self._table, TABLES[kernel.phase, ratio])
        if found is None:
            return None
        rows, whole, dtype = _part(kernel, found[0])

        def of(heads: int, priced: int) -> KernelTimes:
            groups = kernel.groups if priced == kernel.heads else priced // HEADS_OF_GROUP
            each = replace(kernel, heads=priced, groups=groups)
            return self._of_heads(each, (ratio, whole, heads, dtype), a, b)

        answer = between(np.unique(rows["num_heads"]), kernel.heads, of)
        if found[1] == self.backend:
            return answer
        self.note(f"compressed attention of {self.backend} is taken from {found[1]}'s measurements")
        return replace(answer, sources=np.maximum(answer.sources, INTERPOLATED).astype(np.int8))

    def _of_heads(self, kernel: CompressedAttention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        """As the module with a measured number of heads."""
        measured = module(kernel.phase, *key)
        plane, truly = self.once(self._plane, measured, key)
        context = b if kernel.ratio else np.minimum(b, kernel.window)
        found = extend(plane, self.device, measured, kernel, (a, b), (a, context))
        i = np.clip(np.searchsorted(plane.rows, a), 0, len(plane.rows) - 1)
        j = np.clip(np.searchsorted(plane.columns, context), 0, len(plane.columns) - 1)
        sources = np.where(truly[i, j], found.sources, np.maximum(found.sources, INTERPOLATED)).astype(np.int8)
        found = replace(found, sources=sources)
        return found if measured == kernel else found.modelled()

    def _plane(self, measured: CompressedAttention, key: Key) -> tuple[Plane, NDArray[np.bool_]]:
        """The plane, and which of its cells were measured."""
        found = self.once(self._table, TABLES[measured.phase, key[0]])
        assert found is not None
        rows = _part(measured, found[0])[0].where(num_heads=key[2])
        plane = plane_of(measured, self.device, one_kernel(rows, measured.phase), measured.phase)
        truly = plane.known > 0
        return (plane if measured.phase == "decode" else bridged(plane, measured, self.device)), truly

    def _table(self, name: str) -> tuple[Columns, str] | None:
        """A table and whose it is: its own of this version or another, else another engine's."""
        texts = ("gemm_type", "kernel_source")
        read = ((self.database.read_of(each, "sparse_attention", name, texts), each) for each in self.engines(*ENGINES))
        return next(((found, each) for found, each in read if found is not None), None)


def module(phase: str, ratio: int, whole: int, heads: int, dtype: str) -> CompressedAttention:
    """What was measured: the module of the model with ``whole`` heads, of which a GPU has ``heads``."""
    hidden, rank, top_k = MODELS[whole]
    groups = heads // HEADS_OF_GROUP
    return CompressedAttention(
        phase, hidden, heads, groups, 512, 64, rank, 1024, 128, ratio, 64, 128, top_k, "fp8", dtype
    )


def bridged(plane: Plane, kernel: CompressedAttention, device: Device) -> Plane:
    """The plane whose rows are interpolated between measured contexts: engines measured few, and one that with its
    chunk makes a long prompt whole. Efficiencies in log, over the log of the context."""
    a, b = np.broadcast_arrays(plane.rows[:, None], plane.columns[None, :])
    least, seconds, known = kernel.bound(device, a, b), plane.seconds.copy(), plane.known.copy()
    x = np.log1p(plane.columns)
    for i in range(len(plane.rows)):
        at = np.flatnonzero(plane.known[i])
        inside = slice(at[0], at[-1] + 1)
        logs = np.interp(x[inside], x[at], np.log(plane.seconds[i, at] / least[i, at]))
        seconds[i, inside] = np.where(known[i, inside] > 0, seconds[i, inside], np.exp(logs) * least[i, inside])
        known[i, inside] = 1.0
    return Plane(plane.rows, plane.columns, seconds, known)


def _part(kernel: CompressedAttention, columns: Columns) -> tuple[Columns, int, str]:
    """Rows of the nearest model and format of projections, its heads, and the format."""
    totals = columns["num_heads"] * columns["tp_size"]
    known = [whole for whole in MODELS if (totals == whole).any()]
    whole = min(known, key=lambda each: abs(np.log(MODELS[each][0] / kernel.hidden)))
    columns = columns.take(totals == whole)
    dtype = first_of((kernel.dtype, "fp8_block"), columns.values("gemm_type"))
    return columns.where(gemm_type=dtype), whole, dtype
