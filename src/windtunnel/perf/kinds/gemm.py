"""Matrix products: shape, least cost, and times of any (n, k) and number of rows from a grid of measured shapes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import blend, octaves
from windtunnel.perf.between.ensemble import TILES, RowsCurve, errors_over_rows, line, rounded
from windtunnel.perf.database import KEPT, Columns, Measured, Table, one_per_key
from windtunnel.perf.kernel import LAUNCH_GRAPH, RATES, STORED_BYTES, Kernel
from windtunnel.perf.kernel_times import KernelTimes


@dataclass(frozen=True)
class Gemm(Kernel):
    """Matrix product of ``a`` rows: [a, k] × [k, n]."""

    n: int
    k: int
    dtype: str = "bfloat16"
    """How the weights are stored: ``bfloat16``, ``fp8``, ``fp8_block``, ``nvfp4``, ``mxfp4``, ``int4``, ``int8``."""
    weight_only: bool = False
    """Activations stay in 16 bits and multiply at the 16-bit rate."""
    beside: bool = False
    """Runs on a second stream beside the routed experts where a batch is small."""
    backend: str = ""
    """Whose kernel, of KERNELS; empty: the fastest."""

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """A product and a sum for each weight and row."""
        return 2.0 * self.n * self.k * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Weights, rows in and rows out."""
        activation = 2.0 if self.rate == "bfloat16" else STORED_BYTES[self.dtype]
        return self.n * self.k * STORED_BYTES[self.dtype] + a * (self.k * activation + 2.0 * self.n)

    @property
    def rate(self) -> str:
        """That of its weights' format, unless they are widened."""
        return "bfloat16" if self.weight_only else RATES.get(self.dtype, "bfloat16")

    def describe(self) -> str:
        """Columns, depth and format."""
        return f"n={self.n} k={self.k} {self.dtype}"

    @property
    def error_family(self) -> str:
        """By weight format."""
        return f"gemm_{'bfloat16' if self.dtype == 'float16' else self.dtype}"

    @property
    def efficiency_family(self) -> str:
        """Families differ by the rate at which they multiply."""
        return f"gemm_{self.rate}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the gemm tables."""
        return known.table(GemmTable).times(self, a)

    def beside_experts(self) -> Self:
        """On a second stream."""
        return replace(self, beside=True)


FEW_ROWS = 16
BEYOND_CACHE = 2.5e8
"""Bytes of weights that no second-level cache holds (126 MB on B200)."""

OUTLIER = 1.5
"""More rows never need less work: a point this many times slower than one with more rows is dropped. Tiles and waves
stay below (all but 1.5 % of points); what exceeds it is the first of a series (fp8 with one row on Blackwell: 2.5)."""

SAMPLED = 4
"""A quarter of the shapes tells how well rows are interpolated as all of them do."""

COLUMN_TILE = 128
"""Columns below which products of different widths run in one tile, and time is no straight line in them."""


