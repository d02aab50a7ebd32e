"""Summaries in closed form on runs written by hand, and the keys of their JSON document."""

import json
from typing import Any

import handmade
import pytest

from windtunnel.deployment import SLO
from windtunnel.metrics import summary, summary_json, timeline, unroll

LATENCY_KEYS = ["mean", "p50", "p90", "p95", "p99"]
KEYS = {
    "schema_version": None,
    "requests": ["total", "finished", "rejected", "aborted"],
    **dict.fromkeys(("ttft", "tpot", "itl", "e2el", "queue"), LATENCY_KEYS),
    **dict.fromkeys(("request_throughput", "output_throughput", "goodput", "attainment", "cost_usd", "energy_wh")),
    "kv_blocks": None,
    "utilisation": ["busy", "kv", "mfu", "mbu", "bubbles"],
    "preemptions": None,
    "prefix_cache_hit_rate": None,
    "time_share": ["measured", "interpolated", "modelled"],
    "warnings": None,
}


def close(value: float | list[float] | dict[str, float]) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def test_summary_of_two_requests() -> None:
    found = summary(handmade.two_requests(), SLO(ttft=0.12, tpot=0.2))
    assert (found.total, found.finished, found.rejected, found.aborted) == (2, 2, 0, 0)
    assert found.window.seconds == close(0.4)
    assert found.request_throughput == close(2 / 0.4)
    assert found.output_throughput == close(6 / 0.4)
    assert found.total_token_throughput == close((6 + 48) / 0.4)
    assert found.goodput == close(1 / 0.4)
    assert found.attainment == 0.5
    assert found.latencies["itl"].count == 4
    assert found.latencies["itl"].mean == close(0.1)
    assert found.max_wait == close(0.05)
    assert found.kv_blocks == 100
    assert found.per_million_output_tokens(6.0) == close(1e6)


def test_json_document_has_exactly_the_promised_keys() -> None:
    document = summary_json(summary(handmade.two_requests()))
    assert list(document) == list(KEYS)
    for key, inner in KEYS.items():
        if inner is not None:
            assert list(document[key]) == inner
    assert document["goodput"] is None
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_nothing_finished_gives_nulls_and_a_warning() -> None:
    requests = handmade.requests(arrival=[0.0, 1.0], status=[1, 1], replica=[-1, -1])
    found = summary(handmade.run(requests, handmade.iterations()), SLO(ttft=1.0))
    document = summary_json(found)
    assert document["ttft"] == dict.fromkeys(LATENCY_KEYS)
    assert (document["attainment"], document["goodput"], document["requests"]["rejected"]) == (0.0, 0.0, 2)
    assert any("none of 2 requests finished" in text for text in document["warnings"])


def test_no_request_at_all() -> None:
    run = handmade.run(handmade.requests(arrival=[]), handmade.iterations())
    document = summary_json(summary(run, SLO(ttft=1.0)))
    assert document["request_throughput"] is None
    assert document["warnings"] == ["no request arrived in the measured window: there is nothing to measure"]
    assert timeline(unroll(run), bins=3).running.tolist() == [0.0, 0.0, 0.0]


def test_without_a_footprint_nothing_is_made_up() -> None:
    base = handmade.two_requests()
    document = summary_json(summary(handmade.run(base.requests, base.iterations, footprint=None)))
    assert document["cost_usd"] is document["energy_wh"] is document["utilisation"]["mfu"] is None
    assert document["utilisation"]["busy"] == close(1.0)


@pytest.mark.parametrize(("modelled", "warned"), [(0.01, False), (0.03, True)])
def test_much_modelled_time_is_a_warning(modelled: float, warned: bool) -> None:
    parts = {"measured": handmade.flat_times(0.1 - modelled), "modelled": handmade.flat_times(modelled)}
    base = handmade.two_requests()
    warnings = summary(handmade.run(base.requests, base.iterations, sources=(parts,))).warnings
    assert any("30% of the batch time is modelled, not measured" in text for text in warnings) is warned
