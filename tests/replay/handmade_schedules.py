"""Tiny recordings, the steps that a version of vLLM takes on them, and random ones."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from oracle.vllm_v1.replay import replay

from windtunnel.replay.recording import Recording, read_recording

Row = dict[str, Any]
Step = dict[str, Any]
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 64}


def request(prompt: int, output: int, **more: Any) -> Row:
    """A row as in a recording's input; id and arrival may be left out."""
    return {"prompt_len": prompt, "output_len": output, **more}


def recording(config: dict[str, Any], *rows: Row) -> Recording:
    """Requests a, b, c… that arrive at 0 unless they say otherwise."""
    named = [{"id": "abcdefgh"[i % 8], "arrival": 0} | row for i, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "handmade.in.json"
        path.write_text(json.dumps({"config": SMALL | config, "requests": named}))
        return read_recording(path)


def steps(version: str, config: dict[str, Any], *rows: Row) -> list[Step]:
    """The step records."""
    return [record for record in replay(recording(config, *rows), version) if record["type"] == "step"]


def scheduled(version: str, config: dict[str, Any], *rows: Row) -> list[dict[str, int]]:
    """Tokens of each request in each step."""
    return [step["scheduled"] for step in steps(version, config, *rows)]


def random_recording(seed: int) -> Recording:
    """Small pools, shared beginnings, priorities, thresholds, bursts: what schedulers have trouble with."""
    rng = random.Random(seed)
    config = random_config(rng)
    pool = (config["num_gpu_blocks"] - 1) * config["block_size"]
    gap = rng.choice([0, 1, 2000, 20000, 100000])
    longest = min(rng.choice([3, 30, 300]), pool, config["max_model_len"] - 1)
    most = rng.choice([2, 20, 300])
    rows, micros = [], 0
    for i in range(rng.randint(1, 40)):
        micros += rng.randint(1, gap + 1)
        prompt = rng.randint(1, longest)
        output = rng.randint(1, max(min(most, pool - prompt + 1), 1))
        priority = rng.choice([-1, 0, 0, 1, 2])
        prefix = [[rng.choice("st"), rng.randint(1, 80)], [rng.choice("uv"), rng.randint(1, 40)]][: rng.randint(0, 2)]
        rows.append(request(prompt, output, id=f"r{i}", arrival=micros / 1e6, priority=priority, prefix=prefix))
    return recording(config, *rows)


def random_images(seed: int) -> Recording:
    """The same with inputs of an encoder, few of them that fit it at once, some alike, and sometimes drafts."""
    rng, plain = random.Random(seed), random_recording(seed)
    room, rows = plain.config["max_model_len"], []
    for row in plain.requests:
        images, place = [], rng.choice([0, 0, 1, 9])
        while rng.random() < 0.7 and place < row.prompt_tokens:
            size = rng.randint(1, min(row.prompt_tokens - place, 40))
            images.append([place, size, f"{rng.randint(0, 9)}-{size}"])
            place += size + rng.choice([0, 0, 1, 3, 20])
        rows.append(
            request(
                row.prompt_tokens,
                row.output_tokens,
                id=row.id,
                arrival=row.arrival,
                priority=row.priority,
                images=images,
            )
        )
    largest = max((size for row in rows for _, size, _ in row["images"]), default=1)
    config = plain.config | {
        "encoder_compute_budget": largest + rng.choice([0, 0, 10, 100]),
        "encoder_cache_size": largest + rng.choice([0, 1, 10, 40, 400]),
        "disable_chunked_mm_input": rng.random() < 0.3 and plain.config["max_num_batched_tokens"] >= room,
    }
    if rng.random() < 0.25:
        config["prefill_schedule_interval"] = rng.choice([2, 3, 5])
    if rng.random() < 0.25:
        config["spec"] = {
            "k": rng.randint(1, 4),
            "method": rng.choice(["ngram", "eagle", "draft_model"]),
            "accept": 0.6,
        }
        config["max_num_batched_tokens"] += 5
    return recording(config, *rows)


def random_config(rng: random.Random) -> dict[str, Any]:
    """Settings of every kind; some are without effect in older versions."""
    seqs = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.choice([40, 100, 300])
    chunked = rng.random() < 0.8
    budget = seqs + rng.choice([0, 1, 5, 16, 64, 200])
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget if chunked else max(budget, max_model_len),
        "max_model_len": max_model_len,
        "block_size": rng.choice([1, 4, 16, 16]),
        "num_gpu_blocks": 1 + rng.randint(4, 60),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.4,
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 1, 3, 16, 40]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.0, 0.01, 0.05, 0.2]),
        "max_num_active_seqs": rng.choice([None, None, rng.randint(1, seqs)]),
    }
