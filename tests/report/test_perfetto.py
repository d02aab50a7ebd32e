"""Traces: steps, requests and counters, and a bound on their size."""

import json
from dataclasses import fields, replace

import handmade
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import unroll
from windtunnel.report.perfetto import perfetto, trace_text
from windtunnel.simulate.run import Handovers, Run


def test_perfetto_trace() -> None:
    steps = unroll(handmade.preempted())
    document = perfetto(steps)
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [round(event["ts"]) for event in spans] == [0, 100_000, 200_000, 300_000]
    assert all(event["dur"] == pytest.approx(100_000) for event in spans)
    assert [event["name"] for event in spans] == ["prefill", "decode", "prefill + decode", "decode"]
    for identity in ("0", "1"):
        mine = [event for event in events if event.get("id") == identity]
        assert [event["ph"] for event in mine].count("b") == [event["ph"] for event in mine].count("e") == 4
        assert mine[0]["name"] == mine[-1]["name"] == f"request {identity}"
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"running", "waiting", "KV cache used"}
    assert document["otherData"]["steps_per_event"] == 1


def test_perfetto_size_is_bounded_and_told() -> None:
    log = handmade.iterations({"start": 0.0, "steps": 900, "decodes": 1, "kv_tokens": 9})
    arrival = np.arange(300) / 10
    requests = handmade.requests(arrival=arrival, scheduled=arrival, first_token=arrival, finish=arrival + 1)
    document = perfetto(unroll(handmade.run(requests, log)), max_events=400)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert document["otherData"]["steps_per_event"] == 5
    assert len(spans) == 180
    assert sum(event["args"]["steps"] for event in spans) == 900
    assert document["otherData"]["requests_shown"] == 25
    assert sum(event["ph"] == "b" and event["name"].startswith("request") for event in document["traceEvents"]) == 25
    assert json.loads("".join(trace_text(document))) == document
    with pytest.raises(InputError, match="max_events=5"):
        perfetto(unroll(handmade.preempted()), max_events=5)


