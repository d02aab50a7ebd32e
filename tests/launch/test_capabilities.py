"""What flags of public lines change here: each by its sign, and by its size where that is known.

Sources: what the engines say of the flags (server_args.py of SGLang, arg_utils.py and output_processor.py of vLLM,
llm_args.py of TensorRT-LLM).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool, Store
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.metrics import summary
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.database import find_systems
from windtunnel.perf.kernel import Efficiency
from windtunnel.perf.kinds.exchanging_experts import ExchangingExperts
from windtunnel.perf.tabulate.host import DISPATCH_ATTENTION, eager_floor
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import axes
from windtunnel.simulate.overheads import CLIENTS, Overheads
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.validation.pool_points import read_pool_points
from windtunnel.workload import Workload

POINTS = Path(__file__).parents[3] / "shared" / "truth" / "disagg" / "points.jsonl"


def pool(model: str, gpu: str = "h100", **engine: Any) -> Pool:
    return Pool(load_model(model), device(gpu), Engine(**{"max_model_len": 8192, **engine}))


def reading(text: str) -> Reading:
    return read_line(read_source(text)[0])


def table(*args: Any, **engine: Any) -> BatchTimes:
    """Times of a pool's steps by the roofline."""
    (found,) = batch_times(Deployment((pool(*args, **engine),)), "modelled")
    return found.times


def loop(requests: int, clients: int) -> Workload:
    return Workload.from_columns(prompt_tokens=[512] * requests, output_tokens=41, max_concurrency=clients)


