"""Operators: what one GPU computes in a step, from a model and how it is sharded."""

from collections.abc import Iterator
from dataclasses import replace

from windtunnel.deployment import Pool
from windtunnel.model import MLP, Layer, MoE
from windtunnel.model.spec import VOCAB_PADDING
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.common_operators import all_reduce, moving, product, projection, weight_format
from windtunnel.perf.expert_exchange import LAYOUTS, there_and_back
from windtunnel.perf.fusion import Operator, fused, together
from windtunnel.perf.kernels import Collective, Elementwise, Experts, Gemm, HyperConnection
from windtunnel.perf.mixers import mixer_operators

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
    streams = model.streams
    vocabulary = model.vocab_size if tp == 1 else -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING // tp
    if model.embeds:
        yield moving("embedding", 4.0 * width)
        yield from all_reduce(pool, "embedding_all_reduce", width)
        if width != hidden:
            yield Operator("embedding_projection", "gemm", "tokens", 1, Gemm(hidden, width))
        if streams:  # each begins as the embedding
            yield moving("streams_begin", 2.0 * (1 + streams) * hidden)
        if model.layer_inputs:
            yield from _layer_inputs(pool)
    for count, layer in model.layers:
        for operator in _layer(pool, layer):
            yield replace(operator, count=operator.count * count)
    if model.samples:
        if streams:  # mixed into one
            yield moving("streams_end", 2.0 * (streams + 1) * hidden)
        yield from _head(pool, vocabulary)


def _layer_inputs(pool: Pool) -> Iterator[Operator]:
    """The tokens' embeddings for all layers: looked up, added to the normalised projection of the hidden state
    (Gemma4SelfDecoderLayers in vllm/model_executor/models/gemma4.py)."""
    tp, width = pool.engine.tensor_parallel_size, pool.model.layer_inputs
    yield moving("layer_embeddings", 4.0 * width)
    yield from all_reduce(pool, "layer_embeddings_all_reduce", width)
    yield from projection(pool, "layer_embeddings_proj", "mlp", width // tp, pool.model.hidden_size)
    if tp > 1:
        gather = Collective("all_gather", tp, width)
        yield Operator("layer_embeddings_all_gather", "communication", "tokens", 1, gather)
    yield moving("layer_embeddings_add", 10.0 * width, launches=2)


def _head(pool: Pool, vocabulary: int) -> Iterator[Operator]:
    """Final norm, output head and sampling."""
    model, tp = pool.model, pool.engine.tensor_parallel_size
    hidden, width = model.hidden_size, model.embedding_size
    yield moving("final_norm", 8.0 * hidden)
    if width != hidden:
        yield Operator("head_projection", "gemm", "sequences", 1, Gemm(width, hidden))
    yield Operator("lm_head", "gemm", "sequences", 1, product(pool, "lm_head", vocabulary, width))
    if tp > 1:
        gather = Collective("all_gather", tp, vocabulary * tp, graph=False)
        yield Operator("logits_all_gather", "communication", "sequences", 1, gather)
    sampler = Elementwise(SAMPLER_BYTES * model.vocab_size, SAMPLER_LAUNCHES, graph=False)
    yield Operator("sampling", "other", "sequences", 1, sampler)


def _layer(pool: Pool, layer: Layer) -> Iterator[Operator]:
    hidden = pool.model.hidden_size
    if layer.streams:
        yield from _hyper_connections(layer, hidden)
    for _ in range(0 if layer.streams else layer.norms):  # each adds the residual: two rows read, two written
        blocks = layer.residual_blocks
        yield moving("norm" if blocks is None else "attention_residual", (8.0 + 2.0 * (blocks or 0)) * hidden)
    if layer.attention:
        yield from mixer_operators(pool, layer.attention)
        yield from all_reduce(pool, "attention_all_reduce", hidden)
    dense = layer.beside or layer.mlp
    if isinstance(dense, MLP):
        yield from _network(pool, dense, "mlp", ("gate_up_proj" if dense.gated else "up_proj", "down_proj"))
        yield from all_reduce(pool, "mlp_all_reduce", hidden)
    if isinstance(layer.mlp, MoE):
        yield from _experts(pool, layer.mlp)
    if layer.beside:
        yield moving("networks_add", 6.0 * hidden)
    if layer.input_size:
        yield from projection(pool, "layer_input_gate", "mlp", layer.input_size, hidden)
        yield moving("layer_input", 6.0 * layer.input_size)
        yield from projection(pool, "layer_input_proj", "mlp", hidden, layer.input_size)
        yield moving("layer_input_add", 10.0 * hidden, launches=2)


def _hyper_connections(layer: Layer, hidden: int) -> Iterator[Operator]:
    """Before and after attention and network, and the norms of what they read (one row read, one written)."""
    for side in ("pre", "post"):
        kernel = HyperConnection(side, hidden, layer.streams)
        yield Operator(f"hyper_connection_{side}", "other", "tokens", 2, kernel)
    yield replace(moving("norm", 4.0 * hidden), count=layer.norms)


def _experts(pool: Pool, moe: MoE) -> Iterator[Operator]:
    engine, hidden = pool.engine, pool.model.hidden_size
    tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.data_parallel_size
    phase = "all_tokens" if pool.lockstep else "tokens"
    width = moe.latent_size or hidden
    yield Operator("router", "gemm", "tokens", 1, Gemm(moe.num_experts, hidden))
    yield moving("expert_choice", 6.0 * moe.num_experts)
    if moe.latent_size:  # whole on every GPU, before tokens are exchanged
        yield Operator("latent_down_proj", "gemm", "tokens", 1, Gemm(width, hidden))
    dtype, weight_only = weight_format(pool, "experts")
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
        yield moving("latent_norm", 4.0 * width)
    if moe.latent_size:
        yield Operator("latent_up_proj", "gemm", "tokens", 1, Gemm(hidden, width))
    if moe.shared:
        yield from _network(pool, moe.shared, "shared_experts", ("shared_gate_up_proj", "shared_down_proj"))
        yield moving("shared_experts_add", 6.0 * hidden)
    if tp > 1:  # shares of a sum cannot be normalised: both sums are completed first (vLLM's LatentMoERunner)
        yield from all_reduce(pool, "expert_all_reduce", hidden + width * moe.latent_norm)


def _network(pool: Pool, mlp: MLP, part: str, names: tuple[str, str]) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    inner = mlp.intermediate_size // tp
    up = 2 * inner if mlp.gated else inner
    yield from projection(pool, names[0], part, up, hidden)
    yield moving("shared_activation" if part == "shared_experts" else "activation", 2.0 * (up + inner))
    yield from projection(pool, names[1], part, hidden, inner)
