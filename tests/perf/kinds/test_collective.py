"""Collectives in the kernel database, on databases made up for the test."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perf.kernel_tables import (
    H100,
    ask,
    gemm_rows,
    took,
    write_table,
)
from windtunnel.hardware import device
from windtunnel.perf.database import Measured, open_database
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.collective import Collective, LinkTable, SummedInParts
from windtunnel.perf.predictor import Perfect, Predictor, roofline


def test_collectives_by_elements_of_the_message(measured: Measured) -> None:
    kernel = Collective("all_reduce", 4, 4096)
    found = ask(measured, kernel, [16, 256, 5000])
    expected = [took(Collective("all_reduce", 4, 1), m * 4096) * 1e-3 for m in (16, 256, 5000)]
    np.testing.assert_allclose(found.seconds, expected, rtol=0.05)
    np.testing.assert_allclose(found.seconds[:2], expected[:2], rtol=1e-9)
    assert found.sources.tolist() == [MEASURED, MEASURED, INTERPOLATED]
    assert ask(measured, replace(kernel, gpus=3), [16]).sources[0] == MODELLED
    assert replace(kernel, op="all_gather", gpus=16).measured(measured, np.ones(1), np.zeros(1)) is None


def test_the_least_time_of_a_sum_over_nodes() -> None:
    """From 8 GPUs with 450 GB/s to 16 with 50 GB/s of network each: the link takes 15/8 · 1/450, the network 1/8 · 1/50
    of a byte each; with slower networks those."""
    h100, kernel, rows = device("h100"), Collective("all_reduce", 16, 500_000_000), np.ones(1)
    assert kernel.bound(h100, rows, rows)[0] == pytest.approx(15 / 8 / 450)
    assert kernel.bound(replace(h100, network_bandwidth=10e9), rows, rows)[0] == pytest.approx(1 / 8 / 10)
    one_domain = replace(kernel, gpus=8)
    gb200 = device("gb200")
    assert one_domain.sums_over(gb200) == one_domain.sums_over(h100) == 1.0


def test_a_message_smaller_than_measured_takes_the_least_ones_time(measured: Measured) -> None:
    found = ask(measured, Collective("all_gather", 2, 1), [1, 256])
    assert found.seconds[0] == found.seconds[1]
    assert found.sources.tolist() == [MODELLED, MEASURED]


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel database, with gemms, without which none is opened."""
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    return tmp_path


def test_a_sum_over_nodes_is_nccls_in_each_and_the_way_between_them(systems: Path) -> None:
    """Two nodes: up and down once, 10 µs each way, and an eighth of the sum over each GPU's network, there and back."""
    sizes = [1024, 65536, 4194304]
    rows = {"num_gpus": 8, "message_size": sizes, "kernel_source": "one", "op_name": "all_reduce", "nccl_dtype": "half"}
    write_table(systems, "h100_sxm/comm/nccl/2.29.2/nccl_perf", rows | {"latency": [0.015, 0.02, 0.08]})
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    link, tokens = LinkTable(Measured(database, H100)), np.array(sizes, dtype=float)
    for gpus, way in ((16, 20e-6 + tokens * 2 / 8 / 50e9), (32, 40e-6 + 1.5 * tokens * 2 / 8 / 50e9)):
        found = link.times(Collective("all_reduce", gpus, 1), tokens)
        assert found is not None
        np.testing.assert_allclose(found.seconds, np.array([15e-6, 20e-6, 80e-6]) + way, rtol=1e-9)
        assert (found.sources == MODELLED).all()


