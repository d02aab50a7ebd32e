import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.metrics import Distribution

VALUES = st.lists(st.tuples(st.floats(0, 1e3) | st.sampled_from([0.0, 0.1, 0.2]), st.integers(0, 40)), max_size=40)
PERCENTS = st.lists(st.floats(0, 100), min_size=1, max_size=8)


@given(VALUES, PERCENTS)
def test_weighted_percentiles_are_numpys_of_the_expanded_sample(
    pairs: list[tuple[float, int]], percents: list[float]
) -> None:
    values = np.array([value for value, _ in pairs], dtype=np.float64)
    weights = np.array([weight for _, weight in pairs], dtype=np.int64)
    expanded = np.repeat(values, weights)
    found = Distribution(values, weights)
    assert found.count == len(expanded)
    if len(expanded) == 0:
        assert np.isnan(found.percentiles(percents)).all()
        assert np.isnan([found.mean, found.std, found.max, found.min]).all()
        return
    assert found.percentiles(percents).tolist() == np.percentile(expanded, percents).tolist()
    assert found.mean == pytest.approx(expanded.mean())
    assert found.std == pytest.approx(expanded.std(), abs=1e-9)
    assert found.total == pytest.approx(expanded.sum())
    assert (found.min, found.max) == (expanded.min(), expanded.max())
    edges = np.array([-1.0, 0.1, 5.0, 1e9])
    assert found.histogram(edges).tolist() == [(expanded <= edge).sum() for edge in edges]


@given(st.lists(st.floats(0, 1e3) | st.just(float("nan")), max_size=60), PERCENTS)
def test_unweighted_values_leave_nan_out(values: list[float], percents: list[float]) -> None:
    array = np.array(values, dtype=np.float64)
    kept = array[~np.isnan(array)]
    found = Distribution(array)
    assert found.count == len(kept)
    if len(kept):
        assert found.percentiles(percents).tolist() == np.percentile(kept, percents).tolist()
        assert found.histogram(np.array([10.0])).tolist() == [(kept <= 10).sum()]


def test_pooled_adds_single_values() -> None:
    found = Distribution.pooled(np.array([1.0]), np.array([3]), np.array([5.0, 9.0]))
    assert found.percentile(50) == 1.0
    assert (found.count, found.max, found.mean) == (5, 9.0, 17 / 5)


def test_statistics_are_named_as_vllm_names_them() -> None:
    assert Distribution(np.arange(101.0)).statistics((50, 99.9)) == {"mean": 50.0, "p50": 50.0, "p99.9": 99.9}


@pytest.mark.parametrize("percent", [-1.0, 100.1, float("nan")])
def test_impossible_percentile(percent: float) -> None:
    with pytest.raises(InputError, match="between 0 and 100"):
        Distribution(np.ones(3)).percentile(percent)


def test_percentiles_of_many_values_are_those_of_all_of_them_sorted() -> None:
    """More than are sorted: ties, zeros, weights of 0 and values far apart; worked out from the expanded sample."""
    random = np.random.default_rng(0)
    values = np.concatenate(
        [random.gamma(2, 0.01, 70_000), np.full(999, 0.02), np.zeros(9), random.exponential(30, 50)]
    )
    weights = random.integers(0, 5, len(values))
    percents = [0, 1, 50, 90, 95, 99, 99.9, 100]
    expected = np.percentile(np.repeat(values, weights), percents)
    assert Distribution(values, weights).percentiles(percents).tolist() == pytest.approx(expected.tolist(), rel=1e-14)
