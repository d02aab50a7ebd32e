"""Shapes: what a profile's operators compute, as kernels, so that their work is known."""

from dataclasses import MISSING, asdict, fields, replace
from typing import Any, Self

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.errors import InputError
from windtunnel.model import MLA, MLP, Attention, MoE, Quantization
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kinds.attention import Attention as AttentionKernel
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention

PROJECTIONS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
SMALL = ("emb", "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
TOKEN_OPERATORS = (*PROJECTIONS, *SMALL)
"""Of mlp.csv, in Vidur's words; times of one shard by tokens."""

OF_LATENT = ("latent_down_proj", "latent_q_proj")
"""In the place of attn_pre_proj where attention is latent: queries and latent down, or latent alone; queries."""
OF_EXPERTS = ("router", "expert_choice", "experts")
"""What a mixture of experts does with each token."""
OF_DENSE = ("mlp_up_proj", "mlp_act", "mlp_down_proj")
OF_SHARED = ("shared_up_proj", "shared_act", "shared_down_proj")
EVERY_TOKEN_OPERATOR = (*TOKEN_OPERATORS, *OF_LATENT, *OF_EXPERTS, *OF_SHARED)
"""Of mlp.csv, Vidur's and ours."""

BITS_8 = ("fp8", "int8")
"""Formats of weights that torch multiplies as they are; activations are cast on the way."""

ATTENTION = {"attn_prefill": "prefill", "attn_decode": "decode", "attn_kv_cache_save": "tokens"}
"""Of attention.csv, with what they are measured by."""

SKEWED = "attn_decode_skewed"
"""Decode attention of as many keys together as at (requests, keys) of attn_decode, half of them of one request."""

HEAD = ("lm_head", "sampling")
"""Of head.csv, which Vidur lacks; by requests."""

HOST = {
    "cpu_schedule": "schedule_median",
    "cpu_prepare_inputs": "prepare_inputs_e2e_median",
    "cpu_sampler": "sampler_e2e_median",
    "cpu_process_outputs": "process_model_outputs_median",
    "cpu_ray": "ray_comm_time_mean",
}
"""Of Vidur's cpu_overhead, with its columns; by requests of a step. A step takes the sum of them (its
``_get_schedule_time`` and so on in base_execution_time_predictor.py), one after the other."""

PADDING = 1024
"""Vidur pads vocabularies by less than this."""


@dataclass(frozen=True)
class Shape:
    """The numbers by which Vidur tells models apart."""

    n_embd: int
    n_head: int
    n_kv_head: int
    n_expanded_embd: int
    use_gated_mlp: bool
    vocab_size: int
    head_dim: int
    num_experts: int = 0
    """Routed experts of a layer; 0: none."""
    top_k: int = 0
    """Those that a token goes through."""
    expert_inter: int = 0
    """How wide each is; n_expanded_embd is the width of dense layers, 0 where there are none."""
    shared_inter: int = 0
    """Width of all experts together that every token goes through."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Rank of what latent attention caches; 0: it caches keys and values."""
    nope: int = 0
    rope: int = 0
    v_head_dim: int = 0
    weights: str = "bfloat16"
    """Format of the projections' weights: 16 bits, or one of BITS_8."""

    @property
    def token_operators(self) -> tuple[str, ...]:
        """Its operators of mlp.csv."""
        before = OF_LATENT if self.kv_lora_rank else ("attn_pre_proj",)
        small = [
            name for name in SMALL if name not in (("mlp_act", "attn_rope") if self.kv_lora_rank else ("mlp_act",))
        ]
        networks = (
            (OF_DENSE, self.n_expanded_embd),
            (OF_EXPERTS, self.num_experts),
            (OF_SHARED, self.shared_inter),
        )
        return (*before, "attn_post_proj", *(name for names, there in networks if there for name in names), *small)

    @property
    def cache_operators(self) -> tuple[str, ...]:
        """Its operators of attention.csv by tokens; what latent attention writes is small."""
        return () if self.kv_lora_rank else ("attn_kv_cache_save",)

    @property
    def needed(self) -> tuple[str, ...]:
        """Without these there is no profile of the model."""
        large = [name for name in self.token_operators if name.endswith("_proj") or name == "experts"]
        return (*large, "attn_prefill", "attn_decode")

    @property
    def largest(self) -> str:
        """The operator with most arithmetic in a layer."""
        return "experts" if self.num_experts else "mlp_up_proj"

    @property
    def optional(self) -> dict[str, int]:
        """What Vidur's models have not, where this one has it."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self) if field.default == 0}
        return {name: value for name, value in numbers.items() if value}

    def kernel(self, operator: str, tp: int) -> Kernel:
        """What one of ``tp`` shards computes. Raises InputError for an unknown operator."""
        heads, kv_heads = self.n_head // tp, -(-self.n_kv_head // tp)
        queries, keys, inner = heads * self.head_dim, kv_heads * self.head_dim, self.n_expanded_embd // tp
        up = 2 * inner if self.use_gated_mlp else inner
        vocabulary = -(-self.vocab_size // tp)
        narrow, both = self.weights in BITS_8, 2 if self.use_gated_mlp else 1
        shared, queries_down = self.shared_inter // tp, self.q_lora_rank
        if self.kv_lora_rank:
            queries = heads * self.v_head_dim
        made: dict[str, Kernel] = {
            "attn_pre_proj": Gemm(queries + 2 * keys, self.n_embd, self.weights, narrow),
            "attn_post_proj": Gemm(self.n_embd, queries, self.weights, narrow),
            "mlp_up_proj": Gemm(up, self.n_embd, self.weights, narrow),
            "mlp_down_proj": Gemm(self.n_embd, inner, self.weights, narrow),
            "latent_down_proj": Gemm(queries_down + self.kv_lora_rank + self.rope, self.n_embd, self.weights, narrow),
            "latent_q_proj": Gemm(heads * (self.nope + self.rope), queries_down or self.n_embd, self.weights, narrow),
            "shared_up_proj": Gemm(both * shared, self.n_embd, self.weights, narrow),
            "shared_act": Elementwise(2.0 * (both + 1) * shared),
            "shared_down_proj": Gemm(self.n_embd, shared, self.weights, narrow),
            "router": Gemm(max(self.num_experts, 1), self.n_embd),
            "expert_choice": Elementwise(6.0 * max(self.num_experts, 1)),
            "experts": Experts(
                self.n_embd, self.expert_inter, self.top_k, max(self.num_experts, 1), tp=tp, gated=self.use_gated_mlp
            ),
            "emb": Elementwise(4.0 * self.n_embd),
            "input_layernorm": Elementwise(4.0 * self.n_embd),
            "post_attention_layernorm": Elementwise(4.0 * self.n_embd),
            "add": Elementwise(6.0 * self.n_embd),
            "attn_rope": Elementwise(4.0 * (queries + keys)),
            "mlp_act": Elementwise(2.0 * (up + inner)),
            "attn_kv_cache_save": Elementwise(8.0 * keys),
            "lm_head": Gemm(vocabulary, self.n_embd),
            "sampling": Elementwise(34.0 * self.vocab_size),
            "all_reduce": Collective("all_reduce", max(tp, 2), self.n_embd),
            "send_recv": Elementwise(2.0 * self.n_embd),
        } | dict.fromkeys(HOST, Elementwise(8.0))
        for name, phase in (("attn_decode", "decode"), (SKEWED, "decode"), ("attn_prefill", "prefill")):
            if self.kv_lora_rank:
                made[name] = LatentAttention(phase, heads, self.kv_lora_rank, self.nope, self.rope, self.v_head_dim)
            else:
                made[name] = AttentionKernel(phase, heads, kv_heads, self.head_dim, self.head_dim)
        if operator not in made:
            raise InputError(f"operator {operator!r}: not one of a profile's; {', '.join(made)} are")
        return made[operator]

    def as_of(self, wanted: "Self | None") -> Self:
        """This one with the vocabulary of a model's shape, where it is that padded."""
        padded = wanted is not None and 0 <= self.vocab_size - wanted.vocab_size < PADDING
        return replace(self, vocab_size=wanted.vocab_size) if wanted is not None and padded else self

    def spec(self) -> dict[str, Any]:
        """For a manifest: what a dense network in 16 bits has not is left out, where it has not."""
        optional = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in asdict(self).items() if value != optional.get(name, object())}


