"""Operators: what one GPU computes in a step, from a model and how it is sharded, and what engines fuse."""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace

from windtunnel.deployment import Engine, Pool, preset
from windtunnel.deployment.engine import AUTO, GATHERED, HIGH_THROUGHPUT, LOW_LATENCY, ONE_KERNEL
from windtunnel.deployment.spread_prompts import divides_head
from windtunnel.hardware import GIB
from windtunnel.model import MLP, Layer, MoE
from windtunnel.model.adapters import adapted
from windtunnel.model.draft_heads import FUSED, WIDTH, draft_head
from windtunnel.model.spec import VOCAB_PADDING
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.kinds.adapters import Adapters
from windtunnel.perf.kinds.collective import FASTER, Collective, InSymmetricMemory
from windtunnel.perf.kinds.elementwise import Elementwise, FromHost
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.exchanging_experts import ExchangingExperts
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.hyper_connection import HyperConnection
from windtunnel.perf.kinds.of_all_ranks import DividedHead, OfAllRanks
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.tabulate.mixers import mixer_operators
from windtunnel.perf.tabulate.operator import (
    Operator,
    all_reduce,
    in_parts_from,
    moving,
    product,
    projection,
    together,
    weight_format,
)
from windtunnel.perf.tabulate.spread_prompts import SUM, SUM_OF_DECODES, in_parts_of_prompts, sums_decodes

SAMPLER_BYTES = 34.0
"""Bytes per logit: to float32 (2 read, 4 written), temperature (8), softmax (8), exponential noise (4) and division
with arg max (8), as vLLM's sampler does without top-k and top-p."""

SAMPLER_LAUNCHES = 10

LAYOUTS = {LOW_LATENCY: "masked", HIGH_THROUGHPUT: "contiguous", AUTO: "auto"}
"""How the tokens of experts lie in memory, by what brought them."""

IN_8_BITS = ("fp8", "fp8_block")
"""Formats of experts whose tokens are cast before they are sent."""

OF_INPUT = ("qkv_proj", "qkv_down_proj", "kv_down_proj", "q_proj")
"""Projections of what a layer takes."""

NORMS = ("norm", "final_norm")
"""Of a hidden state that GPUs have summed."""

FUSED_SINCE = 90
"""Compute capability × 10 from which engines add, normalise and reduce in one kernel (FlashInfer's all-reduce fusion in
vLLM and SGLang, TensorRT-LLM's own)."""


MANY_SHARES = 8
"""GPUs that share an expert, from which on old releases of vLLM choose another kernel for it."""


def operators(pool: Pool, corrections: Corrections = ALL) -> tuple[Operator, ...]:
    """Every operator of a step of one rank, equal ones of all layers together, in the order of their first use."""
    found = in_parts_of_prompts(pool, fused(pool, corrections, _step(pool)))
    return together((*found, *_draft_head(pool, corrections)))


