"""Each rule of SGLang's scheduler on a workload small enough to follow by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.schedulers.sglang_rounds import SHARED, Engine, ask, engine
from windtunnel.core.schedulers.sglang.memory import BEYOND
from windtunnel.core.schedulers.sglang.tree.radix import FREE, LEFT, Tree
from windtunnel.errors import InputError


def test_prompts_run_alone_and_decode_from_the_next_round_on() -> None:
    scheduler = engine(ask("a", 3, 3), ask("b", 4, 2), later=(ask("c", 5, 1),))
    assert scheduler.rounds(1) == ["extend a3 b4"]
    scheduler.arrive("c")
    assert scheduler.rounds(4) == ["extend c5", "decode a1 b1", "decode a1", "idle"]
    assert scheduler.available == 1000


@pytest.mark.parametrize(("total", "admitted"), [(30, "idle"), (31, "extend a10")])
def test_a_candidate_needs_more_than_it_declares(total: int, admitted: str) -> None:
    assert engine(ask("a", 10, 3, declared=20), max_total_tokens=total).rounds(1) == [admitted]


@pytest.mark.parametrize(("conservativeness", "second"), [(1.0, "decode a1"), (0.5, "extend b10")])
def test_the_running_reserve_a_share_of_what_they_declare(conservativeness: float, second: str) -> None:
    later = (ask("b", 10, 35),)  # 70 left, less 40 × 0.7 or × 0.35
    scheduler = engine(ask("a", 10, 41), later=later, max_total_tokens=80, schedule_conservativeness=conservativeness)
    scheduler.one_round()
    scheduler.arrive("b")
    assert scheduler.rounds(1) == [second]
    assert scheduler.batch_is_full == (conservativeness == 1.0)


def test_only_the_first_prompt_may_exceed_the_input_budget() -> None:
    scheduler = engine(ask("a", 30, 2), ask("b", 5, 2), max_prefill_tokens=20, chunked_prefill_size=-1)
    assert scheduler.rounds(2) == ["extend a30", "extend b5"]
    scheduler = engine(ask("a", 15, 2), ask("b", 6, 2), ask("c", 1, 2), max_prefill_tokens=20)
    assert scheduler.rounds(1) == ["extend a15"]
    assert not scheduler.batch_is_full


def test_after_an_end_one_more_decode_round_passes_before_others_come_in() -> None:
    scheduler = engine(ask("a", 3, 2), ask("b", 3, 5), ask("c", 3, 5), max_running_requests=2)
    assert scheduler.rounds(5) == ["extend a3 b3", "decode a1 b1", "decode b1", "extend c3", "decode b1 c1"]


def test_the_flag_is_cleared_by_a_prefill_batch_that_shrank() -> None:
    scheduler = engine(ask("a", 3, 3), ask("b", 3, 1), ask("c", 3, 2), max_running_requests=2)
    assert scheduler.rounds(3) == ["extend a3 b3", "extend c3", "decode a1 c1"]


def test_the_flag_is_lost_when_the_running_batch_was_empty() -> None:
    scheduler = engine(ask("a", 10, 50), ask("b", 10, 30), max_total_tokens=90)
    assert scheduler.rounds(1) == ["extend a10"]  # b would need 40 of 90 − 60
    assert scheduler.batch_is_full
    assert scheduler.rounds(1) == ["extend b10"]  # of 80 − 49 · 0.7


def test_a_full_engine_that_empties_has_one_idle_round() -> None:
    scheduler = engine(ask("a", 3, 2), ask("b", 3, 1), max_running_requests=1)
    assert scheduler.rounds(3) == ["extend a3", "decode a1", "idle"]
    assert scheduler.rounds(1) == ["extend b3"]


def test_long_prompts_are_cut_and_leave_the_rest_of_the_chunk_to_others() -> None:
    scheduler = engine(ask("a", 20, 2), ask("b", 5, 2), ask("c", 9, 2), chunked_prefill_size=8)
    assert scheduler.rounds(1) == ["extend a8"]
    assert scheduler.chunked == scheduler.number("a")
    assert scheduler.rounds(4) == ["extend a8", "extend a4 b4", "extend b1 c7", "extend c2"]
    assert scheduler.chunked is None
    assert scheduler.rounds(2) == ["decode a1 b1 c1", "idle"]
    assert scheduler.available == 1000


def test_a_chunk_goes_on_though_the_batch_is_full() -> None:
    scheduler = engine(ask("a", 20, 2), ask("b", 5, 2), chunked_prefill_size=8, max_running_requests=1)
    assert scheduler.rounds(4) == ["extend a8", "extend a8", "extend a4", "decode a1"]


def test_the_last_chunk_reserves_the_output() -> None:
    scheduler = engine(ask("a", 12, 10), ask("b", 2, 10), chunked_prefill_size=8, max_total_tokens=28)
    assert scheduler.rounds(3) == ["extend a8", "extend a4", "decode a1"]
    assert scheduler.names(scheduler.waiting) == ["b"]


def test_the_ratio_decays_by_decode_rounds_and_starts_anew_after_an_idle_one() -> None:
    scheduler = engine(ask("a", 3, 800), schedule_conservativeness=0.5)
    ratios = [scheduler.new_token_ratio]
    for _ in range(701):
        scheduler.one_round()
        ratios.append(scheduler.new_token_ratio)
    assert ratios[:2] == [0.35, 0.35]
    assert ratios[301] == pytest.approx(0.35 - 0.35 * 0.86 / 2)
    assert ratios[601] == pytest.approx(0.35 * 0.14)
    assert ratios[701] == 0.35 * 0.14
    scheduler.rounds(100)
    assert scheduler.schedule() is None
    assert scheduler.new_token_ratio == 0.35


def overfull(**more: object) -> Engine:
    """Three that run although their outputs don't fit into 60 tokens; a came first and has generated more."""
    later = (ask("b", 8, 30, declared=6), ask("c", 9, 30, declared=6))
    plain: dict[str, object] = {"max_total_tokens": 60, "schedule_conservativeness": 0}
    scheduler = engine(ask("a", 10, 60, declared=6), later=later, **(plain | more))
    scheduler.rounds(4)
    scheduler.arrive("b", "c")
    scheduler.one_round()
    return scheduler


