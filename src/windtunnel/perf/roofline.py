"""The roofline: what the hardware allows, and what kernels of a similar device attain of it."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import MODELLED, Answer, answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.costs import bytes_moved, flops, rate
from windtunnel.perf.exchange import link_bytes, network_bytes
from windtunnel.perf.kernels import (
    Attention,
    BlockSparseAttention,
    Collective,
    CompressedAttention,
    Convolution,
    Elementwise,
    Exchange,
    Experts,
    Gemm,
    HyperConnection,
    Kernel,
    LatentAttention,
    Quantize,
    Recurrence,
    Scan,
    SparseAttention,
)

CALIBRATION = Path(__file__).parents[1] / "data" / "efficiency.toml"

ELEMENTWISE_BANDWIDTH = 0.8
"""Share of the memory bandwidth that kernels which only move data reach; the kernel database's package prices them
so."""

LAUNCH_EAGER = 3e-6
"""Seconds of a small kernel launched one by one, beyond its bytes (the same package)."""

LAUNCH_GRAPH = 2e-6
"""The same inside a replayed CUDA graph: the shortest entries of the kernel database, all measured so, take 1.7-2.5
µs."""

COLLECTIVE_LATENCY = 1e-5
"""Seconds of a collective across nodes beyond its bytes (p2p_latency of the kernel database's system files)."""


@dataclass(frozen=True)
class Efficiency:
    """What a family of kernels attains: shares of peak compute and bandwidth, and seconds that each launch takes
    anyway."""

    compute: float
    memory: float
    latency: float


SCANS = {
    "scan_decode": Efficiency(compute=1.0, memory=0.83, latency=2.2e-6),
    "scan_prefill": Efficiency(compute=1.0, memory=0.43, latency=2e-5),
}
"""What Mamba-2's scans attain, on every device: the kernel database times none of them.

Decode: vLLM's Triton kernel with tuned launches on an H100, heads of 64 × 128 16-bit numbers, takes 2.2 µs for 8 heads
of all requests, 104.5 µs for 8,192 and 145.6 µs for 12,288 (pull request 43083 of vLLM): 0.78 to 0.84 of the bandwidth.
The gated delta rule's update, the same work on a state, attains 0.85 to 0.9 there in the database.
Prefill: vLLM's Triton kernels on an H100, 128 heads of 64 × 128, one group, pieces of 256 (pull request 27299 of vLLM):
12.6 million tokens/s for 8,192 tokens, 12.9 for 16,384, 11.8 for 32,768. Five launches, as many as the gated delta
rule's chunks, which take 19 to 23 µs for a single token."""


def bound(kernel: Kernel, device: Device, a: Floats, b: Floats) -> Floats:
    """Least seconds: the larger of FLOPs at peak rate and bytes at full bandwidth: of the link for a collective, and of
    the link or the network, whichever takes longer, for an exchange."""
    if isinstance(kernel, Exchange):
        link, network = link_bytes(kernel, a), network_bytes(kernel, a)
        return np.maximum(link / device.link_bandwidth, network / device.network_bandwidth)
    if isinstance(kernel, Collective):
        return bytes_moved(kernel, a, b) / link_bandwidth(device, kernel.gpus)
    return np.maximum(
        flops(kernel, a, b) / device.peak_flops(rate(kernel)), bytes_moved(kernel, a, b) / device.memory_bandwidth
    )


def least_seconds(kernel: Kernel, device: Device) -> Callable[[Floats], Floats]:
    """``bound`` over ``a`` alone, with no context."""

    def least(a: Floats) -> Floats:
        return bound(kernel, device, a, np.zeros_like(a))

    return least


def link_bandwidth(device: Device, gpus: int) -> float:
    """Bytes/s and direction between GPUs: the node's link, or the network when they do not fit one node."""
    return device.link_bandwidth if gpus <= device.gpus_per_node else device.network_bandwidth


def family(kernel: Kernel) -> str:  # noqa: PLR0911 - one per kind
    """The name under which a kernel's efficiency is calibrated."""
    match kernel:
        case Gemm():
            return f"gemm_{rate(kernel)}"
        case Experts():
            return f"experts_{rate(kernel)}"
        case Attention(phase=phase):
            return f"attention_{phase}"
        case LatentAttention(phase=phase) | SparseAttention(phase=phase):
            return f"latent_{phase}"
        case BlockSparseAttention(phase=phase):
            return f"block_sparse_{phase}"
        case CompressedAttention(phase=phase):
            return f"compressed_{phase}"
        case HyperConnection():
            return "hyper_connection"
        case Recurrence(phase=phase, by_channel=by_channel):
            return f"kimi_delta_{phase}" if by_channel else "attention_decode"
        case Convolution(phase=phase) | Scan(phase=phase):
            return f"{'convolution' if isinstance(kernel, Convolution) else 'scan'}_{phase}"
        case Collective(op=op):
            return "all_reduce" if op == "all_reduce" else "gather"
        case Exchange():
            return "gather"
        case Quantize() | Elementwise():
            return "elementwise"


@dataclass(frozen=True)
class Roofline:
    """Answers for any kernel on any device: max(FLOPs / attained rate, bytes / attained bandwidth) + latency, all
    modelled."""

    device: Device
    efficiencies: Mapping[str, Efficiency]
    calibrated_on: str

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> Answer:
        """Seconds at each point; zero where ``a`` is zero."""
        if isinstance(kernel, Elementwise | Quantize):
            moved = bytes_moved(kernel, a, b) / (ELEMENTWISE_BANDWIDTH * self.device.memory_bandwidth)
            launches = kernel.launches if isinstance(kernel, Elementwise) else 2
            seconds = moved + launches * (LAUNCH_GRAPH if kernel.graph else LAUNCH_EAGER)
        else:
            seconds = self._attained(kernel, a, b)
        return answer(np.where(a > 0, seconds, 0.0), MODELLED)

    def _attained(self, kernel: Kernel, a: Floats, b: Floats) -> Floats:
        eff = self.efficiencies[family(kernel)]
        if isinstance(kernel, Collective | Exchange):
            crosses = kernel.gpus > self.device.gpus_per_node if isinstance(kernel, Collective) else kernel.crosses
            across = COLLECTIVE_LATENCY if crosses else 0.0
            return bound(kernel, self.device, a, b) / eff.memory + eff.latency + across
        compute = flops(kernel, a, b) / (self.device.peak_flops(rate(kernel)) * eff.compute)
        memory = bytes_moved(kernel, a, b) / (self.device.memory_bandwidth * eff.memory)
        return np.maximum(compute, memory) + eff.latency


@dataclass(frozen=True)
class Perfect:
    """The theoretical bound: peak arithmetic or full bandwidth, whichever takes longer, and no time to launch."""

    device: Device
    efficiencies: Mapping[str, Efficiency] = field(default_factory=lambda: {"gather": Efficiency(1.0, 1.0, 0.0)})
    calibrated_on: str = "nothing: peak rates"

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> Answer:
        """Least seconds at each point; zero where ``a`` is zero."""
        return answer(np.where(a > 0, bound(kernel, self.device, a, b), 0.0), MODELLED)


def roofline(device: Device) -> Roofline:
    """The roofline of a device with the efficiencies measured on the most similar one: same link kind, then nearest
    architecture.

    ``data/efficiency.toml`` holds them; ``python -m windtunnel.perf.calibration`` derives that file from the kernel
    database.
    """
    devices = _calibration()

    def distance(name: str) -> tuple[bool, int, float]:
        entry = devices[name]
        generation = abs(entry["sm_version"] - (device.sm_version or 90))
        bandwidth = abs(float(np.log(device.memory_bandwidth / entry["memory_bandwidth"])))
        return name != device.name, int(generation), bandwidth

    nearest = min(devices, key=distance)
    linked = min(devices, key=lambda name: ((devices[name]["link"] != device.link), *distance(name)))
    table = {key: Efficiency(**value) for key, value in devices[nearest]["families"].items()}
    for key in ("all_reduce", "gather"):
        table[key] = Efficiency(**devices[linked]["families"][key])
    table |= SCANS
    return Roofline(device, table, nearest)


@cache
def _calibration() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = tomllib.loads(CALIBRATION.read_text(encoding="utf-8"))
    return loaded
