"""Collectives over PCIe of devices that were not measured, by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perf.kernel_tables import collective_rows, gemm_rows, write_table
from windtunnel.hardware import device
from windtunnel.perf.database import Measured, open_database
from windtunnel.perf.kernel import Efficiency
from windtunnel.perf.kernel_times import MODELLED
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.pcie import HOST_SHARE, PEERS, Pcie, pcie

GATHER = Efficiency(1.0, 0.5, 10e-6)
ROWS = np.array([1.0, 64.0, 4096.0])
NONE = np.zeros(3)
REDUCE = Collective("all_reduce", 4, 4096)


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel database of the machine whose GPUs have access to each other."""
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    write_table(tmp_path, f"{PEERS}/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    write_table(tmp_path, f"{PEERS}/comm/vllm/0.24.0/custom_allreduce_perf", collective_rows("all_reduce"))
    return tmp_path


def of(name: str) -> Pcie:
    found = pcie(device(name), "vllm", GATHER)
    assert found is not None
    return found


def test_through_the_host_every_byte_takes_a_share_of_the_link() -> None:
    found = of("rtx_4090").times(REDUCE, ROWS, NONE)
    assert found is not None
    sent = 2 * 3 / 4 * 2 * 4096 * ROWS
    np.testing.assert_allclose(found.seconds, 10e-6 + sent / (HOST_SHARE * 32e9), rtol=1e-12)
    assert (found.sources == MODELLED).all()
    assert np.isinf(found.distance).all()


@pytest.mark.usefixtures("systems")
def test_with_access_what_exceeds_the_smallest_message_takes_longer_as_links_are_slower() -> None:
    database = open_database(PEERS, "vllm")
    assert database is not None
    known = REDUCE.measured(Measured(database, device(PEERS)), ROWS, NONE)
    found = of("a10").times(REDUCE, ROWS, NONE)
    assert known is not None
    assert found is not None
    latency = 1e-3 * collective_rows("all_reduce")["latency"][6]  # four GPUs, 256 elements
    np.testing.assert_allclose(found.seconds - latency, 2.0 * (known.seconds - latency), rtol=1e-9)


def test_without_the_machines_table_gathers_say_what_a_link_attains(systems: Path) -> None:
    (systems / "data" / PEERS / "comm/vllm/0.24.0/custom_allreduce_perf.parquet").unlink()
    found = of("a10").times(REDUCE, ROWS, NONE)
    assert found is not None
    np.testing.assert_allclose(found.seconds, 10e-6 + 1.5 * 2 * 4096 * ROWS / (0.5 * 32e9), rtol=1e-12)


def test_other_links_and_other_nodes_are_not_its_matter() -> None:
    assert pcie(device("h100_sxm"), "vllm", GATHER) is None
    assert of("rtx_4090").times(replace(REDUCE, gpus=16), ROWS, NONE) is None
