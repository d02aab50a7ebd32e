"""Measured matrix products: any (n, k) and any number of rows from a grid of shapes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.answer import Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Curve, blend
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import Gemm, Quantize
from windtunnel.perf.roofline import bound

LANES = {"bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
"""Our weight formats as ``gemm_dtype`` calls them; others take the efficiency of bfloat16 on their own least time."""

SIBLINGS = {"fp8_block": "fp8", "fp8": "fp8_block"}
"""The format whose efficiency stands in first where one was not measured."""


@dataclass(frozen=True, eq=False)
class GemmGrid:
    """Efficiency over [n, k, rows] of one weight format; NaN where a shape was not measured."""

    n: Floats
    k: Floats
    rows: Floats
    log_efficiency: NDArray[np.float64]

    def curve(self, kernel: Gemm) -> tuple[Curve, bool, bool] | None:
        """Efficiency over rows; whether (n, k) is on the grid; whether it is inside the hull. None without any data near it."""
        corners = [(i, j, u * v) for i, u in blend(self.n, kernel.n) for j, v in blend(self.k, kernel.k)]
        stack = np.stack([self.log_efficiency[i, j] for i, j, _ in corners])
        weights = np.array([w for _, _, w in corners])[:, None] * np.isfinite(stack)
        total = weights.sum(axis=0)
        use = total > 0
        if not use.any():
            return None
        log_efficiency = np.where(np.isfinite(stack), stack, 0.0) * weights
        curve = Curve(self.rows[use], np.exp(log_efficiency.sum(axis=0)[use] / total[use]))
        inside = self.n[0] <= kernel.n <= self.n[-1] and self.k[0] <= kernel.k <= self.k[-1]
        return curve, kernel.n in self.n and kernel.k in self.k, inside


class GemmTable:
    """The gemm tables of one database, built per weight format when first asked."""

    def __init__(self, database: Database, device: Device) -> None:
        self._database, self._device = database, device
        self._grids: dict[str, GemmGrid | None] = {}
        self._quantize: dict[float, Curve] | None = None

    def times(self, kernel: Gemm, a: Floats) -> Answer | None:
        """Seconds of a matrix product of ``a`` rows, or None without data.

        A shape off the grid takes the efficiency of its neighbours in (log n, log k), since time itself is steeper there; a
        format that was not measured takes the efficiency of its sibling (modelled).
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
        return found.modelled() if found else None

    def _from_grid(self, lane: str, kernel: Gemm, a: Floats) -> Answer | None:
        if lane not in self._grids:
            self._grids[lane] = self._build(lane)
        grid = self._grids[lane]
        found = grid.curve(kernel) if grid else None
        if found is None:
            return None
        curve, exact, inside = found
        result = curve.times(a, bound(kernel, self._device, a, np.zeros_like(a)))
        if exact:
            return result
        return Answer(result.seconds, np.maximum(result.sources, 1)) if inside else result.modelled()

    @cached_property
    def _columns(self) -> Columns | None:
        return self._database.read("gemm", "gemm_perf", ("gemm_dtype", "kernel_source"))

    def _build(self, lane: str) -> GemmGrid | None:
        if self._columns is None:
            return None
        part = self._columns.where(gemm_dtype=lane)
        if not len(part):
            return None
        keys = [part["n"], part["k"], part["m"]]
        chosen = part.take(one_per_key(keys, part["latency"], part.texts["kernel_source"][0]))
        axes = [np.unique(chosen[name]) for name in ("n", "k", "m")]
        index = tuple(np.searchsorted(axis, chosen[name]) for axis, name in zip(axes, ("n", "k", "m"), strict=True))
        n, k, m = (chosen[name].astype(float) for name in ("n", "k", "m"))
        kernel = Gemm(1, 1, lane)
        least = _bounds(kernel, self._device, n, k, m)
        cube = np.full([len(axis) for axis in axes], np.nan)
        cube[index] = np.log(least / (chosen["latency"] * 1e-3))
        return GemmGrid(axes[0].astype(float), axes[1].astype(float), axes[2].astype(float), cube)

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

    def _read_quantize(self) -> dict[float, Curve]:
        tables = [self._database.read("quantize", name, ()) for name in ("scale_matrix_perf", "computescale_perf")]
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


def _bounds(kernel: Gemm, device: Device, n: Floats, k: Floats, m: Floats) -> Floats:
    """Least seconds of many shapes, one array operation per distinct (n, k)."""
    least = np.empty_like(m)
    shapes, which = np.unique(np.stack([n, k], axis=1), axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    starts = np.searchsorted(which.ravel()[order], np.arange(len(shapes) + 1))
    for i, (width, depth) in enumerate(shapes):
        rows = order[starts[i] : starts[i + 1]]
        shape = replace(kernel, n=int(width), k=int(depth))
        least[rows] = bound(shape, device, m[rows], np.zeros(len(rows)))
    return least