def test_states_in_16_bits_take_half_the_memory_and_twice_as_many_requests_run() -> None:
    half, whole = (
        pool("Qwen/Qwen3-Next-80B-A3B-Instruct", "b200", preset="sglang-0.5", mamba_ssm_cache_dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    assert half.model.state_bytes() / whole.model.state_bytes() == pytest.approx(0.5, abs=0.02)
    assert kv_blocks(half).max_num_seqs == pytest.approx(2 * kv_blocks(whole).max_num_seqs, rel=0.02)
    auto = pool("Qwen/Qwen3-Next-80B-A3B-Instruct", "b200", preset="sglang-0.5")
    assert auto.model.state_bytes() == whole.model.state_bytes()


@pytest.mark.parametrize(
    ("flags", "places", "running"),
    [
        ("", 48, 16),
        ("--mamba-scheduler-strategy no_buffer", 48, 16),
        ("--mamba-scheduler-strategy extra_buffer", 16, 3),
        ("--mamba-scheduler-strategy extra_buffer", 128, 25),
        ("--mamba-scheduler-strategy extra_buffer_lazy", 320, 80),
        ("--mamba-scheduler-strategy extra_buffer --disable-overlap-schedule", 64, 16),
        ("--disable-radix-cache", 48, 48),
    ],
)
def test_kept_states_take_places_of_running_requests(flags: str, places: int, running: int) -> None:
    """SGLang's ratios (model_runner_kv_cache_mixin.py of 0.5.9); a server of Qwen3.5 with ``extra_buffer`` is reported
    to have run 3, 12 and 25 requests with 16, 64 and 128 places."""
    line = f"python -m sglang.launch_server --model-path Qwen/Qwen3.5-35B-A3B --max-mamba-cache-size {places} {flags}"
    assert reading(line).settings["max_num_seqs"] == running


def test_kept_states_take_memory_and_other_models_none() -> None:
    """Half of the memory at most is for states: of so many requests as fit with theirs."""
    hybrid = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    alone, kept, buffered = (
        kv_blocks(pool(hybrid, "b200", preset="sglang-0.5", **more)).max_num_seqs
        for more in ({"enable_prefix_caching": False}, {}, {"states_per_request": 5})
    )
    assert (alone // 3, alone // 5) == (kept, buffered)
    assert pool("Qwen/Qwen3-8B", preset="sglang-0.5").engine.states_per_request == 1
    assert pool(hybrid, "b200").engine.states_per_request == 1
    aligned = reading(f"vllm serve {hybrid} --mamba-cache-mode align").settings["states_per_request"]
    one, two = (
        kv_blocks(pool(hybrid, "b200", states_per_request=each, max_num_seqs=8)).state_bytes for each in (1, aligned)
    )
    assert two == 2 * one


def test_a_smaller_share_for_windows_leaves_more_tokens() -> None:
    """A token of DeepSeek-V4 takes its compressed entries, and the share of an entry in the window of each layer."""
    engine: dict[str, Any] = {"preset": "sglang-0.5", "tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}
    few, many = (
        pool("deepseek-ai/DeepSeek-V4-Flash", "b200", swa_full_tokens_ratio=ratio, **engine) for ratio in (0.1, 0.8)
    )
    few_blocks, many_blocks = kv_blocks(few), kv_blocks(many)
    assert few_blocks.num_blocks > 2 * many_blocks.num_blocks
    assert few_blocks.available_bytes == many_blocks.available_bytes
    more = 0.7 * few.model.num_layers * 584 * few_blocks.block_size
    assert many_blocks.block_bytes - few_blocks.block_bytes == pytest.approx(more, abs=1)


def test_index_keys_in_4_bits_take_half_of_the_memory_and_its_traffic() -> None:
    """68 instead of 132 bytes a token and layer, next to 576 of the latent vector in 8 bits: SGLang reports 9.9 % more
    tokens (its #30546)."""
    line = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash --enable-deepseek-v4-fp4-indexer"
    assert reading(line).settings["indexer_kv_dtype"] == "mxfp4"
    engine: dict[str, Any] = {"preset": "sglang-0.5", "tensor_parallel_size": 8, "kv_cache_dtype": "fp8"}
    eight, four = (
        pool("deepseek-ai/DeepSeek-V3.2", "b200", **engine, indexer_kv_dtype=dtype) for dtype in ("auto", "mxfp4")
    )
    layers = eight.model.num_layers
    saved = kv_blocks(eight).block_bytes - kv_blocks(four).block_bytes
    assert saved == layers * (132 - 68) * kv_blocks(eight).block_size
    assert kv_blocks(four).num_blocks / kv_blocks(eight).num_blocks == pytest.approx(1.099, abs=1e-3)
    whole, half = (next(op.kernel for op in operators(each) if op.phase == "decode") for each in (eight, four))
    one, far = np.ones(1), np.full(1, 1e6)
    less = whole.bytes_moved(one, far) - half.bytes_moved(one, far)
    np.testing.assert_allclose(less, 128 * (1 - 0.53125) * 1e6)
    with pytest.raises(InputError, match="for data-centre Blackwell, not for h100"):
        pool("deepseek-ai/DeepSeek-V3.2", "h100", **engine, indexer_kv_dtype="mxfp4")
    with pytest.raises(InputError, match="has no index of sparse attention"):
        pool("Qwen/Qwen3-8B", indexer_kv_dtype="fp8")


def test_index_keys_of_minimax_m3_are_in_16_bits_unless_told() -> None:
    """128 numbers for all heads, whatever the cache has (``resolve_indexer_kv_dtype``)."""
    plain, told = (
        f"vllm serve MiniMaxAI/MiniMax-M3 {more}" for more in ("", "--attention-config.indexer_kv_dtype fp8")
    )
    usual, eight = (
        Pool(
            load_model("MiniMaxAI/MiniMax-M3"), device("b200"), Engine(**reading(line).settings, tensor_parallel_size=8)
        )
        for line in (plain, told)
    )
    saved = usual.model.kv_bytes_per_token("fp8", 8) - eight.model.kv_bytes_per_token("fp8", 8)
    sparse = sum(count for count, layer in usual.model.layers if layer.attention and layer.attention.index_dtypes)
    assert saved == sparse * 128
    for model in ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3.2"):
        assert (
            "indexer_kv_dtype" not in reading(f"vllm serve {model} --attention-config.indexer_kv_dtype bf16").settings
        )


def test_contexts_in_parts_fit_as_many_times_and_are_read_as_much_faster() -> None:
    """All 8 GPUs hold the latent vectors of DeepSeek-R1: over 8 of them 8 times the tokens fit, and each reads an
    eighth (vLLM's docs/serving/context_parallel_deployment.md). For few and short contexts queries and sums that are
    exchanged cost more. What is kept for each request, not for each token, stays."""
    line = "vllm serve nvidia/DeepSeek-R1-NVFP4 -tp 8 --max-model-len 131072"
    whole, parts = (
        Pool(load_model("nvidia/DeepSeek-R1-NVFP4"), device("b200"), Engine(**reading(text).settings))
        for text in (line, f"{line} -dcp 8")
    )
    assert kv_blocks(parts).num_blocks == pytest.approx(8 * kv_blocks(whole).num_blocks, rel=1e-4)
    (alone,), (spread,) = (batch_times(Deployment((each,)), "modelled") for each in (whole, parts))
    assert spread.times.rank(1, 500, []) > alone.times.rank(1, 500, [])
    more, less = (each.groups["attention"] for each in (alone, spread))
    far, near = 64 * 100_000, 64 * 50_000
    assert (more.decode(64, far) - more.decode(64, near)) / (less.decode(64, far) - less.decode(64, near)) > 4
    kernels = {op.name: op.kernel for op in operators(parts)}
    one, keys, zero = np.ones(1), np.full(1, 80_000.0), np.zeros(1)
    read = kernels["decode_latent_attention"].bytes_moved(one, 2 * keys)
    read = read - kernels["decode_latent_attention"].bytes_moved(one, keys)
    np.testing.assert_allclose(read, 80_000 / 8 * 576)
    context = kernels["context_all_gather"]
    np.testing.assert_allclose(context.bytes_moved(one, keys), 7 / 8 * 80_000 * 576)
    assert context.attained(device("b200"), {"gather": Efficiency(1, 1, 1e-6)}, one, zero) == 0
    kimi, over_8 = (
        pool("moonshotai/Kimi-K3", "gb300", tensor_parallel_size=16, decode_context_parallel_size=size)
        for size in (1, 8)
    )
    assert over_8.model.state_bytes(16) == kimi.model.state_bytes(16)
    assert over_8.model.kv_bytes_per_token("auto", 16) * 8 == kimi.model.kv_bytes_per_token("auto", 16)
    for model, gpus in (("Qwen/Qwen3-8B", 8), ("deepseek-ai/DeepSeek-V3.2", 8), ("openai/gpt-oss-120b", 8)):
        with pytest.raises(InputError, match="decode_context_parallel_size=2: must divide the GPUs that hold the same"):
            pool(model, "b200", tensor_parallel_size=gpus, decode_context_parallel_size=2)


@pytest.mark.parametrize(
    ("store", "found"),
    [
        (None, 0),
        (Store(ratio=3), 8192),
        (Store(ratio=3, on_eviction=True), 8192),
        (Store(ratio=3, write_after=1), 0),
        (Store(capacity=2.5e9), 0),
    ],
)
def test_prompts_come_back_from_host_memory_beside_the_layers(store: Store | None, found: int) -> None:
    """Three prompts of 8,192 tokens in turn, memory for two: host memory has them the second time, unless it writes
    what is entered twice, or holds two. 147,456 bytes a token take PCIe; 16 further tokens are computed (SGLang's
    hicache_design: KV of a layer is loaded while the one before it is computed)."""
    ids = [[100 * prompt + block for block in range(16)] for prompt in (1, 2, 3)] * 2
    asked = Workload.from_columns(
        arrival=[10.0 * k for k in range(6)],
        prompt_tokens=[8208] * 6,
        output_tokens=2,
        hash_ids=ids,
        hash_block_size=512,
    )
    engine: dict[str, Any] = {
        "preset": "sglang-0.5",
        "max_model_len": 16384,
        "max_num_batched_tokens": 8208,
        "block_size": 1,
    }
    one = replace(pool("Qwen/Qwen3-8B", num_gpu_blocks_override=20_000, **engine), stores=(store,) if store else ())
    requests = simulate(Deployment((one,)), asked, perf="modelled").requests
    assert requests.cached_tokens.tolist() == [0] * 3 + [found] * 3
    first, again = (requests.first_token - requests.arrival)[[0, 3]]
    if found == 0:
        assert again == pytest.approx(first)
        return
    copied = found * one.model.kv_bytes_per_token("auto", 1) / one.device.pcie_bandwidth
    assert copied < again < copied + 0.2 * first


@pytest.mark.parametrize(("third", "found"), [((1, 2), [8192, 8192]), ((2, 1), [0, 0])])
def test_every_rank_of_attention_has_host_memory_of_its_own(third: tuple[int, int], found: list[int]) -> None:
    """``--hicache-size`` GB for each GPU's process. Two prompts at once go to two ranks, each of which keeps one prompt
    on its GPU and has it on its host after another one; what the other rank has on its host is computed again."""
    flags = "--dp 2 --enable-dp-attention --enable-hierarchical-cache --hicache-size 4 --max-total-tokens 20000"
    line = f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 {flags} --chunked-prefill-size 16416"
    said = reading(f"{line} --context-length 16384")
    assert said.stores == ("tier=host capacity=8000000000",)
    one = Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(**said.settings), stores=(Store.of(said.stores[0]),))
    prompts = ((1, 2), (3, 4), (5, 6), third)
    asked = Workload.from_columns(
        arrival=[10.0 * k for k in range(4) for _ in range(2)],
        prompt_tokens=[8208] * 8,
        output_tokens=2,
        hash_ids=[[100 * each + block for block in range(16)] for pair in prompts for each in pair],
        hash_block_size=512,
    )
    requests = simulate(Deployment((one,)), asked, perf="modelled").requests
    assert requests.lane.tolist() == [0, 1] * 4
    assert requests.cached_tokens.tolist() == [0] * 6 + found


@pytest.mark.plain_python
def test_drafts_without_an_acceptance_length_shorten_the_time_of_a_token_by_that_of_the_table() -> None:
    line = "sglang serve --model-path Qwen/Qwen3-8B --context-length 8192 --speculative-algorithm EAGLE3"
    said = reading(f"{line} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")
    length = said.settings["acceptance_length"]
    assert length == 2.88  # three drafts of Kimi-K2's head, which stands for heads that were not measured

    def tpot(accepted: float) -> float:
        engine = Engine(**{**said.settings, "acceptance_length": accepted})
        one = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine),))
        requests = Workload.from_columns(prompt_tokens=[512] * 8, output_tokens=401, max_concurrency=1)
        return summary(simulate(one, requests, perf="modelled")).latencies["tpot"].mean

    assert tpot(1.0) / tpot(length) == pytest.approx(length, rel=0.02)


