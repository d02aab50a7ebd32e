"""What a Hugging Face architecture fixes in its code and does not say in config.json, and what is not simulated yet.

The latter is refused by name instead of being read as something else.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.model.families.earlier import (
    GPT,
    bloom,
    called,
    chatglm,
    decilm,
    falcon,
    mpt,
    one_kv_head,
    qwen1,
)
from windtunnel.model.families.gemma3n import DEFAULTS as GEMMA3N
from windtunnel.model.families.gemma3n import of_layer as of_gemma3n
from windtunnel.model.families.hybrid import (
    Layout,
    by_attention_indices,
    by_blocks,
    by_layer_types,
    by_periods,
    of_block,
    one_part_each,
    side_by_side,
)
from windtunnel.model.keys import Keys

STEP_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "shared_expert_intermediate_size": "share_expert_dim",
}
"""What other models call it -> what Step calls it."""

STEP_WINDOWED = {
    "swa_num_attention_heads": ("num_attention_heads", "num_attention_heads"),
    "swa_num_key_value_heads": ("num_attention_groups", "num_key_value_heads"),
    "swa_head_dim": ("head_dim", "head_dim"),
}
"""Of layers with a window -> its name in ``attention_other_setting``, and whose value holds where that is silent."""


def as_others_call_it(keys: Keys) -> Keys:
    """The keys under other models' names (Step3p5DecoderLayer in vllm/model_executor/models/step3p5.py).

    Raises InputError for an ``attention_other_setting`` of other layers than those with a window, and for layers of
    experts that do not exist.
    """
    renamed = {name: keys.get(theirs, name) for name, theirs in STEP_NAMES.items()}
    named = replace(keys, values={**keys.values, **{name: each for name, each in renamed.items() if each is not None}})
    return replace(named, values={**named.values, **_windowed(named), "moe_layer_freq": _of_experts(named)})


def _windowed(keys: Keys) -> dict[str, Any]:
    setting = keys.get("attention_other_setting")
    if not setting:
        return {}
    kind = setting.get("attention_type", "sliding_attention")
    if kind != "sliding_attention":
        raise keys.wrong(f"attention_other_setting is of {kind!r}", "must be of 'sliding_attention'")
    other = Keys(f"{keys.owner}: attention_other_setting", setting)
    return {name: other.integer(theirs, default=keys.integer(plain)) for name, (theirs, plain) in STEP_WINDOWED.items()}


def _of_experts(keys: Keys) -> list[int]:
    """Layers with experts: as ``moe_layers_enum`` lists them, else from layer ``first_k_dense_replace`` (1) on."""
    layers, listed = keys.integer("num_hidden_layers"), keys.get("moe_layers_enum")
    if listed is None:
        return [int(index >= keys.integer("first_k_dense_replace", default=1)) for index in range(layers)]
    parts: Iterable[Any] = listed.split(",") if isinstance(listed, str) else listed
    chosen = {str(each).strip() for each in parts}
    unknown = sorted(chosen - {str(index) for index in range(layers)})
    if unknown:
        raise keys.wrong(f"moe_layers_enum has {unknown[0]!r}", f"must list layers ≥ 0, < {layers}")
    return [int(str(index) in chosen) for index in range(layers)]


Get = Callable[..., Any]


def every_layer(get: Get, index: int) -> bool:  # noqa: ARG001 - one of the window rules
    """A ``sliding_window`` in the config holds for every layer (Mistral, Phi-3)."""
    return True


def never(get: Get, index: int) -> bool:  # noqa: ARG001 - one of the window rules
    """The architecture has no windows without ``layer_types``."""
    return False


def switched(get: Get, index: int) -> bool:
    """Qwen2: only with ``use_sliding_window``, and from layer ``max_window_layers`` on."""
    return bool(get("use_sliding_window")) and index >= int(get("max_window_layers", default=0))


def even_layers(get: Get, index: int) -> bool:  # noqa: ARG001 - one of the window rules
    """Gemma-2: layers 0, 2, 4… slide."""
    return index % 2 == 0


def all_but_every_nth(get: Get, index: int) -> bool:
    """Gemma-3: every ``sliding_window_pattern``-th layer (6) sees everything, the others slide."""
    return (index + 1) % int(get("sliding_window_pattern", default=6)) != 0


def all_but_every_fourth(get: Get, index: int) -> bool:
    """Llama-4: layers with positions (1 in ``no_rope_layers``) attend in chunks; every fourth has none and sees all."""
    listed = get("no_rope_layers")
    return bool(listed[index]) if listed else (index + 1) % 4 != 0


def same_in_every_layer(keys: Keys, index: int) -> Keys:  # noqa: ARG001 - one of the rules for the keys of a layer
    """The keys hold for every layer."""
    return keys


def as_they_are(keys: Keys) -> Keys:
    """The keys are called as in other models."""
    return keys


@dataclass(frozen=True)
class Family:
    """Traits of an architecture. None: the config says (``attention_bias``, ``mlp_bias``)."""

    gated: bool = True
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    expert_bias: bool = False
    router_bias: bool = False
    shared_experts: int = 0
    """Shared experts where the config does not count them."""
    shared_gate: bool = False
    qk_norm: bool = False
    norms: int = 2
    norm_bias: bool = False
    lm_head_bias: bool = False
    learned_positions: bool = False
    extra_positions: int = 0
    tied: bool = False
    """Embeddings are tied unless the config says otherwise."""
    slides: Callable[[Get, int], bool] = never
    """Whether a layer slides, for configs without ``layer_types``."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values that the architecture's configuration class assumes for absent keys."""
    layout: Layout | None = None
    """What each layer is made of, where a layer may lack a part or be a state space layer."""
    renamed: Callable[[Keys], Keys] = as_they_are
    """The keys as other models call them."""
    of_layer: Callable[[Keys, int], Keys] = same_in_every_layer
    """The keys as they hold for one layer."""
    rotary: bool = True
    mlp_sizes: tuple[str, ...] = (
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "ffn_dim",
        "intermediate_size",
        "n_inner",
    )
    """Keys of the width of a dense network, the first that is present."""
    notes: tuple[str, ...] = ()


