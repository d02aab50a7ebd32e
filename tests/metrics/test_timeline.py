"""The timeline is integrated exactly: Little's law holds on it."""

import handmade
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.metrics import summary, timeline, unroll
from windtunnel.metrics.timeline import mean_level


@st.composite
def random_requests(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    seconds = st.integers(0, 50_000_000).map(lambda microseconds: microseconds / 1e6)
    return draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=30))


@settings(deadline=None)
@given(random_requests(), st.integers(1, 40))
def test_littles_law(parts: list[tuple[float, float, float]], bins: int) -> None:
    arrival, queue, service = (np.array(column) for column in zip(*parts, strict=True))
    scheduled, finish = arrival + queue, arrival + queue + service
    requests = handmade.requests(arrival=arrival, scheduled=scheduled, first_token=scheduled, finish=finish)
    run = handmade.run(requests, handmade.iterations())
    lines = timeline(unroll(run), bins)
    width = lines.edges[1] - lines.edges[0]
    present = float((lines.running + lines.waiting).sum() * width)
    assert present == pytest.approx(queue.sum() + service.sum(), abs=1e-6)
    assert float(lines.request_throughput.sum() * width) == pytest.approx(len(parts))
    found = summary(run)
    if found.window.seconds > 0:
        in_system = (found.usage.replicas.running + found.usage.replicas.waiting)[0]
        arrivals_per_second = len(parts) / found.window.seconds
        assert in_system == pytest.approx(arrivals_per_second * found.latencies["e2el"].mean, abs=1e-6)


def test_an_evicted_request_waits() -> None:
    """Two requests; the first is evicted at 0.1 and joins a step again at 0.2."""
    run = handmade.preempted()
    lines = timeline(unroll(run), bins=4)
    assert lines.running.tolist() == pytest.approx([2, 1, 2, 2])
    assert lines.waiting.tolist() == pytest.approx([0, 1, 0, 0])
    replicas = summary(run).usage.replicas
    assert (replicas.running[0], replicas.waiting[0]) == pytest.approx((1.75, 0.25))


def test_two_replicas_by_hand() -> None:
    """Bins of 0.2 s. Replica 0 holds 40 of its 100 blocks until 0.1, replica 1 20 of its own from 0.1 to 0.3."""
    requests = handmade.requests(
        arrival=[0.0, 0.1, 0.1],
        replica=[0, 1, -1],
        output_tokens=[1, 2, 2],
        status=[0, 0, 1],
        scheduled=[0.0, 0.1, np.nan],
        first_token=[0.1, 0.2, np.nan],
        finish=[0.1, 0.3, 0.1],
    )
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 9, "used_blocks": 40},
        {"start": 0.1, "replica": 1, "chunk_tokens": 9, "used_blocks": 20},
        {"start": 0.2, "replica": 1, "decodes": 1, "kv_tokens": 9, "used_blocks": 20},
        {"start": 0.3, "replica": 0, "decodes": 3, "kv_tokens": 9, "used_blocks": 0},
    )
    lines = timeline(unroll(handmade.run(requests, log, replicas=2)), bins=2)
    assert lines.edges.tolist() == pytest.approx([0.0, 0.2, 0.4])
    assert lines.centres.tolist() == pytest.approx([0.1, 0.3])
    assert lines.kv.tolist() == pytest.approx([(40 + 20) / 2 / 200, 20 / 2 / 200])
    assert lines.running.tolist() == pytest.approx([1.0, (1 + 3) / 2])
    assert lines.arrivals.tolist() == pytest.approx([3 / 0.2, 0.0])
    assert lines.request_throughput.tolist() == pytest.approx([1 / 0.2, 1 / 0.2])


def test_levels_of_boxes_by_hand() -> None:
    """Bins of 1 s from 10 to 13: boxes of height 2 from 10.5 to 12.25, of 1 from 9 to 10.25 and of 4 from 12.5 on; one
    that never begins, and one that ends where the bins do."""
    edges = np.array([10.0, 11.0, 12.0, 13.0])
    begin, end = np.array([10.5, 9.0, 12.5, np.nan]), np.array([12.25, 10.25, np.nan, 11.0])
    found = mean_level(edges, begin, end, np.array([2.0, 1.0, 4.0, 99.0]))
    assert found.tolist() == pytest.approx([0.5 * 2 + 0.25, 2.0, 0.25 * 2 + 0.5 * 4])
    assert mean_level(edges, np.array([12.0]), np.array([13.0])).tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert mean_level(edges, np.array([13.5]), np.array([14.0])).tolist() == pytest.approx([0.0, 0.0, 0.0])


def test_a_part_of_a_run_by_hand() -> None:
    """Tokens at 0.1, 0.2, 0.3 (two) and 0.4 (two): between 0.15 and 0.35 three, in bins of 0.1 s one and two."""
    lines = timeline(unroll(handmade.two_requests()), bins=2, between=(0.15, 0.35))
    assert lines.edges.tolist() == pytest.approx([0.15, 0.25, 0.35])
    assert lines.output_throughput.tolist() == pytest.approx([10.0, 20.0])
    assert lines.arrivals.tolist() == pytest.approx([10.0, 0.0])
    assert lines.request_throughput.tolist() == [0.0, 0.0]
    assert lines.running.tolist() == pytest.approx([1.5, 2.0])
    assert lines.waiting.tolist() == pytest.approx([0.5, 0.0])
    assert lines.kv.tolist() == pytest.approx([0.035, 0.045])


def test_a_run_without_length_has_a_second() -> None:
    requests = handmade.requests(arrival=[5.0], status=[1], replica=[-1])
    lines = timeline(unroll(handmade.run(requests, handmade.iterations())), bins=2)
    assert lines.edges.tolist() == [5.0, 5.5, 6.0]
    assert lines.arrivals.tolist() == [2.0, 0.0]
    assert len(timeline(unroll(handmade.two_requests())).running) == 500
