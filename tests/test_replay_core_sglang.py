"""SGLang's scheduler of the compiled core writes the same step records as the reference."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_engines import RECORDINGS, check_equal, written
from test_replay_sglang import VERSION, row, workload

from windtunnel.errors import InputError
from windtunnel.replay.recording import Recording, read_recording
from windtunnel.replay.sglang import replay

PATHS = sorted(RECORDINGS.glob("sglang/*.in.json"))
CASES = int(os.environ.get("WINDTUNNEL_REPLAY_CASES", "1000"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_REPLAY_SEED", "1000000"))


@pytest.mark.skipif(not PATHS, reason="the recordings are not here")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name[:5])
def test_every_recording(path: Path) -> None:
    records = check_equal(replay, read_recording(path), VERSION)
    assert records[-1]["type"] == "summary"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_000))
def test_random_workloads(seed: int) -> None:
    check_equal(replay, random_recording(seed), VERSION)


@pytest.mark.long
def test_random_workloads_at_length() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + CASES):
        check_equal(replay, random_recording(seed), VERSION, f"seed {seed}")


def random_recording(seed: int) -> Recording:
    return written(workload(random.Random(seed)))


def recording(rows: list[dict[str, Any]], **config: Any) -> Recording:
    return written({"config": config, "requests": rows})


def test_a_mixed_batch_has_taken_the_place_of_the_running_one() -> None:
    rows = [row("a", 3, 5), row("b", 3, 3, 0.011)]
    records = check_equal(replay, recording(rows, enable_mixed_chunk=True, chunked_prefill_size=8), VERSION)
    mixed = [(record["running"], list(record["scheduled"])) for record in records[1:-1] if record["mode"] == "mixed"]
    assert mixed == [([], ["b", "a"])]


def test_an_engine_that_dies_says_the_same() -> None:
    """More is generated than was declared: what was retracted comes back into memory that it does not have."""
    lengths = [(27, 11), (50, 2), (48, 7), (19, 2), (62, 14), (5, 15), (36, 10), (31, 3), (10, 19), (62, 7)]
    rows = [row(f"r{i}", prompt, output) for i, (prompt, output) in enumerate(lengths)]
    config = {"max_total_tokens": 200, "max_running_requests": 8, "chunked_prefill_size": -1, "max_prefill_tokens": 256}
    config |= {"disable_radix_cache": True, "declared_max_new_tokens": 1}
    deaths = set()
    for engine in ("reference", "core"):
        with pytest.raises(InputError, match="max_total_tokens=200: SGLang runs out of memory") as raised:
            exhaust(replay(recording(rows, **config), VERSION, engine))
        deaths.add(str(raised.value))
    assert len(deaths) == 1


def exhaust(records: Iterator[object]) -> None:
    for _ in records:
        pass


def test_a_request_that_can_never_run_is_noticed_by_both() -> None:
    rows = [row("a", 3, 2), row("b", 90, 20), row("c", 3, 2)]
    records = check_equal(replay, recording(rows, max_total_tokens=100), VERSION)
    assert records[-2]["type"] == "stuck"


def test_other_engines_are_refused() -> None:
    with pytest.raises(InputError, match="unknown engine 'cor': did you mean 'core'"):
        exhaust(replay(recording([row("a", 3, 2)]), VERSION, "cor"))
