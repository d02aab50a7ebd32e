"""Host work of a step, with and without graphs."""

from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import MLA, load_model
from windtunnel.perf.corrections import ALL
from windtunnel.perf.explain import Batch, explain
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.host import (
    CACHED_BLOCK,
    CAPTURED_LATENT,
    DISPATCH_ATTENTION,
    EAGER,
    HOSTS,
    HostCost,
    block_tables,
    captured_floor,
    dispatch,
    dispatch_floor,
    eager_floor,
    host_cost,
    host_tables,
)
from windtunnel.perf.tabulate.tables import axes


def pool(model: str, preset: str, on: str = "h200", **settings: Any) -> Pool:
    return Pool(load_model(model), device(on), Engine(preset=preset, max_num_seqs=128, max_model_len=4096, **settings))


def cost(preset: str, **settings: Any) -> HostCost:
    return host_cost(pool("meta-llama/Llama-3.1-8B-Instruct", preset, **settings))


@pytest.mark.parametrize("preset", ["vllm-0.32", "vllm-0.12", "vllm-0.6", "trtllm-0.11"])
def test_host_work_grows_with_requests_and_is_nothing_without(preset: str) -> None:
    overlapped, serial = cost(preset).tables(256)
    assert overlapped[0] == serial[0] == 0.0
    assert (np.diff(overlapped[1:]) >= 0).all()
    assert (np.diff(serial[1:]) > 0).all()


def test_asynchronous_scheduling_hides_most_of_the_host_work() -> None:
    hidden, short = cost("vllm-0.32").tables(128)
    none, long = cost("vllm-0.32", async_scheduling=False).tables(128)
    assert (none == 0).all()
    assert (short[1:] < 0.3 * long[1:]).all()
    assert (hidden[1:] > long[1:]).all()


def test_tokens_that_stay_on_the_device_leave_less() -> None:
    for preset in ("sglang-0.5", "trtllm-1.1"):
        hidden, left = cost(preset).tables(128)
        vllm_hidden, vllm_left = cost("vllm-0.32").tables(128)
        assert np.array_equal(hidden, vllm_hidden)
        assert (left[1:] > 0).all()
        assert (left[1:] < 0.5 * vllm_left[1:]).all()
        assert cost(preset, async_scheduling=False) == cost("vllm-0.32", async_scheduling=False)


def test_engines_before_v1_work_longer_between_steps_and_more_with_several_workers() -> None:
    newer, alone, several = (
        made.tables(64)[1] for made in (cost("vllm-0.8"), cost("vllm-0.6"), cost("vllm-0.6", tensor_parallel_size=2))
    )
    assert (newer[1:] < alone[1:]).all()
    assert (alone[1:] < several[1:]).all()


def test_blocks_of_a_cache_cost_the_host_before_v1_alone() -> None:
    old, new = pool("Qwen/Qwen3-8B", "vllm-0.6"), pool("Qwen/Qwen3-8B", "vllm-0.8")
    table = block_tables(old, axes(old))
    assert table[0].max() == table[:, 0].max() == 0.0
    assert table[64, -1] == pytest.approx(64 * axes(old).context_knots[-1] / 16 * CACHED_BLOCK)
    assert not block_tables(new, axes(new)).any()


def test_latent_attention_of_trtllm_takes_its_host_longer_between_captured_pieces() -> None:
    floors = [
        captured_floor(pool("deepseek-ai/DeepSeek-V2-Lite", preset), 27) for preset in ("trtllm-1.1", "sglang-0.5")
    ]
    assert floors == [pytest.approx(27 * CAPTURED_LATENT), pytest.approx(27 * DISPATCH_ATTENTION)]
    assert captured_floor(pool("Qwen/Qwen3-8B", "trtllm-1.1"), 36) == pytest.approx(36 * DISPATCH_ATTENTION)


def test_captured_pieces_leave_only_attention_to_the_host() -> None:
    assert dispatch_floor(32, 12, captured=True) == 32 * DISPATCH_ATTENTION
    assert dispatch_floor(32, 12, captured=False) > 32 * DISPATCH_ATTENTION


