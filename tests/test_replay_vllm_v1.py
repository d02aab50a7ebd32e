"""The reference equals every schedule that was recorded from vLLM's real v1 schedulers, step by step."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.replay.recording import read_recording
from windtunnel.replay.vllm_v1 import VERSIONS, replay

RECORDINGS = Path(__file__).parents[2] / "shared" / "vllm_schedules"
PATHS = sorted(RECORDINGS.glob("v1*/*.in.json"))
TIMES = ("t_sched", "t_start", "t_end", "makespan", "ttft", "first_token_t", "e2e_t")
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


@pytest.mark.skipif(not PATHS, reason="the recordings are not here")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.name[:2]}")
def test_equals_the_real_scheduler(path: Path) -> None:
    theirs = recorded(path)
    version = next(name for name, release in VERSIONS.items() if release == theirs[0]["vllm"])
    ours = list(replay(read_recording(path), version))
    assert len(ours) == len(theirs)
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        check_equal(mine, real, f"record {number}")
