"""Points: where an operator is measured or asked, and how wrong a prediction of its times is."""

from dataclasses import field, replace
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Kernel

PHASES = ("tokens", "decode", "prefill")


@dataclass(frozen=True, eq=False)
class Points:
    """Points (a, b) of one operator, as its kernel is asked: (tokens, 0), (decodes, keys) or (chunk, context)."""

    phase: str
    """Of PHASES."""
    a: Floats
    b: Floats
    flops: Floats
    """Floating-point operations at each point."""
    moved: Floats
    """Bytes at each point."""
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    """Measured; empty where the points are only asked."""

    def __len__(self) -> int:
        return len(self.a)

    def where(self, these: NDArray[np.bool_] | NDArray[np.int64]) -> Self:
        """The points of a mask or an index."""
        names = ("a", "b", "flops", "moved", *(("seconds",) if len(self.seconds) else ()))
        return replace(self, **{name: getattr(self, name)[these] for name in names})

    def distinct(self) -> Self:
        """Every point once, in order, with the median of what was measured there."""
        places, inverse = np.unique(np.stack([self.a, self.b]), axis=1, return_inverse=True)
        inverse = inverse.ravel()
        first = np.zeros(places.shape[1], dtype=np.int64)
        first[inverse[::-1]] = np.arange(len(self))[::-1]
        order = np.lexsort((self.seconds, inverse))
        starts = np.searchsorted(inverse[order], np.arange(len(first)))
        counts = np.diff(np.append(starts, len(order)))
        low, high = self.seconds[order[starts + (counts - 1) // 2]], self.seconds[order[starts + counts // 2]]
        return replace(self.where(first), seconds=0.5 * (low + high))


def points_of(kernel: Kernel, phase: str, a: Floats, b: Floats, seconds: Floats | None = None) -> Points:
    """Points with the work of a kernel."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    measured = np.zeros(0) if seconds is None else np.asarray(seconds, dtype=float)
    return Points(phase, a, b, kernel.flops(a, b) + 0.0 * a, kernel.bytes_moved(a, b) + 0.0 * a, measured)


class Fitted(Protocol):
    """A trained estimator: a dataclass of plain arrays, and a rule to read them."""

    def times(self, points: Points) -> Floats:
        """Seconds at each point; zero or less where the fit fails, which is for those who ask to see and say."""


class Learner(Protocol):
    """Settings of an estimator: a frozen dataclass of numbers and words."""

    def fit(self, points: Points) -> Fitted:
        """Train on measured points. Raises InputError where there are too few, or a library is missing."""


def ape(predicted: Floats, measured: Floats) -> Floats:
    """Absolute errors as shares of what was measured."""
    return np.asarray(np.abs(predicted / measured - 1.0))
