"""Each rule of SGLang's scheduler on a workload small enough to follow by hand."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_rounds import SHARED, ask, engine, one_round, rounds

from windtunnel.errors import InputError
from windtunnel.reference.sglang import Scheduler
from windtunnel.reference.sglang_admission import Admission, Verdict
from windtunnel.reference.sglang_request import Request, Settings


def test_prompts_run_alone_and_decode_from_the_next_round_on() -> None:
    scheduler = engine(ask("a", 3, 3), ask("b", 4, 2))
    assert rounds(scheduler, 1) == ["extend a3 b4"]
    scheduler.waiting.append(ask("c", 5, 1))
    assert rounds(scheduler, 4) == ["extend c5", "decode a1 b1", "decode a1", "idle"]
    assert scheduler.pool.available == 1000


@pytest.mark.parametrize(("total", "admitted"), [(30, "idle"), (31, "extend a10")])
def test_a_candidate_needs_more_than_it_declares(total: int, admitted: str) -> None:
    assert rounds(engine(ask("a", 10, 3, declared=20), max_total_tokens=total), 1) == [admitted]


@pytest.mark.parametrize(("conservativeness", "second"), [(1.0, "decode a1"), (0.5, "extend b10")])
def test_the_running_reserve_a_share_of_what_they_declare(conservativeness: float, second: str) -> None:
    scheduler = engine(ask("a", 10, 41), max_total_tokens=80, schedule_conservativeness=conservativeness)
    one_round(scheduler)
    scheduler.waiting.append(ask("b", 10, 35))  # 70 left, less 40 × 0.7 or × 0.35
    assert rounds(scheduler, 1) == [second]
    assert scheduler.batch_is_full == (conservativeness == 1.0)


def test_only_the_first_prompt_may_exceed_the_input_budget() -> None:
    scheduler = engine(ask("a", 30, 2), ask("b", 5, 2), max_prefill_tokens=20, chunked_prefill_size=-1)
    assert rounds(scheduler, 2) == ["extend a30", "extend b5"]
    scheduler = engine(ask("a", 15, 2), ask("b", 6, 2), ask("c", 1, 2), max_prefill_tokens=20)
    assert rounds(scheduler, 1) == ["extend a15"]
    assert not scheduler.batch_is_full


def test_after_an_end_one_more_decode_round_passes_before_others_come_in() -> None:
    scheduler = engine(ask("a", 3, 2), ask("b", 3, 5), ask("c", 3, 5), max_running_requests=2)
    expected = ["extend a3 b3", "decode a1 b1", "decode b1", "extend c3", "decode b1 c1"]
    assert rounds(scheduler, 5) == expected


def test_the_flag_is_cleared_by_a_prefill_batch_that_shrank() -> None:
    scheduler = engine(ask("a", 3, 3), ask("b", 3, 1), ask("c", 3, 2), max_running_requests=2)
    assert rounds(scheduler, 3) == ["extend a3 b3", "extend c3", "decode a1 c1"]


def test_the_flag_is_lost_when_the_running_batch_was_empty() -> None:
    scheduler = engine(ask("a", 10, 50), ask("b", 10, 30), max_total_tokens=90)
    assert rounds(scheduler, 1) == ["extend a10"]  # b would need 40 of 90 − 60
    assert scheduler.batch_is_full
    assert rounds(scheduler, 1) == ["extend b10"]  # of 80 − 49 · 0.7


def test_a_full_engine_that_empties_has_one_idle_round() -> None:
    scheduler = engine(ask("a", 3, 2), ask("b", 3, 1), max_running_requests=1)
    assert rounds(scheduler, 3) == ["extend a3", "decode a1", "idle"]
    assert rounds(scheduler, 1) == ["extend b3"]


def test_long_prompts_are_cut_and_leave_the_rest_of_the_chunk_to_others() -> None:
    scheduler = engine(ask("a", 20, 2), ask("b", 5, 2), ask("c", 9, 2), chunked_prefill_size=8)
    assert rounds(scheduler, 1) == ["extend a8"]
    assert scheduler.chunked is not None and scheduler.chunked.id == "a"
    assert rounds(scheduler, 4) == ["extend a8", "extend a4 b4", "extend b1 c7", "extend c2"]
    assert scheduler.chunked is None
    assert rounds(scheduler, 2) == ["decode a1 b1 c1", "idle"]
    assert scheduler.pool.available == 1000


def test_a_chunk_goes_on_though_the_batch_is_full() -> None:
    scheduler = engine(ask("a", 20, 2), ask("b", 5, 2), chunked_prefill_size=8, max_running_requests=1)
    assert rounds(scheduler, 4) == ["extend a8", "extend a8", "extend a4", "decode a1"]


def test_the_last_chunk_reserves_the_output() -> None:
    scheduler = engine(ask("a", 12, 10), ask("b", 2, 10), chunked_prefill_size=8, max_total_tokens=28)
    assert rounds(scheduler, 3) == ["extend a8", "extend a4", "decode a1"]
    assert [request.id for request in scheduler.waiting] == ["b"]


def test_the_ratio_decays_by_decode_rounds_and_starts_anew_after_an_idle_one() -> None:
    scheduler = engine(ask("a", 3, 800), schedule_conservativeness=0.5)
    ratios = [scheduler.new_token_ratio]
    for _ in range(701):
        one_round(scheduler)
        ratios.append(scheduler.new_token_ratio)
    assert ratios[:2] == [0.35, 0.35]
    assert ratios[301] == pytest.approx(0.35 - 0.35 * 0.86 / 2)
    assert ratios[601] == pytest.approx(0.35 * 0.14)
    assert ratios[701] == 0.35 * 0.14
    rounds(scheduler, 100)
    assert scheduler.schedule() is None
    assert scheduler.new_token_ratio == 0.35


def overfull(**settings: object) -> Scheduler:
    """Three that run although their outputs don't fit into 60 tokens; a came first and has generated more."""
    scheduler = engine(ask("a", 10, 60, declared=6), max_total_tokens=60, schedule_conservativeness=0, **settings)
    rounds(scheduler, 4)
    scheduler.waiting += [ask("b", 8, 30, declared=6), ask("c", 9, 30, declared=6)]
    one_round(scheduler)
    return scheduler


