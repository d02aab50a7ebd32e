"""What plots draw of large samples."""

import handmade
import numpy as np

from windtunnel.metrics import summary
from windtunnel.report.figures import cdf, histogram


def test_downsampling_keeps_ends_and_counts() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 100_000)
    x, percents = cdf(summary(handmade.two_requests()).latencies["itl"].__class__(values))
    assert len(x) <= 502
    assert (x[0], x[-1], percents[-1]) == (values.min(), values.max(), 100.0)
    for data in (values, np.arange(1000), np.full(5, 7), np.zeros(0)):
        edges, counts = histogram(data)
        assert counts.sum() == len(data)
        assert len(edges) == len(counts) + 1
        assert len(counts) <= 52
