"""Readings: what flags of each engine set, and what is said of those that set nothing."""

import json
from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.model import load_model


def read(text: str) -> Reading:
    (line,) = read_source(text)
    return read_line(line)


def flags(reading: Reading, state: str) -> set[str]:
    return {word.flag for word in getattr(reading, state)}


VLLM: list[tuple[str, dict[str, Any]]] = [
    ("-tp 4 --max-model-len 32k", {"tensor_parallel_size": 4, "max_model_len": 32_000}),
    ("--max-model-len=128K --enforce-eager", {"max_model_len": 131_072, "enforce_eager": True}),
    ("--max-model-len auto", {}),
    ("--no-enable-prefix-caching --no-async-scheduling", {"enable_prefix_caching": False, "async_scheduling": False}),
    ("--max-cudagraph-capture-size 16", {"cudagraph_capture_sizes": (1, 2, 4, 8, 16)}),
    ("-cc.cudagraph_mode=NONE", {"enforce_eager": True}),
    ("-O0", {"enforce_eager": True}),
    ("-cc.pass_config.enable_sp=true -cc.pass_config.sp_min_token_num=512", {"sequence_parallel_min_tokens": 512}),
    ("""--compilation-config '{"cudagraph_capture_sizes": [4, 2]}'""", {"cudagraph_capture_sizes": (2, 4)}),
    ("--kv-cache-dtype fp8_e4m3 --block-size 64", {"kv_cache_dtype": "fp8_e4m3", "block_size": 64}),
    ("--kv-cache-memory-bytes 2359296000", {"num_gpu_blocks_override": 1000}),
]
"""36 layers of 8 heads of 128, keys and values of 2 bytes: 147,456 bytes a token, 2,359,296 a block of 16."""


@pytest.mark.parametrize(("words", "settings"), VLLM)
def test_vllm(words: str, settings: dict[str, Any]) -> None:
    reading = read(f"vllm serve Qwen/Qwen3-8B {words}")
    assert reading.settings == {"preset": "vllm-0.32", **settings}
    assert reading.not_simulated == ()


def test_sglang_counts_all_ranks_together() -> None:
    reading = read(
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 16 --dp 8 --enable-dp-attention "
        "--enable-dp-lm-head --moe-dense-tp-size 1 --max-running-requests 1024 --chunked-prefill-size 65536 "
        "--moe-a2a-backend deepep --deepep-mode low_latency --page-size 64 --max-total-tokens 64000 "
        "--max-prefill-tokens 8192 --disable-radix-cache"
    )
    assert reading.settings == {
        "preset": "sglang-0.5",
        "tensor_parallel_size": 2,
        "data_parallel_size": 8,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "block_size": 64,
        "num_gpu_blocks_override": 1000,
        "scheduler": "sglang-0.5.23:max_prefill_tokens=8192,radix_cache=false",
    }
    assert reading.not_simulated == ()


def test_rules_of_sglang_are_those_of_the_version_that_a_comment_names() -> None:
    flags = "--model-path Qwen/Qwen3-8B --max-prefill-tokens 8192 --prefill-max-requests 4 --radix-eviction-policy lfu"
    newest = read(f"python -m sglang.launch_server {flags}")
    assert newest.settings["scheduler"] == (
        "sglang-0.5.23:max_prefill_tokens=8192,prefill_max_requests=4,radix_eviction_policy=lfu"
    )
    old = read("# windtunnel: engine=sglang-0.4.6\nsglang serve --model-path Qwen/Qwen3-8B --max-prefill-tokens 8192")
    assert old.settings["scheduler"] == "sglang-0.4.6:max_prefill_tokens=8192"


def test_prompts_of_sglang_that_are_not_cut_share_a_step_up_to_its_limit() -> None:
    line = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --chunked-prefill-size -1 --context-length {}"
    assert read(line.format(4096)).settings["max_num_batched_tokens"] == 16384
    assert read(line.format(32768)).settings["max_num_batched_tokens"] == 32768


def test_ranks_of_sglang_without_attention_parallelism_are_replicas() -> None:
    experts = read("python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 2 --dp 4")
    assert (experts.replicas, experts.settings["tensor_parallel_size"]) == (4, 2)
    assert "data_parallel_size" not in experts.settings
    dense = read("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --dp 4")
    assert (dense.replicas, dense.settings["data_parallel_size"]) == (1, 4)


