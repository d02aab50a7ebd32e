"""Softmax attention: shape, least cost, and its tables: decode over (requests, keys), prefill over chunk length; other
shapes by the nearest one's efficiency."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve
from windtunnel.perf.between.ensemble import EnsembleCurve, beyond_launch
from windtunnel.perf.between.planes import Plane, cold_rate, extend, named_kernel, plane_of
from windtunnel.perf.database import Columns, Measured, Table
from windtunnel.perf.kernel import STORED_BYTES, Efficiency, Kernel, cache_format, pairs
from windtunnel.perf.kernel_times import MODELLED, KernelTimes, blended


@dataclass(frozen=True)
class PerHead:
    """Decodes in which a block of threads for each query head reads all its keys, from the first to the last."""

    rate: float
    """At which all blocks together read, in bandwidths of the memory; heads that share keys find them in a cache."""
    above: int = 0
    """Only where requests × query heads are more than this."""
    block: float = float("inf")
    """Bytes/s of one block."""

    def least(self, kernel: "Attention", device: Device, a: Floats, keys: Floats) -> Floats:
        """Seconds of ``a`` requests with this many keys each."""
        of_one = keys * (kernel.head_dim + kernel.v_head_dim) * STORED_BYTES[kernel.kv_dtype]
        all_heads = a * kernel.heads * of_one / (self.rate * device.memory_bandwidth)
        return np.where(a * kernel.heads > self.above, np.maximum(of_one / self.block, all_heads), 0.0)


MASKED = PerHead(1.8, block=50e9)
"""TensorRT-LLM 0.11's masked multi-head attention, whose multi-block mode is a build flag that is off: from its static
batches of Llama-3-8B on A100 (../shared/truth/static_batches)."""

PAGED = PerHead(0.35, above=512)
"""The first paged attention kernel of vLLM 0.6 on AMD's GPUs, chosen above this many blocks (rocm_flash_attn.py): from
the static batches of Llama-3-8B on one and two MI300X."""


@dataclass(frozen=True)
class Attention(Kernel):
    """Softmax attention of one GPU's heads, as decode or as prefill."""

    phase: str
    """``decode``: ``a`` requests with one query each over ``b`` keys, the token itself included.
    ``prefill``: one chunk of ``a`` query tokens of a request with ``b`` tokens in the cache."""
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    """A query sees only this many keys; 0: all."""
    kv_dtype: str = "bfloat16"
    tiled: bool = False
    """A decode beside prefill chunks in one call of FlashAttention 2: every query fills a tile of its own."""
    per_head: PerHead | None = None
    """Query heads read their keys one by one."""
    backend: str = ""
    """Whose kernel; empty: the one with most measurements."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Scores and values of every query and key that it sees."""
        each = 2.0 * self.heads * (self.head_dim + self.v_head_dim)
        return each * a * self._seen(b) if self.phase == "decode" else each * pairs(a, b, self.window)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Keys and values once, queries in and out."""
        keys_of_one = self.kv_heads * (self.head_dim + self.v_head_dim) * STORED_BYTES[self.kv_dtype]
        query = 2.0 * self.heads * (self.head_dim + self.v_head_dim)
        if self.phase == "decode":
            return a * (self._seen(b) * keys_of_one + query)
        keys = np.minimum(a + b, a + self.window) if self.window else a + b
        return keys * keys_of_one + a * query

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """By the roofline, and no faster than query heads read their keys."""
        found = super().attained(device, efficiencies, a, b)
        return np.maximum(found, self.per_head.least(self, device, a, self._seen(b))) if self.per_head else found

    def _seen(self, b: Floats) -> Floats:
        return np.minimum(b, self.window) if self.window else b

    def describe(self) -> str:
        """Heads, window, and format of the cache."""
        window = f" window={self.window}" if self.window else ""
        return f"heads={self.heads}/{self.kv_heads}×{self.head_dim}{window} kv={self.kv_dtype}"

    @property
    def error_family(self) -> str:
        """Families differ by phase."""
        return f"attention_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the attention tables."""
        return known.table(AttentionTable).times(self, a, b)

    def beside_prefill(self) -> Self:
        """Decodes next to a chunk fill whole tiles of queries."""
        return replace(self, tiled=True)


