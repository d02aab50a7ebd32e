"""vLLM's v1 schedulers of the compiled core write the same step records as the readable text."""

import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replay.handmade_schedules import random_recording, recording, request
from replay.replay_engines import V1_PATHS, V1_VERSIONS, check_equal
from windtunnel.replay.lane import hash_ids
from windtunnel.replay.recording import read_recording
from windtunnel.replay.vllm_v1 import VERSIONS

CASES = int(os.environ.get("WINDTUNNEL_REPLAY_CASES", "1000"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_REPLAY_SEED", "1000000"))


@pytest.mark.parametrize("path", V1_PATHS, ids=lambda path: f"{path.parent.name}/{path.name[:2]}")
def test_every_recording(path: Path) -> None:
    records = check_equal(read_recording(path), V1_VERSIONS[path.parent.name])
    assert records[-1]["type"] == "summary"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_000), st.sampled_from(sorted(VERSIONS)))
@example(1_000_320, "vllm-0.10")  # a victim is scheduled once too often, in the step in which it has to go
def test_random_workloads(seed: int, version: str) -> None:
    check_equal(random_recording(seed), version)


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_random_workloads_at_length(version: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        check_equal(random_recording(seed), version, f"seed {seed}")


def test_a_preempted_request_whose_last_token_is_in_flight_stands_in_the_queue() -> None:
    tight = {"num_gpu_blocks": 5, "enable_prefix_caching": False, "async_scheduling": True}
    rows = [request(4, 12), *(request(4, output) for output in (5, 6))]
    for policy in ("fcfs", "priority"):
        records = check_equal(recording(tight | {"policy": policy}, *rows), "vllm-0.32")
        ended = set(chain.from_iterable(record["finished"] for record in records[1:-1]))
        resumed = set(chain.from_iterable(record["resumed"] for record in records[1:-1]))
        preempted = set(chain.from_iterable(record["preempted"] for record in records[1:-1]))
        assert preempted - resumed
        assert preempted - resumed <= ended


def test_an_endless_circle_is_noticed_by_both() -> None:
    config = {"policy": "priority", "num_gpu_blocks": 5, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    config |= {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 4}
    records = check_equal(recording(config, request(16, 1), request(16, 1)), "vllm-0.32")
    assert records[-1]["type"] == "stuck"


def test_contents_are_named_by_what_stands_before_them() -> None:
    offsets, values = hash_ids([(1, 2, 3, 4, 5), (3, 4, 1, 2), (1, 2, 3, 4), (1,)], 2)
    assert offsets.tolist() == [0, 2, 4, 6, 6]
    assert values[:2].tolist() == values[4:].tolist()
    assert len(np.unique(values)) == 4
