"""Kernels that a line names: of experts, of attention and of matrix products, timed where they were measured."""

from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.model import load_model
from windtunnel.perf.database import Database, Measured, find_systems
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.simulate.simulate import batch_times

pytestmark = pytest.mark.skipif(find_systems() is None, reason="the kernel database is not here")


def reading(text: str) -> Reading:
    return read_line(read_source(text)[0])


def known(gpu: str, engine: str, version: str) -> Measured:
    systems = find_systems()
    assert systems is not None
    return Measured(Database(systems, gpu, engine, version, "exact"), device(gpu))


def test_a_named_kernel_of_experts_takes_what_was_measured_of_it() -> None:
    """TensorRT-LLM 1.3 on B200, 64 tokens of Qwen3-30B's experts in 4 bits: 0.162 ms by CUTLASS, 0.061 by the fastest
    (moe_perf.parquet)."""
    line = "trtllm-serve nvidia/Qwen3-30B-A3B-FP4 --moe_backend CUTLASS"
    assert reading(line).settings["moe_backend"] == "cutlass"
    (unknown,) = (word for word in reading(line.replace("CUTLASS", "CUTEDSL")).not_simulated if word.kernel)
    assert "the fastest one that is known stands for it" in unknown.note
    tables = known("b200_sxm", "trtllm", "1.3.0rc20")
    one, few = np.full(1, 64.0), np.zeros(1)
    fastest, named = (
        Experts(2048, 768, 8, 128, dtype="nvfp4", backend=backend).measured(tables, one, few)
        for backend in ("", "cutlass")
    )
    assert fastest is not None and named is not None
    assert (fastest.seconds[0], named.seconds[0]) == pytest.approx((0.061e-3, 0.162e-3), rel=0.05)


def test_the_attention_kernel_that_is_named_is_timed_where_it_was_measured() -> None:
    """Heads of Qwen3-32B on a B200 were measured with both of SGLang's kernels, Llama-3.1-8B's with trtllm_mha alone:
    64 requests with 2,048 keys each took 84 and 100 µs."""
    line = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --context-length 8192 --attention-backend "
    times: dict[tuple[str, str], Any] = {}
    for model, name in (("32B", "trtllm_mha"), ("32B", "flashinfer"), ("8B", "trtllm_mha"), ("8B", "flashinfer")):
        said = reading(f"{line}{name}".replace("32B", model))
        assert said.settings["attention_backend"] == name
        assert not said.not_simulated
        each = Pool(load_model(f"Qwen/Qwen3-{model}"), device("b200"), Engine(**said.settings))
        (times[model, name],) = batch_times(Deployment((each,)))
    spent = {key: found.groups["attention"].decode(64, 64 * 2049) for key, found in times.items()}
    assert spent["32B", "flashinfer"] / spent["32B", "trtllm_mha"] == pytest.approx(1.19, abs=0.02)
    assert spent["8B", "flashinfer"] == spent["8B", "trtllm_mha"]
    notes = {key: [note for note in found.notes if "flashinfer" in note] for key, found in times.items()}
    assert not notes["32B", "flashinfer"]
    assert (
        "decode attention heads=32/8×128: no kernel of flashinfer was measured: trtllm_mha stands for it"
        in notes["8B", "flashinfer"]
    )
    refused = reading("vllm serve Qwen/Qwen3-8B --attention-backend ROCM_AITER_FA").not_simulated
    assert [(word.flag, word.kernel) for word in refused] == [("--attention-backend", True)]
    for engine in (
        "vllm serve Qwen/Qwen3-8B --attention-config.backend FLASHINFER",
        "trtllm-serve m --attn_backend FLASHINFER",
    ):
        assert reading(engine).settings["attention_backend"] == "flashinfer"


def micros(tables: Measured, dtype: str, backend: str, rows: float = 1.0) -> float:
    """Of a product of 4,096 x 4,096."""
    found = Gemm(4096, 4096, dtype, backend=backend).measured(tables, np.full(1, rows), np.zeros(1))
    assert found is not None
    return float(found.seconds[0]) * 1e6


def test_a_named_kernel_of_products_takes_what_was_measured_of_it() -> None:
    """gemm_perf.parquet: one row in 4 bits on a B200 takes vLLM 0.24's CuTe-DSL kernel 9.1 µs, TensorRT-LLM's fastest
    6.9; 4,096 rows in 8 bits on an H100 take DeepGEMM 117 µs in vLLM, which dispatches smaller ones to others. Kernels
    that were not measured, or whose launches were, are said."""
    blackwell, hopper = known("b200_sxm", "vllm", "0.24.0"), known("h100_sxm", "vllm", "0.24.0")
    assert micros(blackwell, "nvfp4", "flashinfer_cutedsl") == pytest.approx(9.1, abs=0.05)
    assert micros(blackwell, "nvfp4", "") == pytest.approx(6.9, abs=0.05)
    assert micros(hopper, "fp8_block", "deep_gemm", 4096.0) == pytest.approx(116.6, abs=0.1)
    assert not [note for note in (*blackwell.notes, *hopper.notes) if "stands for it" in note]
    assert micros(hopper, "fp8_block", "cutlass") == micros(hopper, "fp8_block", "")
    assert "fp8_block gemms: no kernel of cutlass was measured: the fastest stands for it" in hopper.notes
    timed_launches = known("l40s", "vllm", "0.24.0")
    assert micros(timed_launches, "fp8_block", "triton") == micros(timed_launches, "fp8_block", "")


def test_a_server_takes_longer_by_its_products_alone() -> None:
    """A decode of one request of DeepSeek-R1 in 4 bits on 8 B200."""
    spent: dict[str, Any] = {}
    for name in ("flashinfer_cutedsl", "auto"):
        engine = Engine(tensor_parallel_size=8, max_model_len=8192, linear_backend=name)
        (spent[name],) = batch_times(
            Deployment((Pool(load_model("nvidia/DeepSeek-R1-NVFP4"), device("b200"), engine),))
        )
    named, fastest = (spent[name].groups for name in ("flashinfer_cutedsl", "auto"))
    assert named["gemm"].decode_tokens[1] > fastest["gemm"].decode_tokens[1]
    for group in ("attention", "experts", "communication"):
        np.testing.assert_array_equal(named[group].decode_tokens, fastest[group].decode_tokens)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("vllm serve Qwen/Qwen3-8B --linear-backend deep_gemm", "deep_gemm"),
        ("vllm serve Qwen/Qwen3-8B --kernel-config.linear_backend cutlass", "cutlass"),
        ("vllm serve Qwen/Qwen3-8B --linear-backend auto", None),
        (
            "sglang serve --model-path nvidia/DeepSeek-R1-NVFP4 --fp4-gemm-backend flashinfer_cutlass",
            "flashinfer_cutlass",
        ),
        ("sglang serve --model-path deepseek-ai/DeepSeek-R1 --fp8-gemm-runner-backend deep_gemm", "deep_gemm"),
        ("sglang serve --model-path deepseek-ai/DeepSeek-R1 --fp4-gemm-backend flashinfer_cutlass", None),
    ],
)
def test_lines_name_kernels_of_products(line: str, found: str | None) -> None:
    said = reading(line)
    assert said.settings.get("linear_backend") == found
    assert not said.not_simulated


def test_a_kernel_of_products_that_nobody_measured_is_said() -> None:
    (word,) = reading("vllm serve Qwen/Qwen3-8B --linear-backend aiter").not_simulated
    assert word.kernel and "the fastest one that is known stands for it" in word.note
