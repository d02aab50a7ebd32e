"""A model: its layers, how large it is (weights, KV cache, FLOPs) for a parallelism, and its stages of a pipeline."""

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_not_negative, require_positive, unknown
from windtunnel.model.layers import MLA, MLP, Attention, Layer, MoE
from windtunnel.model.mixer import STRETCH, Mixer
from windtunnel.model.quantization import DTYPE_BYTES, Quantization, kv_bytes
from windtunnel.model.vision import Vision

COMPONENTS = (
    "embedding",
    "layer_embeddings",
    "qkv",
    "out",
    "compressor",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norm",
    "lm_head",
)
PREDICTING = "multi-token prediction layers are left out without speculative decoding"
"""What a reader should know of a model that has them, unless something drafts."""
VOCAB_PADDING = 64  # vLLM pads vocabularies to a multiple of this before it shards them


TEXT_PART = "only the text part of this model is simulated, without its vision or audio encoder"
"""Note of a model that reads more than text."""
VISION_TIME = "of its vision encoder the time is simulated (--images-per-prompt), not the memory"
"""Where the sizes of what reads images are known."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, described by its sizes."""

    name: str
    architecture: str
    """The class name in ``architectures`` of config.json."""
    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[int, Layer], ...]
    """Runs of equal layers, (count, layer), from the first layer to the last."""
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    """Input embedding and LM head are one matrix."""
    dtype: str = "bfloat16"
    quantization: Quantization | None = None
    learned_positions: int = 0
    """Rows of a learned position table (OPT); 0: rotary positions."""
    embedding_size: int = 0
    """Width of the embedding where it is not ``hidden_size`` (a projection follows); 0 means ``hidden_size``."""
    layer_inputs: int = 0
    """Columns of the table that holds the tokens' embeddings for all layers (``Layer.input_size``)."""
    layer_input_rows: int = 0
    """Tokens that have a row in it; 0 means ``vocab_size`` and is replaced by it."""
    lm_head_bias: bool = False
    norm_bias: bool = False
    """Layer norms with weight and bias instead of RMS norms."""
    embeds: bool = True
    """It has the input embedding: a whole model, or the first stage of a pipeline."""
    samples: bool = True
    """It has final norm, LM head and sampling: a whole model, or the last stage."""
    has_encoder: bool = field(default=False, compare=False)
    """It reads images or sound as well, by its config.json."""
    vision: Vision | None = field(default=None, compare=False)
    """What turns images into embeddings, where its sizes are known."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What a reader of results should know, e.g. that only the text part of the model is simulated."""

    def __repr__(self) -> str:
        dtype = self.quantization.methods if self.quantization else self.dtype
        return f"Model({self.name}: {self.architecture}, {sum(count for count, _ in self.layers)} layers, {dtype})"

    def __post_init__(self) -> None:
        if self.embedding_size == 0:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        if self.layer_input_rows == 0:
            object.__setattr__(self, "layer_input_rows", self.vocab_size)
        require_positive(
            self.name,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            num_hidden_layers=sum(count for count, _ in self.layers),
        )
        require_not_negative(self.name, learned_positions=self.learned_positions, layer_inputs=self.layer_inputs)
        if self.dtype not in DTYPE_BYTES:
            raise unknown("dtype", self.dtype, DTYPE_BYTES)

    def __iter__(self) -> Iterator[Layer]:
        """Every layer in turn."""
        for count, layer in self.layers:
            for _ in range(count):
                yield layer

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(count for count, _ in self.layers)

    @property
    def layer_counts(self) -> dict[Layer, int]:
        """Each different layer and how often it occurs, wherever it stands."""
        counts: dict[Layer, int] = {}
        for count, layer in self.layers:
            counts[layer] = counts.get(layer, 0) + count
        return counts

    @property
    def _mixers(self) -> list[tuple[int, Mixer]]:
        return [(count, layer.attention) for count, layer in self.layers if layer.attention]

    @property
    def draft_layers(self) -> tuple[Layer, ...]:
        """What multi-token prediction drafts with: one more of the last layer; where a layer has one part only, the
        last attention and the last network (``mtp_hybrid_override_pattern`` of Nemotron-3)."""
        layers = [layer for _, layer in reversed(self.layers)]
        if layers[0].attention and layers[0].mlp:
            return (replace(layers[0], attention=layers[0].attention.drafting()),)
        attention = next((layer for layer in layers if isinstance(layer.attention, Attention)), None)
        network = next((layer for layer in layers if layer.mlp), None)
        return tuple(dict.fromkeys(layer for layer in (attention, network) if layer))

    @property
    def has_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return any(isinstance(layer.mlp, MoE) for _, layer in self.layers)

    @property
    def has_mla(self) -> bool:
        """Whether the cache holds latent vectors."""
        return any(isinstance(layer.attention, MLA) for _, layer in self.layers)

    @property
    def streams(self) -> int:
        """Residuals beside each other (hyper-connections), 0 where there is one."""
        return max(layer.streams for _, layer in self.layers)

    @property
    def predictions(self) -> int:
        """Hidden states beside each other (alternating updates), 0 where there is one."""
        return max(layer.predictions for _, layer in self.layers)

    @property
    def compresses(self) -> bool:
        """Whether cache entries stand for several tokens."""
        return any(mixer.held_spans for _, mixer in self._mixers)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, 0 for a dense model."""
        return max((layer.mlp.num_experts for _, layer in self.layers if isinstance(layer.mlp, MoE)), default=0)

    def with_dtype(self, dtype: str) -> "Model":
        """This model computed in another 16- or 32-bit dtype."""
        return replace(self, dtype=dtype)

    def with_state_bytes(self, size: int) -> "Model":
        """The same model whose recurrent layers keep numbers of this many bytes in their states."""
        layers = []
        for count, layer in self.layers:
            mixer = layer.attention
            if mixer is not None and hasattr(mixer, "state_bytes_per_element"):
                changed: Any = {"state_bytes_per_element": size}
                recurrent: Any = mixer
                layers.append((count, replace(layer, attention=replace(recurrent, **changed))))
            else:
                layers.append((count, layer))
        return replace(self, layers=tuple(layers))

    def with_index_dtype(self, dtype: str) -> "Model":
        """The same model whose sparse attention keeps the keys of its index so.

        Raises InputError where it cannot.
        """
        known = tuple(dict.fromkeys(each for _, mixer in self._mixers for each in mixer.index_dtypes))
        if dtype not in known:
            other = f"keeps its index in {' or '.join(known)}" if known else "has no index of sparse attention"
            raise InputError(f"indexer_kv_dtype={dtype!r}: {self.name} {other}; use 'auto'")
        layers = []
        for count, layer in self.layers:
            mixer: Any = layer.attention
            own = mixer is not None and dtype in mixer.index_dtypes
            layers.append((count, replace(layer, attention=replace(mixer, index_dtype=dtype)) if own else layer))
        return replace(self, layers=tuple(layers))

    def with_context_parts(self, parts: int, tensor_parallel_size: int) -> "Model":
        """The same model whose cached tokens are spread over this many GPUs that would repeat them.

        Raises InputError where they would not.
        """
        layers, most = [], 0
        for count, layer in self.layers:
            mixer: Any = layer.attention
            spread = mixer.spread_over(tensor_parallel_size) if mixer is not None else 0
            caches = mixer is not None and (mixer.kv_elements_per_token() or mixer.held_spans)
            if caches and (not spread or spread % parts):
                raise InputError(
                    f"decode_context_parallel_size={parts}: must divide the GPUs that hold the same KV of a token, "
                    f"{max(spread, 1)} for {self.name} with tensor_parallel_size={tensor_parallel_size}"
                )
            most = max(most, spread)
            layers.append((count, replace(layer, attention=replace(mixer, context_parts=parts)) if caches else layer))
        if not most:
            raise InputError(f"decode_context_parallel_size={parts}: {self.name} caches no tokens; leave it out")
        return replace(self, layers=tuple(layers))

    def with_quantization(self, quantization: Quantization | None) -> "Model":
        """This model with other stored weights."""
        return replace(self, quantization=quantization)

    def weight_dtype(self, part: str) -> str:
        """How the weights of a part (see ``quantization.PARTS``) are stored: a quantisation method or the dtype."""
        stored = self.quantization.of(part) if self.quantization else None
        return stored.method if stored else self.dtype

    def bytes_per_weight(self, part: str) -> float:
        """Bytes of one weight of a part, scales included."""
        stored = self.quantization.of(part) if self.quantization else None
        return stored.bytes_per_weight if stored else DTYPE_BYTES[self.dtype]

    # --- parameters -----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, int]:
        """Parameters by component, of COMPONENTS; those that the model has."""
        return {part: count for part, count in self.gpu_parameters().items() if count}

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied LM head counts once."""
        return sum(self.parameters().values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: all but the experts that it is not routed to."""
        idle = sum(
            count * (layer.mlp.num_experts - layer.mlp.top_k) * layer.mlp.expert_parameters(self.hidden_size)
            for count, layer in self.layers
            if isinstance(layer.mlp, MoE)
        )
        return self.num_parameters - idle

    def gpu_parameters(
        self, tensor_parallel_size: int = 1, data_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> dict[str, int]:
        """Parameters that the fullest GPU holds, by component, sharded as vLLM does.

        Heads, dense networks, shared experts and vocabulary are divided by tensor parallelism and repeated on every
        data-parallel rank. Routed experts are spread over all TP·DP ranks of a replica: whole experts with expert
        parallelism, else slices of every expert. Router and norms are on every GPU.
        """
        tp, ranks = tensor_parallel_size, tensor_parallel_size * data_parallel_size
        total = dict.fromkeys(COMPONENTS, 0)
        for count, layer in self.layers:
            for part, number in self._layer_parameters(layer, tp, ranks, enable_expert_parallel).items():
                total[part] += count * number
        vocabulary = padded(self.vocab_size, tp)
        projections = 0 if self.embedding_size == self.hidden_size else 2 * self.embedding_size * self.hidden_size
        total["embedding"] = vocabulary * self.embedding_size + self.learned_positions * self.hidden_size + projections
        if self.embeds:
            total["layer_embeddings"] = padded(self.layer_input_rows, tp) * self.layer_inputs
            total["mlp"] += self.hidden_size * self.layer_inputs // tp
        ends = self.embeds + self.samples  # of alternating updates: the others are made of one, and brought back
        total["router"] += ends * max(self.predictions - 1, 0) * self.hidden_size**2 // tp
        if not self.tie_word_embeddings:
            total["lm_head"] = vocabulary * self.embedding_size
        total["lm_head"] += vocabulary * self.lm_head_bias
        if not self.embeds and not (self.samples and self.tie_word_embeddings):
            total["embedding"] = 0
        if self.samples:
            total["norm"] += self.hidden_size * (2 if self.norm_bias else 1)
        else:
            total["lm_head"] = 0
        return total

    def _layer_parameters(self, layer: Layer, tp: int, ranks: int, expert_parallel: bool) -> dict[str, int]:
        hidden = self.hidden_size
        parts = layer.attention.parameters(hidden, tp) if layer.attention else {"norm": 0}
        mixing = 0 if layer.residual_blocks is None else 2  # a norm and a score for each mixed sum
        parts["norm"] += layer.norms * hidden * ((2 if self.norm_bias else 1) + mixing)
        parts["norm"] += layer.mixing_parameters(hidden)
        parts["mlp"] = 2 * hidden * layer.input_size  # to its width and back, on every GPU alike
        parts["norm"] += hidden * (layer.input_size > 0)
        mlp, dense = layer.mlp, layer.beside or layer.mlp
        parts["router"] = layer.update_parameters(hidden, tp)
        if isinstance(dense, MLP):
            parts["mlp"] += dense.parameters(hidden, tp)
        if not isinstance(mlp, MoE):
            return parts
        if expert_parallel:
            parts["experts"] = -(-mlp.num_experts // ranks) * mlp.expert_parameters(hidden)
        else:
            parts["experts"] = mlp.num_experts * mlp.expert_parameters(hidden, ranks)
        parts["router"] += mlp.router_parameters(hidden)
        if mlp.shared:
            parts["shared_experts"] = mlp.shared.parameters(hidden, tp) + hidden * mlp.shared_gate
        return parts

    # --- bytes ----------------------------------------------------------------------------------------------------

    def weight_bytes(
        self, tensor_parallel_size: int = 1, data_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> int:
        """Bytes of weights on the fullest GPU of a replica, quantisation scales included."""
        parts = self.gpu_parameters(tensor_parallel_size, data_parallel_size, enable_expert_parallel)
        return round(sum(count * self.bytes_per_weight(part) for part, count in parts.items()))

    def resolve_kv_cache_dtype(self, kv_cache_dtype: str = "auto") -> str:
        """What ``auto`` means: the dtype that the checkpoint asks for, else the model's own."""
        if kv_cache_dtype != "auto":
            kv_bytes(kv_cache_dtype)
            return kv_cache_dtype
        fixed = self.quantization.kv_cache_dtype if self.quantization else None
        return fixed or self.dtype

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes that one token takes in the KV cache of one GPU, all layers. A latent (MLA) cache is not divided, nor
        is a compressed one, whose bytes are the mean over a stretch of tokens."""
        dtype, tp = self.resolve_kv_cache_dtype(kv_cache_dtype), tensor_parallel_size
        size, mixers = kv_bytes(dtype), self._mixers
        stretch = sum(count * mixer.stretch_bytes(dtype) for count, mixer in mixers)
        single = (size * mixer.kv_elements_per_token(tp) + mixer.index_bytes_per_token for _, mixer in mixers)
        return -(-stretch // STRETCH) + sum(count * each for (count, _), each in zip(mixers, single, strict=True))

    def state_bytes(self, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto") -> int:
        """Bytes on one GPU of the fixed state that one request keeps in layers that have one (linear attention, state
        space, the window of compressed attention), all layers."""
        size, dtype = DTYPE_BYTES[self.dtype], self.resolve_kv_cache_dtype(kv_cache_dtype)
        return sum(
            count * (mixer.state_bytes(size, tensor_parallel_size) + mixer.window_bytes(dtype))
            for count, mixer in self._mixers
        )

    # --- FLOPs ----------------------------------------------------------------------------------------------------

    def linear_flops_per_token(self, lm_head: bool = True) -> int:
        """FLOPs of all products with weights for one token of the whole model: 2 per active weight, look-ups none."""
        parts = self.parameters()
        head = self.vocab_size * self.embedding_size if lm_head else 0
        looked_up = sum(parts.get(part, 0) for part in ("embedding", "layer_embeddings", "norm", "lm_head"))
        return 2 * (self.active_parameters - looked_up + head)

    def attention_flops(self, context: int) -> int:
        """FLOPs of attention for one new token that sees ``context`` tokens (itself included), all layers."""
        if context < 0:
            raise InputError(f"context={context}: must be ≥ 0")
        return sum(count * mixer.flops(context) for count, mixer in self._mixers)


def padded(rows: int, tensor_parallel_size: int) -> int:
    """Rows of a vocabulary's table on one GPU."""
    if tensor_parallel_size == 1:
        return rows
    return -(-rows // VOCAB_PADDING) * VOCAB_PADDING // tensor_parallel_size


def layers_of_stages(num_layers: int, stages: int, own: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Layers in each stage: equal numbers; what is left over goes one each to the stages before the last, from the back
    (get_pp_indices in vllm/distributed/utils.py, 0.10 to 0.32). ``own``: as the user cuts the model.

    Raises InputError if there are fewer layers than stages, or own numbers are not of these layers and stages.
    """
    if own is not None and (len(own) != stages or sum(own) != num_layers):
        raise InputError(
            f"pipeline_layers={list(own)}: must be pipeline_parallel_size={stages} numbers that add up to the "
            f"model's {num_layers} layers"
        )
    if own is not None:
        return own
    if stages > num_layers:
        raise InputError(f"pipeline_parallel_size={stages}: the model has {num_layers} layers; use ≤ {num_layers}")
    each, left = divmod(num_layers, stages)
    return tuple(each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages))


def stages(model: Model, count: int, own: tuple[int, ...] | None = None) -> tuple[Model, ...]:
    """The model in ``count`` parts: the first embeds tokens, the last has final norm, output head and sampling.
    ``own``: layers of each, None: as the engine divides them.

    Raises InputError if there are fewer layers than stages, or if layers attend to the cache of an earlier one.
    """
    if count == 1:
        return (model,)
    if any(getattr(layer.attention, "shares_cache", False) for _, layer in model.layers):
        raise InputError(
            f"pipeline_parallel_size={count}: layers of {model.name} share caches across stages; use 1, or tensor "
            "parallelism"
        )
    runs, found = list(model.layers), []
    for stage, wanted in enumerate(layers_of_stages(model.num_layers, count, own)):
        mine: list[tuple[int, Layer]] = []
        while (missing := wanted - sum(number for number, _ in mine)) > 0:
            number, layer = runs.pop(0)
            taken = min(number, missing)
            mine.append((taken, layer))
            if number > taken:
                runs.insert(0, (number - taken, layer))
        found.append(replace(model, layers=tuple(mine), embeds=stage == 0, samples=stage == count - 1))
    return tuple(found)
