"""Random workloads for vLLM's v1 scheduler: small engines, short of memory and seats, with the settings of text without
drafts or adapters. Versions that lack one ignore it, and so do their presets."""

import random
from typing import Any

from benchmarks.drift.sessions import make_sessions

Json = dict[str, Any]


def workload(draw: random.Random) -> Json:
    """The input of a recording."""
    block, seats = draw.choice([8, 16, 32]), draw.choice([1, 2, 4, 8, 32])
    rows = _requests(draw, draw.choice([3, 40, 120]), priorities := draw.random() < 0.3)
    if draw.random() < 0.5:
        make_sessions(draw, rows)
    longest = max(row["prompt_len"] + row["output_len"] for row in rows)
    chunked = draw.random() < 0.7
    budget = draw.choice([0, 30, 200]) + (draw.choice([64, 128, 256]) if chunked else longest)
    config: Json = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(budget, seats),
        "max_model_len": longest,
        "block_size": block,
        "num_gpu_blocks": 2 + longest // block + draw.choice([0, 2, 8, 30, 200]),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw.random() < 0.7,
        "policy": "priority" if priorities else "fcfs",
        "async_scheduling": draw.random() < 0.5,
    }
    return {"config": config | _rare(draw, seats, chunked), "requests": rows, "batch_time": {}}


def _requests(draw: random.Random, longest_output: int, priorities: bool) -> list[Json]:
    """Up to 30, half of them with prompts that begin alike."""
    rate, longest, kinds = draw.choice([0, 0, 4, 10, 30]), draw.choice([60, 300, 900]), draw.choice(["a", "abc"])
    arrival, rows = 0.0, list[Json]()
    for i in range(draw.randint(4, 30)):
        arrival += draw.expovariate(rate) if rate else 0.0
        row: Json = {"id": f"r{i}", "arrival": round(arrival, 6), "prompt_len": draw.randint(1, longest)}
        row["output_len"] = draw.randint(1, longest_output)
        if draw.random() < 0.5:
            row["prefix"] = [[draw.choice(kinds), draw.randint(1, row["prompt_len"])]]
        if priorities:
            row["priority"] = draw.choice([-1, 0, 0, 3])
        rows.append(row)
    return rows


def _rare(draw: random.Random, seats: int, chunked: bool) -> Json:
    """Settings that few engines have."""
    found: Json = {}
    if draw.random() < 0.3:
        found["watermark"] = draw.choice([0.01, 0.05, 0.2])
    if draw.random() < 0.2:
        found["scheduler_reserve_full_isl"] = False
    if chunked and draw.random() < 0.3:
        found["long_prefill_token_threshold"] = draw.choice([1, 20, 60])
        found["long_prefill_token_threshold_adaptive"] = draw.random() < 0.3
    if draw.random() < 0.2:
        found["max_num_active_seqs"] = draw.randint(1, seats)
    if draw.random() < 0.25:
        found["prefill_schedule_interval"] = draw.choice([2, 4, 9])
    return found
