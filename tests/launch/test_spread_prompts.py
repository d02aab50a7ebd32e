"""Prefill context parallelism: what each copy of the layers computes, and what copies gather, by the engines' rules."""

from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.deployment.title import title
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import read_line, read_source
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.part_of_context import PartOfPrompt
from windtunnel.perf.tabulate.by_operator import by_operator, bytes_by_operator
from windtunnel.plan.answer.recommendation import hardware
from windtunnel.simulate.simulate import batch_times

LATENT, SPARSE = "deepseek-ai/DeepSeek-V3", "zai-org/GLM-5.2-FP8"


def pool(model: str = LATENT, role: str = "mixed", **engine: Any) -> Pool:
    words = {"preset": "vllm-0.33", "max_model_len": 32768, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
    return Pool(load_model(model), device("h200"), Engine(**{**words, **engine}), role=role)


def times(found: Pool) -> BatchTimes:
    (tables,) = batch_times(Deployment((found,)), "modelled")
    return tables.times


def settings(line: str) -> dict[str, Any]:
    return dict(read_line(read_source(line)[0]).settings)


def of_vllm(rank: int, copies: int, tokens: int) -> list[int]:
    """Places of a prompt's tokens that a copy computes: two of twice as many chunks (``_iter_rank_chunks`` of
    vllm/v1/worker/gpu/pcp_manager.py)."""
    size = -(-tokens // (2 * copies))
    chunks = (rank, 2 * copies - 1 - rank)
    return [place for each in chunks for place in range(each * size, min((each + 1) * size, tokens))]


@pytest.mark.parametrize("copies", [2, 4, 8])
@pytest.mark.parametrize("context", [0, 5000])
def test_every_copy_attends_to_its_share_of_all_pairs(copies: int, context: int) -> None:
    """Those of its own queries, one by one; of SGLang's every so-many-th token the middle copy has as many."""
    tokens, one = 4096, np.ones(1)
    whole = Attention("prefill", 16, 4, 128, 128, 0, "bfloat16")
    attended = float(PartOfPrompt(whole, copies).flops(tokens * one, context * one)[0])
    of_a_pair = float((whole.flops(one, one) - whole.flops(one, 0 * one))[0])
    for rank in range(copies):
        own = sum(context + place + 1 for place in of_vllm(rank, copies, tokens))
        assert attended == pytest.approx(of_a_pair * own, rel=1e-9)
    by_turns = [sum(context + place + 1 for place in range(rank, tokens, copies)) for rank in range(copies)]
    assert attended == pytest.approx(of_a_pair * np.mean(by_turns), rel=1e-9)


def test_a_copy_of_vllm_runs_its_share_of_tokens_and_of_decodes() -> None:
    """Products of 4,096 tokens in a batch of 8,192, and attention of 16 decodes in a batch of 32; experts see all."""
    alone, spread = (
        by_operator(pool(tensor_parallel_size=8, prefill_context_parallel_size=copies), "roofline") for copies in (1, 2)
    )
    for name in ("q_up_proj", "qkv_down_proj", "o_proj", "norm", "attention_all_reduce"):
        assert spread[name].mixed_tokens[8192] == pytest.approx(alone[name].mixed_tokens[4096], rel=1e-9), name
        assert spread[name].decode_tokens[32] == pytest.approx(alone[name].decode_tokens[16], rel=1e-9), name
    attention = "decode_latent_attention"
    np.testing.assert_allclose(spread[attention].decode_attention[32], alone[attention].decode_attention[16])
    assert spread["lm_head"].sequences[32] == alone["lm_head"].sequences[32]


def test_copies_gather_the_keys_and_the_tokens_of_experts() -> None:
    """A layer's latent vector of 576 numbers in 16 bits, of every token in the batch, from the other copies; hidden
    states to experts and back, and once at the end."""
    copies, tokens, layers, hidden = 4, 8192, 61, 7168
    moved = bytes_by_operator(pool(tensor_parallel_size=4, prefill_context_parallel_size=copies))
    others = (copies - 1) / copies * 2 * tokens
    expected = {
        "latent_gather_of_copies": layers * 576,
        "state_gather_of_copies": hidden,
        "expert_all_gather": 58 * hidden,
        "expert_reduce_scatter": 58 * hidden,
    }
    for name, width in expected.items():
        assert moved[name].mixed_tokens[tokens] == pytest.approx(others * width), name
    sparse = pool(SPARSE, preset="sglang-0.5", prefill_context_parallel_size=8)
    index = bytes_by_operator(sparse)["index_gather_of_copies"]
    indexers = sum(count for count, layer in sparse.model.layers if getattr(layer.attention, "index_heads", 0))
    assert index.mixed_tokens[tokens] == pytest.approx(7 / 8 * 2 * tokens * indexers * 128)
    assert index.decode_tokens[32] == 0


def test_decodes_of_sglang_are_whole_on_every_copy() -> None:
    """Attention of all decodes with the heads of a copy; nothing is gathered, and experts are one sum over all GPUs."""
    engine: dict[str, Any] = {"preset": "sglang-0.5", "tensor_parallel_size": 2}
    alone, spread = (
        by_operator(pool("Qwen/Qwen3-235B-A22B-FP8", prefill_context_parallel_size=copies, **engine), "roofline")
        for copies in (1, 2)
    )
    for name in ("qkv_proj", "o_proj", "attention_all_reduce"):
        assert spread[name].decode_tokens[32] == alone[name].decode_tokens[32], name
        assert spread[name].mixed_tokens[8192] == pytest.approx(alone[name].mixed_tokens[4096], rel=1e-9), name
    np.testing.assert_array_equal(
        spread["decode_attention"].decode_attention, alone["decode_attention"].decode_attention
    )
    for name in ("key_gather_of_copies", "value_gather_of_copies", "expert_all_gather", "expert_reduce_scatter"):
        assert spread[name].decode_tokens.max() == 0 < spread[name].mixed_tokens[8192], name
    assert spread["expert_all_reduce"].decode_tokens.max() == 0 < spread["expert_all_reduce"].mixed_tokens[8192]
    assert spread["expert_sum_of_decodes"].mixed_tokens.max() == 0 < spread["expert_sum_of_decodes"].decode_tokens[32]


def test_layers_and_cache_are_whole_on_every_copy_and_experts_are_divided() -> None:
    one = pool(tensor_parallel_size=4, enable_expert_parallel=True, data_parallel_size=2)
    two = pool(tensor_parallel_size=4, enable_expert_parallel=True, prefill_context_parallel_size=2)
    assert two.gpus == one.gpus == 8
    assert kv_blocks(two).weight_bytes == kv_blocks(one).weight_bytes
    assert kv_blocks(two).block_bytes == kv_blocks(one).block_bytes
    whole = kv_blocks(pool(SPARSE, preset="sglang-0.5", prefill_context_parallel_size=8)).weight_bytes
    ranks = kv_blocks(pool(SPARSE, preset="sglang-0.5", data_parallel_size=8)).weight_bytes
    model = load_model(SPARSE)
    head = model.vocab_size * model.hidden_size * 2
    assert ranks - whole == pytest.approx(head * 7 / 8, rel=1e-3)  # the output head alone


def test_a_long_prompt_is_shorter_on_twice_the_gpus_and_not_twice_as_short() -> None:
    """Not twice: experts, the head and what is gathered do not get less."""
    one, two = (times(pool(tensor_parallel_size=8, prefill_context_parallel_size=copies)) for copies in (1, 2))
    for context in (0, 16384):
        ratio = two.batch(0, 0, [(8192, context)]) / one.batch(0, 0, [(8192, context)])
        assert 0.5 < ratio < 0.8


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("vllm serve deepseek-ai/DeepSeek-V3 -tp 4 -pcp 2", (4, 2)),
        (
            f"python -m sglang.launch_server --model {SPARSE} --tp 8 --enable-prefill-cp --cp-strategy interleave",
            (1, 8),
        ),
        (
            f"python -m sglang.launch_server --model {SPARSE} --tp 8 --enable-prefill-cp --cp-strategy interleave "
            "--attn-cp-size 4",
            (2, 4),
        ),
        (
            "python -m sglang.launch_server --model Qwen/Qwen3-235B-A22B --tp 8 --attn-cp-size 2 --enable-prefill-cp",
            (4, 2),
        ),
        (
            "python -m sglang.launch_server --model Qwen/Qwen3-235B-A22B --tp 8 --attn-cp-size 1 --enable-prefill-cp",
            (8, 1),
        ),
        (
            "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2 --tp 8 "
            "--enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode round-robin-split",
            (1, 8),
        ),
    ],
)
def test_lines_say_over_how_many_gpus(line: str, found: tuple[int, int]) -> None:
    said = settings(line)
    assert (said["tensor_parallel_size"], said.get("prefill_context_parallel_size", 1)) == found