def test_adapters_take_memory_and_their_products_time() -> None:
    """Of Llama-2-7B all adapters of rank 64 are 159,907,840 numbers (as PEFT counts them for all linear layers); over 2
    GPUs what is whole on each stays. A token reads one, many tokens all of them, in 8 launches a layer."""
    rank = "--enable-lora --max-loras 32 --max-lora-rank 64"
    line = f"vllm serve meta-llama/Llama-2-7b-hf {rank} --lora-modules a=/a"
    assert {name: reading(line).settings[name] for name in ("max_loras", "max_lora_rank")} == {
        "max_loras": 32,
        "max_lora_rank": 64,
    }
    assert "max_lora_rank" not in reading("vllm serve Qwen/Qwen3-8B --max-lora-rank 64").settings
    engine: dict[str, Any] = {"max_model_len": 4096, "max_lora_rank": 64}
    plain, adapted = (pool("meta-llama/Llama-2-7b-hf", **engine, max_loras=many) for many in (0, 32))
    assert kv_blocks(adapted).weight_bytes - kv_blocks(plain).weight_bytes == 32 * 159_907_840 * 2
    both = (pool("meta-llama/Llama-2-7b-hf", **engine, max_loras=many, tensor_parallel_size=2) for many in (0, 32))
    divided = [kv_blocks(each).weight_bytes for each in both]
    assert 0.5 < (divided[1] - divided[0]) / (32 * 159_907_840 * 2) < 0.75
    (without,), (table_of,) = (batch_times(Deployment((each,)), "modelled") for each in (plain, adapted))
    bandwidth = device("h100").memory_bandwidth
    longer = table_of.times.decode_tokens - without.times.decode_tokens
    moved = 159_907_840 * 2 / (0.8 * bandwidth)
    assert moved + 32 * 8 * 2e-6 < longer[1] < moved + 32 * 8 * 3e-6
    assert longer[8] - longer[1] == pytest.approx(7 * moved, rel=0.04)
    for model, more in (("Qwen/Qwen3-30B-A3B", {}), ("Qwen/Qwen3-8B", {"preset": "sglang-0.5"})):
        with pytest.raises(InputError, match="max_loras"):
            pool(model, **more, max_loras=1)


