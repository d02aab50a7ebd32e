"""Weights in host memory: room for KV on the GPU, and a way over PCIe in every step."""

from typing import Any

import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import GIB, device
from windtunnel.launch import read_line, read_source
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.tabulate.by_operator import by_operator
from windtunnel.simulate.simulate import batch_times


def pool(model: str = "Qwen/Qwen3-32B", **engine: Any) -> Pool:
    return Pool(load_model(model), device("h100"), Engine(**{"max_model_len": 8192, "enforce_eager": True, **engine}))


def times(found: Pool) -> BatchTimes:
    (tables,) = batch_times(Deployment((found,)), "roofline")
    return tables.times


@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5"])
def test_a_step_takes_as_much_longer_as_the_weights_take_over_pcie(preset: str) -> None:
    """10 GiB of a dense model, whatever the batch (vLLM: "a virtual way to increase the GPU memory size")."""
    here, there = (pool(preset=preset, tensor_parallel_size=2, cpu_offload_gb=size) for size in (0.0, 10.0))
    assert kv_blocks(here).weight_bytes - kv_blocks(there).weight_bytes == 10 * GIB
    more = kv_blocks(there).available_bytes - kv_blocks(here).available_bytes
    assert more == pytest.approx(10 * GIB, abs=2)
    spent = by_operator(there, "roofline")["weights_from_host"]
    for tokens in (1, 64, 2048):
        for table in (spent.decode_tokens, spent.mixed_tokens):
            assert table[tokens] == pytest.approx(10 * GIB / device("h100").pcie_bandwidth, rel=1e-9)
    for batch in ((1, 1024, []), (0, 0, [(2048, 0)])):  # the host's launches are hidden behind it
        longer = times(there).batch(*batch) - times(here).batch(*batch)
        assert longer == pytest.approx(10 * GIB / device("h100").pcie_bandwidth, rel=0.03)


def test_experts_that_nobody_chose_stay_where_they_are() -> None:
    """8 of 128: of 8 GiB of Qwen3-30B-A3B's weights, experts but for 5 %, one token of vLLM's reads a sixteenth."""
    model = load_model("Qwen/Qwen3-30B-A3B")
    parts = model.gpu_parameters()
    share = parts["experts"] / sum(parts.values())
    pcie = device("h100").pcie_bandwidth
    for preset, visited in (("vllm-0.33", 8 / 128), ("sglang-0.5", 1.0)):
        spent = by_operator(pool(model.name, preset=preset, cpu_offload_gb=8.0), "roofline")["weights_from_host"]
        assert spent.decode_tokens[1] == pytest.approx(8 * GIB * (1 - share + share * visited) / pcie, rel=1e-6)
        assert spent.decode_tokens[512] == pytest.approx(8 * GIB / pcie, rel=1e-6)


def test_what_does_not_fit_fits_with_weights_in_host_memory() -> None:
    with pytest.raises(InputError, match="needs"):
        kv_blocks(pool(max_model_len=32768))
    line = "vllm serve Qwen/Qwen3-32B --cpu-offload-gb 20 --max-model-len 32768"
    said = read_line(read_source(line)[0])
    assert said.settings["cpu_offload_gb"] == 20.0 and not said.not_simulated
    assert kv_blocks(pool(max_model_len=32768, cpu_offload_gb=20.0)).num_blocks * 16 > 32768
    with pytest.raises(InputError, match="TensorRT-LLM has no such flag"):
        pool(preset="trtllm-1.0", cpu_offload_gb=1.0)
    with pytest.raises(InputError, match="cpu_offload_gb=-1"):
        pool(cpu_offload_gb=-1.0)
