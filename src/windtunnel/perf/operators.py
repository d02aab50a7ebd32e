"""Operators: what one GPU computes in a step, from a model and how it is sharded."""

from collections.abc import Iterator
from dataclasses import replace

from windtunnel.deployment import Pool
from windtunnel.model import (
    MLA,
    MLP,
    Attention,
    BlockSparseAttention,
    KimiDeltaAttention,
    Layer,
    LinearAttention,
    MoE,
    StateSpace,
)
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.spec import VOCAB_PADDING
from windtunnel.perf import kernels
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.costs import RATES, STORED_BYTES
from windtunnel.perf.expert_exchange import LAYOUTS, there_and_back
from windtunnel.perf.fusion import Operator, fused, together
from windtunnel.perf.kernels import (
    Collective,
    Convolution,
    Elementwise,
    Experts,
    Gemm,
    LatentAttention,
    Quantize,
    Recurrence,
    Scan,
    SparseAttention,
)
from windtunnel.perf.latent_table import projections

SAMPLER_BYTES = 34.0
"""Bytes per logit: to float32 (2 read, 4 written), temperature (8), softmax (8), exponential noise (4) and division
with arg max (8), as vLLM's sampler does without top-k and top-p."""

SAMPLER_LAUNCHES = 10


def operators(pool: Pool, causes: Causes = ALL) -> tuple[Operator, ...]:
    """Every operator of a step of one rank, equal ones of all layers together, in the order of their first use."""
    return together(fused(pool, causes, _step(pool)))


def expert_layer_operators(pool: Pool, causes: Causes = ALL) -> tuple[Operator, ...]:
    """The same of those layers alone that have experts."""
    layers = ((count, layer) for count, layer in pool.model.layers if isinstance(layer.mlp, MoE))
    of_each = (replace(op, count=op.count * count) for count, layer in layers for op in _layer(pool, layer))
    return together(fused(pool, causes, of_each))


def _step(pool: Pool) -> Iterator[Operator]:
    model, tp = pool.model, pool.engine.tensor_parallel_size
    hidden, width = model.hidden_size, model.embedding_size
    vocabulary = model.vocab_size if tp == 1 else -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING // tp
    if model.embeds:
        yield _other("embedding", 4.0 * width)
        yield from _reduce(pool, "embedding_all_reduce", width)
        if width != hidden:
            yield Operator("embedding_projection", "gemm", "tokens", 1, Gemm(hidden, width))
    for count, layer in model.layers:
        for operator in _layer(pool, layer):
            yield replace(operator, count=operator.count * count)
    if model.samples:
        yield from _head(pool, vocabulary)


def _head(pool: Pool, vocabulary: int) -> Iterator[Operator]:
    """Final norm, output head and sampling."""
    model, tp = pool.model, pool.engine.tensor_parallel_size
    hidden, width = model.hidden_size, model.embedding_size
    yield _other("final_norm", 8.0 * hidden)
    if width != hidden:
        yield Operator("head_projection", "gemm", "sequences", 1, Gemm(width, hidden))
    yield Operator("lm_head", "gemm", "sequences", 1, _gemm(pool, "lm_head", vocabulary, width))
    if tp > 1:
        gather = Collective("all_gather", tp, vocabulary * tp, graph=False)
        yield Operator("logits_all_gather", "communication", "sequences", 1, gather)
    sampler = Elementwise(SAMPLER_BYTES * model.vocab_size, SAMPLER_LAUNCHES, graph=False)
    yield Operator("sampling", "other", "sequences", 1, sampler)


def _layer(pool: Pool, layer: Layer) -> Iterator[Operator]:
    hidden = pool.model.hidden_size
    for _ in range(layer.norms):  # each adds the residual: two rows read, two written
        blocks = layer.residual_blocks
        yield _other("norm" if blocks is None else "attention_residual", (8.0 + 2.0 * (blocks or 0)) * hidden)
    if layer.attention:
        yield from _mixer(pool, layer.attention)
        yield from _reduce(pool, "attention_all_reduce", hidden)
    if isinstance(layer.mlp, MoE):
        yield from _experts(pool, layer.mlp)
    elif layer.mlp:
        yield from _network(pool, layer.mlp, "mlp", ("gate_up_proj" if layer.mlp.gated else "up_proj", "down_proj"))
        yield from _reduce(pool, "mlp_all_reduce", hidden)


