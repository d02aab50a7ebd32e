"""TensorRT-LLM's scheduler in the core decides what was recorded, and what its rules say once more in plain words."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay import trtllm_in_words
from replay.replay_engines import OWN_RECORDINGS, RECORDINGS, written
from replay.test_core_runs import tables
from windtunnel.core.engine import turns_of, with_room
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import JUMPS, ROWS, STALLS
from windtunnel.errors import InputError
from windtunnel.replay import stepper
from windtunnel.replay.recording import TICKS_PER_SECOND, Recording, read_recording
from windtunnel.replay.stepper import ONLY
from windtunnel.replay.trtllm import Scheduler, replay

SHARED = RECORDINGS.with_name("recordings")
PATHS = sorted([*OWN_RECORDINGS.glob("trtllm*/*.in.json"), *SHARED.glob("trtllm*/*.in.json")])
ONE_RANK = [path for path in PATHS if path.parent.name == "trtllm"]


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        return [json.loads(line) for line in lines]


def whole_run(recording: Recording, jumps: bool) -> Any:
    """The state after a run of the open loop."""
    state = Scheduler(recording).stepper.state
    state.counters[JUMPS] = jumps
    order, (turns, course) = np.argsort(state.requests["arrival"], kind="stable"), turns_of(state, (ONLY,), False)
    while loop(state, turns, course, order, None, None, (ONLY, ONLY), 0, np.inf, None, None) == FULL:
        state = with_room(state)
    return state


def outcome(state: Any) -> tuple[Any, ...]:
    """What a run gave: requests, stalls, and how many steps it took."""
    columns = ["scheduled", "first_token", "finish", "preemptions", "cached_tokens"]
    rows, stalls = state.rows[: state.counters[ROWS]], state.stalls[: state.counters[STALLS]]
    return np.array(state.requests)[columns].tolist(), stalls.tolist(), int(rows["steps"].sum())


def check_run(recording: Recording, first: dict[str, float], finish: dict[str, float]) -> None:
    """A run ends its requests at these times, in seconds, with jumps over equal steps and without; all memory is free
    then."""
    with_jumps, without = whole_run(recording, True), whole_run(recording, False)
    assert outcome(with_jumps) == outcome(without)
    for row in recording.requests:
        for column, expected in (("first_token", first), ("finish", finish)):
            found = float(with_jumps.requests[column][row.rank]) / TICKS_PER_SECOND
            assert np.isclose(found, expected[row.id], rtol=0, atol=1e-8), f"{row.id} {column}"
    assert (with_jumps.lanes["free"] == with_jumps.pools["num_blocks"][0]).all()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.name[:6]}")
def test_replay_writes_what_was_recorded(path: Path) -> None:
    expected = recorded(path)
    found = list(replay(read_recording(path), "trtllm-1.0"))
    for one, other in zip(found, expected, strict=False):
        assert one == other
    assert len(found) == len(expected)


@pytest.mark.parametrize("path", ONE_RANK, ids=lambda path: path.name[:6])
def test_whole_runs_take_the_recorded_times(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "linear", tables)
    ends = recorded(path)[-1]["requests"]
    first = {name: one["first_token_t"] for name, one in ends.items()}
    check_run(read_recording(path), first, {name: one["e2e_t"] for name, one in ends.items()})


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ONE_RANK][:1], ids=lambda path: path.name[:6])
def test_ranks_jump_to_where_they_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "linear", lambda *_, **__: replace(tables(), expert_tokens=np.zeros(60_000)))
    recording = read_recording(path)
    tight = {"timeout_iters": 3, "batching_wait_iters": 2, "num_blocks": 45, "max_batch_size": 3}
    for more in ({}, tight, {"disable_overlap_scheduler": False}):
        changed = replace(recording, config=recording.config | more)
        with_jumps, without = whole_run(changed, True), whole_run(changed, False)
        assert outcome(with_jumps) == outcome(without)
        assert with_jumps.counters[ROWS] < without.counters[ROWS]


@pytest.mark.parametrize("path", ONE_RANK[:2], ids=lambda path: path.name[:6])
def test_the_words_are_those_of_the_recordings(path: Path) -> None:
    expected = [record for record in recorded(path) if record["type"] == "step"]
    for words, record in zip(trtllm_in_words.steps(read_recording(path)), expected, strict=True):
        assert words == {name: record[name] for name in words}


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Any rule with any other, little memory, few tokens; MAX_UTILIZATION with overlap has memory enough, and so has
    reuse. That is only where no block is computed twice: its second copy can be found in the core, not in the engine.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]))
    block, chunked, overlap = draw(st.sampled_from([16, 32])), draw(st.booleans()), draw(st.booleans())
    reuse = policy != "STATIC_BATCH" and not overlap and draw(st.booleans())
    prompt, output = draw(st.sampled_from([60, 300])), draw(st.sampled_from([1, 5, 60]))
    tokens = draw(st.sampled_from([40, 80, 256])) if chunked else prompt + output + 1
    drafts = draw(st.sampled_from([0, 0, 1, 3]))
    most = -(-(prompt + 2 * output + 3 * drafts) // block)
    ample = reuse or (policy == "MAX_UTILIZATION" and overlap)
    config = {
        "capacity_scheduler_policy": policy,
        "tokens_per_block": block,
        "max_batch_size": draw(st.sampled_from([2, 8, 64])),
        "max_num_tokens": max(tokens, 2 * block),  # a chunk that is cut is never longer
        "num_blocks": 4000 if ample else most * draw(st.sampled_from([1, 2, 5])),
        "enable_chunked_prefill": chunked,
        "disable_overlap_scheduler": not overlap,
        "overlap_end": draw(st.sampled_from(["to_complete", "extra"])),
        "enable_block_reuse": reuse,
        "enable_partial_reuse": reuse and draw(st.booleans()),
        "copy_on_partial_reuse": draw(st.booleans()),
        "declared_max_new_tokens": draw(st.sampled_from([None, 2 * output])),
        "spec": {"k": drafts, "method": "mtp", "accept": draw(st.sampled_from([0.3, 0.8]))} if drafts else {},
    }
    if chunked:
        config["chunking_policy"] = draw(st.sampled_from(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]))
        config["chunk_unit_size"] = draw(st.sampled_from([None, 2 * block, block if reuse else 16]))
    if draw(st.booleans()):
        config["batch_wait_timeout_iters"] = draw(st.sampled_from([0, 3, 10]))
        config["batch_wait_max_tokens_ratio"] = draw(st.sampled_from([0.0, 0.3, 0.9]))
    n, gap = draw(st.integers(1, 20)), draw(st.sampled_from([0.0, 0.02, 0.3]))
    prefixes = [["a", 2 * block], ["b", 2 * block + 5], ["c", 3 * block], ["b", 3 * block - 2]]
    lengths = rng.integers(1, prompt + 1, n)
    lengths += reuse and lengths % block == 0
    requests = [
        {
            "id": f"r{i}",
            "arrival": round(float(time), 6),
            "prompt_len": int(lengths[i]),
            "output_len": int(rng.integers(1, output + 1)),
            "prefix": [prefixes[rng.integers(0, 4)]] if reuse and rng.random() < 0.8 else [],
        }
        for i, time in enumerate(np.cumsum(rng.random(n) * gap))
    ]
    return {"config": config, "requests": requests}


def check_words(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The core decides what the rules in plain words decide."""
    monkeypatch.setattr(stepper, "linear", tables)
    recording = written(document)
    words = list(trtllm_in_words.steps(recording))
    found = [record for record in replay(recording, "trtllm-1.0") if record["type"] == "step"]
    for step, (one, other) in enumerate(zip(words, found, strict=False)):
        assert one == {name: other[name] for name in one}, f"step {step}"
    assert len(words) == len(found)
    first: dict[str, float] = {}
    finish: dict[str, float] = {}
    for record in words:
        for name in record["emitted"]:
            first.setdefault(name, record["t_end"])
        finish |= dict.fromkeys(record["finished"], record["t_end"])
    check_run(recording, first, finish)


