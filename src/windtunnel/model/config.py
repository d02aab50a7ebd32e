"""Read a Hugging Face config.json into a Model."""

from itertools import groupby

from windtunnel.errors import InputError
from windtunnel.model.families.block_sparse import read_block_sparse
from windtunnel.model.families.compressed import CompressedAttention, read_compressed, stored_experts
from windtunnel.model.families.gemma3n import with_updates
from windtunnel.model.families.gemma4 import (
    BESIDE,
    EXPERT_MODULES,
    has_experts_beside,
    layer_inputs,
    read_global,
    with_input,
)
from windtunnel.model.families.hybrid import Parts, selective_scan, state_space
from windtunnel.model.families.kimi_delta import read_kimi_delta
from windtunnel.model.families.shared_index import chooses_tokens
from windtunnel.model.families.traits import FAMILIES, Family, refuse_what_is_not_simulated
from windtunnel.model.keys import Json, Keys
from windtunnel.model.layers import MLA, MLP, Attention, Layer, LinearAttention, MoE
from windtunnel.model.mixer import Mixer
from windtunnel.model.quantization import DTYPE_BYTES, LINEARS, MODULES, Quantization, read_quantization
from windtunnel.model.selective_scan import SelectiveScan
from windtunnel.model.shapes import require_shapes
from windtunnel.model.spec import PREDICTING, TEXT_PART, VISION_TIME, Model
from windtunnel.model.state_space import StateSpace
from windtunnel.model.vision import vision_of

GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "gelu_pytorch_tanh")
MOE_SIZE_KEYS = ("intermediate_size", "moe_intermediate_size")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "model_max_length")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "top_k_experts")
MOE_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def read_config(name: str, config: Json, hf_quant_config: Json | None = None) -> Model:
    """The model that a config.json describes; ``hf_quant_config`` is the file of that name beside it, if there is one.

    Raises InputError naming the missing key, or the kind of layer that is not simulated.
    """
    require_shapes(name, config)
    require_shapes(name, hf_quant_config or {})
    text = dict(config.get("text_config") or config)
    architecture = _architecture(name, config)
    refuse_what_is_not_simulated(name, architecture, text)
    family = FAMILIES.get(architecture)
    notes = list(family.notes) if family else [_unknown_note(name, architecture)]
    keys = Keys(name, text, family.defaults if family else {})
    if family is None:
        _require_unambiguous(keys, architecture)
    family = family or Family()
    keys = family.renamed(keys)
    has_encoder = bool(text.get("vision_config") or config.get("vision_config") or "text_config" in config)
    vision = vision_of(config)
    notes += [VISION_TIME if vision else TEXT_PART] * has_encoder
    if keys.get("num_nextn_predict_layers", "num_mtp_modules", default=0):
        notes.append(PREDICTING)
    hidden = keys.integer("hidden_size", "n_embd", "d_model")
    layers = _layers(keys, family, hidden)
    positions = keys.integer(*POSITION_KEYS)
    length = _extended(positions, text)
    inputs, rows = layer_inputs(keys)
    quantization_config = config.get("quantization_config") or text.get("quantization_config")
    return Model(
        name=name,
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=keys.integer("vocab_size"),
        layers=tuple((len(list(run)), layer) for layer, run in groupby(layers)),
        max_position_embeddings=length,
        tie_word_embeddings=bool(
            config.get("tie_word_embeddings", keys.flag("tie_word_embeddings", default=family.tied))
        ),
        has_encoder=has_encoder,
        vision=vision,
        dtype=_dtype(name, config, text),
        quantization=_quantization(name, quantization_config, hf_quant_config, layers, text.get("expert_dtype")),
        learned_positions=positions + family.extra_positions if family.learned_positions else 0,
        embedding_size=keys.integer("word_embed_proj_dim", default=hidden),
        layer_inputs=inputs,
        layer_input_rows=rows,
        lm_head_bias=family.lm_head_bias,
        norm_bias=family.norm_bias,
        notes=tuple(notes),
    )


