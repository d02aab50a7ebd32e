"""Exchange volumes: how many bytes DeepEP's kernels send for a token, over the link and over the network."""

from dataclasses import replace

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernels import Exchange, Experts, Kernel

SCALED_BLOCK = 128
"""Numbers that share a 32-bit scale where tokens are sent in 8 bits."""


def row_bytes(kernel: Exchange) -> float:
    """Bytes of one copy of a token."""
    return kernel.hidden * (1.0 + 4.0 / SCALED_BLOCK) if kernel.dtype == "fp8" else 2.0 * kernel.hidden


def copies(kernel: Exchange) -> tuple[float, float]:
    """Expected copies of a token that leave a GPU over the link, and over the network, when choices fall evenly.

    Low-latency kernels send one copy for each choice, straight to its GPU. High-throughput kernels send one copy to
    each other node with a choice, which hands it on to the GPUs there, and one to each GPU with a choice in a node
    (DeepEP: internode_ll.cu; internode.cu and intranode.cu).
    """
    near = min(kernel.ranks, kernel.domain)
    nodes = kernel.ranks / near
    if kernel.mode == "low_latency":
        per_rank = kernel.top_k / kernel.ranks
        return per_rank * (near - 1), per_rank * (kernel.ranks - near)
    gpus = kernel.ranks * (1.0 - (1.0 - 1.0 / kernel.ranks) ** kernel.top_k)
    return gpus * (near - 1) / near, (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** kernel.top_k)


def link_bytes(kernel: Exchange, a: Floats) -> Floats:
    """Bytes that one GPU sends over the link for ``a`` tokens of its data-parallel rank."""
    return copies(kernel)[0] * row_bytes(kernel) * a / kernel.tp


def network_bytes(kernel: Exchange, a: Floats) -> Floats:
    """Bytes that one GPU sends over the network."""
    return copies(kernel)[1] * row_bytes(kernel) * a / kernel.tp


def resolved(kernel: Kernel, with_prompts: bool) -> Kernel:
    """The kernels of ``auto`` for a batch; any other kernel as it is."""
    if isinstance(kernel, Exchange) and kernel.mode == "auto":
        return replace(kernel, mode="high_throughput" if with_prompts else "low_latency")
    if isinstance(kernel, Experts) and kernel.layout == "auto":
        return replace(kernel, layout="contiguous" if with_prompts else "masked")
    return kernel
