"""Answers: seconds, and for each of them where it comes from."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats

Sources = NDArray[np.int8]

MEASURED, INTERPOLATED, MODELLED = 0, 1, 2
SOURCES = ("measured", "interpolated", "modelled")
"""measured: this very shape is in the kernel database. interpolated: between points of the database, inside their hull;
or a point of another engine's table where this engine's own is not to be believed.
modelled: roofline, derived from other shapes, or beyond the data."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Seconds of one kernel at each asked point, and the source (index into SOURCES) of each."""

    seconds: Floats
    sources: Sources

    def modelled(self) -> "Answer":
        """The same seconds, all of them called modelled."""
        return Answer(self.seconds, np.full_like(self.sources, MODELLED))

    def part(self, source: int) -> Floats:
        """The seconds that come from one source, zero elsewhere."""
        return np.where(self.sources == source, self.seconds, 0.0)


def answer(seconds: Floats, source: int | Sources) -> Answer:
    """An answer whose source is one for all points, or an array."""
    sources = np.broadcast_to(np.asarray(source, dtype=np.int8), seconds.shape).copy()
    return Answer(seconds, sources)
