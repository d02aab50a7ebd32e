"""What a kernel costs at least: FLOPs, bytes (each operand once), and the rate that limits its arithmetic."""

import numpy as np

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.compressed_costs import mixing_bytes, mixing_flops, module_bytes, module_flops
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
from windtunnel.perf.pairs import pairs

STORED_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "mxfp8": 1.03125,
    "int4": 0.515625,
}
"""Bytes of one stored number, scales of 16 (nvfp4), 32 (mxfp4, mxfp8) and 128 (int4) numbers included."""

RATES = {"fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "mxfp4": "fp8", "int8": "int8", "nvfp4": "fp4"}
"""The tensor-core rate of a weight format whose activations have few bits too (8 for mxfp4); other weights multiply in
16 bits."""


def rate(kernel: Kernel) -> str:
    """Which peak rate of a device limits the kernel: ``bfloat16``, ``fp8``, ``int8`` or ``fp4``."""
    if isinstance(kernel, Gemm | Experts) and not kernel.weight_only:
        return RATES.get(kernel.dtype, "bfloat16")
    return "bfloat16"


def flops(kernel: Kernel, a: Floats, b: Floats) -> Floats:  # noqa: PLR0911, PLR0912 - one per kind
    """Floating-point operations on one GPU; kernels that only move data count none."""
    match kernel:
        case Gemm(n=n, k=k):
            return 2.0 * n * k * a
        case Experts():
            return 2.0 * expert_weights(kernel) * a * kernel.top_k / kernel.ep
        case Attention(phase="decode"):
            return 2.0 * kernel.heads * (kernel.head_dim + kernel.v_head_dim) * a * _seen(kernel, b)
        case Attention():
            return 2.0 * kernel.heads * (kernel.head_dim + kernel.v_head_dim) * pairs(a, b, kernel.window)
        case LatentAttention(phase="decode"):
            latent = 2.0 * kernel.heads * (2 * kernel.kv_lora_rank + kernel.rope)
            return a * (latent * b + 2.0 * _up_weights(kernel))
        case LatentAttention():
            width = kernel.nope + kernel.rope + kernel.v_head_dim
            return 2.0 * _up_weights(kernel) * (a + b) + 2.0 * kernel.heads * width * pairs(a, b, 0)
        case SparseAttention():
            keys = np.minimum(b + a, kernel.top_k) if kernel.phase == "prefill" else np.minimum(b, kernel.top_k)
            indexed = a * b if kernel.phase == "decode" else pairs(a, b, 0)
            chosen = 2.0 * kernel.heads * (2 * kernel.kv_lora_rank + kernel.rope) * keys * a
            return (
                2.0 * _module_weights(kernel) * a + chosen + 2.0 * kernel.index_heads * kernel.index_head_dim * indexed
            )
        case BlockSparseAttention():
            decode = kernel.phase == "decode"
            attended = a * np.minimum(b, kernel.top_k) if decode else pairs(a, b, kernel.top_k)
            scored = a * b if decode else pairs(a, b, 0)
            index = 2.0 * kernel.index_heads * kernel.index_head_dim * scored
            chosen = 2.0 * kernel.heads * (kernel.head_dim + kernel.v_head_dim) * attended
            return 2.0 * _grouped_weights(kernel) * a + chosen + index
        case CompressedAttention():
            return module_flops(kernel, a, b)
        case HyperConnection():
            return mixing_flops(kernel, a)
        case Recurrence():  # decay, prediction, update and read of a state of key_dim × value_dim per head
            return 8.0 * kernel.value_heads * kernel.key_dim * kernel.value_dim * a
        case Convolution(channels=channels, width=width):
            return 2.0 * channels * width * a
        case Scan():
            return scan_flops(kernel) * a
        case _:
            return 0.0 * a


def bytes_moved(kernel: Kernel, a: Floats, b: Floats) -> Floats:  # noqa: PLR0911, PLR0912 - one per kind
    """Bytes that one GPU reads and writes in memory, or sends over its link for a collective."""
    match kernel:
        case Gemm(n=n, k=k, dtype=dtype):
            activation = 2.0 if rate(kernel) == "bfloat16" else STORED_BYTES[dtype]
            return n * k * STORED_BYTES[dtype] + a * (k * activation + 2.0 * n)
        case Elementwise(row_bytes=row_bytes):
            return row_bytes * a
        case Quantize(k=k):
            return 3.0 * k * a
        case Experts():
            moved = 2.0 * (2.0 * kernel.hidden + 2.0 * kernel.inter / kernel.tp) * a * kernel.top_k / kernel.ep
            return experts_touched(kernel, a) * expert_weights(kernel) * STORED_BYTES[kernel.dtype] + moved
        case Attention(phase="decode"):
            return a * (_seen(kernel, b) * _key_bytes(kernel) + _query_bytes(kernel))
        case Attention():
            keys = np.minimum(a + b, a + kernel.window) if kernel.window else a + b
            return keys * _key_bytes(kernel) + a * _query_bytes(kernel)
        case LatentAttention(phase="decode"):
            queries = 2.0 * kernel.heads * (2 * kernel.kv_lora_rank + kernel.rope)
            return 2.0 * _up_weights(kernel) + a * (b * _latent_bytes(kernel) + queries)
        case LatentAttention():
            width = kernel.nope + kernel.rope + kernel.v_head_dim
            expanded = (a + b) * (_latent_bytes(kernel) + 4.0 * kernel.heads * width)
            return 2.0 * _up_weights(kernel) + expanded + 2.0 * a * kernel.heads * width
        case SparseAttention():
            keys = np.minimum(b, kernel.top_k) if kernel.phase == "decode" else (a + b) / np.maximum(a, 1.0)
            latent = keys * (kernel.kv_lora_rank + kernel.rope) * STORED_BYTES[kernel.kv_dtype]
            index = (b if kernel.phase == "decode" else (a + b) / np.maximum(a, 1.0)) * kernel.index_head_dim
            return _module_weights(kernel) * STORED_BYTES[kernel.dtype] + a * (latent + index + 4.0 * kernel.hidden)
        case BlockSparseAttention():
            decode = kernel.phase == "decode"
            attended = a * np.minimum(b, kernel.top_k) if decode else np.minimum(a + b, a * kernel.top_k)
            scored = a * b if decode else a + b
            keys = attended * _key_bytes(kernel) + scored * kernel.index_head_dim * 2.0
            weights = _grouped_weights(kernel) * STORED_BYTES[kernel.dtype]
            return weights + keys + a * (4.0 * kernel.hidden + _query_bytes(kernel))
        case CompressedAttention(dtype=dtype):
            return module_bytes(kernel, a, b, STORED_BYTES[dtype])
        case HyperConnection():
            return mixing_bytes(kernel, a)
        case Recurrence():
            channels = 2 * kernel.key_heads * kernel.key_dim + kernel.value_heads * kernel.value_dim
            rates = kernel.key_heads * kernel.key_dim if kernel.by_channel else 0
            row = 2.0 * (2.0 * channels + kernel.value_heads * kernel.value_dim + rates)
            state = kernel.value_heads * kernel.key_dim * kernel.value_dim * kernel.state_bytes_per_element
            return a * row + 2.0 * state * (a if kernel.phase == "decode" else 1.0)
        case Convolution(channels=channels, width=width):  # tokens in and out; a request's last ones in and out
            return 4.0 * channels * (a + (width - 1) * (a if kernel.phase == "decode" else 1.0))
        case Scan():
            return scan_bytes(kernel, a)
        case Collective(op=op, gpus=gpus, row=row):
            passes = 2.0 if op == "all_reduce" else 1.0  # a ring sends (p−1)/p of the message, twice to reduce
            return passes * (gpus - 1) / gpus * 2.0 * row * a
        case Exchange():  # over the link, or the network where it has to be crossed
            return network_bytes(kernel, a) if kernel.crosses else link_bytes(kernel, a)


def scan_flops(kernel: Scan) -> float:
    """FLOPs per token. Decode: decay, input, sum and read of a state of ``head_dim`` × ``state_dim`` per head. Prefill:
    the same state written and read once per piece by products, and the products of all earlier tokens of the piece
    (Mamba-2, arXiv 2405.21060, section 6)."""
    numbers = kernel.heads * kernel.head_dim * kernel.state_dim
    if kernel.phase == "decode":
        return 5.0 * numbers
    within = kernel.piece * (kernel.groups * kernel.state_dim + kernel.heads * kernel.head_dim)
    return 4.0 * numbers + within


def scan_bytes(kernel: Scan, a: Floats) -> Floats:
    """Bytes of tokens (heads in and out, B, C, a time step for each head) and states. Decode: the state in and out, for
    every request. Prefill: the tokens once more for the states, and the 32-bit states of all pieces four times, written
    and read before and after they are passed on (ssd_chunk_state.py, ssd_state_passing.py and ssd_chunk_scan.py in
    vllm/model_executor/layers/mamba/ops)."""
    wide, numbers = kernel.heads * kernel.head_dim, kernel.heads * kernel.head_dim * kernel.state_dim
    shared = 2 * kernel.groups * kernel.state_dim
    state = 2.0 * numbers * kernel.state_bytes_per_element
    if kernel.phase == "decode":
        return a * (2.0 * (2 * wide + shared + kernel.heads) + state)
    pieces = np.ceil(a / kernel.piece)
    return a * 2.0 * (3 * wide + 2 * shared + kernel.heads) + pieces * 4.0 * 4.0 * numbers + state


def expert_weights(kernel: Experts) -> float:
    """Weights of one GPU's slice of one expert."""
    return (3.0 if kernel.gated else 2.0) * kernel.hidden * kernel.inter / kernel.tp


def experts_touched(kernel: Experts, a: Floats) -> Floats:
    """Expected number of one GPU's experts that get a token when each token draws its experts at random."""
    return kernel.num_experts / kernel.ep * (1.0 - (1.0 - kernel.top_k / kernel.num_experts) ** a)


def describe(kernel: Kernel) -> str:  # noqa: PLR0911, PLR0912 - one per kind
    """The fixed part of a kernel's shape, for people."""
    match kernel:
        case Gemm(n=n, k=k, dtype=dtype):
            return f"n={n} k={k} {dtype}"
        case Elementwise(row_bytes=row_bytes, launches=launches):
            return f"{row_bytes:.0f} B/row, {launches} launch{'es' if launches > 1 else ''}"
        case Quantize(k=k):
            return f"k={k} to fp8"
        case Experts():
            sizes = f"{kernel.num_experts}×({kernel.hidden}×{kernel.inter}) top {kernel.top_k}"
            return f"{sizes} tp={kernel.tp} ep={kernel.ep} {kernel.dtype}"
        case Attention():
            window = f" window={kernel.window}" if kernel.window else ""
            return f"heads={kernel.heads}/{kernel.kv_heads}×{kernel.head_dim}{window} kv={kernel.kv_dtype}"
        case LatentAttention():
            return f"heads={kernel.heads} latent={kernel.kv_lora_rank}+{kernel.rope} kv={kernel.kv_dtype}"
        case SparseAttention():
            index = "" if kernel.index_heads else " no indexer"
            return f"heads={kernel.heads} latent={kernel.kv_lora_rank} top {kernel.top_k}{index} kv={kernel.kv_dtype}"
        case BlockSparseAttention():
            sizes = f"heads={kernel.heads}/{kernel.kv_heads}×{kernel.head_dim} index={kernel.index_heads}"
            return f"{sizes} top {kernel.top_k} kv={kernel.kv_dtype}"
        case CompressedAttention():
            kind = f"1/{kernel.ratio}" if kernel.ratio else "window"
            return f"heads={kernel.heads}×{kernel.head_dim} {kind} kv={kernel.kv_dtype}"
        case HyperConnection():
            return f"{kernel.streams} × {kernel.hidden}"
        case Recurrence():
            return f"heads={kernel.key_heads}/{kernel.value_heads}×{kernel.key_dim}×{kernel.value_dim}"
        case Convolution(channels=channels, width=width):
            return f"{channels} channels, {width} tokens"
        case Scan():
            return f"heads={kernel.heads}×{kernel.head_dim}×{kernel.state_dim} groups={kernel.groups}"
        case Collective(gpus=gpus, row=row):
            return f"{gpus} GPUs × {row}"
        case Exchange():
            return f"{kernel.ranks} GPUs × {kernel.hidden} top {kernel.top_k} {kernel.dtype} {kernel.mode}"


def _seen(kernel: Attention, b: Floats) -> Floats:
    return np.minimum(b, kernel.window) if kernel.window else b


def _key_bytes(kernel: Attention | BlockSparseAttention) -> float:
    return kernel.kv_heads * (kernel.head_dim + kernel.v_head_dim) * STORED_BYTES[kernel.kv_dtype]


def _query_bytes(kernel: Attention | BlockSparseAttention) -> float:
    return 2.0 * kernel.heads * (kernel.head_dim + kernel.v_head_dim)


def _up_weights(kernel: LatentAttention) -> float:
    return float(kernel.heads * kernel.kv_lora_rank * (kernel.nope + kernel.v_head_dim))


def _latent_bytes(kernel: LatentAttention) -> float:
    return (kernel.kv_lora_rank + kernel.rope) * STORED_BYTES[kernel.kv_dtype]


def _module_weights(kernel: SparseAttention) -> float:
    """Weights of a module's projections: down, up, absorbed, out, and the indexer's."""
    down = kernel.hidden * (kernel.q_lora_rank + kernel.kv_lora_rank + kernel.rope)
    up = kernel.q_lora_rank * kernel.heads * (kernel.nope + kernel.rope)
    absorbed = kernel.kv_lora_rank * kernel.heads * (kernel.nope + kernel.v_head_dim)
    index = kernel.q_lora_rank * kernel.index_heads * kernel.index_head_dim + kernel.hidden * kernel.index_head_dim
    return float(down + up + absorbed + index + kernel.heads * kernel.v_head_dim * kernel.hidden)


def _grouped_weights(kernel: BlockSparseAttention) -> float:
    """Weights of a module's projections: queries, keys, values, index queries, the index key, and out."""
    queries = kernel.heads * kernel.head_dim + kernel.index_heads * kernel.index_head_dim
    keys = kernel.kv_heads * (kernel.head_dim + kernel.v_head_dim) + kernel.index_head_dim
    return float(kernel.hidden * (queries + keys + kernel.heads * kernel.v_head_dim))