def test_a_draft_head_has_weights_a_cache_and_a_vocabulary_of_its_own() -> None:
    """MiniMax-M3's heads cache 8192 bytes a token on each of 4 GPUs, or 512 with 4 KV heads (TensorRT-LLM #17406). Of
    Qwen3-8B's one the tensors are known: 3 x 4096 to 4096, 8192 to 4096 and twice 1024, 4096 to 4096, three of 4096 x
    12288, 32,000 x 4096. A draft more takes a pass through all but the first of them."""
    line = "vllm serve nvidia/MiniMax-M3-NVFP4 -tp 4 --max-model-len 8192 --kv-cache-dtype bfloat16"
    drafts = '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3%s", "num_speculative_tokens": 3}'
    m3 = load_model("nvidia/MiniMax-M3-NVFP4")
    plain, grouped, single = (
        kv_blocks(Pool(m3, device("b200"), Engine(**reading(text).settings)))
        for text in (line, *(f"{line} --speculative-config '{drafts % kind}'" for kind in ("-GQA", "")))
    )
    assert (grouped.block_bytes - plain.block_bytes) == 512 * plain.block_size
    assert (single.block_bytes - plain.block_bytes) == 8192 * plain.block_size
    said: dict[str, Any] = {"acceptance_length": 1.0, "speculative_model": "AngelSlim/Qwen3-8B_eagle3"}
    two, three = (pool("Qwen/Qwen3-8B", **said, num_speculative_tokens=drafts) for drafts in (2, 3))
    layer = 2 * (8192 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 12288 + 32000 * 4096)
    weights = kv_blocks(two).weight_bytes - kv_blocks(pool("Qwen/Qwen3-8B")).weight_bytes
    assert weights == layer + 2 * 3 * 4096 * 4096
    (fewer,), (more,) = (batch_times(Deployment((each,)), "modelled") for each in (two, three))
    longer = more.groups["gemm"].rank(1, 64, []) - fewer.groups["gemm"].rank(1, 64, [])
    least = layer / device("h100").memory_bandwidth
    assert least < longer < 1.5 * least
    with pytest.raises(InputError, match="only EAGLE-3 heads are simulated"):
        pool("Qwen/Qwen3-8B", **said | {"speculative_model": "someone/DFlash"}, num_speculative_tokens=1)