def test_phases_and_steps_by_hand() -> None:
    """Microseconds after zero; tracks of two ranks with two stages each; three steps of 0.1 s are two events."""
    requests = handmade.requests(
        arrival=[1.0], preemptions=[3], scheduled=[1.5], first_token=[2.0], finish=[4.0], prompt_tokens=[7]
    )
    log = handmade.iterations(
        {"start": 1.5, "chunk_tokens": 7, "used_blocks": 4, "waiting": 2},
        {"start": 1.6, "steps": 2, "decodes": 1, "kv_tokens": 7, "used_blocks": 5},
    )
    document = perfetto(unroll(handmade.run(requests, log)), max_events=404)
    events = document["traceEvents"]
    spans = [(e["name"], e["ph"], e["ts"]) for e in events if e.get("cat") == "request"]
    assert spans == [
        ("request 0", "b", 1e6),
        ("queued", "b", 1e6),
        ("queued", "e", 1.5e6),
        ("prefill", "b", 1.5e6),
        ("prefill", "e", 2e6),
        ("decode", "b", 2e6),
        ("decode", "e", 4e6),
        ("request 0", "e", 4e6),
    ]
    steps = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in steps] == [(1, 0, "prefill"), (1, 0, "decode"), (1, 0, "decode")]
    assert steps[0]["args"] == {
        "steps": 1, "prefill_tokens": 7, "decode_tokens": 0, "used_blocks": 4, "waiting": 2
    }  # fmt: skip
    cache = [e["args"]["percent"] for e in events if e.get("name") == "KV cache used"]
    assert max(cache) == pytest.approx(5.0, abs=0.1)
    titles = [(e["args"]["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M"]
    assert titles == [("deployment", 0, None), ("replica 0 · 2 × H100 SXM", 1, None), ("steps", 1, 0)]


def test_tracks_name_ranks_and_lanes() -> None:
    manifest = {"replicas": [{"pool": 0, "lanes": 2, "stages": 2}]}
    empty = handmade.run(handmade.requests(arrival=[]), handmade.iterations(), manifest=manifest)
    titles = [e["args"]["name"] for e in perfetto(unroll(empty))["traceEvents"] if e["name"] == "thread_name"]
    assert titles == [f"steps of rank {rank}, lane {lane} of the pipeline" for rank in (0, 1) for lane in (0, 1)]


def test_parts_and_transfers_of_pools_apart() -> None:
    """In µs: request 0 has all six parts and decode, request 1 no empty ones; each transfer is on the link's track."""
    events = perfetto(unroll(handmade.disaggregated()))["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    first = [(event["name"], round(event["ts"])) for event in begun if event["id"] == "0"]
    assert first == [
        ("request 0", 0), ("prefill", 0), ("held", 100_000), ("admission", 125_000), ("transfer", 250_000),
        ("join", 375_000), ("decode", 500_000),
    ]  # fmt: skip
    assert [event["name"] for event in begun if event["id"] == "1"] == [
        "request 1", "queue", "prefill", "transfer", "decode",
    ]  # fmt: skip
    sent = [event for event in begun if event["cat"] == "transfer"]
    assert [(event["name"], event["pid"], round(event["ts"]), event["args"]["bytes"]) for event in sent] == [
        ("KV of request 0", 3, 250_000, 4096), ("KV of request 1", 3, 1_100_000, 2048),
    ]  # fmt: skip
    assert sent[0]["args"] == {"bytes": 4096, "from_replica": 0, "to_replica": 1}
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles[1].startswith("replica 0 · prefill")
    assert titles[3] == "link · KV on its way"
    assert len(begun) == sum(event["ph"] == "e" for event in events)


def counters(name: str, run: Run) -> list[tuple[float, float]]:
    events = perfetto(unroll(run))["traceEvents"]
    return [(e["ts"], *e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == name]


def test_counters_are_means_over_a_thousandth_of_the_run() -> None:
    """0.4 s long: bins of 400 µs from the first arrival on; request 0 waits for nothing, request 1 for 0.05 s."""
    run = handmade.two_requests()
    running, waiting = counters("running", run), counters("waiting", run)
    assert len(running) == len(waiting) == 1000
    assert [time for time, _ in running[:3]] == pytest.approx([0.0, 400.0, 800.0])
    assert (running[1][1], running[999][1], waiting[1][1]) == (1.0, 2.0, 0.0)
    assert sum(value for _, value in waiting) == pytest.approx(125, abs=1)
    assert perfetto(unroll(run))["traceEvents"][-3000]["args"] == {"requests": 0}
    assert counters("KV cache used", run)[1][1] == 2.0
    assert sum(value for _, value in counters("output tokens", run)) * 0.0004 == pytest.approx(6)


def test_steps_are_complete_events_on_the_track_of_their_rank() -> None:
    """Two ranks; two neighbouring steps of one share an event, which begins with the first and ends with the last."""
    log = handmade.iterations(
        {"start": 0.0, "lane": 0, "chunk_tokens": 8, "used_blocks": 1, "waiting": 3},
        {"start": 0.0, "lane": 1, "chunk_tokens": 4, "used_blocks": 7},
        {"start": 0.1, "lane": 0, "decodes": 1, "kv_tokens": 8, "used_blocks": 2},
        {"start": 0.2, "lane": 0, "steps": 120, "decodes": 1, "kv_tokens": 9, "used_blocks": 2},
    )
    run = handmade.run(handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[9.0]), log, lanes=2)
    document = perfetto(unroll(run), max_events=124)
    assert document["otherData"]["steps_per_event"] == 2
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    first, second, last = spans[0], spans[1], spans[-1]
    assert (first["tid"], first["name"], first["cat"], first["pid"]) == (0, "prefill + decode", "step", 1)
    assert (first["ts"], first["dur"]) == (0.0, pytest.approx(200_000))
    assert first["args"] == {"steps": 2, "prefill_tokens": 8, "decode_tokens": 1, "used_blocks": 1, "waiting": 3}
    assert (second["ts"], second["dur"]) == (pytest.approx(200_000), pytest.approx(200_000))
    assert (last["tid"], last["args"]["prefill_tokens"], last["dur"]) == (1, 4, pytest.approx(100_000))
    assert document["otherData"] == {
        "producer": "windtunnel 0.1.0", "steps": 123, "steps_per_event": 2, "requests": 1, "requests_shown": 1
    }  # fmt: skip
    titles = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert titles == ["steps of rank 0", "steps of rank 1"]


def test_transfers_end_when_they_end_and_requests_are_left_out_evenly() -> None:
    """A request has 8 events, 18 where pools are apart: of 2, half of 100 events hold all; of 20, every eighth."""
    document = perfetto(unroll(handmade.disaggregated()))
    ends = [e["ts"] for e in document["traceEvents"] if e["ph"] == "e" and e["cat"] == "transfer"]
    assert ends == pytest.approx([375_000, 1_600_000])
    assert all(e["tid"] == 0 for e in document["traceEvents"] if e.get("cat") == "transfer")
    arrival = np.zeros(20)
    finished = handmade.requests(arrival=arrival, scheduled=arrival, first_token=arrival + 1, finish=arrival + 2)
    plain = handmade.run(finished, handmade.iterations())
    assert perfetto(unroll(plain), max_events=100)["otherData"]["requests_shown"] == 5, "every fourth: 160 / 50"
    apart = handmade.disaggregated()
    assert apart.handovers is not None
    rows = np.zeros(20, dtype=np.int64)
    parts = {field.name: getattr(apart.handovers, field.name)[rows] for field in fields(apart.handovers)}
    many = replace(apart, requests=replace(finished, replica=rows + 1), handovers=Handovers(**parts))
    assert perfetto(unroll(many), max_events=100)["otherData"]["requests_shown"] == 3, "every eighth: 360 / 50"


def test_requests_that_got_no_token_and_refused_ones() -> None:
    """One is refused at once and stands at the deployment; one waits and has no phase at all."""
    run = handmade.run(
        handmade.requests(arrival=[0.0, 0.0], status=[1, 3], replica=[-1, 0], first_token=[np.nan, np.nan]),
        handmade.iterations(),
    )
    assert [e for e in perfetto(unroll(run))["traceEvents"] if e.get("cat") == "request"] == []
    begun = handmade.run(handmade.requests(arrival=[0.0], replica=[-1], scheduled=[0.5]), handmade.iterations())
    events = [e for e in perfetto(unroll(begun))["traceEvents"] if e.get("cat") == "request"]
    assert [(e["name"], e["pid"]) for e in events] == [
        ("request 0", 0), ("queued", 0), ("queued", 0), ("request 0", 0)
    ]  # fmt: skip
    assert (events[0]["id"], events[-1]["ts"], events[0]["tid"]) == ("0", 500_000, 0)
