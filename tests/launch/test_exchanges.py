"""What flags of public lines change between GPUs: memory at one address, kernels that write into that of others.

Measured elsewhere: NCCL with symmetric memory on 8 H100 (NVIDIA Megatron-LM #5596), its sums next to other kernels on 8
B300 (vLLM #37756) and 4 H100 (#24532), whole servers with it (SGLang #8934, #9358).
"""

from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.model import load_model
from windtunnel.perf.database import Database, Measured, find_systems
from windtunnel.perf.kinds.collective import Collective, InSymmetricMemory
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.tabulate.operators import operators
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload

SYSTEMS = find_systems()
with_database = pytest.mark.skipif(SYSTEMS is None, reason="the kernel database is not here")
DEEPSEEK = (
    "python3 -m sglang.launch_server --model-path nvidia/DeepSeek-R1-FP4 --quantization modelopt_fp4 --tp 8 --ep 8 "
    "--dp 8 --enable-dp-attention --chunked-prefill-size 16384 --mem-fraction-static 0.85 --max-running-requests 4096 "
    "--stream-interval 5 --enable-dp-lm-head --attention-backend trtllm_mla --disable-radix-cache "
    "--cuda-graph-bs 1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192"
)


def reading(text: str) -> Reading:
    return read_line(read_source(text)[0])


def pool(text: str, gpu: str) -> Pool:
    said = reading(text)
    return Pool(load_model(said.model), device(gpu), Engine(**said.settings))


def known(system: str, gpu: str, backend: str, version: str) -> Measured:
    assert SYSTEMS is not None
    return Measured(Database(SYSTEMS, system, backend, version, "exact"), device(gpu))


@with_database
@pytest.mark.parametrize(
    ("op", "mebibytes", "off", "on"),
    [
        ("all_gather", 2, 20.2, 10.9),
        ("all_gather", 8, 43.4, 27.4),
        ("all_gather", 32, 118.9, 95.3),
        ("reduce_scatter", 2, 18.6, 10.8),
        ("reduce_scatter", 8, 47.0, 28.8),
        ("reduce_scatter", 32, 112.6, 100.5),
    ],
)
def test_symmetric_memory_makes_gathers_and_scatters_as_much_faster_as_measured(
    op: str, mebibytes: int, off: float, on: float
) -> None:
    """The database's NCCL, without, takes nearly as long as theirs."""
    plain, rows = Collective(op, 8, 4096), np.full(1, mebibytes * 2**20 / 8192)
    database = known("h100_sxm", "h100", "sglang", "0.5.14")
    usual, symmetric = (each.measured(database, rows, 0 * rows) for each in (plain, InSymmetricMemory(plain)))
    assert usual is not None and symmetric is not None
    assert usual.seconds[0] / symmetric.seconds[0] == pytest.approx(off / on, abs=0.01)
    assert usual.seconds[0] * 1e6 == pytest.approx(off, rel=0.3)


@with_database
def test_a_server_in_symmetric_memory_gains_what_was_measured() -> None:
    """1,024 requests of 1,024 and 2,048 tokens on 8 B200: 115.6 s without, and 5.2 s less with gathers and scatters in
    symmetric memory (SGLang's #8934), 7.2 s with NCCL 2.28 (#9358). That was in August 2025; today's takes 84 s."""
    asked = Workload.from_columns(prompt_tokens=[1024] * 1024, output_tokens=[2048] * 1024)
    off, on = (
        float(simulate(Deployment((pool(f"{DEEPSEEK}{more}", "b200"),)), asked).requests.finish.max())
        for more in ("", " --enable-symm-mem")
    )
    assert 5.2 < off - on < 8.5
    assert 0.047 < off / on - 1 < 0.12


@with_database
@pytest.mark.parametrize(
    ("system", "gpu", "gpus", "measured"),
    [
        ("b300_sxm", "b300", 8, {0.5: 29, 1: 29, 2: 35, 4: 50, 8: 83, 16: 90, 32: 153, 64: 241}),
        ("h100_sxm", "h100", 4, {0.5: 17, 1: 19, 1.5: 20, 2: 21, 3: 23, 4: 28}),
    ],
)
def test_sums_are_timed_no_slower_than_symmetric_memory_makes_them(
    system: str, gpu: str, gpus: int, measured: dict[float, float]
) -> None:
    """MiB → microseconds with NCCL's symmetric memory: what stands for every sum, the fastest kernel of all engines, is
    faster, so that the switch changes none."""
    rows = np.array(list(measured)) * 2**20 / 8192
    found = Collective("all_reduce", gpus, 4096).measured(known(system, gpu, "sglang", "0.5.14"), rows, 0 * rows)
    assert found is not None
    assert np.all(found.seconds * 1e6 < 1.02 * np.array(list(measured.values())))
    line = "sglang serve --model-path Qwen/Qwen3-32B --tp 8"
    plain, symmetric = (operators(pool(f"{line}{more}", gpu)) for more in ("", " --enable-symm-mem"))
    sums = [[op.kernel for op in each if "all_reduce" in op.name] for each in (plain, symmetric)]
    assert sums[0] == sums[1] and sums[0]


