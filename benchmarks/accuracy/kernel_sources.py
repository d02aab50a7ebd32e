"""Kernel sources: tables of the kernel database, and how their rows are kernels at points."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Columns
from windtunnel.perf.kernel import STORED_BYTES, Kernel
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.block_sparse_attention import module
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.exchange import Exchange, exchange_micros
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.sparse_attention import ARCHITECTURES, SparseAttention
from windtunnel.perf.kinds.state_space import Convolution

MOE_DTYPES = {"w4a16_mxfp4": ("mxfp4", True), "w4a8_mxfp4_mxfp8": ("mxfp4", False), "int4_wo": ("int4", True)}
"""``moe_dtype`` → our weight format, and whether activations stay in 16 bits; where the names differ."""

SENT = {"dispatch": "fp8", "combine": "bfloat16"}
"""Formats in which tokens are sent in the tables of DeepEP."""
MODES = {"deepep_ll": "low_latency", "deepep_ht": "high_throughput"}
"""``comm_backend`` → our name of DeepEP's kernels."""
MICROSECONDS_PER_MS = 1e-3

Row = Mapping[str, int | str]
"""Columns of a shape, and of the device ``gpus_per_node`` and ``gpus_per_domain``."""


@dataclass(frozen=True)
class Source:
    """A table of the kernel database, and how its rows are kernels at points."""

    table: tuple[str, str]
    """Family and table."""
    texts: tuple[str, ...]
    """Text columns that tell shapes apart."""
    shape: tuple[str, ...]
    """Number columns that do."""
    axis: str
    """The column of which every third value is taken out."""
    others: tuple[str, ...]
    """Further columns of a point."""
    kernel: Callable[[Row], Kernel | None]
    """The kernel of a shape; None for one that no table answers for."""
    point: Callable[[Columns], tuple[Floats, Floats]]
    backend: str | None = None
    times: Callable[[Columns], Columns] = lambda columns: columns
    """The table with a row for every time, in ms, in the column ``latency``."""
    grid: bool = False
    """Shapes form a grid over the columns of ``shape``."""
    unless: tuple[str, str] | None = None
    """Family and table that replace it in engines that have them."""
    library: tuple[str, ...] = ()
    """Values of the first text whose kernels every engine takes from one library: other engines' tables repeat them."""


def _tokens(name: str) -> Callable[[Columns], tuple[Floats, Floats]]:
    def point(rows: Columns) -> tuple[Floats, Floats]:
        a = rows[name].astype(float)
        return a, np.zeros_like(a)

    return point


def _decode(rows: Columns) -> tuple[Floats, Floats]:
    return rows["batch_size"].astype(float), (rows["isl"] + rows["step"]).astype(float)


