"""Trees read as arrays predict what scikit-learn predicts, and twice the same."""

import numpy as np
import pytest

from windtunnel.perf.estimators.points import Points
from windtunnel.perf.estimators.trees import Boosting, Forest, features

ensemble = pytest.importorskip("sklearn.ensemble")


def surface() -> Points:
    rng = np.random.default_rng(3)
    a, b = rng.integers(1, 64, 300).astype(float), rng.integers(0, 4096, 300).astype(float)
    return Points("decode", a, b, 1e6 * a, 1e3 * a * b + 1.0, 1e-5 + 1e-9 * a * b + 1e-6 * np.ceil(a / 16))


def test_a_forest_is_scikit_learns() -> None:
    measured = surface()
    theirs = ensemble.RandomForestRegressor(n_estimators=8, max_depth=6, min_samples_split=5, random_state=0)
    theirs.fit(features(measured), np.log(measured.seconds))
    ours = Forest(8, 6, 5).fit(measured).times(measured)
    assert ours == pytest.approx(np.exp(theirs.predict(features(measured))), rel=1e-12)


def test_boosting_is_scikit_learns() -> None:
    measured = surface()
    theirs = ensemble.GradientBoostingRegressor(n_estimators=20, max_depth=3, learning_rate=0.2, random_state=0)
    theirs.fit(features(measured), np.log(measured.seconds))
    ours = Boosting(20, 3, 0.2).fit(measured).times(measured)
    assert ours == pytest.approx(np.exp(theirs.predict(features(measured))), rel=1e-12)


@pytest.mark.parametrize("learner", [Forest(4, 8), Boosting(10)])
def test_training_twice_gives_the_same_bits(learner: Forest | Boosting) -> None:
    one, two = (vars(learner.fit(surface())) for _ in range(2))
    assert all(np.array_equal(one[name], two[name]) for name in one)