def _mixer(pool: Pool, mixer: Attention | MLA | LinearAttention | StateSpace) -> Iterator[Operator]:
    if isinstance(mixer, KimiDeltaAttention):
        yield from _kimi_delta(pool, mixer)
    elif isinstance(mixer, LinearAttention):
        yield from _linear_attention(pool, mixer)
    elif isinstance(mixer, StateSpace):
        yield from _state_space(pool, mixer)
    elif isinstance(mixer, MLA):
        yield from (_sparse if mixer.index_heads else _latent)(pool, mixer)
    elif isinstance(mixer, BlockSparseAttention):
        yield from _block_sparse(pool, mixer)
    else:
        yield from _attention(pool, mixer)


def _attention(pool: Pool, attention: Attention) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    heads, kv_heads = attention.num_heads // tp, attention.kv_heads_per_gpu(tp)
    keys, values = kv_heads * attention.head_dim, kv_heads * attention.v_head_dim
    queries = heads * attention.head_dim
    kv_dtype = _kv_dtype(pool)
    gate = queries if attention.output_gate else 0
    yield from _linear(pool, "qkv_proj", "qkv", queries + gate + keys + values, hidden)
    if attention.qk_norm:
        yield _other("qk_norm", 4.0 * (queries + keys), launches=1 if attention.qk_norm_across_heads else 2)
        if attention.qk_norm_across_heads:
            yield from _reduce(pool, "qk_norm_all_reduce", 4)
    if attention.rotary and not pool.model.learned_positions:
        yield _other("rotary_embedding", 4.0 * (queries + keys))
    yield _other("kv_cache_write", (keys + values) * (2.0 + STORED_BYTES[kv_dtype]))
    for phase in ("decode", "prefill"):
        kernel = kernels.Attention(
            phase, heads, kv_heads, attention.head_dim, attention.v_head_dim, attention.window, kv_dtype
        )
        yield Operator(f"{phase}_attention", "attention", phase, 1, kernel)
    if gate:
        yield _other("output_gate", 6.0 * gate)
    yield from _linear(pool, "o_proj", "out", hidden, heads * attention.v_head_dim)


