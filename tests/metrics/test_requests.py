"""Latencies, waits and limits of requests, on runs written by hand."""

from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import good_requests, request_metrics, summary, waits
from windtunnel.metrics.requests import Verdict


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def test_request_latencies() -> None:
    found = request_metrics(handmade.two_requests().requests)
    assert found.queue.tolist() == close([0.0, 0.05])
    assert found.prefill.tolist() == close([0.1, 0.1])
    assert found.ttft.tolist() == close([0.1, 0.15])
    assert found.tpot.tolist() == close([0.1, 0.1])
    assert found.e2el.tolist() == close([0.4, 0.25])
    assert found.normalised.tolist() == close([0.1, 0.125])


def test_a_single_token_has_no_tpot_and_an_unfinished_request_no_e2el() -> None:
    found = request_metrics(
        handmade.requests(
            arrival=[0, 0, 0],
            output_tokens=[1, 5, 5],
            status=[0, 3, 2],
            scheduled=[0, 0, 1],
            first_token=[1, 1, np.nan],
            finish=[1, np.nan, 7],
        )
    )
    assert np.isnan(found.tpot).all()
    assert found.ttft.tolist()[:2] == [1.0, 1.0]
    assert np.isnan(found.e2el).tolist() == [False, True, True]


def test_percentile_limits_give_verdicts() -> None:
    limits = (PercentileLimit("ttft", 99, 0.2), PercentileLimit("e2el", 50, 0.1))
    found = summary(handmade.two_requests(), SLO(percentiles=limits))
    assert [(verdict.name, verdict.met) for verdict in found.verdicts] == [("ttft_p99", True), ("e2el_p50", False)]
    assert not found.meets_slo
    assert np.isnan(found.goodput)
    assert summary(handmade.two_requests()).meets_slo


def test_a_single_token_meets_any_tpot_limit() -> None:
    requests = handmade.requests(arrival=[0], output_tokens=[1], scheduled=[0], first_token=[0.1], finish=[0.1])
    run = handmade.run(requests, handmade.iterations({"chunk_tokens": 10}))
    assert summary(run, SLO(tpot=1e-9)).attainment == 1.0


def test_waits_measure_starvation() -> None:
    requests = handmade.requests(arrival=[0, 1, 2], status=[0, 3, 1], scheduled=[4, np.nan, np.nan])
    assert waits(requests, 10.0).tolist()[:2] == [4.0, 9.0]
    assert np.isnan(waits(requests, 10.0)[2])


def test_a_limit_that_is_met_exactly_is_met() -> None:
    assert Verdict("ttft", 99.0, 0.5, 0.5).met
    assert not Verdict("ttft", 99.0, 0.5, 0.5000001).met
    assert not Verdict("ttft", 99.0, 0.5, np.nan).met
    assert Verdict("ttft", 99.9, 0.5, 0.1).name == "ttft_p99.9"
    requests = handmade.requests(
        arrival=[0, 0, 0], scheduled=[0, 0, 0], first_token=[0.5, 0.5, 0.25], finish=[1.0, 1.5, 1.0], status=[0, 0, 3]
    )
    found = request_metrics(requests)
    good = good_requests(found, requests.status == 0, SLO(ttft=0.5, e2el=1.0))
    assert good is not None
    assert good.tolist() == [True, False, False]
    assert good_requests(found, requests.status == 0, SLO()) is None


def test_tpot_divides_by_the_gaps_and_normalised_latency_by_the_tokens() -> None:
    found = request_metrics(
        handmade.requests(arrival=[1.0], output_tokens=[5], scheduled=[1.5], first_token=[2.0], finish=[4.0])
    )
    assert (found.queue[0], found.prefill[0], found.ttft[0]) == (0.5, 0.5, 1.0)
    assert (found.tpot[0], found.e2el[0], found.normalised[0]) == (0.5, 3.0, 0.6)