@dataclass(frozen=True, eq=False)
class GemmGrid:
    """Efficiency over [n, k, rows] of one weight format; NaN where a shape was not measured."""

    n: Floats
    k: Floats
    rows: Floats
    log_efficiency: NDArray[np.float64]
    device: Device
    dtype: str = "bfloat16"

    def seconds(self, n: int, k: int, rows: Floats) -> Floats:
        """Measured seconds of a shape on the grid, NaN where missing."""
        i, j = int(np.searchsorted(self.n, n)), int(np.searchsorted(self.k, k))
        return np.asarray(self._least(n, k, rows) / np.exp(self.log_efficiency[i, j, np.searchsorted(self.rows, rows)]))

    def curve(self, kernel: Gemm) -> tuple[RowsCurve, bool, bool] | None:
        """Efficiency over rows; whether (n, k) is on the grid; whether it is inside the hull. None without any data
        near it.

        Between measured shapes time is a straight line in k, and in n from COLUMN_TILE on; where a corner is missing or
        the shape is outside, the efficiency of the known corners holds instead, since it is flatter than time.
        """
        corners = [(i, j, u * v) for i, u in blend(self.n, kernel.n) for j, v in blend(self.k, kernel.k)]
        if not any(np.isfinite(self.log_efficiency[i, j]).any() for i, j, _ in corners):
            corners = self._around(corners[0][0], corners[0][1])
        stack = np.stack([self.log_efficiency[i, j] for i, j, _ in corners])
        weights = np.array([w for _, _, w in corners])[:, None] * np.isfinite(stack)
        total = weights.sum(axis=0)
        if not (total > 0).any():
            return None
        log_efficiency = (np.where(np.isfinite(stack), stack, 0.0) * weights).sum(axis=0)
        log_efficiency = np.divide(log_efficiency, total, out=np.full_like(total, np.nan), where=total > 0)
        exact = kernel.n in self.n and kernel.k in self.k
        inside = self.n[0] <= kernel.n <= self.n[-1] and self.k[0] <= kernel.k <= self.k[-1]
        least = kernel.least(self.device)
        if inside and not exact:
            straight = np.log(least(self.rows) / self._between(kernel))
            log_efficiency = np.where(np.isfinite(straight), straight, log_efficiency)
        use = np.isfinite(log_efficiency)
        efficiency = np.exp(log_efficiency[use])
        return RowsCurve(self.rows[use], efficiency, least, self.typical[:, use]), exact, inside

    def _between(self, kernel: Gemm) -> Floats:
        """[rows] seconds between the four measured shapes around one inside the hull; NaN where one is missing."""
        wide = blend(self.n, kernel.n)
        straight = self.n[wide[0][0]] >= COLUMN_TILE
        deep = blend(self.k, kernel.k, straight=True)
        found = np.zeros(len(self.rows))
        for i, u in blend(self.n, kernel.n, straight=straight):
            seconds = np.zeros(len(self.rows))
            for j, v in deep:
                seconds = seconds + v * self.seconds(int(self.n[i]), int(self.k[j]), self.rows)
            found = found + u * (seconds if straight else np.log(seconds))
        return found if straight else np.exp(found)

    def _around(self, i: int, j: int) -> list[tuple[int, int, float]]:
        """The four neighbours of a shape that was not measured."""
        places = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
        return [(a, b, 1.0) for a, b in places if 0 <= a < len(self.n) and 0 <= b < len(self.k)] or [(i, j, 1.0)]

    @cached_property
    def typical(self) -> Floats:
        """[R, rows] mean error of each interpolant over every SAMPLEDth shape; NaN where none says."""
        shapes = list(self._shapes())[::SAMPLED]
        gaps = np.stack([np.isnan(self.log_efficiency[i, j]) for i, j in shapes])
        floors = {
            tile: np.log([self._least(int(self.n[i]), int(self.k[j]), rounded(self.rows, tile)) for i, j in shapes])
            for tile in TILES
        }
        logs = floors[1] - np.stack([self._filled(self.log_efficiency[i, j]) for i, j in shapes])
        errors = np.where(gaps, np.nan, errors_over_rows(self.rows, logs, floors))
        known = np.isfinite(errors)
        count = known.sum(axis=1)
        mean = np.where(known, errors, 0.0).sum(axis=1)
        return np.asarray(np.divide(mean, count, out=np.full(mean.shape, np.nan), where=count > 0))

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Shapes that were measured at two row counts or more."""
        for i, j in np.argwhere(np.isfinite(self.log_efficiency).sum(axis=2) > 1):
            yield int(i), int(j)

    def _filled(self, log_efficiency: Floats) -> Floats:
        known = np.isfinite(log_efficiency)
        rows = np.log(self.rows)
        return line(rows[known], log_efficiency[known], rows)

    def _least(self, n: int, k: int, rows: Floats) -> Floats:
        return Gemm(n, k, self.dtype).least(self.device)(rows)

    def cold_rate(self) -> float:
        """Bytes/s at best of products whose weights exceed any cache; infinite without such shapes."""
        n, k = np.meshgrid(self.n, self.k, indexing="ij")
        weights = n * k * STORED_BYTES[self.dtype]
        few = self.rows <= FEW_ROWS
        if not (weights > BEYOND_CACHE).any() or not few.any():
            return float("inf")
        row = np.array([float(self.rows[few][-1])])
        pairs = [(int(i), int(j)) for i, j in np.argwhere(weights > BEYOND_CACHE)]
        rates = [weights[i, j] / self.seconds(int(self.n[i]), int(self.k[j]), row)[0] for i, j in pairs]
        best = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
        return best or float("inf")

    def on(self, grid: "GemmGrid") -> NDArray[np.float64]:
        """Log efficiencies at the points of another grid, NaN where this one has none."""
        found = np.full(grid.log_efficiency.shape, np.nan)
        common = [np.intersect1d(*pair) for pair in ((self.n, grid.n), (self.k, grid.k), (self.rows, grid.rows))]
        mine = np.ix_(*(np.searchsorted(axis, points) for axis, points in zip(self._axes(), common, strict=True)))
        theirs = np.ix_(*(np.searchsorted(axis, points) for axis, points in zip(grid._axes(), common, strict=True)))
        found[theirs] = self.log_efficiency[mine]
        return found

    def _axes(self) -> tuple[Floats, Floats, Floats]:
        return self.n, self.k, self.rows


def gemm_grid(device: Device, dtype: str, n: Floats, k: Floats, m: Floats, seconds: Floats) -> GemmGrid:
    """A grid of measured points, one for each (n, k, rows), without outliers."""
    axes = [np.unique(values) for values in (n, k, m)]
    index = tuple(np.searchsorted(axis, values) for axis, values in zip(axes, (n, k, m), strict=True))
    cube = np.full([len(axis) for axis in axes], np.nan)
    cube[index] = seconds
    cube[_outliers(cube)] = np.nan
    cube[index] = np.log(_bounds(Gemm(1, 1, dtype), device, n, k, m) / cube[index])
    return GemmGrid(axes[0], axes[1], axes[2], cube, device, dtype)


def _outliers(seconds: Floats) -> NDArray[np.bool_]:
    """Points of [n, k, rows] that take OUTLIER times as long as some larger number of rows."""
    later = np.where(np.isfinite(seconds), seconds, np.inf)
    later = np.minimum.accumulate(later[:, :, ::-1], axis=2)[:, :, ::-1]
    return np.asarray(np.isfinite(seconds) & (seconds > OUTLIER * later))


def _bounds(kernel: Gemm, device: Device, n: Floats, k: Floats, m: Floats) -> Floats:
    """Least seconds of many shapes, one array operation per distinct (n, k)."""
    least = np.empty_like(m)
    shapes, which = np.unique(np.stack([n, k], axis=1), axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    starts = np.searchsorted(which.ravel()[order], np.arange(len(shapes) + 1))
    for i, (width, depth) in enumerate(shapes):
        rows = order[starts[i] : starts[i + 1]]
        shape = replace(kernel, n=int(width), k=int(depth))
        least[rows] = shape.least(device)(m[rows])
    return least


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
TEXTS = ("gemm_dtype", "kernel_source")
KERNELS = {
    "cutlass": ("cutlassfp8", "cutlass_fp8", "sgl_kernel_fp8"),
    "deep_gemm": ("deepgemm", "deep_gemm"),
    "flashinfer_cutlass": ("flashinfercutlass", "flashinfer_cutlass"),
    "flashinfer_cutedsl": ("flashinfercutedsl", "flashinfer_cutedsl"),
    "triton": ("triton",),
}
"""vLLM's names of kernels → what ``kernel_source`` says of them; SGLang's own for 8 bits are CUTLASS's."""

