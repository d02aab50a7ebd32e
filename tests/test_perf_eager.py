"""What the host needs for layers that no graph holds, by engine and generation."""

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import MLA, load_model
from windtunnel.perf.corrections import ALL
from windtunnel.perf.tabulate.host import EAGER, HOSTS, dispatch, eager_floor
from windtunnel.perf.tabulate.tables import axes


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
