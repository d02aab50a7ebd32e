"""Summaries in closed form on runs written by hand, and the keys of their JSON document."""

import json
from dataclasses import replace
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.metrics import Distribution, client_json, summary, summary_json, timeline, unroll
from windtunnel.simulate.run import ABORTED, FINISHED, REJECTED, Run

LATENCY_KEYS = ["mean", "p50", "p90", "p95", "p99"]
KEYS = {
    "schema_version": None,
    "requests": ["total", "finished", "rejected", "aborted"],
    **dict.fromkeys(("ttft", "tpot", "itl", "e2el", "queue"), LATENCY_KEYS),
    **dict.fromkeys(("request_throughput", "output_throughput", "goodput", "attainment")),
    **dict.fromkeys(("cost_usd", "cost_per_hour", "cost_per_million_output_tokens", "energy_wh")),
    "max_wait": None,
    "normalised_latency": None,
    "normalised_interactivity": ["p50", "p90", "p99"],
    "batch_size": None,
    "idle_seconds": None,
    "phase_share": ["prefill", "decode", "mixed"],
    "kv_blocks": None,
    "utilisation": ["busy", "kv", "mfu", "mbu", "bubbles"],
    "preemptions": None,
    "prefix_cache_hit_rate": None,
    "prompt_tokens": None,
    "cached_tokens": None,
    "generated_cached_tokens": None,
    "time_share": ["measured", "interpolated", "modelled"],
    "replicas": None,
    "warnings": None,
}


def close(value: Any) -> Any:
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


def test_what_steps_do_by_hand() -> None:
    """Four steps of 0.1 s: two prompts; a decode; a decode and a prompt again; two decodes. Then 0.4 s of nothing."""
    run = handmade.preempted()
    document = summary_json(summary(run))
    assert document["batch_size"] == close((2 + 1 + 2 + 2) / 4)
    assert document["phase_share"] == close({"prefill": 0.25, "decode": 0.5, "mixed": 0.25})
    assert document["normalised_latency"] == close((0.4 / 3 + 0.4 / 4) / 2)
    assert document["normalised_interactivity"]["p50"] == close(1 / ((0.4 / 3 + 0.4 / 4) / 2))
    assert document["max_wait"] == document["idle_seconds"] == close(0.0)
    (only,) = document["replicas"]
    assert (only["iterations"], only["batch_size"], only["preemptions"]) == (4, 1.75, 1)


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
    assert any("30 % of step time is estimated, not measured" in text for text in warnings) is warned


@pytest.mark.parametrize("run", [handmade.two_requests(), handmade.preempted()])
@pytest.mark.parametrize("exclude_warmup", [False, True])
def test_what_a_client_sees_is_part_of_the_whole(run: Run, exclude_warmup: bool) -> None:
    seen = client_json(run, exclude_warmup=exclude_warmup)
    whole = summary_json(summary(run, exclude_warmup=exclude_warmup))
    assert list(seen) == ["ttft", "tpot", "itl", "e2el", "queue", "request_throughput", "output_throughput"]
    assert seen == {name: whole[name] for name in seen}


def test_every_end_of_a_request_is_counted_for_itself() -> None:
    """One finished, one rejected, two aborted, of which one was never admitted; 4 of 10 + 30 prompt tokens cached."""
    requests = handmade.requests(
        arrival=[0.0, 1.0, 1.0, 2.0],
        prompt_tokens=[10, 20, 30, 40],
        output_tokens=[2, 5, 5, 5],
        status=[FINISHED, REJECTED, ABORTED, ABORTED],
        replica=[0, -1, 0, 0],
        preemptions=[1, 0, 2, 0],
        cached_tokens=[4, 7, 0, 0],
        scheduled=[0.0, np.nan, 1.0, np.nan],
        first_token=[0.5, np.nan, 2.0, np.nan],
        finish=[4.0, 1.0, np.nan, np.nan],
    )
    found = summary(handmade.run(requests, handmade.iterations()), SLO(ttft=0.5))
    assert (found.total, found.finished, found.rejected, found.aborted, found.preemptions) == (4, 1, 1, 2, 3)
    assert found.prefix_cache_hit_rate == close(4 / 40)
    assert (found.request_throughput, found.output_throughput) == close((1 / 4, 2 / 4))
    assert found.total_token_throughput == close((10 + 2) / 4)
    assert (found.goodput, found.attainment) == close((1 / 4, 1 / 4))
    assert found.max_wait == close(2.0)  # of the one that was never scheduled, until the end
    assert found.per_million_output_tokens(3.0) == close(1.5e6)


def test_a_trimmed_window_counts_the_tokens_emitted_inside() -> None:
    """Arrivals from 0 to 10 are measured from 1 on: at 1.5 a first token, at 3 one after an eviction, at 4 a decode."""
    requests = handmade.requests(
        arrival=[0.0, 1.0, 10.0],
        prompt_tokens=[100, 10, 1],
        output_tokens=[3, 3, 1],
        scheduled=[0.0, 1.0, 10.0],
        first_token=[0.5, 1.5, 10.5],
        finish=[0.9, 4.0, 10.5],
    )
    log = handmade.iterations(
        {"start": 0.8, "decodes": 2, "kv_tokens": 9}, {"start": 3.9, "decodes": 1, "kv_tokens": 9}
    )
    run = handmade.run(requests, log, stalls=((0, 0.5, 0.7), (1, 1.5, 3.0)))
    found = summary(run, exclude_warmup=True)
    assert found.output_throughput == close(3 / 9)
    assert found.total_token_throughput == close((3 + 10) / 9)
    assert found.request_throughput == close(1 / 9)


