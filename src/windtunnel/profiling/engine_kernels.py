"""Kernels of an engine that is installed next to windtunnel, where torch has none that takes as long."""

from importlib.util import find_spec
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.perf.profile.shapes import Shape


@dataclass(frozen=True)
class VllmExperts:
    """Routed experts as vLLM computes them on CPUs: ``cpu_fused_moe`` of vllm/_custom_ops.py, and the layouts that
    ``CPUUnquantizedExperts`` of its experts/cpu_moe.py chooses."""

    ops: Any
    """vllm._custom_ops."""
    layout: str

    def pack(self, up: Any, down: Any) -> tuple[Any, Any]:
        """Weights (experts, outputs, inputs) of gate and up, and of down, as they stay in memory."""
        return self.ops.cpu_prepack_moe_weight(up, self.layout), self.ops.cpu_prepack_moe_weight(down, self.layout)

    def compute(self, out: Any, x: Any, weights: tuple[Any, Any], shares: Any, chosen: Any) -> Any:
        """The layer's output, in ``out``; shares and experts of each token in 32 bits."""
        self.ops.cpu_fused_moe(out, x, *weights, None, None, shares, chosen, "silu", self.layout)
        return out


def vllm_experts(torch: Any, device: str, shape: Shape, tp: int) -> VllmExperts | None:
    """vLLM's experts, where it is installed for CPUs and 32 divides the sizes of a shard, as its kernel asks."""
    sizes = shape.n_embd, shape.expert_inter // tp
    if device != "cpu" or not (shape.num_experts and shape.use_gated_mlp) or any(size % 32 for size in sizes):
        return None
    ops = vllm_ops(torch)
    return ops and VllmExperts(ops, "amx" if torch.cpu._is_amx_tile_supported() else "vec")


def vllm_ops(torch: Any) -> Any:
    """vllm._custom_ops, if vLLM is installed and has experts for CPUs, else None."""
    if find_spec("vllm") is None:
        return None
    try:
        from vllm import _custom_ops as ops
    except (ImportError, RuntimeError, OSError):  # one for another torch
        return None
    return ops if hasattr(torch.ops._C, "cpu_fused_moe") and hasattr(ops, "cpu_prepack_moe_weight") else None
