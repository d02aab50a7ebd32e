"""The comparison with a real scheduler finds what differs, and makes it small; a preset stands for the engine."""

import random
from typing import Any

import pytest

from benchmarks.drift import vllm
from benchmarks.drift.__main__ import compare, our_steps, smaller
from benchmarks.drift.sglang import workload
from windtunnel.replay.recording import known
from windtunnel.replay.sglang import CONFIG

PRESET = "sglang-0.5.23"


class Preset:
    """In place of the real engine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def steps(self, document: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        return our_steps(document, self.name)


def old_workload(seed: int) -> dict[str, Any]:
    """One whose settings 0.4.6 has."""
    document = workload(random.Random(seed))
    config = {name: value for name, value in document["config"].items() if name in CONFIG}
    if config["schedule_policy"] in ("hrrn", "shortest-prefill-first"):
        config["schedule_policy"] = "lpm"
    return document | {"config": known(config, CONFIG), "requests": document["requests"][:8]}


def test_equal_schedulers_are_equal() -> None:
    for seed in range(3):
        assert compare(workload(random.Random(seed)), Preset(PRESET), PRESET) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["vllm-0.33", "vllm-0.10"])
def test_every_version_of_vllm_replays_its_workloads(version: str) -> None:
    for seed in range(3):
        assert compare(vllm.workload(random.Random(seed)), Preset(version), version) is None  # type: ignore[arg-type]


def test_what_differs_is_found_and_made_small() -> None:
    cases = [(document, compare(document, old, PRESET)) for document in map(old_workload, range(6))]
    document, found = next((document, found) for document, found in cases if found is not None)
    less, remains = smaller(document, found, old, PRESET)
    assert len(less["requests"]) <= len(document["requests"])
    assert compare(less, old, PRESET) == remains
    for k in range(len(less["requests"])):  # no request can be spared
        rows = less["requests"][:k] + less["requests"][k + 1 :]
        assert not rows or compare(less | {"requests": rows}, old, PRESET) is None


old: Any = Preset("sglang-0.4.6")
