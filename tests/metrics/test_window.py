"""The measured window: what is left out, and that the whole run leaves nothing out."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import summary, unroll
from windtunnel.simulate.run import Run


def steady_run() -> Run:
    """Eleven requests, one a second from 0 to 10; each waits 0, is prefilled in 0.5 s and then emits one more token."""
    arrival = np.arange(11.0)
    rows = []
    for start in arrival:
        rows += [{"start": start, "chunk_tokens": 10}, {"start": start + 0.5, "decodes": 1, "kv_tokens": 10}]
    requests = handmade.requests(
        arrival=arrival,
        scheduled=arrival,
        first_token=arrival + 0.5,
        finish=arrival + 1.0,
        prompt_tokens=np.full(11, 10),
    )
    return handmade.run(requests, handmade.iterations(*rows), times=handmade.flat_times(0.5))


def test_the_whole_run_by_default() -> None:
    found = summary(steady_run())
    assert (found.window.start, found.window.end, found.window.trimmed) == (0.0, 11.0, False)
    assert found.total == 11


def test_warmup_and_drain_are_left_out() -> None:
    found = summary(steady_run(), exclude_warmup=True)
    assert (found.window.start, found.window.end, found.window.trimmed) == (1.0, 10.0, True)
    assert found.total == 10
    assert found.request_throughput == pytest.approx(10 / 9)
    assert found.output_throughput == pytest.approx((9 + 10) / 9)
    assert found.latencies["e2el"].count == 10
    assert found.usage.busy == pytest.approx(1.0)
    assert found.usage.replicas.running.tolist() == pytest.approx([1.0])


def test_rows_cut_by_the_edge_count_in_proportion() -> None:
    base = steady_run()
    log = handmade.iterations({"start": 0.0, "steps": 22, "decodes": 1, "kv_tokens": 10})
    run = handmade.run(base.requests, log, times=handmade.flat_times(0.5))
    share = unroll(run).share_inside(summary(run, exclude_warmup=True).window)
    assert share.tolist() == pytest.approx([9 / 11])


def test_requests_that_arrive_at_once_are_measured_whole() -> None:
    requests = handmade.requests(arrival=[5.0, 5.0], scheduled=[5, 5], first_token=[6, 6], finish=[7, 7])
    found = summary(handmade.run(requests, handmade.iterations()), exclude_warmup=True)
    assert not found.window.trimmed
    assert any("no warm-up to exclude" in text for text in found.warnings)