def test_ranks_of_attention_divide_the_head_and_dense_layers_unless_told() -> None:
    line = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 8 --dp 8 --enable-dp-attention"
    divided = read(line)
    assert divided.settings["shared_head"] and divided.settings["shared_dense"]
    own = read(f"{line} --enable-dp-lm-head --moe-dense-tp-size 1")
    assert not {"shared_head", "shared_dense"} & set(own.settings)
    assert not divided.not_simulated + own.not_simulated
    no_dense = read(f"{line.replace('deepseek-ai/DeepSeek-R1', 'Qwen/Qwen3-30B-A3B')} --enable-dp-lm-head")
    assert "shared_dense" not in no_dense.settings


def test_a_length_that_is_left_open_is_the_models() -> None:
    reading = read("vllm serve Qwen/Qwen3-8B --max-model-len <tokens> --max-num-seqs '${SEATS:-32}'")
    assert "max_model_len" not in reading.settings
    assert "leaves it open" in reading.notes["max_model_len"]
    assert reading.settings["max_num_seqs"] == 32
    with pytest.raises(InputError, match="does not say what this stands for"):
        read("vllm serve Qwen/Qwen3-8B --tensor-parallel-size <gpus>")


def test_what_is_kept_nowhere_has_no_effect() -> None:
    line = "sglang serve --model-path Qwen/Qwen3-8B --enable-hierarchical-cache --hicache-ratio 2"
    reading = read(f"{line} --disable-radix-cache")
    assert reading.stores == ()
    assert flags(reading, "ignored") >= {"--enable-hierarchical-cache", "--hicache-ratio"}


@pytest.mark.parametrize(
    ("flags", "store"),
    [
        ("", "ratio=2"),
        ("--hicache-ratio 4", "ratio=4"),
        ("--tp 4 --hicache-ratio 4 --hicache-size 62", "capacity=248000000000"),
        ("--hicache-write-policy write_through_selective", "ratio=2 write_after=1"),
        ("--hicache-write-policy write_back", "ratio=2 on_eviction=true"),
    ],
)
def test_host_memory_of_sglang(flags: str, store: str) -> None:
    """GB of each GPU, else as many times what that keeps, twice by default (server_args.py of 0.5)."""
    line = f"sglang serve --model-path Qwen/Qwen3-8B --enable-hierarchical-cache {flags}"
    assert read(line).stores == (f"tier=host {store}",)


@pytest.mark.parametrize(("method", "simulated"), [("total_requests", True), ("total_tokens", False)])
def test_which_rank_of_sglang_gets_a_request(method: str, simulated: bool) -> None:
    line = (
        "sglang serve --model-path deepseek-ai/DeepSeek-R1 --tp 8 --dp 8 --enable-dp-attention --enable-dp-lm-head "
        f"--moe-dense-tp-size 1 --load-balance-method {method}"
    )
    assert (flags(read(line), "not_simulated") == set()) is simulated


def test_experts_in_groups_of_slices_are_a_choice_of_kernels() -> None:
    (word,) = read("sglang serve --model-path Qwen/Qwen3-30B-A3B --tp 8 --ep 2").not_simulated
    assert word.kernel
    assert "2 groups of slices" in word.note


def test_trtllm() -> None:
    reading = read(
        "cat > o.yaml <<E\nenable_attention_dp: true\ndisable_overlap_scheduler: true\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.8, enable_block_reuse: false, dtype: fp8}\n"
        "cuda_graph_config: {max_batch_size: 4, enable_padding: true}\nstream_interval: 1\n"
        "attention_dp_config: {enable_balance: true, timeout_iters: 60}\nE\n"
        "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 8 --max_num_tokens 8192 --config o.yaml"
    )
    assert reading.settings == {
        "preset": "trtllm-1.0",
        "tensor_parallel_size": 1,
        "data_parallel_size": 8,
        "enable_expert_parallel": True,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.8,
        "kv_cache_dtype": "fp8",
        "async_scheduling": False,
        "cudagraph_capture_sizes": (1, 2, 4),
        "stream_interval": 1,
        "scheduler": "trtllm-guaranteed-no-evict:balance_timeout=60",
    }
    assert reading.not_simulated == ()


def test_prefixes_of_trtllm_are_kept_unless_the_line_says_no() -> None:
    plain, off, decode = (
        read(f"trtllm-serve Qwen/Qwen3-8B {more}")
        for more in ("", "--kv_cache_config.enable_block_reuse false", "--server_role generation")
    )
    assert plain.settings["scheduler"] == "trtllm-1.0:enable_block_reuse=true"
    assert not plain.notes
    assert "scheduler" not in off.settings and not off.notes
    assert "scheduler" not in decode.settings


