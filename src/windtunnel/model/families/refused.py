"""Layers that are not simulated yet: refused by name instead of being read as something else."""

from collections.abc import Mapping
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.families.traits import FAMILIES

BY_KEY: dict[str, str] = {
    "index_kpool": "sparse attention over pooled keys (index_kpool)",
    "block_configs": "layers without attention or with their own widths (block_configs)",
    "num_kv_shared_layers": "layers that share another layer's KV cache",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "cross_attention_layers": "cross attention layers",
    "new_decoder_architecture": "Falcon's parallel layers (new_decoder_architecture)",
}
"""Key of config.json -> what it stands for, where its value is not null, zero, false or empty."""

SMALL_GEMMA4 = frozenset({"num_kv_shared_layers", "hidden_size_per_layer_input"})
READ: dict[str, frozenset[str]] = {
    "DeciLMForCausalLM": frozenset({"block_configs"}),
    "Gemma4ForCausalLM": SMALL_GEMMA4,
    "Gemma4ForConditionalGeneration": SMALL_GEMMA4,
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
    "JambaForCausalLM": "state space layers (Mamba-1, Jamba)",
    "ZambaForCausalLM": "state space layers (Mamba-1) beside shared attention (Zamba)",
    "Zamba2ForCausalLM": "state space layers beside shared attention (Zamba2)",
    "FalconH1ForCausalLM": "state space layers in parallel to attention (Falcon-H1)",
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