@pytest.mark.parametrize("preset", ["vllm-0.32", "sglang-0.5", "trtllm-1.1"])
def test_decodes_without_graphs_take_half_as_long_again_or_twice_in_every_engine(preset: str) -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    with_graphs, without = (
        explain(pool(model, preset, "h100", enforce_eager=eager), Batch(decodes=4, kv_tokens=4096)).total_seconds
        for eager in (False, True)
    )
    assert 1.5 < without / with_graphs < 2.2  # about 1.7 measured


@pytest.mark.parametrize("preset", ["sglang-0.5", "trtllm-1.1"])
def test_the_floor_is_the_sum_of_the_layers(preset: str) -> None:
    cost = EAGER[preset.partition("-")[0], False]
    dense = pool("meta-llama/Llama-3.1-8B-Instruct", preset)
    assert eager_floor(dense) == pytest.approx(32 * (cost.attention + cost.dense))
    latent = pool("deepseek-ai/DeepSeek-V2-Lite", preset)
    assert all(isinstance(layer.attention, MLA) for _, layer in latent.model.layers)
    assert eager_floor(latent) == pytest.approx(27 * cost.latent + cost.dense + 26 * cost.experts)


@pytest.mark.parametrize("preset", ["sglang-0.5", "trtllm-1.1"])
def test_a_layer_of_one_part_costs_that_part(preset: str) -> None:
    cost = EAGER[preset.partition("-")[0], False]
    hybrid = pool("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", preset)
    assert eager_floor(hybrid) == pytest.approx(23 * cost.state_space + 6 * cost.attention + 23 * cost.experts)
    dense = pool("nvidia/NVIDIA-Nemotron-Nano-9B-v2", preset)
    assert eager_floor(dense) == pytest.approx(27 * cost.state_space + 4 * cost.attention + 25 * cost.dense)


def test_newer_hosts_are_faster() -> None:
    older, newer, newest = (eager_floor(pool("Qwen/Qwen3-8B", "sglang-0.5", on)) for on in ("h200", "b200", "b300"))
    assert older > newer
    assert newest == pytest.approx(HOSTS["b300_sxm"] * newer)


def test_a_step_with_prompts_waits_for_the_host_where_its_kernels_are_shorter() -> None:
    served = pool("Qwen/Qwen3-8B", "trtllm-1.1")
    tokens = axes(served)
    gpu = np.linspace(0.0, 2.0, len(tokens.padded)) * eager_floor(served)
    waits = dispatch(served, tokens, gpu, prompts=True)
    assert waits[0] == 0.0
    assert (waits[1:] + gpu[1:]) == pytest.approx(np.maximum(gpu[1:], eager_floor(served)))
    assert not dispatch(served, tokens, gpu, True, ALL.without("launch_gaps")).any()


def test_compiled_engines_have_no_such_floor() -> None:
    served = pool("Qwen/Qwen3-8B", "vllm-0.32")
    waits = dispatch(served, axes(served), np.zeros(len(axes(served).padded)), prompts=True)
    assert waits.max() < eager_floor(pool("Qwen/Qwen3-8B", "sglang-0.5"))


LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("made", "overlapped", "serial"),
    [
        (pool(LLAMA, "vllm-0.32"), 1.5e-3 + 10 * 12e-6, 0.2e-3 + 10 * 0.5e-6),
        (pool(LLAMA, "vllm-0.32", async_scheduling=False), 0.0, 0.9e-3 + 10 * 8e-6),
        (pool(LLAMA, "sglang-0.5"), 1.5e-3 + 10 * 12e-6, 0.05e-3),
        (pool(LLAMA, "trtllm-0.11", "a100"), 0.0, 0.3e-3 + 10 * 8e-6),
        (pool(LLAMA, "vllm-0.6"), 0.0, 1.1e-3 + 10 * (35e-6 + 0.3e-3)),
        (pool(LLAMA, "vllm-0.6", tensor_parallel_size=2), 0.0, 1.35e-3 + 10 * (50e-6 + 0.3e-3)),
        (pool(LLAMA, "vllm-0.6", "mi300x"), 0.0, 1.6e-3 + 10 * (80e-6 + 0.3e-3)),
        (pool("Qwen/Qwen3-30B-A3B", "vllm-0.32", data_parallel_size=2), 1.62e-3, 1.2e-3 + 10 * 0.5e-6),
        (pool(LLAMA, "vllm-0.32", data_parallel_size=2), 1.62e-3, 0.2e-3 + 10 * 0.5e-6),
    ],
)
def test_ten_requests_cost_the_host_by_hand(made: Pool, overlapped: float, serial: float) -> None:
    """Several workers, AMD's GPUs, and ranks in lockstep, which agree on each step in a millisecond, cost more."""
    tables = host_cost(made).tables(10)
    assert [len(table) for table in tables] == [11, 11]
    assert (tables[0][10], tables[1][10]) == pytest.approx((overlapped, serial))