def _architecture(name: str, config: Json) -> str:
    architectures = config.get("architectures") or (config.get("text_config") or {}).get("architectures")
    if not architectures or not isinstance(architectures, list):
        raise InputError(f"{name}: config.json has no key 'architectures'; is this a Hugging Face config.json?")
    return str(architectures[0])


def _require_unambiguous(keys: Keys, architecture: str) -> None:
    """What a known architecture's code decides must stand in the config of an unknown one."""
    keys.integer("num_key_value_heads")
    keys.integer(*MOE_SIZE_KEYS)
    activation = str(keys.get("hidden_act", "hidden_activation", default=""))
    if activation not in GATED_ACTIVATIONS:
        raise InputError(
            f"{keys.owner}: architecture {architecture} is not known, and hidden_act={activation!r} in config.json "
            f"does not tell whether its MLP is gated; known architectures: {', '.join(sorted(FAMILIES)[:6])}, …"
        )
    if keys.get("sliding_window") and keys.get("use_sliding_window", default=True) and not keys.get("layer_types"):
        raise InputError(
            f"{keys.owner}: architecture {architecture} is not known, and config.json has no key 'layer_types' that "
            "tells which layers slide"
        )


def _extended(positions: int, text: Json) -> int:
    """The longest context, as vLLM derives it: some kinds of RoPE scaling lengthen it by their factor."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not factor or "gemma3" in str(text.get("model_type")):
        return positions
    base = scaling.get("original_max_position_embeddings") or positions if kind == "yarn" else positions
    return int(base * factor)


def _unknown_note(name: str, architecture: str) -> str:
    return f"architecture {architecture} of {name} is not known: read as a Llama-like decoder from its keys"


def _dtype(name: str, config: Json, text: Json) -> str:
    for source in (config, text):
        for key in ("dtype", "torch_dtype"):
            if source.get(key):
                dtype = str(source[key]).removeprefix("torch.")
                if dtype not in DTYPE_BYTES:
                    raise InputError(f"{name}: {key}={dtype!r} in config.json: must be one of {', '.join(DTYPE_BYTES)}")
                return "bfloat16" if dtype == "float32" else dtype  # vLLM's dtype "auto" never computes in float32
    return "bfloat16"


def _quantization(
    name: str, config: Json | None, hf_quant_config: Json | None, layers: list[Layer], expert_dtype: str | None
) -> Quantization | None:
    """None where no layer has any part that the configuration covers."""
    if isinstance(layers[0].attention, CompressedAttention) and config and config.get("weight_block_size"):
        return stored_experts(name, config, expert_dtype)
    hybrid = any(isinstance(layer.attention, StateSpace | SelectiveScan) for layer in layers)
    holders = {part: _holders(part, layers) for part in LINEARS} if hybrid else None
    modules = MODULES | {"experts": EXPERT_MODULES} if any(layer.beside for layer in layers) else MODULES
    found = read_quantization(name, config, hf_quant_config, len(layers), holders, modules)
    return found if found is None or found.parts else None


def _holders(part: str, layers: list[Layer]) -> list[int]:
    """The layers of a hybrid model that hold a part; projections are those of its state space layers."""
    if part in ("qkv", "out"):
        return [i for i, layer in enumerate(layers) if isinstance(layer.attention, StateSpace | SelectiveScan)]
    kind = MLP if part == "mlp" else MoE
    return [i for i, layer in enumerate(layers) if isinstance(layer.mlp, kind)]


# --- layers -----------------------------------------------------------------------------------------------------------


def _layers(keys: Keys, family: Family, hidden: int) -> list[Layer]:
    if family.layout is None:
        count = keys.integer("num_hidden_layers", "n_layer")
        if count == 0:
            raise keys.wrong("num_hidden_layers=0", "must be ≥ 1")
        return [_layer(family.of_layer(keys, index), family, hidden, index) for index in range(count)]
    layout = enumerate(family.layout(keys))  # a layer without parts does nothing
    return [_layer_of(parts, family.of_layer(keys, index), family, hidden, index) for index, parts in layout if parts]


def _layer_of(parts: Parts, keys: Keys, family: Family, hidden: int, index: int) -> Layer:
    """A layer of a hybrid model: each part with its norm."""
    attention = _attention(keys, family, hidden, index) if "attention" in parts else None
    network = _mlp(keys, family, hidden) if "mlp" in parts else None
    scans = {"mamba": state_space, "mamba1": selective_scan}
    return Layer(
        next((scan(keys, hidden) for name, scan in scans.items() if name in parts), attention),
        _moe(keys, family) if "moe" in parts else network,
        norms=len(parts),
    )


def _layer(keys: Keys, family: Family, hidden: int, index: int) -> Layer:
    attention = _layer_attention(keys, family, hidden, index)
    mlp = _moe(keys, family) if _is_moe(keys, index) else _mlp(keys, family, hidden)
    block = keys.integer("attn_res_block_size", default=0)
    if has_experts_beside(keys) and isinstance(mlp, MoE):
        layer = Layer(attention, mlp, family.norms + BESIDE, beside=_mlp(keys, family, hidden))
    else:
        streams = keys.integer("hc_mult", default=0)
        layer = Layer(attention, mlp, family.norms, -(-index // block) if block else None, streams)
    return with_updates(keys, with_input(keys, layer, index))


def _layer_attention(keys: Keys, family: Family, hidden: int, index: int) -> Mixer:
    found = read_kimi_delta(keys, index) or read_compressed(keys, index)
    if found:
        return found
    if keys.get("kv_lora_rank"):
        return _mla(keys, index)
    if _is_linear(keys, index):
        return _linear_attention(keys)
    return read_block_sparse(keys, read_global(keys, _attention(keys, family, hidden, index)), index)


def _is_linear(keys: Keys, index: int) -> bool:
    """Whether a layer is linear attention: by its type, else all but every ``full_attention_interval``-th."""
    if not keys.get("linear_num_value_heads"):
        return False
    kinds = keys.get("layer_types")
    if kinds is not None and len(kinds) <= index:
        raise keys.wrong(f"layer_types lists {len(kinds)} layers", "must have an entry for each")
    if kinds is not None:
        return bool(kinds[index] == "linear_attention")
    return (index + 1) % keys.integer("full_attention_interval", default=4) != 0


def _linear_attention(keys: Keys) -> LinearAttention:
    return LinearAttention(
        num_key_heads=keys.integer("linear_num_key_heads"),
        num_value_heads=keys.integer("linear_num_value_heads"),
        key_head_dim=keys.integer("linear_key_head_dim"),
        value_head_dim=keys.integer("linear_value_head_dim"),
        conv_kernel=keys.integer("linear_conv_kernel_dim", default=4),
        state_bytes_per_element=DTYPE_BYTES.get(str(keys.get("mamba_ssm_dtype", default="float32")), 4),
    )


def _mla(keys: Keys, index: int) -> MLA:
    top_k = keys.integer("index_topk", default=0)
    chooses = top_k > 0 and chooses_tokens(keys, index)
    return MLA(
        num_heads=keys.integer("num_attention_heads"),
        q_lora_rank=keys.integer("q_lora_rank", default=0),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        index_heads=keys.integer("index_n_heads") if chooses else 0,
        index_head_dim=keys.integer("index_head_dim") if chooses else 0,
        index_top_k=top_k,
        output_gate=keys.flag("mla_use_output_gate"),
    )


def _attention(keys: Keys, family: Family, hidden: int, index: int) -> Attention:
    window = _window(keys, family, index)
    heads_key = "num_attention_heads"
    prefix = "swa_" if window and keys.get("swa_num_attention_heads") else ""
    heads = keys.integer(prefix + heads_key) if prefix else keys.integer(heads_key, "n_head")
    if heads == 0:
        raise keys.wrong(f"{heads_key}=0", "must be ≥ 1")
    if not keys.get("head_dim", "attention_head_dim") and hidden % heads:
        raise InputError(
            f"{keys.owner}: hidden_size={hidden}: must be a multiple of {heads_key}={heads}, or give head_dim"
        )
    bias = keys.flag("attention_bias", "qkv_bias")
    return Attention(
        num_heads=heads,
        num_kv_heads=keys.integer(prefix + "num_key_value_heads", default=heads),
        head_dim=keys.integer(prefix + "head_dim", "attention_head_dim", default=hidden // heads),
        v_head_dim=keys.integer(prefix + "v_head_dim", default=0),
        window=window,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        qk_norm=keys.flag("use_qk_norm", "qk_layernorm", default=family.qk_norm),
        qk_norm_across_heads=keys.get("qk_norm_type") == "per_layer",
        output_gate=keys.flag("attn_output_gate"),
        head_gate=keys.flag("use_head_wise_attn_gate"),
        rotary=family.rotary and keys.get("position_embedding_type") != "nope",
    )


def _window(keys: Keys, family: Family, index: int) -> int:
    """The sliding window of layer ``index``, 0 for full attention."""
    size = keys.integer("sliding_window", "sliding_window_size", "attention_chunk_size", default=0)
    kinds, pattern = keys.get("layer_types"), keys.get("hybrid_layer_pattern")
    if kinds is not None or pattern is not None:
        listed = kinds if kinds is not None else pattern
        if len(listed) <= index:
            raise InputError(f"{keys.owner}: config.json lists the types of {len(listed)} layers but has more layers")
        sliding = listed[index] in ("sliding_attention", "chunked_attention", 1)
        if sliding and not size:
            raise InputError(f"{keys.owner}: config.json has no key 'sliding_window', which its layer types need")
        return size if sliding else 0
    return size if family.slides(keys.get, index) else 0


def _is_moe(keys: Keys, index: int) -> bool:
    if not any(keys.get(name) for name in MOE_COUNT_KEYS) or has_experts_beside(keys) is False:
        return False
    dense_first = keys.integer("first_k_dense_replace", default=0)
    frequency = keys.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) <= index:
            raise keys.wrong(f"moe_layer_freq has {len(frequency)} entries", "must have an entry for each layer")
        return bool(frequency[index])
    if frequency and (index - dense_first) % int(frequency):
        return False
    step = keys.integer("decoder_sparse_step", "interleave_moe_layer_step", default=1) or 1
    return index >= dense_first and index not in keys.get("mlp_only_layers", default=[]) and (index + 1) % step == 0


def _moe(keys: Keys, family: Family) -> MoE:
    size = keys.integer("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    shared = keys.integer("n_shared_experts", "num_shared_experts", default=family.shared_experts) * size
    return MoE(
        num_experts=keys.integer(*MOE_COUNT_KEYS),
        top_k=keys.integer(*TOP_K_KEYS),
        intermediate_size=size,
        gated=family.gated,
        shared_intermediate_size=keys.integer(
            "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0
        )
        or keys.integer("shared_intermediate_size", default=0)
        or shared,
        bias=family.expert_bias,
        router_bias=keys.flag("use_routing_bias", default=family.router_bias),
        shared_gate=family.shared_gate,
        latent_size=keys.integer("moe_latent_size", "routed_expert_hidden_size", default=0),
        latent_norm=keys.flag("latent_moe_use_norm"),
    )


def _mlp(keys: Keys, family: Family, hidden: int) -> MLP:
    return MLP(
        intermediate_size=keys.integer(*family.mlp_sizes, default=4 * hidden if not family.gated else None),
        gated=family.gated,
        bias=keys.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
    )
