"""Ranks of attention data parallelism that get their requests when a step is decided (TensorRT-LLM's ADP router)."""

from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.records import GONE
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Trtllm
from windtunnel.policy.routing import ROUND_ROBIN

SEATS, TOKENS = 2, 400


def served(rows: list[tuple[float, int, int]], ranks: int, *, jumps: bool = True, **settings: Any) -> Record:
    """Requests of (arrival, prompt, output) on one replica; a step takes 1 s and 1 ms a token."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    n = len(rows)
    seats, blocks = settings.pop("seats", SEATS), settings.pop("blocks", 100)
    limits = Limits(seats, TOKENS, 500, blocks, 16)
    times = linear(
        1.0, 1e-3, 0.0, 0.0, max_num_batched_tokens=TOKENS, max_num_seqs=seats, max_model_len=500, ranks=ranks
    )
    fleet = Fleet((limits,), (Trtllm(**settings),), (times,), (1,), (ranks,), (True,))
    demand = Demand(
        arrival=arrival.astype(np.float64),
        prompt_tokens=prompt,
        output_tokens=output,
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
    )
    return run(fleet, demand, ROUND_ROBIN, np.zeros(n), jumps)


def test_the_longest_prompts_go_first_to_the_rank_with_the_fewest_tokens() -> None:
    # 90 to rank 0, 80 to rank 1, 30 to rank 1 again, which has fewer tokens and with it its share of two; 20 to rank 0.
    record = served([(0.0, 20, 3), (0.0, 30, 3), (0.0, 80, 3), (0.0, 90, 3)], 2)
    assert record.requests["lane"].tolist() == [0, 1, 1, 0]
    assert (record.requests["state"] == GONE).all()


def test_who_comes_later_joins_the_lighter_rank_when_the_next_step_is_decided() -> None:
    # While the first runs on rank 0, the other two come: the longer one goes to rank 1, and the shorter one, too, whose
    # 40 tokens are still fewer.
    record = served([(0.0, 90, 9), (1.5, 10, 3), (1.6, 40, 3)], 2)
    assert record.requests["lane"].tolist() == [0, 1, 1]


def test_those_for_whom_there_is_no_place_wait_together() -> None:
    # Each rank has one place. The third gets that of the one that ends first, wherever it was sent.
    for outputs in ((9, 2), (2, 9)):
        record = served([(0.0, 60, outputs[0]), (0.0, 50, outputs[1]), (0.1, 10, 2)], 2, seats=1)
        assert record.requests["lane"].tolist() == [0, 1, int(np.argmin(outputs))]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_many_at_once_are_dealt_as_from_a_heap(ranks: int) -> None:
    prompts = np.random.default_rng(ranks).integers(1, 300, 29).tolist()
    heap, share, wanted = [(0, 0, rank) for rank in range(ranks)], -(-29 // ranks), [-1] * 29
    for r in sorted(range(29), key=lambda r: -prompts[r]):
        tokens, count, wanted[r] = heappop(heap)
        if count + 1 < share:
            heappush(heap, (tokens + prompts[r], count + 1, wanted[r]))
    record = served([(0.0, tokens, 2) for tokens in prompts], ranks, seats=29, blocks=2000)
    assert record.requests["lane"].tolist() == wanted


def drawn(seed: int) -> tuple[list[tuple[float, int, int]], int, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    count, ranks = int(rng.integers(1, 40)), int(rng.integers(2, 5))
    arrival = np.cumsum(rng.exponential(float(rng.choice([1e-9, 1.0, 6.0])), count))
    rows = [(float(at), int(rng.integers(1, 200)), int(rng.integers(1, 40))) for at in arrival]
    settings = {
        "capacity_scheduler_policy": str(rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        "chunked_prefill": bool(rng.random() < 0.5),
        "disable_overlap_scheduler": bool(rng.random() < 0.5),
        "enable_balance": bool(rng.random() < 0.5),
        "seats": int(rng.choice([1, 2, 5, 16])),
        "blocks": int(rng.choice([20, 40, 200])),
    }
    return rows, ranks, settings


@IN_PLAIN_PYTHON
def test_jumps_change_nothing_and_all_end() -> None:
    for seed in range(8):
        rows, ranks, settings = drawn(seed)
        jumping, stepping = (served(rows, ranks, jumps=jumps, **settings) for jumps in (True, False))
        for name in ("scheduled", "first_token", "finish", "lane", "preemptions"):
            assert np.array_equal(jumping.requests[name], stepping.requests[name], equal_nan=True), (seed, name)
        assert (jumping.requests["state"] == GONE).all(), seed


@WITH_THE_COMPILER
@pytest.mark.long
def test_in_plain_python() -> None:
    in_plain_python(8, __file__)
