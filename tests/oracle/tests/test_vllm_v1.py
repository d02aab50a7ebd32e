"""The rules of vLLM's v1 scheduler one by one, and what makes each version different from the next."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay.handmade_schedules import SMALL, Step, random_recording, recording, request, scheduled, steps

from oracle.vllm_v1.replay import replay
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.vllm_v1 import VERSIONS

NEWEST = "vllm-0.33"


def of(step: Step, *names: str) -> tuple[object, ...]:
    return tuple(step[name] for name in names)


def test_a_request_catches_up_and_then_decodes() -> None:
    assert scheduled(NEWEST, {"max_num_batched_tokens": 8}, request(12, 3)) == [{"a": 8}, {"a": 4}, {"a": 1}, {"a": 1}]


def test_running_requests_come_before_the_queue() -> None:
    found = scheduled(NEWEST, {"max_num_batched_tokens": 8}, request(5, 3), request(10, 1))
    assert found == [{"a": 5, "b": 3}, {"a": 1, "b": 7}, {"a": 1}]


def test_the_head_of_the_queue_blocks_all_behind_it() -> None:
    first = steps(NEWEST, {"num_gpu_blocks": 6}, request(8, 2), request(17, 1), request(1, 1))[0]
    assert of(first, "scheduled", "waiting_order", "free_blocks") == ({"a": 8}, ["b", "c"], 3)


def test_the_newest_is_preempted_and_nobody_is_admitted_in_that_step() -> None:
    """Three blocks: a and b fill one each and want another; c, who would fit, waits behind b."""
    config = {"num_gpu_blocks": 4, "enable_prefix_caching": False}
    found = steps(NEWEST, config, request(4, 4), request(4, 4), request(3, 1, arrival=0.001))
    assert of(found[1], "scheduled", "preempted", "waiting_order", "free_blocks") == ({"a": 1}, ["b"], ["b", "c"], 1)
    assert of(found[4], "scheduled", "new", "resumed") == ({"b": 5, "c": 3}, ["c"], ["b"])


def test_a_sole_request_without_room_preempts_itself() -> None:
    scheduler = Scheduler(Limits(1, 8, 64, 1, 4), VllmV1(async_scheduling=False))
    scheduler.waiting.append(Request(0, 0.0, 4, 9, 9))
    scheduler.update(scheduler.schedule(), 1.0)
    batch = scheduler.schedule()
    assert ([r.id for r in batch.preempted], batch.scheduled, scheduler.free_blocks) == ([0], [], 1)


def test_requests_of_the_same_step_share_what_is_computed_before_them() -> None:
    config = {"max_num_batched_tokens": 512, "max_model_len": 400, "block_size": 16}
    rows = [request(n, 1, prefix=[["s", 400]]) for n in (320, 320, 330)]
    first = steps(NEWEST, config, *rows)[0]
    assert of(first, "scheduled", "cached_hit") == ({"a": 320, "b": 16, "c": 10}, {"b": 304, "c": 320})


def test_a_beginning_shared_up_to_the_middle_of_a_block_shares_full_blocks() -> None:
    first = steps(NEWEST, {}, request(12, 1, prefix=[["s", 11]]), request(12, 1, prefix=[["s", 11]]))[0]
    assert first["start_pos"] == {"a": 0, "b": 8}


def test_cached_tokens_cost_no_budget() -> None:
    config = {"max_num_batched_tokens": 12, "max_num_seqs": 2}
    rows = [request(12, 1, prefix=[["s", 12]]), request(20, 1, prefix=[["s", 12]], arrival=0.001)]
    assert scheduled(NEWEST, config, *rows) == [{"a": 12}, {"b": 8}]


def test_blocks_taken_from_the_free_list_are_not_free_any_more() -> None:
    """b hits two blocks that no request holds: five are free, and it needs these two and three more."""
    config = {"num_gpu_blocks": 6}
    rows = [request(8, 1, prefix=[["s", 8]]), request(20, 1, prefix=[["s", 8]], arrival=0.001)]
    second = steps(NEWEST, config, *rows)[1]
    assert of(second, "scheduled", "free_blocks", "free_after_update") == ({"b": 12}, 0, 5)


def test_without_caching_nothing_is_shared() -> None:
    rows = [request(8, 1, prefix=[["s", 8]])] * 2
    assert scheduled(NEWEST, {"enable_prefix_caching": False}, *rows) == [{"a": 8, "b": 8}]


def test_preempted_requests_find_their_own_blocks() -> None:
    found = steps(NEWEST, {"num_gpu_blocks": 8}, request(8, 9), request(8, 9))
    assert {"b": 12} in [step["cached_hit"] for step in found if step["resumed"] == ["b"]]


def test_the_end_of_a_prefix_is_reused_before_its_beginning() -> None:
    """Five blocks: a leaves three with keys; b takes the two plain ones and one more, the last of a's."""
    shared = [["s", 12]]
    rows = [request(12, 1, prefix=shared), request(9, 1, arrival=0.1), request(13, 1, prefix=shared, arrival=0.2)]
    assert steps(NEWEST, {"num_gpu_blocks": 6}, *rows)[2]["cached_hit"] == {"c": 8}


