"""The unified scheduler's parameters one by one, and what makes each preset different."""

from dataclasses import replace

import pytest

from oracle.tests.handmade_unified import SMALL, firsts, requests, steps, tokens
from windtunnel.errors import InputError
from windtunnel.policy import Limits, Policy, scheduler
from windtunnel.policy.unified import POLICIES

PREFILL_FIRST = Policy(group_order="prefill_first", mixed=False)
TWO = [(0, 8, 3), (1, 8, 2)]


def preset(name: str, **changes: object) -> Policy:
    found = POLICIES[name]
    return replace(found, **changes)  # type: ignore[arg-type]


def test_groups_in_either_order_mixed_or_not() -> None:
    """a decodes when b arrives."""
    assert tokens(Policy(), requests(*TWO)) == [{"a": 8}, {"a": 1, "b": 8}, {"a": 1, "b": 1}]
    assert tokens(Policy(group_order="prefill_first"), requests(*TWO)) == [{"a": 8}, {"b": 8, "a": 1}, {"a": 1, "b": 1}]
    assert tokens(PREFILL_FIRST, requests(*TWO)) == [{"a": 8}, {"b": 8}, {"a": 1, "b": 1}, {"a": 1}]
    assert tokens(Policy(mixed=False), requests(*TWO)) == [{"a": 8}, {"a": 1}, {"a": 1}, {"b": 8}, {"b": 1}]


def test_prefills_first_may_take_the_tokens_of_the_decodes() -> None:
    """The budget is 10: with b's prompt of 10 nothing is left for a, who sits out."""
    asked = [(0, 4, 3), (1, 10, 1)]
    policy = Policy(group_order="prefill_first", chunked_prefill=True, max_num_batched_tokens=10)
    assert tokens(policy, requests(*asked)) == [{"a": 4}, {"b": 10}, {"a": 1}, {"a": 1}]
    decodes = replace(policy, group_order="decode_first")
    assert tokens(decodes, requests(*asked)) == [{"a": 4}, {"a": 1, "b": 9}, {"a": 1, "b": 1}]


def test_a_chunk_respects_both_token_limits() -> None:
    """Checklist, error 7: the seed's chunk is cut by P only."""
    asked = [(0, 4, 4), (1, 20, 1)]
    both = Policy(chunked_prefill=True, max_num_batched_tokens=10, max_num_prefill_tokens=6)
    assert tokens(both, requests(*asked))[1:4] == [{"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 6}]
    only_c = replace(both, max_num_prefill_tokens=0)
    assert tokens(only_c, requests(*asked))[1:3] == [{"a": 1, "b": 9}, {"a": 1, "b": 9}]


def test_padded_prompts_count_as_the_longest() -> None:
    """12 tokens of prompts are within the 14 of a step, twice the longest is not."""
    narrow = replace(SMALL, max_num_batched_tokens=14, max_model_len=14)
    for padded, expected in ((False, [{"a": 8, "b": 4}]), (True, [{"a": 8}, {"b": 4}])):
        policy = replace(PREFILL_FIRST, padded_prefills=padded)
        assert tokens(policy, requests((0, 8, 1), (0, 4, 1)), narrow) == expected


def test_the_limit_of_running_requests_is_not_the_one_of_memory() -> None:
    """Checklist, error 2: the fourth test of the seed compares with R_max, not with M."""
    found = steps(Policy(max_num_seqs=2), requests(*[(0, 4, 2)] * 3))
    assert [step.tokens for step in found] == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4}, {"c": 1}]
    assert max(step.used_blocks for step in found) < SMALL.num_blocks


@pytest.mark.parametrize(
    ("allocation", "blocks"), [("on_demand", 2), ("prompt", 5), ("prompt_and_output", 7), ("max_model_len", 16)]
)
def test_allocations_take_more_or_less_at_admission(allocation: str, blocks: int) -> None:
    policy = scheduler(f"sarathi:chunk=8,allocation={allocation},decodes_ask_for_a_block=no")
    assert isinstance(policy, Policy)
    assert steps(policy, requests((0, 20, 8)))[0].used_blocks == blocks