def test_retraction_takes_the_fewest_generated_then_the_longer_prompt() -> None:
    scheduler = overfull()
    assert rounds(scheduler, 9)[-1] == "decode a1 b1 c1"
    assert scheduler.pool.available == 60 - 13 - 8 - 9 - 27
    one_round(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    assert [request.id for request in batch.retracted] == ["c", "b"]
    assert [request.id for request in scheduler.waiting] == ["c", "b"]
    assert [part.request.id for part in batch.scheduled] == ["a"]
    assert scheduler.pool.available == 60 - 24
    assert scheduler.new_token_ratio == 1.0


def test_retraction_stops_once_twenty_tokens_each_are_free_and_sets_the_ratio() -> None:
    requests = [ask(name, prompt, 100, declared=10) for name, prompt in (("a", 10), ("b", 50), ("c", 10), ("d", 10))]
    scheduler = engine(*requests, max_total_tokens=160)
    for request in requests:
        one_round(scheduler)
        request.max_new_tokens = 200
    assert rounds(scheduler, 17)[-1] == "decode a1 b1 c1 d1"
    assert scheduler.pool.available == 0
    assert rounds(scheduler, 1) == ["decode a1 c1 d1"]
    assert [request.id for request in scheduler.waiting] == ["b"]
    assert scheduler.pool.available == 50 + 20 - 3
    assert scheduler.new_token_ratio == (3 * 21 + 3 * 20) / 600


def test_a_retracted_request_comes_back_with_its_output_as_prompt() -> None:
    victim = ask("b", 8, 6)
    victim.tokens += ask("output so far", 4, 1).tokens
    scheduler = engine(victim)
    assert rounds(scheduler, 3) == ["extend b12", "decode b1", "idle"]
    assert scheduler.pool.available == 1000


def test_with_a_tree_a_retracted_prompt_stays_in_it_unless_room_is_short() -> None:
    scheduler = overfull(disable_radix_cache=False)
    while not (batch := one_round(scheduler)) or not batch.retracted:
        assert batch is not None
    assert [request.id for request in batch.retracted] == ["c", "b"]
    assert scheduler.pool.evictable == 8  # of c's prompt nothing is left, of b's all
    assert scheduler.pool.available == 60 - 24 - 8


def test_memory_that_was_never_checked_stops_the_engine() -> None:
    scheduler = engine(ask("b", 3, 40, declared=1), max_total_tokens=50, chunked_prefill_size=30)
    rounds(scheduler, 11)
    scheduler.waiting.append(ask("a", 40, 1))  # 41 of 37 + 10 · 0.7 tokens, as b has had 10 more than it declared
    assert rounds(scheduler, 1) == ["extend a30"]
    with pytest.raises(InputError, match="max_total_tokens=50: SGLang runs out of memory"):
        scheduler.schedule()


def test_the_only_request_left_can_not_be_retracted() -> None:
    with pytest.raises(InputError, match="no space left for only one request"):
        rounds(engine(ask("a", 10, 60, declared=5), max_total_tokens=20), 60)


def test_mixed_chunk_puts_decodes_behind_prompts_and_keeps_that_order() -> None:
    scheduler = engine(ask("a", 3, 9), ask("b", 3, 9), enable_mixed_chunk=True, chunked_prefill_size=8)
    one_round(scheduler)
    scheduler.waiting += [ask("c", 10, 9)]
    assert rounds(scheduler, 3) == ["mixed c6 a1 b1", "mixed c4 a1 b1", "decode c1 a1 b1"]


def test_mixed_decodes_may_take_the_whole_chunk_budget() -> None:
    scheduler = engine(ask("a", 1, 3), ask("b", 1, 9), enable_mixed_chunk=True, chunked_prefill_size=2)
    one_round(scheduler)
    scheduler.waiting += [ask("c", 2, 9)]
    assert rounds(scheduler, 5) == ["decode a1 b1", "decode a1 b1", "decode b1", "mixed c1 b1", "mixed c1 b1"]


def test_mixed_chunk_needs_chunks() -> None:
    assert not Settings(enable_mixed_chunk=True, chunked_prefill_size=-1).mixed_chunk


def admission(running: list[Request], available: int, **settings: object) -> Admission:
    scheduler = engine(ignore_eos=True, **settings)
    scheduler.pool.available = available
    return Admission(scheduler.settings, scheduler.pool, running, 0.5, 0)


@pytest.mark.parametrize(("available", "verdict"), [(36, Verdict.NO_MEMORY), (37, Verdict.CONTINUE)])
def test_known_lengths_are_followed_to_each_end(available: int, verdict: Verdict) -> None:
    running, candidate = ask("a", 30, 5), ask("b", 20, 8)
    # until the later end both decode: available − 20 − 8 · 2 > 0; then a's 30 are free: … + 30 − 8 > 0
    assert admission([running], available).consider(candidate) is verdict


def test_a_longer_output_than_all_goes_before_the_last() -> None:
    admitting = admission([ask("a", 3, 5)], 1000)
    for name, output in (("b", 4), ("c", 9), ("d", 5), ("e", 11)):
        admitting.consider(ask(name, 3, output))
    assert admitting.ends is not None
    assert [left for left, _ in admitting.ends] == [4, 5, 9, 11, 5]


def test_more_is_reserved_than_there_is_and_the_batch_is_full() -> None:
    admitting = admission([], 40)
    assert admitting.consider(ask("a", 5, 20)) is Verdict.CONTINUE
    assert admitting.consider(ask("b", 2, 14)) is Verdict.NO_MEMORY


def test_a_retracted_request_may_ask_for_more_than_there_is_for_ever() -> None:
    """Its known tokens and all that it declares: 78 + 23 of 100."""
    requests = [ask("a", [-1], 23), ask("b", [*SHARED[:55], -2], 23)]
    scheduler = engine(*requests, max_running_requests=2, max_total_tokens=100, chunked_prefill_size=-1)
    rounds = [one_round(scheduler) for _ in range(60)]
    assert rounds[-1] is None
    assert [request.finished for request in requests] == [True, False]
    assert scheduler.waiting == [requests[1]]
    assert requests[1].num_tokens + requests[1].max_new_tokens == 101


ENGINES = st.fixed_dictionaries(
    {
        "max_running_requests": st.integers(1, 6),
        "max_total_tokens": st.integers(100, 200),
        "chunked_prefill_size": st.sampled_from([-1, 8, 32]),
        "max_prefill_tokens": st.integers(10, 60),
        "schedule_policy": st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof"]),
        "disable_radix_cache": st.booleans(),
        "enable_mixed_chunk": st.booleans(),
        "ignore_eos": st.booleans(),
    }
)


@given(ENGINES, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 30)), max_size=12))
def test_every_request_ends_and_all_memory_comes_back(
    settings: dict[str, object], sizes: list[tuple[int, int, int]]
) -> None:
    requests = [ask(str(i), [*SHARED[:shared], -i - 1], output) for i, (shared, _, output) in enumerate(sizes)]
    scheduler = engine(*requests, **settings)
    for _ in range(2000):
        try:
            batch = one_round(scheduler)
        except InputError:
            return
        pool = scheduler.pool
        assert pool.available >= 0 and pool.available + pool.evictable <= pool.max_total_tokens
        if batch is None and all(request.finished for request in requests):
            break
    left = [request for request in requests if not request.finished]
    if left:  # retracted with what it had generated, one asks for more than there is, and nobody passes it
        most = scheduler.pool.max_total_tokens
        assert any(request.num_tokens + request.max_new_tokens >= most for request in left)
        return
    assert [request.generated for request in requests] == [output for _, _, output in sizes]
    assert scheduler.pool.available + scheduler.pool.evictable == scheduler.pool.max_total_tokens
    assert scheduler.pool.tree is None or not any(node.locks for node in scheduler.pool.tree.nodes())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_running_requests": 0}, "max_running_requests=0: must be ≥ 1"),
        ({"max_total_tokens": -1}, "max_total_tokens=-1: must be ≥ 1"),
        ({"schedule_conservativeness": -0.1}, "schedule_conservativeness=-0.1: must be ≥ 0"),
        ({"schedule_policy": "lmp"}, "did you mean 'lpm'"),
    ],
)
def test_settings_that_can_not_be(setting: dict[str, object], message: str) -> None:
    make: Callable[..., Settings] = Settings
    with pytest.raises(InputError, match=message):
        make(**setting)
