"""Measured sparse attention (DeepSeek-V3.2, GLM-5): whole modules over (requests, keys) or (chunk, context)."""

from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import INTERPOLATED, Answer, blended
from windtunnel.perf.attention_table import extend, plane_of
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.costs import STORED_BYTES
from windtunnel.perf.curves import Plane, blend, octaves
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import SparseAttention

TABLES = {"decode": "dsa_generation_module_perf", "prefill": "dsa_context_module_perf"}
ENGINES = ("sglang", "vllm", "trtllm")

ARCHITECTURES = {
    "GlmMoeDsaForCausalLM": (6144, 2048, 192, 256, 32),
    "DeepseekV32ForCausalLM": (7168, 1536, 128, 128, 64),
}
"""Architecture in the tables -> hidden size, query rank, key and value size of a head, heads of the indexer
(config.json of GLM-5 and DeepSeek-V3.2)."""

GROUP = 64
"""Contexts in the prefill tables are rounded to this many tokens: they differ by a token or two between chunks."""

Key = tuple[str, int, str, str]
"""Architecture, local heads, dtype of the cache, dtype of the projections."""


@dataclass(eq=False)
class SparseTable:
    """The sparse-attention module tables of one database."""

    database: Database
    device: Device
    _columns: dict[str, Columns | None] = field(default_factory=dict)
    _planes: dict[tuple[str, Key], Plane] = field(default_factory=dict)

    def times(self, kernel: SparseAttention, a: Floats, b: Floats) -> Answer | None:
        """Seconds of a module with its projections, or None without a table. Between two measured numbers of heads a
        power of the number; beyond them the nearest, scaled by least times."""
        if self._table(kernel.phase) is None:
            return None
        rows, (architecture, kv_dtype, dtype) = self._part(kernel)
        known = np.unique(rows["num_heads"]).astype(float)
        parts = [
            (replace(kernel, heads=int(known[i])) if weight < 1.0 else kernel, int(known[i]), weight)
            for i, weight in blend(known, kernel.heads)
        ]
        answers = [
            (self._of(each, (architecture, heads, kv_dtype, dtype), a, b), weight) for each, heads, weight in parts
        ]
        return blended(answers, float(octaves(known, np.array([float(kernel.heads)]))[0]))

    def _of(self, kernel: SparseAttention, key: Key, a: Floats, b: Floats) -> Answer:
        """As the module with a measured number of heads."""
        measured = _kernel(kernel, key)
        if (kernel.phase, key) not in self._planes:
            self._planes[kernel.phase, key] = self._plane(measured, key)
        plane = self._planes[kernel.phase, key]
        found = extend(plane, self.device, measured, kernel, (a, b), (a, b))
        chunked = (b > 0) & (kernel.phase == "prefill")
        sources = np.where(chunked, np.maximum(found.sources, INTERPOLATED), found.sources)
        found = replace(found, sources=sources)
        return found if measured == kernel else found.modelled()

    def _plane(self, measured: SparseAttention, key: Key) -> Plane:
        rows = self._rows(measured.phase, key)
        if measured.phase == "decode":
            a, b = rows["batch_size"].astype(float), (rows["isl"] + rows["step"]).astype(float)
        else:
            rows = rows.take(rows["step"] % GROUP == 0)
            a, b = rows["isl"].astype(float), rows["step"].astype(float)
        return plane_of(measured, self.device, a, b, rows["latency"] * 1e-3)

    def _rows(self, phase: str, key: Key) -> Columns:
        columns = self._table(phase)
        assert columns is not None
        rows = columns.where(architecture=key[0], num_heads=key[1], kv_cache_dtype=key[2], gemm_type=key[3])
        if phase == "prefill":
            rows = rows.where(batch_size=int(rows["batch_size"].min()))
        keys = [rows["batch_size"], rows["isl"], rows["step"]]
        return rows.take(one_per_key(keys, rows["latency"], rows.texts["kernel_source"][0]))

    def _table(self, phase: str) -> Columns | None:
        if phase not in self._columns:
            texts = ("op_name", "architecture", "kv_cache_dtype", "gemm_type", "kernel_source")
            found = self.database.read("sparse_attention", TABLES[phase], texts)
            for engine in ENGINES:
                if found is None:
                    found = self.database.read("sparse_attention", TABLES[phase], texts, engine)
            whole = f"dsa_{'generation' if phase == 'decode' else 'context'}_module"
            self._columns[phase] = None if found is None else found.where(op_name=whole)
        return self._columns[phase]

    def _part(self, kernel: SparseAttention) -> tuple[Columns, tuple[str, str, str]]:
        """Rows of the nearest architecture and formats, and these: of the cache, and of the projections."""
        columns = self._table(kernel.phase)
        assert columns is not None
        known = [name for name in ARCHITECTURES if name in columns.values("architecture")]
        architecture = min(known, key=lambda name: abs(ARCHITECTURES[name][0] - kernel.hidden))
        part = columns.where(architecture=architecture)
        kv_dtype = _choose("fp8" if STORED_BYTES[kernel.kv_dtype] == 1.0 else "bfloat16", part.values("kv_cache_dtype"))
        part = part.where(kv_cache_dtype=kv_dtype)
        dtype = _choose(kernel.dtype, part.values("gemm_type"))
        return part.where(gemm_type=dtype), (architecture, kv_dtype, dtype)


def _kernel(kernel: SparseAttention, key: Key) -> SparseAttention:
    hidden, rank, nope, value, index_heads = ARCHITECTURES[key[0]]
    sizes = {"hidden": hidden, "q_lora_rank": rank, "nope": nope, "v_head_dim": value, "index_heads": index_heads}
    return replace(kernel, heads=key[1], kv_dtype=key[2], dtype=key[3], **sizes)  # type: ignore[arg-type]


def _choose(wanted: str, known: tuple[str, ...]) -> str:
    return next((name for name in (wanted, "fp8_block", "bfloat16") if name in known), known[0])