def test_a_reservation_beyond_memory_takes_all_of_it() -> None:
    small = replace(SMALL, num_blocks=6)
    assert steps(preset("orca"), requests((0, 8, 2)), small)[0].used_blocks == 6


def test_look_ahead_admits_what_fits_at_the_peak() -> None:
    """24 tokens: enough for a to its end, and for b to its own end two tokens on, but not six tokens on."""
    small = replace(SMALL, num_blocks=6)
    policy = Policy(allocation="look_ahead")
    assert tokens(policy, requests((0, 8, 8), (0, 4, 2)), small)[0] == {"a": 8, "b": 4}
    assert tokens(policy, requests((0, 8, 8), (0, 4, 6)), small)[0] == {"a": 8}
    assert tokens(Policy(), requests((0, 8, 8), (0, 4, 6)), small)[0] == {"a": 8, "b": 4}


def test_look_ahead_goes_by_what_is_declared() -> None:
    small = replace(SMALL, num_blocks=6)
    assert tokens(Policy(allocation="look_ahead"), requests((0, 8, 8), (0, 4, 2, 30)), small)[0] == {"a": 8}


def test_the_watermark_holds_while_anything_runs() -> None:
    half = Policy(watermark=0.5)
    assert tokens(half, requests((0, 60, 1), (0, 60, 1)), replace(SMALL, max_num_batched_tokens=200))[0] == {"a": 60}
    assert len(tokens(Policy(), requests((0, 60, 1), (0, 60, 1)), replace(SMALL, max_num_batched_tokens=200))) == 1


def test_a_decode_may_ask_for_a_block_that_it_does_not_need() -> None:
    """Two blocks, one each with room for one more token: none is needed, but the last one asks."""
    limits, asked = replace(SMALL, num_blocks=2), requests((0, 3, 2), (0, 3, 2))
    assert [step.evicted for step in steps(Policy(), asked, limits)] == ["", ""]
    asking = Policy(decodes_ask_for_a_block=True)
    assert [step.evicted for step in steps(asking, requests((0, 3, 2), (0, 3, 2)), limits)] == ["", "b", ""]


VICTIMS = {"newest": "c", "oldest": "a", "shortest": "b", "longest": "a", "lowest_priority": "b"}


@pytest.mark.parametrize("name", VICTIMS)
def test_victims(name: str) -> None:
    """Prompts of 12, 4 and 8 fill six blocks; each wants another."""
    limits = replace(SMALL, num_blocks=6)
    asked = requests((0, 12, 3), (0, 4, 3), (0, 8, 3), priorities=(0, 2, 1))
    found = steps(scheduler(f"trtllm-max-utilization:victim={name}"), asked, limits)  # type: ignore[arg-type]
    assert found[1].evicted[0] == VICTIMS[name]


def test_a_victim_key_decides() -> None:
    limits = replace(SMALL, num_blocks=6)
    policy = Policy(victim_key=lambda prompt, *_: prompt == 4)
    assert steps(policy, requests((0, 12, 3), (0, 4, 3), (0, 8, 3)), limits)[1].evicted[0] == "b"


SWAP = Policy(preemption="swap", host_blocks=10, swap_time_per_block=0.25)


def test_an_evicted_request_computes_again_or_moves_to_the_host() -> None:
    """Two blocks each: b goes when both want a third, and comes back when a has ended."""
    limits, asked = replace(SMALL, num_blocks=5), [(0, 8, 3), (0, 8, 3)]
    found = steps(SWAP, requests(*asked), limits)
    assert [step.tokens for step in found] == [{"a": 8, "b": 8}, {"a": 1}, {"a": 1}, {"b": 1}, {"b": 1}]
    assert [step.transfer_time for step in found] == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert [step.start for step in found] == [0.0, 1.0, 2.5, 3.5, 5.0]
    again = steps(replace(SWAP, preemption="recompute", host_blocks=0, swap_time_per_block=0), requests(*asked), limits)
    assert [step.tokens for step in again] == [{"a": 8, "b": 8}, {"a": 1}, {"a": 1}, {"b": 9}, {"b": 1}]


