"""vLLM 0.33 with what few servers turn on: each step is the recorded one, in the core and in the oracle, and in whole
runs."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.vllm_v1 import replay as vllm_v1_oracle

from replay.handmade_schedules import random_images, recording, request
from replay.replay_engines import OWN_RECORDINGS, RECORDINGS, check_equal
from replay.test_core_runs import tables
from windtunnel.core.engine import turns_of, with_room
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import JUMPS, ROWS
from windtunnel.errors import InputError
from windtunnel.policy import VllmV1
from windtunnel.policy.encoder import Encoder
from windtunnel.replay import stepper, vllm_v1
from windtunnel.replay.recording import TICKS_PER_SECOND, known, read_recording
from windtunnel.replay.stepper import ONLY
from windtunnel.replay.vllm_v1_core import Core

SHARED = RECORDINGS.with_name("recordings")
IN_RUNS, IN_STEPS = ("interval", "lora", "encoder"), ("spec",)
"""``spec``: each step is decided singly, and the recorder counts drafts that are wrong, as the GPU does not."""


def paths(*names: str) -> list[Path]:
    folders = [folder / f"v1-0.33-{name}" for name in names for folder in (OWN_RECORDINGS, SHARED)]
    return sorted(path for folder in folders for path in folder.glob("*.in.json"))


def name_of(path: Path) -> str:
    return f"{path.parent.name.removeprefix('v1-0.33-')}/{path.name[:2]}"


PATHS = paths(*IN_RUNS)
TEXTS = {"oracle": vllm_v1_oracle.replay, "core": vllm_v1.replay}


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", [*PATHS, *paths(*IN_STEPS)], ids=name_of)
def test_each_step_is_the_recorded_one(path: Path, text: str) -> None:
    expected, found = recorded(path), list(TEXTS[text](read_recording(path), "vllm-0.33"))
    for one, other in zip(found, expected, strict=False):
        assert one == other
    assert len(found) == len(expected)


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_whole_runs_take_the_recorded_times(path: Path, jumps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "linear", tables)
    header, *steps, summary = recorded(path)
    config = known(header["config"], vllm_v1.CONFIG)
    state = Core(read_recording(path), vllm_v1.limits(config), vllm_v1.policy(config, "vllm-0.33")).stepper.state
    state.counters[JUMPS] = jumps
    order, (turns, course) = np.argsort(state.requests["arrival"], kind="stable"), turns_of(state, (ONLY,), False)
    while loop(state, turns, course, order, None, None, (ONLY, ONLY), 0, np.inf, None, None) == FULL:
        state = with_room(state)
    assert state.rows["steps"][: state.counters[ROWS]].sum() == sum(bool(step["scheduled"]) for step in steps)
    for number, (name, one) in zip(order, summary["requests"].items(), strict=True):
        for column, key in (("first_token", "first_token_t"), ("finish", "e2e_t")):
            found = float(state.requests[column][number]) / TICKS_PER_SECOND
            assert np.isclose(found, one[key], rtol=0, atol=1e-8), f"{name} {column}"


def test_images_have_to_fit() -> None:
    config = {"encoder_compute_budget": 30, "encoder_cache_size": 20}
    rows = [request(40, 1, images=[[0, 25, "one"]])]
    with pytest.raises(InputError, match="an image of 25 embeddings never fits encoder_compute_budget=30 and"):
        list(vllm_v1.replay(recording(config, *rows), "vllm-0.33"))
    with pytest.raises(InputError, match="encoder_compute_budget=0"):
        list(vllm_v1.replay(recording({}, *rows), "vllm-0.33"))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_000))
def test_random_images(seed: int) -> None:
    check_equal(random_images(seed), "vllm-0.33")


def test_an_interval_is_positive() -> None:
    with pytest.raises(InputError, match="prefill_schedule_interval=0: must be ≥ 1"):
        VllmV1(prefill_schedule_interval=0)


@pytest.mark.parametrize("setting", [{"prefill_schedule_interval": 2}, {"max_loras": 1}, {"encoder": Encoder(1, 1)}])
def test_pipelines_know_none_of_them(setting: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not simulated in a pipeline"):
        VllmV1(pipeline_parallel_size=2, **setting)