def _attention(phase: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel:
        heads, kv_heads, dim, window = (int(row[name]) for name in _HEADS)
        return Attention(phase, heads, kv_heads, dim, dim, window, str(row["kv_cache_dtype"]))

    return kernel


def _latent(phase: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel:
        return LatentAttention(phase, int(row["num_heads"]), 512, 128, 64, 128, str(row["kv_cache_dtype"]))

    return kernel


def _latent_module(phase: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel:
        dtypes = str(row["kv_cache_dtype"]), str(row["gemm_type"])
        return LatentAttention(phase, int(row["num_heads"]), 512, 128, 64, 128, *dtypes)

    return kernel


def _sparse(phase: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel | None:
        if row["architecture"] not in ARCHITECTURES or row["op_name"] != WHOLE[phase]:
            return None
        hidden, rank, nope, value, index_heads = ARCHITECTURES[str(row["architecture"])]
        sizes = (hidden, int(row["num_heads"]), rank, 512, nope, 64, value, index_heads, 128, 2048)
        return SparseAttention(phase, *sizes, str(row["kv_cache_dtype"]), str(row["gemm_type"]))

    return kernel


def _block_sparse(phase: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel:
        return module(phase, int(row["num_heads"]), str(row["kv_cache_dtype"]), str(row["gemm_type"]))

    return kernel


def _chunks(rows: Columns) -> tuple[Floats, Floats]:
    return rows["isl"].astype(float), rows["step"].astype(float)


def _experts(row: Row) -> Kernel | None:
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    sizes = [int(row[name]) for name in names]
    if row["distribution"] != "balanced":
        return None
    dtype, widened = MOE_DTYPES.get(str(row["moe_dtype"]), (str(row["moe_dtype"]), False))
    if dtype not in STORED_BYTES:
        return None
    hidden, inter, top_k, experts, tp, ep = sizes
    return Experts(hidden, inter, top_k, experts, tp, ep, dtype=dtype, weight_only=widened)


def _convolution(phase: str, called: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel | None:
        if row["phase"] != called:
            return None
        wide, shared = int(row["nheads"]) * int(row["head_dim"]), int(row["n_groups"]) * int(row["d_state"])
        return Convolution(phase, wide + 2 * shared, int(row["d_conv"]))

    return kernel


def _wide_experts(layout: str) -> Callable[[Row], Kernel | None]:
    def kernel(row: Row) -> Kernel | None:
        hidden, inter, top_k, experts, tp, ep = (int(row[name]) for name in _EXPERTS)
        dtype = str(row["moe_dtype"])
        if row["distribution"] != "uniform":
            return None
        return Experts(hidden, inter, top_k, experts, tp, ep, dtype=dtype, layout=layout)

    return kernel


def _benchmarked(mode: str) -> Callable[[Row], Kernel]:
    """Whole nodes exchange."""

    def kernel(row: Row) -> Kernel:
        phase, ranks = str(row["phase"]), int(row["node_num"]) * int(row["gpus_per_node"])
        sizes = (int(row["hidden_size"]), int(row["num_topk"]), int(row["num_experts"]), ranks)
        return Exchange(phase, mode, *sizes, int(row["gpus_per_domain"]), dtype=SENT[phase])

    return kernel


def _called(row: Row) -> Kernel | None:
    mode, phase = MODES.get(str(row["comm_backend"])), str(row["phase"])
    hidden, top_k, experts, ranks = (int(row[name]) for name in ("hidden_size", "topk", "num_experts", "ep_size"))
    if mode is None:
        return None
    return Exchange(phase, mode, hidden, top_k, experts, ranks, int(row["gpus_per_domain"]), dtype=SENT[phase])


def _both_ways(mode: str) -> Callable[[Columns], Columns]:
    """A row for a dispatch, and one for its combine."""

    def times(rows: Columns) -> Columns:
        parts = [
            {**rows.numbers, "latency": MICROSECONDS_PER_MS * exchange_micros(rows, mode, phase)} for phase in SENT
        ]
        numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        phases = np.repeat(np.arange(len(SENT), dtype=np.int64), len(rows))
        texts = {name: (np.tile(codes, len(SENT)), names) for name, (codes, names) in rows.texts.items()}
        both = Columns(numbers, texts | {"phase": (phases, tuple(SENT))})
        return both.take(np.isfinite(numbers["latency"]))

    return times


def _milliseconds(rows: Columns) -> Columns:
    return Columns({**rows.numbers, "latency": rows["latency"] * MICROSECONDS_PER_MS}, rows.texts)


_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "window_size")
_EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
_MODULES = (("kv_cache_dtype", "gemm_type"), ("num_heads",))
_SPARSE = (("op_name", "architecture", "kv_cache_dtype", "gemm_type"), ("num_heads",))
WHOLE = {"decode": "dsa_generation_module", "prefill": "dsa_context_module"}
"""``op_name`` of modules with their indexer."""
_NODES = ("node_num", "hidden_size", "num_topk", "num_experts")
_RANKS = ("ep_size", "hidden_size", "topk", "num_experts")
_ATTENTION = (("kv_cache_dtype",), _HEADS)
_CONVOLUTION = (
    ("linear_attention", "mamba2_perf"),
    ("phase",),
    ("nheads", "head_dim", "n_groups", "d_state", "d_conv"),
)

TABLES: tuple[Source, ...] = (
    Source(
        *(("gemm", "gemm_perf"), ("gemm_dtype",), ("n", "k"), "m", ()),
        lambda row: (
            Gemm(int(row["n"]), int(row["k"]), str(row["gemm_dtype"])) if row["gemm_dtype"] in STORED_BYTES else None
        ),
        _tokens("m"),
        grid=True,
        library=("bfloat16",),
    ),
    Source(
        *(("moe", "moe_perf"), ("moe_dtype", "distribution"), _EXPERTS, "num_tokens", ()),
        *(_experts, _tokens("num_tokens")),
        library=("int4_wo",),
    ),
    Source(
        *(("attention", "generation_attention_perf"), *_ATTENTION, "step", ("batch_size", "isl")),
        *(_attention("decode"), _decode),
    ),
    Source(
        *(("attention", "context_attention_perf"), *_ATTENTION, "isl", ("batch_size", "step")),
        *(_attention("prefill"), _tokens("isl")),
    ),
    Source(
        *(("mla", "generation_mla_perf"), ("kv_cache_dtype",), ("num_heads",), "step", ("batch_size", "isl")),
        *(_latent("decode"), _decode),
    ),
    Source(
        *(("mla", "context_mla_perf"), ("kv_cache_dtype",), ("num_heads",), "isl", ("batch_size", "step")),
        *(_latent("prefill"), _tokens("isl")),
    ),
    Source(
        *(("mla", "mla_generation_module_perf"), *_MODULES, "step", ("batch_size", "isl")),
        *(_latent_module("decode"), _decode),
        unless=("mla", "generation_mla_perf"),
    ),
    Source(
        *(("mla", "mla_context_module_perf"), *_MODULES, "isl", ("batch_size", "step")),
        *(_latent_module("prefill"), _tokens("isl")),
        unless=("mla", "context_mla_perf"),
    ),
    Source(
        *(("sparse_attention", "dsa_generation_module_perf"), *_SPARSE, "step", ("batch_size", "isl")),
        *(_sparse("decode"), _decode),
    ),
    Source(
        *(("sparse_attention", "dsa_context_module_perf"), *_SPARSE, "isl", ("batch_size", "step")),
        *(_sparse("prefill"), _chunks),
    ),
    Source(
        *(("msa", "msa_generation_module_perf"), *_MODULES, "step", ("batch_size", "isl")),
        *(_block_sparse("decode"), _decode),
    ),
    Source(
        *(("msa", "msa_context_module_perf"), *_MODULES, "isl", ("batch_size", "step")),
        *(_block_sparse("prefill"), _chunks),
    ),
    Source(
        *(*_CONVOLUTION, "batch_size", ("seq_len",)),
        *(_convolution("decode", "generation"), _tokens("batch_size")),
    ),
    Source(
        *(*_CONVOLUTION, "seq_len", ("batch_size",)),
        *(_convolution("prefill", "context"), _tokens("seq_len")),
    ),
    *(
        Source(
            *(("moe", f"wideep_{name}_moe_perf"), ("moe_dtype", "distribution"), _EXPERTS, "num_tokens", ()),
            *(_wide_experts(layout), _tokens("num_tokens")),
        )
        for name, layout in (("context", "contiguous"), ("generation", "masked"))
    ),
    *(
        Source(
            *(("comm", f"wideep_deepep_{name}_perf"), ("phase",), _NODES, "num_token", ()),
            *(_benchmarked(mode), _tokens("num_token")),
            times=_both_ways(mode),
        )
        for name, mode in (("ll", "low_latency"), ("normal", "high_throughput"))
    ),
    Source(
        *(("comm", "moe_a2a_perf"), ("comm_backend", "phase"), _RANKS, "num_tokens", ()),
        *(_called, _tokens("num_tokens")),
        times=_milliseconds,
    ),
    Source(
        *(("comm", "nccl_perf"), ("op_name", "nccl_dtype"), ("num_gpus",), "message_size", ()),
        lambda row: (
            Collective(str(row["op_name"]), int(row["num_gpus"]), 1)
            if row["nccl_dtype"] == "half" and row["op_name"] in ("all_gather", "reduce_scatter")
            else None
        ),
        _tokens("message_size"),
        backend="nccl",
    ),
    Source(
        *(("comm", "custom_allreduce_perf"), ("backend",), ("num_gpus",), "message_size", ()),
        lambda row: (
            Collective("all_reduce", int(row["num_gpus"]), 1, graph=str(row["backend"]).endswith("graph"))
            if str(row["backend"]).endswith(("graph", "eager"))
            else None
        ),
        _tokens("message_size"),
    ),
)
