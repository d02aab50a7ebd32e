"""Runs of prefill and decode pools whose replicas start, stop or fail: what they report."""

import re
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.metrics import unroll
from windtunnel.report.html import html_report
from windtunnel.report.perfetto import perfetto
from windtunnel.simulate.run import ABORTED, FINISHED

LOAD: dict[str, Any] = {
    "device": "l40s",
    "random_input_len": 1000,
    "random_output_len": 60,
    "num_prompts": 120,
    "request_rate": 4,
    "router": "least_outstanding",
    "perf": "roofline",
}
POOLS = {"prefill": "replicas=2", "decode": "replicas=2"}
FAULTS = ("pool=prefill mtbf=8 down=3", "pool=decode mtbf=8 down=3", "part=link mtbf=10 down=1")


def run(fail: Any = (), autoscale: Any = (), then: str = "retry", **more: Any) -> wt.Run:
    """A hundred and twenty requests in half a minute."""
    faults = tuple(f"{words} on_failure={then}" for words in fail)
    return wt.simulate("Qwen/Qwen3-8B", **LOAD | POOLS | {"fail": faults, "autoscale": autoscale} | more)


@pytest.mark.parametrize("then", ["retry", "migrate", "lost"])
@pytest.mark.parametrize("handover", ["vllm-0.32-nixl-pull", "trtllm-1.0", "distserve", "sglang-0.5-bootstrap"])
def test_every_request_ends_and_parts_add_up(then: str, handover: str) -> None:
    found = run(FAULTS, then=then, handover=handover)
    lives, requests, parts = found.manifest["lives"], found.requests, found.handovers
    assert parts is not None
    assert min(pool["failures"] for pool in lives["pools"]) > 0
    assert lives["link_failures"] > 0
    assert np.isin(requests.status, (FINISHED, ABORTED)).all()
    assert np.flatnonzero(requests.status == ABORTED).tolist() == lives["lost"]
    assert bool(lives["lost"]) == (then == "lost")
    assert bool(lives["retries"]) == (then != "lost")
    columns = [getattr(parts, f"ttft_{name}") for name in ("queue", "prefill", "held", "admission", "transfer", "join")]
    ttft = requests.first_token - requests.arrival
    known = ~np.isnan(ttft)
    assert (np.sum(columns, axis=0)[known] == ttft[known]).all()
    assert min(column[known].min() for column in columns) > -1e-8
    ended = requests.status == FINISHED
    assert (requests.finish[ended] >= requests.first_token[ended]).all()


@pytest.mark.long  # minutes of compilation; core/fleet/test_pools has these engines without the compiler
@pytest.mark.parametrize("engine", ["sglang-0.5", "trtllm-1.0"])
def test_every_engine_has_failures(engine: str) -> None:
    found = run(FAULTS, then="migrate", engine=engine)
    assert found.manifest["lives"]["retries"] > 0
    assert (found.requests.status == FINISHED).all()


def test_a_client_whose_request_goes_on_has_all_its_gaps() -> None:
    """Together they last from the first token to the last, whatever failed between."""
    found = run(FAULTS[:2], then="migrate")
    calm = run()
    assert found.manifest["lives"]["retries"] > 0
    for each in (found, calm):
        gaps = wt.summary(each).latencies["itl"]
        lasts = float((each.requests.finish - each.requests.first_token).sum())
        assert gaps.count == int((each.requests.output_tokens - 1).sum())
        assert gaps.mean * gaps.count == pytest.approx(lasts)


def test_each_pool_says_what_became_of_it() -> None:
    found = wt.summary(run(FAULTS))
    lives = wt.summary_json(found)["lives"]
    assert [pool["name"] for pool in lives["pools"]] == ["prefill", "decode"]
    for name in ("starts", "failures"):
        assert lives[name] == sum(pool[name] for pool in lives["pools"])
    for name in ("replicas_paid", "replicas_up"):
        assert lives[name] == pytest.approx(sum(pool[name] for pool in lives["pools"]))
    assert [pool["replicas_paid"] for pool in lives["pools"]] == pytest.approx([2, 2])
    assert all(1 < pool["replicas_up"] < 1.99 for pool in lives["pools"])
    assert lives["availability"] <= min(pool["availability"] for pool in lives["pools"]) < 1


def test_only_what_is_there_is_paid_and_counted() -> None:
    """One prefill replica would do: the other one costs nothing and does not make the pool look idle."""
    rules = "policy=foresight rps=50 most=2 interval=5"
    found, full = wt.summary(run(autoscale=f"pool=prefill {rules}")), wt.summary(run())
    assert found.lives["pools"][0]["replicas_paid"] == 1
    assert found.pools[0].cost_usd == pytest.approx(full.pools[0].cost_usd / 2, rel=0.05)
    assert found.pools[1].cost_usd == pytest.approx(full.pools[1].cost_usd, rel=0.05)
    assert found.pools[0].busy == pytest.approx(2 * full.pools[0].busy, rel=0.1)


def test_failures_stand_on_the_page_and_in_the_trace() -> None:
    found = run(FAULTS)
    steps, summary = unroll(found), wt.summary(found)
    text, lives = html_report(steps, summary), summary.lives
    assert f"{lives['retries']:,} requests tried again" in text
    assert lives["link_failures"] == 1
    assert "1 failure of the link" in text
    assert re.search("replicas paid.*<td>decode</td>|decode.*replicas up", text, re.DOTALL)
    events = perfetto(steps)["traceEvents"]
    states = [event for event in events if event.get("cat") == "state"]
    assert len(states) == len(found.manifest["lives"]["states"])
    assert {event["name"] for event in states} == {"failed", "link failed"}
    assert {event["pid"] for event in states if event["name"] == "link failed"} == {5}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"fail": "at=5"}, "fail: pool='': name one of 'prefill', 'decode'"),
        ({"fail": "pool=decode at=5 replica=2"}, "fail: replica=2: there are 2, counted from 0"),
        ({"fail": "part=link at=5", "handover": "ideal"}, "fail: part='link': nothing goes over one here"),
        ({"autoscale": "pool=decode most=3"}, "replicas=2: must be autoscale's most=3"),
        ({"autoscale": ("pool=decode most=2", "pool=decode most=2")}, "autoscale: pool=decode: is scaled twice"),
        ({"autoscale": "pool=prefil"}, "autoscale: unknown pool 'prefil': did you mean 'prefill'?"),
        (
            {"router": "conductor", "decode_router": "random", "fail": "pool=decode at=5"},
            "conductor: what it promises for replicas that start, stop or fail is not simulated",
        ),
    ],
)
def test_what_cannot_come_and_go_is_refused(words: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=re.escape(error)):
        wt.simulate("Qwen/Qwen3-8B", **LOAD | POOLS | words)


def test_a_pool_that_is_scaled_has_as_many_replicas_as_there_may_be() -> None:
    found = run(autoscale="pool=d most=3 policy=planner", decode="name=d", prefill="replicas=1")
    assert [pool["replicas"] for pool in found.manifest["pools"]] == [1, 3]