def test_no_host_work_without_its_correction() -> None:
    none = ALL.without("host_overhead")
    for preset in ("vllm-0.32", "vllm-0.6"):
        made = pool(LLAMA, preset)
        assert host_cost(made, none).tables(4)[1].tolist() == [0.0] * 5
        assert not block_tables(made, axes(made), none).any()


def test_launches_by_hand() -> None:
    """32 layers with a call of 50 µs each, and 12 kernels of 6 µs where the pieces between are not captured."""
    assert dispatch_floor(32, 12, captured=True) == pytest.approx(1.6e-3)
    assert dispatch_floor(32, 12, captured=False) == pytest.approx(32 * (50e-6 + 72e-6))


def test_two_micro_batches_wait_twice_for_the_host() -> None:
    served = pool("Qwen/Qwen3-8B", "trtllm-1.1")
    tokens, floor = axes(served), eager_floor(served)
    count = len(tokens.padded)
    split = np.arange(count) % 2 == 1
    waits = dispatch(served, tokens, np.full(count, 0.25 * floor), True, twice=split)
    assert waits[1::2] == pytest.approx(1.75 * floor)
    assert waits[2::2] == pytest.approx(0.75 * floor)


def test_decodes_without_a_graph_wait_for_no_more_than_the_modules() -> None:
    """Whatever engine: vLLM's cost of the modules, 0.25 and 0.17 ms for each of 36 layers."""
    for preset in ("vllm-0.32", "sglang-0.5", "trtllm-1.1"):
        served = pool("Qwen/Qwen3-8B", preset, enforce_eager=True)
        waits = dispatch(served, axes(served), np.zeros(len(axes(served).padded)), prompts=False)
        assert waits[-1] == pytest.approx(36 * 0.42e-3)


FLOORS = {
    ("vllm", "h200"): (32 * 0.42, 27 * 0.5 + 0.17 + 26 * 0.35, 61 * 0.5 + 3 * 0.17 + 58 * 0.35,
                       30 * 0.8 + 10 * 0.25 + 40 * 0.35, 27 * 0.5 + 4 * 0.25 + 25 * 0.17),
    ("vllm", "b200"): (32 * 0.25, 27 * 0.3 + 0.1 + 26 * 0.2, 61 * 0.3 + 3 * 0.1 + 58 * 0.2,
                       30 * 0.5 + 10 * 0.15 + 40 * 0.2, 27 * 0.3 + 4 * 0.15 + 25 * 0.1),
    ("sglang", "h200"): (32 * 0.8, 27 * 2.5 + 0.3 + 26 * 0.7, 61 * 1.8 + 3 * 0.3 + 58 * 0.7,
                         30 * 4.0 + 10 * 0.5 + 40 * 0.7, 27 * 1.5 + 4 * 0.5 + 25 * 0.3),
    ("sglang", "b200"): (32 * 0.45, 27 * 1.5 + 0.15 + 26 * 0.45, 61 * 1.2 + 3 * 0.15 + 58 * 0.45,
                         30 * 4.0 + 10 * 0.3 + 40 * 0.45, 27 * 0.9 + 4 * 0.3 + 25 * 0.15),
    ("trtllm", "h200"): (32 * 0.65, 27 * 2.75 + 0.25 + 26 * 0.8, 61 * 1.8 + 3 * 0.25 + 58 * 0.8,
                         30 * 4.0 + 10 * 0.4 + 40 * 0.8, 27 * 1.5 + 4 * 0.4 + 25 * 0.25),
    ("trtllm", "b200"): (32 * 0.32, 27 * 1.8 + 0.12 + 26 * 0.5, 61 * 1.2 + 3 * 0.12 + 58 * 0.5,
                         30 * 4.0 + 10 * 0.2 + 40 * 0.5, 27 * 0.9 + 4 * 0.2 + 25 * 0.12),
}  # fmt: skip
"""Milliseconds of a step that is launched module by module: of a plain model of 32 dense layers; with latent attention
in 27, sparse in 61 (of which 1 and 3 are dense, the others have experts); linear in 30 and plain in 10, all with
experts; and of one part a layer: state space in 27, attention in 4, dense networks in 25."""


