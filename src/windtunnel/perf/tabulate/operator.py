"""Operator: a kernel that a step runs; and those that every kind of layer is made of, in the formats of a pool."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool, preset
from windtunnel.perf.kernel import RATES, Kernel
from windtunnel.perf.kinds.collective import Collective, SummedInParts
from windtunnel.perf.kinds.elementwise import Elementwise, Quantize
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.pcie import THROUGH_HOST

RANKS_MEET = 12e-6
"""Seconds of every all-reduce of vLLM before v1, beyond the time that the kernel database measured where all ranks
start together: workers launch one by one, and wait for the last. From the static batches of Llama-3-8B on H100
(../shared/truth/static_batches): vLLM, 2 and 4 GPUs against 1."""

GROUPS = ("gemm", "attention", "experts", "communication", "other")


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
    drafting: Kernel | None = None
    """What runs in its place in the pass of a draft; None: the same."""
    passes: str = ""
    """When it runs in a step with drafts: empty: with the model, and for its share with each draft; ``first`` draft
    alone, over all tokens of the step; ``every`` draft, the first of which does so."""


def together(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Equal operators as one, in the order of their first use."""
    found: dict[Operator, int] = {}
    for operator in operators:
        key = replace(operator, count=0)
        found[key] = found.get(key, 0) + operator.count
    return tuple(replace(operator, count=count) for operator, count in found.items())


def projection(pool: Pool, name: str, part: str, n: int, k: int) -> Iterator[Operator]:
    """A projection, with the quantisation of its input where it multiplies in 8 or 4 bits."""
    gemm = product(pool, part, n, k)
    if not gemm.weight_only and gemm.dtype in RATES and not name.startswith("shared_gate"):
        cast = "quantize_attention" if name == "o_proj" else "quantize_input"  # shared experts take the experts' cast
        yield Operator(cast, "other", "tokens", 1, Quantize(k))
    yield Operator(name, "gemm", "tokens", 1, gemm)


def product(pool: Pool, part: str, n: int, k: int) -> Gemm:
    """The matrix product of a part's weights, in their format."""
    dtype, weight_only = weight_format(pool, part)
    named = pool.engine.linear_backend if dtype in RATES and not weight_only else "auto"
    return Gemm(n, k, dtype, weight_only, backend="" if named == "auto" else named)


def weight_format(pool: Pool, part: str) -> tuple[str, bool]:
    """How a part's weights are stored, and whether they are widened before they multiply.

    They are where the checkpoint says so, and where the device has no arithmetic in their format (fp8 on A100, nvfp4 on
    Hopper).
    """
    dtype = pool.model.weight_dtype(part)
    stored = pool.model.quantization.of(part) if pool.model.quantization else None
    if dtype in ("bfloat16", "float16", "float32"):
        return "bfloat16", False
    native = RATES.get(dtype) in pool.device.flops
    return dtype, not native or (stored is not None and stored.weight_only)


def cache_dtype(pool: Pool) -> str:
    """The dtype of the KV cache, as kernels call it."""
    dtype = pool.model.resolve_kv_cache_dtype(pool.engine.kv_cache_dtype)
    return "fp8" if dtype.startswith("fp8") else "bfloat16" if dtype == "float16" else dtype


def moving(name: str, row_bytes: float, launches: int = 1) -> Operator:
    """A kernel that only moves memory, for every token."""
    return Operator(name, "other", "tokens", 1, Elementwise(row_bytes, launches))


def in_parts_from(pool: Pool) -> int:
    """Tokens from which sums over the GPUs of a layer are made in parts; 0: never."""
    return (pool.engine.sequence_parallel_min_tokens or 0) if pool.engine.tensor_parallel_size > 1 else 0


def all_reduce(pool: Pool, name: str, row: int, copies: int = 1) -> Iterator[Operator]:
    """The sum of every token's row over the GPUs that share a layer, or over those of ``copies`` of it; nothing on one
    GPU."""
    tp = pool.engine.tensor_parallel_size * copies
    if tp > 1:
        chosen = preset(pool.engine.preset)
        nccl = pool.engine.disable_custom_all_reduce or not chosen.own_all_reduce
        wait = (RANKS_MEET if chosen.before_v1 else 0.0) + (0.0 if pool.device.peer_access else THROUGH_HOST * tp)
        kernel = Collective("all_reduce", tp, row, nccl=nccl, wait=wait)
        least = in_parts_from(pool)
        yield Operator(name, "communication", "tokens", 1, SummedInParts(kernel, least) if least else kernel)
