import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.deployment import (
    Deployment,
    Engine,
    Handover,
    Link,
    Pool,
    capture_sizes,
    preset,
    resolve_engine,
    warnings,
)
from windtunnel.errors import InputError
from windtunnel.hardware import Device, device
from windtunnel.model import Model, Quantization, load_model

DENSE = load_model("Qwen3-32B")
MOE = load_model("Qwen3-30B-A3B")
H100 = device("h100")


def resolved(model: Model = DENSE, on: Device = H100, **settings: Any) -> Engine:
    return resolve_engine(Engine(**settings), model, on)


@pytest.mark.parametrize(
    ("name", "tokens", "seqs"),
    [
        ("l4", 2048, 256),
        ("a100", 2048, 256),
        ("l40s", 2048, 256),
        ("h100", 8192, 1024),
        ("h200", 8192, 1024),
        ("rtx_pro_6000", 8192, 1024),
        ("b200", 16384, 1024),
        ("mi300x", 16384, 1024),
    ],
)
def test_default_batch_limits_follow_the_devices_memory(name: str, tokens: int, seqs: int) -> None:
    engine = resolved(on=device(name))
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (tokens, seqs)


def test_default_batch_limits_follow_each_other() -> None:
    assert resolved(max_num_seqs=2, max_model_len=100).max_num_batched_tokens == 200
    assert resolved(max_num_batched_tokens=512).max_num_seqs == 512
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 40960
    assert resolved(max_num_seqs=10_000).max_num_batched_tokens == 10_000


def test_other_defaults() -> None:
    engine = resolved()
    assert engine.max_model_len == 40960
    assert (engine.block_size, engine.gpu_memory_utilization, engine.dtype) == (16, 0.92, "bfloat16")
    assert engine.async_scheduling
    assert engine.scheduler_reserve_full_isl
    assert engine.enable_chunked_prefill
    assert engine.enable_prefix_caching
    assert not resolved(enable_prefix_caching=False).enable_prefix_caching
    assert resolved(load_model("DeepSeek-V2"), tensor_parallel_size=8).block_size == 64
    assert resolved(load_model("opt-13b")).dtype == "float16"


def test_presets_differ_as_the_versions_do() -> None:
    old = resolved(preset="vllm-0.12")
    assert not old.async_scheduling
    assert not old.scheduler_reserve_full_isl
    assert old.gpu_memory_utilization == 0.9
    assert Engine(preset="vllm").preset == "vllm-0.32"
    assert (Engine().backend, preset("vllm").version) == ("vllm", "0.32")
    assert resolved(preset="vllm-0.12", async_scheduling=True).async_scheduling
    with pytest.raises(InputError, match=r"did you mean 'vllm-0\.33'"):
        Engine(preset="vllm-0.34")
    with pytest.raises(InputError, match=r"watermark=0.1: not simulated with the scheduler of vllm-0.20"):
        resolved(preset="vllm-0.20", watermark=0.1)


@given(
    st.sampled_from(["vllm-0.32", "vllm-0.12"]),
    st.sampled_from([1, 2, 4, 8]),
    st.none() | st.integers(1, 2048),
    st.none() | st.integers(1, 40960),
    st.none() | st.booleans(),
    st.booleans(),
)
def test_resolving_fills_everything_once(
    name: str, tp: int, seqs: int | None, length: int | None, chunked: bool | None, eager: bool
) -> None:
    engine = resolved(
        preset=name,
        tensor_parallel_size=tp,
        max_num_seqs=seqs,
        max_model_len=length,
        enable_chunked_prefill=chunked,
        enforce_eager=eager,
    )
    assert resolve_engine(engine, DENSE, H100) == engine
    assert engine.resolved("max_num_batched_tokens") >= engine.resolved("max_num_seqs")
    assert engine.enable_chunked_prefill or engine.resolved("max_num_batched_tokens") >= engine.resolved(
        "max_model_len"
    )
    sizes = capture_sizes(engine, H100)
    assert sizes == engine.cudagraph_capture_sizes == tuple(sorted(set(sizes)))
    assert all(1 <= size <= engine.resolved("max_num_batched_tokens") for size in sizes)
    assert bool(sizes) != eager


