"""Ranks of attention that let prompts in together, worked out by hand: rounds of a second each."""

from dataclasses import replace
from typing import Any

import pytest

from core.schedulers.sglang_cases import by_core, two_ranks
from windtunnel.core.schedulers.sglang.delayer import WINDOW, should_hold
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Sglang

DELAYED = Sglang(enable_prefill_delayer=True, prefill_delayer_max_delay_passes=6)


def scheduled(policy: Sglang, *arrival: float, seats: int = 8) -> Any:
    """When each of these requests was scheduled: they go to the ranks in turn, and run for a minute."""
    times = linear(1.0, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=seats, max_model_len=400, ranks=2)
    case = two_ranks(policy, times, arrival, 60, seats)
    record, single = by_core(case), by_core(case, jumps=False)
    assert record.requests["finish"].tolist() == single.requests["finish"].tolist()
    return record.requests["scheduled"]


def test_a_prompt_waits_for_one_of_the_other_rank() -> None:
    at_once = scheduled(replace(DELAYED, enable_prefill_delayer=False), 0, 10.5)
    alone, together = scheduled(DELAYED, 0, 10.5), scheduled(DELAYED, 0, 10.5, 13.5)
    assert alone[1] == at_once[1] + 5
    assert together[1] == together[2] == at_once[1] + 3


def test_none_waits_while_memory_is_empty() -> None:
    empty = replace(DELAYED, prefill_delayer_token_usage_low_watermark=0.5)
    assert scheduled(empty, 0, 10.5)[1] == scheduled(DELAYED, 0, 10.5)[1] - 5


def test_idle_ranks_wait_no_time() -> None:
    assert scheduled(DELAYED, 3.0)[0] == 3.0


def test_both_wait_for_as_many_seats_as_a_round_took_from_the_second_time_on() -> None:
    """Rounds of one prompt: a free seat is enough."""
    assert scheduled(DELAYED, 0, 0, 10.5, 10.5).tolist() == [0, 0, 12, 12]


class Lane:
    """The first rank, as far as the decision looks at it."""

    delayed, has_delayed, delayed_since = 0, 0, 0.0


class Pool:
    """Eight seats."""

    max_num_seqs, most_prompts, delay_queue_ratio, delay_most = 8, 1 << 60, 0.0, 5.0


def hold(running: int, waiting: int, most: int, lane: Lane, now: float = 0.0, asking: int = 2, **pool: float) -> bool:
    settings = Pool()
    for name, value in pool.items():
        setattr(settings, name, value)
    plain = getattr(should_hold, "py_func", should_hold)
    return bool(plain(settings, lane, asking, 2, running, waiting, most, now))


def test_who_is_held() -> None:
    lane = Lane()
    assert not hold(6, 1, 3, lane)  # too few seats for a round of three, but for the first time
    assert hold(6, 1, 3, lane)
    assert not hold(5, 1, 3, lane)
    assert not hold(6, 1, 3, lane, asking=0)
    assert hold(1, 1, 3, lane, asking=1)
    assert hold(4, 1, 4, lane, delay_queue_ratio=0.5)  # 1 of min(2, 4) wait
    assert not hold(4, 2, 4, lane, delay_queue_ratio=0.5)
    assert not hold(4, 1, 4, lane, delay_queue_ratio=0.5, most_prompts=1)
    lane.delayed = 1
    assert hold(4, 1, 4, lane, now=4.9, delay_queue_ratio=0.5)
    assert not hold(4, 1, 4, lane, now=5.0, delay_queue_ratio=0.5)


def test_what_it_needs() -> None:
    assert WINDOW == 16
    withouts: tuple[dict[str, Any], ...] = ({"disable_overlap_schedule": True}, {"pipeline_parallel_size": 2})
    for without in withouts:
        with pytest.raises(InputError, match="enable_prefill_delayer: needs the overlap schedule"):
            Sglang(enable_prefill_delayer=True, **without)
    with pytest.raises(InputError, match="enable_prefill_delayer=True: SGLang has it from"):
        Sglang(enable_prefill_delayer=True, version="0.4.6")
    assert not Sglang(enable_prefill_delayer=True).in_role("decode").enable_prefill_delayer


def test_all_ranks_count_the_rounds_since_the_prompt_of_one() -> None:
    at_once, later = scheduled(Sglang(), 0, 0.5), scheduled(Sglang(prefill_decode_interval=6), 0, 0.5)
    assert later[1] - at_once[1] == 5  # one of the six had begun