def test_retraction_takes_the_fewest_generated_then_the_longer_prompt() -> None:
    scheduler = overfull()
    assert scheduler.rounds(9)[-1] == "decode a1 b1 c1"
    assert scheduler.available == 60 - 13 - 8 - 9 - 27
    scheduler.one_round()
    batch = scheduler.schedule_one()
    assert batch is not None
    assert scheduler.names(batch.retracted) == ["c", "b"]
    assert scheduler.names(scheduler.waiting) == ["c", "b"]
    assert scheduler.words(batch) == "decode a1"
    assert scheduler.available == 60 - 24
    assert scheduler.new_token_ratio == 1.0


def test_retraction_stops_once_twenty_tokens_each_are_free_and_sets_the_ratio() -> None:
    requests = [ask(name, prompt, 100, declared=10) for name, prompt in (("a", 10), ("b", 50), ("c", 10), ("d", 10))]
    scheduler = engine(*requests, max_total_tokens=160)
    scheduler.rounds(4)
    scheduler.columns["declared"] = 200
    scheduler.seats[BEYOND, :4] += 190
    assert scheduler.rounds(17)[-1] == "decode a1 b1 c1 d1"
    assert scheduler.available == 0
    assert scheduler.rounds(1) == ["decode a1 c1 d1"]
    assert scheduler.names(scheduler.waiting) == ["b"]
    assert scheduler.available == 50 + 20 - 3
    assert scheduler.new_token_ratio == (3 * 21 + 3 * 20) / 600


def test_a_retracted_request_comes_back_with_its_output_as_prompt() -> None:
    scheduler = engine(ask("b", 8, 6))
    scheduler.columns["generated"][0] = 4
    assert scheduler.rounds(3) == ["extend b12", "decode b1", "idle"]
    assert scheduler.available == 1000


def test_with_a_tree_a_retracted_prompt_stays_in_it_unless_room_is_short() -> None:
    scheduler = overfull(disable_radix_cache=False)
    while not (batch := scheduler.one_round()) or not batch.retracted:
        assert batch is not None
    assert scheduler.names(batch.retracted) == ["c", "b"]
    assert scheduler.evictable == 8  # of c's prompt nothing is left, of b's all
    assert scheduler.available == 60 - 24 - 8


def test_memory_that_was_never_checked_stops_the_engine() -> None:
    later = (ask("a", 40, 1),)  # 41 of 37 + 10 · 0.7 tokens, as b has had 10 more than it declared
    scheduler = engine(ask("b", 3, 40, declared=1), later=later, max_total_tokens=50, chunked_prefill_size=30)
    scheduler.rounds(11)
    scheduler.arrive("a")
    assert scheduler.rounds(1) == ["extend a30"]
    with pytest.raises(InputError, match="max_total_tokens=50: SGLang runs out of memory"):
        scheduler.schedule()


def test_the_only_request_left_can_not_be_retracted() -> None:
    with pytest.raises(InputError, match="no space left for only one request"):
        engine(ask("a", 10, 60, declared=5), max_total_tokens=20).rounds(60)


def test_mixed_chunk_puts_decodes_behind_prompts_and_keeps_that_order() -> None:
    later = (ask("c", 10, 9),)
    scheduler = engine(ask("a", 3, 9), ask("b", 3, 9), later=later, enable_mixed_chunk=True, chunked_prefill_size=8)
    scheduler.one_round()
    scheduler.arrive("c")
    assert scheduler.rounds(3) == ["mixed c6 a1 b1", "mixed c4 a1 b1", "decode c1 a1 b1"]