REPAIRED = 1.3
"""How much faster another engine's kernel must be to stand in for a point."""

CASTS, CAST_ROWS = 3.0, 128
"""Up to this many rows a cast is a good part of a product's time, but not so many times as long: that is the host."""


class GemmTable(Table):
    """The gemm tables of one database, built per weight format when first asked."""

    def times(self, kernel: Gemm, a: Floats) -> KernelTimes | None:
        """Seconds of a matrix product of ``a`` rows, or None without data.

        A format that was not measured takes the efficiency of its sibling (modelled).
        """
        lane = LANES.get(kernel.dtype)
        if kernel.backend:
            return self._of_one(lane, kernel, a)
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

    def _of_one(self, lane: str | None, kernel: Gemm, a: Floats) -> KernelTimes | None:
        """Seconds of the kernel that is named; where none was measured those of the fastest."""
        plain = replace(kernel, backend="")
        grid, own = self.once(self._named, lane, kernel.backend) if lane else (None, True)
        found = self._in(grid, not own, plain, a)
        if found is None:
            self.note(f"{kernel.dtype} gemms: no kernel of {kernel.backend} was measured: the fastest stands for it")
            return self.times(plain, a)
        return found

    def _named(self, lane: str, backend: str) -> tuple[GemmGrid | None, bool]:
        """The points of a kernel by its name, and whether they are this engine's; it dispatches by shape, and may have
        few. Those that are times of the host's launches count for none."""
        plain = self.once(self._grid, "bfloat16")[0]
        best, most, mine = None, 0, True
        for engine in (self.backend, *(name for name in ENGINES if name != self.backend)):
            own = engine == self.backend
            columns = self.database.read("gemm", "gemm_perf", TEXTS, None if own else engine)
            grid = None if columns is None else _grid_of(columns, lane, self.device, backend)
            if grid is None or (plain and self.known.corrections.host_bound_tables and _host_bound(grid, plain)):
                continue
            points = int(np.isfinite(grid.log_efficiency).sum()) * (2 if own else 1)
            if points > most:
                best, most, mine = grid, points, own
        return best, mine

    def _from_grid(self, lane: str, kernel: Gemm, a: Floats) -> KernelTimes | None:
        return self._in(*self.once(self._grid, lane), kernel, a)

    def _in(self, grid: GemmGrid | None, borrowed: bool, kernel: Gemm, a: Floats) -> KernelTimes | None:
        """Seconds by a grid, which is another engine's or not; None without data."""
        found = grid.curve(kernel) if grid else None
        if grid is None or found is None:
            return None
        curve, exact, inside = found
        result = curve.times(a, kernel.bound(self.device, a, np.zeros_like(a)))
        if self.known.corrections.cold_cache:
            floor = kernel.n * kernel.k * STORED_BYTES[kernel.dtype] / grid.cold_rate()
            result = replace(result, seconds=np.maximum(result.seconds, floor))
        if exact and not borrowed:
            return result
        away = np.hypot(octaves(grid.n, np.array([kernel.n])), octaves(grid.k, np.array([kernel.k])))
        result = replace(result, sources=np.maximum(result.sources, 1), distance=np.hypot(result.distance, away))
        return result if inside else result.modelled()

    def _grid(self, lane: str) -> tuple[GemmGrid | None, bool]:
        """The products of a format, and whether most of them are another engine's."""
        grid, repaired = self._repaired(lane, self._build(lane, None))
        plain = None if lane == "bfloat16" else self.once(self._grid, "bfloat16")[0]
        if plain is not None and self.known.corrections.host_bound_tables and _host_bound(grid, plain):
            other = self._borrow(lane, plain)
            return (grid, repaired) if other is None else (other, True)
        return grid, repaired

    def _repaired(self, lane: str, grid: GemmGrid | None) -> tuple[GemmGrid | None, bool]:
        """The grid, and whether most of it changed. Points that take REPAIRED times as long as another engine's kernel
        of the same format take that one's time; where most products of few rows do, but not CASTS times, the table has
        timed the cast of the activations with every product (TensorRT-LLM's): all of its points that are slower do."""
        if grid is None or not self.known.corrections.kernel_choice or lane == "bfloat16":
            return grid, False
        best, known, donors = grid.log_efficiency.copy(), np.isfinite(grid.log_efficiency), []
        few = known & (grid.rows <= CAST_ROWS)
        for backend in ENGINES:
            other = self._build(lane, backend) if backend != self.backend else None
            if other is None:
                continue
            gained = np.nan_to_num(other.on(grid) - grid.log_efficiency) * known
            times_casts = few.any() and np.log(REPAIRED) < np.median(gained[few]) < np.log(CASTS)
            faster = np.nan_to_num(other.on(grid) - best) * known
            better = faster > (0.0 if times_casts else np.log(REPAIRED))
            best = np.where(better, best + faster, best)
            donors += [backend] if better.any() else []
        most = bool(2 * (known & (best != grid.log_efficiency)).sum() > known.sum())
        if most:
            self.note(
                f"{lane} gemms of {self._mine}: most are slower than those of {', '.join(donors)}, which are used"
            )
        return replace(grid, log_efficiency=best), most

    def _borrow(self, lane: str, plain: GemmGrid) -> GemmGrid | None:
        """These products as another engine's build measured them, where this engine's times are those of its
        launches."""
        for backend in ("sglang", "trtllm", "vllm"):
            grid = self._build(lane, backend) if backend != self.backend else None
            if grid is not None and not _host_bound(grid, plain):
                self.note(
                    f"{lane} gemms of {self._mine} were timed by their host launches: those of {backend} are used"
                )
                return grid
        return None

    @property
    def _mine(self) -> str:
        return f"{self.backend} {self.database.version} on {self.database.system}"

    def _build(self, lane: str, backend: str | None) -> GemmGrid | None:
        columns = self.database.read("gemm", "gemm_perf", TEXTS, backend)
        return None if columns is None else _grid_of(columns, lane, self.device)


@lru_cache(maxsize=KEPT)
def _grid_of(columns: Columns, lane: str, device: Device, backend: str = "") -> GemmGrid | None:
    """The grid of a format in a file that was read, or of one kernel; made once for all pools that ask."""
    part = columns.where(gemm_dtype=lane)
    if backend:
        part = part.take(part.of_kernel(*KERNELS[backend]))
    if not len(part):
        return None
    keys = [part["n"], part["k"], part["m"]]
    chosen = part.take(one_per_key(keys, part["latency"], part.texts["kernel_source"][0]))
    n, k, m = (chosen[name].astype(float) for name in ("n", "k", "m"))
    return gemm_grid(device, lane, n, k, m, chosen["latency"] * 1e-3)


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
    known = np.concatenate([np.ones(0), *ratios])
    known = known[np.isfinite(known)]
    return bool(len(known)) and float(np.median(known)) > HOST_BOUND