def test_sums_over_gpus_that_are_not_fused_with_norms_take_a_launch_more_each() -> None:
    """vLLM says 5 to 20 % of a whole server, for few tokens (its docs/design/fusions of 0.32, "indicative"); here 4 %
    for few and 2.5 % for 256."""
    pass_config = "--compilation-config.pass_config.fuse_allreduce_rms"
    for line, fuses in (
        (f"vllm serve Qwen/Qwen3-32B -tp 4 {pass_config} false", False),
        (f"vllm serve Qwen/Qwen3-32B -tp 4 {pass_config} true", True),
        ("sglang serve --model-path Qwen/Qwen3-32B --tp 4 --enable-flashinfer-allreduce-fusion", True),
    ):
        assert reading(line).settings["fuse_allreduce_rms"] is fuses
    on, off, usual = (
        table("Qwen/Qwen3-32B", tensor_parallel_size=4, fuse_allreduce_rms=fuses).decode_tokens
        for fuses in (True, False, None)
    )
    np.testing.assert_array_equal(on, usual)
    few, many = (off[tokens] / on[tokens] for tokens in (8, 256))
    assert 1.02 < many < few < 1.2


def test_copies_of_experts_take_memory() -> None:
    """32 copies over 8 ranks: 4 experts of each of 48 layers on every GPU, 3 · 2048 · 768 numbers of 2 bytes each."""
    engine: dict[str, Any] = {"data_parallel_size": 8, "enable_expert_parallel": True}
    with_copies = kv_blocks(pool("Qwen/Qwen3-30B-A3B", num_redundant_experts=32, **engine))
    without = kv_blocks(pool("Qwen/Qwen3-30B-A3B", **engine))
    assert with_copies.weight_bytes - without.weight_bytes == 4 * 48 * 3 * 2048 * 768 * 2
    assert with_copies.num_blocks < without.num_blocks


@pytest.mark.parametrize(
    ("line", "balanced"),
    [
        ("vllm serve Qwen/Qwen3-30B-A3B -dp 8 --enable-expert-parallel --enable-eplb", True),
        ("vllm serve Qwen/Qwen3-30B-A3B -dp 8 --enable-eplb", None),
        ("sglang serve --model-path Qwen/Qwen3-30B-A3B --tp 8 --ep 8 --enable-eplb", True),
        ("sglang serve --model-path Qwen/Qwen3-30B-A3B --tp 8 --enable-eplb", None),
        ("sglang serve --model-path Qwen/Qwen3-8B --enable-eplb", None),
    ],
)
def test_a_load_balancer_without_copies_needs_experts_that_gpus_divide(line: str, balanced: bool | None) -> None:
    found = reading(line)
    assert found.settings.get("enable_eplb") is balanced
    assert not found.not_simulated
    with pytest.raises(InputError, match="add enable_expert_parallel"):
        kv_blocks(pool("Qwen/Qwen3-30B-A3B", enable_eplb=True))


@pytest.mark.parametrize(("slots", "copies"), [(256, None), (288, 32)])
def test_slots_beyond_the_experts_are_copies(slots: int, copies: int | None) -> None:
    said = f'\'{{"load_balancer": {{"num_slots": {slots}, "layer_updates_per_iter": 1}}}}\''
    line = f"trtllm-serve nvidia/DeepSeek-R1-NVFP4 --tp_size 16 --ep_size 16 --enable_attention_dp --moe_config {said}"
    found = reading(line)
    assert found.settings.get("num_redundant_experts") == copies
    assert found.settings.get("enable_eplb") is (None if copies else True)
    assert not [word for word in found.not_simulated if "balancer" in word.flag]


