"""What a replay writes by the compiled core, beside what it writes by the readable text."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from oracle.vllm_v1 import replay as vllm_v1_oracle

from windtunnel.core.clients import waits_of
from windtunnel.core.engine import arrivals_of, turns_of, with_room
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import JUMPS, NONE, RELEASE, attributes, records
from windtunnel.errors import InputError
from windtunnel.replay import vllm_v1
from windtunnel.replay.lane import demand
from windtunnel.replay.recording import Recording, read_recording
from windtunnel.replay.stepper import ONLY, Stepper

RECORDINGS = Path(__file__).parents[3] / "shared" / "vllm_schedules"
OWN_RECORDINGS = Path(__file__).with_name("recordings")
"""Made by record_vllm_v1.py."""
V1_PATHS = sorted([*OWN_RECORDINGS.glob("v1-0.33/*.in.json"), *RECORDINGS.glob("v1*/*.in.json")])
V1_VERSIONS = {"v1-0.33": "vllm-0.33", "v1": "vllm-0.32", "v1-0.20.2": "vllm-0.20", "v1-0.10.2": "vllm-0.10"}
"""Scheduler of the recordings in a folder of this name."""
Replay = Callable[[Recording, str], Iterator[dict[str, Any]]]


def lines(replay: Replay, recording: Recording, version: str) -> list[str]:
    """The lines of the output; an error of the input is the last one."""
    written: list[str] = []
    try:
        written.extend(json.dumps(record, allow_nan=False) for record in replay(recording, version))
    except InputError as error:
        written.append(f"error: {error}")
    return written


def check_equal(recording: Recording, version: str, where: str = "") -> list[dict[str, Any]]:
    """Both texts of vLLM v1 write the same lines; returns the records."""
    reference = lines(vllm_v1_oracle.replay, recording, version)
    core = lines(vllm_v1.replay, recording, version)
    for number, (expected, found) in enumerate(zip(reference, core, strict=False)):
        assert found == expected, f"{where} record {number}"
    assert len(core) == len(reference), where
    return [json.loads(line) for line in reference if not line.startswith("error: ")]


def written(document: dict[str, Any]) -> Recording:
    """A recording's input as it is read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.in.json"
        path.write_text(json.dumps(document))
        return read_recording(path)


def whole_run(core: Stepper, recording: Recording, jumps: bool = True) -> Any:
    """The lane's state after all requests of a recording, which release each other."""
    rows = recording.requests
    n, counts = len(rows), [len(row.after) for row in rows]
    places = {row.rank: place for place, row in enumerate(rows)}
    parents = np.array([places[parent] for row in rows for parent in row.after], np.int64)
    found = replace(
        demand(rows, [row.arrival for row in rows], [row.output_tokens for row in rows], 1, [1] * n),
        after=(np.cumsum([0, *counts]), parents),
    )
    state = core.state._replace(
        waits=waits_of(found),
        think_time=np.array([float(row.think_time) for row in rows]),
        releases=attributes(records(n, RELEASE)),
        gate=np.full(n, NONE, np.int64),
    )
    state.counters[JUMPS] = jumps
    order, course = turns_of(state, (ONLY,), True)
    while loop(state, order, course, arrivals_of(found), None, None, (ONLY, ONLY), 0, np.inf, None, None) == FULL:
        state = with_room(state)
    return state