MAMBA_2 = MappingProxyType(
    {
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
    }
)
"""What the classes of Granite 4, Bamba and Falcon-H1 assume."""
JAMBA = MappingProxyType(
    {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "max_position_embeddings": 262144,
    }
)
"""What the class of Jamba assumes."""
GEMMA3 = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
)
HASHED = "the first layers choose experts by a table of tokens (num_hash_layers), which is simulated as a router"
CHUNKED = "attention in chunks of attention_chunk_size tokens is simulated as a sliding window of that size"
BIASED = Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True)
UNBIASED = Family(gated=False, qkv_bias=False, out_bias=False, mlp_bias=False, tied=True)

FAMILIES: dict[str, Family] = {
    name: family
    for names, family in (
        ("LlamaForCausalLM MiniMaxM2ForCausalLM MiMoV2FlashForCausalLM", Family()),
        ("DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM", Family()),
        ("GlmMoeDsaForCausalLM KimiK25ForConditionalGeneration", Family()),
        ("DeepseekV4ForCausalLM", Family(notes=(HASHED,))),
        ("MistralForCausalLM MixtralForCausalLM Phi3ForCausalLM", Family(slides=every_layer)),
        ("Qwen2ForCausalLM", Family(qkv_bias=True, out_bias=False, slides=switched)),
        ("Qwen2MoeForCausalLM", Family(qkv_bias=True, out_bias=False, shared_gate=True, slides=switched)),
        ("Qwen3ForCausalLM Qwen3MoeForCausalLM", Family(qk_norm=True, slides=switched)),
        (
            "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration",
            Family(qk_norm=True, slides=switched),
        ),
        (
            "Qwen3NextForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
            Family(qk_norm=True, qkv_bias=False, out_bias=False, shared_gate=True),
        ),
        ("MiMoForCausalLM", Family(qkv_bias=True, out_bias=False)),
        ("PhiForCausalLM", replace(BIASED, norms=1, lm_head_bias=True)),
        ("OPTForCausalLM", replace(BIASED, learned_positions=True, extra_positions=2, tied=True)),
        ("GemmaForCausalLM", Family(tied=True, qkv_bias=False, out_bias=False)),
        (
            "Gemma2ForCausalLM",
            Family(tied=True, norms=4, slides=even_layers, defaults={"head_dim": 256, "vocab_size": 256000}),
        ),
        (
            "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
            Family(tied=True, norms=4, qk_norm=True, slides=all_but_every_nth, defaults=GEMMA3),
        ),
        (
            "Gemma3nForCausalLM Gemma3nForConditionalGeneration",
            Family(
                tied=True,
                norms=4,
                qk_norm=True,
                slides=all_but_every_nth,
                defaults=GEMMA3N,
                of_layer=of_gemma3n,
            ),
        ),
        (
            "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
            Family(tied=True, norms=4, qk_norm=True, router_bias=True, slides=all_but_every_nth),
        ),
        ("GptOssForCausalLM", Family(qkv_bias=True, out_bias=True, expert_bias=True, router_bias=True)),
        ("MiniMaxM3ForCausalLM MiniMaxM3SparseForConditionalGeneration", Family(qk_norm=True)),
        ("Glm4ForCausalLM", Family(out_bias=False, norms=4)),
        ("Glm4MoeForCausalLM", Family(out_bias=False)),
        ("KimiLinearForCausalLM KimiK3ForConditionalGeneration", Family(router_bias=True)),
        (
            "Llama4ForCausalLM Llama4ForConditionalGeneration",
            Family(shared_experts=1, slides=all_but_every_fourth, notes=(CHUNKED,)),
        ),
        ("NemotronHForCausalLM", Family(gated=False, router_bias=True, layout=one_part_each, rotary=False)),
        (
            "GraniteMoeHybridForCausalLM",
            Family(
                tied=True,
                layout=by_layer_types,
                mlp_sizes=("shared_intermediate_size",),
                defaults={**MAMBA_2, "position_embedding_type": "nope"},
            ),
        ),
        ("BambaForCausalLM", Family(layout=by_attention_indices, defaults=MAMBA_2)),
        ("FalconH1ForCausalLM", Family(layout=side_by_side, defaults=MAMBA_2)),
        ("JambaForCausalLM", Family(layout=by_periods, defaults=JAMBA, rotary=False)),
        ("DeciLMForCausalLM", Family(layout=by_blocks, of_layer=of_block, renamed=decilm)),
        (
            "Step3p5ForCausalLM Step3p5FlashForCausalLM Step3p7FlashForCausalLM Step3p7ForConditionalGeneration",
            Family(qk_norm=True, router_bias=True, renamed=as_others_call_it),
        ),
        # Models of other names that are still served.
        ("BaichuanForCausalLM BaiChuanForCausalLM AquilaForCausalLM OlmoForCausalLM GraniteForCausalLM", Family()),
        ("GPT2LMHeadModel", replace(BIASED, learned_positions=True, tied=True, renamed=GPT)),
        ("GPTBigCodeForCausalLM", replace(BIASED, learned_positions=True, tied=True, renamed=one_kv_head)),
        ("GPTJForCausalLM", replace(BIASED, qkv_bias=False, out_bias=False, norms=1, lm_head_bias=True, renamed=GPT)),
        ("GPTNeoXForCausalLM", BIASED),
        (
            "BloomForCausalLM",
            replace(BIASED, tied=True, rotary=False, renamed=bloom, defaults={"max_position_embeddings": 2048}),
        ),
        (
            "FalconForCausalLM RWForCausalLM",
            replace(
                UNBIASED,
                norms=1,
                norm_bias=True,
                renamed=falcon,
                defaults={"max_position_embeddings": 2048},
                notes=("attention and network run in parallel in this model; here one after the other",),
            ),
        ),
        ("MPTForCausalLM MptForCausalLM", replace(UNBIASED, rotary=False, renamed=mpt)),
        ("QWenLMHeadModel", Family(qkv_bias=True, out_bias=False, mlp_bias=False, renamed=qwen1)),
        (
            "ChatGLMModel ChatGLMForConditionalGeneration",
            Family(qkv_bias=True, out_bias=False, mlp_bias=False, renamed=chatglm),
        ),
        ("InternLMForCausalLM", Family(qkv_bias=True, out_bias=True, mlp_bias=False)),
        ("InternLM2ForCausalLM InternLM3ForCausalLM", Family(qkv_bias=False, out_bias=False, mlp_bias=False)),
        ("StableLmForCausalLM", Family(out_bias=False, mlp_bias=False, norm_bias=True)),
        ("Starcoder2ForCausalLM", replace(BIASED, slides=every_layer, tied=True)),
        ("CohereForCausalLM", Family(norms=1, tied=True)),
        ("Olmo2ForCausalLM OlmoeForCausalLM Exaone4ForCausalLM", Family(qk_norm=True)),
        ("GraniteMoeForCausalLM SmolLM3ForCausalLM Ernie4_5ForCausalLM", Family(tied=True)),
        (
            "PhiMoEForCausalLM",
            Family(qkv_bias=True, out_bias=True, slides=every_layer, norm_bias=True, lm_head_bias=True),
        ),
        ("ExaoneForCausalLM", Family(renamed=called(num_hidden_layers="num_layers"))),
        ("SeedOssForCausalLM", Family(qkv_bias=True, out_bias=False)),
    )
    for name in names.split()
}
"""Architectures, by their names in config.json, and what they fix."""

