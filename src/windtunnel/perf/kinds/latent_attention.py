"""Multi-head latent attention: shape, least cost, and its tables.

SGLang's and TensorRT-LLM's tables time the attention kernel and the absorbed products around it; vLLM's time whole
modules, from which the projections are taken off again. Modules of few requests on Hopper took as long as the host
needed to launch them, and then what exceeds the kernels alone is taken off as well.
"""

from dataclasses import replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, between
from windtunnel.perf.between.planes import Plane, extend, named_kernel, one_kernel, plane_of
from windtunnel.perf.database import Columns, Measured, Table
from windtunnel.perf.kernel import LAUNCH_GRAPH, STORED_BYTES, Kernel, cache_format, first_of, pairs
from windtunnel.perf.kernel_times import MODELLED, KernelTimes
from windtunnel.perf.kinds.gemm import Gemm, GemmTable


@dataclass(frozen=True)
class LatentAttention(Kernel):
    """DeepSeek's multi-head latent attention without its projections; ``phase``, ``a`` and ``b`` as for Attention.

    Decode works in latent space with absorbed projections; prefill expands keys and values first.
    """

    phase: str
    heads: int
    kv_lora_rank: int
    nope: int
    rope: int
    v_head_dim: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections around it, which are measured together with it."""
    backend: str = ""
    """Whose kernel decodes; empty: the one with most measurements."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Decode: absorbed products, and scores and values in latent space. Prefill: expansion and attention."""
        if self.phase == "decode":
            latent = 2.0 * self.heads * (2 * self.kv_lora_rank + self.rope)
            return a * (latent * b + 2.0 * self._up_weights)
        width = self.nope + self.rope + self.v_head_dim
        return 2.0 * self._up_weights * (a + b) + 2.0 * self.heads * width * pairs(a, b, 0)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """The weights of the expansion, latent vectors, queries, and in prefill what was expanded."""
        latent = (self.kv_lora_rank + self.rope) * STORED_BYTES[self.kv_dtype]
        if self.phase == "decode":
            queries = 2.0 * self.heads * (2 * self.kv_lora_rank + self.rope)
            return 2.0 * self._up_weights + a * (b * latent + queries)
        width = self.nope + self.rope + self.v_head_dim
        expanded = (a + b) * (latent + 4.0 * self.heads * width)
        return 2.0 * self._up_weights + expanded + 2.0 * a * self.heads * width

    @property
    def _up_weights(self) -> float:
        return float(self.heads * self.kv_lora_rank * (self.nope + self.v_head_dim))

    def describe(self) -> str:
        """Heads, latent size, and format of the cache."""
        return f"heads={self.heads} latent={self.kv_lora_rank}+{self.rope} kv={self.kv_dtype}"

    @property
    def error_family(self) -> str:
        """Families differ by phase."""
        return f"latent_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of latent attention."""
        return known.table(LatentTable).times(self, a, b)


MODULES = {"decode": "mla_generation_module_perf", "prefill": "mla_context_module_perf"}
KERNELS = {"decode": "generation_mla_perf", "prefill": "context_mla_perf"}
ABSORBED = ("mla_gen_pre", "mla_gen_post")

HIDDEN, QUERY_RANK, LATENT_RANK, NOPE, ROPE, V_HEAD_DIM = 7168, 1536, 512, 128, 64, 128
"""Sizes of the modules in the tables: DeepSeek-V3 (its config.json); the number of heads is the local one."""

LEAST_SHARE = 0.3
"""Attention never counts as less than this share of its module: for tiny batches, launches overlap and the gemms' sum
is too much."""

HOST_BOUND = 1.5
"""A module of one request that takes this many times its kernels' time waited for the host (vLLM 0.24.0 on Hopper:
80 µs beside 25)."""

SMALL_KERNELS = 2
"""Rotary embedding and cache write beside the measured kernels."""

DONORS = ("trtllm", "sglang")
"""Engines whose kernels stand in for vLLM's, which come from the same libraries."""

Key = tuple[int, str, str]
"""Local heads, dtype of the cache, dtype of the projections (empty in tables of kernels)."""


