"""Recorded sessions of SGLang 0.5.23: requests that wait for others, and prompts that begin with generated tokens.

Made by ``python -m benchmarks.drift sglang WHEEL --seed 11 --record FOLDER``: of its workloads six with sessions, both
loops, pages, joins, retractions and preemptions. Whole runs have no ``prefill_decode_interval``: the recorder leaves an
idle engine alone until the next arrival, and the engine looks again.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.drift.__main__ import same
from replay.replay_engines import whole_run
from replay.test_core_runs import tables
from windtunnel.core.records import ROWS
from windtunnel.replay import sglang, stepper
from windtunnel.replay.recording import TICKS_PER_SECOND, read_recording

VERSION = "sglang-0.5.23"
RECORDINGS = Path(__file__).with_name("recordings")
PATHS = sorted((RECORDINGS / "sglang-0.5.23-sessions").glob("*.in.json"))
HOST_MEMORY = sorted((RECORDINGS / "sglang-0.5.23-hicache").glob("*.in.json"))
"""With HiCache: each of its three ways of writing, and prompts that come back."""
QUEUE = sorted((RECORDINGS / "sglang-0.5.23-queue").glob("*.in.json"))
"""What holds a queue, or sorts it: the prefill delayer of one rank, by seats and by the queue; in the order drawn by
the seed that replays have (``--seed 35`` and 36 of the same command), and by routing keys."""

RANKS = sorted((RECORDINGS / "sglang-0.5.23-ranks").glob("*.in.json"))
"""Two to four ranks of attention that step together: the prefill delayer, HiCache with the overlap schedule, rounds
without prompts, and all of it."""


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz"))) as lines:
        return [json.loads(line) for line in lines]


DRAFTS = sorted((RECORDINGS / "sglang-0.5.23-drafts").glob("*.in.json"))
"""Speculation that sends requests back: with the overlap schedule and EAGLE's tree, without it in pages of 16, and on
two ranks where a request makes way."""


@pytest.mark.parametrize(
    "path", PATHS + HOST_MEMORY + QUEUE + RANKS + DRAFTS, ids=lambda path: f"{path.parent.name[14:]}-{path.name[:2]}"
)
def test_every_step_is_as_recorded(path: Path) -> None:
    real = recorded(path)
    ours = [record for record in sglang.replay(read_recording(path), VERSION) if record["type"] == "step"]
    assert len(real) == len(ours)
    for number, (theirs, mine) in enumerate(zip(real, ours, strict=True)):
        differ = [name for name in theirs if not same(name, theirs[name], mine[name])]
        assert not differ, f"step {number}"


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.partition(".")[0])
def test_whole_runs_take_the_recorded_times_and_find_the_recorded_tokens(
    path: Path, jumps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "linear", tables)
    recording, real = read_recording(path), recorded(path)
    state = whole_run(sglang.Scheduler(recording.requests, recording.config, version=VERSION).stepper, recording, jumps)
    assert state.rows["steps"][: state.counters[ROWS]].sum() == len(real)
    first: dict[str, float] = {}
    hits: dict[str, int] = {}
    ends: dict[str, float] = {}
    for step in real:
        for name, start in step["start_pos"].items():
            hits.setdefault(name, start)
        for name in step["emitted"]:
            first.setdefault(name, step["t_end"])
        ends |= dict.fromkeys(step["finished"], step["t_end"])
    names = [row.id for row in recording.requests]
    for column, wanted in (("first_token", first), ("finish", ends)):
        found = state.requests[column] / TICKS_PER_SECOND
        np.testing.assert_allclose(found, [wanted[name] for name in names], rtol=0, atol=1e-8, err_msg=column)
    assert state.requests["cached_tokens"].tolist() == [hits[name] for name in names]
    assert sum(hits.values()) > 0
