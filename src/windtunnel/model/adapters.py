"""LoRA adapters of a model: which products have one, and how large its two matrices are on a GPU."""

from typing import NamedTuple

from windtunnel.errors import InputError
from windtunnel.model.layers import MLP, Attention, Layer
from windtunnel.model.spec import Model


class Adapted(NamedTuple):
    """Products that share an input and have adapters, on one GPU (create_lora_weights in vllm/lora/layers)."""

    name: str
    n: int
    """Outputs of all of them."""
    k: int
    """Inputs."""
    slices: int
    """How many there are: each has its own matrix from the input to the rank."""


def adapted(layer: Layer, hidden: int, tensor_parallel_size: int) -> tuple[Adapted, ...]:
    """Those of a layer: inputs are whole where outputs are divided, and outputs where inputs are."""
    tp, attention, mlp = tensor_parallel_size, layer.attention, layer.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    heads, kv_heads = attention.num_heads // tp, attention.kv_heads_per_gpu(tp)
    keys = kv_heads * (attention.head_dim + attention.v_head_dim)
    inner, up = mlp.intermediate_size // tp, 2 if mlp.gated else 1
    return (
        Adapted("qkv", heads * attention.head_dim + keys, hidden, 3),
        Adapted("o", hidden, heads * attention.v_head_dim, 1),
        Adapted("gate_up", up * inner, hidden, up),
        Adapted("down", hidden, inner, 1),
    )


def require_adaptable(model: Model) -> None:
    """Raise InputError for a model whose adapters are not simulated."""
    if not all(isinstance(layer.attention, Attention) and isinstance(layer.mlp, MLP) for layer in model.layer_counts):
        raise InputError(
            f"max_loras: adapters of dense networks and plain attention are simulated, not those of {model.name}; "
            "leave it out"
        )


def adapter_bytes(model: Model, rank: int, tensor_parallel_size: int, element_bytes: int) -> int:
    """Bytes of one adapter on one GPU."""
    return sum(
        count * element_bytes * rank * (each.slices * each.k + each.n)
        for count, layer in model.layers
        for each in adapted(layer, model.hidden_size, tensor_parallel_size)
    )