class LatentTable(Table):
    """The MLA tables of one database."""

    def times(self, kernel: LatentAttention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds of attention proper (with rotary embedding, absorption or expansion, cache write), or None without a
        table.

        Other latent sizes than DeepSeek-V3's are scaled by least times (modelled), as is a chunk with context.
        """
        if self._table(KERNELS[kernel.phase], None) is not None:
            return self._ask(kernel, a, b, None, pieces=True)
        if self._table(MODULES[kernel.phase], None) is None:
            return None
        found = self._ask(kernel, a, b, None, pieces=False)
        return self._without_host(kernel, found, a, b)

    def _without_host(self, kernel: LatentAttention, found: KernelTimes, a: Floats, b: Floats) -> KernelTimes:
        """Modules less what one request takes beyond its kernels, and never less than the kernels."""
        donor = next((name for name in DONORS if self._table(KERNELS[kernel.phase], name) is not None), None)
        if donor is None or not self.known.corrections.host_bound_tables:
            return found
        one, short = np.ones(1), np.full(1, 64.0) if kernel.phase == "decode" else np.zeros(1)
        module = float(self._ask(kernel, one, short, None, pieces=False).seconds[0])
        least = float(self._ask(kernel, one, short, donor, pieces=True).seconds[0])
        if module < HOST_BOUND * least:
            return found
        kernels = np.minimum(self._ask(kernel, a, b, donor, pieces=True).seconds, found.seconds)
        seconds = np.maximum(found.seconds - (module - least), kernels)
        return replace(found, seconds=seconds, sources=np.maximum(found.sources, 1))

    def _ask(self, kernel: LatentAttention, a: Floats, b: Floats, backend: str | None, pieces: bool) -> KernelTimes:
        """Between measured numbers of heads a power of the number; beyond them the nearest, scaled by least times."""
        columns, key = self._part(kernel, backend, pieces)

        def of(heads: int, priced: int) -> KernelTimes:
            return self._of_heads(replace(kernel, heads=priced), a, b, (heads, *key), backend, pieces)

        return between(np.unique(columns["num_heads"]), kernel.heads, of)

    def _of_heads(
        self, kernel: LatentAttention, a: Floats, b: Floats, key: Key, backend: str | None, pieces: bool
    ) -> KernelTimes:
        sizes = (key[0], LATENT_RANK, NOPE, ROPE, V_HEAD_DIM)
        measured = LatentAttention(kernel.phase, *sizes, key[1], kernel.dtype, kernel.backend)
        if kernel.phase == "decode":
            plane = self.once(self._plane, measured, key, backend, pieces)
            found = extend(plane, self.device, measured, kernel, (a, b), (a, b))
        else:
            found = self._prefill(kernel, self.once(self._curve, measured, key, backend, pieces), a, b)
        return found if measured == kernel else found.modelled()

    def _plane(self, measured: LatentAttention, key: Key, backend: str | None, pieces: bool) -> Plane:
        rows = self._rows("decode", key, backend, pieces)
        if backend:  # another engine's, which has its own names
            rows = one_kernel(rows, "decode", measured.backend)
        else:
            rows = named_kernel(self, rows, "decode", measured.backend, "latent attention")
        return plane_of(measured, self.device, rows, "decode", self._core(measured, rows, pieces))

    def _curve(self, measured: LatentAttention, key: Key, backend: str | None, pieces: bool) -> Curve:
        rows = one_kernel(self._rows("prefill", key, backend, pieces), "prefill")
        rows = rows.take(np.argsort(rows["isl"], kind="stable"))
        x = rows["isl"].astype(float)
        return Curve(x, measured.least(self.device)(x) / self._core(measured, rows, pieces))

    def _prefill(self, kernel: LatentAttention, curve: Curve, a: Floats, b: Floats) -> KernelTimes:
        fresh = curve.times(a, kernel.bound(self.device, a, np.zeros_like(a)))
        chunked = curve.times(np.maximum(a + b, 128.0), kernel.bound(self.device, a, b))
        seconds = np.where(b > 0, np.maximum(fresh.seconds, chunked.seconds), fresh.seconds)
        sources = np.where(b > 0, MODELLED, fresh.sources).astype(np.int8)
        return KernelTimes(seconds, sources, np.where(b > 0, chunked.by_rule(), fresh.distance))

    def _core(self, measured: LatentAttention, rows: Columns, pieces: bool) -> Floats:
        """Seconds of attention from rows of kernels (with what surrounds them) or of modules (less projections)."""
        tokens = (rows["batch_size"] * (rows["isl"] if measured.phase == "prefill" else 1)).astype(float)
        seconds = np.asarray(rows["latency"] * 1e-3, dtype=float)
        if pieces:
            return seconds + self._around(measured, tokens) + SMALL_KERNELS * LAUNCH_GRAPH
        rest: Floats = seconds.copy()
        for gemm in projections(measured, HIDDEN, QUERY_RANK, measured.dtype):
            part = self.known.table(GemmTable).times(gemm, tokens)
            rest -= part.seconds if part else 0.0
        return np.asarray(np.maximum(rest, LEAST_SHARE * seconds))

    def _around(self, measured: LatentAttention, tokens: Floats) -> Floats:
        """Decode: both absorbed products. Prefill: the expansion of the latent vectors to keys and values."""
        if measured.phase == "prefill":
            part = self.known.table(GemmTable).times(Gemm(measured.heads * (NOPE + V_HEAD_DIM), LATENT_RANK), tokens)
            return part.seconds if part else np.zeros_like(tokens)
        curve = self.once(self._absorption, measured.heads)
        return curve.times(tokens, np.ones_like(tokens)).seconds if curve else np.zeros_like(tokens)

    def _absorption(self, heads: int) -> Curve | None:
        """Both absorbed products by tokens; 16-bit, as engines keep those weights."""
        rows = self._bmm(heads)
        if rows is None:
            return None
        tokens = np.unique(rows["num_tokens"])
        both = [rows.where(op_name=name) for name in ABSORBED]
        total = sum(
            np.interp(tokens, np.sort(part["num_tokens"]), part["latency"][np.argsort(part["num_tokens"])])
            for part in both
        )
        return Curve(tokens.astype(float), 1.0 / (np.asarray(total) * 1e-3))

    def _bmm(self, heads: int) -> Columns | None:
        for backend in (None, *DONORS, "vllm"):
            table = self.database.read("mla_bmm", "mla_bmm_perf", ("op_name", "bmm_dtype"), backend)
            rows = None if table is None else table.where(bmm_dtype="bfloat16", num_heads=heads)
            if rows is not None and len(rows):
                return rows
        return None

    def _rows(self, phase: str, key: Key, backend: str | None, pieces: bool) -> Columns:
        columns = self._table((KERNELS if pieces else MODULES)[phase], backend)
        assert columns is not None
        rows = columns.where(num_heads=key[0], kv_cache_dtype=key[1])
        if key[2]:
            rows = rows.where(gemm_type=key[2])
        return rows

    def _table(self, table: str, backend: str | None) -> Columns | None:
        return self.database.read("mla", table, ("kv_cache_dtype", "gemm_type", "kernel_source"), backend)

    def _part(self, kernel: LatentAttention, backend: str | None, pieces: bool) -> tuple[Columns, tuple[str, str]]:
        """Rows of the nearest formats, and these: of the cache, and of the projections where modules were measured."""
        columns = self._table((KERNELS if pieces else MODULES)[kernel.phase], backend)
        assert columns is not None
        kv_dtype = first_of((cache_format(kernel.kv_dtype),), columns.values("kv_cache_dtype"))
        part = columns.where(kv_cache_dtype=kv_dtype)
        if pieces:
            return part, (kv_dtype, "")
        dtype = first_of((kernel.dtype, "bfloat16"), columns.values("gemm_type"))
        return part.where(gemm_type=dtype), (kv_dtype, dtype)


def projections(kernel: LatentAttention, hidden: int, q_lora_rank: int, dtype: str, out_dtype: str = "") -> list[Gemm]:
    """The matrix products around latent attention on one GPU: down (queries and latent together), query up, output."""
    queries = kernel.heads * (kernel.nope + kernel.rope)
    latent = kernel.kv_lora_rank + kernel.rope
    down = [Gemm(q_lora_rank + latent, hidden, dtype), Gemm(queries, q_lora_rank, dtype)]
    direct = [Gemm(latent, hidden, dtype), Gemm(queries, hidden, dtype)]
    return [*(down if q_lora_rank else direct), Gemm(hidden, kernel.heads * kernel.v_head_dim, out_dtype or dtype)]