TABLES = {"decode": "generation_attention_perf", "prefill": "context_attention_perf"}
KEYS = ("num_heads", "num_key_value_heads", "head_dim", "window_size")
TILE_ROWS = 64
"""Rows of the tile that FlashAttention 2 gives each query head of a decode beside chunks."""

LONG_PROMPT = 8192.0

QUERY_TILE = 128
"""Rows of queries that one thread block multiplies; the query heads of a group share its rows (FlashAttention 2 and
3)."""

NEIGHBOURS = 2
LEAST_DISTANCE = 0.1
OTHER_COUNT = 0.25
"""Octaves of distance for each octave of KV heads between decodes with as many query heads for each."""

Key = tuple[int, int, int, int, str, str]
"""heads, KV heads, head dimension, window, dtype of the cache, whose kernel is wanted."""


@dataclass(eq=False)
class AttentionTable(Table):
    """The attention tables of one database; planes and curves are built when first asked."""

    _columns: dict[str, Columns | None] = field(default_factory=dict)
    _shapes: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    _planes: dict[Key, Plane] = field(default_factory=dict)
    _curves: dict[Key, Curve] = field(default_factory=dict)
    _cold: dict[Key, float] = field(default_factory=dict)

    def times(self, kernel: Attention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds at (a, b) as the kernel's phase means them, or None without a table."""
        if kernel.tiled:
            return self._tiled(kernel, a, b)
        alike = [(self._of_shape(kernel, key, a, b), weight) for key, weight in self._alike(kernel)]
        if len(alike) < 2:
            return alike[0][0] if alike else None
        return blended(alike, 0.0)

    def _of_shape(self, kernel: Attention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        """As a measured shape has it."""
        heads, kv_heads, head_dim, window, kv_dtype, _ = key
        other = replace(
            kernel,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            window=window,
            kv_dtype=kv_dtype,
        )
        same = other == kernel or (kernel.kv_dtype == "float16" and other == replace(kernel, kv_dtype="bfloat16"))
        decode = kernel.phase == "decode"
        found = self._decode(kernel, other, key, a, b) if decode else self._prefill(kernel, other, key, a, b)
        return found if same else found.modelled()

    def _tiled(self, kernel: Attention, a: Floats, b: Floats) -> KernelTimes | None:
        """Decodes beside chunks: as alone, or all the rows of their tiles at the rate of a long prompt, whichever is
        more. Neither are keys split nor the query heads of a group packed then (FlashAttention 2, flash_api.cpp)."""
        alone = self.times(replace(kernel, tiled=False), a, b)
        prompt = replace(kernel, phase="prefill", tiled=False)
        long = self.times(prompt, np.full(1, LONG_PROMPT), np.zeros(1))
        if alone is None or long is None:
            return alone
        rate_ = float(prompt.flops(np.full(1, LONG_PROMPT), np.zeros(1))[0]) / float(long.seconds[0])
        tiles = TILE_ROWS * replace(kernel, tiled=False).flops(a, b) / rate_
        longer = tiles > alone.seconds
        sources = np.where(longer, MODELLED, alone.sources).astype(np.int8)
        distance = np.where(longer, alone.by_rule(), alone.distance)
        return KernelTimes(np.maximum(tiles, alone.seconds), sources, distance)

    def _decode(self, kernel: Attention, other: Attention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        """Work is divided by (request, KV head): equal numbers of those take equal time, corrected by the least
        times."""
        if key not in self._planes:
            self._planes[key] = self._plane(other, key)
        plane = self._planes[key]
        batch = a * (kernel.kv_heads / other.kv_heads)
        keys = np.minimum(b, kernel.window) if kernel.window and not other.window else b
        found = extend(plane, self.known.device, other, kernel, (a, b), (batch, keys))
        found = self._uneven(kernel, plane, a, found)
        if kernel.per_head:
            least = kernel.per_head.least(kernel, self.known.device, a, keys)
            found = replace(found, seconds=np.maximum(found.seconds, least))
        if not self.known.corrections.cold_cache:
            return found
        if key not in self._cold:
            self._cold[key] = cold_rate(
                plane, other.bytes_moved(*np.meshgrid(plane.rows, plane.columns, indexing="ij"))
            )
        floor = kernel.bytes_moved(a, b) / self._cold[key]
        return replace(found, seconds=np.maximum(found.seconds, floor))

    def _uneven(self, kernel: Attention, plane: Plane, a: Floats, found: KernelTimes) -> KernelTimes:
        """FlashAttention 2 hands blocks of (request, KV head) to multiprocessors in order: the last ends about half a
        block's time after the even share (list scheduling). Where blocks are fewer than multiprocessors, keys are
        split into as many parts."""
        slots = self.known.device.multiprocessors
        if not (
            self.known.corrections.uneven_contexts
            and slots
            and flash_attention_2(self.known.database.backend, self.known.device)
        ):
            return found
        shares = np.maximum(a * kernel.kv_heads, 1.0) / slots
        late = 0.5 * np.minimum(shares, 1.0 / shares)
        return replace(
            found, seconds=found.seconds + late * np.maximum(found.seconds - float(plane.seconds.min()), 0.0)
        )

    def _plane(self, other: Attention, key: Key) -> Plane:
        return plane_of(other, self.known.device, self._rows("decode", key), "decode")

    def _prefill(self, kernel: Attention, other: Attention, key: Key, a: Floats, b: Floats) -> KernelTimes:
        """Chunks without context are measured. With context they take the rate that a whole prompt of that length
        attains.

        Rows of the query tile that a short chunk leaves empty are multiplied all the same, and a chunk never takes less
        than without context.
        """
        if key not in self._curves:
            self._curves[key] = self._curve(other, key)
        curve = self._curves[key]
        fresh = self._scaled(other, curve, a, kernel.bound(self.known.device, a, np.zeros_like(a)))
        group = kernel.heads / kernel.kv_heads
        used = a * group / (np.ceil(a * group / QUERY_TILE) * QUERY_TILE)
        compute = kernel.flops(a, b) / self.known.device.peak_flops(kernel.rate) / used
        memory = kernel.bytes_moved(a, b) / self.known.device.memory_bandwidth
        seen = np.minimum(b, kernel.window) if kernel.window else b
        whole = np.maximum(a + seen, QUERY_TILE)  # shorter prompts measure the launch, not the rate
        chunked = self._scaled(other, curve, whole, np.maximum(compute, memory))
        seconds = np.where(b > 0, np.maximum(fresh.seconds, chunked.seconds), fresh.seconds)
        sources = np.where(b > 0, MODELLED, fresh.sources).astype(np.int8)
        return KernelTimes(seconds, sources, np.where(b > 0, chunked.by_rule(), fresh.distance))

    def _scaled(self, other: Attention, curve: Curve, length: Floats, least: Floats) -> KernelTimes:
        """A whole prompt's time as work of ``least`` seconds at best would have it: what exceeds the launch (the
        shortest prompt) grows with the least times, the launch does not."""
        theirs = other.bound(self.known.device, length, np.zeros_like(length))
        found = curve.times(length, theirs)
        first = curve.knots[:1]
        launch = other.bound(self.known.device, first, np.zeros(1)) / curve.efficiency[:1]
        launch = np.minimum(launch, found.seconds)
        return replace(found, seconds=launch + (found.seconds - launch) * least / theirs)

    def _curve(self, other: Attention, key: Key) -> Curve:
        rows = self._rows("prefill", key)
        rows = rows.take(np.argsort(rows["isl"], kind="stable"))
        length, least = rows["isl"].astype(float), other.least(self.known.device)
        return EnsembleCurve(length, least(length) / (rows["latency"] * 1e-3), least, (beyond_launch,))

    def _rows(self, phase: str, key: Key) -> Columns:
        columns = self._table(phase)
        assert columns is not None
        rows = columns.where(**dict(zip(KEYS, key[:4], strict=True)), kv_cache_dtype=key[4])
        return named_kernel(self, rows, phase, key[5], "attention heads={}/{}×{}".format(*key))

    def _table(self, phase: str) -> Columns | None:
        if phase not in self._columns:
            columns = self.known.database.read("attention", TABLES[phase], ("kv_cache_dtype", "kernel_source"))
            if columns is not None and "window_size" not in columns.numbers:
                columns = Columns(
                    {**columns.numbers, "window_size": np.zeros(len(columns), dtype=np.int64)}, columns.texts
                )
            self._columns[phase] = columns
        return self._columns[phase]

    def _alike(self, kernel: Attention) -> list[tuple[Key, float]]:
        """The measured shapes that are most like the kernel, with weights: those of the same cache dtype, head size and
        window, in this order, or else of the nearest; of them the shape itself, or NEIGHBOURS, which count by their
        octaves to minus the second power."""
        columns = self._table(kernel.phase)
        if columns is None:
            return []
        codes, names = columns.texts["kv_cache_dtype"]
        if kernel.phase not in self._shapes:
            self._shapes[kernel.phase] = _different([*(columns[name] for name in KEYS), codes])
        shapes = self._shapes[kernel.phase]
        stored = cache_format(kernel.kv_dtype)
        _, _, head_dim, window, code = shapes.T.astype(float)
        penalty = (
            1e6 * (np.array(names)[code.astype(int)] != stored)
            + 1e4 * np.abs(np.log2(head_dim / kernel.head_dim))
            + 1e3 * (window != kernel.window)
            + 1e3 * ((window != kernel.window) & (window != 0))
        )
        shapes = shapes[penalty == penalty.min()]
        octaves = _octaves(kernel, shapes)
        best = np.argsort(octaves, kind="stable")[: 1 if octaves.min() == 0 else NEIGHBOURS]
        weights = (octaves[best] + LEAST_DISTANCE) ** -2
        return [
            ((heads, kv_heads, head_dim, window, names[code], kernel.backend), weight)
            for (heads, kv_heads, head_dim, window, code), weight in zip(
                shapes[best].tolist(), (weights / weights.sum()).tolist(), strict=True
            )
        ]


def _octaves(kernel: Attention, shapes: NDArray[np.int64]) -> Floats:
    """How far shapes are from the kernel's. Decodes divide by (request, KV head), so that a request with more KV heads
    is like more requests: what tells shapes apart is the number of query heads that share one."""
    heads = np.abs(np.log2(shapes[:, 0] / kernel.heads))
    kv_heads = np.abs(np.log2(shapes[:, 1] / kernel.kv_heads))
    if kernel.phase != "decode":
        return np.asarray(heads + kv_heads)
    group = np.abs(np.log2(shapes[:, 0] / shapes[:, 1] * (kernel.kv_heads / kernel.heads)))
    return np.asarray(group + OTHER_COUNT * kv_heads)


def _different(columns: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The different rows of columns of whole numbers ≥ 0, sorted: a number for each row sorts faster than the row."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        number = number * (int(column.max(initial=0)) + 1) + column
    _, first = np.unique(number, return_index=True)
    return np.stack([column[first] for column in columns], axis=1)


def flash_attention_2(backend: str, device: Device) -> bool:
    """vLLM before Hopper and on desktop Blackwell; Hopper has FlashAttention 3, which splits and packs mixed batches
    too, data-centre Blackwell kernels of FlashInfer that serve decodes and chunks apart."""
    return backend == "vllm" and (80 <= device.sm_version < 90 or device.sm_version >= 120)
