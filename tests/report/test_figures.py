"""What plots draw of large samples."""

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.metrics import summary, timeline, unroll
from windtunnel.report.figures import cdf, figures, histogram, over_time, rounded


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


def test_bars_by_hand() -> None:
    """Whole numbers get whole bars, the largest value one of its own; one value of a kind still gets a bar."""
    edges, counts = histogram(np.array([3, 3, 4, 7]))
    assert counts[:5].tolist() == [2, 1, 0, 0, 1]
    assert edges[:6].tolist() == [3, 4, 5, 6, 7, 8]
    edges, counts = histogram(np.arange(100), bins=50)
    assert np.diff(edges).max() == 2
    assert counts[:50].tolist() == [2] * 50
    edges, counts = histogram(np.array([0.0, 0.9, 1.0, 4.0]), bins=4)
    assert (edges.tolist(), counts.tolist()) == ([0, 1, 2, 3, 4], [2, 1, 0, 1])
    assert histogram(np.array([5.0, 5.0]), bins=2)[0].tolist() == [5.0, 5.5, 6.0]


def test_numbers_keep_their_significant_digits() -> None:
    assert rounded(np.array([123456.0, 0.000123456, np.nan, np.inf])) == [123500.0, 0.0001235, None, None]


def test_latencies_are_drawn_in_their_unit_with_their_limits() -> None:
    """Gaps of 0.1 s are 100 ms; first tokens after 0.1 and 0.15 s, and their median at half of the height."""
    run = handmade.two_requests()
    steps = unroll(run)
    slo = SLO(ttft=0.12, tpot=0.2)
    drawn = figures(steps, summary(run, slo, steps=steps), slo)
    requests, tokens = drawn["requests-cdf"], drawn["tokens-cdf"]
    assert [trace["name"] for trace in requests["data"]] == ["ttft", "e2el", "queue"]
    ttft = dict(zip(requests["data"][0]["y"], requests["data"][0]["x"], strict=True))
    assert (ttft[0.0], ttft[50.0], ttft[100.0]) == (0.1, 0.125, 0.15)
    assert {*tokens["data"][0]["x"]} == {100.0}
    assert [shape["x0"] for shape in requests["layout"]["shapes"]] == [0.12]
    assert [shape["x0"] for shape in tokens["layout"]["shapes"]] == [200.0]
    lines = over_time(timeline(steps, 4))
    series = {trace["name"]: trace["y"] for trace in lines["data"]}
    assert series["KV blocks in use"] == pytest.approx([2, 3, 4, 5])
    assert series["running"] == pytest.approx([1, 1, 2, 2])
    assert lines["data"][0]["x"] == pytest.approx([0.05, 0.15, 0.25, 0.35])
