"""Measured multi-head latent attention. The database times whole modules; the projections around it are taken off
again."""

from dataclasses import dataclass, field

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import MODELLED, Answer
from windtunnel.perf.attention_table import extend, plane_of
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.costs import STORED_BYTES
from windtunnel.perf.curves import Curve, Plane
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.gemm_table import GemmTable
from windtunnel.perf.kernels import Gemm, LatentAttention
from windtunnel.perf.roofline import bound

TABLES = {"decode": "mla_generation_module_perf", "prefill": "mla_context_module_perf"}

HIDDEN, QUERY_RANK, LATENT_RANK, NOPE, ROPE, V_HEAD_DIM = 7168, 1536, 512, 128, 64, 128
"""Sizes of the modules in the tables: DeepSeek-V3 (its config.json); the number of heads is the local one."""

LEAST_SHARE = 0.3
"""Attention never counts as less than this share of its module: for tiny batches, launches overlap and the gemms' sum
is too much."""

Key = tuple[int, str, str]
"""Local heads, dtype of the cache, dtype of the projections."""


@dataclass(eq=False)
class LatentTable:
    """The MLA module tables of one database."""

    database: Database
    device: Device
    gemms: GemmTable
    _columns: dict[str, Columns | None] = field(default_factory=dict)
    _planes: dict[Key, Plane] = field(default_factory=dict)
    _curves: dict[Key, Curve] = field(default_factory=dict)

    def times(self, kernel: LatentAttention, a: Floats, b: Floats) -> Answer | None:
        """Seconds of attention proper (with rotary embedding, absorption or expansion, cache write), or None without a
        table.

        Other latent sizes than DeepSeek-V3's are scaled by least times (modelled), as is a chunk with context.
        """
        if self._table(kernel.phase) is None:
            return None
        key = self._nearest(kernel)
        measured = LatentAttention(kernel.phase, key[0], LATENT_RANK, NOPE, ROPE, V_HEAD_DIM, key[1], key[2])
        if kernel.phase == "decode":
            if key not in self._planes:
                rows = self._rows("decode", key)
                keys = (rows["isl"] + rows["step"]).astype(float)
                self._planes[key] = plane_of(
                    measured, self.device, rows["batch_size"].astype(float), keys, self._core(measured, rows)
                )
            found = extend(self._planes[key], self.device, measured, kernel, (a, b), (a, b))
        else:
            if key not in self._curves:
                rows = self._rows("prefill", key)
                rows = rows.take(np.argsort(rows["isl"], kind="stable"))
                x = rows["isl"].astype(float)
                least = bound(measured, self.device, x, np.zeros_like(x))
                self._curves[key] = Curve(x, least / self._core(measured, rows))
            found = self._prefill(kernel, self._curves[key], a, b)
        return found if measured == kernel else found.modelled()

    def _prefill(self, kernel: LatentAttention, curve: Curve, a: Floats, b: Floats) -> Answer:
        fresh = curve.times(a, bound(kernel, self.device, a, np.zeros_like(a)))
        chunked = curve.times(np.maximum(a + b, 128.0), bound(kernel, self.device, a, b)).seconds
        seconds = np.where(b > 0, np.maximum(fresh.seconds, chunked), fresh.seconds)
        return Answer(seconds, np.where(b > 0, MODELLED, fresh.sources).astype(np.int8))

    def _core(self, measured: LatentAttention, rows: Columns) -> Floats:
        """Seconds of the modules less their four projections."""
        tokens = rows["batch_size"] * (rows["isl"] if measured.phase == "prefill" else 1)
        seconds = np.asarray(rows["latency"] * 1e-3, dtype=float)
        rest: Floats = seconds.copy()
        for gemm in projections(measured, HIDDEN, QUERY_RANK, measured.dtype):
            part = self.gemms.times(gemm, tokens.astype(float))
            rest -= part.seconds if part else 0.0
        return np.asarray(np.maximum(rest, LEAST_SHARE * seconds))

    def _rows(self, phase: str, key: Key) -> Columns:
        columns = self._table(phase)
        assert columns is not None
        rows = columns.where(num_heads=key[0], kv_cache_dtype=key[1], gemm_type=key[2])
        if phase == "prefill":
            rows = rows.where(batch_size=int(rows["batch_size"].min()))
        keys = [rows["batch_size"], rows["isl"], rows["step"]]
        return rows.take(one_per_key(keys, rows["latency"], rows.texts["kernel_source"][0]))

    def _table(self, phase: str) -> Columns | None:
        if phase not in self._columns:
            texts = ("kv_cache_dtype", "gemm_type", "kernel_source")
            self._columns[phase] = self.database.read("mla", TABLES[phase], texts)
        return self._columns[phase]

    def _nearest(self, kernel: LatentAttention) -> Key:
        columns = self._table(kernel.phase)
        assert columns is not None
        kv_dtype = "fp8" if STORED_BYTES[kernel.kv_dtype] == 1.0 else "bfloat16"
        kv_dtypes, gemm_types = columns.values("kv_cache_dtype"), columns.values("gemm_type")
        dtype = kernel.dtype if kernel.dtype in gemm_types else "bfloat16"
        if dtype not in gemm_types:
            dtype = gemm_types[0]
        kv_dtype = kv_dtype if kv_dtype in kv_dtypes else kv_dtypes[0]
        part = columns.where(kv_cache_dtype=kv_dtype, gemm_type=dtype)
        heads = np.unique(part["num_heads"])
        nearest = heads[int(np.argmin(np.abs(np.log(heads / kernel.heads))))]
        return int(nearest), kv_dtype, dtype


def projections(kernel: LatentAttention, hidden: int, q_lora_rank: int, dtype: str, out_dtype: str = "") -> list[Gemm]:
    """The matrix products around latent attention on one GPU: down (queries and latent together), query up, output."""
    queries = kernel.heads * (kernel.nope + kernel.rope)
    latent = kernel.kv_lora_rank + kernel.rope
    down = [Gemm(q_lora_rank + latent, hidden, dtype), Gemm(queries, q_lora_rank, dtype)]
    direct = [Gemm(latent, hidden, dtype), Gemm(queries, hidden, dtype)]
    return [*(down if q_lora_rank else direct), Gemm(hidden, kernel.heads * kernel.v_head_dim, out_dtype or dtype)]
