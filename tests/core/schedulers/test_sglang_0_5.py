"""What SGLang 0.5.23 does otherwise than 0.4.6, on workloads small enough to follow by hand."""

from typing import Any

import pytest

from core.called import called
from core.schedulers.sglang_rounds import SHARED, Ask, Engine, ask, engine
from windtunnel.core.schedulers.sglang.tree.radix import descend
from windtunnel.errors import InputError
from windtunnel.policy import Sglang


def newer(*asks: Ask, later: tuple[Ask, ...] = (), **settings: object) -> Engine:
    return engine(*asks, later=later, version="sglang-0.5.23", **settings)


def overlapped(*asks: Ask, later: tuple[Ask, ...] = (), **settings: object) -> Engine:
    return newer(*asks, later=later, disable_overlap_schedule=False, **settings)


def test_a_seat_is_free_in_the_round_after_the_last_token() -> None:
    requests = ask("a", 3, 2), ask("b", 3, 5), ask("c", 3, 5)
    scheduler = newer(*requests, max_running_requests=2)
    assert scheduler.rounds(4) == ["extend a3 b3", "decode a1 b1", "extend c3", "decode b1 c1"]


def test_nobody_decodes_past_a_declared_length() -> None:
    scheduler = overlapped(ask("a", 3, 2), ask("b", 4, 1))
    assert scheduler.rounds(4) == ["extend a3 b4", "decode a1", "idle", "idle"]


def test_who_ends_early_decodes_once_more_and_leaves_what_it_wrote() -> None:
    scheduler = overlapped(ask("a", [*SHARED[:8]], 2, declared=9), disable_radix_cache=False)
    assert scheduler.rounds(4) == ["extend a8", "decode a1", "decode a1", "idle"]
    assert (scheduler.available, scheduler.evictable) == (990, 10)  # prompt and output, the last token included


def test_a_round_that_does_not_fit_is_skipped_for_those_that_end() -> None:
    """a's last token is in flight and its memory comes back: b waits for it, and is not sent back."""
    scheduler = overlapped(ask("a", 10, 2), ask("b", 4, 9, declared=9), max_total_tokens=40)
    scheduler.rounds(1)
    scheduler.lane["free"] -= scheduler.available - 2  # two places are left: for the decodes of the next round
    assert scheduler.rounds(3) == ["decode a1 b1", "idle", "decode b1"]
    assert not any(scheduler.preemptions)


def test_a_retraction_keeps_no_margin_and_adds_one_to_the_sum_of_lengths() -> None:
    requests = [ask(name, prompt, 100, declared=110) for name, prompt in (("a", 10), ("b", 30), ("c", 10))]
    scheduler = newer(*requests, max_total_tokens=100, schedule_conservativeness=0)
    scheduler.columns["declared"][:] = 10  # so that all of them are admitted
    rounds = scheduler.rounds(17)
    scheduler.columns["declared"][:] = 110
    assert rounds[-1] == "decode a1 b1 c1"
    assert scheduler.available == 2
    assert scheduler.rounds(1) == ["decode a1 c1"]
    assert scheduler.names(scheduler.waiting) == ["b"]


@pytest.mark.parametrize(("total", "admitted"), [(31, "idle"), (32, "extend a10")])
def test_a_candidate_needs_a_page_more_than_it_declares(total: int, admitted: str) -> None:
    assert newer(ask("a", 10, 3, declared=20), max_total_tokens=total).rounds(1) == [admitted]


def test_with_chunks_max_prefill_tokens_ends_a_round_only_when_it_is_used_up() -> None:
    requests = ask("a", 15, 2), ask("b", 6, 2), ask("c", 1, 2)
    assert newer(*requests, max_prefill_tokens=20).rounds(1) == ["extend a15 b6"]
    whole = newer(*requests[:2], max_prefill_tokens=21, chunked_prefill_size=-1)
    assert whole.rounds(1) == ["extend a15"]  # 6 of 6 left are not fewer


def test_declared_lengths_that_are_true_count_whole() -> None:
    later = (ask("b", 10, 30),)  # of 89 left, a needs 49 whole, or 34.3
    for ignore_eos, second in ((False, "extend b10"), (True, "decode a1")):
        settings: dict[str, Any] = {"ignore_eos": ignore_eos, "disable_radix_cache": False}
        scheduler = newer(ask("a", 10, 50), later=later, max_total_tokens=99, **settings)
        scheduler.one_round()
        scheduler.arrive("b")
        assert scheduler.rounds(1) == [second]


