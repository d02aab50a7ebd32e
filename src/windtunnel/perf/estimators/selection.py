"""Selection: how wrong estimators are on points that they have not seen, and which settings are the best."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Learner, Points, ape

FOLDS = 5


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors on held-out points."""

    median: float
    p90: float
    worst: float
    count: int


def errors(apes: Floats) -> Errors:
    """What they come to."""
    median, p90, worst = (float(np.quantile(apes, q)) for q in (0.5, 0.9, 1.0))
    return Errors(median, p90, worst, len(apes))


def folds(points: Points, count: int = FOLDS) -> NDArray[np.int64]:
    """The fold of each point: drawn once for all with a fixed seed, the ends of both axes always in training (-1)."""
    drawn = np.random.default_rng(0).permutation(len(points)) % count
    ends = (points.a == points.a.min()) | (points.a == points.a.max())
    if points.phase != "tokens":
        ends = (points.a == points.a.max()) & (points.b == points.b.max())
    return np.where(ends, -1, drawn)


def held_out(learner: Learner, points: Points, count: int = FOLDS) -> Floats:
    """Relative errors of every point that is in a fold, predicted from the points of the other folds."""
    fold = folds(points, count)
    apes = []
    for i in range(count):
        test = fold == i
        if test.any():
            fitted = learner.fit(points.where(~test))
            apes.append(ape(fitted.times(points.where(test)), points.seconds[test]))
    return np.concatenate(apes)


def best(learners: Sequence[Learner], points: Points, count: int = FOLDS) -> tuple[Learner, Errors]:
    """The settings with the least mean error on held-out points, the first of equals."""
    found = [(learner, held_out(learner, points, count)) for learner in learners]
    learner, apes = min(found, key=lambda one: float(one[1].mean()))
    return learner, errors(apes)