def test_an_all_reduce_between_measured_counts_is_a_power_of_the_count(systems: Path) -> None:
    sizes = [1024, 65536, 4194304]
    rows = [(gpus, size) for gpus in (4, 8) for size in sizes]
    table = {
        "allreduce_dtype": "bfloat16",
        "num_gpus": [gpus for gpus, _ in rows],
        "message_size": [size for _, size in rows],
        "latency": [1e3 * (1e-6 * gpus + 1e-12 * size * gpus) for gpus, size in rows],
        "kernel_source": "custom",
        "backend": "vllm_graph",
    }
    write_table(systems, "h100_sxm/comm/vllm/0.24.0/custom_allreduce_perf", table)
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    link = LinkTable(Measured(database, H100))
    kernel = Collective("all_reduce", 6, 1)
    found = link.times(kernel, np.array(sizes, dtype=float))
    assert found is not None
    np.testing.assert_allclose(found.seconds, 6e-6 + 6e-12 * np.array(sizes), rtol=1e-9)
    assert (found.sources == MODELLED).all()
    measured = link.times(replace(kernel, gpus=8), np.array(sizes, dtype=float))
    assert measured is not None
    np.testing.assert_allclose(measured.seconds, 8e-6 + 8e-12 * np.array(sizes), rtol=1e-9)


def test_nccl_stands_in_where_the_own_kernel_is_off_and_ranks_may_have_to_wait(measured: Measured) -> None:
    own, nccl = Collective("all_reduce", 4, 4096), Collective("all_reduce", 4, 4096, nccl=True)
    assert nccl.measured(measured, np.ones(1), np.zeros(1)) is None  # this database has none of it
    late = replace(own, wait=1e-5)
    source = Predictor(Perfect(H100), None, "")
    assert source.times(late, np.ones(1), np.zeros(1)).seconds == source.times(own, np.ones(1), np.zeros(1)).seconds
    real = Predictor(roofline(H100), measured, "")
    waited = real.times(late, np.ones(1), np.zeros(1)).seconds - real.times(own, np.ones(1), np.zeros(1)).seconds
    assert waited == pytest.approx(1e-5)


def test_over_pcie_the_faster_of_the_own_kernel_and_nccl_counts(systems: Path) -> None:
    write_table(systems, "l40s/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    sizes = [1024, 65536, 4194304]
    rows = {"num_gpus": 4, "message_size": sizes, "kernel_source": "one"}
    own = rows | {"latency": [0.01, 0.1, 4.0], "backend": "vllm_graph"}
    nccl = rows | {"latency": [0.02, 0.05, 2.0], "op_name": "all_reduce", "nccl_dtype": "half"}
    write_table(systems, "l40s/comm/vllm/0.24.0/custom_allreduce_perf", own)
    write_table(systems, "l40s/comm/nccl/2.29.2/nccl_perf", nccl)
    database = open_database("l40s", "vllm")
    assert database is not None
    link = LinkTable(Measured(database, device("l40s")))
    found = link.times(Collective("all_reduce", 4, 1), np.array(sizes, dtype=float))
    assert found is not None
    np.testing.assert_allclose(found.seconds, [1e-5, 5e-5, 2e-3], rtol=1e-9)


def test_a_sum_in_parts_is_a_scatter_and_a_gather(systems: Path) -> None:
    """From 64 rows of 16 on, where 2 GPUs divide them; between two sizes each takes a power of the size."""
    sizes, latency = (
        [512, 8192],
        {"all_reduce": (0.01, 0.04), "reduce_scatter": (0.02, 0.02), "all_gather": (0.03, 0.05)},
    )
    columns = [(op, size, took) for op, times in latency.items() for size, took in zip(sizes, times, strict=True)]
    ops, messages, took = (list(column) for column in zip(*columns, strict=True))
    rows = {"num_gpus": 2, "kernel_source": "one", "nccl_dtype": "half"}
    rows |= {"op_name": ops, "message_size": messages, "latency": took}
    write_table(systems, "h100_sxm/comm/nccl/2.29.2/nccl_perf", rows)
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    kernel = SummedInParts(Collective("all_reduce", 2, 16), 64)
    at, none = np.array([32.0, 512.0]), np.zeros(2)
    found = kernel.measured(Measured(database, H100), at, none)
    assert found is not None
    assert found.seconds == pytest.approx([10e-6, 70e-6])
    odd = kernel.measured(Measured(database, H100), np.array([65.0]), np.zeros(1))
    assert odd is not None
    assert 10e-6 < odd.seconds[0] < 40e-6
    assert kernel.bound(H100, at, none) == pytest.approx(kernel.whole.bound(H100, at, none))
