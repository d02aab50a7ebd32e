"""Random workloads for SGLang 0.5: small engines, short of memory and seats, with every setting that is replayed."""

import random
from typing import Any

from benchmarks.drift.sessions import make_sessions

Json = dict[str, Any]

ORDERS = ("fcfs", "fcfs", "lpm", "lof", "dfs-weight", "hrrn", "shortest-prefill-first", "random", "routing-key")
KEYS = ("", "a", "b", "c")
SPECULATES = 0.4
"""Share of the workloads that have drafts."""


def workload(draw: random.Random) -> Json:
    """The input of a recording."""
    longest_output = draw.choice([3, 40, 200])
    priorities = draw.random() < 0.3
    rows = _requests(draw, longest_output, priorities)
    if draw.random() < 0.4:
        make_sessions(draw, rows)
    page = draw.choice([1, 1, 1, 8, 16, 64])
    longest = max(row["prompt_len"] + row["output_len"] for row in rows)
    config: Json = {
        "max_running_requests": draw.choice([1, 2, 4, 8, 32]),
        "max_total_tokens": longest + 2 * page + draw.choice([2, 50, 200, 1000, 3000]),
        "chunked_prefill_size": draw.choice([-1, 64, 128, 256, 512]),
        "max_prefill_tokens": draw.choice([200, 1000, 4096]),
        "schedule_policy": draw.choice(ORDERS),
        "disable_radix_cache": draw.random() < 0.3,
        "schedule_conservativeness": draw.choice([1.0, 0.3, 0.05]),
        "enable_mixed_chunk": draw.random() < 0.3,
        "disable_overlap_schedule": draw.random() < 0.5,
        "page_size": page,
        "ignore_eos": draw.random() < 0.2,
    }
    if config["schedule_policy"] == "shortest-prefill-first":
        config["disable_radix_cache"] = False
    if draw.random() < 0.25:
        config["declared_max_new_tokens"] = longest_output + draw.choice([0, 1, longest_output])
        config["max_total_tokens"] += 2 * longest_output
    config |= _rare(draw, not config["disable_radix_cache"])
    if not config["disable_overlap_schedule"] and not config["ignore_eos"] and draw.random() < 0.5:
        config |= _delayer(draw)
    if (
        not config["disable_radix_cache"]
        and config.get("radix_eviction_policy", "lru") == "lru"
        and draw.random() < 0.5
    ):
        tokens = round(config["max_total_tokens"] * draw.choice([0.2, 1.0, 3.0])) // page * page
        policies = ["write_through", "write_through_selective", "write_back"]
        config |= {"hicache_tokens": tokens, "hicache_write_policy": draw.choice(policies)}
    if draw.random() < 0.3:
        config["attention_dp_size"] = draw.choice([2, 2, 3, 4])
        if "enable_prefill_delayer" in config:  # else ranks mistake each other's messages where few run on one of them
            config.pop("prefill_decode_interval_min_bs", None)
    config |= _by_priority(draw) if priorities else {}
    if draw.random() < SPECULATES:
        config |= _drafts(draw)
    return {"config": config, "requests": rows, "batch_time": {}}


def _requests(draw: random.Random, longest_output: int, priorities: bool) -> list[Json]:
    """Up to 30, half of them with prompts that begin alike."""
    rate, longest, kinds = draw.choice([0, 0, 4, 10, 30]), draw.choice([60, 300, 900]), draw.choice([1, 4, 20])
    shared, arrival, rows = draw.choice([40, 200, 600]), 0.0, list[Json]()
    for i in range(draw.randint(4, 30)):
        arrival += draw.expovariate(rate) if rate else 0.0
        row: Json = {"id": f"r{i}", "arrival": round(arrival, 6), "prompt_len": draw.randint(1, longest)}
        row["output_len"] = draw.randint(1, longest_output)
        if draw.random() < 0.5:
            row["prefix"] = [[f"s{draw.randint(0, kinds)}", draw.randint(1, shared)] for _ in range(draw.randint(1, 2))]
            row["prompt_len"] += sum(tokens for _, tokens in row["prefix"])
        if priorities:
            row["priority"] = draw.randint(0, 6)
        if draw.random() < 0.7:
            row["routing_key"] = draw.choice(KEYS)
        rows.append(row)
    return rows


def _rare(draw: random.Random, radix: bool) -> Json:
    """Settings that few have."""
    found: Json = {}
    if draw.random() < 0.2:
        found["prefill_decode_interval"] = draw.choice([1, 3, 8])
        found["prefill_decode_interval_min_bs"] = draw.choice([0, 2, 4])
    if draw.random() < 0.2:
        found["prefill_max_requests"] = draw.choice([1, 2, 5])
    if draw.random() < 0.2:
        found["max_queued_requests"] = draw.choice([1, 2, 4, 8])
    if draw.random() < 0.2:
        found["min_free_slots"] = draw.choice([2, 3, 8])
    if radix and draw.random() < 0.4:
        found["radix_eviction_policy"] = draw.choice(["lfu", "slru", "priority", "fifo", "filo", "mru"])
    return found


def _drafts(draw: random.Random) -> Json:
    """Speculation, and what is not replayed with it left out; half of them send requests back."""
    spec = {"k": draw.choice([1, 2, 3, 7]), "method": draw.choice(["eagle", "eagle", "draft_model"])}
    spec["accept"] = draw.choice([0.0, 0.5, 0.8, 1.0])
    short: Json = {"schedule_conservativeness": 0.0, "ignore_eos": False} if draw.random() < 0.5 else {}
    return {"spec": spec, "enable_mixed_chunk": False, "hicache_tokens": 0} | short


def _delayer(draw: random.Random) -> Json:
    """Of one rank, which waits for seats or for more requests."""
    found: Json = {"enable_prefill_delayer": True, "prefill_delayer_max_delay_passes": draw.choice([1, 4, 30])}
    if draw.random() < 0.4:
        found["prefill_delayer_token_usage_low_watermark"] = draw.choice([0.2, 0.6])
    if draw.random() < 0.5:
        found["prefill_delayer_queue_min_ratio"] = draw.choice([0.2, 0.5, 1.0])
        found["prefill_delayer_max_delay_ms"] = draw.choice([50.0, 300.0, 5000.0])
    return found


def _by_priority(draw: random.Random) -> Json:
    return {
        "enable_priority_scheduling": True,
        "schedule_policy": draw.choice(["fcfs", "lof"]),
        "schedule_low_priority_values_first": draw.random() < 0.5,
        "priority_scheduling_preemption_threshold": draw.choice([0, 1, 3]),
        "disable_priority_preemption": draw.random() < 0.3,
        "retraction_policy": draw.choice(["default", "default", "priority"]),
    }
