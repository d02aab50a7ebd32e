"""What a share of the memory stands for in other engines than vLLM, and the states of linear attention."""

from dataclasses import replace

import pytest

from windtunnel.deployment import Engine, Pool, memory
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
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
    used = trtllm.weight_bytes + trtllm.activation_bytes + trtllm.reserve_bytes
    assert trtllm.available_bytes == int(0.8 * (usable - used))
    assert trtllm.block_size == 32


def test_sglang_and_trtllm_start_where_the_longest_request_or_the_cache_that_is_named_does_not_fit() -> None:
    """``max_total_tokens`` and ``max_model_len`` are limits to them, and orders to vLLM. Two H100 hold no
    million tokens."""
    model = "mistralai/Mistral-Small-4-119B-2603"
    for name, override in (("sglang-0.5", 10**6), ("trtllm-1.0", 10**5)):
        engine = Engine(preset=name, max_num_batched_tokens=8192, tensor_parallel_size=2, enable_chunked_prefill=True)
        pool = Pool(load_model(model), device("h100"), engine)
        found = kv_blocks(pool)
        assert found.num_tokens < pool.engine.resolved("max_model_len")
        (note,) = memory.room_notes(pool, found)
        assert note.startswith("max_model_len=1048576 does not fit: the KV cache on each h100_sxm holds")
        few, many = (
            replace(pool, engine=replace(engine, num_gpu_blocks_override=blocks)) for blocks in (100, override)
        )
        assert (kv_blocks(few).num_blocks, kv_blocks(many).num_blocks) == (100, found.num_blocks)
        assert "which is a limit to" in memory.room_notes(many, found)[0]
    with pytest.raises(InputError, match=r"max_model_len=1048576 of .* needs"):
        kv_blocks(Pool(load_model(model), device("h100"), Engine(tensor_parallel_size=2)))


def test_a_shortage_names_the_release_that_has_less_of_other_memory() -> None:
    """vLLM 0.31's sampler takes three times as much as 0.29's for 1,024 requests."""
    pool = Pool(load_model("MiniMaxAI/MiniMax-M2.1"), device("h100"), Engine(tensor_parallel_size=4))
    with pytest.raises(InputError, match=r"it would fit with max_model_len=\d+ or preset='vllm-0.29'"):
        kv_blocks(pool)


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


def test_shares_of_memory_by_hand() -> None:
    """Of 1,000 bytes nine tenths, in vLLM less 100 of weights, 50 of activations and 30 beside; in SGLang less weights
    and the rest; TensorRT-LLM takes its share of what all of them leave."""
    gpu = replace(device("h100"), usable_memory_bytes=1000)
    for name, left in (("vllm-0.32", 720), ("sglang-0.5", 770), ("trtllm-1.0", 738)):
        engine = Engine(preset=name, gpu_memory_utilization=0.9)
        assert memory._available(gpu, engine, 100, 50, 30) == left


def test_states_take_half_or_as_many_as_have_room_for_their_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 bytes and states of 70: seven in half of it; where blocks come from one pool, nine beside contexts of 40
    bytes, and seven beside such of 200."""
    model, seqs = load_model("Qwen/Qwen3-8B"), 64
    monkeypatch.setattr(memory, "_state_bytes", lambda *_: 70)
    for name, context, running in (
        ("vllm-0.32", 40, 9), ("vllm-0.32", 200, 7), ("sglang-0.5", 40, 7), ("trtllm-1.0", 40, 7)
    ):  # fmt: skip
        monkeypatch.setattr(memory, "_longest_request_bytes", lambda *_, context=context: context)
        pool = Pool(model, device("h100"), Engine(preset=name, max_num_seqs=seqs))
        assert memory._requests_with_state(model, pool.engine, 1000) == running
        few = Pool(model, device("h100"), Engine(preset=name, max_num_seqs=5))
        assert memory._requests_with_state(model, few.engine, 1000) == 5
    monkeypatch.setattr(memory, "_state_bytes", lambda *_: 0)
    assert memory._requests_with_state(model, pool.engine, 0) == seqs, "without states all run"