def test_memory_is_handed_out_and_found_in_pages() -> None:
    later = (ask("b", [*SHARED[:30], -1], 3),)
    settings: dict[str, Any] = {"page_size": 8, "disable_radix_cache": False, "max_total_tokens": 100}
    scheduler = newer(ask("a", [*SHARED[:30], -2, -3], 2), later=later, **settings)
    assert scheduler.rounds(1) == ["extend a32"]
    assert scheduler.available == 96 - 32
    scheduler.rounds(2)
    assert (scheduler.available, scheduler.evictable) == (64, 32)  # the second token's page has come back
    scheduler.arrive("b")
    assert scheduler.rounds(1) == ["extend b7"]  # 24 of 30 equal tokens are whole pages
    assert scheduler.available == 96 - 32 - 8


def test_a_prompt_is_cut_on_a_border_of_pages() -> None:
    requests = ask("a", 21, 2), ask("b", 40, 2)
    scheduler = newer(*requests, page_size=8, chunked_prefill_size=40, max_total_tokens=400)
    assert scheduler.rounds(3) == ["extend a21 b16", "extend b24", "decode a1 b1"]


def test_prompts_wait_for_an_interval_of_decodes() -> None:
    requests = ask("a", 3, 9), ask("b", 3, 9), ask("c", 3, 9)
    scheduler = newer(*requests, prefill_max_requests=1, prefill_decode_interval=2)
    assert scheduler.rounds(5) == ["extend a3", "decode a1", "decode a1", "extend b3", "decode a1 b1"]
    few = newer(*requests, prefill_max_requests=1, prefill_decode_interval=2, prefill_decode_interval_min_bs=2)
    assert few.rounds(4) == ["extend a3", "extend b3", "decode a1 b1", "decode a1 b1"]


def test_new_prompts_wait_for_several_free_seats() -> None:
    requests = ask("a", 3, 2), ask("b", 3, 4), ask("c", 3, 5)
    scheduler = newer(*requests, max_running_requests=2, min_free_slots=2)
    assert scheduler.rounds(5) == ["extend a3 b3", "decode a1 b1", "decode b1", "decode b1", "extend c3"]


def test_the_most_urgent_is_first_and_takes_the_seat_of_the_least() -> None:
    later = (ask("d", 3, 5, priority=20), ask("e", 3, 5, priority=8))
    requests = ask("a", 3, 9, priority=3), ask("b", 3, 9, priority=7), ask("c", 3, 9, priority=5)
    scheduler = newer(*requests, later=later, max_running_requests=2, enable_priority_scheduling=True)
    assert scheduler.rounds(1) == ["extend b3 c3"]
    scheduler.arrive("d", "e")
    batch = scheduler.one_round()
    assert batch is not None
    assert scheduler.words(batch) == "extend d3"
    assert scheduler.names(batch.preempted) == ["c"]  # 20 − 5 > 10; e differs from b by 1
    assert scheduler.names(scheduler.waiting) == ["e", "a", "c"]


def test_orders_of_the_queue() -> None:
    later = ask("b", [*SHARED[:60], -1], 2), ask("c", 8, 2), ask("d", [*SHARED[:40], -2], 2)
    first = {"lpm": "b", "hrrn": "b", "shortest-prefill-first": "b", "lof": "c", "fcfs": "c"}
    for order, head in first.items():
        settings: dict[str, Any] = {"schedule_policy": order, "disable_radix_cache": False, "prefill_max_requests": 1}
        scheduler = newer(ask("a", SHARED[:60], 1), later=later, **settings)
        scheduler.rounds(2)
        scheduler.arrive("c", "b", "d")
        (part,) = scheduler.one_round().parts  # type: ignore[union-attr]
        assert scheduler.names([part.r]) == [head], order


@called
def match(tree: Any, lane: Any, r: int, root: int, tokens: int) -> Any:
    return descend(tree, lane, r, root, 0, tokens)


