"""KernelTimes: seconds, and for each of them where it comes from, how far from the data, and how wrong it may be."""

from collections.abc import Sequence
from dataclasses import field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats

Sources = NDArray[np.int8]

MEASURED, INTERPOLATED, MODELLED = 0, 1, 2
SOURCES = ("measured", "interpolated", "modelled")
"""measured: this very shape is in the kernel database. interpolated: between points of the database, inside their hull;
or a point of another engine's table where this engine's own is not to be believed.
modelled: roofline, derived from other shapes, or beyond the data."""

OTHER_SHAPE = 1.0
"""Octaves that a kernel counts as away from the data when it takes the efficiency of another shape or format."""

NEVER_MEASURED = np.nan
"""Distance of what no table of any device holds: kernels that only move memory, chunks with context, host work."""


@dataclass(frozen=True, eq=False)
class KernelTimes:
    """Seconds of one kernel at each asked point, and the source (index into SOURCES) of each."""

    seconds: Floats
    sources: Sources
    distance: Floats = field(default_factory=lambda: np.zeros(0))
    """Octaves to the nearest measured point, along the axes that are interpolated: 0 at a point, infinite without any
    data of the device, NEVER_MEASURED where the kernel is modelled by its rule on every device. Not given: 0 where
    measured or interpolated, NEVER_MEASURED where modelled."""
    error: Floats = field(default_factory=lambda: np.zeros(0))
    """Relative error, as the standard deviation of the log of the time; zero until a predictor has put it there."""

    def __post_init__(self) -> None:
        if self.distance.shape != self.seconds.shape:
            distance = np.where(self.sources == MODELLED, NEVER_MEASURED, 0.0)
            object.__setattr__(self, "distance", np.broadcast_to(distance, self.seconds.shape).astype(float))
        if self.error.shape != self.seconds.shape:
            object.__setattr__(self, "error", np.zeros(self.seconds.shape))

    def modelled(self) -> "KernelTimes":
        """These seconds as those of another shape or format: all of them modelled."""
        distance = np.where(np.isnan(self.distance), self.distance, self.distance + OTHER_SHAPE)
        return replace(self, sources=np.full_like(self.sources, MODELLED), distance=distance)

    def at(self, these: NDArray[np.bool_] | NDArray[np.int64]) -> "KernelTimes":
        """The points of a mask, or at these places."""
        return KernelTimes(*(getattr(self, entry.name)[these] for entry in fields(KernelTimes)))

    def part(self, source: int) -> Floats:
        """The seconds that come from one source, zero elsewhere."""
        return np.where(self.sources == source, self.seconds, 0.0)

    def by_rule(self) -> Floats:
        """Distances of what is derived from these times by rule: NEVER_MEASURED, but what is beyond the data stays
        so."""
        return np.where(self.extrapolated, self.distance, NEVER_MEASURED)

    @property
    def extrapolated(self) -> NDArray[np.bool_]:
        """Beyond the data, though there is data of this kind: what ``--strict`` refuses."""
        return np.asarray((self.sources == MODELLED) & (self.distance > 0))


def either(first: NDArray[np.bool_], one: KernelTimes, two: KernelTimes) -> KernelTimes:
    """One from two that hold the points of a mask and the others, in order."""

    def joined(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        both = np.empty(first.shape, dtype=a.dtype)
        both[first], both[~first] = a, b
        return both

    return KernelTimes(*(joined(getattr(one, entry.name), getattr(two, entry.name)) for entry in fields(KernelTimes)))


def blended(parts: Sequence[tuple[KernelTimes, float]], away: float) -> KernelTimes:
    """The times between measured shapes, from theirs with weights that sum to 1: a power of what tells them apart, and
    ``away`` octaves further from the data than the nearest of them."""
    nearest, weight = max(parts, key=lambda part: part[1])
    if weight == 1.0:
        return nearest
    seconds = np.exp(sum(weight * np.log(found.seconds) for found, weight in parts))
    sources = np.maximum(nearest.sources, INTERPOLATED).astype(np.int8)
    return KernelTimes(np.asarray(seconds), sources, np.hypot(nearest.distance, away))


def from_source(seconds: Floats, source: int) -> KernelTimes:
    """Seconds that all come from one source."""
    return KernelTimes(seconds, np.full(seconds.shape, source, dtype=np.int8))
