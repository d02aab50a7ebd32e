"""Shapes: what a profile's operators compute, as kernels, so that their work is known."""

from dataclasses import asdict, dataclass, replace
from typing import Self

from windtunnel.deployment import Pool
from windtunnel.errors import InputError
from windtunnel.model import MLP, Attention
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kinds.attention import Attention as AttentionKernel
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.gemm import Gemm

PROJECTIONS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
SMALL = ("emb", "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
TOKEN_OPERATORS = (*PROJECTIONS, *SMALL)
"""Of mlp.csv, in Vidur's words; times of one shard by tokens."""

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

    def kernel(self, operator: str, tp: int) -> Kernel:
        """What one of ``tp`` shards computes. Raises InputError for an unknown operator."""
        heads, kv_heads = self.n_head // tp, -(-self.n_kv_head // tp)
        queries, keys, inner = heads * self.head_dim, kv_heads * self.head_dim, self.n_expanded_embd // tp
        up = 2 * inner if self.use_gated_mlp else inner
        vocabulary = -(-self.vocab_size // tp)
        made: dict[str, Kernel] = {
            "attn_pre_proj": Gemm(queries + 2 * keys, self.n_embd),
            "attn_post_proj": Gemm(self.n_embd, queries),
            "mlp_up_proj": Gemm(up, self.n_embd),
            "mlp_down_proj": Gemm(self.n_embd, inner),
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
            made[name] = AttentionKernel(phase, heads, kv_heads, self.head_dim, self.head_dim)
        if operator not in made:
            raise InputError(f"operator {operator!r}: not one of a profile's; {', '.join(made)} are")
        return made[operator]

    def as_of(self, wanted: "Self | None") -> Self:
        """This one with the vocabulary of a model's shape, where it is that padded."""
        padded = wanted is not None and 0 <= self.vocab_size - wanted.vocab_size < PADDING
        return replace(self, vocab_size=wanted.vocab_size) if wanted is not None and padded else self

    def spec(self) -> dict[str, int]:
        """For a manifest."""
        return asdict(self)


def shape_of(pool: Pool) -> Shape:
    """The shape of a pool's model.

    Raises:
        InputError: its layers differ, or are not plain attention and a plain network in 16 bits.
    """
    model = pool.model
    kinds = {(layer.attention, layer.mlp, layer.beside) for _, layer in model.layers}
    attention, mlp, beside = next(iter(kinds))
    alone = beside is None and not model.streams and not model.predictions
    plain = isinstance(attention, Attention) and isinstance(mlp, MLP) and alone
    if len(kinds) > 1 or not plain or model.quantization:
        raise InputError(
            f"model {model.name}: a profile has times of equal layers of attention and a dense network in 16 bits; "
            "use --perf auto for this one"
        )
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP)
    return Shape(
        model.hidden_size,
        attention.num_heads,
        attention.num_kv_heads,
        mlp.intermediate_size,
        mlp.gated,
        model.vocab_size,
        attention.head_dim,
    )
