"""Gaps between tokens: pooled from the log's sums, and request by request."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import summary, token_gaps_by_request, unroll


def test_stalls_are_gaps() -> None:
    base = handmade.two_requests()
    stalled = handmade.run(base.requests, base.iterations, stalls=((0, 0.4, 2.4),))
    gaps = summary(stalled).latencies["itl"]
    assert (gaps.count, gaps.max) == (5, 2.0)


def test_gaps_of_a_preempted_request_hold_its_stall() -> None:
    gaps = token_gaps_by_request(unroll(handmade.preempted()))
    assert gaps[0].tolist() == pytest.approx([0.2, 0.1])
    assert gaps[1].tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_pooled_gaps_are_those_of_the_requests() -> None:
    steps = unroll(handmade.preempted())
    pooled = summary(steps.run, steps=steps).latencies["itl"]
    gaps = np.concatenate(token_gaps_by_request(steps))
    assert pooled.count == len(gaps)
    assert pooled.percentiles((1, 50, 99)).tolist() == pytest.approx(np.percentile(gaps, (1, 50, 99)).tolist())