def test_capture_sizes() -> None:
    by_16 = [*range(256, 513, 16)]
    assert resolved().cudagraph_capture_sizes == (1, 2, 4, *range(8, 256, 8), *by_16)
    assert resolved(max_num_seqs=100).cudagraph_capture_sizes == tuple(sorted({1, 2, 4, *range(8, 201, 8), 100}))
    assert resolved(max_num_seqs=100, preset="vllm-0.12").cudagraph_capture_sizes == (1, 2, 4, *range(8, 201, 8))
    assert resolved(max_num_seqs=1).cudagraph_capture_sizes == (1, 2)
    blackwell = resolved(on=device("b200")).cudagraph_capture_sizes
    assert blackwell is not None
    assert max(blackwell) == 1024
    assert resolved(enforce_eager=True).cudagraph_capture_sizes == ()
    assert resolved(cudagraph_capture_sizes=(64, 8, 8, 99_999)).cudagraph_capture_sizes == (8, 64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: must be an integer ≥ 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens=1.5"),
        ({"block_size": True}, "block_size=True"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override=1"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization=1.1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"scheduling_policy": "fifo"}, "unknown scheduling_policy"),
        ({"cudagraph_capture_sizes": (0,)}, "cudagraph_capture_sizes"),
        ({"kv_cache_dtype": "fp7"}, "did you mean 'fp8'"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 128}, "must be ≥ max_num_seqs=512"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, "without chunked prefill"),
        ({"max_model_len": 50_000}, "positions for 40960 tokens"),
        ({"tensor_parallel_size": 3}, "must divide the 64 heads.*use one of 1, 2, 4, 8"),
        ({"tensor_parallel_size": 12}, "8 h100_sxm GPUs share a nvlink domain; use a multiple of that"),
        ({"enable_expert_parallel": True}, "has no experts"),
        ({"quantization": "awq"}, "only 'fp8' is made on loading"),
        ({"pipeline_parallel_size": 65}, "the model has 64 layers; use ≤ 64"),
        ({"pipeline_parallel_size": 2, "preset": "vllm-0.20"}, "use async_scheduling=False or preset='vllm-0.32'"),
        ({"pipeline_parallel_size": 2, "preset": "vllm-0.12", "async_scheduling": True}, "has no async_scheduling"),
        ({"pipeline_parallel_size": 2, "preset": "sglang-0.5", "async_scheduling": True}, "has no async_scheduling"),
        ({"pipeline_parallel_size": 2, "preset": "trtllm-1.0", "async_scheduling": True}, "has no async_scheduling"),
        ({"long_prefill_token_threshold": -1}, "must be an integer ≥ 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Qwen3-32B", {"tensor_parallel_size": 5}, "heads"),
        ("Qwen2.5-7B-Instruct", {"tensor_parallel_size": 7}, "KV heads"),
        ("phi-4", {"tensor_parallel_size": 4}, "KV heads"),
        ("Qwen3-30B-A3B", {"data_parallel_size": 7}, "moe_intermediate_size=768"),
        ("Qwen3-30B-A3B", {"data_parallel_size": 256, "enable_expert_parallel": True}, "128 experts"),
    ],
)
def test_models_that_cannot_be_divided_so(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved(load_model(name), **settings)


def test_block_scaled_weights_are_divided_by_whole_blocks() -> None:
    blocks = MOE.with_quantization(Quantization("fp8_block"))
    assert resolved(blocks, tensor_parallel_size=2)
    with pytest.raises(InputError, match=r"slices of 192.*expert parallelism"):
        resolved(blocks, tensor_parallel_size=4)
    assert resolved(blocks, tensor_parallel_size=4, enable_expert_parallel=True)


def test_quantization_is_made_on_loading_or_must_be_the_checkpoints() -> None:
    pool = Pool(DENSE, H100, Engine(quantization="fp8"))
    assert pool.model.weight_dtype("mlp") == "fp8"
    assert pool.model.quantization is not None
    assert not pool.model.quantization.weight_only
    assert Pool(pool.model, H100, pool.engine).model == pool.model
    stored = load_model("nvidia/Llama-3.1-8B-Instruct-FP8")
    assert Pool(stored, H100, Engine(quantization="fp8")).model.weight_dtype("mlp") == "fp8"
    with pytest.raises(InputError, match="is stored as fp8"):
        Pool(stored, H100, Engine(quantization="awq"))
    on_ampere = Pool(stored, device("a100")).model.quantization
    assert on_ampere is not None
    assert on_ampere.weight_only
    assert Pool(DENSE, H100, Engine(dtype="half")).model.dtype == "float16"


def test_pools() -> None:
    pool = Pool(MOE, H100, Engine(tensor_parallel_size=2, data_parallel_size=2), replicas=3)
    assert pool.gpus == 12
    assert pool.lockstep
    assert not Pool(DENSE, H100, Engine(data_parallel_size=2)).lockstep
    assert not Pool(MOE, H100).lockstep
    for settings, words in (({"replicas": 0}, "replicas=0"), ({"role": "prefil"}, "'prefill'")):
        with pytest.raises(InputError, match=words):
            Pool(DENSE, H100, **settings)


def test_deployments() -> None:
    pool = Pool(DENSE, H100, Engine(tensor_parallel_size=2), replicas=2)
    deployment = Deployment((pool,))
    assert (deployment.gpus, deployment.replicas) == (4, 2)
    assert deployment.price_per_hour == 4 * H100.price_per_hour
    spec = json.loads(json.dumps(deployment.spec()))
    assert spec["pools"][0]["engine"]["tensor_parallel_size"] == 2
    assert spec["pools"][0]["model"] == "Qwen/Qwen3-32B"
    assert pickle.loads(pickle.dumps(deployment)) == deployment
    assert len({deployment, Deployment((pool,))}) == 1
    assert Deployment((pool, replace(pool, replicas=1))).gpus == 6
    with pytest.raises(InputError, match="at least one pool"):
        Deployment(())
    for named in ("Qwen/Qwen3-8B", ["Qwen/Qwen3-8B"]):
        with pytest.raises(InputError, match="'Qwen/Qwen3-8B' is no Pool"):
            Deployment(named)  # type: ignore[arg-type]


def test_pools_of_one_role_need_those_of_the_other_and_equal_kv() -> None:
    prefill, decode = Pool(DENSE, H100, role="prefill"), Pool(DENSE, H100, role="decode", replicas=2)
    assert Deployment((prefill, decode)).gpus == 3
    for pools in ((prefill,), (decode,), (prefill, decode, Pool(DENSE, H100))):
        with pytest.raises(InputError, match=r"roles .*at least one prefill and one decode pool"):
            Deployment(pools)
    for engine, words in (
        (Engine(block_size=32), "block_size=16 and 32"),
        (Engine(kv_cache_dtype="fp8"), "kv_cache_dtype=.* and fp8"),
    ):
        with pytest.raises(InputError, match=words):
            Deployment((prefill, Pool(DENSE, H100, engine, role="decode")))
    with pytest.raises(InputError, match="model=Qwen/Qwen3-32B and "):
        Deployment((prefill, Pool(MOE, H100, role="decode")))
    apart = Deployment((prefill, decode), link=Link(bandwidth=50e9), handover=Handover("pull"), decode_router="random")
    spec = json.loads(json.dumps(apart.spec()))
    assert (spec["link"]["bandwidth"], spec["handover"]["transfer"], spec["decode_router"]) == (50e9, "pull", "random")
    with pytest.raises(InputError, match="a hand-over without a transfer"):
        replace(apart, handover=Handover())
    with pytest.raises(InputError, match="nothing is transferred between mixed pools"):
        Deployment((Pool(DENSE, H100),), handover=Handover("pull"))


def test_warnings_tell_what_the_real_engine_would_do() -> None:
    assert warnings(Deployment((Pool(DENSE, H100),))) == []
    mixed = Pool(load_model("gemma-2-9b"), H100)
    assert [text for text in warnings(Deployment((mixed,))) if "sliding windows" in text]


def test_older_pipelines_are_said_to_differ() -> None:
    def said(preset: str) -> bool:
        engine = Engine(preset=preset, pipeline_parallel_size=2, async_scheduling=False)
        return any(
            "may admit a preempted request" in text
            for text in Pool(load_model("Qwen3-32B"), device("h100"), engine).warnings()
        )

    assert said("vllm-0.12")
    assert not said("vllm-0.32")
