"""Traces: steps, requests and counters, and a bound on their size."""

import json

import handmade
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import unroll
from windtunnel.report.perfetto import perfetto, trace_text


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
    titles = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert titles == ["deployment", "replica 0 · 2 × h100_sxm", "steps"]


def test_tracks_name_ranks_and_lanes() -> None:
    manifest = {"replicas": [{"pool": 0, "lanes": 2, "stages": 2}]}
    empty = handmade.run(handmade.requests(arrival=[]), handmade.iterations(), manifest=manifest)
    titles = [e["args"]["name"] for e in perfetto(unroll(empty))["traceEvents"] if e["name"] == "thread_name"]
    assert titles == [f"steps of rank {rank}, lane {lane} of the pipeline" for rank in (0, 1) for lane in (0, 1)]


def test_parts_and_transfers_of_pools_apart() -> None:
    """In µs: request 0 has all six parts and decode, request 1 no empty ones; each transfer is on the link's track."""
    events = perfetto(unroll(handmade.apart()))["traceEvents"]
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
