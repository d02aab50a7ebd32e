"""Gaps between tokens: pooled from the log's sums, and request by request."""

from dataclasses import replace
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.core.rebuild import IterationTimes
from windtunnel.metrics import summary, token_gaps_by_request, unroll
from windtunnel.metrics.gaps import decode_steps, lanes_at, token_gaps
from windtunnel.metrics.steps import Steps
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


def piped() -> Steps:
    """Two stages, steps of 0.2 s that begin every 0.1 s: request 0 in lane 0, request 1 in lane 1 of one rank.

    Request 0 has its tokens at 0.2, 0.4 and 0.6, request 1 at 0.3 and 0.5; request 2 of another replica, without
    stages, at 0.1 and 0.2.
    """
    rows = [
        {"start": 0.0, "chunk_tokens": 9},
        {"start": 0.1, "lane": 1, "chunk_tokens": 9},
        {"start": 0.2, "decodes": 1, "kv_tokens": 9},
        {"start": 0.3, "lane": 1, "decodes": 1, "kv_tokens": 9},
        {"start": 0.4, "decodes": 1, "kv_tokens": 10},
        {"start": 0.0, "replica": 1, "chunk_tokens": 9},
        {"start": 0.1, "replica": 1, "decodes": 1, "kv_tokens": 9},
    ]
    requests = handmade.requests(
        arrival=[0.0, 0.0, 0.0],
        replica=[0, 0, 1],
        output_tokens=[3, 2, 2],
        scheduled=[0.0, 0.1, 0.0],
        first_token=[0.2, 0.3, 0.1],
        finish=[0.6, 0.5, 0.2],
    )
    manifest = {"replicas": [{"pool": 0, "lanes": 1, "stages": 2}, {"pool": 0, "lanes": 1}]}
    run = handmade.run(requests, handmade.iterations(*rows), manifest=manifest)
    starts = np.array([row["start"] for row in rows])
    seconds = np.array([0.2] * 5 + [0.1] * 2)
    steps, at = Steps(run), np.arange(7, dtype=np.int32)
    vars(steps)["every"] = IterationTimes(at, starts, seconds, run.iterations.decodes.astype(np.int32), seconds)
    return steps


def test_requests_of_a_pipeline_decode_in_the_lane_of_their_prompt() -> None:
    steps = piped()
    assert lanes_at(steps, np.arange(3), np.array([0.2, 0.3, 0.1])).tolist() == [0, 1, 2**20]
    assert lanes_at(steps, np.array([0, 1]), np.array([np.nan, 0.3])).tolist() == [-1, 1]
    gaps = [found.tolist() for found in token_gaps_by_request(steps)]
    assert gaps == [pytest.approx([0.2, 0.2]), pytest.approx([0.2]), pytest.approx([0.1])]


def test_pooled_gaps_of_a_pipeline() -> None:
    found = token_gaps(piped(), Window(0.0, 0.6, False))
    assert (found.count, found.total) == pytest.approx((4, 0.7))
    late = token_gaps(piped(), Window(0.45, 0.61, True))
    assert (late.count, late.total) == pytest.approx((2, 0.4))


def test_decode_steps_lane_by_lane() -> None:
    found = decode_steps(piped())
    assert (found.lanes.tolist(), found.first.tolist()) == ([0, 1, 2**20], [0, 2, 3, 4])
    assert found.start.tolist() == pytest.approx([0.2, 0.4, 0.3, 0.1])
    assert [found.lane_bounds(lane) for lane in (0, 1, 2**20, 7)] == [(0, 2), (2, 3), (3, 4), (3, 3)]
    assert found.paused().tolist() == [True, False, True, True]


def test_an_unfinished_request_has_no_gaps_of_its_own() -> None:
    base = handmade.preempted()
    aborted = handmade.requests(
        arrival=[0.0, 0.0], output_tokens=[3, 4], scheduled=[0, 0], first_token=[0.1, 0.1], finish=[0.4, np.nan],
        status=[0, 3],
    )  # fmt: skip
    gaps = token_gaps_by_request(unroll(handmade.run(aborted, base.iterations, stalls=((0, 0.1, 0.3),))))
    assert [found.tolist() for found in gaps] == [pytest.approx([0.2, 0.1]), []]


def test_two_stalls_of_one_request_are_taken_in_turn() -> None:
    """Tokens at 0.1, 0.2, then a stall until 0.4, one more at 0.5, a stall until 0.7, and the last at 0.8."""
    requests = handmade.requests(
        arrival=[0.0], output_tokens=[6], scheduled=[0.0], first_token=[0.1], finish=[0.8], preemptions=[2]
    )
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 9},
        {"start": 0.1, "decodes": 1, "kv_tokens": 9},
        {"start": 0.3, "chunk_tokens": 11},
        {"start": 0.4, "decodes": 1, "kv_tokens": 11},
        {"start": 0.6, "chunk_tokens": 13},
        {"start": 0.7, "decodes": 1, "kv_tokens": 13},
    )
    steps = unroll(handmade.run(requests, log, stalls=((0, 0.5, 0.7), (0, 0.2, 0.4))))
    (gaps,) = token_gaps_by_request(steps)
    assert gaps.tolist() == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.1])
    pooled = token_gaps(steps, Window(0.0, 0.8, False))
    assert (pooled.count, pooled.total, pooled.max) == pytest.approx((5, 0.7, 0.2))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"acceptance_length": 2.5}, [0.35, 0.35]),  # halfway between two tokens
        ({"acceptance_length": 2.0}, [0.3, 0.3, 0.1]),
        ({"acceptance_length": 2.0, "stream_interval": 4}, [0.6, 0.1]),
        ({"acceptance_length": None, "stream_interval": 3}, [0.4, 0.3]),
    ],
)
def test_the_tokens_of_a_step_come_together(engine: dict[str, Any], expected: list[float]) -> None:
    """Six tokens after 0.1, 0.2, 0.1, 0.2 and 0.1 seconds."""
    requests = handmade.requests(arrival=[0.0], output_tokens=[6], scheduled=[0.0], first_token=[0.1], finish=[0.8])
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 9},
        *({"start": start, "decodes": 1, "kv_tokens": 9} for start in (0.1, 0.3, 0.4, 0.6, 0.7)),
    )
    run = handmade.run(requests, log)
    steps = unroll(replace(run, manifest=run.manifest | {"deployment": {"pools": [{"engine": engine}]}}))
    found = token_gaps(steps, Window(0.0, 0.8, False))
    places = np.linspace(0, 100, found.count)
    assert [found.percentile(place) for place in places[::-1]] == pytest.approx(expected)
