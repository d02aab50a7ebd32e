"""Placement: DistServe's two algorithms, which lay out separate prefill and decode pools for the most goodput per GPU.

Yinmin Zhong et al., DistServe, OSDI 2024 (arXiv 2401.09670), algorithms 1 and 2. They ask an oracle for the goodput of
a layout: a simulation, a measurement, or a formula. The first takes it that KV reaches any GPU fast, so that each side
is chosen alone; the second keeps transfers within a node, so that a layout is a stage's GPUs of both sides.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError


@dataclass(frozen=True, order=True)
class Layout:
    """How one instance of a model is split over GPUs."""

    inter_op: int
    """Stages of its pipeline."""
    intra_op: int
    """GPUs that share each stage's layers."""

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.inter_op * self.intra_op


Oracle = Callable[[Layout], float]
"""A layout → the highest rate (requests/s) at which one instance of one side keeps its limits; 0 if none, or if the
model does not fit."""
PairOracle = Callable[[Layout, Layout], float]
"""Layouts of prefill and decode → the highest rate at which a pair of instances keeps the limits together."""


@dataclass(frozen=True)
class Placement:
    """So many instances of each side."""

    prefill: Layout
    decode: Layout
    prefills: int
    decodes: int
    prefill_rate: float
    """Requests per second of one prefill instance; of a pair, where both were asked together."""
    decode_rate: float

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.prefills * self.prefill.gpus + self.decodes * self.decode.gpus

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second that all instances serve at most, for each GPU."""
        return min(self.prefills * self.prefill_rate, self.decodes * self.decode_rate) / self.gpus


def high_affinity(prefill: Oracle, decode: Oracle, *, rate: float, nodes: int, gpus_per_node: int) -> Placement | None:
    """DistServe's algorithm 1: each side's layout with the most goodput per GPU, as often as the rate needs it.

    Args:
        prefill: asked for each layout, as ``decode``.
        decode: the same of the other side.
        rate: requests per second to serve.
        nodes: most nodes that an instance may span.
        gpus_per_node: GPUs within a node, over which a stage may be split.

    Returns:
        None where no layout of a side serves anything. Of equals the first in the order of the paper's loops.
    """
    _require(rate, nodes, gpus_per_node)
    layouts = list(_layouts(nodes, gpus_per_node))
    sides = [_best(oracle, layouts) for oracle in (prefill, decode)]
    if None in sides:
        return None
    (first, first_rate), (second, second_rate) = (side for side in sides if side is not None)
    counts = math.ceil(rate / first_rate), math.ceil(rate / second_rate)
    return Placement(first, second, *counts, first_rate, second_rate)


def low_affinity(pair: PairOracle, *, rate: float, nodes: int, gpus_per_node: int) -> Placement | None:
    """DistServe's algorithm 2: both sides have as many stages, and each stage's GPUs of both stand in one node.

    Arguments and result as of ``high_affinity``; instances come in pairs.
    """
    _require(rate, nodes, gpus_per_node)
    best: tuple[float, Layout, Layout, float] | None = None
    for inter_op in range(1, nodes + 1):
        for first in range(1, gpus_per_node):
            for second in range(1, gpus_per_node - first + 1):
                layouts = Layout(inter_op, first), Layout(inter_op, second)
                goodput = pair(*layouts)
                per_gpu = goodput / (layouts[0].gpus + layouts[1].gpus)
                if per_gpu > (best[0] if best else 0.0):
                    best = per_gpu, *layouts, goodput
    if best is None:
        return None
    _, prefill, decode, goodput = best
    pairs = math.ceil(rate / goodput)
    return Placement(prefill, decode, pairs, pairs, goodput, goodput)


def goodput(holds: Callable[[float], bool], most: float, tolerance: float = 0.01) -> float:
    """The highest rate that holds, by bisection of 0 to ``most``, to this share of it; 0 where none is found.

    What holds at a rate is taken to hold at lower ones.
    """
    low, high = 0.0, most
    while high - low > tolerance * high and high > 1e-6 * most:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _layouts(nodes: int, gpus_per_node: int) -> Iterator[Layout]:
    """In the order of algorithm 1: every split within a node, with as many stages as the nodes have room for."""
    for intra_op in range(1, gpus_per_node + 1):
        for inter_op in range(1, nodes * gpus_per_node // intra_op + 1):
            yield Layout(inter_op, intra_op)


def _best(oracle: Oracle, layouts: list[Layout]) -> tuple[Layout, float] | None:
    """The first of the layouts with the most goodput per GPU, and its goodput; None if all are 0."""
    asked = cache(oracle)
    best = max(layouts, key=lambda layout: asked(layout) / layout.gpus)
    return (best, asked(best)) if asked(best) > 0 else None


def _require(rate: float, nodes: int, gpus_per_node: int) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(f"rate={rate:g}: must be a number > 0")
    for name, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node)):
        if value < 1:
            raise InputError(f"{name}={value}: must be ≥ 1")
