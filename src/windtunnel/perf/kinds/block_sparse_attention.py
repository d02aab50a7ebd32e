"""Block-sparse attention (MiniMax-M3): shape, least cost, and tables of whole modules over (requests, keys) or (chunk,
context).

TensorRT-LLM's tables are not believed: its prompts waited for the host (3 to 500 ms, whatever their length) and its
decodes copied a pool of index keys in every step. vLLM's stand in for them, as they do for what SGLang's host held up.
"""

from dataclasses import replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import between
from windtunnel.perf.between.planes import Plane, extend, one_kernel, plane_of
from windtunnel.perf.database import Columns, Measured, Table
from windtunnel.perf.kernel import STORED_BYTES, Kernel, cache_format, first_of, pairs
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes


@dataclass(frozen=True)
class BlockSparseAttention(Kernel):
    """MiniMax sparse attention as a whole module: projections, index, choice of the best blocks of keys, attention to
    the ``top_k`` tokens in them; ``phase``, ``a`` and ``b`` as for Attention."""

    phase: str
    hidden: int
    heads: int
    """Of one GPU, as KV and index heads."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    top_k: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections."""
    index_dtype: str = "bfloat16"
    """Of the cached index keys."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Projections, scores and values of the chosen tokens, and the index over all."""
        decode = self.phase == "decode"
        attended = a * np.minimum(b, self.top_k) if decode else pairs(a, b, self.top_k)
        scored = a * b if decode else pairs(a, b, 0)
        index = 2.0 * self.index_heads * self.index_head_dim * scored
        chosen = 2.0 * self.heads * (self.head_dim + self.v_head_dim) * attended
        return 2.0 * self._weights * a + chosen + index

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Weights, chosen keys and values, keys of the index, hidden states and queries in and out."""
        decode = self.phase == "decode"
        keys_of_one = self.kv_heads * (self.head_dim + self.v_head_dim) * STORED_BYTES[self.kv_dtype]
        query = 2.0 * self.heads * (self.head_dim + self.v_head_dim)
        attended = a * np.minimum(b, self.top_k) if decode else np.minimum(a + b, a * self.top_k)
        scored = a * b if decode else a + b
        keys = attended * keys_of_one + scored * self.index_head_dim * STORED_BYTES[self.index_dtype]
        return self._weights * STORED_BYTES[self.dtype] + keys + a * (4.0 * self.hidden + query)

    @property
    def _weights(self) -> float:
        """Of the projections: queries, keys, values, index queries, the index key, and out."""
        queries = self.heads * self.head_dim + self.index_heads * self.index_head_dim
        keys = self.kv_heads * (self.head_dim + self.v_head_dim) + self.index_head_dim
        return float(self.hidden * (queries + keys + self.heads * self.v_head_dim))

    def describe(self) -> str:
        """Heads, tokens chosen, and format of the cache."""
        sizes = f"heads={self.heads}/{self.kv_heads}×{self.head_dim} index={self.index_heads}"
        return f"{sizes} top {self.top_k} kv={self.kv_dtype}"

    @property
    def error_family(self) -> str:
        """Families differ by phase."""
        return f"block_sparse_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of block-sparse modules."""
        return known.table(BlockSparseTable).times(self, a, b)


TABLES = {"decode": "msa_generation_module_perf", "prefill": "msa_context_module_perf"}

HIDDEN, HEAD_DIM, INDEX_HEAD_DIM, TOP_K, GROUP = 6144, 128, 128, 2048, 16
"""Sizes of the modules in the tables: MiniMax-M3 (its config.json). A GPU has a KV head for every 16 query heads, one
at least, and as many index heads."""

BELIEVED = ("vllm", "sglang")
"""Engines whose tables are believed, in the order in which they stand in for another's."""

GRAPH_REQUESTS = 256
"""SGLang's decodes of more requests were launched one by one: 0.4 ms, whatever the context."""

HOST_BOUND = 1.5
"""Prompts that take less than this many times the shortest module's time may have waited for the host."""

OUTLIER = 1.25
"""More context never needs less work: a point this many times slower than one with more of it is dropped. 3 in 1,000
are; the noise of the shortest modules stays below."""

Key = tuple[str, int, str, str]
"""Engine, local heads, dtype of the cache, dtype of the projections."""


