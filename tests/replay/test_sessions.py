"""Recorded sessions of vLLM 0.32: requests that wait for others, and prompts that begin with generated tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.vllm_v1 import replay as vllm_v1_oracle

from windtunnel.errors import InputError
from windtunnel.replay import vllm_v0, vllm_v1
from windtunnel.replay.lane import begins_of
from windtunnel.replay.recording import read_recording

SHARED = Path(__file__).parents[3] / "shared"
RECORDINGS = sorted((SHARED / "recordings" / "v1-sessions").glob("*.in.json"))
SAME = (
    "scheduled", "start_pos", "cached_hit", "preempted", "running_order", "waiting_order", "free_blocks", "emitted",
    "finished", "free_after_update", "arrived", "new", "resumed",
)  # fmt: skip


@pytest.mark.skipif(not RECORDINGS, reason="the recordings are not here")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_every_step_is_as_recorded(path: Path) -> None:
    with gzip.open(str(path).replace(".in.json", ".trace.jsonl.gz")) as file:
        wanted = [json.loads(line) for line in file]
    got = list(vllm_v1_oracle.replay(read_recording(path), "vllm-0.32"))
    steps = [[record for record in records if record["type"] == "step"] for records in (wanted, got)]
    assert len(steps[0]) == len(steps[1])
    for theirs, ours in zip(*steps, strict=True):
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        assert [ours["t_start"], ours["t_end"]] == pytest.approx([theirs["t_start"], theirs["t_end"]], abs=1e-7)
    for name, request in got[-1]["requests"].items():
        theirs = wanted[-1]["requests"][name]
        assert {key: theirs[key] for key in request} == pytest.approx(request, abs=1e-7)


def recording(tmp_path: Path, *requests: dict[str, Any], **config: Any) -> Path:
    path = tmp_path / "some.in.json"
    path.write_text(json.dumps({"config": config, "requests": list(requests)}))
    return path


FIRST = {"id": "a", "arrival": 0.0, "prompt_len": 20, "output_len": 30}
SECOND = {"id": "b", "after": ["a"], "think_time": 0.5, "begins": ["a", 40], "prompt_len": 50, "output_len": 2}


def test_the_second_turn_finds_prompt_and_answer_and_comes_after_its_think_time(tmp_path: Path) -> None:
    records = list(vllm_v1.replay(read_recording(recording(tmp_path, FIRST, SECOND)), "vllm-0.32"))
    last = records[-1]["requests"]
    assert last["b"]["arrival"] == pytest.approx(last["a"]["e2e_t"] + 0.5)
    assert [step["cached_hit"] for step in records if step.get("cached_hit")] == [{"b": 32}]


def test_beginnings_of_explicit_tokens(tmp_path: Path) -> None:
    rows = read_recording(recording(tmp_path, FIRST, SECOND, SECOND | {"id": "c", "begins": ["b", 45]})).requests
    others, tokens = begins_of(rows)
    np.testing.assert_array_equal(others, [-1, 0, 1])
    np.testing.assert_array_equal(tokens, [0, 40, 45])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SECOND | {"after": ["c"]}, "request 'b': 'c' is no earlier request"),
        (SECOND | {"begins": ["c", 2]}, "request 'b': 'c' is no earlier request"),
        (SECOND | {"think_time": -1.0}, "request 'b': times must be ≥ 0"),
        (FIRST, "1 requests have the id of another one"),
    ],
)
def test_bad_sessions(tmp_path: Path, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_recording(recording(tmp_path, FIRST, request_))


def test_other_schedulers_have_no_sessions(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="replayed through vLLM v1 and SGLang only"):
        list(vllm_v0.replay(read_recording(recording(tmp_path, FIRST, SECOND, num_gpu_blocks=100)), "vllm-0.8-v0"))
