"""Curves: times between measured points of one axis, with the source of every value."""

from collections.abc import Callable

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes, Sources, blended


@dataclass(frozen=True, eq=False)
class Curve:
    """Efficiency (least possible time / measured time) over one axis.

    Between two points it is interpolated in log-log; at a point the measured time comes back exactly; beyond the ends
    the efficiency of the last point holds, so that extrapolation follows the roofline and not the last slope.
    """

    knots: Floats
    """[P] increasing, > 0."""
    efficiency: Floats
    """[P] > 0."""

    def times(self, x: Floats, bound: Floats) -> KernelTimes:
        """Seconds at ``x``, where the least possible times are ``bound``."""
        return KernelTimes(bound / self.at(x), self.sources(x), octaves(self.knots, x))

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        return np.exp(np.interp(np.log(x), np.log(self.knots), np.log(self.efficiency)))

    def sources(self, x: Floats) -> Sources:
        """measured on a knot, interpolated inside, modelled beyond the ends."""
        i = np.clip(np.searchsorted(self.knots, x), 0, len(self.knots) - 1)
        inside = (x >= self.knots[0]) & (x <= self.knots[-1])
        return np.where(self.knots[i] == x, MEASURED, np.where(inside, INTERPOLATED, MODELLED)).astype(np.int8)


def held_below(curve: Curve, x: Floats, least: Callable[[Floats], Floats]) -> KernelTimes:
    """Seconds at ``x``, below the first point those of the first point (modelled): what is small is all latency."""
    at = np.maximum(x, curve.knots[0])
    found, below = curve.times(at, least(at)), x < curve.knots[0]
    sources = np.where(below, MODELLED, found.sources).astype(np.int8)
    return KernelTimes(found.seconds, sources, np.where(below, octaves(curve.knots, x), found.distance))


def octaves(knots: Floats, x: Floats) -> Floats:
    """Octaves (log2) from x to the nearest knot; nothing counts as a half."""
    x, knots = np.maximum(x, 0.5), np.maximum(knots, 0.5)
    i = np.clip(np.searchsorted(knots, x), 1, max(len(knots) - 1, 1))
    near = [np.abs(np.log2(x / knots[np.minimum(j, len(knots) - 1)])) for j in (i - 1, i)]
    return np.asarray(np.minimum(*near))


def blend(axis: Floats, x: float, *, straight: bool = False) -> list[tuple[int, float]]:
    """The two neighbours of x on a log axis, or a ``straight`` one, with their weights; one with weight 1 on a knot or
    beyond an end."""
    i = int(np.searchsorted(axis, x))
    if i == len(axis):
        return [(i - 1, 1.0)]
    if axis[i] == x or i == 0:
        return [(i, 1.0)]
    at, low, high = (x, axis[i - 1], axis[i]) if straight else np.log((x, axis[i - 1], axis[i]))
    u = float((at - low) / (high - low))
    return [(i - 1, 1.0 - u), (i, u)]


def between(known: Floats, wanted: int, of: Callable[[int, int], KernelTimes]) -> KernelTimes:
    """A kernel with ``wanted`` of what was measured in ``known`` numbers (heads): between two of them a power of the
    number. ``of(number, priced)`` has the time with ``priced`` as the module with ``number`` has it: equal between two,
    and on or beyond the ends the nearest number for the wanted one."""
    near = [(int(known[i]), weight) for i, weight in blend(known.astype(float), wanted)]
    parts = [(of(number, wanted if weight == 1.0 else number), weight) for number, weight in near]
    return blended(parts, float(octaves(known, np.array([float(wanted)]))[0]))