def test_graphs_of_decodes_alone_leave_prompts_outside() -> None:
    alone, both = (pool("Qwen/Qwen3-8B", cudagraph_mode=mode) for mode in ("FULL_DECODE_ONLY", None))
    assert (axes(alone).mixed_graph_tokens, axes(both).mixed_graph_tokens) == (0, axes(both).graph_tokens)
    assert axes(alone).graph_tokens == axes(both).graph_tokens > 0


def test_attention_outside_of_graphs_costs_its_launch_in_every_layer() -> None:
    """A small model: the host takes longer to launch 28 layers than the GPU to compute them."""
    floor = 28 * DISPATCH_ATTENTION
    pieces, usual, whole, eager = (
        table("Qwen/Qwen3-0.6B", "b200", **each)
        for each in ({"cudagraph_mode": "PIECEWISE"}, {}, {"cudagraph_mode": "FULL"}, {"enforce_eager": True})
    )
    assert pieces.decode_tokens[1] == pytest.approx(floor)
    assert usual.decode_tokens[1] == whole.decode_tokens[1] < floor < eager.decode_tokens[1]
    assert pieces.mixed_tokens[64] == usual.mixed_tokens[64] == pytest.approx(floor)
    assert whole.mixed_tokens[64] < floor


def test_captured_prompts_wait_for_no_module() -> None:
    """Up to the largest captured batch a prompt waits for launches of attention alone, beyond it for every module."""
    line = '--torch_compile_config \'{"enable_piecewise_cuda_graph": true, "capture_num_tokens": [128, 512]}\''
    said = reading(f"trtllm-serve Qwen/Qwen3-0.6B {line}")
    assert said.settings["prompt_graph_tokens"] == 512
    engine: dict[str, Any] = {"preset": "trtllm-1.0"}
    plain, captured = (table("Qwen/Qwen3-0.6B", "b200", **engine, prompt_graph_tokens=most) for most in (None, 512))
    assert captured.mixed_tokens[256] == pytest.approx(28 * DISPATCH_ATTENTION)
    assert plain.mixed_tokens[256] == pytest.approx(eager_floor(pool("Qwen/Qwen3-0.6B", "b200", **engine)))
    assert captured.mixed_tokens[600] == plain.mixed_tokens[600]
    assert captured.decode_tokens[4] == plain.decode_tokens[4]


def test_a_head_and_dense_layers_that_ranks_divide_take_an_eighth_of_the_memory_and_less_time_for_few_requests() -> (
    None
):
    """DeepSeek-R1: a head of 129,280 x 7168 in 16 bits, 3 dense layers of three matrices of 7168 x 18432 in 8 (with
    scales for blocks of 128 x 128). Slices are read, and the states and logits of all gathered."""
    engine: dict[str, Any] = {"preset": "sglang-0.5", "data_parallel_size": 8, "enable_expert_parallel": True}
    name, divided = "deepseek-ai/DeepSeek-R1", {"shared_head": True, "shared_dense": True}
    own, shared = (pool(name, "b200", **engine, **more) for more in ({}, divided))
    saved = kv_blocks(own).weight_bytes - kv_blocks(shared).weight_bytes
    dense = 3 * 3 * 7168 * 18432 * (1 + 4 / 128**2)
    assert saved == pytest.approx(7 / 8 * (129280 * 7168 * 2 + dense), rel=0.01)
    kernels = {op.name: op.kernel for op in operators(shared)}
    alone = {op.name: op.kernel for op in operators(own)}
    b200, one, zero = device("b200"), np.ones(1), np.zeros(1)
    few, many = one, 2048 * one
    for rows, ratio in ((few, 1 / 8), (many, 1.0)):  # weights for few requests, products for many
        whole = alone["lm_head"].bound(b200, rows, zero)
        np.testing.assert_allclose(kernels["lm_head"].bound(b200, rows, zero) / whole, ratio, rtol=0.1)
    logits = kernels["logits_all_gather"].bound(b200, many, zero)
    np.testing.assert_allclose(logits, 7 / 8 * 2048 * 8 * 129280 * 2 / b200.link_bandwidth)
    np.testing.assert_allclose(kernels["gate_up_proj"].flops(one, zero), alone["gate_up_proj"].flops(one, zero) / 8)
    with pytest.raises(InputError, match="shared_head: needs data-parallel ranks"):
        pool("Qwen/Qwen3-8B", shared_head=True)


