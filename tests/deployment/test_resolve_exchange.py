"""How ranks exchange tokens, and when steps are split: what is refused, and what an engine does by itself."""

from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool, resolve_engine
from windtunnel.deployment.resolve import split_from
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.plan.space import Space, typed_values

MOE, DENSE, H100 = load_model("Qwen3-30B-A3B"), load_model("Qwen3-8B"), device("h100")
SHARED: dict[str, Any] = {"data_parallel_size": 8, "enable_expert_parallel": True}
LOW = SHARED | {"all2all_backend": "deepep_low_latency"}
HIGH = SHARED | {"all2all_backend": "deepep_high_throughput"}
ONE_SIDED = {"all2all_backend": "flashinfer_nvlink_one_sided"}
SGLANG = {"preset": "sglang-0.5"}


def test_nothing_is_split_by_default() -> None:
    engine = Engine()
    assert (engine.all2all_backend, engine.enable_dbo) == ("allgather_reducescatter", False)
    assert split_from(engine) == (float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("engine", "least"),
    [
        ({"enable_dbo": True}, (32, 512)),
        ({"enable_dbo": True, "dbo_decode_token_threshold": 64, "dbo_prefill_token_threshold": 4096}, (64, 4096)),
        ({"enable_dbo": True, "dbo_decode_token_threshold": 0, "dbo_prefill_token_threshold": 1}, (2, 2)),
        (SGLANG | {"enable_dbo": True}, (2, float("inf"))),
        (SGLANG | HIGH | {"enable_dbo": True}, (2, 2)),
        (SGLANG | {"enable_dbo": True, "all2all_backend": "deepep_auto"}, (2, 2)),
    ],
)
def test_what_is_split(engine: dict[str, Any], least: tuple[float, float]) -> None:
    resolved = resolve_engine(Engine(**LOW | engine), MOE, H100)
    assert split_from(resolved) == least
    assert resolve_engine(resolved, MOE, H100) == resolved


@pytest.mark.parametrize(
    ("name", "gpu", "preset", "backend"),
    [
        ("nvidia/DeepSeek-R1-NVFP4", "gb200", "trtllm-1.1", "flashinfer_nvlink_one_sided"),
        ("openai/gpt-oss-120b", "gb200", "trtllm-1.1", "flashinfer_nvlink_one_sided"),
        ("nvidia/DeepSeek-R1-NVFP4", "b200", "trtllm-1.1", "allgather_reducescatter"),
        ("deepseek-ai/DeepSeek-R1", "gb200", "trtllm-1.1", "allgather_reducescatter"),
        ("nvidia/DeepSeek-R1-NVFP4", "gb200", "vllm-0.32", "allgather_reducescatter"),
    ],
)
def test_ranks_of_tensorrt_llm_in_racks_write_into_each_others_memory(
    name: str, gpu: str, preset: str, backend: str
) -> None:
    resolved = resolve_engine(Engine(preset=preset, **SHARED), load_model(name), device(gpu))
    assert resolved.all2all_backend == backend
    assert resolve_engine(resolved, load_model(name), device(gpu)) == resolved


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (SHARED | {"all2all_backend": "deepep_low_latancy"}, "did you mean 'deepep_low_latency'"),
        (LOW | {"data_parallel_size": 1}, "set data_parallel_size ≥ 2 and enable_expert_parallel, or leave it out"),
        (LOW | {"enable_expert_parallel": False}, "needs data-parallel ranks of a mixture"),
        (LOW | {"all2all_backend": "deepep_auto"}, "vllm-0.32 has no such choice; use 'deepep_low_latency'"),
        (LOW | {"preset": "trtllm-1.0"}, "not simulated for trtllm-1.0; use preset='vllm-0.32'"),
        (SHARED | ONE_SIDED | {"preset": "vllm-0.10"}, "not simulated for vllm-0.10"),
        (LOW | {"preset": "vllm-0.10"}, "not simulated for vllm-0.10"),
        (HIGH | {"cudagraph_capture_sizes": (8, 16)}, r"cudagraph_capture_sizes=\[8, 16\]: .* is in no graph"),
        (SHARED | {"enable_dbo": True}, "use all2all_backend='deepep_low_latency' or 'deepep_high_throughput'"),
        ({"enable_dbo": True}, "only DeepEP's exchange runs alongside other kernels"),
        ({"enable_dbo": True, "preset": "trtllm-1.0"}, "not simulated for trtllm-1.0; .* leave it out"),
        (LOW | {"dbo_decode_token_threshold": 64}, "=64: nothing is split without enable_dbo; add it"),
        (LOW | {"dbo_prefill_token_threshold": 64}, "dbo_prefill_token_threshold=64"),
        (LOW | {"enable_dbo": True, "dbo_decode_token_threshold": -1}, "=-1: must be an integer ≥ 0"),
        (LOW | {"enable_dbo": True, "dbo_prefill_token_threshold": 1.5}, "=1.5: must be an integer ≥ 0"),
        (LOW | SGLANG | {"enable_dbo": True, "dbo_decode_token_threshold": 4}, "has no threshold; leave it out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(engine: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pool(MOE, H100, Engine(**engine))


def test_a_dense_model_has_no_experts_to_send_to() -> None:
    with pytest.raises(InputError, match="has no experts"):
        Pool(DENSE, H100, Engine(**LOW))


@pytest.mark.parametrize("preset", ["vllm-0.32", "sglang-0.5"])
def test_high_throughput_kernels_are_in_no_graph(preset: str) -> None:
    sizes = [Pool(MOE, H100, Engine(preset=preset, **engine)).engine.cudagraph_capture_sizes for engine in (LOW, HIGH)]
    assert sizes[0] and sizes[1] == ()


def test_readers_are_told_who_decides_on_the_split() -> None:
    said = [
        Pool(MOE, H100, Engine(**LOW, **more)).warnings()
        for more in ({}, {"enable_dbo": True}, SGLANG | {"enable_dbo": True})
    ]
    assert [any("the longest decides for all" in text for text in warnings) for warnings in said] == [
        False,
        True,
        False,
    ]


def test_a_plan_searches_over_it() -> None:
    axes = {
        "device": ("h100",),
        "data_parallel_size": (8,),
        "enable_expert_parallel": (True,),
        "all2all_backend": typed_values("all2all_backend", ["allgather_reducescatter", "deepep_low_latency"]),
        "enable_dbo": typed_values("enable_dbo", ["false", "true"]),
    }
    found = Space("Qwen3-30B-A3B", axes).enumerate()
    assert [candidate.name.split(", ")[-2:] for candidate in found.candidates] == [
        ["all2all_backend allgather_reducescatter", "enable_dbo off"],
        ["all2all_backend deepep_low_latency", "enable_dbo off"],
        ["all2all_backend deepep_low_latency", "enable_dbo on"],
    ]
    assert found.pruned.total() == 1
