"""Whole runs of the compiled core, with its jumps over equal steps, give the times that were recorded from the engines.

The recorder's linear time of a step becomes tables, in ticks of 100 ns, which are whole numbers: nothing is rounded.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.replay_engines import OWN_RECORDINGS, RECORDINGS, V1_VERSIONS
from windtunnel.core.engine import turns_of, with_room
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import JUMPS, ROWS
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.replay import sglang, stepper, vllm_v0, vllm_v1
from windtunnel.replay.recording import TICKS_PER_SECOND, known, read_recording
from windtunnel.replay.stepper import ONLY, Stepper
from windtunnel.replay.vllm_v1_core import Core

PATHS = sorted([*OWN_RECORDINGS.glob("v1-0.33/*.in.json"), *RECORDINGS.glob("*/*.in.json")])
BASE, TOKEN, CACHED_TOKEN = 100_000, 1_000, 1
"""Ticks: 10 ms, 100 µs a token, 100 ns a cached token."""
MOST_TOKENS, MOST_REQUESTS, LONGEST = 24_576, 256, 49_152


def tables(*_: float, cached_token: float = CACHED_TOKEN, **__: int) -> BatchTimes:
    """The recorder's formula."""
    tokens = BASE + TOKEN * np.arange(MOST_TOKENS + 1.0)
    contexts = np.array([0.0, LONGEST])
    chunks = np.array([0, 1, MOST_TOKENS])
    none = np.zeros(MOST_REQUESTS + 1)
    return BatchTimes(
        decode_tokens=tokens,
        mixed_tokens=tokens,
        sequences=none,
        host_overlapped=none,
        host_serial=none,
        context_knots=contexts.astype(np.int64),
        decode_attention=cached_token * np.arange(MOST_REQUESTS + 1.0)[:, None] * contexts,
        chunk_knots=chunks,
        prefill_attention=cached_token * (chunks > 0)[:, None] * contexts,
        prefill_base=0.0,
        expert_tokens=np.zeros(1),
        padded=np.arange(MOST_TOKENS + 1),
        graph_tokens=0,
    )


def lane(path: Path, config: dict[str, Any]) -> Stepper:
    """The recording's requests before a lane of its scheduler."""
    recorded = read_recording(path)
    if path.parent.name == "sglang":
        return sglang.Scheduler(recorded.requests, config).stepper
    if path.parent.name == "v0":
        v0 = vllm_v0.Scheduler(replace(recorded, config=config))
        per_block = recorded.batch_time.get("per_swap_block", 0.0) * TICKS_PER_SECOND
        v0.pool["swap_seconds_per_block"] = per_block
        v0.columns["arrival"] = [row.arrival for row in recorded.requests]
        return v0.stepper
    full = known(config, vllm_v1.CONFIG)
    return Core(recorded, vllm_v1.limits(full), vllm_v1.policy(full, V1_VERSIONS[path.parent.name])).stepper


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.name[:5]}")
def test_whole_runs_take_the_recorded_times(path: Path, jumps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        header, *steps, summary = (json.loads(line) for line in lines)
    monkeypatch.setattr(stepper, "linear", tables)
    core = lane(path, header["config"])
    rows = core.state.requests
    core.state.counters[JUMPS] = jumps
    order = np.argsort(rows["arrival"], kind="stable")
    turns, course = turns_of(core.state, (ONLY,), False)
    while loop(core.state, turns, course, order, None, None, (ONLY, ONLY), 0, np.inf, None, None) == FULL:
        core.state = with_room(core.state)
    taken = core.state.rows["steps"][: core.state.counters[ROWS]]
    assert taken.sum() == sum(bool(step["scheduled"]) for step in steps)
    assert (taken.max() > 1) == jumps
    requests = list(summary["requests"].items())
    if header["config"].get("policy") == "priority":  # the core takes equals by number, the engine by name
        requests.sort(key=lambda row: (round(row[1]["first_token_t"] - row[1]["ttft"], 7), row[0]))
    for number, (name, recorded) in zip(order, requests, strict=True):
        for column, key in (("first_token", "first_token_t"), ("finish", "e2e_t")):
            expected = np.nan if recorded[key] is None else recorded[key]
            found = float(rows[column][number]) / TICKS_PER_SECOND
            assert np.isclose(found, expected, rtol=0, atol=1e-8, equal_nan=True), f"{name} {column}"
        if (preemptions := recorded.get("preemptions", recorded.get("retractions"))) is not None:
            assert rows["preemptions"][number] == preemptions, name
