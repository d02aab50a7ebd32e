"""Digests: percentiles within their error whatever the values, and parts that add up."""

import numpy as np
import pytest

from windtunnel.metrics.digest import ERROR, Digest
from windtunnel.metrics.distribution import Distribution

PERCENTS = [0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 100.0]


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.5])
def test_percentiles_lie_within_the_error(spread: float) -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.lognormal(-2, spread, 5000), rng.integers(0, 40, 5000)
    values[:7] = np.nan
    digest, exact = Digest(), Distribution(values, weights)
    digest.add(values, weights)
    assert digest.count == exact.count
    assert digest.mean == pytest.approx(exact.mean, rel=1e-12)
    assert digest.percentiles(PERCENTS) == pytest.approx(exact.percentiles(PERCENTS), rel=ERROR)
    assert dict(digest.statistics()).keys() == dict(exact.statistics()).keys()


def test_parts_add_up_in_any_order() -> None:
    values = np.random.default_rng(1).exponential(size=(3, 1000))
    parts = []
    for row in values:
        part = Digest()
        part.add(row)
        parts.append(part)
    whole = Digest()
    whole.add(values.ravel())
    one, other = Digest.of(parts), Digest.of(parts[::-1])
    assert np.array_equal(one.counts, whole.counts)
    assert one.max == whole.max
    assert one.total == other.total == pytest.approx(whole.total)


def test_zeros_and_nothing() -> None:
    digest = Digest()
    assert np.isnan(digest.mean)
    assert np.isnan(digest.percentile(50))
    digest.add(np.array([0.0, 0.0, np.nan]))
    assert (digest.count, digest.mean, digest.percentile(99)) == (2, 0.0, 0.0)