def test_latent_attention_of_sglang_brings_deepep() -> None:
    """``_deepseek_family_overrides``: whole experts and attention on each GPU, however many are said."""
    line = f"python -m sglang.launch_server --model {LATENT} --tp 8 --enable-prefill-cp --cp-strategy zigzag"
    said = settings(line)
    assert (said["tensor_parallel_size"], said["prefill_context_parallel_size"]) == (1, 8)
    assert said["enable_expert_parallel"] and said["all2all_backend"] == "deepep_auto"
    with pytest.raises(InputError, match="with whole attention on each GPU and DeepEP"):
        pool(preset="sglang-0.5", tensor_parallel_size=2, prefill_context_parallel_size=4)


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"model": "Qwen/Qwen3-8B"}, "latent attention, which Qwen/Qwen3-8B lacks"),
        ({"model": SPARSE, "preset": "vllm-0.32"}, "does not capture sparse attention with it"),
        (
            {"enable_dbo": True, "all2all_backend": "deepep_low_latency", "enable_expert_parallel": True},
            "with enable_dbo",
        ),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "not simulated together"),
        ({"preset": "trtllm-1.0"}, "not for trtllm-1.0"),
        ({"role": "decode"}, "a decode pool computes no prompts"),
        ({"preset": "sglang-0.5", "model": "Qwen/Qwen3-8B"}, "for experts without recurrent layers"),
        ({"preset": "sglang-0.5", "model": SPARSE, "tensor_parallel_size": 8}, "over 8; use fewer"),
    ],
)
def test_engines_refuse(said: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        pool(**said, prefill_context_parallel_size=2)


def test_sparse_attention_runs_without_graphs() -> None:
    assert pool(SPARSE, preset="vllm-0.32", enforce_eager=True, prefill_context_parallel_size=2).gpus == 2
    assert pool(SPARSE, prefill_context_parallel_size=2).gpus == 2


def test_titles_and_purchases_say_it() -> None:
    found = Deployment((pool(tensor_parallel_size=4, prefill_context_parallel_size=2, enable_expert_parallel=True),))
    assert title([found.pools[0].spec()]).endswith("on 8 × H200 SXM, TP 4, PCP 2, vllm-0.33")
    assert hardware(found) == "8 × H200 SXM (one replica of 8 GPUs, TP 4 PCP 2 EP)"