BY_KEY: dict[str, str] = {
    "index_kpool": "sparse attention over pooled keys (index_kpool)",
    "block_configs": "layers without attention or with their own widths (block_configs)",
    "num_kv_shared_layers": "layers that share another layer's KV cache",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "cross_attention_layers": "cross attention layers",
    "new_decoder_architecture": "Falcon's parallel layers (new_decoder_architecture)",
}
"""Key of config.json -> what it stands for, where its value is not null, zero, false or empty."""

LAYER_INPUTS = frozenset({"num_kv_shared_layers", "hidden_size_per_layer_input"})
READ: dict[str, frozenset[str]] = {
    "FalconForCausalLM": frozenset({"new_decoder_architecture"}),
    "RWForCausalLM": frozenset({"new_decoder_architecture"}),
    "DeciLMForCausalLM": frozenset({"block_configs"}),
    "Gemma3nForCausalLM": LAYER_INPUTS,
    "Gemma3nForConditionalGeneration": LAYER_INPUTS,
    "Gemma4ForCausalLM": LAYER_INPUTS,
    "Gemma4ForConditionalGeneration": LAYER_INPUTS,
}
"""Architecture -> the keys of these that it is simulated with."""

STATE_SPACE: dict[str, str] = {
    "mamba_num_heads": "state space layers (Mamba-2) of this architecture",
    "mamba_d_state": "state space layers (Mamba) of this architecture",
    "ssm_state_size": "state space layers (Mamba) of this architecture",
    "hybrid_override_pattern": "state space layers (Mamba-2) of this architecture",
    "attn_layer_period": "state space layers (Mamba) of this architecture",
}
"""Key -> what it stands for, unless the architecture has a known layout of state space layers."""