class BlockSparseTable(Table):
    """The MSA module tables of one database."""

    def times(self, kernel: BlockSparseAttention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds of a module with its projections, or None without a table."""
        engine = self._engine(kernel.phase)
        if engine is None:
            return None
        found = self._ask(kernel, a, b, engine)
        if engine == self.backend:
            return self._without_host(kernel, found, a, b) if self.known.corrections.host_bound_tables else found
        self._take("block-sparse attention", engine)
        return replace(found, sources=np.maximum(found.sources, INTERPOLATED).astype(np.int8))

    def _take(self, what: str, engine: str) -> None:
        self.note(f"{what} of {self.backend} is taken from {engine}'s measurements")

    def _ask(self, kernel: BlockSparseAttention, a: Floats, b: Floats, engine: str) -> KernelTimes:
        """Between measured numbers of heads a power of the number; beyond them the nearest, scaled by least times."""
        rows, (kv_dtype, dtype) = self._part(kernel, engine)

        def of(heads: int, priced: int) -> KernelTimes:
            return self._of_heads(_with_heads(kernel, priced), (engine, heads, kv_dtype, dtype), a, b)

        return between(np.unique(rows["num_heads"]), kernel.heads, of)

    def _of_heads(self, kernel: BlockSparseAttention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        measured = module(kernel.phase, *key[1:])
        plane = self.once(self._plane, kernel.phase, key)
        found = extend(plane, self.device, measured, kernel, (a, b), (a, b))
        if kernel.phase == "prefill":
            beyond = (b > plane.columns[-1]) & (a <= plane.rows[-1])
            found = replace(found, distance=np.where(beyond, np.nan, found.distance))
        return found if measured == kernel else found.modelled()

    def _without_host(self, kernel: BlockSparseAttention, found: KernelTimes, a: Floats, b: Floats) -> KernelTimes:
        """Prompts that SGLang's host held up take the time of vLLM's kernels where that is less."""
        engine = next((name for name in BELIEVED if name != self.backend), "")
        if kernel.phase == "decode" or self.backend != "sglang" or self._table("prefill", engine) is None:
            return found
        floor = float(self.once(self._plane, kernel.phase, self._nearest(kernel, "sglang")).seconds.min())
        other = self._ask(kernel, a, b, engine)
        self._take("short prompts' block-sparse attention", engine)
        held = (found.seconds < HOST_BOUND * floor) & (other.seconds < found.seconds)
        sources = np.where(held, np.maximum(other.sources, INTERPOLATED), found.sources).astype(np.int8)
        distance = np.where(held, other.distance, found.distance)
        return KernelTimes(np.where(held, other.seconds, found.seconds), sources, distance)

    def _plane(self, phase: str, key: Key) -> Plane:
        columns = self._table(phase, key[0])
        assert columns is not None
        rows = columns.where(num_heads=key[1], kv_cache_dtype=key[2], gemm_type=key[3])
        if phase == "decode" and key[0] == "sglang":
            rows = rows.take(rows["batch_size"] <= GRAPH_REQUESTS)
        rows = _without_outliers(one_kernel(rows, phase), "batch_size" if phase == "decode" else "isl")
        return plane_of(module(phase, *key[1:]), self.device, rows, phase)

    def _engine(self, phase: str) -> str | None:
        """The engine whose table answers: its own where it is believed, else another's."""
        engines = sorted(BELIEVED, key=lambda name: name != self.backend)
        return next((engine for engine in engines if self._table(phase, engine) is not None), None)

    def _table(self, phase: str, engine: str) -> Columns | None:
        return self.database.read_of(engine, "msa", TABLES[phase], ("kv_cache_dtype", "gemm_type", "kernel_source"))

    def _nearest(self, kernel: BlockSparseAttention, engine: str) -> Key:
        rows, dtypes = self._part(kernel, engine)
        heads = np.unique(rows["num_heads"])
        return engine, int(heads[int(np.argmin(np.abs(np.log(heads / kernel.heads))))]), *dtypes

    def _part(self, kernel: BlockSparseAttention, engine: str) -> tuple[Columns, tuple[str, str]]:
        """Rows of the nearest formats, and these: of the cache, and of the projections."""
        columns = self._table(kernel.phase, engine)
        assert columns is not None
        kv_dtype = first_of((cache_format(kernel.kv_dtype), "bfloat16"), columns.values("kv_cache_dtype"))
        columns = columns.where(kv_cache_dtype=kv_dtype)
        dtype = first_of((kernel.dtype, "fp8_block", "bfloat16"), columns.values("gemm_type"))
        return columns.where(gemm_type=dtype), (kv_dtype, dtype)


def _with_heads(kernel: BlockSparseAttention, heads: int) -> BlockSparseAttention:
    """With another number of query heads, and as many to a group."""
    groups = (max(1, round(each * heads / kernel.heads)) for each in (kernel.kv_heads, kernel.index_heads))
    return replace(kernel, heads=heads, kv_heads=next(groups), index_heads=next(groups))


def module(phase: str, heads: int, kv_dtype: str, dtype: str) -> BlockSparseAttention:
    """What was measured: MiniMax-M3's module with this many query heads."""
    groups = max(1, heads // GROUP)
    index = (groups, INDEX_HEAD_DIM, TOP_K)
    return BlockSparseAttention(phase, HIDDEN, heads, groups, HEAD_DIM, HEAD_DIM, *index, kv_dtype, dtype)


def _without_outliers(rows: Columns, group: str) -> Columns:
    """The rows that are plausible beside those of as many requests, or as long a chunk, with more context."""
    keep = np.ones(len(rows), dtype=bool)
    for value in np.unique(rows[group]):
        members = np.flatnonzero(rows[group] == value)
        order = members[np.argsort(rows["step"][members], kind="stable")]
        seconds = rows["latency"][order]
        keep[order] = seconds <= OUTLIER * np.minimum.accumulate(seconds[::-1])[::-1]
    return rows.take(keep)
