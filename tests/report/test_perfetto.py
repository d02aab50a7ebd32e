"""Traces: steps, requests and counters, and a bound on their size."""

import json
from pathlib import Path

import handmade
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import unroll
from windtunnel.report import perfetto, write_perfetto


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


def test_perfetto_size_is_bounded_and_told(tmp_path: Path) -> None:
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
    write_perfetto(tmp_path / "trace.json", document)
    assert json.loads((tmp_path / "trace.json").read_text()) == document
    with pytest.raises(InputError, match="max_events=5"):
        perfetto(unroll(handmade.preempted()), max_events=5)
