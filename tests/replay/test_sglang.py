"""The core makes every schedule that was recorded from SGLang's real scheduler, and those of the scheduler itself."""

import gzip
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.replay_engines import RECORDINGS
from windtunnel.core.engine import Fleet, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, Sglang
from windtunnel.replay.lane import demand
from windtunnel.replay.recording import Recording, read_recording
from windtunnel.replay.sglang import replay

VERSION = "sglang-0.4.6"
PATHS = [(path, VERSION) for path in sorted(RECORDINGS.glob("sglang/*.in.json"))]
PATHS += [(path, "sglang-0.5.23") for path in sorted(RECORDINGS.parent.glob("recordings/sglang-0.5.23/*.in.json"))]
TIMES = ("t_sched", "t_start", "t_end", "makespan", "ttft", "first_token_t", "e2e_t")

SOURCE = os.environ.get("WINDTUNNEL_SGLANG_SOURCE", "")
"""Folder with the unpacked wheel of sglang 0.4.6.post5."""
PYTHON = os.environ.get("WINDTUNNEL_SGLANG_PYTHON", sys.executable)
"""An interpreter that has torch."""

Record = dict[str, Any]


def check_equal(ours: Record, theirs: Record, where: str) -> None:
    """Every field, and the order of every dict; times to 100 ns."""
    assert list(ours) == list(theirs), where
    for key, value in ours.items():
        if key in TIMES:
            assert round(value, 7) == round(theirs[key], 7), f"{where} {key}"
        elif isinstance(value, dict):
            check_equal(value, theirs[key], f"{where} {key}")
        else:
            assert value == theirs[key], f"{where} {key}"


@pytest.mark.skipif(not PATHS, reason="the recordings are not here")
@pytest.mark.parametrize(("path", "version"), PATHS, ids=[path.name.split("_", 2)[1] for path, _ in PATHS])
def test_equals_the_recordings(path: Path, version: str) -> None:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        theirs = [json.loads(line) for line in lines]
    ours = list(replay(read_recording(path), version))
    assert len(ours) == len(theirs)
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        check_equal(mine, real, f"record {number}")


def recording(folder: Path, requests: list[Record], batch_time: Record | None = None, **config: Any) -> Recording:
    path = folder / "workload.in.json"
    times = batch_time or config.pop("batch_time", {})
    path.write_text(json.dumps({"config": config, "requests": requests, "batch_time": times}))
    return read_recording(path)


def row(name: str, prompt: int, output: int, arrival: float = 0.0) -> Record:
    return {"id": name, "arrival": arrival, "prompt_len": prompt, "output_len": output}


def test_times_are_the_formula(tmp_path: Path) -> None:
    rows = [row("a", 8, 2), row("b", 4, 1, 0.5)]
    times = {"base": 0.02, "per_prefill_tok": 1e-3, "per_decode": 3e-4, "per_ctx": 5e-7}
    header, first, second, third, summary = replay(recording(tmp_path, rows, times), VERSION)
    assert header == {"type": "header", "sglang": "0.4.6.post5", "config": {}, "batch_time": times}
    assert (first["t_start"], first["t_end"]) == (0, 0.028)
    assert (second["t_start"], second["t_end"]) == (0.028, 0.048304)
    assert (third["arrived"], third["t_start"], third["t_end"]) == (["b"], 0.5, 0.524)
    assert (summary["steps"], summary["makespan"]) == (3, 0.524)
    first_token = {"first_token_t": 0.524, "ttft": 0.024, "e2e_t": 0.524, "retractions": 0}
    assert summary["requests"]["b"] == first_token


def test_an_idle_round_waits_for_the_next_arrival_whoever_waits(tmp_path: Path) -> None:
    rows = [row("a", 3, 2), row("b", 3, 1, 0.001), row("c", 3, 1, 2.0)]
    steps = list(replay(recording(tmp_path, rows, max_running_requests=1), VERSION))[1:-1]
    assert [(step["t_start"], list(step["scheduled"])) for step in steps][2:] == [(2.0, ["b"]), (2.0103, ["c"])]
    assert [step["arrived"] for step in steps] == [["a"], ["b"], ["c"], []]


