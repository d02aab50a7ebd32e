"""Small kernel databases, written by the tests that read them."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from windtunnel.hardware import device
from windtunnel.perf.database import Database, Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import KernelTimes
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm

H100 = device("h100_sxm")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
WIDTHS = (256, 1024, 4096, 16384)
EFFICIENCY = 0.5
"""Every kernel of ``full_database`` takes twice its least time, plus LAUNCH."""
LAUNCH = 4e-6


def write_table(systems: Path, place: str, columns: dict[str, Any]) -> Path:
    """Write ``data/<system>/<family>/<backend>/<version>/<table>.parquet``; numbers broadcast against lists."""
    path = systems / "data" / f"{place}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = max(len(value) for value in columns.values() if isinstance(value, list | np.ndarray))
    full = {name: value if isinstance(value, list | np.ndarray) else [value] * rows for name, value in columns.items()}
    pq.write_table(pa.table(full), path)
    return path


def took(kernel: Any, a: float, b: float = 0.0) -> float:
    """Milliseconds that the made-up GPU takes."""
    least = float(kernel.bound(H100, np.array([float(a)]), np.array([float(b)]))[0])
    return (least / EFFICIENCY + LAUNCH) * 1e3


def gemm_rows(ms: Callable[[Gemm, float], float] = took, dtypes: tuple[str, ...] = ("bfloat16",)) -> dict[str, Any]:
    points = list(product(dtypes, TOKENS, WIDTHS, WIDTHS))
    return {
        "gemm_dtype": [p[0] for p in points],
        "m": [p[1] for p in points],
        "n": [p[2] for p in points],
        "k": [p[3] for p in points],
        "latency": [ms(Gemm(n, k, dtype), m) for dtype, m, n, k in points],
        "kernel_source": "one",
    }


def attention_rows(
    phase: str, heads: tuple[tuple[int, int], ...] = ((8, 2), (32, 8)), window: int = 0
) -> dict[str, Any]:
    if phase == "decode":
        inner = [(b, 1, kv - 1) for b in (1, 4, 16, 64, 256) for kv in (2, 16, 128, 1024, 4096, 16384) if b * kv < 2e6]
    else:
        inner = [(b, n, 0) for b in (1, 4) for n in (1, 16, 128, 512, 1024, 4096, 8192)]
    points = [(h, kv, *rest) for (h, kv), rest in product(heads, inner)]
    kernels = [Attention(phase, h, kv, 128, 128, window) for h, kv, *_ in points]
    at = [(b, n + step) if phase == "decode" else (b * n, 0) for _, _, b, n, step in points]
    return {
        "num_heads": [p[0] for p in points],
        "num_key_value_heads": [p[1] for p in points],
        "batch_size": [p[2] for p in points],
        "isl": [p[3] for p in points],
        "step": [p[4] for p in points],
        "head_dim": 128,
        "window_size": window,
        "kv_cache_dtype": "bfloat16",
        "latency": [took(kernel, a, b) for kernel, (a, b) in zip(kernels, at, strict=True)],
        "kernel_source": "one",
    }


def expert_rows(kernel: Experts, dtype: str = "bfloat16", factor: float = 1.0) -> dict[str, Any]:
    return {
        "moe_dtype": dtype,
        "num_tokens": list(TOKENS),
        "hidden_size": kernel.hidden,
        "inter_size": kernel.inter,
        "topk": kernel.top_k,
        "num_experts": kernel.num_experts,
        "moe_tp_size": kernel.tp,
        "moe_ep_size": kernel.ep,
        "distribution": "power_law_1.2",
        "latency": [factor * took(kernel, m) for m in TOKENS],
        "kernel_source": "one",
    }


def collective_rows(op: str) -> dict[str, Any]:
    points = list(product((2, 4, 8), (256, 4096, 65536, 2**20, 2**24, 2**27)))
    common = {
        "num_gpus": [gpus for gpus, _ in points],
        "message_size": [size for _, size in points],
        "latency": [took(Collective(op, gpus, 1), size) for gpus, size in points],
        "kernel_source": "one",
    }
    return common | ({"backend": "vllm_graph"} if op == "all_reduce" else {"op_name": op, "nccl_dtype": "half"})


def full_database(systems: Path, system: str = "h100_sxm", version: str = "0.24.0") -> Path:
    """Gemm, attention, experts and collectives of one vLLM version."""
    write_table(systems, f"{system}/gemm/vllm/{version}/gemm_perf", gemm_rows())
    for phase, table in (("decode", "generation_attention_perf"), ("prefill", "context_attention_perf")):
        write_table(systems, f"{system}/attention/vllm/{version}/{table}", attention_rows(phase))
    write_table(systems, f"{system}/moe/vllm/{version}/moe_perf", expert_rows(Experts(2048, 768, 8, 128)))
    write_table(systems, f"{system}/comm/vllm/{version}/custom_allreduce_perf", collective_rows("all_reduce"))
    write_table(systems, f"{system}/comm/nccl/2.29.2/nccl_perf", collective_rows("all_gather"))
    return systems


def exchange_rows(
    micros: Callable[[Exchange, float], float], mode: str, nodes: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    """DeepEP's own benchmark on nodes of 8 GPUs: hidden size 2048, 128 experts, 8 choices."""
    points = list(product(nodes, (1, 8, 64, 256, 1024, 8192)))
    columns: dict[str, Any] = {
        "node_num": [node for node, _ in points],
        "num_token": [tokens for _, tokens in points],
        "hidden_size": 2048,
        "num_topk": 8,
        "num_experts": 128,
    }
    for phase, dtype in (("dispatch", "fp8"), ("combine", "bfloat16")):
        took = [micros(exchange(phase, mode, 8 * node, dtype=dtype), tokens) for node, tokens in points]
        if mode == "low_latency":
            columns[f"{phase}_avg_t_us"] = took
        else:
            columns |= {f"{phase}_sms": 20, f"{phase}_transmit_us": took, f"{phase}_notify_us": [1.0] * len(took)}
    return columns


def exchange(phase: str, mode: str, ranks: int, **changes: Any) -> Exchange:
    """One of the measured exchanges, or a change of it."""
    sizes = {"hidden": 2048, "top_k": 8, "num_experts": 128, "domain": 8}
    return Exchange(phase, mode, ranks=ranks, **{**sizes, **changes})


def with_exchanges(systems: Path, factor: float = 1.0, latency_us: float = 20.0) -> Path:
    """The tables of ``full_database``, and exchanges that take a latency and ``factor`` times their least time."""

    def micros(kernel: Exchange, tokens: float) -> float:
        least = float(kernel.bound(H100, np.array([float(tokens)]), np.zeros(1))[0])
        return factor * (least * 1e6 + latency_us)

    full_database(systems)
    for mode, name in (("low_latency", "wideep_deepep_ll_perf"), ("high_throughput", "wideep_deepep_normal_perf")):
        write_table(systems, f"h100_sxm/comm/sglang/0.5.12/{name}", exchange_rows(micros, mode))
    return systems


def opened(systems: Path, backend: str = "vllm", version: str = "0.24.0") -> Measured:
    """What a database knows of an H100."""
    return Measured(Database(systems, "h100_sxm", backend, version, "exact"), H100)


def ask(measured: Measured, kernel: Kernel, a: Any, b: Any = 0.0) -> KernelTimes:
    """What the database says at some points."""
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    found = kernel.measured(measured, x.copy(), y.copy())
    assert found is not None
    return found