def test_symmetric_memory_is_that_of_gpus_that_nvlink_joins() -> None:
    named = {"vllm": "VLLM_USE_NCCL_SYMM_MEM=1 vllm serve Qwen/Qwen3-30B-A3B -dp 8 --enable-expert-parallel"}
    named["sglang"] = "sglang serve --model-path Qwen/Qwen3-30B-A3B --tp 8 --dp 8 --ep 8 --enable-dp-attention "
    named["sglang"] += "--enable-symm-mem"
    for line in named.values():
        said = reading(line)
        assert said.settings["enable_symm_mem"] and not said.not_simulated
        for gpu, joined in (("h100", True), ("h100_pcie", False)):
            kinds = {type(op.kernel) for op in operators(pool(line, gpu)) if op.name == "expert_all_gather"}
            assert kinds == {InSymmetricMemory if joined else Collective}
    assert "enable_symm_mem" not in reading("VLLM_USE_NCCL_SYMM_MEM=0 vllm serve Qwen/Qwen3-8B").settings
    with pytest.raises(InputError, match="TensorRT-LLM has no such flag"):
        Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(preset="trtllm-1.0", enable_symm_mem=True))


COMPOSE = """
services:
  server:
    image: vllm/vllm-openai:v0.10.1.1
    command: --model Qwen/Qwen3-8B
    environment: ["VLLM_USE_FLASHINFER_SAMPLER={}"]
"""


@pytest.mark.parametrize(
    ("line", "samples"),
    [
        ("docker run vllm/vllm-openai:v0.10.1.1 --model Qwen/Qwen3-8B", True),
        ("docker run vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B", True),
        (COMPOSE.format(0), False),
        (COMPOSE.format(1), True),
        ("docker run vllm/vllm-openai:v0.8.5 --model Qwen/Qwen3-8B", True),
        ("docker run vllm/vllm-openai:v0.7.3 --model Qwen/Qwen3-8B", False),
        ("docker run vllm/vllm-openai:v0.11.1 --model Qwen/Qwen3-8B", False),
        ("VLLM_USE_FLASHINFER_SAMPLER=1 vllm serve Qwen/Qwen3-8B", True),
        ("vllm serve Qwen/Qwen3-8B", False),
    ],
)
def test_images_of_some_releases_sample_with_flashinfer(line: str, samples: bool) -> None:
    assert reading(line).settings.get("flashinfer_sampler", False) is samples


def test_exchanges_that_write_into_other_gpus_are_one_kernel_in_all_engines() -> None:
    """FlashInfer's one-sided kernels are TensorRT-LLM's. A token goes in 4 bits and returns in 16, once for
    each GPU of a rack that has one of its experts."""
    lines = (
        "vllm serve nvidia/Kimi-K2.5-NVFP4 -dp 16 --enable-expert-parallel "
        "--all2all-backend flashinfer_nvlink_one_sided",
        "sglang serve --model-path nvidia/Kimi-K2.5-NVFP4 --tp 16 --dp 16 --ep 16 --enable-dp-attention "
        "--moe-a2a-backend flashinfer",
        "trtllm-serve nvidia/Kimi-K2.5-NVFP4 --tp_size 16 --ep_size 16 --enable_attention_dp true",
    )
    found: list[list[Any]] = []
    for line in lines:
        assert not [word.flag for word in reading(line).not_simulated]
        found.append([op.kernel for op in operators(pool(line, "gb200")) if isinstance(op.kernel, Exchange)])
    assert found[0] == found[1] == found[2] and [each.phase for each in found[0]] == ["dispatch", "combine"]
    assert [each.dtype for each in found[0]] == ["nvfp4", "bfloat16"]
    for line in lines[:2]:
        with pytest.raises(InputError, match="needs one of NVLink"):
            pool(line, "h100")