def _linear_attention(pool: Pool, linear: LinearAttention) -> Iterator[Operator]:
    """Projections of queries, keys, values and gate, and of two numbers per head; recurrence; gated norm; output."""
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    heads = (max(1, linear.num_key_heads // tp), linear.num_value_heads // tp)
    values = heads[1] * linear.value_head_dim
    yield from _linear(pool, "qkvz_proj", "qkv", linear.channels // tp + values, hidden)
    yield Operator("ba_proj", "gemm", "tokens", 1, Gemm(2 * heads[1], hidden))
    sizes = (*heads, linear.key_head_dim, linear.value_head_dim, linear.conv_kernel, linear.state_bytes_per_element)
    for phase in ("decode", "prefill"):
        yield Operator(f"{phase}_recurrence", "attention", phase, 1, Recurrence(phase, *sizes))
    yield _other("gated_norm", 6.0 * values)
    yield from _linear(pool, "o_proj", "out", hidden, values)


def _state_space(pool: Pool, mixer: StateSpace) -> Iterator[Operator]:
    """Projection in, convolution, scan, gated norm, projection out. The norm is over the heads of a group: where groups
    are repeated, GPUs exchange its sums of squares."""
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    inner, state_bytes = mixer.inner(tp), mixer.state_bytes_per_element or DTYPE_BYTES[pool.model.dtype]
    sizes = (mixer.num_heads // tp, mixer.head_dim, mixer.state_dim, mixer.groups_per_gpu(tp), mixer.chunk_size)
    yield from _linear(pool, "in_proj", "qkv", mixer.projected(tp), hidden)
    for phase in ("decode", "prefill"):
        convolution = Convolution(phase, mixer.channels(tp), mixer.conv_kernel)
        yield Operator(f"{phase}_convolution", "attention", phase, 1, convolution)
        yield Operator(f"{phase}_scan", "attention", phase, 1, Scan(phase, *sizes, state_bytes))
    yield _other("gated_norm", 6.0 * inner)
    if tp > mixer.num_groups:
        yield from _reduce(pool, "gated_norm_all_reduce", 2)  # one 32-bit number
    yield from _linear(pool, "out_proj", "out", hidden, inner)


def _kimi_delta(pool: Pool, linear: KimiDeltaAttention) -> Iterator[Operator]:
    """One projection of queries, keys, values, a number per head and what low-rank gates start from; the ends of those;
    recurrence; gated norm; output (vllm/models/kimi_k3/nvidia/kda.py)."""
    tp, hidden, rank = pool.engine.tensor_parallel_size, pool.model.hidden_size, linear.key_head_dim
    heads = linear.num_value_heads // tp
    values = heads * linear.value_head_dim
    gate = values if linear.full_rank_gate else rank
    yield from _linear(pool, "qkvg_proj", "qkv", linear.channels // tp + gate + rank + heads, hidden)
    yield from _linear(pool, "decay_proj", "qkv", values, rank)
    if not linear.full_rank_gate:
        yield from _linear(pool, "output_gate_proj", "qkv", values, rank)
    sizes = (heads, heads, rank, linear.value_head_dim, linear.conv_kernel, linear.state_bytes_per_element)
    for phase in ("decode", "prefill"):
        yield Operator(f"{phase}_recurrence", "attention", phase, 1, Recurrence(phase, *sizes, by_channel=True))
    yield _other("gated_norm", 6.0 * values)
    yield from _linear(pool, "o_proj", "out", hidden, values)


def _sparse(pool: Pool, mla: MLA) -> Iterator[Operator]:
    """Sparse attention is measured, and priced, as a module with its projections."""
    dtype, _ = _format(pool, "qkv")
    sizes = (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
    index = (mla.index_heads, mla.index_head_dim, mla.index_top_k)
    for phase in ("decode", "prefill"):
        kernel = SparseAttention(
            phase, pool.model.hidden_size, mla.num_heads // pool.engine.tensor_parallel_size, *sizes, *index
        )
        kernel = replace(kernel, kv_dtype=_kv_dtype(pool), dtype=dtype)
        yield Operator(f"{phase}_sparse_attention", "attention", phase, 1, kernel)


def _block_sparse(pool: Pool, attention: BlockSparseAttention) -> Iterator[Operator]:
    """The same for block-sparse attention, with norms, rotary embedding and cache write."""
    tp, (stored, widened) = pool.engine.tensor_parallel_size, _format(pool, "qkv")
    dtype = "bfloat16" if widened else stored
    heads = (attention.num_heads // tp, attention.kv_heads_per_gpu(tp), attention.head_dim, attention.v_head_dim)
    index = (attention.index_heads_per_gpu(tp), attention.index_head_dim, attention.attended)
    for phase in ("decode", "prefill"):
        kernel = kernels.BlockSparseAttention(phase, pool.model.hidden_size, *heads, *index, _kv_dtype(pool), dtype)
        yield Operator(f"{phase}_sparse_attention", "attention", phase, 1, kernel)


def _latent(pool: Pool, mla: MLA) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    dtype, _ = _format(pool, "qkv")
    sizes = (mla.num_heads // tp, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
    both = {
        phase: LatentAttention(phase, *sizes, _kv_dtype(pool), "bfloat16" if dtype == "bfloat16" else "fp8_block")
        for phase in ("decode", "prefill")
    }
    *down, out = projections(both["decode"], hidden, mla.q_lora_rank, dtype)
    names = ("qkv_down_proj", "q_up_proj") if mla.q_lora_rank else ("kv_down_proj", "q_proj")
    for name, gemm in zip(names, down, strict=True):
        yield from _linear(pool, name, "qkv", gemm.n, gemm.k)
    for phase, kernel in both.items():
        yield Operator(f"{phase}_latent_attention", "attention", phase, 1, kernel)
    if mla.output_gate:
        values = mla.num_heads // tp * mla.v_head_dim
        yield from _linear(pool, "output_gate_proj", "qkv", values, hidden)
        yield _other("output_gate", 6.0 * values)
    yield from _linear(pool, "o_proj", "out", out.n, out.k)


def _experts(pool: Pool, moe: MoE) -> Iterator[Operator]:
    engine, hidden = pool.engine, pool.model.hidden_size
    tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.data_parallel_size
    phase = "all_tokens" if pool.lockstep else "tokens"
    width = moe.latent_size or hidden
    yield Operator("router", "gemm", "tokens", 1, Gemm(moe.num_experts, hidden))
    yield _other("expert_choice", 6.0 * moe.num_experts)
    if moe.latent_size:  # whole on every GPU, before tokens are exchanged
        yield Operator("latent_down_proj", "gemm", "tokens", 1, Gemm(width, hidden))
    dtype, weight_only = _format(pool, "experts")
    kernel = Experts(
        width,
        moe.intermediate_size,
        moe.top_k,
        moe.num_experts,
        tp=1 if engine.enable_expert_parallel else ranks,
        ep=ranks if engine.enable_expert_parallel else 1,
        gated=moe.gated,
        dtype=dtype,
        weight_only=weight_only,
        layout=LAYOUTS[engine.all2all_backend],
    )
    there, back = there_and_back(pool, moe, kernel) if pool.lockstep else ((), ())
    yield from (*there, Operator("experts", "experts", phase, 1, kernel), *back)
    if moe.latent_norm:
        yield _other("latent_norm", 4.0 * width)
    if moe.latent_size:
        yield Operator("latent_up_proj", "gemm", "tokens", 1, Gemm(hidden, width))
    if moe.shared:
        yield from _network(pool, moe.shared, "shared_experts", ("shared_gate_up_proj", "shared_down_proj"))
        yield _other("shared_experts_add", 6.0 * hidden)
    if tp > 1:  # shares of a sum cannot be normalised: both sums are completed first (vLLM's LatentMoERunner)
        yield from _reduce(pool, "expert_all_reduce", hidden + width * moe.latent_norm)


def _network(pool: Pool, mlp: MLP, part: str, names: tuple[str, str]) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    inner = mlp.intermediate_size // tp
    up = 2 * inner if mlp.gated else inner
    yield from _linear(pool, names[0], part, up, hidden)
    yield _other("shared_activation" if part == "shared_experts" else "activation", 2.0 * (up + inner))
    yield from _linear(pool, names[1], part, hidden, inner)


def _linear(pool: Pool, name: str, part: str, n: int, k: int) -> Iterator[Operator]:
    """A projection, with the quantisation of its input where it multiplies in 8 or 4 bits."""
    gemm = _gemm(pool, part, n, k)
    if not gemm.weight_only and gemm.dtype in RATES and not name.startswith("shared_gate"):
        cast = "quantize_attention" if name == "o_proj" else "quantize_input"  # shared experts take the experts' cast
        yield Operator(cast, "other", "tokens", 1, Quantize(k))
    yield Operator(name, "gemm", "tokens", 1, gemm)


def _gemm(pool: Pool, part: str, n: int, k: int) -> Gemm:
    dtype, weight_only = _format(pool, part)
    return Gemm(n, k, dtype, weight_only)


def _format(pool: Pool, part: str) -> tuple[str, bool]:
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


def _kv_dtype(pool: Pool) -> str:
    dtype = pool.model.resolve_kv_cache_dtype(pool.engine.kv_cache_dtype)
    return "fp8" if dtype.startswith("fp8") else "bfloat16" if dtype == "float16" else dtype


def _other(name: str, row_bytes: float, launches: int = 1) -> Operator:
    return Operator(name, "other", "tokens", 1, Elementwise(row_bytes, launches))


def _reduce(pool: Pool, name: str, row: int) -> Iterator[Operator]:
    tp = pool.engine.tensor_parallel_size
    if tp > 1:
        yield Operator(name, "communication", "tokens", 1, Collective("all_reduce", tp, row))
