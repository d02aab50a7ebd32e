"""What one transformer layer is made of: its sizes. Counts are those of the whole layer, before sharding."""

from collections.abc import Iterator

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_not_negative, require_positive
from windtunnel.model.mixer import INDEX_KEYS, Mixer, index_key_bytes


@dataclass(frozen=True)
class Attention(Mixer):
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
    output_gate: bool = False
    """A gate as wide as the queries, projected with them, multiplies the output (Qwen3-Next, Qwen3.5)."""
    head_gate: bool = False
    """A number for each head, projected from the hidden state, multiplies its output (Step-3.5, Step-3.7)."""
    shares_cache: bool = False
    """It attends to keys and values of an earlier layer and caches none (Gemma-4's small models)."""
    rotary: bool = True
    """Queries and keys are rotated by their positions, where the model has no table of them."""
    context_parts: int = 1
    """GPUs over which tokens of the cache are spread that would hold the same ones otherwise (decode context
    parallelism)."""

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

    @property
    def groups(self) -> tuple[str, int, bool]:
        """KV heads; GPUs may share them."""
        return "KV heads", self.num_kv_heads, True

    def kv_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """KV heads that one GPU keeps; vLLM replicates them when there are more GPUs than heads."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Cached numbers per token on one GPU: a key and a value for each of its KV heads."""
        return 0 if self.shares_cache else self._read_elements(tensor_parallel_size)

    def _read_elements(self, tensor_parallel_size: int) -> int:
        each = self.kv_heads_per_gpu(tensor_parallel_size) * (self.head_dim + self.v_head_dim)
        return -(-each // self.context_parts)

    def reads(self, kv_bytes: int, tensor_parallel_size: int) -> Iterator[tuple[int, float, float]]:
        """Its window; the cache of an earlier layer is read like its own."""
        yield self.window, self.flops_per_context_token(), kv_bytes * self._read_elements(tensor_parallel_size)

    def spread_over(self, tensor_parallel_size: int) -> int:
        """GPUs that hold the same KV heads."""
        return 1 if self.window or self.index_dtypes else max(1, tensor_parallel_size // self.num_kv_heads)

    def flops_per_context_token(self) -> int:
        """FLOPs of one query token per token of context, all heads: 2·head_dim for QKᵀ, 2·v_head_dim for PV."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part (``qkv``, ``out``, ``norm``)."""
        heads, kv_heads = self.num_heads // tensor_parallel_size, self.kv_heads_per_gpu(tensor_parallel_size)
        columns = (heads * (2 if self.output_gate else 1) + kv_heads) * self.head_dim + kv_heads * self.v_head_dim
        norm = 0
        if self.qk_norm:
            norm = (heads + kv_heads if self.qk_norm_across_heads else 2) * self.head_dim
        return {
            "qkv": hidden_size * (columns + heads * self.head_gate) + columns * self.qkv_bias,
            "out": heads * self.v_head_dim * hidden_size + hidden_size * self.out_bias,
            "norm": norm,
        }


@dataclass(frozen=True)
class MLA(Mixer):
    """Multi-head latent attention (DeepSeek-V2): the cache holds one compressed vector per token, for all heads."""

    num_heads: int
    q_lora_rank: int
    """Rank of the query projection; 0: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int = 0
    """Heads of the indexer that chooses which tokens are attended to (DeepSeek sparse attention); 0: there is none."""
    index_head_dim: int = 0
    index_top_k: int = 0
    """Tokens that a query attends to; 0: all. Without an indexer those that an earlier layer's has chosen (GLM-5.2)."""
    output_gate: bool = False
    """A gate as wide as the values of all heads, projected from the hidden state, multiplies the output (Kimi-K3)."""
    index_dtype: str = "fp8"
    """Of the indexer's cached keys: ``fp8`` or ``mxfp4``."""
    context_parts: int = 1
    """GPUs over which tokens of the cache are spread that would hold the same ones otherwise (decode context
    parallelism)."""

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
        require_not_negative("sparse attention", index_n_heads=self.index_heads, index_topk=self.index_top_k)
        if self.index_heads:
            require_positive("sparse attention", index_head_dim=self.index_head_dim, index_topk=self.index_top_k)

    @property
    def qk_head_dim(self) -> int:
        """Size of a query head, with and without rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:  # noqa: ARG002 - every GPU keeps the whole latent vector
        """Cached numbers per token on one GPU: the latent vector and the rotary key, on every GPU alike, unless tokens
        are spread over them."""
        return -(-(self.kv_lora_rank + self.qk_rope_head_dim) // self.context_parts)

    def spread_over(self, tensor_parallel_size: int) -> int:
        """All GPUs hold the latent vector."""
        return 1 if self.index_top_k else tensor_parallel_size

    @property
    def index_bytes_per_token(self) -> int:
        """Cached bytes of the indexer's keys (DeepSeek-V3.2)."""
        return index_key_bytes(self.index_head_dim, self.index_dtype) if self.index_heads else 0

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        """8 bits, or 4."""
        return INDEX_KEYS if self.index_heads else ()

    def flops_per_context_token(self) -> int:
        """FLOPs of one decoding token per token of context, in latent space (absorbed projections)."""
        return 2 * self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; the down-projections are on every GPU, heads are divided."""
        heads = self.num_heads // tensor_parallel_size
        queries = heads * self.qk_head_dim
        down = hidden_size * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim)
        return {
            "qkv": down
            + hidden_size * heads * self.v_head_dim * self.output_gate
            + (self.q_lora_rank or hidden_size) * queries
            + self.up_parameters(tensor_parallel_size)
            + self._index_parameters(hidden_size),
            "out": heads * self.v_head_dim * hidden_size,
            "norm": self.q_lora_rank + self.kv_lora_rank,
        }

    def _index_parameters(self, hidden_size: int) -> int:
        """Parameters of the indexer, on every GPU alike: queries, one key for all heads with its norm, head weights."""
        if not self.index_heads:
            return 0
        queries = self.q_lora_rank * self.index_heads * self.index_head_dim
        return queries + hidden_size * (self.index_head_dim + self.index_heads) + 2 * self.index_head_dim

    def up_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Parameters of kv_b, from the latent vector to keys and values, on one GPU."""
        return self.kv_lora_rank * (self.num_heads // tensor_parallel_size) * (self.qk_nope_head_dim + self.v_head_dim)


@dataclass(frozen=True)
class LinearAttention(Mixer):
    """Gated delta rule (GatedDeltaNet, arXiv 2412.06464): a state of fixed size per request instead of a cache."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Tokens that the causal convolution in front of the recurrence sees."""
    state_bytes_per_element: int = 4
    """The recurrent state is kept in 32 bits (``mamba_ssm_dtype``)."""

    def __post_init__(self) -> None:
        require_positive(
            "linear attention",
            linear_num_key_heads=self.num_key_heads,
            linear_num_value_heads=self.num_value_heads,
            linear_key_head_dim=self.key_head_dim,
            linear_value_head_dim=self.value_head_dim,
            linear_conv_kernel_dim=self.conv_kernel,
        )

    @property
    def num_heads(self) -> int:  # type: ignore[override]  # counted, not kept
        """Heads that are divided over GPUs."""
        return self.num_value_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    def state_bytes(self, element_bytes: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of one request's state on one GPU: the recurrence, and the convolution's last tokens."""
        recurrence = self.num_value_heads * self.key_head_dim * self.value_head_dim * self.state_bytes_per_element
        return (recurrence + self.channels * (self.conv_kernel - 1) * element_bytes) // tensor_parallel_size

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; ``qkv`` holds gate, head numbers and convolution too."""
        tp, values = tensor_parallel_size, self.num_value_heads * self.value_head_dim
        wide = self.channels + values + 2 * self.num_value_heads
        return {
            "qkv": hidden_size * wide // tp + self.channels * self.conv_kernel // tp,
            "out": values * hidden_size // tp,
            "norm": self.value_head_dim + 2 * self.num_value_heads // tp,
        }


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
    latent_size: int = 0
    """Routed experts work on a projection of the hidden state that is so wide (Nemotron-3 Super, Kimi-K3); 0: on the
    state itself."""
    latent_norm: bool = False
    """What they return is normalised before it is projected back (Kimi-K3)."""

    def __post_init__(self) -> None:
        require_positive(
            "mixture of experts",
            num_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.intermediate_size,
        )
        require_not_negative(
            "mixture of experts",
            shared_intermediate_size=self.shared_intermediate_size,
            moe_latent_size=self.latent_size,
        )
        if self.top_k > self.num_experts:
            raise InputError(f"num_experts_per_tok={self.top_k}: must be ≤ num_experts={self.num_experts}")

    @property
    def expert(self) -> MLP:
        """One routed expert."""
        return MLP(self.intermediate_size, self.gated, self.bias)

    def expert_parameters(self, hidden_size: int, shards: int = 1) -> int:
        """Parameters of one routed expert on one of ``shards`` GPUs."""
        return self.expert.parameters(self.latent_size or hidden_size, shards)

    def router_parameters(self, hidden_size: int) -> int:
        """Parameters of the router, and of the projections to and from the latent size; on every GPU alike."""
        latent = self.latent_size * (2 * hidden_size + self.latent_norm)
        return self.num_experts * (hidden_size + self.router_bias) + latent

    @property
    def shared(self) -> MLP | None:
        """The shared experts as one network."""
        return MLP(self.shared_intermediate_size, self.gated) if self.shared_intermediate_size else None


@dataclass(frozen=True)
class Layer:
    """One decoder layer: attention and a feed-forward network, with ``norms`` normalisations of the hidden state.

    Layers of hybrid models may lack either part (Nemotron-H).
    """

    attention: Mixer | None
    """What mixes the tokens."""
    mlp: MLP | MoE | None
    norms: int = 2
    residual_blocks: int | None = None
    """Sums of earlier layers that every normalisation weighs and adds to the residual (attention residuals, Kimi-K3:
    vllm/models/kimi_k3/nvidia/ops/attn_res.py); None: there is the residual alone."""
    streams: int = 0
    """Residuals beside each other that attention and network each read and write as mixtures (manifold-constrained
    hyper-connections, arXiv 2512.24880: ``hc_mult`` of DeepSeek-V4); 0: a single residual."""
    beside: MLP | None = None
    """A dense network that runs before the experts on the same tokens (Gemma-4); both sums are added."""
    input_size: int = 0
    """Width of the tokens' own embedding for this layer, which gates a projection (Gemma-4's small models); 0: none."""
    predictions: int = 0
    """Hidden states beside each other: one goes through attention and network, and what they return corrects all
    (alternating updates, arXiv 2301.13310: ``altup_num_inputs`` of Gemma-3n); 0: a single one."""
    residual_rank: int = 0
    """Rank of a product that is added to the residual beside attention (LAuReL, arXiv 2411.07501; Gemma-3n); 0: none
    is."""

    def __post_init__(self) -> None:
        if self.attention is None and self.mlp is None:
            raise InputError("a layer without attention and without a network: give it one of both")
        require_not_negative("hyper-connections", hc_mult=self.streams)
        require_not_negative("layer", altup_num_inputs=self.predictions, laurel_rank=self.residual_rank)

    @property
    def window(self) -> int:
        """Tokens that a token sees; 0: all of them, or the layer does not mix tokens."""
        return self.attention.window if self.attention else 0

    def mixing_parameters(self, hidden_size: int) -> int:
        """Parameters of the hyper-connections around attention and network: what to read from each stream, what to
        write to it, and how the streams mix, with a bias for each and three scales (vllm/models/deepseek_v4)."""
        mixtures = (2 + self.streams) * self.streams
        return 2 * (mixtures * (self.streams * hidden_size + 1) + 3) if self.streams else 0

    def update_parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> int:
        """Parameters of what is beside attention and network: how one state predicts and corrects the others (a norm, a
        router, its coefficients, a scale), and the product that is added to the residual, with its norm
        (Gemma3nAltUp and Gemma3nLaurelBlock in vllm/model_executor/models/gemma3n.py)."""
        states, rank = self.predictions, self.residual_rank // tensor_parallel_size
        coefficients = states**2 + states**3
        alternating = (states + 2) * hidden_size + coefficients if states else 0
        return alternating + (2 * rank + 1) * hidden_size * (self.residual_rank > 0)