def test_mixed_decodes_may_take_the_whole_chunk_budget() -> None:
    later = (ask("c", 2, 9),)
    scheduler = engine(ask("a", 1, 3), ask("b", 1, 9), later=later, enable_mixed_chunk=True, chunked_prefill_size=2)
    scheduler.one_round()
    scheduler.arrive("c")
    assert scheduler.rounds(5) == ["decode a1 b1", "decode a1 b1", "decode b1", "mixed c1 b1", "mixed c1 b1"]


def test_mixed_chunk_needs_chunks() -> None:
    later = (ask("b", 3, 3),)
    scheduler = engine(ask("a", 3, 9), later=later, enable_mixed_chunk=True, chunked_prefill_size=-1)
    scheduler.one_round()
    scheduler.arrive("b")
    assert scheduler.rounds(1) == ["extend b3"]


@pytest.mark.parametrize(("total", "second"), [(66, "decode a1"), (67, "extend b20")])
def test_known_lengths_are_followed_to_each_end(total: int, second: str) -> None:
    later = (ask("b", 20, 8),)
    scheduler = engine(ask("a", 30, 5), later=later, max_total_tokens=total, ignore_eos=True)
    scheduler.one_round()
    scheduler.arrive("b")
    # until the later end both decode: available − 20 − 8 · 2 > 0; then a's 31 are free: … + 31 − 8 > 0
    assert scheduler.rounds(1) == [second]


def test_a_longer_output_than_all_goes_before_the_last() -> None:
    later = tuple(ask(name, 3, output) for name, output in (("b", 4), ("c", 9), ("d", 5), ("e", 11)))
    scheduler = engine(ask("a", 3, 6), later=later, ignore_eos=True)
    scheduler.one_round()
    scheduler.arrive("b", "c", "d", "e")
    assert scheduler.rounds(1) == ["extend b3 c3 d3 e3"]
    ends = scheduler.stepper.state.extra.scratch[0, : scheduler.lane["ends"]]
    assert ends.tolist() == [4, 5, 9, 11, 5]


def test_more_is_reserved_than_there_is_and_the_batch_is_full() -> None:
    scheduler = engine(ask("a", 5, 20), ask("b", 2, 14), max_total_tokens=40, ignore_eos=True)
    assert scheduler.rounds(1) == ["extend a5"]
    assert scheduler.batch_is_full


def test_a_retracted_request_may_ask_for_more_than_there_is_for_ever() -> None:
    """Its known tokens and all that it declares: 78 + 23 of 100."""
    requests = [ask("a", [-1], 23), ask("b", [*SHARED[:55], -2], 23)]
    scheduler = engine(*requests, max_running_requests=2, max_total_tokens=100, chunked_prefill_size=-1)
    assert scheduler.rounds(60)[-1] == "idle"
    assert [scheduler.finished("a"), scheduler.finished("b")] == [True, False]
    assert scheduler.names(scheduler.waiting) == ["b"]
    assert 56 + int(scheduler.columns["generated"][1]) + 23 == 101


ENGINES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "max_running_requests": st.integers(1, 6),
        "max_total_tokens": st.integers(100, 200),
        "chunked_prefill_size": st.sampled_from([-1, 8, 32]),
        "max_prefill_tokens": st.integers(10, 60),
        "schedule_policy": st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof"]),
        "disable_radix_cache": st.booleans(),
        "enable_mixed_chunk": st.booleans(),
        "ignore_eos": st.booleans(),
        "disable_overlap_schedule": st.booleans(),
    }
)


@settings(deadline=None)
@given(ENGINES, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=12))
def test_every_request_ends_and_all_memory_comes_back(config: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    requests = [ask(str(i), [*SHARED[:shared], -i - 1], output) for i, (shared, output) in enumerate(sizes)]
    scheduler = engine(*requests, **config)
    total, idle = config["max_total_tokens"], 0
    for _ in range(2000):
        try:
            idle = idle + 1 if scheduler.one_round() is None else 0
        except InputError:
            return
        if idle == 3:
            break
        assert scheduler.available >= 0
        assert scheduler.evictable >= 0
        assert scheduler.available + scheduler.evictable <= total
    rows = scheduler.columns
    left = rows[rows["generated"] < rows["output"]]
    if len(left):  # retracted with what it had generated, one asks for more than there is, and none passes it
        assert (left["prompt"] + left["generated"] + left["declared"] >= total).any()
        return
    assert scheduler.available + scheduler.evictable == total
    tree = scheduler.stepper.state.extra.tree
    if tree is not None:
        assert not tree.nodes["locks"][living(tree)].any()


def living(tree: Tree) -> list[int]:
    """The nodes that are not free."""
    nodes, free = tree.nodes, set()
    node = int(tree.room[FREE])
    for _ in range(int(tree.room[LEFT])):  # what follows the last of them means nothing
        free.add(node)
        node = int(nodes[node]["next"])
    return [node for node in range(1, len(nodes)) if node not in free]


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
    with pytest.raises(InputError, match=message):
        Engine([ask("a", 1, 1)], setting)
