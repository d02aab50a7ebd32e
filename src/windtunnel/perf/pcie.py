"""Collectives between GPUs that only PCIe joins, where they were not measured: with access to each other's memory as on
the one machine that was, without it through the host's."""

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device, device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import Measured, open_database
from windtunnel.perf.kernel import Efficiency
from windtunnel.perf.kernel_times import MODELLED, KernelTimes
from windtunnel.perf.kinds.collective import Collective

PEERS = "rtx_pro_6000_server"
"""The machine whose eight GPUs were measured with access to each other's memory (kernel database, collected 2026-07).
The other one, of L40S, shares links and sockets: 20 GB/s between two GPUs, 1.5 between eight."""

THROUGH_HOST = 20e-6
"""Seconds of every all-reduce for each GPU that takes part, where what they exchange passes through the host's memory.

This and HOST_SHARE are from servers of vLLM 0.8.5 (`python -m benchmarks.accuracy.open_loads ../shared/truth/iog`):
RTX 4090, two and four of them, and H100 PCIe, two. RTX PRO 6000 without access lacked 37 to 75 µs with two."""

HOST_SHARE = 0.26
"""Share of the link's bandwidth that collectives through the host attain: every byte crosses the link twice."""


@dataclass(frozen=True)
class Pcie:
    """Collectives inside a node of a device that was not measured."""

    device: Device
    gather: Efficiency
    peers: Measured | None
    """The machine with access, where the kernel database has it."""

    def times(self, kernel: Collective, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds, all modelled without any data of the device; None across nodes."""
        if kernel.gpus > self.device.gpus_per_node:
            return None
        seconds = self._by_peers(kernel, a, b) if self.device.peer_access else None
        if seconds is None:
            share = HOST_SHARE if not self.device.peer_access else self.gather.memory
            seconds = self.gather.latency + kernel.bound(self.device, a, b) / share
        return KernelTimes(seconds, np.full(seconds.shape, MODELLED, dtype=np.int8), np.full(seconds.shape, np.inf))

    def _by_peers(self, kernel: Collective, a: Floats, b: Floats) -> Floats | None:
        """As measured, with what exceeds the smallest message in proportion to the links."""
        found = kernel.measured(self.peers, a, b) if self.peers else None
        if found is None or self.peers is None:
            return None
        least = kernel.measured(self.peers, np.full_like(a, 1.0 / kernel.row), b)
        assert least is not None
        ratio = kernel.bandwidth(self.peers.device) / kernel.bandwidth(self.device)
        return np.asarray(least.seconds + (found.seconds - least.seconds) * ratio)


def pcie(wanted: Device, backend: str, gather: Efficiency, corrections: Corrections = ALL) -> Pcie | None:
    """The collectives of a device over PCIe; None where other links join its GPUs."""
    if wanted.link != "pcie":
        return None
    database = open_database(PEERS, backend) if wanted.peer_access else None
    return Pcie(wanted, gather, Measured(database, device(PEERS), corrections) if database else None)