def test_the_head_of_drafts_is_divided_for_few_requests() -> None:
    """On GB200, 4 GPUs to a node: 256 // 85 = 3 is nearer to 4 than to 1, and 256 // 86 = 2 is not. A quarter of the
    weights is read for each of 3 drafts, and the head of the verification stays whole."""
    line = "--tp_size 16 --ep_size 16 --enable_attention_dp --enable_lm_head_tp_in_adp true"
    drafts = '--speculative_config \'{"decoding_type": "MTP", "num_nextn_predict_layers": 3}\''
    assert reading(f"trtllm-serve nvidia/DeepSeek-R1-NVFP4 {line} {drafts}").settings["shared_head"]
    assert "shared_head" not in reading(f"trtllm-serve nvidia/DeepSeek-R1-NVFP4 {line}").settings
    engine: dict[str, Any] = {"preset": "trtllm-1.1", "data_parallel_size": 16, "enable_expert_parallel": True}
    more = {"num_speculative_tokens": 3, "acceptance_length": 2.0, "shared_head": True}
    (head,) = [op for op in operators(pool("nvidia/DeepSeek-R1-NVFP4", "gb200", **engine, **more)) if op.drafting]
    assert head.drafting is not None
    gb200, rows = device("gb200"), np.array([1.0, 85.0, 86.0])
    whole = head.kernel.bound(gb200, rows, 0 * rows)
    np.testing.assert_allclose(head.drafting.bytes_moved(rows, 0 * rows)[0], 129280 * 7168 * 2 / 4, rtol=0.01)
    shares = head.drafting.bound(gb200, rows, 0 * rows) / whole
    assert shares[0] == pytest.approx(0.25, abs=0.01)
    assert shares[0] < shares[1] < 0.5 and shares[2] == 1.0


def test_experts_that_exchange_take_as_long_as_the_longer_of_both() -> None:
    """Tokens of 8 ranks, 8 choices of 256 experts: a copy to 5.25 GPUs in the mean, 7 of 8 of them another one, 7168
    numbers there in 8 bits with a scale for 128, and back in 16. One rank's decodes wait for the weights."""
    line = "--tp 8 --dp 8 --ep 8 --enable-dp-attention --enable-dp-lm-head --moe-a2a-backend megamoe"
    said = reading(f"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 {line}")
    assert said.settings["all2all_backend"] == "megamoe"
    settings: dict[str, Any] = {"preset": "sglang-0.5", "data_parallel_size": 8, "enable_expert_parallel": True}
    found = operators(pool("deepseek-ai/DeepSeek-R1", "b200", **settings, all2all_backend="megamoe"))
    (kernel,) = [each.kernel for each in found if isinstance(each.kernel, ExchangingExperts)]
    assert not [each.name for each in found if each.name.startswith("expert_") and each.group == "communication"]
    b200, tokens, zero = device("b200"), np.array([8.0, 65536.0]), np.zeros(2)
    sent = 8 * (1 - (7 / 8) ** 8) * 7 / 8 * 7168 * (1 + 4 / 128 + 2) * tokens / 8
    np.testing.assert_allclose(kernel.on_the_link(b200, tokens), sent / b200.link_bandwidth)
    alone = kernel.experts.bound(b200, tokens, zero)
    together = kernel.bound(b200, tokens, zero)
    np.testing.assert_array_equal(together, np.maximum(alone, sent / b200.link_bandwidth))
    slow = replace(b200, link_bandwidth=b200.link_bandwidth / 10)
    assert kernel.bound(slow, tokens, zero)[1] == pytest.approx(10 * sent[1] / b200.link_bandwidth)
    assert kernel.bound(slow, tokens, zero)[0] == alone[0]
    for refused, why in (("b200", "over 16 GPUs"), ("h100_pcie", "needs one of NVLink")):
        with pytest.raises(InputError, match=why):
            pool("deepseek-ai/DeepSeek-R1", refused, **settings | {"data_parallel_size": 16}, all2all_backend="megamoe")


