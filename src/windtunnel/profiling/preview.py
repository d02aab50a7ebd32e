"""Preview: what a profile will measure, operator by operator, and about how long that takes, before anything is."""

from collections.abc import Iterator

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.profile.shapes import HEAD, SKEWED, Shape
from windtunnel.profiling.clock import LEAST
from windtunnel.profiling.measure import CHECKED
from windtunnel.profiling.operators import bytes_of_experts, cold_copies, cold_layers
from windtunnel.profiling.sizes import Extent, decode_sizes, octaves, prefill_sizes

WARM_UP = 3
"""Calls of a point before its readings: two that warm up, one that says how many fit a reading."""

FILLING = 0.02
"""Tensors are filled with random numbers at about this share of the memory bandwidth: on a CPU most of all time."""

BESIDE = 5e-3
"""Seconds of a point beside its calls: allocations, the line in the journal."""


@dataclass(frozen=True)
class Asked:
    """What will be measured of one operator's shards."""

    operator: str
    shards: int
    describe: str
    """What a shard computes."""
    points: int
    """At most: sizes are added only where a straight line is off."""
    largest: tuple[int, int]
    """(tokens or requests, keys or context) of the largest point."""
    seconds: float | None
    """At most, about; None without a device."""


def preview(shape: Shape, shards: tuple[int, ...], extent: Extent, device: Device | None) -> list[Asked]:
    """Every operator of every degree, in the order in which they are measured.

    Args:
        shape: of the model.
        shards: degrees of tensor parallelism.
        extent: at which points.
        device: whose peak rates say how long a point takes: least time of the kernel, readings of at least LEAST.
    """
    return [
        Asked(
            name,
            tp,
            shape.kernel(name, tp).describe(),
            len(points),
            max(points, key=lambda point: (point[0] * max(point[1], 1), point[0])),
            None if device is None else _seconds(shape, name, tp, points, extent, device),
        )
        for tp, name, points in _points(shape, shards, extent)
    ]


def _points(shape: Shape, shards: tuple[int, ...], extent: Extent) -> Iterator[tuple[int, str, list[tuple[int, int]]]]:
    messages = [(size, 0) for size in octaves(extent.max_num_batched_tokens)]
    for tp in shards:
        for name in (*shape.token_operators, *shape.cache_operators, *HEAD):
            last = extent.max_num_seqs if name in HEAD else extent.max_num_batched_tokens
            count = min(extent.sizes, last)
            yield tp, name, [(round(last ** (i / (count - 1))), 0) for i in range(count)]
        decodes = decode_sizes(extent.max_num_seqs, extent.max_model_len)
        yield tp, SKEWED, [point for point in decodes if point[0] > 1]
        yield tp, "attn_decode", decodes
        yield tp, "attn_prefill", prefill_sizes(extent.max_num_batched_tokens, extent.max_model_len)
        if tp > 1:
            yield tp, "all_reduce", messages
    if shards[-1] > 1:
        yield 2, "send_recv", messages


def _seconds(shape: Shape, name: str, tp: int, points: list[tuple[int, int]], extent: Extent, device: Device) -> float:
    a, b = np.array(points, dtype=float).T
    kernel = shape.kernel(name, tp)
    once = kernel.bound(device, a, b)
    calls = WARM_UP + extent.repeats * (LEAST / np.maximum(once, 1e-9)).clip(1.0, 200.0)
    again = min(CHECKED, len(points))
    filled = kernel.bytes_moved(a, b).sum() / 2.0
    if isinstance(kernel, Gemm):  # copies that take turns, made anew for each point that is measured again
        filled += (1 + again) * cold_copies(kernel) * 2.0 * kernel.n * kernel.k
    elif name == "experts":
        filled += (1 + again) * cold_layers(shape, tp) * bytes_of_experts(shape, tp)
    elif name == "emb":
        filled += (len(points) + again) * 2.0 * shape.vocab_size * shape.n_embd
    spent = (calls * once).sum() + BESIDE * len(points)
    return float(spent * (1.0 + again / len(points)) + filled / (FILLING * device.memory_bandwidth))
