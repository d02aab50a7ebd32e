"""What one transformer layer is made of: its sizes. Counts are those of the whole layer, before sharding."""

from dataclasses import dataclass

from windtunnel.errors import InputError


def require_positive(owner: str, **values: int) -> None:
    """Raise InputError unless every value is an integer ≥ 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{owner}: {name}={value!r}: must be an integer ≥ 1")


def require_not_negative(owner: str, **values: int) -> None:
    """Raise InputError unless every value is an integer ≥ 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{owner}: {name}={value!r}: must be an integer ≥ 0")


@dataclass(frozen=True)
class Attention:
    """Softmax attention (multi-head, grouped or multi-query)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    """Size of a value head; 0 means ``head_dim`` and is replaced by it."""
    window: int = 0
    """A token sees only the last ``window`` tokens; 0: all of them."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""
    qk_norm_across_heads: bool = False
    """They are normalised over all heads at once (MiniMax-M2): tensor-parallel ranks exchange the variances."""

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        require_positive(
            "attention",
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )
        require_not_negative("attention", window=self.window)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_attention_heads={self.num_heads}: must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )

    def kv_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """KV heads that one GPU keeps; vLLM replicates them when there are more GPUs than heads."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Cached numbers per token on one GPU: a key and a value for each of its KV heads."""
        return self.kv_heads_per_gpu(tensor_parallel_size) * (self.head_dim + self.v_head_dim)

    def flops_per_context_token(self) -> int:
        """FLOPs of one query token per token of context, all heads: 2·head_dim for QKᵀ, 2·v_head_dim for PV."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part (``qkv``, ``out``, ``norm``)."""
        heads, kv_heads = self.num_heads // tensor_parallel_size, self.kv_heads_per_gpu(tensor_parallel_size)
        columns = (heads + kv_heads) * self.head_dim + kv_heads * self.v_head_dim
        norm = 0
        if self.qk_norm:
            norm = (heads + kv_heads if self.qk_norm_across_heads else 2) * self.head_dim
        return {
            "qkv": hidden_size * columns + columns * self.qkv_bias,
            "out": heads * self.v_head_dim * hidden_size + hidden_size * self.out_bias,
            "norm": norm,
        }


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2): the cache holds one compressed vector per token, for all heads."""

    num_heads: int
    q_lora_rank: int
    """Rank of the query projection; 0: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        require_positive(
            "multi-head latent attention",
            num_attention_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        require_not_negative("multi-head latent attention", q_lora_rank=self.q_lora_rank)

    @property
    def window(self) -> int:
        """Latent attention sees the whole context."""
        return 0

    @property
    def qk_head_dim(self) -> int:
        """Size of a query head, with and without rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:  # noqa: ARG002 - every GPU keeps the whole latent vector
        """Cached numbers per token on one GPU: the latent vector and the rotary key, on every GPU alike."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def flops_per_context_token(self) -> int:
        """FLOPs of one decoding token per token of context, in latent space (absorbed projections)."""
        return 2 * self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; the down-projections are on every GPU, heads are divided."""
        heads = self.num_heads // tensor_parallel_size
        queries = heads * self.qk_head_dim
        down = hidden_size * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim)
        return {
            "qkv": down + (self.q_lora_rank or hidden_size) * queries + self.up_parameters(tensor_parallel_size),
            "out": heads * self.v_head_dim * hidden_size,
            "norm": self.q_lora_rank + self.kv_lora_rank,
        }

    def up_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Parameters of kv_b, from the latent vector to keys and values, on one GPU."""
        return self.kv_lora_rank * (self.num_heads // tensor_parallel_size) * (self.qk_nope_head_dim + self.v_head_dim)


@dataclass(frozen=True)
class MLP:
    """Feed-forward network."""

    intermediate_size: int
    gated: bool = True
    """Gate and up projections (SwiGLU, GeGLU) instead of one."""
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive("mlp", intermediate_size=self.intermediate_size)

    def parameters(self, hidden_size: int, shards: int = 1) -> int:
        """Parameters on one of ``shards`` GPUs; the bias of the down projection is on each."""
        up = (2 if self.gated else 1) * self.intermediate_size // shards
        down = self.intermediate_size // shards * hidden_size
        return hidden_size * up + down + (up + hidden_size) * self.bias


@dataclass(frozen=True)
class MoE:
    """Mixture of experts: a token goes through ``top_k`` of ``num_experts`` networks, and through the shared ones."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    gated: bool = True
    shared_intermediate_size: int = 0
    """Of all shared experts together; 0: none."""
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    """A learned gate weighs the shared experts (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        require_positive(
            "mixture of experts",
            num_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.intermediate_size,
        )
        require_not_negative("mixture of experts", shared_intermediate_size=self.shared_intermediate_size)
        if self.top_k > self.num_experts:
            raise InputError(f"num_experts_per_tok={self.top_k}: must be ≤ num_experts={self.num_experts}")

    @property
    def expert(self) -> MLP:
        """One routed expert."""
        return MLP(self.intermediate_size, self.gated, self.bias)

    @property
    def shared(self) -> MLP | None:
        """The shared experts as one network."""
        return MLP(self.shared_intermediate_size, self.gated) if self.shared_intermediate_size else None


@dataclass(frozen=True)
class Layer:
    """One decoder layer: attention and a feed-forward network, with ``norms`` normalisations of the hidden state."""

    attention: Attention | MLA
    mlp: MLP | MoE
    norms: int = 2
