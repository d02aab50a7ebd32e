"""What a replay writes by the compiled core, beside what it writes by the readable text."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oracle.vllm_v1 import replay as vllm_v1_oracle

from windtunnel.errors import InputError
from windtunnel.replay import vllm_v1
from windtunnel.replay.recording import Recording, read_recording

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