def test_a_request_that_can_never_run_blocks_all_behind_it(tmp_path: Path) -> None:
    rows = [row("a", 3, 2), row("b", 90, 20), row("c", 3, 2)]
    *_, stuck, summary = replay(recording(tmp_path, rows, max_total_tokens=100), VERSION)
    assert (stuck["type"], stuck["waiting"]) == ("stuck", ["b", "c"])
    assert summary["requests"]["a"]["e2e_t"] is not None
    assert set(summary["requests"]["b"].values()) == {None, 0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_running_request": 4}, "setting of a recording.*did you mean 'max_running_requests'"),
        ({"max_total_tokens": "many"}, "max_total_tokens='many': must be a whole number"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ({"schedule_conservativeness": "high"}, "schedule_conservativeness='high': must be a number"),
        ({"schedule_policy": "dfs"}, "did you mean 'dfs-weight'"),
        ({"declared_max_new_tokens": 0}, "declared_max_new_tokens=0: must be null or a whole number ≥ 1"),
        ({"batch_time": {"per_token": 1}}, "coefficient of batch_time"),
        ({"batch_time": {"base": -1}}, "batch_time base=-1: must be ≥ 0 seconds"),
    ],
)
def test_wrong_settings_are_said(tmp_path: Path, config: Record, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(replay(recording(tmp_path, [row("a", 3, 2)], **config), VERSION))


def test_null_is_the_default(tmp_path: Path) -> None:
    nulls = {"max_total_tokens": None, "schedule_policy": None, "declared_max_new_tokens": None}
    given, absent = (list(replay(recording(tmp_path, [row("a", 3, 2)], **config), VERSION)) for config in (nulls, {}))
    assert given[1:] == absent[1:]


def test_an_unknown_version_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'sglang-0\.4\.6'"):
        list(replay(recording(tmp_path, [row("a", 3, 2)]), "sglang-0.4"))


def workload(draw: random.Random) -> Record:
    """A small engine, short of memory and slots, with prompts that share beginnings."""
    memory = draw.choice([60, 120, 200, 400, 800, 2000])
    longest, most = max(2, memory // draw.choice([2, 3, 4, 8])), max(1, memory // draw.choice([3, 5, 10]))
    config: Record = {
        "max_running_requests": draw.choice([1, 2, 3, 4, 8, 16, 32]),
        "max_total_tokens": memory,
        "chunked_prefill_size": draw.choice([-1, 4, 16, 32, 64, 128, 512]),
        "max_prefill_tokens": draw.choice([20, 64, 256, 4096]),
        "schedule_policy": draw.choice(["fcfs", "lpm", "lpm", "dfs-weight", "dfs-weight", "lof"]),
        "disable_radix_cache": draw.random() < 0.4,
        "schedule_conservativeness": draw.choice([0, 0.05, 0.1, 0.3, 0.5, 1.0, 1.3, 2.0]),
        "enable_mixed_chunk": draw.random() < 0.4,
        "ignore_eos": draw.random() < 0.35,
        "disable_overlap_schedule": draw.random() < 0.5,
    }
    if draw.random() < 0.15:
        config["declared_max_new_tokens"] = draw.choice([1, 5, most, 2 * most, 5000])
    number = draw.choice([3, 10, 30, 60]) if draw.random() < 0.95 else 200
    gap = draw.choice([0, 0, 1e-3, 0.01, 0.02, 0.1, 0.4])
    arrival, rows = 0.0, list[Record]()
    for i in range(number):
        arrival = round(arrival + draw.random() * 2 * gap, 6)
        request = row(f"r{i}", draw.randint(1, longest), draw.randint(1, most), arrival)
        if draw.random() < 0.6:
            request["prefix"] = [[draw.choice("abcd"), draw.randint(1, longest)] for _ in range(draw.randint(1, 3))]
        rows.append(request)
    return {"config": config, "requests": rows, "batch_time": {}}


def real_steps(recordings: list[Recording]) -> list[tuple[list[Record], bool]]:
    """What the real scheduler does with each: its steps, and whether it died after them."""
    documents = []
    for recorded in recordings:
        rows = [
            # the engine's tokens are 64-bit numbers ≥ 0
            {
                "id": r.id,
                "arrival": r.arrival,
                "output_len": r.output_tokens,
                "tokens": [t % (1 << 60) for t in r.tokens],
            }
            for r in recorded.requests
        ]
        documents.append({"config": recorded.config, "requests": rows})
    command = (PYTHON, str(Path(__file__).with_name("sglang_driver.py")), SOURCE)
    done = subprocess.run(command, input=json.dumps(documents), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [(answer["steps"], bool(answer["died"])) for answer in answers]


def our_steps(recorded: Recording) -> tuple[list[Record], bool]:
    """What the core does, times in ticks."""
    steps = list[Record]()
    try:
        for record in replay(recorded, VERSION):
            if record["type"] == "step":
                times = {key: round(record[key] * 1e7) for key in ("t_start", "t_end")}
                steps.append(record | times)
    except InputError:
        return steps, True
    return steps, False


@pytest.mark.long
@pytest.mark.skipif(not SOURCE, reason="WINDTUNNEL_SGLANG_SOURCE names no folder with SGLang's source")
@pytest.mark.parametrize("seed", range(10))
def test_equals_the_real_scheduler(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recordings = []
    for _ in range(100):
        document = workload(draw)
        recordings.append(recording(tmp_path, document["requests"], **document["config"]))
    answers = real_steps(recordings)
    assert sum(died for _, died in answers) < 30
    for number, (recorded, (theirs, died)) in enumerate(zip(recordings, answers, strict=True)):
        ours, ours_died = our_steps(recorded)
        assert (len(ours), ours_died) == (len(theirs), died), f"workload {number}"
        for mine, real in zip(ours, theirs, strict=True):
            check_equal({key: mine[key] for key in real}, real, f"workload {number} step {mine['step']}")


def test_a_mixed_batch_has_taken_the_place_of_the_running_one(tmp_path: Path) -> None:
    rows = [row("a", 3, 5), row("b", 3, 3, 0.011)]
    config: Record = {"enable_mixed_chunk": True, "chunked_prefill_size": 8}
    steps = list(replay(recording(tmp_path, rows, **config), VERSION))[1:-1]
    mixed = [(step["running"], list(step["scheduled"])) for step in steps if step["mode"] == "mixed"]
    assert mixed == [([], ["b", "a"])]


def test_an_engine_that_dies_says_so(tmp_path: Path) -> None:
    """More is generated than was declared: what was retracted comes back into memory that it does not have."""
    lengths = [(27, 11), (50, 2), (48, 7), (19, 2), (62, 14), (5, 15), (36, 10), (31, 3), (10, 19), (62, 7)]
    rows = [row(f"r{i}", prompt, output) for i, (prompt, output) in enumerate(lengths)]
    config: Record = {
        "max_total_tokens": 200,
        "max_running_requests": 8,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 256,
    }
    config |= {"disable_radix_cache": True, "declared_max_new_tokens": 1}
    with pytest.raises(InputError, match="max_total_tokens=200: SGLang runs out of memory"):
        list(replay(recording(tmp_path, rows, **config), VERSION))


# Pipelines.

TICKS, TICKS_PER_TOKEN, SEND = 100_000.0, 1000.0, 5000.0
"""As in ``sglang_driver.run_stages``."""


def pipeline_workload(draw: random.Random, folder: Path) -> Recording:
    """A small engine with two to four stages."""
    document = workload(draw)
    config = document["config"] | {"enable_mixed_chunk": False, "disable_overlap_schedule": True}
    if config["chunked_prefill_size"] > 0:
        config["chunked_prefill_size"] = max(config["chunked_prefill_size"], config["max_running_requests"])
    made = recording(folder, document["requests"], **config)
    return replace(made, config=made.config | {"pp_size": draw.choice([2, 2, 3, 4])})


def fleet_of(recorded: Recording) -> Fleet:
    """The engine of a workload; its stages take numbers of ticks."""
    config, chunk = recorded.config, recorded.config["chunked_prefill_size"]
    policy = Sglang(
        version="0.4.6",
        chunked_prefill=chunk > 0,
        radix_cache=not config["disable_radix_cache"],
        pipeline_parallel_size=config["pp_size"],
        **{
            name: config[name]
            for name in ("max_prefill_tokens", "schedule_policy", "schedule_conservativeness", "ignore_eos")
        },
    )
    longest = max(row.prompt_tokens + row.output_tokens for row in recorded.requests) + 2
    limits = Limits(config["max_running_requests"], 1 << 30, longest, config["max_total_tokens"], 1)
    most = chunk if chunk > 0 else max(policy.longest_round(limits), limits.max_num_seqs)
    sizes = {"max_num_batched_tokens": most, "max_num_seqs": limits.max_num_seqs, "max_model_len": longest}
    stage = linear(TICKS, TICKS_PER_TOKEN, 0.0, 0.0, **sizes)
    stages = config["pp_size"]
    times = StageTimes((stage,) * stages, np.full((stages - 1, most + 1), SEND))
    return Fleet((replace(limits, max_num_batched_tokens=most),), (policy,), (times,), (1,), (1,), (False,))


def our_rounds(recorded: Recording) -> list[Record] | None:
    """What the core does; None if the engine dies."""
    declared = [recorded.config.get("declared_max_new_tokens") or row.output_tokens for row in recorded.requests]
    arrival, output = [row.arrival for row in recorded.requests], [row.output_tokens for row in recorded.requests]
    columns = demand(recorded.requests, arrival, output, 1, declared)
    try:
        rows = run(fleet_of(recorded), columns, 0, np.zeros(len(output)), jumps=False).rows
    except InputError:
        return None
    found: list[Record] = []
    for row in rows:
        chunks = [(int(row["chunk_tokens"]), int(row["chunk_context"]))] if row["chunk_tokens"] else []
        if row["steps"] == 0:
            found[-1]["chunks"] += chunks
            continue
        names = ("lane", "start", "decodes", "kv_tokens", "used_blocks", "waiting")
        found.append({name: float(row[name]) for name in names} | {"chunks": chunks})
    return sorted(found, key=lambda step: step["start"])


def real_round(step: Record, memory: int) -> Record:
    """The same of the real scheduler's step."""
    decodes = step["mode"] == "decode"
    parts = [(tokens, step["start_pos"][name]) for name, tokens in step["scheduled"].items()]
    return {
        "lane": step["slot"],
        "start": step["t_start"],
        "decodes": len(parts) if decodes else 0,
        "kv_tokens": sum(context for _, context in parts) if decodes else 0,
        "used_blocks": memory - step["available"] - step["evictable"],
        "waiting": len(step["waiting"]),
        "chunks": [] if decodes else parts,
    }


@pytest.mark.long
@pytest.mark.skipif(not SOURCE, reason="WINDTUNNEL_SGLANG_SOURCE names no folder with SGLang's source")
@pytest.mark.parametrize("seed", range(4))
def test_pipelines_equal_the_real_scheduler(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recordings = [pipeline_workload(draw, tmp_path) for _ in range(100)]
    for number, (recorded, (steps, died)) in enumerate(zip(recordings, real_steps(recordings), strict=True)):
        ours = our_rounds(recorded)
        assert (ours is None) == died, f"workload {number}"
        if ours is not None:
            theirs: list[Any] = [real_round(step, recorded.config["max_total_tokens"]) for step in steps]
            assert ours == sorted(theirs, key=lambda step: step["start"]), f"workload {number}"