@pytest.mark.parametrize(("backend", "on"), FLOORS)
def test_floors_of_five_kinds_of_model_by_hand(backend: str, on: str) -> None:
    models = (
        LLAMA,
        "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-ai/DeepSeek-V3.2",
        "Qwen/Qwen3.5-35B-A3B",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    )
    found = [1e3 * eager_floor(pool(model, "vllm-0.32", on), backend) for model in models]
    assert found == pytest.approx(FLOORS[backend, on])


def test_a_dense_network_beside_the_experts_counts_too() -> None:
    """30 layers of attention, a dense network and experts; hosts of B300 take half of B200's time."""
    beside = pool("google/gemma-4-26B-A4B", "vllm-0.32")
    assert eager_floor(beside, "sglang") == pytest.approx(30 * (0.5e-3 + 0.3e-3 + 0.7e-3))
    assert eager_floor(pool(LLAMA, "sglang-0.5", "b300")) == pytest.approx(32 * 0.45e-3 / 2)


@pytest.mark.parametrize(
    ("model", "layers", "kernels"),
    [("Qwen/Qwen3-8B", 36, 36 * 10 + 2), ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 31, 56 + 27 * 3 + 25 * 3 + 4 * 3 + 2)],
)
def test_compiled_steps_wait_for_their_launches_by_hand(model: str, layers: int, kernels: int) -> None:
    """A call of 50 µs in each layer with attention; beyond the graphs 6 µs for each kernel: in a layer of Qwen3 two
    norms, four products, norm and rotation of heads, the write to the cache, and the activation; an embedding and a
    norm of the whole. Decodes of 256 tokens are still in a graph."""
    served = pool(model, "vllm-0.32")
    ax = axes(served)
    waits = dispatch(served, ax, np.zeros(len(ax.padded)), prompts=True)
    assert ax.mixed_graph_tokens == 256
    assert [waits[at] for at in (0, 1, 256)] == pytest.approx([0.0, layers * 50e-6, layers * 50e-6])
    assert [waits[at] for at in (257, 4000)] == pytest.approx([layers * 50e-6 + kernels * 6e-6] * 2)


def test_a_block_in_the_cache_costs_a_quarter_of_a_microsecond_before_v1() -> None:
    """0.24 µs: of 64 decodes with 4,096 tokens in blocks of 16."""
    old = pool(LLAMA, "vllm-0.6")
    assert axes(old).context_knots[-1] == 4096
    assert block_tables(old, axes(old))[64, -1] == pytest.approx(64 * 256 * 0.24e-6)
    assert block_tables(old, axes(old)).shape == (129, len(axes(old).context_knots))


def test_ranks_that_need_not_agree_do_not() -> None:
    lockstep = pool("Qwen/Qwen3-30B-A3B", "vllm-0.32", data_parallel_size=2)
    assert host_cost(lockstep, ALL.without("rank_synchronisation")).serial == pytest.approx(0.2e-3)
    assert host_cost(lockstep).serial == pytest.approx(1.2e-3)


def test_measured_host_work_takes_the_place_of_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(LLAMA, "vllm-0.32")
    times = predictor_from(made, "modelled")
    assert [*map(list, host_tables(times, made, 2))] == [*map(list, host_cost(made).tables(2))]
    monkeypatch.setattr(type(times), "host_seconds", lambda _, requests: 2e-3 + 3e-6 * requests)
    overlapped, serial = host_tables(times, made, 2)
    assert overlapped.tolist() == [0.0, 0.0, 0.0]
    assert serial.tolist() == pytest.approx([0.0, 2.003e-3, 2.006e-3])
