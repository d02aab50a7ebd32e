"""What --launch writes, --from reads as the same deployment: flags of all three engines, and a comment for the rest."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Link, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch.trtllm import IN_FEW_BITS
from windtunnel.model import Model, load_model
from windtunnel.report.manifests.formats import FORMATS, write_manifests
from windtunnel.report.manifests.servers import Node
from windtunnel.scenario.pasted import read_pasted, scenario_of

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "70"))
PRESETS = {"vllm": "vllm-0.32", "sglang": "sglang-0.5", "trtllm": "trtllm-1.0"}
HAND = {
    "vllm": ("vllm-0.32-nixl-pull", "vllm-0.32-nixl-push", "vllm-0.32-mooncake"),
    "sglang": ("sglang-0.5-bootstrap",),
    "trtllm": ("trtllm-1.0",),
}
MODELS = (
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "openai/gpt-oss-120b",
    "nvidia/DeepSeek-R1-NVFP4",
    "deepseek-ai/DeepSeek-V3.2",
)
REFUSED = (
    "no command starts this",
    "is written for vLLM here",
    "pulls by NIXL",
    "behind a proxy of vLLM's tests",
    "started by MPI",
    "start it by hand",
)
WRITES = "flashinfer_nvlink_one_sided"
COMMON: dict[str, Any] = {
    "tensor_parallel_size": st.sampled_from([1, 2, 4, 8]),
    "pipeline_parallel_size": st.sampled_from([1, 2]),
    "data_parallel_size": st.sampled_from([1, 2, 4]),
    "enable_expert_parallel": st.booleans(),
    "max_model_len": st.sampled_from([4096, 16384]),
    "max_num_seqs": st.sampled_from([8, 64, 200]),
    "max_num_batched_tokens": st.sampled_from([2048, 8192]),
    "gpu_memory_utilization": st.sampled_from([0.8, 0.85]),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
    "dtype": st.sampled_from(["auto", "bfloat16"]),
    "enable_chunked_prefill": st.booleans(),
    "num_gpu_blocks_override": st.sampled_from([2000, 30000]),
    "async_scheduling": st.booleans(),
    "enforce_eager": st.booleans(),
    "disable_custom_all_reduce": st.booleans(),
    "cudagraph_capture_sizes": st.sampled_from([(1, 2, 4), (8, 16, 128)]),
    "num_speculative_tokens": st.sampled_from([1, 3]),
    "speculative_model": st.just("someone/Some-Eagle3"),
}
OWN: dict[str, dict[str, Any]] = {
    "vllm": {
        "enable_prefix_caching": st.booleans(),
        "decode_context_parallel_size": st.sampled_from([2, 4]),
        "prefill_context_parallel_size": st.sampled_from([2, 4]),
        "block_size": st.sampled_from([32, 64]),
        "watermark": st.sampled_from([0.01, 0.05]),
        "scheduling_policy": st.just("priority"),
        "long_prefill_token_threshold": st.just(1024),
        "prefill_schedule_interval": st.sampled_from([1, 4]),
        "scheduler_reserve_full_isl": st.booleans(),
        "all2all_backend": st.sampled_from(["deepep_low_latency", "deepep_high_throughput", WRITES]),
        "enable_dbo": st.booleans(),
        "dbo_decode_token_threshold": st.just(64),
        "quantization": st.just("fp8"),
        "cudagraph_mode": st.sampled_from(["FULL_DECODE_ONLY", "PIECEWISE", "FULL"]),
        "states_per_request": st.sampled_from([1, 2]),
        "stream_interval": st.sampled_from([1, 20]),
        "api_server_count": st.sampled_from([1, 4]),
        "mamba_ssm_cache_dtype": st.just("float32"),
        "attention_backend": st.sampled_from(["flash_attn", "flashinfer_mla"]),
        "moe_backend": st.sampled_from(["triton", "flashinfer_cutlass"]),
        "linear_backend": st.sampled_from(["deep_gemm", "flashinfer_cutedsl"]),
        "cpu_offload_gb": st.sampled_from([0.5, 2.0]),
        "fuse_allreduce_rms": st.booleans(),
        "enable_symm_mem": st.just(True),
        "flashinfer_sampler": st.just(True),
        "indexer_kv_dtype": st.sampled_from(["fp8", "mxfp4"]),
        "num_redundant_experts": st.just(8),
        "enable_eplb": st.just(True),
        "max_loras": st.sampled_from([1, 4]),
        "max_lora_rank": st.just(64),
        "sequence_parallel_min_tokens": st.just(512),
    },
    "sglang": {
        "mamba_ssm_cache_dtype": st.just("bfloat16"),
        "attention_backend": st.sampled_from(["fa3", "trtllm_mla"]),
        "moe_backend": st.just("flashinfer_trtllm"),
        "linear_backend": st.sampled_from(["cutlass", "flashinfer_cutlass"]),
        "cpu_offload_gb": st.just(2.0),
        "fuse_allreduce_rms": st.booleans(),
        "enable_symm_mem": st.just(True),
        "indexer_kv_dtype": st.just("mxfp4"),
        "states_per_request": st.sampled_from([3, 5]),
        "shared_head": st.just(True),
        "decode_context_parallel_size": st.sampled_from([2, 4]),
        "prefill_context_parallel_size": st.sampled_from([2, 4]),
        "swa_full_tokens_ratio": st.just(0.25),
        "num_redundant_experts": st.just(8),
        "enable_eplb": st.just(True),
        "stream_interval": st.sampled_from([1, 20]),
        "scheduler_recv_interval": st.sampled_from([1, 10]),
        "api_server_count": st.sampled_from([1, 4]),
        "enable_prefix_caching": st.booleans(),
        "all2all_backend": st.sampled_from(
            ["deepep_low_latency", "deepep_high_throughput", "deepep_auto", "megamoe", WRITES]
        ),
        "enable_dbo": st.booleans(),
        "quantization": st.just("fp8"),
        "scheduler": st.sampled_from(
            [
                "sglang-0.4.6:max_prefill_tokens=8192",
                "sglang-0.4.6:radix_cache=false",
                "sglang-0.5.23:schedule_policy=lpm,prefill_max_requests=4",
                "sglang-0.5.23:radix_eviction_policy=lfu,enable_priority_scheduling=true",  # as the line is written
            ]
        ),
    },
    "trtllm": {
        "low_precision_combine": st.just(True),
        "attention_backend": st.just("flashinfer"),
        "moe_backend": st.sampled_from(["cutlass", "deep_gemm"]),
        "prompt_graph_tokens": st.just(2048),
        "num_redundant_experts": st.just(8),
        "enable_eplb": st.just(True),
        "shared_head": st.just(True),
        "stream_interval": st.sampled_from([1, 20]),
        "api_server_count": st.sampled_from([1, 4]),
        "scheduler": st.sampled_from(
            [
                "trtllm-max-utilization",
                "trtllm-guaranteed-no-evict:balance_timeout=60",
                "trtllm-1.0:enable_block_reuse=true,enable_partial_reuse=false",
                "trtllm-1.0:enable_block_reuse=true,copy_on_partial_reuse=false",
                "trtllm-1.0:enable_block_reuse=true,capacity_scheduler_policy=MAX_UTILIZATION,enable_balance=true",
                "trtllm-1.0:batch_wait_timeout_iters=8,chunked_prefill=true,chunking_policy=EQUAL_PROGRESS",
            ]
        ),
    },
}


@st.composite
def deployments(draw: st.DrawFn, backend: str) -> Deployment:
    """Some that the engine can be started as."""
    model = load_model(draw(st.sampled_from(MODELS)))
    gpu = device(draw(st.sampled_from(["h100", "h200", "b200"])))
    router = draw(st.sampled_from(["round_robin", "least_outstanding", "vllm_dp"]))

    def pool(role: str) -> Pool:
        flags: dict[str, Any] = draw(
            st.fixed_dictionaries({"preset": st.just(PRESETS[backend])}, optional={**COMMON, **OWN[backend]})
        )
        for name in without(model, flags):
            flags.pop(name, None)
        if "num_speculative_tokens" not in flags:
            flags.pop("speculative_model", None)
        else:
            flags["acceptance_length"] = draw(st.sampled_from([1.5, 2.0]))
        return Pool(model, gpu, Engine(**flags), draw(st.integers(1, 3)), role, role if role != "mixed" else "pool")

    try:
        if not draw(st.booleans()):
            return Deployment((pool("mixed"),), router)
        rules = HANDOVERS[draw(st.sampled_from(HAND[backend]))]
        pools = (pool("prefill"), pool("decode"))
        return Deployment(
            pools, router, Link(bandwidth=1e11, latency=1e-4), rules, draw(st.sampled_from([None, "random"]))
        )
    except InputError:
        assume(False)
        raise


def without(model: Model, flags: dict[str, Any]) -> set[str]:
    """Settings that make no difference to this model, whose flags a line would be right to leave out."""
    found: set[str] = set()
    cached = flags.get("enable_prefix_caching") is not False and "radix_cache=false" not in flags.get("scheduler", "")
    if not model.state_bytes():
        found |= {"mamba_ssm_cache_dtype", "states_per_request"}
    elif not cached or flags.get("async_scheduling") is False:  # then there is one state less
        found |= {"states_per_request"}
    if len({bool(layer.window) for _, layer in model.layers}) == 1:
        found |= {"swa_full_tokens_ratio"}
    if model.has_moe:
        found |= {"max_loras"}
    if model.has_moe or "max_loras" not in flags:
        found |= {"max_lora_rank"}
    if not any(layer.attention and layer.attention.index_dtypes for _, layer in model.layers):
        found |= {"indexer_kv_dtype"}
    heads = {getattr(layer.attention, "num_kv_heads", 1) for _, layer in model.layers if layer.attention}
    if flags.get("tensor_parallel_size", 1) // max(heads) < flags.get("decode_context_parallel_size", 1):
        found |= {"decode_context_parallel_size"}  # mostly refused
    alone = not model.has_moe or flags.get("data_parallel_size", 1) == 1
    if alone or (flags["preset"] == PRESETS["trtllm"] and "num_speculative_tokens" not in flags):
        found |= {"shared_head"}
    if flags.get("num_redundant_experts") or not flags.get("enable_expert_parallel"):
        found |= {"enable_eplb"}  # said by copies, or refused
    if not model.has_moe:
        found |= {"num_redundant_experts", "low_precision_combine", "moe_backend"}
    elif not (flags.get("enable_expert_parallel") and flags.get("data_parallel_size", 1) > 1):
        found |= {"low_precision_combine"}
    return found | ({"low_precision_combine"} if model.weight_dtype("experts") not in IN_FEW_BITS else set())


def back(deployment: Deployment, kind: str = "scripts") -> Deployment:
    """Through the files of ``--launch`` and ``--from``."""
    size = 8 if kind in ("leaderworkerset", "dynamo") else 64
    nodes = [Node(pool.device.name, pool.device.vendor, size) for pool in deployment.pools]
    with TemporaryDirectory() as folder:
        try:
            write_manifests(Path(folder), deployment.spec(), nodes, kind)
        except InputError as error:
            assume(not any(words in str(error) for words in REFUSED))
            raise
        return scenario_of(read_pasted([folder])).deployment()


@pytest.mark.parametrize("backend", PRESETS)
def test_a_deployment_comes_back(backend: str) -> None:
    @settings(
        max_examples=CASES,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(deployments(backend), st.sampled_from(sorted(FORMATS)))
    def check(deployment: Deployment, kind: str) -> None:
        assert plain(back(deployment, kind)) == plain(deployment)

    check()


@pytest.mark.parametrize("backend", PRESETS)
def test_own_cut_points_come_back(backend: str) -> None:
    engine = Engine(preset=PRESETS[backend], pipeline_parallel_size=3, pipeline_layers=(13, 12, 11))
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine),))
    kinds = sorted(FORMATS) if backend == "vllm" else ("docker", "systemd", "kubernetes")
    for kind in kinds:
        assert back(deployment, kind).pools[0].engine.pipeline_layers == (13, 12, 11)


@pytest.mark.parametrize("backend", ["sglang", "trtllm"])
def test_experts_of_stages_of_one_gpu_stay_whole(backend: str) -> None:
    engine = Engine(preset=PRESETS[backend], pipeline_parallel_size=2, enable_expert_parallel=True)
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-30B-A3B"), device("b200"), engine),))
    assert back(deployment).pools[0].engine.enable_expert_parallel


def plain(deployment: Deployment) -> dict[str, Any]:
    """Its specification, without None for a rule that is spelled out."""
    return deployment.spec()