BY_ARCHITECTURE: dict[str, str] = {
    "MambaForCausalLM": "state space layers (Mamba-1)",
    "Mamba2ForCausalLM": "models of state space layers alone (Mamba-2 without attention)",
    "FalconMambaForCausalLM": "state space layers (Mamba-1)",
    "ZambaForCausalLM": "state space layers (Mamba-1) beside shared attention (Zamba)",
    "Zamba2ForCausalLM": "state space layers beside shared attention (Zamba2)",
}

LAYER_TYPES = {
    "mamba": "state space layers (Mamba)",
    "mamba2": "state space layers (Mamba-2)",
    "recurrent": "recurrent layers",
    "conv": "convolution layers",
}
LATENT_SPARSE = "deepseek_sparse_attention"
SIMULATED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention", "linear_attention"}


def refuse_what_is_not_simulated(name: str, architecture: str, config: Mapping[str, Any]) -> None:
    """Raise InputError when the model has layers of a kind that cannot be simulated yet."""
    laid_out = architecture in FAMILIES and FAMILIES[architecture].layout is not None
    simulated = SIMULATED_LAYER_TYPES | ({LATENT_SPARSE} if config.get("kv_lora_rank") else set())
    kinds = [] if laid_out else sorted(set(config.get("layer_types") or ()) - simulated)
    keys = BY_KEY if laid_out else BY_KEY | STATE_SPACE
    read = READ.get(architecture, frozenset())
    found = (
        BY_ARCHITECTURE.get(architecture)
        or next((what for key, what in keys.items() if config.get(key) and key not in read), None)
        or next((LAYER_TYPES.get(kind, f"layers of type {kind!r}") for kind in kinds), None)
    )
    if not found and 0 in (config.get("attn_type_list") or ()):
        found = "linear attention layers (Lightning attention)"
    if not found and config.get("is_encoder_decoder"):
        found = "encoder-decoder models"
    if not found and (config.get("index_topk_freq") or 1) != 1 and not config.get("kv_lora_rank"):
        found = "attention layers that share an index (index_topk_freq) but are not latent"
    if found:
        raise InputError(f"{name}: {found} are not simulated yet; see `windtunnel list models` for models that are")
