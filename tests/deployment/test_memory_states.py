"""States of state space layers: memory set aside for them, and how many requests it lets run."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.memory import UNBOUNDED, KVBudget, kv_blocks, state_notes
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload

NEMOTRON = load_model("nvidia/Nemotron-H-56B-Base-8K")
NANO = load_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")


def served(preset: str = "vllm-0.32", **engine: object) -> Pool:
    limits = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 8192} | engine
    return Pool(NEMOTRON, device("h200"), Engine(preset=preset, **limits))  # type: ignore[arg-type]


def budget(preset: str = "vllm-0.32", **engine: object) -> KVBudget:
    return kv_blocks(served(preset, **engine))


def test_no_more_requests_run_than_have_room_for_their_states() -> None:
    state = NEMOTRON.state_bytes()
    assert state == 54 * (256 * 64 * 256 * 2 + (256 * 64 + 2 * 8 * 256) * 3 * 2)
    crowded = budget()
    whole = state + 4096 * NEMOTRON.kv_bytes_per_token()
    assert crowded.max_num_seqs == crowded.available_bytes // whole < 64
    assert crowded.state_bytes == crowded.max_num_seqs * state
    assert crowded.num_blocks * crowded.block_size >= crowded.max_num_seqs * 4096
    apart = budget("sglang-0.5", gpu_memory_utilization=0.92)
    assert apart.max_num_seqs == apart.available_bytes // 2 // (3 * state)  # two more may be kept for prefixes


def test_states_are_divided_by_tensor_parallelism() -> None:
    divided = budget(tensor_parallel_size=8)
    assert (divided.max_num_seqs, divided.state_bytes) == (64, 64 * NEMOTRON.state_bytes() // 8)
    assert state_notes(served(tensor_parallel_size=8), divided) == []


def test_a_request_whose_state_has_no_room_is_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match=r"keeps a state of 0\.46 GB for each request.*tensor_parallel_size=2"):
        budget(gpu_memory_utilization=0.782)


def test_a_stage_that_caches_nothing_does_not_bound_the_others() -> None:
    only = {"max_model_len": 4096, "max_num_seqs": 64, "pipeline_parallel_size": 26}
    found = kv_blocks(Pool(NANO, device("h200"), Engine(**only)))  # type: ignore[arg-type]
    assert found.num_blocks < UNBOUNDED
    assert found.block_bytes == 16 * NANO.kv_bytes_per_token() // 6


def test_the_simulation_runs_as_many_and_says_so() -> None:
    pool, count = served(gpu_memory_utilization=0.8), 20
    workload = Workload.from_columns(prompt_tokens=np.full(count, 64), output_tokens=np.full(count, 8))
    done = simulate(Deployment((pool,)), workload, perf="modelled", cache=False)
    most = kv_blocks(pool).max_num_seqs
    assert 0 < most < count
    assert done.iterations.decodes.max() == most
    assert any(f"{most} requests run at once, not max_num_seqs=64" in text for text in done.manifest["warnings"])
    assert done.manifest["pools"][0]["max_num_seqs"] == most
    assert done.manifest["pools"][0]["memory"]["state_bytes"] == most * NEMOTRON.state_bytes()


def test_prompts_that_begin_alike_find_states_that_engines_may_not_have() -> None:
    pool = served(tensor_parallel_size=8)
    (note,) = state_notes(pool, kv_blocks(pool), alike=True)
    assert "cached prefix" in note
    off = served(tensor_parallel_size=8, enable_prefix_caching=False)
    assert state_notes(off, kv_blocks(off), alike=True) == []


def test_a_draft_layer_is_attention_and_network_where_layers_have_one_part() -> None:
    kinds = [(layer.attention is not None, layer.mlp is not None) for layer in NANO.draft_layers]
    assert kinds == [(True, False), (False, True)]
    drafting = Engine(max_model_len=4096, num_speculative_tokens=1, acceptance_length=1.7)
    plain, more = (kv_blocks(Pool(NANO, device("h200"), each)) for each in (Engine(max_model_len=4096), drafting))
    longer = replace(NANO, layers=(*NANO.layers, *((1, layer) for layer in NANO.draft_layers)))
    assert more.weight_bytes == longer.weight_bytes() > plain.weight_bytes
    assert more.block_bytes * 6 == plain.block_bytes * 7