def asked_of(predictor: Predictor, found: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators with the kernels that a predictor wants to be asked for."""
    return tuple(replace(op, kernel=predictor.own(op.name, op.kernel)) for op in found)


def expert_layer_operators(pool: Pool, corrections: Corrections = ALL) -> tuple[Operator, ...]:
    """Those of the layers that have experts."""
    layers = ((count, layer) for count, layer in pool.model.layers if isinstance(layer.mlp, MoE))
    of_each = (replace(op, count=op.count * count) for count, layer in layers for op in _layer(pool, layer))
    return together(fused(pool, corrections, of_each))


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
        if model.predictions:
            yield from _other_states(pool, "altup_begin")
    for count, layer in model.layers:
        for operator in _layer(pool, layer):
            yield replace(operator, count=operator.count * count)
    if pool.engine.cpu_offload_gb:
        yield _from_host(pool)
    if model.samples:
        if streams:  # mixed into one
            yield moving("streams_end", 2.0 * (streams + 1) * hidden)
        if model.predictions:
            yield from _other_states(pool, "altup_end")
            yield moving("altup_mean", 2.0 * (model.predictions + 1) * hidden)
        yield from _head(pool, vocabulary)


def _draft_head(pool: Pool, corrections: Corrections) -> Iterator[Operator]:
    """A head that drafts, where there is one: its layer's projections take two rows side by side, the first of which is
    a product of three hidden states of the model."""
    name = pool.engine.speculative_model
    if name is None or not pool.model.samples:
        return
    head, alone = draft_head(pool.model, name), copy(pool)
    hidden = head.hidden_size
    engine = replace(pool.engine, speculative_model=None, shared_dense=False, max_loras=0)
    for field, value in (("model", head.as_model(pool.model)), ("engine", engine)):
        object.__setattr__(alone, field, value)
    yield Operator("draft_fc", "gemm", "tokens", 1, Gemm(hidden, FUSED * hidden), passes="first")
    for operator in fused(alone, corrections, _step(alone)):
        kernel = operator.kernel
        if isinstance(kernel, Gemm) and operator.name in OF_INPUT and kernel.k == hidden:
            kernel = replace(kernel, k=WIDTH * hidden)
        yield replace(operator, name=f"draft_{operator.name}", kernel=kernel, passes="every")


def _from_host(pool: Pool) -> Operator:
    """Weights that are not on the GPU. vLLM's kernels read them where they lie, and so no expert that nobody chose
    (UVAOffloadConfig in vllm/config/offload.py of 0.33); SGLang copies all (srt/utils/offloader.py of 0.5.23)."""
    engine, model = pool.engine, pool.model
    parts = model.gpu_parameters(engine.tensor_parallel_size, engine.expert_ranks, engine.enable_expert_parallel)
    sizes = {part: count * model.bytes_per_weight(part) for part, count in parts.items()}
    moved = min(engine.cpu_offload_gb * GIB, sum(sizes.values()))
    share = sizes["experts"] / sum(sizes.values()) if engine.backend == "vllm" else 0.0
    chances = [layer.mlp.top_k / layer.mlp.num_experts for _, layer in model.layers if isinstance(layer.mlp, MoE)]
    chance = 1.0 - (1.0 - max(chances, default=0.0)) ** (engine.data_parallel_size if pool.lockstep else 1)
    return Operator("weights_from_host", "other", "tokens", 1, FromHost((1.0 - share) * moved, share * moved, chance))


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


def _other_states(pool: Pool, name: str) -> Iterator[Operator]:
    """Alternating updates: every state but one is a projection of what it begins as, or of what it ends as, scaled to
    the size of that one (Gemma3nTextModel in vllm/model_executor/models/gemma3n.py, on all tokens at both ends)."""
    tp, hidden, others = pool.engine.tensor_parallel_size, pool.model.hidden_size, pool.model.predictions - 1
    yield Operator(f"{name}_proj", "gemm", "tokens", others, product(pool, "router", hidden // tp, hidden))
    if tp > 1:
        yield Operator(f"{name}_all_gather", "communication", "tokens", others, Collective("all_gather", tp, hidden))
    yield replace(moving(f"{name}_scale", 6.0 * hidden, launches=2), count=others)


def _head(pool: Pool, vocabulary: int) -> Iterator[Operator]:
    """Final norm, output head and sampling."""
    model, tp = pool.model, pool.engine.tensor_parallel_size
    hidden, width = model.hidden_size, model.embedding_size
    yield moving("final_norm", 8.0 * hidden)
    if width != hidden:
        yield Operator("head_projection", "gemm", "sequences", 1, Gemm(width, hidden))
    of_drafts = pool.engine.shared_head and pool.engine.backend == "trtllm"
    ranks = pool.engine.data_parallel_size if pool.engine.shared_head and not of_drafts else 1
    copies = pool.engine.prefill_context_parallel_size if divides_head(pool.engine) else 1
    gpus = tp * ranks * copies
    if ranks > 1:  # every GPU has a slice, for the requests of all
        gather = Collective("all_gather", gpus, width * ranks, graph=False)
        yield Operator("states_all_gather", "communication", "sequences", 1, gather)
    if ranks * copies > 1:
        vocabulary = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING // gpus
    head = product(pool, "lm_head", vocabulary, width)
    drafting = _head_of_drafts(pool, head) if of_drafts else None
    yield Operator("lm_head", "gemm", "sequences", 1, OfAllRanks(head, ranks) if ranks > 1 else head, drafting)
    if gpus > 1:
        gather = Collective("all_gather", gpus, vocabulary * gpus * ranks, graph=False)
        yield Operator("logits_all_gather", "communication", "sequences", 1, gather)
    sampler = Elementwise(SAMPLER_BYTES * model.vocab_size, SAMPLER_LAUNCHES, graph=False)
    yield Operator("sampling", "other", "sequences", 1, sampler)


def _head_of_drafts(pool: Pool, head: Gemm) -> DividedHead:
    """The GPUs of a node divide it where they are nearer to 256 over a rank's requests than 1 is (TensorRT-LLM's
    ``create_lm_head_tp_mapping``): each has a slice for the requests of all, whose states are gathered."""
    gpus = min(pool.device.gpus_per_node, pool.engine.data_parallel_size)
    most = 256 // ((1 + gpus) // 2 + 1)
    gather = Collective("all_gather", gpus, head.k * gpus) if gpus > 1 else None
    return DividedHead(head, OfAllRanks(replace(head, n=-(-head.n // gpus)), gpus), gather, most)


def _layer(pool: Pool, layer: Layer) -> Iterator[Operator]:
    hidden = pool.model.hidden_size
    if layer.streams:
        yield from _hyper_connections(layer, hidden)
    if layer.predictions:
        yield from _alternating_updates(layer, hidden)
    for _ in range(0 if layer.streams else layer.norms):  # each adds the residual: two rows read, two written
        blocks = layer.residual_blocks
        yield moving("norm" if blocks is None else "attention_residual", (8.0 + 2.0 * (blocks or 0)) * hidden)
    if layer.residual_rank:
        yield from _learned_residual(pool, layer)
    if layer.attention:
        yield from mixer_operators(layer.attention, pool)
        yield from all_reduce(pool, "attention_all_reduce", hidden)
    if pool.engine.max_loras:
        sizes = (pool.engine.max_lora_rank, pool.engine.max_loras)
        for each in adapted(layer, hidden, pool.engine.tensor_parallel_size):
            kernel = Adapters(each.n, each.k, each.slices, *sizes)
            yield Operator(f"{each.name}_adapters", "other", "tokens", 1, kernel)
    dense = layer.beside or layer.mlp
    if isinstance(dense, MLP):
        names = ("gate_up_proj" if dense.gated else "up_proj", "down_proj")
        yield from (_divided if pool.engine.shared_dense else _network)(pool, dense, "mlp", names)
        yield from all_reduce(pool, "mlp_all_reduce", hidden)
    if isinstance(layer.mlp, MoE):
        yield from _experts(pool, layer.mlp)
    if layer.beside:
        yield moving("networks_add", 6.0 * hidden)
    if layer.input_size:
        yield from projection(pool, "layer_input_gate", "mlp", layer.input_size, hidden)
        yield moving("layer_input", 6.0 * layer.input_size)
        yield from projection(pool, "layer_input_proj", "mlp", hidden, layer.input_size)
        yield moving("layer_input_add", (4.0 + 6.0 * max(layer.predictions - 1, 1)) * hidden, launches=2)


def _hyper_connections(layer: Layer, hidden: int) -> Iterator[Operator]:
    """Before and after attention and network, and the norms of what they read (one row read, one written)."""
    for side in ("pre", "post"):
        kernel = HyperConnection(side, hidden, layer.streams)
        yield Operator(f"hyper_connection_{side}", "other", "tokens", 2, kernel)
    yield replace(moving("norm", 4.0 * hidden), count=layer.norms)


def _alternating_updates(layer: Layer, hidden: int) -> Iterator[Operator]:
    """Before attention all states are predicted, after the network all are corrected: a norm, a router and its
    coefficients, both times (Gemma3nAltUp in vllm/model_executor/models/gemma3n.py). Predictions are a small product
    for each number of the hidden state, and a sum; corrections one kernel."""
    states = layer.predictions
    for name, outputs in (("predict", states**2), ("correct", states)):
        yield moving("altup_norm", 4.0 * hidden)
        yield Operator("altup_router", "gemm", "tokens", 1, Gemm(states, hidden))
        yield moving("altup_tanh", 4.0 * states)
        yield Operator("altup_coefficients", "gemm", "tokens", 1, Gemm(outputs, states))
        if name == "predict":
            yield moving("altup_predict", 10.0 * states * hidden, launches=2)
        else:
            yield moving("altup_correct", (4.0 * states + 6.0) * hidden)


def _learned_residual(pool: Pool, layer: Layer) -> Iterator[Operator]:
    """To its rank and back, a norm, and the sum (Gemma3nLaurelBlock)."""
    hidden, rank = pool.model.hidden_size, layer.residual_rank // pool.engine.tensor_parallel_size
    yield Operator("laurel_left", "gemm", "tokens", 1, Gemm(rank, hidden))
    yield Operator("laurel_right", "gemm", "tokens", 1, Gemm(hidden, rank))
    yield from all_reduce(pool, "laurel_all_reduce", hidden)
    yield moving("laurel_add", 8.0 * hidden)


def _pads(pool: Pool, kernel: Experts) -> bool:
    """Whether the room for every expert is multiplied (``EnginePreset.pads_experts``); vLLM leaves it where eight GPUs
    or more share an expert (``get_fp8_moe_backend`` of 0.12)."""
    chosen = preset(pool.engine.preset).pads_experts and pool.engine.moe_backend == "auto" and not kernel.layout
    return chosen and pool.device.is_hopper and kernel.dtype == "fp8_block" and kernel.tp < MANY_SHARES


def _loads_are_even(engine: Engine) -> bool:
    """Whether a load balancer chooses which GPU has which expert, and copies of those that are asked for most."""
    return engine.enable_expert_parallel and (engine.enable_eplb or engine.num_redundant_experts > 0)


def _experts(pool: Pool, moe: MoE) -> Iterator[Operator]:
    engine, hidden = pool.engine, pool.model.hidden_size
    tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.expert_ranks
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
        layout=LAYOUTS.get(engine.all2all_backend, ""),
        backend="" if engine.moe_backend == "auto" else engine.moe_backend,
        slots=moe.num_experts + engine.num_redundant_experts if _loads_are_even(engine) else 0,
    )
    kernel = replace(kernel, padded=_pads(pool, kernel))
    there, back = there_and_back(pool, moe, kernel) if engine.expert_ranks > 1 else ((), ())
    if engine.all2all_backend == ONE_KERNEL:
        (dispatch,), (combine,) = ([each.kernel for each in side] for side in (there, back))
        assert isinstance(dispatch, Exchange) and isinstance(combine, Exchange)
        yield Operator("experts_with_exchange", "experts", phase, 1, ExchangingExperts(kernel, dispatch, combine))
    else:
        yield from (*there, Operator("experts", "experts", phase, 1, kernel), *back)
    if moe.latent_norm:
        yield moving("latent_norm", 4.0 * width)
    if moe.latent_size:
        yield Operator("latent_up_proj", "gemm", "tokens", 1, Gemm(hidden, width))
    if moe.shared:
        yield from _network(pool, moe.shared, "shared_experts", ("shared_gate_up_proj", "shared_down_proj"))
        yield moving("shared_experts_add", 6.0 * hidden)
    if tp > 1:  # shares of a sum cannot be normalised: both sums are completed first (vLLM's LatentMoERunner)
        yield from all_reduce(pool, SUM, hidden + width * moe.latent_norm)
    if sums_decodes(pool):
        yield from all_reduce(pool, SUM_OF_DECODES, width, engine.prefill_context_parallel_size)


def _divided(pool: Pool, mlp: MLP, part: str, names: tuple[str, str]) -> Iterator[Operator]:
    """A network that all ranks divide: tokens of all are gathered, and the sums scattered."""
    ranks, hidden = pool.engine.data_parallel_size, pool.model.hidden_size
    yield _each("mlp_all_gather", "all_tokens", Collective("all_gather", ranks, hidden))
    for operator in _network(pool, replace(mlp, intermediate_size=mlp.intermediate_size // ranks), part, names):
        yield replace(operator, phase="all_tokens")
    yield _each("mlp_reduce_scatter", "all_tokens", Collective("reduce_scatter", ranks, hidden))


def _network(pool: Pool, mlp: MLP, part: str, names: tuple[str, str]) -> Iterator[Operator]:
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    inner = mlp.intermediate_size // tp
    up = 2 * inner if mlp.gated else inner
    yield from projection(pool, names[0], part, up, hidden)
    yield moving("shared_activation" if part == "shared_experts" else "activation", 2.0 * (up + inner))
    yield from projection(pool, names[1], part, hidden, inner)


def there_and_back(pool: Pool, moe: MoE, experts: Experts) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The operators before and after the experts of ranks in lockstep.

    With DeepEP or one-sided kernels a rank sends its own tokens, and their choices with them; with vLLM's default every
    rank sees the tokens of all.
    """
    engine, width = pool.engine, experts.hidden
    if engine.all2all_backend != GATHERED:
        tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.expert_ranks
        sizes = (width, moe.top_k, moe.num_experts, ranks, pool.device.gpus_per_domain, tp)
        mode = engine.all2all_backend.removeprefix("deepep_").removeprefix("flashinfer_nvlink_")
        sent = "fp8" if experts.dtype in IN_8_BITS and not experts.weight_only else "bfloat16"
        if mode == "one_sided" and experts.dtype == "nvfp4":
            sent = experts.dtype
        back = sent if engine.low_precision_combine else "bfloat16"
        if mode == ONE_KERNEL:  # one copy to each GPU, in 8 bits as the first product takes it
            mode, sent = "one_sided", "fp8"
        dispatch, combine = (
            Exchange("dispatch", mode, *sizes, dtype=sent),
            Exchange("combine", mode, *sizes, dtype=back),
        )
        return (_each("expert_dispatch", "tokens", dispatch),), (_each("expert_combine", "tokens", combine),)
    phase = "all_tokens" if pool.lockstep else "tokens"
    gather, scatter = (Collective(op, engine.expert_ranks, width) for op in ("all_gather", "reduce_scatter"))
    choices = Collective("all_gather", engine.expert_ranks, 4 * moe.top_k)  # 32-bit weights and indices
    there = (_each("expert_all_gather", phase, gather), _each("choice_all_gather", phase, choices))
    return there, (_each("expert_reduce_scatter", phase, scatter),)