def test_a_summary_in_one_line_and_as_a_table() -> None:
    found = summary(handmade.two_requests(), SLO(ttft=0.12))
    assert repr(found) == (
        "Summary(2 of 2 finished; mean ttft 125 ms, tpot 100 ms, e2el 325 ms; 5 requests/s, 15 output tokens/s, "
        "attainment 50.0 %)"
    )
    assert "attainment" not in repr(summary(handmade.two_requests()))
    table = found._repr_html_()
    assert "<tr><th>ms</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th></tr>" in table
    assert "<tr><th>e2el</th><td>325</td><td>325</td><td>385</td><td>392.5</td><td>398.5</td></tr>" in table
    assert repr(Distribution(np.array([1.0, 3.0]))) == "Distribution(2 values: mean 2, p50 2, p99 2.98)"
    assert repr(Distribution(np.zeros(0))) == "Distribution(empty)"


def test_an_hour_costs_what_its_gpus_cost() -> None:
    """Two GPUs at $3 an hour, for 0.4 s."""
    found = summary(handmade.two_requests())
    assert found.cost_per_hour == 6.0
    assert summary_json(found)["cost_per_million_output_tokens"] == close(6 * 0.4 / 3600 * 1e6 / 6)
    nothing = summary(handmade.run(handmade.requests(arrival=[]), handmade.iterations()))
    assert np.isnan(nothing.cost_per_hour)
    assert np.isnan(nothing.per_million_output_tokens(1.0))


LIVES: dict[str, Any] = {
    "seconds": 10.0, "paid_s": [10.0, 4.0, 5.0], "up_s": [10.0, 3.0, 4.0], "unserved_s": 2.5, "starts": 3,
    "failures": 1, "retries": 4, "lost": [7, 8], "link_failures": 5, "resent": 6,
    "pools": [{"unserved_s": 1.0, "starts": 2, "failures": 0}, {"unserved_s": 2.0, "starts": 1, "failures": 1}],
}  # fmt: skip


def test_lives_of_replicas_by_hand() -> None:
    run = handmade.two_requests()
    found = summary(replace(run, manifest=run.manifest | {"lives": LIVES, "replicas": [{"pool": 0, "lanes": 1}] * 3}))
    assert found.lives == {
        "replicas_paid": close(1.9), "replicas_up": close(1.7), "unserved_s": 2.5, "starts": 3, "failures": 1,
        "retries": 4, "lost": 2, "availability": 0.75,
    }  # fmt: skip
    assert summary(handmade.two_requests()).lives == {}


def test_lives_of_each_pool_by_hand() -> None:
    """Replica 0 is of the first pool, the others of the second."""
    run = handmade.disaggregated()
    replicas = [*run.manifest["replicas"], run.manifest["replicas"][1]]
    found = summary(replace(run, manifest=run.manifest | {"lives": LIVES, "replicas": replicas})).lives
    assert (found["link_failures"], found["resent"]) == (5, 6)
    first = {"name": "prefill", "replicas_paid": 1.0, "replicas_up": 1.0, "unserved_s": 1.0, "starts": 2, "failures": 0}
    assert found["pools"][0] == first | {"availability": 0.9}
    assert found["pools"][1] == {
        "name": "decode", "replicas_paid": close(0.9), "replicas_up": close(0.7), "unserved_s": 2.0, "starts": 1,
        "failures": 1, "availability": 0.8,
    }  # fmt: skip


def test_tokens_from_stores_are_a_share_of_all_prompts() -> None:
    """Forty-eight tokens of prompts, of which one store gave 12 and another, in two pools, 6 and 18."""
    base = handmade.two_requests()
    uses = [{"name": "cpu", "found": 12}, {"name": "disk", "found": 6}, {"name": "disk", "found": 18}]
    found = summary(replace(base, manifest=base.manifest | {"stores": uses}))
    assert found.stores == close({"cpu": 0.25, "disk": 0.5})
    assert summary_json(found)["stores"] == close({"cpu": 0.25, "disk": 0.5})


@pytest.mark.parametrize(("modelled", "warned"), [(0.0199, False), (0.0201, True)])
def test_a_fifth_of_modelled_time_is_where_the_warning_begins(modelled: float, warned: bool) -> None:
    parts = {"measured": handmade.flat_times(0.1 - modelled), "modelled": handmade.flat_times(modelled)}
    base = handmade.two_requests()
    run = handmade.run(base.requests, base.iterations, sources=(parts,), manifest={"warnings": ["first"]})
    warnings = summary(run).warnings
    assert warnings[0] == "first"
    assert len(warnings) == 1 + warned


def test_arrivals_count_where_they_arrive_and_ends_where_they_end() -> None:
    """Measured from 1 to 10: request 0 arrives before and ends inside, request 2 ends after."""
    requests = handmade.requests(
        arrival=[0.0, 1.0, 10.0],
        prompt_tokens=[5, 6, 7],
        output_tokens=[2, 2, 2],
        scheduled=[0.0, 1.0, 10.0],
        first_token=[1.5, 2.0, 10.5],
        finish=[2.0, 3.0, 11.0],
        preemptions=[4, 1, 0],
    )
    found = summary(handmade.run(requests, handmade.iterations()), SLO(ttft=1.2), exclude_warmup=True)
    assert (found.total, found.finished, found.preemptions) == (2, 2, 1)
    assert found.request_throughput == close(2 / 9)  # requests 0 and 1 end inside
    assert found.goodput == close(1 / 9)  # of which request 1 had its first token in time
    assert found.attainment == 1.0
    assert found.total_token_throughput == close((2 + 5 + 6) / 9)  # first tokens and prompts of requests 0 and 1
    assert found.latencies["e2el"].count == 2
