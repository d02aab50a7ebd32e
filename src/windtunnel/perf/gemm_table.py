"""Measured matrix products: any (n, k) and any number of rows from a grid of shapes."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.costs import STORED_BYTES
from windtunnel.perf.curves import Curve, blend, octaves
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.gemm_grid import GemmGrid, gemm_grid
from windtunnel.perf.kernels import Gemm, Quantize
from windtunnel.perf.roofline import LAUNCH_GRAPH, bound

LANES = {
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Our weight formats as ``gemm_dtype`` calls them; others take the efficiency of bfloat16 on their own least time."""

SIBLINGS = {"fp8_block": "fp8", "fp8": "fp8_block", "mxfp8": "fp8"}
"""The format whose efficiency stands in first where one was not measured."""


HOST_BOUND = 1.5
"""Quantised products of few rows read fewer bytes than bfloat16 ones and cannot take this many times as long: such a
table timed the host (fp8_block of vLLM 0.24.0: flat 60-90 µs on Hopper, 180-300 µs on Blackwell and Ada)."""


ENGINES = ("vllm", "sglang", "trtllm")

REPAIRED = 1.3
"""How much faster another engine's kernel must be to stand in for a point."""

CASTS = ("scale_matrix_perf", "computescale_perf")


class GemmTable:
    """The gemm tables of one database, built per weight format when first asked."""

    def __init__(self, database: Database, device: Device, causes: Causes = ALL) -> None:
        self._database, self._device, self._causes = database, device, causes
        self.notes: list[str] = []
        """What was borrowed, for the provenance."""
        self._grids: dict[str, GemmGrid | None] = {}
        self._borrowed: set[str] = set()
        self._quantize: dict[float, Curve] | None = None

    def times(self, kernel: Gemm, a: Floats) -> Answer | None:
        """Seconds of a matrix product of ``a`` rows, or None without data.

        A format that was not measured takes the efficiency of its sibling (modelled).
        """
        lane = LANES.get(kernel.dtype)
        native = not kernel.weight_only or kernel.dtype in ("bfloat16", "float16")
        if lane and native:
            found = self._from_grid(lane, kernel, a)
            if found:
                return found
            if lane in SIBLINGS and (found := self._from_grid(SIBLINGS[lane], kernel, a)):
                return found.modelled()
        found = self._from_grid("bfloat16", kernel, a)
        # widening the weights costs a launch more than the bytes that they save
        return replace(found.modelled(), seconds=found.seconds + LAUNCH_GRAPH) if found else None

    def _from_grid(self, lane: str, kernel: Gemm, a: Floats) -> Answer | None:
        grid = self._grid(lane)
        found = grid.curve(kernel) if grid else None
        if grid is None or found is None:
            return None
        curve, exact, inside = found
        result = curve.times(a, bound(kernel, self._device, a, np.zeros_like(a)))
        if self._causes.cold_cache and grid is not None:
            floor = kernel.n * kernel.k * STORED_BYTES[kernel.dtype] / grid.cold_rate()
            result = replace(result, seconds=np.maximum(result.seconds, floor))
        if exact and lane not in self._borrowed:
            return result
        away = np.hypot(octaves(grid.n, np.array([kernel.n])), octaves(grid.k, np.array([kernel.k])))
        result = replace(result, sources=np.maximum(result.sources, 1), distance=np.hypot(result.distance, away))
        return result if inside else result.modelled()

    def _grid(self, lane: str) -> GemmGrid | None:
        if lane not in self._grids:
            self._grids[lane] = self._repaired(lane, self._build(lane, None))
            plain = self._grid("bfloat16")
            suspected = self._causes.host_bound_tables and lane != "bfloat16" and plain is not None
            if suspected and plain is not None and _host_bound(self._grids[lane], plain):
                self._grids[lane] = self._borrow(lane, plain) or self._grids[lane]
        return self._grids[lane]

    def _repaired(self, lane: str, grid: GemmGrid | None) -> GemmGrid | None:
        """Points that take REPAIRED times as long as another engine's kernel of the same format take that one's time:
        outliers, and tables that time the cast of the activations too (TensorRT-LLM's)."""
        if grid is None or not self._causes.kernel_choice or lane == "bfloat16":
            return grid
        best, known, donors = grid.log_efficiency.copy(), np.isfinite(grid.log_efficiency), []
        for backend in ENGINES:
            other = self._build(lane, backend) if backend != self._database.backend else None
            if other is None:
                continue
            faster = np.nan_to_num(other.on(grid) - best) * known
            better = faster > np.log(REPAIRED)
            best = np.where(better, best + faster, best)
            donors += [backend] if better.any() else []
        if 2 * (known & (best != grid.log_efficiency)).sum() > known.sum():
            self._borrowed.add(lane)
            mine = f"{self._database.backend} {self._database.version} on {self._database.system}"
            self.notes.append(
                f"{lane} gemms of {mine}: most are slower than those of {', '.join(donors)}, which are used"
            )
        return replace(grid, log_efficiency=best)

    def _borrow(self, lane: str, plain: GemmGrid) -> GemmGrid | None:
        """The same products as another engine's build measured them, where this engine's times are those of its
        launches."""
        for backend in ("sglang", "trtllm", "vllm"):
            grid = self._build(lane, backend) if backend != self._database.backend else None
            if grid is not None and not _host_bound(grid, plain):
                self._borrowed.add(lane)
                mine = f"{self._database.backend} {self._database.version} on {self._database.system}"
                self.notes.append(
                    f"{lane} gemms of {mine} were timed by their host launches: those of {backend} are used"
                )
                return grid
        return None

    @cached_property
    def _columns(self) -> Columns | None:
        return self._database.read("gemm", "gemm_perf", ("gemm_dtype", "kernel_source"))

    def _build(self, lane: str, backend: str | None) -> GemmGrid | None:
        texts = ("gemm_dtype", "kernel_source")
        columns = self._database.read("gemm", "gemm_perf", texts, backend) if backend else self._columns
        part = columns.where(gemm_dtype=lane) if columns is not None else None
        if part is None or not len(part):
            return None
        keys = [part["n"], part["k"], part["m"]]
        chosen = part.take(one_per_key(keys, part["latency"], part.texts["kernel_source"][0]))
        n, k, m = (chosen[name].astype(float) for name in ("n", "k", "m"))
        return gemm_grid(self._device, lane, n, k, m, chosen["latency"] * 1e-3)

    def quantize(self, kernel: Quantize, a: Floats) -> Answer | None:
        """Seconds of a dynamic 8-bit quantisation of activations: the static cast plus what finding the scale adds."""
        if self._quantize is None:
            self._quantize = self._read_quantize()
        if not self._quantize:
            return None
        ks = np.array(sorted(self._quantize))
        near = blend(ks, kernel.k)
        least = bound(kernel, self._device, a, np.zeros_like(a))
        parts = [(self._quantize[float(ks[i])].times(a, least), w) for i, w in near]
        seconds = np.exp(sum(w * np.log(part.seconds) for part, w in parts))
        sources = np.maximum.reduce([part.sources for part, _ in parts])
        result = Answer(np.asarray(seconds), sources if kernel.k in ks else np.maximum(sources, 1))
        return result if ks[0] <= kernel.k <= ks[-1] else result.modelled()

    def _caster(self) -> str | None:
        """vLLM's own kernels stand for everybody's: the other engines' tables time unfused PyTorch operators."""
        vllm = self._causes.kernel_choice and self._database.path("quantize", CASTS[0], "vllm") is not None
        return "vllm" if vllm and self._database.backend != "vllm" else None

    def _read_quantize(self) -> dict[float, Curve]:
        tables = [self._database.read("quantize", name, (), self._caster()) for name in CASTS]
        if tables[0] is None or tables[1] is None:
            return {}
        total: dict[tuple[int, int], list[float]] = {}
        for table in tables:
            assert table is not None
            for m, k, ms in zip(table["m"], table["k"], table["latency"], strict=True):
                total.setdefault((int(k), int(m)), []).append(max(float(ms), 0.0) * 1e-3)
        curves = {}
        for k in sorted({k for k, _ in total}):
            rows = sorted(m for other, m in total if other == k and len(total[k, m]) >= 2)
            if len(rows) < 2:
                continue
            x = np.array(rows, dtype=float)
            seconds = np.array([sum(total[k, m]) for m in rows])
            curves[float(k)] = Curve(x, bound(Quantize(k), self._device, x, np.zeros_like(x)) / seconds)
        return curves


def _host_bound(grid: GemmGrid | None, plain: GemmGrid) -> bool:
    """Whether small products take far longer than in bfloat16, as when the host launches them one by one while the
    clock runs."""
    if grid is None:
        return False
    rows = np.intersect1d(grid.rows, plain.rows)
    rows = rows[rows <= 128]
    shapes = [(n, k) for n in (2048, 4096, 8192) for k in (2048, 4096, 8192)]
    shapes = [(n, k) for n, k in shapes if all(n in g.n and k in g.k for g in (grid, plain))]
    ratios = [grid.seconds(n, k, rows) / plain.seconds(n, k, rows) for n, k in shapes]
    return bool(ratios) and float(np.nanmedian(np.concatenate(ratios))) > HOST_BOUND
