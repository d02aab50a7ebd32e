"""Mixers: what mixes the tokens of a layer (attention, linear attention, state spaces), as operators of one GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch

from windtunnel.deployment import Pool, preset
from windtunnel.model import MLA, Attention, CompressedAttention, LinearAttention, SelectiveScan, StateSpace
from windtunnel.model.families.block_sparse import BlockSparseAttention
from windtunnel.model.families.kimi_delta import KimiDeltaAttention
from windtunnel.model.mixer import Mixer
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.perf.kernel import STORED_BYTES
from windtunnel.perf.kinds.attention import MASKED, PAGED, PerHead
from windtunnel.perf.kinds.attention import Attention as AttentionKernel
from windtunnel.perf.kinds.block_sparse_attention import BlockSparseAttention as BlockSparseKernel
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.compressed_attention import CompressedAttention as CompressedKernel
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.kimi_delta import KimiDelta
from windtunnel.perf.kinds.latent_attention import LatentAttention, projections
from windtunnel.perf.kinds.part_of_context import ContextGather, PartOfContext
from windtunnel.perf.kinds.recurrence import Recurrence
from windtunnel.perf.kinds.selective_scan import SelectiveScanKernel
from windtunnel.perf.kinds.sparse_attention import SparseAttention
from windtunnel.perf.kinds.state_space import Convolution, Scan
from windtunnel.perf.tabulate.operator import Operator, all_reduce, cache_dtype, moving, projection, weight_format


@singledispatch
def mixer_operators(mixer: Mixer, pool: Pool) -> Iterator[Operator]:  # noqa: ARG001 - the signature of every kind's
    """The operators of one layer's mixer, without norm and all-reduce."""
    raise TypeError(f"{type(mixer).__name__} has no operators")


@mixer_operators.register
def _attention(attention: Attention, pool: Pool) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    heads, kv_heads = attention.num_heads // tp, attention.kv_heads_per_gpu(tp)
    keys, values = kv_heads * attention.head_dim, kv_heads * attention.v_head_dim
    queries = heads * attention.head_dim
    kv_dtype = cache_dtype(pool)
    gate = queries if attention.output_gate else 0
    yield from projection(pool, "qkv_proj", "qkv", queries + gate + keys + values, hidden)
    own = 0 if attention.shares_cache else keys  # keys of another layer are neither normed, rotated nor written
    if attention.qk_norm:
        shared = attention.qk_norm_across_heads and tp > 1  # squares are summed, reduced over GPUs, and then divide
        separate = 4 if shared else 1 if attention.qk_norm_across_heads or attention.shares_cache else 2
        yield moving("qk_norm", (6.0 if shared else 4.0) * (queries + own), launches=separate)
        if attention.qk_norm_across_heads:
            yield from all_reduce(pool, "qk_norm_all_reduce", 4)
    if attention.rotary and not pool.model.learned_positions:
        yield moving("rotary_embedding", 4.0 * (queries + own))
    if not attention.shares_cache:
        yield moving("kv_cache_write", (keys + values) * (2.0 + STORED_BYTES[kv_dtype]))
    per_head = _per_head(pool)
    sizes = (heads, kv_heads, attention.head_dim, attention.v_head_dim, attention.window)
    for phase in ("decode", "prefill"):
        kernel = AttentionKernel(
            phase, *sizes, kv_dtype, per_head=per_head if phase == "decode" else None, backend=_named(pool)
        )
        group = replace(kernel, heads=heads * attention.context_parts)
        widths = (attention.head_dim, attention.v_head_dim, (keys + values) * STORED_BYTES[kv_dtype])
        yield from in_parts(Operator(f"{phase}_attention", "attention", phase, 1, kernel), group, attention, widths)
    if gate:
        yield moving("output_gate", 6.0 * gate)
    if attention.head_gate:
        yield Operator("head_gate_proj", "gemm", "tokens", 1, Gemm(heads, hidden))
        yield moving("output_gate", 4.0 * heads * attention.v_head_dim)
    yield from projection(pool, "o_proj", "out", hidden, heads * attention.v_head_dim)


def in_parts(
    operator: Operator,
    group: AttentionKernel | LatentAttention,
    mixer: Attention | MLA,
    widths: tuple[int, int, float],
) -> Iterator[Operator]:
    """Attention where GPUs hold a part of every context each. Decodes gather the queries of the group (a head's
    ``widths[0]`` numbers), and scatter the sums of what each has made of its keys (``widths[1]``), once the 32-bit logs
    of their sums of exponentials are gathered; a chunk gathers the context, ``widths[2]`` bytes a token."""
    parts, heads = mixer.context_parts, group.heads
    if parts == 1:
        yield operator
        return
    if operator.phase == "prefill":
        context = ContextGather(Collective("all_gather", parts, round(widths[2] / 2)))
        yield Operator("context_all_gather", "communication", "prefill", 1, context)
        yield operator
        return
    queries, sums = heads * widths[0], heads * widths[1]
    yield Operator("query_all_gather", "communication", "decode", 1, Collective("all_gather", parts, queries))
    yield replace(operator, kernel=PartOfContext(operator.kernel, group, parts))
    yield Operator("lse_all_gather", "communication", "decode", 1, Collective("all_gather", parts, 2 * heads * parts))
    yield Operator("output_reduce_scatter", "communication", "decode", 1, Collective("reduce_scatter", parts, sums))


