"""Trees: random forests and gradient boosting, trained by scikit-learn and read as plain arrays."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Points

LEAF = -1


@dataclass(frozen=True)
class Forest:
    """A random forest of the log of the times (Vidur's default is one of the times)."""

    trees: int = 64
    max_depth: int = 16
    min_samples_split: int = 2

    def fit(self, points: Points) -> "FittedTrees":
        """Train with a fixed seed: equal points give equal trees."""
        from_sklearn = _ensembles()
        model = from_sklearn.RandomForestRegressor(
            n_estimators=self.trees,
            max_depth=self.max_depth,
            min_samples_split=self.min_samples_split,
            random_state=0,
            n_jobs=1,
        ).fit(features(points), np.log(points.seconds))
        return _flat([tree.tree_ for tree in model.estimators_], 1.0 / self.trees, 0.0)


@dataclass(frozen=True)
class Boosting:
    """Gradient boosting of the log of the times."""

    trees: int = 200
    max_depth: int = 4
    learning_rate: float = 0.1

    def fit(self, points: Points) -> "FittedTrees":
        """Train with a fixed seed."""
        from_sklearn = _ensembles()
        model = from_sklearn.GradientBoostingRegressor(
            n_estimators=self.trees, max_depth=self.max_depth, learning_rate=self.learning_rate, random_state=0
        ).fit(features(points), np.log(points.seconds))
        base = float(np.mean(np.log(points.seconds)))
        return _flat([tree.tree_ for tree in model.estimators_[:, 0]], self.learning_rate, base)


def _ensembles() -> Any:
    try:
        from sklearn import ensemble
    except ImportError as error:
        raise InputError("forest and boosting need scikit-learn: pip install 'windtunnel[fit]'") from error
    return ensemble


def features(points: Points) -> NDArray[np.float32]:
    """[n, 2] of what the trees divide by; 32 bits, as scikit-learn compares them."""
    return np.stack([points.a, points.b], axis=1).astype(np.float32)


def _flat(trees: Iterable[Any], weight: float, base: float) -> "FittedTrees":
    """All trees in one table of nodes."""
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
    roots, size = [], 0
    for tree in trees:
        roots.append(size)
        leaf = tree.children_left == LEAF
        columns["feature"].append(np.where(leaf, LEAF, tree.feature))
        columns["threshold"].append(np.where(leaf, 0.0, tree.threshold))
        columns["left"].append(np.where(leaf, LEAF, tree.children_left + size))
        columns["right"].append(np.where(leaf, LEAF, tree.children_right + size))
        columns["value"].append(tree.value[:, 0, 0] * weight)
        size += tree.node_count
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    whole = {name: joined[name].astype(np.int64) for name in ("feature", "left", "right")}
    return FittedTrees(
        **whole,
        threshold=joined["threshold"].astype(np.float64),
        value=joined["value"].astype(np.float64),
        roots=np.array(roots, dtype=np.int64),
        base=np.array([base]),
    )


@dataclass(frozen=True, eq=False)
class FittedTrees:
    """Nodes of all trees: at a leaf ``feature`` is LEAF; the log of a time is ``base`` and the sum of the leaves'
    values."""

    feature: NDArray[np.int64]
    threshold: Floats
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: Floats
    roots: NDArray[np.int64]
    base: Floats

    def times(self, points: Points) -> Floats:
        """Seconds at each point."""
        x = features(points)
        log = np.full(len(points), float(self.base[0]))
        rows = np.arange(len(points))
        for root in self.roots:
            node = np.full(len(points), root)
            while True:
                column = self.feature[node]
                inner = column != LEAF
                if not inner.any():
                    break
                goes_left = x[rows, np.where(inner, column, 0)] <= self.threshold[node]
                node = np.where(inner, np.where(goes_left, self.left[node], self.right[node]), node)
            log += self.value[node]
        return np.asarray(np.exp(log))