@pytest.mark.parametrize(("eviction", "kept"), [("lru", "b"), ("fifo", "b"), ("filo", "a"), ("mru", "a"), ("lfu", "b")])
def test_which_prefix_is_evicted_first(eviction: str, kept: str) -> None:
    later = (ask("b", [*SHARED[50:60], -2], 1), ask("b2", [*SHARED[50:60], -3], 1), ask("c", 30, 1))
    settings: dict[str, Any] = {"disable_radix_cache": False, "max_total_tokens": 45, "radix_eviction_policy": eviction}
    scheduler = newer(ask("a", [*SHARED[:10], -1], 1), later=later, **settings)
    scheduler.rounds(1)
    for name in ("b", "b2", "c"):
        scheduler.arrive(name)
        scheduler.rounds(2)
    tree, lane = scheduler.stepper.state.extra.tree, scheduler.lane
    found = {name: match(tree, lane, scheduler.number(name), lane["root"], 10)[0] for name in ("a", "b")}
    assert found == {"a": 0, "b": 0} | {kept: 10}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "0.4.6", "page_size": 16}, "page_size=16: SGLang has it from 0.5 on"),
        ({"version": "0.4.6", "schedule_policy": "hrrn"}, "schedule_policy=hrrn: must be dfs-weight or fcfs"),
        ({"page_size": 0}, "page_size=0: must be ≥ 1"),
        ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "must be 'fcfs' or 'lof' with priorities"),
        ({"schedule_policy": "shortest-prefill-first", "radix_cache": False}, "needs the radix cache"),
        ({"retraction_policy": "priority"}, "needs enable_priority_scheduling"),
        ({"version": "0.5"}, "unknown version '0.5'"),
    ],
)
def test_settings_that_can_not_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sglang(**settings)


def refused_of(scheduler: Engine) -> list[str]:
    return [one.name for one, columns in zip(scheduler.asks, scheduler.columns, strict=True) if columns["refused"]]


def test_a_full_queue_refuses_the_newest() -> None:
    requests = ask("a", 3, 3), ask("b", 3, 2), ask("c", 3, 2)
    scheduler = newer(*requests, max_running_requests=1, max_queued_requests=2)
    assert scheduler.rounds(6) == ["extend a3", "decode a1", "decode a1", "extend b3", "decode b1", "idle"]
    assert refused_of(scheduler) == ["c"]


def test_with_priorities_the_least_urgent_goes_if_it_is_less_urgent() -> None:
    requests = ask("a", 3, 2, priority=2), ask("b", 3, 2, priority=1), ask("c", 3, 2, priority=1)
    later = (ask("d", 3, 2, priority=2), ask("e", 3, 2, priority=1))
    settings: dict[str, Any] = {"max_running_requests": 1, "max_queued_requests": 3, "enable_priority_scheduling": True}
    scheduler = newer(*requests, *later, **settings)
    # d throws c out, which came after b; e is no more urgent than b
    assert scheduler.rounds(6) == ["extend a3", "decode a1", "extend d3", "decode d1", "extend b3", "decode b1"]
    assert refused_of(scheduler) == ["c", "e"]


def drafting(method: str, accept: float) -> dict[str, object]:
    return {"k": 3, "method": method, "accept": accept}


@pytest.mark.parametrize(("accept", "rounds"), [(1.0, 2), (0.0, 8)])
def test_a_round_yields_the_drafts_that_are_right_and_one_more(accept: float, rounds: int) -> None:
    scheduler = newer(ask("a", 10, 9), spec=drafting("draft_model", accept))
    assert scheduler.rounds(rounds + 2) == ["extend a10", *["decode a4"] * rounds, "idle"]
    assert scheduler.finished("a")


def test_memory_is_held_for_two_rounds_ahead_and_all_of_it_comes_back() -> None:
    scheduler = newer(ask("a", 10, 9), spec=drafting("draft_model", 1.0), disable_radix_cache=True)
    left = [(scheduler.rounds(1), scheduler.available)[1] for _ in range(3)]
    assert left == [1000 - 10, 1000 - (10 + 2 * 4), 1000]


@pytest.mark.parametrize(("method", "found"), [("draft_model", 8), ("eagle", 7)])
def test_eagle_finds_a_token_only_with_the_one_after_it(method: str, found: int) -> None:
    later = (ask("b", [*SHARED[:8], -1, -2], 1),)
    scheduler = newer(
        ask("a", [*SHARED[:8], -3], 1), later=later, spec=drafting(method, 0.0), disable_radix_cache=False
    )
    scheduler.rounds(1)
    scheduler.arrive("b")
    assert scheduler.rounds(1) == [f"extend b{10 - found}"]