@pytest.mark.parametrize(("version", "hit"), [("vllm-0.32", 8), ("vllm-0.20", 4)])
def test_plain_blocks_are_reused_first_since_0_32(version: str, hit: int) -> None:
    """c needs one block: the plain one that b left, or the oldest one, which still has the end of a's prompt."""
    rows = [
        request(9, 1, prefix=[["s", 9]]),
        request(9, 1, arrival=0.1),
        request(1, 1, arrival=0.2),
        request(9, 1, prefix=[["s", 9]], arrival=0.3),
    ]
    assert steps(version, {"num_gpu_blocks": 6}, *rows)[3]["cached_hit"] == {"d": hit}


@pytest.mark.parametrize(("version", "together"), [("vllm-0.20", ["a"]), ("vllm-0.16", ["a", "b"])])
def test_the_whole_prompt_is_reserved_since_0_20(version: str, together: list[str]) -> None:
    config = {"num_gpu_blocks": 8, "max_num_batched_tokens": 20}
    assert steps(version, config, request(16, 1), request(16, 1))[0]["new"] == together


def test_reservation_can_be_switched_off() -> None:
    config = {"num_gpu_blocks": 8, "max_num_batched_tokens": 20, "scheduler_reserve_full_isl": False}
    assert steps("vllm-0.20", config, request(16, 1), request(16, 1))[0]["new"] == ["a", "b"]


@pytest.mark.parametrize(("version", "chunk"), [("vllm-0.32", 10), ("vllm-0.20", 4)])
def test_the_threshold_spares_a_lone_request_since_0_32(version: str, chunk: int) -> None:
    assert scheduled(version, {"long_prefill_token_threshold": 4}, request(10, 1))[0] == {"a": chunk}


@pytest.mark.parametrize(("version", "chunk"), [("vllm-0.32", 10), ("vllm-0.20", 4)])
def test_the_adaptive_threshold_shares_the_budget_since_0_32(version: str, chunk: int) -> None:
    config = {"max_num_batched_tokens": 20, "long_prefill_token_threshold": 4}
    adaptive = {"long_prefill_token_threshold_adaptive": True}
    assert scheduled(version, config | adaptive, request(30, 1), request(30, 1))[0] == {"a": chunk, "b": chunk}
    assert scheduled(version, config, request(30, 1), request(30, 1))[0] == {"a": 4, "b": 4}


@pytest.mark.parametrize(("version", "together"), [("vllm-0.32", ["a", "b"]), ("vllm-0.20", ["a", "b", "c"])])
def test_admissions_end_at_max_num_active_seqs_since_0_32(version: str, together: list[str]) -> None:
    assert steps(version, {"max_num_active_seqs": 2}, *[request(4, 1)] * 3)[0]["new"] == together


@pytest.mark.parametrize(("version", "together"), [("vllm-0.32", ["a"]), ("vllm-0.20", ["a", "b"])])
def test_the_watermark_holds_for_admissions_beside_others_since_0_32(version: str, together: list[str]) -> None:
    config = {"num_gpu_blocks": 10, "watermark": 0.3}
    assert steps(version, config, request(16, 1), request(16, 1))[0]["new"] == together


@pytest.mark.parametrize(("version", "second"), [("vllm-0.12", ["a"]), ("vllm-0.10", ["a", "d", "e"])])
def test_a_prompt_that_exceeds_the_budget_is_passed_over_until_0_10(version: str, second: list[str]) -> None:
    rows = [request(30, 1), request(40, 1), request(50, 1), request(5, 1), request(6, 1)]
    first = steps(version, {"enable_chunked_prefill": False}, *rows)[0]
    assert first["new"] == second
    assert first["waiting_order"] == (["b", "c", "d", "e"] if version == "vllm-0.12" else ["c", "b"])


def test_the_queue_by_priority_compares_ids_as_text() -> None:
    config = {"policy": "priority", "max_num_seqs": 1}
    rows = [request(1, 1, id=name, priority=p) for name, p in (("r2", 1), ("r10", 1), ("r3", 0))]
    assert [step["new"] for step in steps(NEWEST, config, *rows)] == [["r3"], ["r10"], ["r2"]]
    assert steps(NEWEST, config, *rows)[0]["waiting_order"] == ["r10", "r2"]


PRESSED = {"policy": "priority", "num_gpu_blocks": 4}
WORST_FIRST = (request(2, 3, priority=9), request(4, 3, arrival=0.001), request(3, 3, arrival=0.0011))
"""Three blocks for three requests; in the step in which b needs a second one, a goes, who stands before it."""


def test_the_worst_priority_goes_and_its_tokens_return_since_0_12() -> None:
    third = steps("vllm-0.12", PRESSED, *WORST_FIRST)[2]
    assert of(third, "preempted", "scheduled", "start_pos") == (["a"], {"b": 1, "c": 1}, {"b": 4, "c": 3})