def test_weights_in_four_bits_are_not_those_of_a_name_in_eight() -> None:
    line = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 4"
    four = read(f"{line} --quantization modelopt_fp4")
    assert (four.model, read(line).model) == ("nvidia/DeepSeek-R1-NVFP4", "deepseek-ai/DeepSeek-R1")
    assert four.notes["model"].startswith("nvidia/DeepSeek-R1-NVFP4, whose 4 bits")
    other = read("vllm serve Qwen/Qwen3.5-397B-A17B-FP8 --quantization fp8")
    assert other.model == "Qwen/Qwen3.5-397B-A17B-FP8" and not other.not_simulated
    unknown = read("vllm serve zai-org/GLM-4.5-FP8 --quantization modelopt_fp4")
    assert [word.flag for word in unknown.not_simulated] == ["--quantization"]


def test_bytes_of_the_cache_are_blocks_of_the_size_that_the_model_has() -> None:
    given = read("vllm serve deepseek-ai/DeepSeek-V4-Flash --kv-cache-dtype fp8 --kv-cache-memory-bytes 10000000000")
    pool = Pool(load_model(given.model), device("b300"), Engine(**given.settings))
    budget = kv_blocks(pool)
    assert budget.num_blocks * budget.block_bytes == pytest.approx(10e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "tokens", "length"),
    [
        (
            "vllm serve DeepSeek-V4-Pro --speculative-config.method mtp --speculative-config.num_speculative_tokens 2",
            2,
            2.27,
        ),
        (
            "vllm serve M --speculative-config "
            """'{"method":"eagle3","model":"D","num_speculative_tokens":3,"synthetic_acceptance_length":2.5}'""",
            *(3, 2.5),
        ),
        (
            "SGLANG_SIMULATE_ACC_LEN=2.2 sglang serve --model M --speculative-algorithm EAGLE --speculative-num-steps 3"
            " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            *(3, 2.2),
        ),
        (
            "sglang serve --model Qwen3.5-397B-A17B --speculative-algorithm NEXTN --speculative-num-steps 1",
            1,
            1.93,
        ),
        (
            "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1.5 trtllm-serve M --speculative_config.decoding_type MTP "
            "--speculative_config.num_nextn_predict_layers 3",
            *(3, 2.5),
        ),
    ],
)
def test_drafts_always_have_an_acceptance_length(text: str, tokens: int, length: float) -> None:
    """From the line, from the environment (TensorRT-LLM counts accepted drafts alone), or from what was measured."""
    reading = read(text)
    found = reading.settings["num_speculative_tokens"], reading.settings["acceptance_length"]
    assert found == (tokens, length)
    said = any(each in text for each in ("synthetic", "SIMULATE", "FORCE"))
    assert ("acceptance_length" in reading.notes) == (not said)


@pytest.mark.parametrize(
    ("line", "simulated"),
    [
        ("vllm serve Qwen/Qwen3-8B --speculative-config.model Qwen/Qwen3-0.6B", False),
        ("vllm serve Qwen/Qwen3-8B --speculative-config.model a/Qwen3-8B-eagle3-next", True),
        ("vllm serve google/gemma-4-31B-it --speculative-config.model google/gemma-4-31B-it-assistant", True),
        ("vllm serve Qwen/Qwen3-8B --speculative-config.model a/b --speculative-config.method draft_model", False),
        ("sglang serve --model-path m --speculative-algorithm STANDALONE --speculative-draft-model-path a/b", False),
        (
            "trtllm-serve m --speculative_config.decoding_type DraftTarget --speculative_config.speculative_model a",
            False,
        ),
    ],
)
def test_a_whole_model_that_drafts_is_no_layer(line: str, simulated: bool) -> None:
    words = [word.note for word in read_line(read_source(line)[0]).not_simulated]
    assert bool(words) is not simulated
    assert simulated or "a whole model drafts" in words[0]


def test_hand_overs_and_stores_of_vllm() -> None:
    prefill = read("""vllm serve M --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'""")
    assert (prefill.role, prefill.handover) == ("prefill", "vllm-0.32-nixl-pull")
    both = read(
        "vllm serve M -tp 2 --kv-transfer-config '"
        '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":['
        '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"},'
        '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
        """"kv_connector_extra_config":{"cpu_bytes_to_use_per_rank":1000000}}]}}'"""
    )
    assert (both.role, both.handover, both.stores) == (
        *("decode", "vllm-0.32-mooncake"),
        ("tier=host capacity=2000000",),
    )
    unknown = read("""vllm serve M --kv-transfer-config '{"kv_connector":"FlexKVConnector","kv_role":"kv_both"}'""")
    assert any("FlexKVConnector" in word.note for word in unknown.not_simulated)