def test_who_finds_no_room_on_the_host_computes_again() -> None:
    limits = replace(SMALL, num_blocks=5)
    found = steps(replace(SWAP, host_blocks=1), requests((0, 8, 3), (0, 8, 3)), limits)
    assert found[3].tokens == {"b": 9}


def test_nobody_is_admitted_while_somebody_is_on_the_host() -> None:
    limits = replace(SMALL, num_blocks=5)
    found = steps(SWAP, requests((0, 8, 3), (0, 8, 3), (1.5, 1, 1)), limits)
    assert firsts(found)["c"] == 3.5


def test_evicted_requests_go_to_the_front_of_the_queue() -> None:
    """All three evicted at once: the last victim is first again, as they were."""
    limits = replace(SMALL, num_blocks=6)
    found = steps(Policy(), requests((0, 8, 9), (0, 8, 9), (0, 8, 9), (1, 1, 1)), limits)
    assert found[1].evicted == "cb" or found[1].evicted == "c"
    assert firsts(found)["d"] > 1


ORDERS = {
    "fcfs": "abc",
    "priority": "bca",
    "shortest_prompt": "bca",
    "longest_prompt": "acb",
    "shortest_output": "cab",
    "longest_output": "bac",
    "shortest_job": "cba",
    "longest_job": "abc",
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_admission(order: str) -> None:
    policy = scheduler(f"trtllm-max-utilization:max_num_seqs=1,order={order}")
    assert isinstance(policy, Policy)
    asked = requests((0, 20, 3), (0, 4, 9), (0, 8, 2), priorities=(2, 0, 1))
    assert "".join(firsts(steps(policy, asked))) == ORDERS[order]


def test_equals_in_an_order_go_by_arrival() -> None:
    policy = Policy(max_num_seqs=1, admission_order="priority")
    assert "".join(firsts(steps(policy, requests((0, 4, 3), (2, 4, 1), (1, 4, 1))))) == "acb"


def test_an_admission_key_is_asked_again_for_an_evicted_request() -> None:
    """b comes back with two tokens generated."""
    seen: list[tuple[int, int]] = []

    def key(*values: float) -> float:
        prompt, _, _, generated, _ = map(int, values)
        seen.append((prompt, generated))
        return generated

    steps(Policy(admission_key=key), requests((0, 7, 9), (0, 6, 9)), replace(SMALL, num_blocks=4))
    assert seen[:2] == [(7, 0), (6, 0)]
    assert seen[2:] == [(6, 2)]


def test_waiting_requests_wait_behind_the_head_or_pass_it() -> None:
    limits = replace(SMALL, num_blocks=6)
    asked = [(0, 16, 3), (0, 16, 1), (0, 4, 1)]
    assert tokens(Policy(), requests(*asked), limits)[0] == {"a": 16}
    assert tokens(Policy(pass_over=True), requests(*asked), limits)[0] == {"a": 16, "c": 4}


def test_a_threshold_leaves_tokens_to_others() -> None:
    policy = Policy(chunked_prefill=True, max_num_batched_tokens=20)
    asked = [(0, 30, 1), (0, 30, 1), (0, 5, 1)]
    assert tokens(policy, requests(*asked))[0] == {"a": 20}
    assert tokens(replace(policy, long_prefill_token_threshold=7), requests(*asked))[0] == {"a": 7, "b": 7, "c": 5}


def test_one_prompt_part_way_at_a_time_lets_whole_ones_overtake() -> None:
    policy = Policy(chunked_prefill=True, long_prefill_token_threshold=7, max_num_partial_prefills=1)
    assert tokens(policy, requests((0, 30, 1), (0, 30, 1), (0, 5, 1)))[0] == {"a": 7, "c": 5}


def test_few_long_prompts_part_way_let_shorter_ones_overtake() -> None:
    """With a budget of 10 c is cut, too, but is not long."""
    policy = Policy(chunked_prefill=True, max_num_batched_tokens=10, long_prefill_token_threshold=6)
    asked = [(0, 30, 1), (0, 30, 1), (0, 5, 1)]
    assert tokens(policy, requests(*asked))[0] == {"a": 6, "b": 4}
    assert tokens(replace(policy, max_long_partial_prefills=1), requests(*asked))[0] == {"a": 6, "c": 4}


def test_a_delay_factor_spares_decodes_from_lone_prefills() -> None:
    """A prefill took 1 s; b may come when it has waited for more than 2 s."""
    policy = replace(PREFILL_FIRST, delay_factor=2.0)
    asked = [(0, 4, 9), (1.5, 4, 1)]
    assert firsts(steps(PREFILL_FIRST, requests(*asked)))["b"] == 2.0
    assert firsts(steps(policy, requests(*asked)))["b"] == 4.0


def test_a_budget_is_asked_for_every_step() -> None:
    budgets = iter([5, 5, 9, 9, 9])
    policy = Policy(chunked_prefill=True, token_budget=lambda *_: next(budgets))
    assert tokens(policy, requests((0, 18, 2))) == [{"a": 5}, {"a": 5}, {"a": 8}, {"a": 1}]


def test_a_budget_out_of_range_is_refused() -> None:
    policy = Policy(chunked_prefill=True, token_budget=lambda *_: 65)
    with pytest.raises(InputError, match=r"token_budget returned 65: must be in \[1, 64\]"):
        steps(policy, requests((0, 18, 2)))


# What makes each preset different.


def test_sarathi_never_stalls_a_decode_and_fills_the_step_with_a_chunk() -> None:
    policy = scheduler("sarathi:chunk=10")
    assert isinstance(policy, Policy)
    found = steps(policy, requests((0, 4, 5), (1, 30, 1)))
    assert [step.tokens for step in found] == [{"a": 4}, *[{"a": 1, "b": 9}] * 3, {"a": 1, "b": 3}]
    assert found[1].used_blocks == 2 + 8  # all of b's prompt


def test_orca_joins_at_every_iteration_and_reserves_the_longest_sequence() -> None:
    """16 blocks each: two run at once, and the third joins when one leaves."""
    found = steps(preset("orca"), requests((0, 4, 3), (0, 4, 2), (0, 4, 1)))
    assert [step.tokens for step in found] == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"a": 1, "c": 4}]


