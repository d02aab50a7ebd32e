"""Held-out points of the kernel database: which rows are left out, and what is known of the rest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import Attention, Experts, Gemm, Kernel, LatentAttention

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_SHAPES = 40
"""Shapes of a family that are asked, evenly spread."""


class Thinned(Database):
    """A database without the rows that ``dropped`` names, by table."""

    dropped: Callable[[str, Columns], Mask]

    def read(self, family: str, table: str, texts: tuple[str, ...], backend: str | None = None) -> Columns | None:
        """A table less its dropped rows."""
        columns = super().read(family, table, texts, backend)
        return None if columns is None else columns.take(~self.dropped(table, columns))


@dataclass(frozen=True)
class Case:
    """One curve: a kernel at held-out points, and at the kept ones of the same curve or of the nearest kept shape."""

    kernel: Kernel
    a: Floats
    b: Floats
    measured: Floats
    kept: Kernel
    kept_a: Floats
    kept_b: Floats
    kept_seconds: Floats


def thinned(database: Database, dropped: Callable[[str, Columns], Mask]) -> Thinned:
    """The database without some rows."""
    made = Thinned(database.systems, database.system, database.backend, database.version, database.rule)
    made.dropped = dropped
    return made


def every_third(values: NDArray[np.int64]) -> Mask:
    """Rows at every third of the different values; the largest is kept."""
    points = np.unique(values)
    return np.isin(values, points[2:-1:3])


def cases_of_rows(database: Database, dtype: str) -> Iterator[Case]:
    """Matrix products at every third row count."""
    columns = database.read("gemm", "gemm_perf", ("gemm_dtype", "kernel_source"))
    part = _lane(columns, gemm_dtype=dtype)
    if part is None:
        return
    held = every_third(part["m"])
    for n, k in _some(np.unique(np.stack([part["n"], part["k"]], axis=1), axis=0)):
        here = (part["n"] == n) & (part["k"] == k)
        kernel = Gemm(int(n), int(k), dtype)
        yield from _split(kernel, kernel, part, part["m"], here & held, here & ~held)


def cases_of_shapes(database: Database, dtype: str) -> Iterator[Case]:
    """Matrix products of every second (n, k) in a chequered pattern."""
    columns = database.read("gemm", "gemm_perf", ("gemm_dtype", "kernel_source"))
    part = _lane(columns, gemm_dtype=dtype)
    if part is None:
        return
    held = every_second_shape(part)
    shapes = np.unique(np.stack([part["n"], part["k"]], axis=1), axis=0)
    out = np.array([_is_out(n, k, part) for n, k in shapes])
    for n, k in _some(shapes[out]):
        kept = shapes[~out]
        distance = np.abs(np.log(kept / np.array([n, k]))).sum(axis=1)
        near = kept[int(np.argmin(distance))]
        here = (part["n"] == n) & (part["k"] == k) & held
        there = (part["n"] == near[0]) & (part["k"] == near[1]) & ~held
        first, second = Gemm(int(n), int(k), dtype), Gemm(int(near[0]), int(near[1]), dtype)
        yield from _split(first, second, part, part["m"], here, there)


def every_second_shape(columns: Columns) -> Mask:
    """Rows of a chequered pattern over the inner (n, k)."""
    n, k = (np.searchsorted(np.unique(columns[name]), columns[name]) for name in ("n", "k"))
    inner = (n > 0) & (n < n.max()) & (k > 0) & (k < k.max())
    return np.asarray(inner & ((n + k) % 2 == 0))


def _is_out(n: int, k: int, part: Columns) -> bool:
    i = int(np.searchsorted(np.unique(part["n"]), n))
    j = int(np.searchsorted(np.unique(part["k"]), k))
    last = (len(np.unique(part["n"])) - 1, len(np.unique(part["k"])) - 1)
    return 0 < i < last[0] and 0 < j < last[1] and (i + j) % 2 == 0


def expert_parts(database: Database, dtype: str) -> tuple[Columns, NDArray[np.int64]] | None:
    """Rows of balanced-free routing with their shapes."""
    columns = database.read("moe", "moe_perf", ("moe_dtype", "distribution", "kernel_source"))
    part = _lane(columns, moe_dtype=dtype, distribution="power_law_1.2")
    if part is None:
        return None
    part = part.take(part["num_experts"] <= 128)
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    return (part, np.stack([part[name] for name in names], axis=1)) if len(part) else None


def cases_of_experts(database: Database, dtype: str, whole_shapes: bool) -> Iterator[Case]:
    """Experts at every third token count, or of every fifth shape."""
    found = expert_parts(database, dtype)
    if found is None:
        return
    part, sizes = found
    shapes = np.unique(sizes, axis=0)
    held = dropped_experts(part, whole_shapes)
    for shape in _some(shapes[::5] if whole_shapes else shapes):
        here = (sizes == shape).all(axis=1)
        kernel = _experts(shape, dtype)
        if not whole_shapes:
            yield from _split(kernel, kernel, part, part["num_tokens"], here & held, here & ~held)
            continue
        kept = np.array([one for i, one in enumerate(shapes) if i % 5])
        near = kept[int(np.argmin(np.abs(np.log2(kept / shape)).sum(axis=1)))]
        there = (sizes == near).all(axis=1)
        yield from _split(kernel, _experts(near, dtype), part, part["num_tokens"], here, there)


def dropped_experts(columns: Columns, whole_shapes: bool) -> Mask:
    """Rows of the held-out token counts or shapes."""
    if not whole_shapes:
        return every_third(columns["num_tokens"])
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    sizes = np.stack([columns[name] for name in names], axis=1)
    codes, texts = columns.texts["distribution"]
    mine = (codes == texts.index("power_law_1.2")) & (columns["num_experts"] <= 128)
    out = np.zeros(len(columns), dtype=bool)
    for lane in np.unique(columns.texts["moe_dtype"][0]):
        here = mine & (columns.texts["moe_dtype"][0] == lane)
        _, which = np.unique(sizes[here], axis=0, return_inverse=True)
        out[here] = which.ravel() % 5 == 0
    return out


def _experts(shape: NDArray[np.int64], dtype: str) -> Experts:
    hidden, inter, top_k, number, tp, ep = map(int, shape)
    return Experts(hidden, inter, top_k, number, tp, ep, dtype=dtype)


def cases_of_attention(database: Database, phase: str) -> Iterator[Case]:
    """Attention at every third number of requests (decode) or chunk length (prefill)."""
    table = "generation_attention_perf" if phase == "decode" else "context_attention_perf"
    part = _lane(database.read("attention", table, ("kv_cache_dtype", "kernel_source")), kv_cache_dtype="bfloat16")
    if part is None:
        return
    keep = (part["window_size"] == 0) if "window_size" in part.numbers else np.ones(len(part), dtype=bool)
    part = part.take(keep)
    if phase == "prefill":
        part = part.take(part["batch_size"] == 1)
    axis = "batch_size" if phase == "decode" else "isl"
    held = every_third(part[axis])
    shapes = np.stack([part[name] for name in ("num_heads", "num_key_value_heads", "head_dim")], axis=1)
    for shape in _some(np.unique(shapes, axis=0)):
        kernel = Attention(phase, int(shape[0]), int(shape[1]), int(shape[2]), int(shape[2]))
        here = (shapes == shape).all(axis=1)
        keys = (part["isl"] + part["step"]) if phase == "decode" else 0 * part["isl"]
        for key in np.unique(keys[here]):
            there = here & (keys == key)
            yield from _split(kernel, kernel, part, part[axis], there & held, there & ~held, float(key))


def cases_of_latent(database: Database) -> Iterator[Case]:
    """Latent decode attention of every second number of heads."""
    part = _lane(
        database.read("mla", "generation_mla_perf", ("kv_cache_dtype", "kernel_source")), kv_cache_dtype="bfloat16"
    )
    if part is None:
        return
    keys = part["isl"] + part["step"]
    for heads in (8, 32):
        for key in np.unique(keys):
            here, there = ((part["num_heads"] == h) & (keys == key) for h in (heads, heads * 2))
            first, second = (LatentAttention("decode", h, 512, 128, 64, 128) for h in (heads, heads * 2))
            yield from _split(first, second, part, part["batch_size"], here, there, float(key))


def _lane(columns: Columns | None, **equal: str) -> Columns | None:
    part = None if columns is None else columns.where(**equal)
    if part is None or not len(part):
        return None
    names = [name for name in part.numbers if name not in ("latency", "power", "power_limit")]
    return part.take(one_per_key([part[name] for name in names], part["latency"], part.texts["kernel_source"][0]))


def _some(shapes: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most MOST_SHAPES, evenly spread."""
    return shapes[:: max(1, -(-len(shapes) // MOST_SHAPES))]


def _split(
    kernel: Kernel, kept: Kernel, part: Columns, axis: NDArray[np.int64], out: Mask, left: Mask, b: float = 0.0
) -> Iterator[Case]:
    if out.sum() and left.sum() > 1:
        order = np.flatnonzero(left)[np.argsort(axis[left])]
        a, kept_a = axis[out].astype(float), axis[order].astype(float)
        seconds = part["latency"] * 1e-3
        yield Case(kernel, a, np.full_like(a, b), seconds[out], kept, kept_a, np.full_like(kept_a, b), seconds[order])
