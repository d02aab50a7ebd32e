"""Derive ``data/efficiency.toml``: what each measured device attains of its own roofline, family by family.

``python -m benchmarks.efficiency`` prints the file from the kernel database.
The three numbers of a family minimise the mean |log(predicted / measured)| over the shapes below.
"""

import sys
from collections.abc import Iterator
from itertools import product

import numpy as np

from windtunnel.hardware import Device, load_devices
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured, measured_systems, open_database
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_times import MODELLED
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.block_sparse_attention import BlockSparseAttention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.compressed_attention import CompressedAttention
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.hyper_connection import HyperConnection
from windtunnel.perf.kinds.kimi_delta import KimiDelta
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.state_space import Convolution

TOKENS = np.array([1, 4, 16, 64, 256, 1024, 4096, 8192, 16384], dtype=float)
RATES = ("int8", "fp8", "fp4")
"""Tensor-core rates whose kernels, where not measured, attain the shares of the bfloat16 ones."""

SHARES = np.arange(1.0, 0.09, -0.04)
LATENCIES = np.array([0.0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 80, 120]) * 1e-6


def shapes() -> Iterator[Kernel]:
    """Shapes of common models on 1 to 8 GPUs."""
    for dtype, n, k in product(("bfloat16", "fp8", "nvfp4"), (1024, 4096, 8192, 16384), (1024, 4096, 8192, 16384)):
        yield Gemm(n, k, dtype)
    for phase, kv_heads, group in product(("decode", "prefill"), (1, 2, 8), (4, 8)):
        yield Attention(phase, kv_heads * group, kv_heads, 128, 128)
    for phase, heads in product(("decode", "prefill"), (16, 128)):
        yield LatentAttention(phase, heads, 512, 128, 64, 128)
    for phase, kv_heads in product(("decode", "prefill"), (1, 2, 4)):
        yield BlockSparseAttention(phase, 6144, 16 * kv_heads, kv_heads, 128, 128, kv_heads, 128, 2048)
    for phase, ratio, heads in product(("decode", "prefill"), (4, 128), (16, 64)):
        yield CompressedAttention(
            phase, 4096, heads, heads // 8, 512, 64, 1024, 1024, 128, ratio, 64, 128, 512, dtype="fp8_block"
        )
    for side, hidden in product(("pre", "post"), (4096, 7168)):
        yield HyperConnection(side, hidden, 4)
    for phase, channels in product(("decode", "prefill"), (2048, 6144, 10240)):
        yield Convolution(phase, channels, 4)
    for phase, heads in product(("decode", "prefill"), (12, 24, 48)):
        yield KimiDelta(phase, heads, heads, 128, 128, 4)
    for dtype, tp, ep in product(("bfloat16", "fp8", "nvfp4"), (1, 2, 4), (1, 2, 4)):
        if tp == 1 or ep == 1:
            yield Experts(4096, 1536, 8, 128, tp, ep, dtype=dtype)
            yield Experts(4096, 14336, 2, 8, tp, ep, dtype=dtype)
    for op, gpus in product(("all_reduce", "all_gather", "reduce_scatter"), (2, 4, 8)):
        yield Collective(op, gpus, 4096)


def points(kernel: Kernel) -> tuple[Floats, Floats]:
    """Where a shape is asked: (tokens, 0), (requests, keys) or (chunk, 0)."""
    if getattr(kernel, "phase", "") == "decode" and hasattr(kernel, "kv_dtype"):
        a, b = np.meshgrid([1.0, 4, 16, 64, 256], [128.0, 1024, 4096, 16384])
        return a.ravel(), b.ravel()
    return TOKENS, np.zeros_like(TOKENS)


def calibrate(device: Device, measured: Measured) -> dict[str, Efficiency]:
    """Efficiencies of every family that was measured on this device."""
    samples: dict[str, list[Floats]] = {}
    for kernel in shapes():
        a, b = points(kernel)
        found = kernel.measured(measured, a, b)
        if found is None:
            continue
        keep = found.sources != MODELLED
        compute = kernel.flops(a, b) / device.peak_flops(kernel.rate)
        memory = kernel.bytes_moved(a, b) / kernel.bandwidth(device)
        stacked = np.stack([compute, memory, found.seconds])[:, keep]
        assert (kernel.bound(device, a, b)[keep] <= stacked[:2].max(axis=0) * (1 + 1e-9)).all()
        samples.setdefault(kernel.efficiency_family, []).append(stacked)
    return {name: fit(np.concatenate(parts, axis=1)) for name, parts in samples.items() if any(p.size for p in parts)}


def fit(sample: Floats) -> Efficiency:
    """Shares and latency that fit [3, P] rows: compute and memory seconds at peak, measured seconds."""
    compute, memory, seconds = sample
    best = (np.inf, 0.0, 0.0, 0.0)
    for latency in LATENCIES:
        c = compute[None, None, :] / SHARES[:, None, None]
        m = memory[None, None, :] / SHARES[None, :, None]
        error = np.abs(np.log((np.maximum(c, m) + latency + 1e-9) / seconds)).mean(axis=2)
        i, j = np.unravel_index(int(np.argmin(error)), error.shape)
        best = min(best, (float(error[i, j]), float(SHARES[i]), float(SHARES[j]), float(latency)))
    return Efficiency(compute=round(best[1], 3), memory=round(best[2], 3), latency=best[3])


def render(backend: str = "vllm") -> str:
    """The text of the file."""
    lines = [
        "# Shares of peak compute and memory (or link) bandwidth that kernels attain, and launch seconds, by device.",
        "# Derived by `python -m benchmarks.efficiency` from the kernel database of aiconfigurator-core.",
    ]
    devices = load_devices()
    table = {}
    for name in measured_systems(backend):
        database = open_database(name, backend)
        if name in devices and database is not None:
            table[name] = calibrate(devices[name], Measured(database, devices[name]))
    for name, families in table.items():
        device = devices[name]
        plain = {f"{kind}_{rate}": families[f"{kind}_bfloat16"] for kind in ("gemm", "experts") for rate in RATES}
        whole = table["h100_sxm"] | plain | families
        lines += ["", f"[{name}]", f"sm_version = {device.sm_version}", f'link = "{device.link}"']
        lines += [f"memory_bandwidth = {device.memory_bandwidth:.4g}", f"[{name}.families]"]
        for key in sorted(whole):
            eff = whole[key]
            lines.append(
                f"{key} = {{ compute = {eff.compute}, memory = {eff.memory}, latency = {eff.latency:g} }}"
                + ("" if key in families else "  # not measured here")
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
