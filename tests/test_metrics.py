"""Closed forms on runs written by hand: every expected number is worked out beside the run."""

import json
from typing import Any

import handmade
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import group_share, request_metrics, summary, summary_json, time_share, timeline, unroll, waits
from windtunnel.metrics.summary import Summary

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


def test_usage_of_two_requests() -> None:
    used = summary(handmade.two_requests()).usage
    table = used.replicas
    assert (used.busy, used.gpus) == (close(1.0), 2)
    assert used.kv == close((2 + 3 + 4 + 5) / 4 / 100)
    assert table.kv_peak.tolist() == close([0.05])
    assert table.batch_size.tolist() == close([(1 + 1 + 2 + 2) / 4])
    assert table.tokens_per_iteration.tolist() == close([(32 + 1 + 17 + 2) / 4])
    assert (table.prefill_tokens.tolist(), table.decode_tokens.tolist()) == ([48.0], [4.0])
    assert table.running.tolist() == close([(0.4 + 0.2) / 0.4])
    assert table.waiting.tolist() == close([0.05 / 0.4])
    assert used.energy_wh == close(2 * 700 * 0.4 / 3600)
    assert used.cost_usd == close(2 * 3.0 * 0.4 / 3600)


def test_flops_and_bytes_of_two_requests() -> None:
    used = summary(handmade.two_requests()).usage
    pairs = 32 * 33 / 2 + (32 + 1) + (33 + 1) + 16 * 17 / 2 + (50 + 2)
    flops = 1e6 * 52 + 1e5 * 6 + 100 * pairs
    assert used.mfu == close(flops / (0.4 * 2 * 1e12))
    cached = (33 + 34 + 52) + 52
    assert used.mbu == close((4 * 1e6 + 10 * cached) / (0.4 * 1e9))


def test_a_run_of_steps_counts_as_its_single_steps() -> None:
    def run(*rows: dict[str, float]) -> Summary:
        requests = handmade.requests(
            arrival=[0.0, 0.0], output_tokens=[9, 9], scheduled=[0, 0], first_token=[0.1, 0.1], finish=[0.9, 0.9]
        )
        return summary(handmade.run(requests, handmade.iterations(*rows), times=handmade.flat_times(per_token=1e-3)))

    joined = run({"start": 0.0, "steps": 8, "decodes": 2, "kv_tokens": 40})
    single = run(*({"start": 0.102 * i, "decodes": 2, "kv_tokens": 40 + 2 * i} for i in range(8)))
    assert joined.latencies["itl"].count == single.latencies["itl"].count == 16
    assert joined.usage.mfu == close(single.usage.mfu)
    assert joined.usage.mbu == close(single.usage.mbu)
    assert joined.usage.replicas.batch_size.tolist() == [2.0]


def test_further_chunks_belong_to_their_step() -> None:
    requests = handmade.requests(arrival=[0, 0], scheduled=[0, 0], first_token=[0.1, 0.1], finish=[0.2, 0.2])
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 10},
        {"start": 0.0, "steps": 0, "chunk_tokens": 20, "chunk_context": 5},
        {"start": 0.1, "decodes": 2, "kv_tokens": 30},
    )
    found = summary(handmade.run(requests, log)).usage
    assert found.replicas.batch_size.tolist() == [2.0]
    assert found.replicas.prefill_tokens.tolist() == [30.0]
    pairs = 10 * 11 / 2 + 20 * 5 + 20 * 21 / 2 + 32
    assert found.mfu == close((32 * 1e6 + 4 * 1e5 + 100 * pairs) / (0.2 * 2e12))


def test_stalls_are_gaps() -> None:
    base = handmade.two_requests()
    stalled = handmade.run(base.requests, base.iterations, stalls=((0, 0.4, 2.4),))
    gaps = summary(stalled).latencies["itl"]
    assert (gaps.count, gaps.max) == (5, 2.0)


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


def test_shares_of_sources_and_groups() -> None:
    parts = {"measured": handmade.flat_times(0.06), "interpolated": handmade.flat_times(0.03)}
    groups = {"gemm": handmade.flat_times(0.04), "attention": handmade.flat_times(0.04)}
    base = handmade.two_requests()
    steps = unroll(handmade.run(base.requests, base.iterations, sources=(parts,), groups=(groups,)))
    assert time_share(steps) == close({"measured": 0.6, "interpolated": 0.3, "modelled": 0.1})
    assert group_share(steps) == close({"gemm": 0.4, "attention": 0.4, "host": 0.2})
    assert np.isnan(list(time_share(unroll(base)).values())).all()


@pytest.mark.parametrize(("modelled", "warned"), [(0.01, False), (0.03, True)])
def test_much_modelled_time_is_a_warning(modelled: float, warned: bool) -> None:
    parts = {"measured": handmade.flat_times(0.1 - modelled), "modelled": handmade.flat_times(modelled)}
    base = handmade.two_requests()
    warnings = summary(handmade.run(base.requests, base.iterations, sources=(parts,))).warnings
    assert any("30% of the batch time is modelled, not measured" in text for text in warnings) is warned


def test_host_work_beside_a_slower_gpu_has_no_share() -> None:
    host = np.full(65, 0.05)
    parts = {"measured": handmade.flat_times(0.1), "modelled": handmade.with_host(handmade.flat_times(0.0), host)}
    base = handmade.two_requests()
    run = handmade.run(
        base.requests, base.iterations, times=handmade.with_host(handmade.flat_times(0.1), host), sources=(parts,)
    )
    assert time_share(unroll(run))["measured"] == close(1.0)


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
