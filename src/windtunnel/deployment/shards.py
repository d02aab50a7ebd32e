"""Can a model be divided over these GPUs? The rules are vLLM's."""

from dataclasses import replace

from windtunnel.deployment.engine import Engine
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model import MLP, Attention, CompressedAttention, Model, MoE, StateSpace
from windtunnel.model.layers import Layer
from windtunnel.model.spec import VOCAB_PADDING

FP8_BLOCK = 128


def require_shardable(engine: Engine, model: Model, device: Device) -> None:
    """Raise InputError when heads, widths, experts or vocabulary cannot be divided as the engine asks."""
    tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.data_parallel_size
    if tp > device.gpus_per_domain:
        raise InputError(
            f"tensor_parallel_size={tp}: {device.gpus_per_domain} {device.name} GPUs share a {device.link} domain, "
            "and tensor parallelism beyond it is not simulated yet; use data_parallel_size or replicas"
        )
    if engine.enable_expert_parallel and not model.has_moe:
        raise InputError(f"enable_expert_parallel: {model.name} has no experts; leave it out")
    for _, layer in model.layers:
        _require_mixer(layer, tp, device, model)
        mlp, dense = layer.mlp, layer.beside or layer.mlp
        if isinstance(dense, MLP):
            _require_width("intermediate_size", dense.intermediate_size, tp, "mlp", model)
        if not isinstance(mlp, MoE):
            continue
        if not engine.enable_expert_parallel:
            _require_width("moe_intermediate_size", mlp.intermediate_size, ranks, "experts", model)
        elif ranks > mlp.num_experts:
            raise InputError(
                f"enable_expert_parallel over {ranks} GPUs: {model.name} has {mlp.num_experts} experts; use fewer GPUs"
            )
        if mlp.shared_intermediate_size:
            _require_width("shared experts' size", mlp.shared_intermediate_size, tp, "shared_experts", model)
    padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        raise InputError(f"tensor_parallel_size={tp}: must divide the padded vocabulary {padded} of {model.name}")


def possible_tensor_parallel_sizes(engine: Engine, model: Model, device: Device) -> list[int]:
    """Tensor parallel sizes that the model can be divided by on this device, ascending."""
    found = []
    for size in range(1, device.gpus_per_domain + 1):
        try:
            require_shardable(replace(engine, tensor_parallel_size=size), model, device)
        except InputError:
            continue
        found.append(size)
    return found


def _require_mixer(layer: Layer, tp: int, device: Device, model: Model) -> None:
    attention = layer.attention
    if attention is None:
        return
    _require_heads(attention.num_heads, tp, device.gpus_per_domain, model)
    if isinstance(attention, Attention):
        _require_or_repeat("KV heads", attention.num_kv_heads, tp, model)
    elif isinstance(attention, CompressedAttention) and attention.o_groups % tp:
        raise InputError(
            f"tensor_parallel_size={tp}: must divide the {attention.o_groups} groups of output heads of {model.name}"
        )
    elif isinstance(attention, StateSpace):
        _require_or_repeat("groups of state space heads", attention.num_groups, tp, model)


def _require_heads(heads: int, tp: int, most: int, model: Model) -> None:
    if heads % tp:
        sizes = ", ".join(str(size) for size in range(1, most + 1) if heads % size == 0)
        raise InputError(
            f"tensor_parallel_size={tp}: must divide the {heads} heads of {model.name}; use one of {sizes}"
        )


def _require_or_repeat(what: str, number: int, tp: int, model: Model) -> None:
    """What is divided among GPUs, or repeated where there are more of them."""
    if number % tp and tp % number:
        raise InputError(
            f"tensor_parallel_size={tp}: must divide, or be a multiple of, the {number} {what} of {model.name}"
        )


def _require_width(what: str, width: int, shards: int, part: str, model: Model) -> None:
    """A dense or expert layer of this width in ``shards`` slices; block-scaled fp8 needs slices of whole blocks."""
    if width % shards:
        raise InputError(f"{shards} GPUs: must divide {what}={width} of {model.name}; use another parallelism")
    slices = width // shards
    if shards > 1 and model.weight_dtype(part) == "fp8_block" and slices % FP8_BLOCK:
        raise InputError(
            f"{shards} GPUs: {what}={width} of {model.name} leaves slices of {slices}, but fp8 weights are scaled in "
            f"blocks of {FP8_BLOCK}; use fewer GPUs{', or expert parallelism' if part == 'experts' else ''}"
        )