def test_the_victims_tokens_stay_in_the_batch_until_0_10() -> None:
    found = steps("vllm-0.10", PRESSED, *WORST_FIRST)
    assert of(found[2], "preempted", "scheduled", "start_pos") == (["a"], {"a": 1, "b": 1}, {"a": 0, "b": 4})
    again = next(step for step in found if step["resumed"] == ["a"])
    assert again["start_pos"]["a"] == 1


@pytest.mark.parametrize(("version", "batch"), [("vllm-0.32", {"b": 1, "c": 1}), ("vllm-0.20", {"b": 1})])
def test_a_victim_that_had_nothing_to_compute_costs_its_neighbour_a_step_until_0_20(
    version: str, batch: dict[str, int]
) -> None:
    found = steps(version, PRESSED | {"async_scheduling": True}, *WORST_FIRST)
    assert of(found[3], "preempted", "scheduled") == (["a"], batch)


@pytest.mark.parametrize(("version", "rest"), [("vllm-0.33", {"b": 1, "c": 1}), ("vllm-0.32", {})])
def test_who_preempts_itself_leaves_the_step_to_those_behind_it_since_0_33(version: str, rest: dict[str, int]) -> None:
    """a, the worst, lacks a block when it is its turn, and gives its own away."""
    rows = [request(3, 4, priority=9), request(2, 2, arrival=0.001), request(2, 2, arrival=0.0011)]
    found = steps(version, PRESSED, *rows)
    assert of(found[2], "preempted", "scheduled") == (["a"], rest)


def test_equal_priorities_and_arrivals_can_preempt_each_other_for_ever_until_0_32() -> None:
    """Of equals, the one that stands first goes: each in turn, before it has its prompt together."""
    config = {"policy": "priority", "num_gpu_blocks": 5, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    config |= {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 4}
    *_, last = replay(recording(config, request(16, 1), request(16, 1)), "vllm-0.32")
    assert last["type"] == "stuck"
    assert len(last["running_order"]) + len(last["waiting_order"]) == 2
    *_, last = replay(recording(config, request(16, 1), request(16, 1, arrival=0.001)), "vllm-0.32")
    assert last["type"] == "summary"
    *_, last = replay(recording(config, request(16, 1), request(16, 1)), NEWEST)
    assert last["type"] == "summary"


def test_two_steps_are_in_flight_and_the_last_token_is_not_scheduled_again() -> None:
    found = steps("vllm-0.12", {"async_scheduling": True}, request(4, 2))
    assert [step["scheduled"] for step in found] == [{"a": 4}, {"a": 1}]
    assert found[1]["t_sched"] < found[1]["t_start"] == found[0]["t_end"]


def test_until_0_10_it_is_scheduled_once_more() -> None:
    found = steps("vllm-0.10", {"async_scheduling": True}, request(4, 2))
    assert [step["scheduled"] for step in found] == [{"a": 4}, {"a": 1}, {"a": 1}]
    assert [step["emitted"] for step in found] == [["a"], ["a"], []]


def test_a_block_is_shared_when_its_last_token_is_known_and_computed() -> None:
    """The prompt fills a block but for one token, which is sampled, and computed in the next step."""
    scheduler = Scheduler(Limits(2, 64, 64, 8, 4), VllmV1(prefix_caching=True))
    first = Request(0, 0.0, 3, 5, 5, tokens=(7, 7, 7, 1))
    scheduler.waiting.append(first)
    batches = [scheduler.schedule(), scheduler.schedule()]
    same = Request(1, 0.0, 5, 1, 1, tokens=(7, 7, 7, 1, 2))
    assert scheduler.blocks.find(same) == []
    scheduler.update(batches[0], 1.0)
    assert first.num_computed_tokens == 4
    assert scheduler.blocks.find(same) == []
    scheduler.update(batches[1], 2.0)
    assert len(scheduler.blocks.find(same)) == 1


def test_versions_by_default() -> None:
    assert list(VERSIONS) == ["vllm-0.33", "vllm-0.32", "vllm-0.24", "vllm-0.20", "vllm-0.16", "vllm-0.12", "vllm-0.10"]
    assert [policy.async_scheduling for policy in VERSIONS.values()] == [True, True, True, True, True, False, False]
    assert all(policy.prefix_caching for policy in VERSIONS.values())
    Scheduler(Limits(**{**SMALL, "num_blocks": 9}), VERSIONS[NEWEST])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from(list(VERSIONS)))
def test_nothing_is_lost(seed: int, version: str) -> None:
    """Every token comes once, every block comes back, and no step exceeds its limits."""
    workload = random_recording(seed)
    header, *found, summary = replay(workload, version)
    assert (summary["type"], summary["final_free_blocks"]) == ("summary", header["usable_blocks"])
    emitted = Counter(name for step in found for name in step["emitted"])
    room = workload.config["max_model_len"]
    assert emitted == {row.id: min(row.output_tokens, room - row.prompt_tokens) for row in workload.requests}
    assert Counter(name for step in found for name in step["finished"]) == {row.id: 1 for row in workload.requests}
    for step in found:
        assert sum(step["scheduled"].values()) <= workload.config["max_num_batched_tokens"]
        assert len(step["running_order"]) <= workload.config["max_num_seqs"]
        assert 0 <= step["free_blocks"] <= header["usable_blocks"]
