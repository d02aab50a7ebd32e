"""The rules of vLLM's v0 scheduler in default mode, one by one, on workloads small enough to follow by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm_v0_bench import Bench, ids, request, tokens
from windtunnel.reference.vllm_v0 import Scheduler
from windtunnel.reference.vllm_v0_request import Status
from windtunnel.reference.vllm_v0_settings import Settings

from windtunnel.errors import InputError


def test_prefills_come_first_and_never_share_a_step_with_decodes() -> None:
    bench = Bench(request(0, 5))
    assert bench.steps(2) == [{"r0": 5}, {"r0": 1}]
    bench.scheduler.add(request(1, 7))
    assert bench.steps(2) == [{"r1": 7}, {"r0": 1, "r1": 1}]


def test_a_prompt_is_scheduled_whole_or_not_at_all_and_nobody_passes_it() -> None:
    bench = Bench(request(0, 6), request(1, 6), request(2, 1), max_num_batched_tokens=10)
    assert bench.steps(3) == [{"r0": 6}, {"r1": 6, "r2": 1}, {"r0": 1, "r1": 1, "r2": 1}]


def test_running_requests_hold_places() -> None:
    bench = Bench(request(0, 4, 2), request(1, 4), request(2, 4), max_num_seqs=2)
    assert bench.steps(3) == [{"r0": 4, "r1": 4}, {"r0": 1, "r1": 1}, {"r2": 4}]


@pytest.mark.parametrize("config", [{"max_model_len": 19}, {"max_num_batched_tokens": 19}, {"num_gpu_blocks": 4}])
def test_prompts_too_long_for_model_budget_or_pool_are_ignored(config: dict[str, int]) -> None:
    bench = Bench(request(0, 20), request(1, 3), **config)
    batch = bench.step()
    assert (ids(batch.ignored), tokens(batch)) == (["r0"], {"r1": 3})
    assert batch.ignored[0].status is Status.IGNORED


def test_the_watermark_is_kept_free_at_admission_only() -> None:
    bench = Bench(request(0, 98), request(1, 1), request(2, 1), num_gpu_blocks=100, block_size=1)
    assert bench.scheduler.settings.watermark_blocks == 1
    assert bench.steps(2) == [{"r0": 98, "r1": 1}, {"r0": 1}]  # r1's own decode finds no block after r0's


def test_a_decode_wants_a_free_block_even_if_its_token_fits_the_last_one() -> None:
    bench = Bench(request(0, 5), request(1, 5), num_gpu_blocks=4)
    assert tokens(bench.step()) == {"r0": 5, "r1": 5}
    batch = bench.step()
    assert tokens(batch) == {"r0": 1}  # at the cost of the last one running
    assert ids(batch.preempted) == ["r1"]


def test_recomputed_victims_lead_the_queue_last_victim_first() -> None:
    bench = Bench(*(request(i, 4) for i in range(4)), num_gpu_blocks=4)
    bench.step()
    bench.scheduler.add(request(4, 4))
    batch = bench.step()
    assert tokens(batch) == {"r0": 1, "r1": 1}
    assert ids(bench.scheduler.waiting) == ["r2", "r3", "r4"]
    assert tokens(bench.step()) == {"r0": 1}  # no block left for r1


def test_a_recomputed_request_prefills_what_it_generated_too() -> None:
    bench = Bench(request(0, 4, 2), request(1, 4, 3), num_gpu_blocks=2)
    assert bench.steps(3) == [{"r0": 4, "r1": 4}, {"r0": 1}, {"r1": 5}]


def test_the_last_one_running_preempts_itself() -> None:
    bench = Bench(request(0, 3), num_gpu_blocks=1)
    bench.step()
    batch = bench.step()
    assert (tokens(batch), ids(batch.preempted)) == ({}, ["r0"])
    assert tokens(bench.step()) == {"r0": 4}
    assert ids(bench.step().preempted) == ["r0"]
    assert ids(bench.step().ignored) == ["r0"]  # five tokens never fit


def test_swapped_requests_go_to_the_end_of_their_queue_and_hold_prefills_back() -> None:
    bench = Bench(request(0, 8, 3), request(1, 5), num_gpu_blocks=4, num_cpu_blocks=9, preemption_mode="swap")
    bench.step()
    batch = bench.step()
    assert (ids(batch.swapped_out), batch.blocks_swapped_out, bench.scheduler.tables.cpu.num_free) == (["r1"], 2, 7)
    bench.scheduler.add(request(2, 1))
    assert tokens(bench.step()) == {"r0": 1}  # a block is free for r2, but somebody is swapped out
    batch = bench.step()
    assert (tokens(batch), ids(batch.swapped_in), batch.blocks_swapped_in) == ({"r1": 1}, ["r1"], 2)
    assert tokens(bench.step()) == {"r2": 1}


def test_nobody_is_swapped_in_while_somebody_is_preempted() -> None:
    config = {"num_gpu_blocks": 7, "num_cpu_blocks": 20, "preemption_mode": "swap"}
    bench = Bench(request(0, 8), request(1, 8), request(2, 8), **config)
    batches = [bench.step() for _ in range(20)]
    assert any(batch.swapped_out for batch in batches)
    assert any(batch.swapped_in for batch in batches)
    assert not any(batch.swapped_out and batch.swapped_in for batch in batches)


def test_without_room_on_the_host_swapping_ends_the_engine() -> None:
    bench = Bench(request(0, 5), request(1, 5), num_gpu_blocks=4, num_cpu_blocks=1, preemption_mode="swap")
    bench.step()
    with pytest.raises(InputError, match="num_cpu_blocks=1: no room to swap 'r1' out"):
        bench.step()


def test_what_outgrew_the_pool_while_swapped_is_ignored_and_keeps_its_host_blocks() -> None:
    bench = Bench(request(0, 8), num_gpu_blocks=2, num_cpu_blocks=9, preemption_mode="swap")
    bench.step()
    assert ids(bench.step().swapped_out) == ["r0"]
    assert ids(bench.step().ignored) == ["r0"]
    assert (bench.scheduler.has_unfinished, bench.scheduler.tables.cpu.num_free) == (False, 7)


def test_the_delay_gate_waits_for_a_multiple_of_the_last_prefill_step() -> None:
    bench = Bench(request(0, 4), delay_factor=1.5)  # nothing runs: no delay
    assert tokens(bench.step()) == {"r0": 4}
    late = request(1, 4)
    late.arrival = 1.005
    bench.scheduler.add(late)
    assert bench.steps(2) == [{"r0": 1}, {"r1": 4}]  # waited 5 ms, then exactly 15 of 15 ms but for the last digit


def test_a_better_priority_preempts_the_worst_and_runs_a_step_later() -> None:
    bench = Bench(request(0, 4, priority=1), request(1, 4, priority=5), max_num_seqs=2, policy="priority")
    bench.step()
    bench.scheduler.add(request(2, 4, priority=3))
    batch = bench.step()
    assert (tokens(batch), ids(batch.preempted)) == ({"r0": 1}, ["r1"])
    assert ids(bench.scheduler.waiting) == ["r2", "r1"]
    assert tokens(bench.step()) == {"r2": 4}


def test_an_equal_priority_is_decided_by_arrival() -> None:
    first = request(0, 4)
    bench = Bench(request(1, 4), max_num_seqs=1, policy="priority")
    bench.step()
    bench.scheduler.add(first)
    assert ids(bench.step().preempted) == ["r1"]


def test_a_worse_priority_waits() -> None:
    bench = Bench(request(0, 4), max_num_seqs=1, policy="priority")
    bench.step()
    bench.scheduler.add(request(1, 4, priority=2))
    bench.scheduler.add(request(2, 4, priority=1))
    assert tokens(bench.step()) == {"r0": 1}
    assert ids(bench.scheduler.waiting) == ["r2", "r1"]  # sorted for good


def test_priorities_do_not_go_with_swapping() -> None:
    bench = Bench(
        request(0, 4, priority=2), max_num_seqs=1, policy="priority", preemption_mode="swap", num_cpu_blocks=9
    )
    bench.step()
    bench.scheduler.add(request(1, 4))
    with pytest.raises(InputError, match="make way for a better priority"):
        bench.step()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks=0: must be ≥ 1"),
        ({"num_gpu_blocks": 9, "preemption_mode": "swp"}, "must be one of None, 'swap', 'recompute'"),
        ({"num_gpu_blocks": 9, "policy": "lifo"}, "policy='lifo'"),
        ({"num_gpu_blocks": 9, "block_size": "16"}, "block_size='16': must be int"),
        ({"num_gpu_blocks": True}, "num_gpu_blocks=True: must be int"),
        ({"num_gpu_blocks": 9, "delay_factor": -1}, "delay_factor=-1: must be ≥ 0"),
        ({"num_gpu_blocks": 9, "enable_prefix_cache": True}, "did you mean 'enable_prefix_caching'"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Settings.from_config(config)


def test_null_is_the_default() -> None:
    assert Settings.from_config({"num_gpu_blocks": 9, "preemption_mode": None, "policy": None}) == Settings(9)


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=8)
modes = st.fixed_dictionaries(
    {
        "num_gpu_blocks": st.integers(8, 30),
        "enable_chunked_prefill": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(("fcfs", "priority")),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(16, 64),
    }
)


def conserves(scheduler: Scheduler) -> bool:
    held = {block for one in scheduler.running for block in one.blocks}
    return len(held) + scheduler.tables.gpu.num_free == scheduler.settings.num_gpu_blocks


@settings(max_examples=150, deadline=None)
@given(lengths, modes)
def test_blocks_are_conserved_and_everybody_ends(rows: list[tuple[int, int, int]], config: dict[str, object]) -> None:
    requests = [request(i, n, out, shared=min(shared, n)) for i, (n, out, shared) in enumerate(rows)]
    bench = Bench(*requests, **config)
    limits = bench.scheduler.settings
    # who holds every block cannot append, gives all back and prefills again: in chunks that never ends, as in vLLM
    spare = all(-(-(n + out) // limits.block_size) < limits.num_gpu_blocks for n, out, _ in rows)
    assume(spare or not limits.enable_chunked_prefill)
    for _ in range(3000):
        if not bench.scheduler.has_unfinished:
            break
        batch = bench.step()
        computed = sum(part.tokens - part.hit for part in batch.scheduled)
        assert computed <= bench.scheduler.settings.max_num_batched_tokens
        assert conserves(bench.scheduler)
    assert {one.status for one in requests} <= {Status.FINISHED, Status.IGNORED}
    assert bench.scheduler.tables.gpu.num_free == config["num_gpu_blocks"]