RELAXED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=40, deadline=None, suppress_health_check=RELAXED)
@given(workloads())
def test_the_core_decides_what_the_rules_say(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    check_words(document, monkeypatch)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=RELAXED)
@given(workloads())
def test_the_core_decides_what_the_rules_say_at_length(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> None:
    check_words(document, monkeypatch)


def one(**config: Any) -> Recording:
    return written({"config": config, "requests": [{"id": "a", "arrival": 0, "prompt_len": 100, "output_len": 5}]})


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: must be ≥ 1"),
        ({"declared_max_new_tokens": 3}, "declared_max_new_tokens=3: must be ≥ the output_len of every request"),
        (
            {"capacity_scheduler_policy": "MAX"},
            "unknown capacity_scheduler_policy 'MAX': did you mean 'MAX_UTILIZATION'",
        ),
        ({"max_num_tokens": 64}, "a prompt of 100 tokens"),
        ({"max_batch": 4}, "unknown setting of a recording"),
        (
            {"enable_block_reuse": True, "enable_chunked_prefill": True, "chunk_unit_size": 16},
            "chunk_unit_size=16: must be ≥ block_size=32 with block reuse",
        ),
    ],
)
def test_bad_input_is_refused(config: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        list(replay(one(**config), "trtllm-1.0"))
