"""The rules of vLLM's v0 scheduler in default mode, one by one, on workloads small enough to follow by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.schedulers.vllm_v0.bench import Bench, request
from windtunnel.core.records import GONE, IGNORED
from windtunnel.errors import InputError


def test_prefills_come_first_and_never_share_a_step_with_decodes() -> None:
    bench = Bench(request(0, 5), request(1, 7), arrived=["r0"])
    assert bench.steps(2) == [{"r0": 5}, {"r0": 1}]
    bench.arrive("r1")
    assert bench.steps(2) == [{"r1": 7}, {"r0": 1, "r1": 1}]


def test_a_prompt_is_scheduled_whole_or_not_at_all_and_no_other_passes_it() -> None:
    bench = Bench(request(0, 6), request(1, 6), request(2, 1), max_num_batched_tokens=10)
    assert bench.steps(3) == [{"r0": 6}, {"r1": 6, "r2": 1}, {"r0": 1, "r1": 1, "r2": 1}]


def test_running_requests_hold_places() -> None:
    bench = Bench(request(0, 4, 2), request(1, 4), request(2, 4), max_num_seqs=2)
    assert bench.steps(3) == [{"r0": 4, "r1": 4}, {"r0": 1, "r1": 1}, {"r2": 4}]


@pytest.mark.parametrize("config", [{"max_model_len": 19}, {"max_num_batched_tokens": 19}, {"num_gpu_blocks": 4}])
def test_prompts_too_long_for_model_budget_or_pool_are_ignored(config: dict[str, int]) -> None:
    bench = Bench(request(0, 20), request(1, 3), **config)
    step = bench.step()
    assert (step.ignored, step.tokens) == (["r0"], {"r1": 3})
    assert bench.lane.columns["state"][0] == IGNORED


def test_the_watermark_is_kept_free_at_admission_only() -> None:
    bench = Bench(request(0, 98), request(1, 1), request(2, 1), num_gpu_blocks=100, block_size=1)
    assert bench.lane.stepper.state.pools[0]["watermark_blocks"] == 1
    assert bench.steps(2) == [{"r0": 98, "r1": 1}, {"r0": 1}]  # r1's own decode finds no block after r0's


def test_a_decode_wants_a_free_block_even_if_its_token_fits_the_last_one() -> None:
    bench = Bench(request(0, 5), request(1, 5), num_gpu_blocks=4)
    assert bench.step().tokens == {"r0": 5, "r1": 5}
    step = bench.step()
    assert step.tokens == {"r0": 1}  # at the cost of the last one running
    assert step.preempted == ["r1"]


def test_recomputed_victims_lead_the_queue_last_victim_first() -> None:
    bench = Bench(*(request(i, 4) for i in range(5)), arrived=["r0", "r1", "r2", "r3"], num_gpu_blocks=4)
    bench.step()
    bench.arrive("r4")
    assert bench.step().tokens == {"r0": 1, "r1": 1}
    assert bench.waiting == ["r2", "r3", "r4"]
    assert bench.step().tokens == {"r0": 1}  # no block left for r1


def test_a_recomputed_request_prefills_what_it_generated_too() -> None:
    bench = Bench(request(0, 4, 2), request(1, 4, 3), num_gpu_blocks=2)
    assert bench.steps(3) == [{"r0": 4, "r1": 4}, {"r0": 1}, {"r1": 5}]


def test_the_last_one_running_preempts_itself() -> None:
    bench = Bench(request(0, 3), num_gpu_blocks=1)
    bench.step()
    step = bench.step()
    assert (step.tokens, step.preempted) == ({}, ["r0"])
    assert bench.step().tokens == {"r0": 4}
    assert bench.step().preempted == ["r0"]
    assert bench.step().ignored == ["r0"]  # five tokens never fit


def test_swapped_requests_go_to_the_end_of_their_queue_and_hold_prefills_back() -> None:
    config = {"num_gpu_blocks": 4, "num_cpu_blocks": 9, "preemption_mode": "swap"}
    bench = Bench(request(0, 8, 3), request(1, 5), request(2, 1), arrived=["r0", "r1"], **config)
    bench.step()
    step = bench.step()
    assert (step.swapped_out, step.blocks_out, bench.free[1]) == (["r1"], 2, 7)
    bench.arrive("r2")
    assert bench.step().tokens == {"r0": 1}  # a block is free for r2, but r1 is swapped out
    step = bench.step()
    assert (step.tokens, step.swapped_in, step.blocks_in) == ({"r1": 1}, ["r1"], 2)
    assert bench.step().tokens == {"r2": 1}


def test_no_request_is_swapped_in_while_another_is_preempted() -> None:
    config = {"num_gpu_blocks": 7, "num_cpu_blocks": 20, "preemption_mode": "swap"}
    bench = Bench(request(0, 8), request(1, 8), request(2, 8), **config)
    steps = [bench.step() for _ in range(20)]
    assert any(step.swapped_out for step in steps)
    assert any(step.swapped_in for step in steps)
    assert not any(step.swapped_out and step.swapped_in for step in steps)


def test_without_room_on_the_host_swapping_ends_the_engine() -> None:
    bench = Bench(request(0, 5), request(1, 5), num_gpu_blocks=4, num_cpu_blocks=1, preemption_mode="swap")
    bench.step()
    with pytest.raises(InputError, match="num_cpu_blocks=1: no room to swap 'r1' out"):
        bench.step()


def test_what_outgrew_the_pool_while_swapped_is_ignored_and_keeps_its_host_blocks() -> None:
    bench = Bench(request(0, 8), num_gpu_blocks=2, num_cpu_blocks=9, preemption_mode="swap")
    bench.step()
    assert bench.step().swapped_out == ["r0"]
    assert bench.step().ignored == ["r0"]
    assert (bench.lane.has_unfinished, bench.free[1]) == (False, 7)


def test_the_delay_gate_waits_for_a_multiple_of_the_last_prefill_step() -> None:
    late = request(1, 4, arrival=1.005)
    bench = Bench(request(0, 4), late, arrived=["r0"], delay_factor=1.5)  # nothing runs: no delay
    assert bench.step().tokens == {"r0": 4}
    bench.arrive("r1")
    assert bench.steps(2) == [{"r0": 1}, {"r1": 4}]  # waited 5 ms, then exactly 15 of 15 ms but for the last digit


def test_a_better_priority_preempts_the_worst_and_runs_a_step_later() -> None:
    requests = (request(0, 4, priority=1), request(1, 4, priority=5), request(2, 4, priority=3))
    bench = Bench(*requests, arrived=["r0", "r1"], max_num_seqs=2, policy="priority")
    bench.step()
    bench.arrive("r2")
    step = bench.step()
    assert (step.tokens, step.preempted) == ({"r0": 1}, ["r1"])
    assert bench.waiting == ["r2", "r1"]
    assert bench.step().tokens == {"r2": 4}


def test_an_equal_priority_is_decided_by_arrival() -> None:
    bench = Bench(request(0, 4), request(1, 4), arrived=["r1"], max_num_seqs=1, policy="priority")
    bench.step()
    bench.arrive("r0")
    assert bench.step().preempted == ["r1"]


def test_a_worse_priority_waits() -> None:
    requests = (request(0, 4), request(1, 4, priority=2), request(2, 4, priority=1))
    bench = Bench(*requests, arrived=["r0"], max_num_seqs=1, policy="priority")
    bench.step()
    bench.arrive("r1")
    bench.arrive("r2")
    assert bench.step().tokens == {"r0": 1}
    assert bench.waiting == ["r2", "r1"]  # sorted for good


def test_the_queue_is_sorted_with_equals_in_their_order() -> None:
    ranks = (3, 0, 2, 0, 1, 3, 1)
    requests = [request(i, 4, priority=rank, arrival=0.0) for i, rank in enumerate(ranks)]
    bench = Bench(request(7, 4, priority=-1), *requests, arrived=[], max_num_seqs=1, policy="priority")
    bench.number = {one.id: i for i, one in enumerate(bench.lane.rows)}
    bench.arrive("r7")
    bench.step()
    for one in requests:
        bench.arrive(one.id)
    bench.step()
    assert bench.waiting == ["r1", "r3", "r4", "r6", "r2", "r0", "r5"]


def test_priorities_do_not_go_with_swapping() -> None:
    config = {"max_num_seqs": 1, "policy": "priority", "preemption_mode": "swap", "num_cpu_blocks": 9}
    bench = Bench(request(0, 4, priority=2), request(1, 4), arrived=["r0"], **config)
    bench.step()
    bench.arrive("r1")
    with pytest.raises(InputError, match="make way for a better priority"):
        bench.step()


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


def held(bench: Bench) -> int:
    """Blocks that running requests hold: those in their tables, each once, or as many as their tokens need."""
    columns = bench.lane.columns
    placed = {r: bench.lane.known[r] - (0 if columns["prefilling"][r] else 1) for r in bench.lane.running}
    counts = {r: -(-tokens // 4) for r, tokens in placed.items()}
    if bench.lane.stepper.state.extra.cache is None:
        return sum(counts.values())
    return len({block for r, count in counts.items() for block in bench.blocks(f"r{r}", count)})


@settings(max_examples=60, deadline=None)
@given(lengths, modes)
def test_blocks_are_conserved_and_all_requests_end(rows: list[tuple[int, int, int]], config: dict[str, int]) -> None:
    requests = [request(i, n, out, shared=min(shared, n)) for i, (n, out, shared) in enumerate(rows)]
    blocks = config["num_gpu_blocks"]
    # who holds every block cannot append, gives all back and prefills again: in chunks that never ends, as in vLLM
    spare = all(-(-(n + out) // 4) < blocks for n, out, _ in rows)
    assume(spare or not config["enable_chunked_prefill"])
    bench = Bench(*requests, **config)
    for _ in range(3000):
        if not bench.lane.has_unfinished:
            break
        step = bench.step()
        assert step.computed <= config["max_num_batched_tokens"]
        assert held(bench) + bench.free[0] == blocks
    assert set(bench.lane.columns["state"].tolist()) <= {GONE, IGNORED}
    assert bench.free[0] == blocks
