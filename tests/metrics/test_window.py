"""The measured window: what is left out, and that the whole run leaves nothing out."""

import handmade
import numpy as np
import pytest

from windtunnel.metrics import summary, unroll
from windtunnel.metrics.usage import step_sums
from windtunnel.metrics.window import Window, span, trimmed_window
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
    inside = step_sums(unroll(run), summary(run, exclude_warmup=True).window, [None])
    assert inside["iterations"].tolist() == pytest.approx([18.0])
    assert inside["seconds"].tolist() == pytest.approx([9.0])


def test_requests_that_arrive_at_once_are_measured_whole() -> None:
    requests = handmade.requests(arrival=[5.0, 5.0], scheduled=[5, 5], first_token=[6, 6], finish=[7, 7])
    found = summary(handmade.run(requests, handmade.iterations()), exclude_warmup=True)
    assert not found.window.trimmed
    assert any("no warm-up to exclude" in text for text in found.warnings)


def test_warmup_is_a_tenth_of_the_span_and_not_of_the_clock() -> None:
    """Arrivals from 100 to 120 s: measured from 102 to 120, both ends included."""
    found = trimmed_window(np.array([100.0, 120.0, 110.0]))
    assert found == Window(102.0, 120.0, True)
    assert found.seconds == 18.0
    assert found.holds(np.array([101.9, 102.0, 120.0, 120.1, np.nan])).tolist() == [False, True, True, False, False]
    assert trimmed_window(np.array([])) is None


def test_the_whole_run_ends_with_its_last_event() -> None:
    """A last arrival, a last finish or a last step, whichever comes last."""
    requests = handmade.requests(arrival=[3.0, 5.0], finish=[4.0, np.nan])
    assert span(requests, np.array([4.5])) == (3.0, 5.0)
    assert span(requests, np.array([6.5])) == (3.0, 6.5)
    assert span(requests, np.zeros(0)) == (3.0, 5.0)
    assert span(handmade.requests(arrival=[3.0, 5.0], finish=[7.0, 6.0]), np.array([6.5])) == (3.0, 7.0)
    assert Window(2.0, 1.0, False).seconds == 0.0
