"""The timeline is integrated exactly: Little's law holds on it."""

import handmade
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.metrics import summary, timeline, unroll


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
    assert float(lines.running.sum() * width) == pytest.approx(service.sum(), abs=1e-6)
    assert float(lines.waiting.sum() * width) == pytest.approx(queue.sum(), abs=1e-6)
    assert float(lines.request_throughput.sum() * width) == pytest.approx(len(parts))
    found = summary(run)
    if found.window.seconds > 0:
        in_system = (found.usage.replicas.running + found.usage.replicas.waiting)[0]
        arrivals_per_second = len(parts) / found.window.seconds
        assert in_system == pytest.approx(arrivals_per_second * found.latencies["e2el"].mean, abs=1e-6)