def test_fastertransformer_finishes_its_batch_before_anybody_joins() -> None:
    found = tokens(preset("fastertransformer"), requests((0, 4, 3), (0, 4, 2), (0, 4, 1)))
    assert found == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"a": 1}, {"c": 4}]


def test_a_static_batch_forms_over_several_prefill_steps() -> None:
    """A step holds 64 tokens, so that the second prompt needs its own; none decodes before."""
    policy = preset("fastertransformer", allocation="prompt_and_output")
    found = tokens(policy, requests((0, 40, 2), (0, 40, 2), (3, 4, 1)))
    assert found == [{"a": 40}, {"b": 40}, {"a": 1, "b": 1}, {"c": 4}]


def test_dynamic_batching_waits_for_a_full_batch_or_a_delay() -> None:
    policy = preset("dynamic", allocation="prompt_and_output", max_queue_delay=5.0)
    alone = steps(policy, requests((0.5, 4, 2)))
    assert [step.start for step in alone] == [5.5, 6.5]
    full = steps(policy, requests((0, 4, 1), (1, 4, 1), (2, 4, 1), (3, 4, 1)))
    assert [(step.start, len(step.tokens)) for step in full] == [(3.0, 4)]
    assert steps(preset("fastertransformer"), requests((0.5, 4, 2)))[0].start == 0.5


