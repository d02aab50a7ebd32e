"""Host work of a step, with and without graphs."""

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import MLA, load_model
from windtunnel.perf.corrections import ALL
from windtunnel.perf.tabulate.host import (
    DISPATCH_ATTENTION,
    EAGER,
    HOSTS,
    dispatch,
    dispatch_floor,
    eager_floor,
    host_cost,
)
from windtunnel.perf.tabulate.tables import axes


@pytest.mark.parametrize("asynchronous", [True, False])
def test_host_work_grows_with_requests_and_is_nothing_without(asynchronous: bool) -> None:
    overlapped, serial = host_cost(asynchronous).tables(256)
    assert overlapped[0] == serial[0] == 0.0
    assert (np.diff(overlapped[1:]) >= 0).all()
    assert (np.diff(serial[1:]) > 0).all()


def test_asynchronous_scheduling_hides_most_of_the_host_work() -> None:
    hidden, short = host_cost(True).tables(128)
    none, long = host_cost(False).tables(128)
    assert (none == 0).all()
    assert (short[1:] < 0.3 * long[1:]).all()
    assert (hidden[1:] > long[1:]).all()


def test_tokens_that_stay_on_the_device_leave_less() -> None:
    for backend in ("sglang", "trtllm"):
        hidden, left = host_cost(True, backend=backend).tables(128)
        vllm_hidden, vllm_left = host_cost(True).tables(128)
        assert np.array_equal(hidden, vllm_hidden)
        assert (left[1:] > 0).all()
        assert (left[1:] < 0.5 * vllm_left[1:]).all()
        assert host_cost(False, backend=backend) == host_cost(False)


def test_captured_pieces_leave_only_attention_to_the_host() -> None:
    assert dispatch_floor(32, 12, captured=True, compiled=True) == 32 * DISPATCH_ATTENTION
    compiled, eager = (dispatch_floor(32, 12, captured=False, compiled=c) for c in (True, False))
    assert 32 * DISPATCH_ATTENTION < compiled < eager


def pool(model: str, preset: str, on: str = "h200") -> Pool:
    return Pool(load_model(model), device(on), Engine(preset=preset, max_num_seqs=32, max_model_len=4096))


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
    waits = dispatch(served, tokens, gpu)
    assert waits[0] == 0.0
    assert (waits[1:] + gpu[1:]) == pytest.approx(np.maximum(gpu[1:], eager_floor(served)))
    assert not dispatch(served, tokens, gpu, ALL.without("launch_gaps")).any()


def test_compiled_engines_have_no_such_floor() -> None:
    served = pool("Qwen/Qwen3-8B", "vllm-0.32")
    waits = dispatch(served, axes(served), np.zeros(len(axes(served).padded)))
    assert waits.max() < eager_floor(pool("Qwen/Qwen3-8B", "sglang-0.5"))
