"""What a share of the memory stands for in other engines than vLLM, and the states of linear attention."""

from dataclasses import replace

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.hardware import device
from windtunnel.model import LinearAttention, load_model

LIMITS = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.8}


def budget(preset: str, model: str = "Qwen/Qwen3-8B", **engine: object):  # type: ignore[no-untyped-def]
    chosen = Engine(preset=preset, **{**LIMITS, **engine})  # type: ignore[arg-type]
    gpu = device("h100" if model == "Qwen/Qwen3-8B" else "b200")
    return kv_blocks(Pool(load_model(model), gpu, chosen))


def test_each_engine_shares_memory_in_its_own_way() -> None:
    usable = device("h100").usable_memory_bytes
    vllm, sglang, trtllm = (budget(name) for name in ("vllm-0.32", "sglang-0.5", "trtllm-1.0"))
    used = vllm.weight_bytes + vllm.activation_bytes + vllm.reserve_bytes
    assert vllm.available_bytes == int(0.8 * usable) - used
    assert sglang.available_bytes == int(0.8 * usable) - vllm.weight_bytes - vllm.reserve_bytes
    assert trtllm.available_bytes == int(0.8 * (usable - used))
    assert trtllm.block_size == 32


def test_a_draft_layer_needs_weights_and_cache_of_its_own() -> None:
    plain = budget("vllm-0.32")
    drafting = budget("vllm-0.32", num_speculative_tokens=1, acceptance_length=1.7)
    model = load_model("Qwen/Qwen3-8B")
    longer = replace(model, layers=(*model.layers, (1, model.layers[-1][1])))
    assert drafting.weight_bytes == longer.weight_bytes() > plain.weight_bytes == model.weight_bytes()
    assert drafting.block_bytes * 36 == plain.block_bytes * 37
    assert drafting.num_blocks < plain.num_blocks


def test_linear_attention_keeps_a_state_and_no_cache() -> None:
    linear = LinearAttention(16, 32, 128, 128, 4)
    assert linear.kv_elements_per_token() == 0
    assert linear.state_bytes(2) == 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert linear.state_bytes(2, 4) == linear.state_bytes(2) // 4
    few, many = (budget("vllm-0.32", "Qwen/Qwen3.5-27B", max_num_seqs=n) for n in (8, 64))
    model = load_model("Qwen/Qwen3.5-27B")
    assert few.state_bytes == 8 * model.state_bytes()
    assert many.state_bytes == 64 * model.state_bytes()
    assert few.num_blocks > many.num_blocks
    assert model.state_bytes(2) == pytest.approx(model.state_bytes() / 2)


def test_states_take_half_of_the_memory_at_most() -> None:
    crowded = budget("vllm-0.32", "Qwen/Qwen3.5-27B", max_num_seqs=1024)
    state = load_model("Qwen/Qwen3.5-27B").state_bytes()
    assert crowded.state_bytes == crowded.max_num_seqs * state
    assert crowded.state_bytes <= crowded.available_bytes // 2 < crowded.state_bytes + state
    assert budget("vllm-0.32", "Qwen/Qwen3.5-27B", max_num_seqs=64).max_num_seqs == 64


def test_the_indexer_has_keys_of_its_own() -> None:
    model = load_model("deepseek-ai/DeepSeek-V3.2")
    assert model.kv_bytes_per_token("bfloat16") == 61 * (2 * 576 + 132)
