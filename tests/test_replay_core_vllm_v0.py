"""vLLM's v0 scheduler of the compiled core writes the same step records as the reference."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_engines import RECORDINGS, check_equal, lines, written
from test_replay_vllm_v0 import random_input, recording

from windtunnel.errors import InputError
from windtunnel.replay.recording import Recording, read_recording
from windtunnel.replay.vllm_v0 import replay

VERSION = "vllm-0.8-v0"
PATHS = sorted(RECORDINGS.glob("v0/*.in.json"))
CASES = int(os.environ.get("WINDTUNNEL_REPLAY_CASES", "1000"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_REPLAY_SEED", "1000000"))
SWAPPING = {"num_gpu_blocks": 5, "num_cpu_blocks": 5, "block_size": 4, "preemption_mode": "swap"}


@pytest.mark.skipif(not PATHS, reason="the recordings are not here")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name[:5])
def test_every_recording(path: Path) -> None:
    records = check_equal(replay, read_recording(path), VERSION)
    assert records[-1]["type"] == "summary"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_000))
def test_random_workloads(seed: int) -> None:
    check_equal(replay, random_recording(seed), VERSION)


@pytest.mark.long
def test_random_workloads_at_length() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        check_equal(replay, random_recording(seed), VERSION, f"seed {seed}")


def random_recording(seed: int) -> Recording:
    return written(random_input(random.Random(seed)))


def test_blocks_travel_in_both_directions() -> None:
    records = check_equal(replay, recording(SWAPPING, (0.0, 8, 4), (0.0, 8, 4)), VERSION)
    assert [record["swapped_out"] for record in records[1:-1] if record["blocks_swap_out"]] == [["r1"]]
    assert [record["swapped_in"] for record in records[1:-1] if record["blocks_swap_in"]] == [["r1"]]


def test_the_errors_name_the_recordings_requests() -> None:
    no_room = recording(SWAPPING | {"num_cpu_blocks": 1}, (0.0, 8, 4), (0.0, 8, 4))
    check_equal(replay, no_room, VERSION)
    assert "no room to swap 'r1' out" in lines(replay, no_room, VERSION, "core")[-1]


def test_ignored_requests_and_standstills_are_records_too() -> None:
    records = check_equal(replay, recording({"num_gpu_blocks": 2}, (0.25, 100, 5), (0.5, 10, 1)), VERSION)
    assert records[1]["ignored"] == ["r0"]
    held = {"num_gpu_blocks": 200, "num_cpu_blocks": 400, "block_size": 1, "preemption_mode": "swap"}
    records = check_equal(replay, recording(held, (0.0, 1, 9), (0.0, 197, 9)), VERSION)
    assert records[-2]["type"] == "stuck"


def test_a_budget_below_the_number_of_places_holds() -> None:
    config = {"num_gpu_blocks": 50, "max_num_seqs": 8, "max_num_batched_tokens": 3, "enable_chunked_prefill": True}
    records = check_equal(replay, recording(config, *((0.0, 2, 5) for _ in range(6))), VERSION)
    assert max(sum(record["scheduled"].values()) for record in records[1:-1]) == 3


def test_a_prompt_swapped_out_part_way_ends_the_engine_with_prefix_caching() -> None:
    check_equal(replay, random_recording(76), VERSION)
    assert "part-way through its prompt" in lines(replay, random_recording(76), VERSION, "core")[-1]


def test_other_engines_are_refused() -> None:
    with pytest.raises(InputError, match="unknown engine 'cor': did you mean 'core'"):
        replay(recording(SWAPPING, (0.0, 8, 4)), VERSION, "cor")