def test_sizes_of_stores_in_host_memory() -> None:
    """LMCache's size is in GiB for each GPU, and its chunk has 256 tokens."""
    lmcache = "LMCACHE_MAX_LOCAL_CPU_SIZE=2 vllm serve M -tp 2 --kv-transfer-config "
    lmcache += """'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"%s}'"""
    for extra, chunk in (("", 256), (',"kv_connector_extra_config":{"lmcache.chunk_size":64}', 64)):
        assert read(lmcache % extra).stores == (f"tier=host capacity={4 * 2**30} chunk_tokens={chunk}",)
    offloading = """vllm serve M --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","""
    offloading += """"kv_connector_extra_config":{"cpu_bytes_to_use":9000,"block_size":48,"store_threshold":%d}}'"""
    for threshold, said in ((0, ""), (1, " write_after=1")):
        assert read(offloading % threshold).stores == (f"tier=host capacity=9000 chunk_tokens=48{said}",)


def test_what_nobody_has_filled_in_is_asked_for() -> None:
    with pytest.raises(InputError, match="the line does not say what this stands for"):
        read_line(read_source("trtllm-serve m --kv_cache_config.free_gpu_memory_fraction __GPU_MEM_FRACTION__")[0])
    with pytest.raises(InputError, match=r"--tensor-parallel-size=\$TP: the line does not say"):
        read("vllm serve M --tensor-parallel-size $TP")
    assert read("TP=2 vllm serve M --tensor-parallel-size 2").settings["tensor_parallel_size"] == 2
    assert read("TP=2\nvllm serve M --tensor-parallel-size $TP").settings["tensor_parallel_size"] == 2
    with pytest.raises(InputError, match="must be a whole number"):
        read("vllm serve M --max-num-seqs many")


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    (word,) = read("vllm serve M --max-num-batch-tokens 5").not_simulated
    assert word.note == "not known to windtunnel; did you mean max-num-batched-tokens?"


def test_kernels_are_told_from_the_rest() -> None:
    reading = read("vllm serve M --attention-backend ROCM_AITER_FA --offload-group-size 4 --port 1 --trust-remote-code")
    assert {word.flag: word.kernel for word in reading.not_simulated} == {
        "--attention-backend": True,
        "--offload-group-size": False,
    }
    assert flags(reading, "ignored") == {"--port", "--trust-remote-code"}
    (level,) = read("""vllm serve M --compilation-config '{"mode": 0}'""").not_simulated
    assert level.kernel and "kernels that are not fused" in level.note
    assert not read("""vllm serve M --compilation-config '{"mode": 3}'""").not_simulated


@pytest.mark.parametrize(
    "line",
    [
        "VLLM_PP_LAYER_PARTITION=20,16 vllm serve Qwen/Qwen3-8B -pp 2",
        "SGLANG_PP_LAYER_PARTITION=20,16 python -m sglang.launch_server --model-path Qwen/Qwen3-8B --pp-size 2",
    ],
)
def test_own_cut_points(line: str) -> None:
    reading = read(line)
    assert reading.settings["pipeline_layers"] == (20, 16)
    assert reading.not_simulated == ()
    with pytest.raises(InputError, match="PARTITION=20/16: must be whole numbers with commas"):
        read(line.replace("20,16", "20/16"))


def test_sums_in_parts_need_a_number_of_tokens() -> None:
    reading = read("vllm serve Qwen/Qwen3-8B -tp 2 -cc.pass_config.enable_sp=true")
    assert "sequence_parallel_min_tokens" not in reading.settings
    assert len(reading.not_simulated) == 1


MOONCAKE = 'vllm serve Qwen/Qwen3-8B -tp 4 --kv-transfer-config \'{"kv_connector": "MooncakeStoreConnector"}\''


@pytest.mark.parametrize(
    ("config", "stores"),
    [
        ({"protocol": "rdma", "mode": "embedded"}, ("tier=shared capacity=17179869184",)),
        ({"global_segment_size": "100GB"}, ("tier=shared capacity=429496729600",)),
        ({"mode": "standalone-store", "global_segment_size": 0}, ()),
    ],
)
def test_what_a_mooncake_store_holds_stands_in_its_file(config: dict[str, Any], stores: tuple[str, ...]) -> None:
    """Each GPU's process gives a segment, 4 GiB by default (vllm/distributed/mooncake_store.py)."""
    script = f"cat > mooncake.json <<EOF\n{json.dumps(config)}\nEOF\nexport MOONCAKE_CONFIG_PATH=mooncake.json\n"
    reading = read(script + MOONCAKE)
    assert reading.stores == stores
    assert ("--kv-transfer-config.kv_connector" in flags(reading, "not_simulated")) is not bool(stores)
    assert read(MOONCAKE).stores == ()