def _each(name: str, phase: str, kernel: Collective | Exchange) -> Operator:
    return Operator(name, "communication", phase, 1, kernel)


def fused(pool: Pool, corrections: Corrections, operators: Iterable[Operator]) -> Iterator[Operator]:
    """The operators without the launches that this engine saves on this device."""
    reduces = corrections.fused_all_reduce and _fuses_all_reduce(pool)
    cast_with_norm, cast_with_attention = _fuses_casts(pool) if corrections.fused_quantization else (False, False)
    for operator in operators:
        kernel = operator.kernel
        if operator.name == "quantize_input" and cast_with_norm:
            continue
        if operator.name == "quantize_attention" and cast_with_attention:
            continue
        if operator.name == "choice_all_gather" and not corrections.rank_synchronisation:
            continue
        if isinstance(kernel, Elementwise) and operator.name in NORMS and (least := in_parts_from(pool)):
            shared = replace(kernel, ranks=pool.engine.tensor_parallel_size, shared_from=least)
            yield replace(operator, kernel=shared)
        elif isinstance(kernel, Elementwise) and operator.name == "norm" and reduces:
            yield replace(operator, kernel=replace(kernel, launches=0))
        elif operator.name.startswith("shared_") and corrections.shared_expert_overlap:
            yield replace(operator, kernel=kernel.beside_experts())
        elif isinstance(kernel, Collective) and _is_symmetric(pool, kernel):
            yield replace(operator, kernel=InSymmetricMemory(kernel))
        else:
            yield operator


def _is_symmetric(pool: Pool, kernel: Collective) -> bool:
    """Whether a collective is made in symmetric memory, and gains by it: sums have the fastest kernel that was measured
    as it is, which is no slower."""
    joined = pool.device.link == "nvlink" and kernel.gpus <= pool.device.gpus_per_domain
    return pool.engine.enable_symm_mem and joined and kernel.op in FASTER


def _fuses_all_reduce(pool: Pool) -> bool:
    """As told, else by the engine's default; users of data-centre Blackwell switch it on where it is not (vLLM's
    recipes)."""
    chosen = preset(pool.engine.preset).fuses_all_reduce or pool.device.is_blackwell_datacentre
    if pool.engine.fuse_allreduce_rms is not None:
        chosen = pool.engine.fuse_allreduce_rms
    linked = pool.device.sm_version >= FUSED_SINCE and pool.device.link == "nvlink"
    return chosen and linked and 1 < pool.engine.tensor_parallel_size <= pool.device.gpus_per_domain


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
