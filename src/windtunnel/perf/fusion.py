"""Operators, and what engines fuse: launches that a step does not pay for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from windtunnel.deployment import Pool, preset
from windtunnel.perf.causes import Causes
from windtunnel.perf.kernels import Elementwise, Gemm, Kernel

GROUPS = ("gemm", "attention", "experts", "communication", "other")

FUSED_SINCE = 90
"""Compute capability × 10 from which engines add, normalise and reduce in one kernel (FlashInfer's all-reduce fusion in
vLLM and SGLang, TensorRT-LLM's own)."""


@dataclass(frozen=True)
class Operator:
    """A kernel that a step runs ``count`` times, at points given by its phase."""

    name: str
    group: str
    """Of GROUPS."""
    phase: str
    """``tokens``: all tokens of the rank; ``all_tokens``: of all ranks; ``sequences``: its requests;
    ``decode``: (decodes, keys); ``prefill``: (chunk, context), for each chunk."""
    count: int
    kernel: Kernel


def together(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Equal operators as one, in the order of their first use."""
    found: dict[tuple[str, str, str, Kernel], int] = {}
    for operator in operators:
        key = (operator.name, operator.group, operator.phase, operator.kernel)
        found[key] = found.get(key, 0) + operator.count
    return tuple(Operator(name, group, phase, count, kernel) for (name, group, phase, kernel), count in found.items())


def fused(pool: Pool, causes: Causes, operators: Iterable[Operator]) -> Iterator[Operator]:
    """The operators without the launches that this engine saves on this device."""
    reduces = causes.fused_all_reduce and _fuses_all_reduce(pool)
    cast_with_norm, cast_with_attention = _fuses_casts(pool) if causes.fused_quantization else (False, False)
    for operator in operators:
        kernel = operator.kernel
        if operator.name == "quantize_input" and cast_with_norm:
            continue
        if operator.name == "quantize_attention" and cast_with_attention:
            continue
        if operator.name == "choice_all_gather" and not causes.rank_synchronisation:
            continue
        if isinstance(kernel, Elementwise) and operator.name == "norm" and reduces:
            yield replace(operator, kernel=replace(kernel, launches=0))
        elif operator.name.startswith("shared_") and causes.shared_expert_overlap:
            yield replace(operator, kernel=_beside(kernel))
        else:
            yield operator


def _fuses_all_reduce(pool: Pool) -> bool:
    """By the engine's default; users of data-centre Blackwell switch it on where it is not (vLLM's recipes)."""
    chosen = preset(pool.engine.preset).fuses_all_reduce or pool.device.is_blackwell_datacentre
    linked = pool.device.sm_version >= FUSED_SINCE and pool.device.link == "nvlink"
    return chosen and linked and pool.engine.tensor_parallel_size > 1


def _fuses_casts(pool: Pool) -> tuple[bool, bool]:
    """Whether the cast to 8 bits rides on the norm or activation before it, and on attention.

    A static scale needs no search: norms, activations and TensorRT-LLM's attention write 8 bits at once. vLLM's
    compiler makes one kernel of a norm and a search per token; scales per block or for 4 bits are kernels of their
    own.
    """
    quantization, backend = pool.model.quantization, pool.engine.backend
    quantization = quantization and (quantization.of("qkv") or quantization)
    if quantization is None or quantization.method != "fp8":
        return False, False
    if quantization.static_activations:
        return backend != "sglang", backend == "trtllm"
    return backend == "vllm" and not pool.engine.enforce_eager, False


def _beside(kernel: Kernel) -> Kernel:
    if isinstance(kernel, Gemm):
        return replace(kernel, beside=True)
    return replace(kernel, launches=0) if isinstance(kernel, Elementwise) else kernel
