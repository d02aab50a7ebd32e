"""Selection: how wrong estimators are on points that they have not seen, and which settings are the best."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Learner, Points

FOLDS = 5


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors on held-out points."""

    median: float
    p90: float
    worst: float
    count: int
    impossible: int
    """Points whose predicted time is zero or less."""


def errors(relative: Floats) -> Errors:
    """What relative errors, as of ``held_out``, come to."""
    median, p90, worst = (float(np.quantile(np.abs(relative), q)) for q in (0.5, 0.9, 1.0))
    return Errors(median, p90, worst, len(relative), int(np.count_nonzero(relative <= -1.0)))


def folds(points: Points, count: int = FOLDS) -> NDArray[np.int64]:
    """The fold of each point: drawn once for all with a fixed seed, the ends of both axes always in training (-1)."""
    drawn = np.random.default_rng(0).permutation(len(points)) % count
    ends = (points.a == points.a.min()) | (points.a == points.a.max())
    if points.phase != "tokens":
        ends = (points.a == points.a.max()) & (points.b == points.b.max())
    return np.where(ends, -1, drawn)


def held_out(learner: Learner, points: Points, count: int = FOLDS) -> Floats:
    """Relative errors, predicted ÷ measured − 1, of every point that is in a fold, from the points of the others.

    Raises InputError where all are the ends of their axes.
    """
    fold = folds(points, count)
    found = []
    for i in range(count):
        test = fold == i
        if test.any():
            fitted = learner.fit(points.where(~test))
            found.append(fitted.times(points.where(test)) / points.seconds[test] - 1.0)
    if not found:
        raise InputError(f"{len(points)} points: too few to hold any out; measure more sizes")
    return np.concatenate(found)


def best(learners: Sequence[Learner], points: Points, count: int = FOLDS) -> tuple[Learner, Errors]:
    """The settings with the least mean error on held-out points, the first of equals."""
    found = [(learner, held_out(learner, points, count)) for learner in learners]
    learner, relative = min(found, key=lambda one: float(np.abs(one[1]).mean()))
    return learner, errors(relative)