def test_lightllm_prefills_alone_and_admits_by_the_peak_of_memory() -> None:
    """19 tokens of 40 each at their ends, with margin 6 and one each: two do not fit."""
    limits = Limits(4, 64, 64, 40, 1)
    found = tokens(preset("lightllm"), requests((0, 10, 9), (0, 10, 9)), limits)
    assert found[0] == {"a": 10}
    assert tokens(preset("trtllm-max-utilization"), requests((0, 10, 9), (0, 10, 9)), limits)[0] == {"a": 10, "b": 10}
    assert tokens(preset("lightllm"), requests(*TWO)) == [{"a": 8}, {"b": 8}, {"a": 1, "b": 1}, {"a": 1}]


def test_tensorrt_llm_pauses_the_last_started_or_never_anybody() -> None:
    limits, asked = replace(SMALL, num_blocks=5), [(0, 8, 6), (0, 8, 6)]
    most = steps(preset("trtllm-max-utilization"), requests(*asked), limits)
    assert ([step.evicted for step in most][:2], most[0].tokens) == (["", "b"], {"a": 8, "b": 8})
    none = steps(preset("trtllm-guaranteed-no-evict"), requests(*asked), limits)
    assert (none[0].tokens, "".join(step.evicted for step in none)) == ({"a": 8}, "")


def test_mindspore_waits_for_places_for_its_prefill_batch() -> None:
    """Two places of 4 are worth a prefill (share 0.5). c and d wait for the second free one; a lone e does not."""
    policy = preset("mindspore", prefill_batch_share=0.5)
    asked = requests((0, 4, 9), (0, 4, 9), (0, 4, 2), (0, 4, 4), (1, 4, 9), (1, 4, 9))
    found = steps(policy, asked)
    assert [step.tokens for step in found[:3]] == [{"a": 4, "b": 4}, {"c": 4, "d": 4}, dict.fromkeys("abcd", 1)]
    assert firsts(found)["e"] == firsts(found)["f"] == 5.0  # c ends at 3, d at 5
    assert firsts(steps(policy, requests((0, 4, 9), (0, 4, 9), (0, 4, 2), (0, 4, 4), (1, 4, 9))))["e"] == 3.0
    assert firsts(steps(preset("mindspore"), requests(*[(0, 4, 9)] * 2)))["b"] == 1.0


def test_a_prefill_call_takes_more_prompts_than_open_the_queue() -> None:
    """Two free places open it; a call takes up to three. One that does not wait for places takes up to three at once,
    too: a limit alone."""
    asked = requests(*[(0, 4, 9)] * 4)
    found = steps(preset("mindspore", prefill_batch_share=0.5, prefill_batch_max=3), asked)
    assert [step.tokens for step in found[:3]] == [{"a": 4, "b": 4, "c": 4}, {"d": 4}, dict.fromkeys("abcd", 1)]
    alone = steps(preset("mindspore", prefill_batch_share=0.0, prefill_batch_max=3), requests(*[(0, 4, 9)] * 4))
    assert [step.tokens for step in alone[:2]] == [{"a": 4, "b": 4, "c": 4}, {"d": 4}]


def test_interval_scheduling_looks_at_the_queue_every_k_decode_steps() -> None:
    """a's first look is its own admission; the door closes with its first decode step, for 16."""
    found = steps(preset("fcfs-interval"), requests((0, 4, 30), (2.5, 4, 1)))
    assert firsts(found)["b"] == 1.0 + 16
    always = steps(preset("fcfs-interval", reschedule_interval=1), requests((0, 4, 30), (2.5, 4, 1)))
    assert firsts(always)["b"] == 3.0


def test_queue_ratio_scheduling_looks_at_a_queue_that_is_long_enough() -> None:
    """One request runs: 1.2 times as many wait when there are two."""
    found = steps(preset("queue-ratio"), requests((0, 4, 30), (2.5, 4, 1), (6.5, 4, 1)))
    assert firsts(found)["b"] == firsts(found)["c"] == 7.0
    one = steps(preset("queue-ratio"), requests((0, 4, 6), (2.5, 4, 1)))
    assert firsts(one)["b"] == 6.0