def shape_of(pool: Pool) -> Shape:
    """The shape of a pool's model.

    Raises:
        InputError: its attention differs from layer to layer, or it has what a profile does not.
    """
    model = pool.model
    layers = [layer for _, layer in model.layers]
    attentions, networks = {layer.attention for layer in layers}, {layer.mlp for layer in layers}
    dense = [one for one in networks if isinstance(one, MLP)]
    experts = [one for one in networks if isinstance(one, MoE)]
    attention, weights = next(iter(attentions)), _weights(model.quantization)
    alone = all(layer.beside is None and not layer.streams and not layer.predictions for layer in layers)
    equal = len(attentions) == 1 and max(len(dense), len(experts)) <= 1 and {*dense, *experts} == networks
    known = weights == "bfloat16" if experts else weights is not None
    if not (alone and equal and known and _known_attention(attention) and all(map(_routed, experts))):
        raise InputError(
            f"model {model.name}: a profile has times of equal layers of attention, also latent, and networks in 16 or "
            "8 bits, or experts in 16; use --perf auto for this one"
        )
    if experts and (pool.engine.enable_expert_parallel or pool.engine.data_parallel_size > 1):
        raise InputError(
            f"model {model.name}: a profile has experts that tensor parallelism divides: leave out "
            "enable_expert_parallel and data_parallel_size, or use --perf auto"
        )
    found: dict[str, int] = {}
    for moe in experts:
        shared = moe.shared.intermediate_size if moe.shared else 0
        found |= {"num_experts": moe.num_experts, "top_k": moe.top_k, "expert_inter": moe.intermediate_size}
        found["shared_inter"] = shared
    if isinstance(attention, MLA):
        found |= {"q_lora_rank": attention.q_lora_rank, "kv_lora_rank": attention.kv_lora_rank}
        found |= {"nope": attention.qk_nope_head_dim, "rope": attention.qk_rope_head_dim}
        found["v_head_dim"] = attention.v_head_dim
    assert isinstance(attention, Attention | MLA)
    return Shape(
        model.hidden_size,
        attention.num_heads,
        1 if isinstance(attention, MLA) else attention.num_kv_heads,
        dense[0].intermediate_size if dense else 0,
        all(one.gated for one in dense) and all(one.gated for one in experts),
        model.vocab_size,
        attention.qk_nope_head_dim + attention.qk_rope_head_dim if isinstance(attention, MLA) else attention.head_dim,
        weights=weights or "bfloat16",
        **found,
    )


def _known_attention(attention: Any) -> bool:
    """Whether it is plain, or latent without an indexer, a gate or parts."""
    if isinstance(attention, MLA):
        return not (attention.index_top_k or attention.output_gate) and attention.context_parts == 1
    return isinstance(attention, Attention)


def _routed(moe: MoE) -> bool:
    """Whether its experts work on the hidden state, and nothing weighs the shared ones."""
    return not (moe.latent_size or moe.bias or moe.shared_gate)


def _weights(stored: Quantization | None) -> str | None:
    """The one format of all projections, None where there is none that is measured."""
    if stored is None:
        return "bfloat16"
    whole = stored.parts >= {"qkv", "out", "mlp"} and "lm_head" not in stored.parts and stored.beside is None
    return stored.method if whole and stored.method in BITS_8 and not stored.weight_only else None