def _named(pool: Pool) -> str:
    """Whose kernel computes attention; empty: it is left open."""
    named = pool.engine.attention_backend
    return "" if named == "auto" else named


def _per_head(pool: Pool) -> PerHead | None:
    """How the engine's kernel reads keys where it does so for each query head."""
    chosen = preset(pool.engine.preset)
    if chosen.one_block_per_head:
        return MASKED
    return PAGED if chosen.before_v1 and pool.device.vendor == "AMD" else None


@mixer_operators.register
def _linear_attention(linear: LinearAttention, pool: Pool) -> Iterator[Operator]:
    """Projections of queries, keys, values and gate, and of two numbers per head; recurrence; gated norm; output."""
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    heads = (max(1, linear.num_key_heads // tp), linear.num_value_heads // tp)
    values = heads[1] * linear.value_head_dim
    yield from projection(pool, "qkvz_proj", "qkv", linear.channels // tp + values, hidden)
    yield Operator("ba_proj", "gemm", "tokens", 1, Gemm(2 * heads[1], hidden))
    sizes = (*heads, linear.key_head_dim, linear.value_head_dim, linear.conv_kernel, linear.state_bytes_per_element)
    for phase in ("decode", "prefill"):
        yield Operator(f"{phase}_recurrence", "attention", phase, 1, Recurrence(phase, *sizes))
    yield moving("gated_norm", 6.0 * values)
    yield from projection(pool, "o_proj", "out", hidden, values)


@mixer_operators.register
def _state_space(mixer: StateSpace, pool: Pool) -> Iterator[Operator]:
    """Projection in, convolution, scan, gated norm, projection out. The norm is over the heads of a group: where groups
    are repeated, GPUs exchange its sums of squares."""
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    inner, state_bytes = mixer.inner(tp), mixer.state_bytes_per_element or DTYPE_BYTES[pool.model.dtype]
    sizes = (mixer.num_heads // tp, mixer.head_dim, mixer.state_dim, mixer.groups_per_gpu(tp), mixer.chunk_size)
    yield from projection(pool, "in_proj", "qkv", mixer.projected(tp), hidden)
    for phase in ("decode", "prefill"):
        convolution = Convolution(phase, mixer.channels(tp), mixer.conv_kernel)
        yield Operator(f"{phase}_convolution", "attention", phase, 1, convolution)
        yield Operator(f"{phase}_scan", "attention", phase, 1, Scan(phase, *sizes, state_bytes))
    yield moving("gated_norm", 6.0 * inner)
    if tp > mixer.num_groups:
        yield from all_reduce(pool, "gated_norm_all_reduce", 2)  # one 32-bit number
    yield from projection(pool, "out_proj", "out", hidden, inner)


@mixer_operators.register
def _selective_scan(mixer: SelectiveScan, pool: Pool) -> Iterator[Operator]:
    """Projection in, convolution, what a token says about the scan (a sum over GPUs) with its norms, time steps, scan,
    projection out (vllm/model_executor/layers/mamba/mamba_mixer.py)."""
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    channels, state_bytes = mixer.inner // tp, mixer.state_bytes_per_element or DTYPE_BYTES[pool.model.dtype]
    yield from projection(pool, "in_proj", "qkv", 2 * channels, hidden)
    yield from projection(pool, "x_proj", "qkv", mixer.controls, channels)
    if tp > 1:
        yield from all_reduce(pool, "x_proj_all_reduce", 2 * mixer.controls)
    if mixer.normalised:
        yield moving("x_norm", 4.0 * mixer.controls, launches=3)
    yield from projection(pool, "dt_proj", "qkv", channels, mixer.step_rank)
    for phase in ("decode", "prefill"):
        convolution = Convolution(phase, channels, mixer.conv_kernel)
        yield Operator(f"{phase}_convolution", "attention", phase, 1, convolution)
        scan = SelectiveScanKernel(phase, channels, mixer.state_dim, state_bytes)
        yield Operator(f"{phase}_scan", "attention", phase, 1, scan)
    yield from projection(pool, "out_proj", "out", hidden, channels)


@mixer_operators.register
def _kimi_delta(linear: KimiDeltaAttention, pool: Pool) -> Iterator[Operator]:
    """One projection of queries, keys, values, a number per head and what low-rank gates start from; the ends of those;
    recurrence; gated norm; output (vllm/models/kimi_k3/nvidia/kda.py)."""
    tp, hidden, rank = pool.engine.tensor_parallel_size, pool.model.hidden_size, linear.key_head_dim
    heads = linear.num_value_heads // tp
    values = heads * linear.value_head_dim
    gate = values if linear.full_rank_gate else rank
    yield from projection(pool, "qkvg_proj", "qkv", linear.channels // tp + gate + rank + heads, hidden)
    yield from projection(pool, "decay_proj", "qkv", values, rank)
    if not linear.full_rank_gate:
        yield from projection(pool, "output_gate_proj", "qkv", values, rank)
    sizes = (heads, heads, rank, linear.value_head_dim, linear.conv_kernel, linear.state_bytes_per_element)
    for phase in ("decode", "prefill"):
        yield Operator(f"{phase}_recurrence", "attention", phase, 1, KimiDelta(phase, *sizes))
    yield moving("gated_norm", 6.0 * values)
    yield from projection(pool, "o_proj", "out", hidden, values)


@mixer_operators.register
def _mla(mla: MLA, pool: Pool) -> Iterator[Operator]:
    return (_sparse if mla.index_top_k else _latent)(pool, mla)


def _sparse(pool: Pool, mla: MLA) -> Iterator[Operator]:
    """Sparse attention is measured, and priced, as a module with its projections, and its indexer if it has one."""
    dtype, _ = weight_format(pool, "qkv")
    sizes = (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
    index = (mla.index_heads, mla.index_head_dim, mla.index_top_k)
    for phase in ("decode", "prefill"):
        kernel = SparseAttention(
            phase, pool.model.hidden_size, mla.num_heads // pool.engine.tensor_parallel_size, *sizes, *index
        )
        kernel = replace(
            kernel, kv_dtype=cache_dtype(pool), dtype=dtype, index_dtype=mla.index_dtype, backend=_named(pool)
        )
        shared = "" if mla.index_heads else "_shared_index"
        yield Operator(f"{phase}_sparse_attention{shared}", "attention", phase, 1, kernel)


@mixer_operators.register
def _block_sparse(attention: BlockSparseAttention, pool: Pool) -> Iterator[Operator]:
    """Block-sparse attention is priced as a module too, with norms, rotary embedding and cache write."""
    tp, (stored, widened) = pool.engine.tensor_parallel_size, weight_format(pool, "qkv")
    dtype = "bfloat16" if widened else stored
    heads = (attention.num_heads // tp, attention.kv_heads_per_gpu(tp), attention.head_dim, attention.v_head_dim)
    index = (attention.index_heads_per_gpu(tp), attention.index_head_dim, attention.attended)
    for phase in ("decode", "prefill"):
        kernel = BlockSparseKernel(
            phase, pool.model.hidden_size, *heads, *index, cache_dtype(pool), dtype, attention.index_dtype
        )
        yield Operator(f"{phase}_sparse_attention", "attention", phase, 1, kernel)


@mixer_operators.register
def _compressed(attention: CompressedAttention, pool: Pool) -> Iterator[Operator]:
    """Compressed attention is priced as a module too."""
    tp, (stored, widened) = pool.engine.tensor_parallel_size, weight_format(pool, "qkv")
    heads = (attention.num_heads // tp, attention.o_groups // tp, attention.head_dim, attention.rope_dim)
    ranks = (attention.q_lora_rank, attention.o_lora_rank, attention.local_window, attention.ratio)
    index = (attention.index_heads, attention.index_head_dim, attention.index_top_k)
    formats = (cache_dtype(pool), "bfloat16" if widened else stored, attention.index_dtype)
    kind = {0: "window", 4: "csa", 128: "hca"}[attention.ratio]
    for phase in ("decode", "prefill"):
        kernel = CompressedKernel(phase, pool.model.hidden_size, *heads, *ranks, *index, *formats)
        yield Operator(f"{phase}_{kind}_attention", "attention", phase, 1, kernel)


def _latent(pool: Pool, mla: MLA) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    dtype, _ = weight_format(pool, "qkv")
    sizes = (mla.num_heads // tp, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
    formats = (cache_dtype(pool), "bfloat16" if dtype == "bfloat16" else "fp8_block")
    both = {phase: LatentAttention(phase, *sizes, *formats, _named(pool)) for phase in ("decode", "prefill")}
    *down, out = projections(both["decode"], hidden, mla.q_lora_rank, dtype)
    names = ("qkv_down_proj", "q_up_proj") if mla.q_lora_rank else ("kv_down_proj", "q_proj")
    for name, gemm in zip(names, down, strict=True):
        yield from projection(pool, name, "qkv", gemm.n, gemm.k)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    widths = (latent, mla.kv_lora_rank, latent * STORED_BYTES[cache_dtype(pool)])
    for phase, kernel in both.items():
        group = replace(kernel, heads=kernel.heads * mla.context_parts)
        yield from in_parts(Operator(f"{phase}_latent_attention", "attention", phase, 1, kernel), group, mla, widths)
    if mla.output_gate:
        values = mla.num_heads // tp * mla.v_head_dim
        yield from projection(pool, "output_gate_proj", "qkv", values, hidden)
        yield moving("output_gate", 6.0 * values)
    yield from projection(pool, "o_proj", "out", out.n, out.k)
