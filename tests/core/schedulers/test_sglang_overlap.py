"""SGLang's overlap schedule: each consequence on a workload small enough to follow by hand."""

import numpy as np
import pytest

from core.schedulers.sglang_rounds import SHARED, Ask, Engine, ask, engine
from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Sglang


def overlapped(*asks: Ask, later: tuple[Ask, ...] = (), **settings: object) -> Engine:
    return engine(*asks, later=later, disable_overlap_schedule=False, **settings)


def test_whoever_ends_decodes_once_more_even_at_its_declared_length() -> None:
    scheduler = overlapped(ask("a", 3, 2), ask("b", 4, 1))
    assert scheduler.rounds(5) == ["extend a3 b4", "decode a1 b1", "decode a1", "idle", "idle"]


def test_a_place_is_free_one_round_after_the_tokens() -> None:
    scheduler, free = overlapped(ask("a", 3, 2)), []
    for _ in range(5):
        scheduler.one_round()
        free.append(scheduler.available)
    # the third round is one too many, and its place comes back when it has run
    assert free == [997, 996, 999, 1000, 1000]


def test_a_seat_is_free_two_rounds_after_the_last_token() -> None:
    scheduler = overlapped(ask("a", 3, 2), ask("b", 3, 5), ask("c", 3, 5), max_running_requests=2)
    expected = ["extend a3 b3", "decode a1 b1", "decode a1 b1", "decode b1", "extend c3", "decode b1 c1"]
    assert scheduler.rounds(6) == expected


def test_first_tokens_are_not_awaited() -> None:
    """Two prompts in rounds next to each other, then both decode, though the second one's token is not known."""
    scheduler = overlapped(ask("a", 8, 3), ask("b", 6, 2), chunked_prefill_size=8)
    assert scheduler.rounds(2) == ["extend a8", "extend b6"]
    batch = scheduler.schedule_one()
    assert batch is not None
    assert [(part.start, int(scheduler.columns["generated"][part.r])) for part in batch.parts] == [
        (8, 1),
        (6, 0),
    ]


def test_a_chunked_prompt_goes_on_before_its_chunk_has_run() -> None:
    scheduler = overlapped(ask("a", 20, 2), ask("b", 5, 2), chunked_prefill_size=8)
    expected = ["extend a8", "extend a8", "extend a4 b4", "extend b1", "decode a1 b1", "decode a1 b1", "idle"]
    assert scheduler.rounds(7) == expected


def test_the_token_in_flight_of_a_retracted_request_is_lost() -> None:
    """Three that run although their outputs don't fit: whoever is retracted computes its last token again."""
    later = (ask("b", 8, 30, declared=6), ask("c", 9, 30, declared=6))
    scheduler = overlapped(ask("a", 10, 60, declared=6), later=later, max_total_tokens=60, schedule_conservativeness=0)
    scheduler.rounds(4)
    scheduler.arrive("b", "c")
    decodes = 0
    while (batch := scheduler.one_round()) is not None and not batch.retracted:
        decodes += batch.mode == "decode"
    assert batch is not None
    assert scheduler.names(batch.retracted) == ["c", "b"]
    # the first token and all but the last decode's, which is in flight; without overlap one more
    assert scheduler.columns["generated"][batch.retracted].tolist() == [decodes, decodes]
    assert scheduler.available == 60 - batch.parts[0].start - 1


def test_a_prompt_that_is_retracted_before_its_first_token_is_known_gives_all_back() -> None:
    later = (ask("b", 8, 5, declared=1),)
    scheduler = overlapped(ask("a", 10, 60, declared=2), later=later, max_total_tokens=30, schedule_conservativeness=0)
    scheduler.rounds(10)
    assert scheduler.available == 30 - 10 - 9
    scheduler.arrive("b")
    assert scheduler.rounds(2) == ["extend b8", "decode a1 b1"]
    assert scheduler.available == 1
    batch = scheduler.one_round()
    assert batch is not None
    assert (scheduler.names(batch.retracted), int(scheduler.columns["generated"][1])) == (["b"], 1)


def test_the_ratio_starts_anew_only_when_nothing_is_in_flight() -> None:
    scheduler, ratios = overlapped(ask("a", 3, 3)), []
    for _ in range(6):
        scheduler.one_round()
        ratios.append(scheduler.new_token_ratio)
    assert ratios[0] == ratios[5] == 0.7
    assert 0.7 > ratios[1] > ratios[2] > ratios[3] == ratios[4]


def test_a_beginning_is_found_when_the_prompt_that_holds_it_has_run() -> None:
    """Its tokens join the tree with its outcome, a round later than without overlap."""

    def hits(rounds: int) -> int:
        late = ask("b", [*SHARED[:40], 7, 8], 2)
        scheduler = overlapped(ask("a", SHARED[:40], 9), later=(late,), disable_radix_cache=False)
        scheduler.rounds(rounds)
        scheduler.arrive("b")
        batch = scheduler.one_round()
        assert batch is not None and batch.mode == "extend"
        return batch.parts[0].start

    assert [hits(1), hits(2)] == [0, 40]


@pytest.mark.parametrize(("disabled", "first_token"), [(True, 4.0), (False, 5.0)])
def test_who_arrives_during_a_round_is_seen_one_round_later(disabled: bool, first_token: float) -> None:
    """Rounds of a second: the prompt that comes during the third runs in the fourth, or in the fifth."""
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    policy = Sglang(radix_cache=False, disable_overlap_schedule=disabled)
    demand = Demand(
        arrival=np.array([0.0, 2.5]),
        prompt_tokens=np.array([8, 8]),
        output_tokens=np.array([20, 2]),
        overruns=np.zeros(2, dtype=bool),
        refused=np.zeros(2, dtype=bool),
        follow=np.full(2, -1),
        think_time=np.zeros(2),
        max_concurrency=0,
    )
    record = run(
        Fleet((Limits(4, 64, 64, 1000, 1),), (policy,), (times,), (1,), (1,), (False,)), demand, 0, np.zeros(2)
    )
    assert record.requests["first_token"][1] == first_token
