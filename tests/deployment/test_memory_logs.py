"""KV tokens that engines' own logs print."""

import json
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks.accuracy.kv_memory import compared, error, preset_of, verdicts

POINTS = Path(__file__).parents[3] / "shared" / "truth" / "kv" / "points.jsonl"


def test_the_preset_of_a_version_is_the_newest_that_is_not_newer() -> None:
    assert preset_of("vllm", "0.11.0+torch271") == "vllm-0.11"
    assert preset_of("vllm", "0.26.1rc1.dev156") == "vllm-0.25"
    assert preset_of("vllm", "0.4.3") == "vllm-0.6"


@pytest.mark.skipif(not POINTS.exists(), reason="the points are not here")
def test_kv_tokens_are_those_of_the_logs() -> None:
    points = [json.loads(line) for line in POINTS.read_text().splitlines()]
    errors = [abs(error(point)) for point in points if compared(point) and point["engine"] == "vllm"]
    assert len(errors) >= 15 and median(errors) < 0.01 and mean(errors) < 0.03


@pytest.mark.skipif(not POINTS.exists(), reason="the points are not here")
def test_who_started_starts_and_who_did_not_does_not() -> None:
    found = verdicts([json.loads(line) for line in POINTS.read_text().splitlines()])
    assert len(found[True]) >= 25 and all(found[True])
    assert found[False] == [False]
