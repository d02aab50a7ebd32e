"""Recorded sessions of vLLM 0.32: requests that wait for others, and prompts that begin with generated tokens."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.vllm_v1 import replay as vllm_v1_oracle

from replay.replay_engines import Replay, whole_run
from replay.test_core_runs import tables
from windtunnel.core.records import ROWS
from windtunnel.errors import InputError
from windtunnel.replay import stepper, vllm_v0, vllm_v1
from windtunnel.replay.lane import begins_of
from windtunnel.replay.recording import TICKS_PER_SECOND, known, read_recording
from windtunnel.replay.vllm_v1_core import Core

SHARED = Path(__file__).parents[3] / "shared"
RECORDINGS = sorted((SHARED / "recordings" / "v1-sessions").glob("*.in.json"))
WHOLE_RUNS = sorted((SHARED / "prototypes" / "sessions" / "rec0").glob("*.in.json"))
"""Recorded with steps that do not depend on contexts."""
VERSION = "vllm-0.32"
SAME = (
    "scheduled", "start_pos", "cached_hit", "preempted", "running_order", "waiting_order", "free_blocks", "emitted",
    "finished", "free_after_update", "arrived", "new", "resumed",
)  # fmt: skip


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(str(path).replace(".in.json", ".trace.jsonl.gz")) as lines:
        return [json.loads(line) for line in lines]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.skipif(not RECORDINGS, reason="the recordings are not here")
@pytest.mark.parametrize("replay", [vllm_v1_oracle.replay, vllm_v1.replay], ids=["readable", "core"])
@pytest.mark.parametrize("path", RECORDINGS, ids=name_of)
def test_every_step_is_as_recorded(path: Path, replay: Replay) -> None:
    wanted = recorded(path)
    got = list(replay(read_recording(path), VERSION))
    steps = [[record for record in records if record["type"] == "step"] for records in (wanted, got)]
    assert len(steps[0]) == len(steps[1])
    for theirs, ours in zip(*steps, strict=True):
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        assert [ours["t_start"], ours["t_end"]] == pytest.approx([theirs["t_start"], theirs["t_end"]], abs=1e-7)
    for name, request in got[-1]["requests"].items():
        theirs = wanted[-1]["requests"][name]
        assert {key: theirs[key] for key in request} == pytest.approx(request, abs=1e-7)


@pytest.mark.skipif(not WHOLE_RUNS, reason="the recordings are not here")
@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("path", WHOLE_RUNS, ids=name_of)
def test_whole_runs_take_the_recorded_times_and_find_the_recorded_tokens(
    path: Path, jumps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests release each other in the loop; all that its steps take is a base and their tokens."""
    monkeypatch.setattr(stepper, "linear", partial(tables, cached_token=0.0))
    run, (_, *steps, summary) = read_recording(path), recorded(path)
    config = known(run.config, vllm_v1.CONFIG)
    core = Core(run, vllm_v1.limits(config), vllm_v1.policy(config, VERSION))
    rows = replace(run, requests=tuple(core.lane.rows))
    state = whole_run(core.stepper, rows, jumps)
    taken = state.rows["steps"][: state.counters[ROWS]]
    assert taken.sum() == sum(bool(step["scheduled"]) for step in steps)
    assert (taken.max() > 1) == jumps
    wanted = [summary["requests"][row.id] for row in rows.requests]
    for column, key in (("arrival", "arrival"), ("first_token", "first_token_t"), ("finish", "e2e_t")):
        found = state.requests[column] / TICKS_PER_SECOND
        np.testing.assert_allclose(found, [row[key] for row in wanted], rtol=0, atol=1e-7, err_msg=column)
    hits = {name: step["cached_hit"].get(name, 0) for step in steps for name in step["new"]}
    assert state.requests["cached_tokens"].tolist() == [hits[row.id] for row in rows.requests]
    assert sum(hits.values()) > 0


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
