"""SGLang's overlap schedule: each consequence on a workload small enough to follow by hand."""

import pytest
from sglang_rounds import SHARED, Overlapped, ask, engine

from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Sglang
from windtunnel.reference.loop import Loop, Replica, round_robin
from windtunnel.reference.replica import Group, table_time
from windtunnel.reference.request import Request
from windtunnel.reference.sglang_rank import SglangRank


def test_whoever_ends_decodes_once_more_even_at_its_declared_length() -> None:
    overlapped = Overlapped(engine(ask("a", 3, 2), ask("b", 4, 1)))
    assert overlapped.rounds(5) == ["extend a3 b4", "decode a1 b1", "decode a1", "idle", "idle"]


def test_a_place_is_free_one_round_after_the_tokens() -> None:
    scheduler = engine(ask("a", 3, 2))
    overlapped, free = Overlapped(scheduler), []
    for _ in range(5):
        overlapped.one_round()
        free.append(scheduler.pool.available)
    # the third round is one too many, and its place comes back with the fifth decision
    assert free == [997, 996, 999, 1000, 1000]


def test_a_seat_is_free_two_rounds_after_the_last_token() -> None:
    scheduler = engine(ask("a", 3, 2), ask("b", 3, 5), ask("c", 3, 5), max_running_requests=2)
    expected = ["extend a3 b3", "decode a1 b1", "decode a1 b1", "decode b1", "extend c3", "decode b1 c1"]
    assert Overlapped(scheduler).rounds(6) == expected


def test_first_tokens_are_not_awaited() -> None:
    """Two prompts in rounds next to each other, then both decode, though the second one's token is not known."""
    scheduler = engine(ask("a", 8, 3), ask("b", 6, 2), chunked_prefill_size=8)
    assert Overlapped(scheduler).rounds(2) == ["extend a8", "extend b6"]
    batch = scheduler.schedule()
    assert batch is not None
    assert [(part.request.id, part.start, part.request.generated) for part in batch.scheduled] == [
        ("a", 8, 1),
        ("b", 6, 0),
    ]


def test_a_chunked_prompt_goes_on_before_its_chunk_has_run() -> None:
    scheduler = engine(ask("a", 20, 2), ask("b", 5, 2), chunked_prefill_size=8)
    expected = ["extend a8", "extend a8", "extend a4 b4", "extend b1", "decode a1 b1", "decode a1 b1", "idle"]
    assert Overlapped(scheduler).rounds(7) == expected


def test_the_token_in_flight_of_a_retracted_request_is_lost() -> None:
    """Three that run although their outputs don't fit: whoever is retracted computes its last token again."""
    scheduler = engine(ask("a", 10, 60, declared=6), max_total_tokens=60, schedule_conservativeness=0)
    overlapped = Overlapped(scheduler)
    overlapped.rounds(4)
    scheduler.waiting += [ask("b", 8, 30, declared=6), ask("c", 9, 30, declared=6)]
    decodes = 0
    while (batch := overlapped.one_round()) is not None and not batch.retracted:
        decodes += batch.mode == "decode"
    assert batch is not None
    assert [request.id for request in batch.retracted] == ["c", "b"]
    # the first token and all but the last decode's, which is in flight; without overlap one more
    assert [request.generated for request in batch.retracted] == [decodes, decodes]
    assert scheduler.pool.available == 60 - batch.scheduled[0].request.held


def test_a_prompt_that_is_retracted_before_its_first_token_is_known_gives_all_back() -> None:
    scheduler = engine(ask("a", 10, 60, declared=2), max_total_tokens=30, schedule_conservativeness=0)
    overlapped = Overlapped(scheduler)
    overlapped.rounds(10)
    assert scheduler.pool.available == 30 - 10 - 9
    scheduler.waiting.append(ask("b", 8, 5, declared=1))
    assert overlapped.rounds(1) == ["extend b8"]
    b = overlapped.flying[-1].scheduled[0].request
    assert overlapped.rounds(1) == ["decode a1 b1"]
    assert scheduler.pool.available == 1
    batch = overlapped.one_round()
    assert batch is not None
    assert (batch.retracted, b.generated, b.num_tokens) == ([b], 1, 9)


def test_the_ratio_starts_anew_only_when_nothing_is_in_flight() -> None:
    scheduler = engine(ask("a", 3, 3))
    overlapped, ratios = Overlapped(scheduler), []
    for _ in range(6):
        overlapped.one_round()
        ratios.append(scheduler.new_token_ratio)
    assert ratios[0] == ratios[5] == 0.7
    assert 0.7 > ratios[1] > ratios[2] > ratios[3] == ratios[4]


def test_a_beginning_is_found_when_the_prompt_that_holds_it_has_run() -> None:
    """Its tokens join the tree with its outcome, a round later than without overlap."""

    def hits(rounds: int) -> int:
        scheduler = engine(ask("a", SHARED[:40], 9), disable_radix_cache=False)
        overlapped = Overlapped(scheduler)
        overlapped.rounds(rounds)
        late = ask("b", [*SHARED[:40], 7, 8], 2)
        scheduler.waiting.append(late)
        batch = overlapped.one_round()
        assert batch is not None and batch.mode == "extend"
        return batch.scheduled[0].start

    assert [hits(1), hits(2)] == [0, 40]


@pytest.mark.parametrize(("disabled", "first_token"), [(True, 4.0), (False, 5.0)])
def test_who_arrives_during_a_round_is_seen_one_round_later(disabled: bool, first_token: float) -> None:
    """Rounds of a second: the prompt that comes during the third runs in the fourth, or in the fifth."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 64}
    policy = Sglang(radix_cache=False, disable_overlap_schedule=disabled)
    requests = [Request(0, 0.0, 8, 20, 20), Request(1, 2.5, 8, 2, 2)]
    rank = SglangRank(Limits(4, 64, 64, 1000, 1), policy)
    group = Group([rank], table_time(linear(1.0, 0.0, 0.0, 0.0, **sizes)), 1 if disabled else 2)
    Loop([Replica([group])], round_robin, requests).run()
    assert requests[1].first_token == first_token