@pytest.mark.skipif(not (POINTS.is_file() and find_systems()), reason="the measured points are not here")
def test_sixteen_gpus_in_two_nodes_decode_as_measured() -> None:
    """DeepSeek-R1 in 8 bits on 2 x 8 H100, TensorRT-LLM with 1 and 8 seats: 14.0 and 21.1 ms a token in srt-slurm's
    recipe, where GPUs of one node would take a quarter less. Sums over nodes are a third of the step."""
    points = {point.id: point for point in read_pool_points(POINTS)}
    for name, requests in (("1024x1024_c6", 1), ("8192x1024_c30", 8)):
        point = points[f"dsr1_h100_trtllm_fp8_disagg_{name}_cfg494"]
        decode = next(each for each in point.deployment().pools if each.role == "decode")
        (found,) = batch_times(Deployment((replace(decode, role="mixed"),)))
        context = requests * (point.isl + point.osl // 2)
        assert found.times.rank(requests, context, []) == pytest.approx(point.tpot, rel=0.2)
        sums = found.groups["communication"].rank(requests, context, [])
        assert 0.2 * point.tpot < sums < 0.4 * point.tpot


def test_outputs_in_4_bits_are_less_than_a_third_of_the_traffic() -> None:
    engine: dict[str, Any] = {
        "preset": "trtllm-1.1",
        "data_parallel_size": 8,
        "enable_expert_parallel": True,
        "all2all_backend": "flashinfer_nvlink_one_sided",
    }

    def back(**more: Any) -> float:
        found = operators(pool("nvidia/DeepSeek-R1-NVFP4", "gb200", **engine, **more))
        (combine,) = [operator.kernel for operator in found if operator.name == "expert_combine"]
        return float(combine.row_bytes)  # type: ignore[attr-defined]

    assert back(low_precision_combine=True) / back() == pytest.approx((0.5 + 1 / 16) / 2)


def test_another_rope_reaches_further_and_costs_no_memory_a_token() -> None:
    """YaRN's factor is that of the positions (transformers, ``modeling_rope_utils.py``)."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    plain = load_model("Qwen/Qwen3-8B", {"max_position_embeddings": 32768})
    longer = load_model("Qwen/Qwen3-8B", {"max_position_embeddings": 32768, "rope_scaling": rope})
    assert longer.max_position_embeddings == 4 * plain.max_position_embeddings
    assert longer.kv_bytes_per_token("auto", 1) == plain.kv_bytes_per_token("auto", 1)


def test_events_of_several_tokens_are_as_many_gaps_in_one() -> None:
    """41 tokens: the first alone, then 4 events of 10."""
    requests = loop(8, 1)
    every, tenth = (Deployment((pool("Qwen/Qwen3-8B", stream_interval=interval),)) for interval in (1, 10))
    tables = batch_times(every, "modelled")
    one, ten = (summary(simulate(each, requests, tables=tables)) for each in (every, tenth))
    assert ten.latencies["itl"].count * 10 == one.latencies["itl"].count
    assert ten.latencies["itl"].mean == pytest.approx(10 * one.latencies["itl"].mean)
    for name in ("ttft", "tpot", "e2el"):
        assert ten.latencies[name].mean == one.latencies[name].mean


def test_a_client_that_gets_fewer_events_waits_less() -> None:
    requests, client = loop(64, 16), Overheads(client=CLIENTS["inferencex"])
    every, tenth = (Deployment((pool("Qwen/Qwen3-8B", stream_interval=interval),)) for interval in (1, 10))
    tables = batch_times(every, "modelled")
    one, ten = (simulate(each, requests, tables=tables, overheads=client).requests for each in (every, tenth))
    assert np.nanmean(ten.first_token - ten.arrival) < np.nanmean(one.first_token - one.arrival)


def test_several_front_ends_shorten_the_queue_before_the_engine_and_nothing_else() -> None:
    path = CLIENTS["inferencex"]
    burst = Workload.from_columns(arrival=[0.0] * 10, prompt_tokens=[100_000] * 10, output_tokens=2)
    one, four = path.delays(burst), path.delays(burst, 4)
    assert one[0] == four[0]
    assert one[-1] - path.request == pytest.approx(10 * 0.5)
    assert four[-1] - path.request == pytest.approx(10 * 0.5 / 4)  # as one that is four times as fast
    spread = replace(burst, arrival=np.arange(10.0) * 100)
    assert path.delays(spread, 4).tolist() == pytest.approx(path.delays(spread).tolist())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stream_interval", 0),
        ("api_server_count", 0),
        ("scheduler_recv_interval", 0),
        ("cudagraph_mode", "ALL"),
        ("states_per_request", 0),
        ("states_per_request", 0),
    ],
)
def test_values_that_are_none(setting: str, value: Any) -> None:
    with pytest.raises(InputError, match=setting):
        Engine(**{setting: value})
