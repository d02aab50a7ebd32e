"""Gaps between tokens: pooled from the log's sums, and request by request."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import summary, token_gaps_by_request, unroll
from windtunnel.metrics.gaps import token_gaps
from windtunnel.metrics.window import Window


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


def test_a_prefill_between_two_decodes_lengthens_the_gap_of_its_lane_alone() -> None:
    """Lane 0: request 0 decodes until 0.2, a prompt runs alone until 0.3, both decode until 0.4. Lane 1 goes on."""
    requests = handmade.requests(
        arrival=[0.0, 0.2, 0.05],
        lane=[0, 0, 1],
        output_tokens=[3, 2, 4],
        scheduled=[0.0, 0.2, 0.05],
        first_token=[0.1, 0.3, 0.15],
        finish=[0.4, 0.4, 0.45],
    )
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 10},
        {"start": 0.1, "decodes": 1, "kv_tokens": 10},
        {"start": 0.2, "chunk_tokens": 10},
        {"start": 0.3, "decodes": 2, "kv_tokens": 21},
        {"start": 0.05, "lane": 1, "chunk_tokens": 10},
        {"start": 0.15, "lane": 1, "steps": 3, "decodes": 1, "kv_tokens": 10},
    )
    steps = unroll(handmade.run(requests, log, lanes=2))
    gaps = [found.tolist() for found in token_gaps_by_request(steps)]
    assert gaps == [pytest.approx([0.1, 0.2]), pytest.approx([0.1]), pytest.approx([0.1, 0.1, 0.1])]
    pooled = summary(steps.run, steps=steps).latencies["itl"]
    assert pooled.count == 6
    assert pooled.total == pytest.approx(0.7)
    assert (pooled.min, pooled.max) == pytest.approx((0.1, 0.2))
    late = token_gaps(steps, Window(0.3, 0.42, True))  # at 0.35 one of lane 1, at 0.4 both of lane 0
    assert late.count == 3
    assert (late.total, late.max) == pytest.approx((0.4, 0.2))
