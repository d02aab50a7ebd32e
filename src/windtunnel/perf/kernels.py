"""Kernels: what a GPU is asked to do, with shapes per GPU after sharding.

A kernel is asked at points (a, b): two arrays of equal shape whose meaning is in its docstring; ``b`` is zero where a
kernel has one axis. What it costs at least, in FLOPs and bytes, is in ``costs.py``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gemm:
    """Matrix product of ``a`` rows: [a, k] × [k, n]."""

    n: int
    k: int
    dtype: str = "bfloat16"
    """How the weights are stored: ``bfloat16``, ``fp8``, ``fp8_block``, ``nvfp4``, ``mxfp4``, ``int4``, ``int8``."""
    weight_only: bool = False
    """Activations stay in 16 bits and multiply at the 16-bit rate."""
    beside: bool = False
    """Runs on a second stream beside the routed experts where a batch is small."""


@dataclass(frozen=True)
class Elementwise:
    """Kernels that only move memory (norms, rotary embedding, activation, copies): ``a`` rows of ``row_bytes``."""

    row_bytes: float
    launches: int = 1
    """0: the rows ride on another kernel."""
    graph: bool = True
    """Launched from a captured graph."""


@dataclass(frozen=True)
class Quantize:
    """Dynamic quantisation of ``a`` rows of ``k`` activations to 8 bits: find the scale, cast."""

    k: int
    graph: bool = True


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one GPU's heads, as decode or as prefill."""

    phase: str
    """``decode``: ``a`` requests with one query each over ``b`` keys, the token itself included.
    ``prefill``: one chunk of ``a`` query tokens of a request with ``b`` tokens in the cache."""
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    """A query sees only so many keys; 0: all."""
    kv_dtype: str = "bfloat16"
    tiled: bool = False
    """A decode beside prefill chunks in one call of FlashAttention 2: every query fills a tile of its own."""


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention without its projections; ``phase``, ``a`` and ``b`` as for Attention.

    Decode works in latent space with absorbed projections; prefill expands keys and values first.
    """

    phase: str
    heads: int
    kv_lora_rank: int
    nope: int
    rope: int
    v_head_dim: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections around it, which are measured together with it."""


@dataclass(frozen=True)
class SparseAttention:
    """DeepSeek sparse attention as a whole module: projections, indexer, choice of ``top_k`` tokens, latent attention
    over them; ``phase``, ``a`` and ``b`` as for Attention. Without heads of an indexer (GLM-5.2) the choice is an
    earlier layer's."""

    phase: str
    hidden: int
    heads: int
    """Of one GPU."""
    q_lora_rank: int
    kv_lora_rank: int
    nope: int
    rope: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    top_k: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections."""


@dataclass(frozen=True)
class BlockSparseAttention:
    """MiniMax sparse attention as a whole module: projections, index, choice of the best blocks of keys, attention to
    the ``top_k`` tokens in them; ``phase``, ``a`` and ``b`` as for Attention."""

    phase: str
    hidden: int
    heads: int
    """Of one GPU, as KV and index heads."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    top_k: int
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    """Of the projections."""


@dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4's compressed attention as a whole module: projections, compressors, indexer where the ratio is 4,
    attention to window and compressed entries; ``phase``, ``a`` and ``b`` as for Attention."""

    phase: str
    hidden: int
    heads: int
    """Of one GPU, as the groups of output heads."""
    groups: int
    head_dim: int
    rope: int
    q_lora_rank: int
    o_lora_rank: int
    window: int
    ratio: int
    """Tokens of a compressed entry; 0: there is the window alone."""
    index_heads: int
    index_head_dim: int
    top_k: int
    """Compressed entries that the indexer chooses."""
    kv_dtype: str = "fp8"
    dtype: str = "bfloat16"
    """Of the projections."""


@dataclass(frozen=True)
class HyperConnection:
    """One side of a hyper-connection for ``a`` tokens: mixtures read from ``streams`` residuals, or written to them."""

    side: str
    """``pre``: what attention or network reads, and how to write; ``post``: what they return, and the streams mixed."""
    hidden: int
    streams: int


@dataclass(frozen=True)
class Recurrence:
    """Convolution and gated delta rule of one layer of linear attention on one GPU, without its projections.

    ``decode``: ``a`` requests with one token each. ``prefill``: one chunk of ``a`` tokens; the context does not count.
    """

    phase: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes_per_element: int = 4
    by_channel: bool = False
    """Every key channel decays at a rate of its own (Kimi delta attention), not every head."""


@dataclass(frozen=True)
class Convolution:
    """Causal convolution in front of a scan, each channel by itself, on one GPU; ``phase``, ``a`` as for Recurrence."""

    phase: str
    channels: int
    width: int
    """Tokens that it sees."""


@dataclass(frozen=True)
class Scan:
    """Mamba-2's state space scan of one layer on one GPU, without convolution and projections.

    ``decode``: ``a`` requests with one token each update their states. ``prefill``: one chunk of ``a`` tokens of a
    request, in pieces of ``piece`` tokens between which the state is passed on; the context does not count.
    """

    phase: str
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    piece: int
    state_bytes_per_element: int


@dataclass(frozen=True)
class Experts:
    """Routed experts of one layer for ``a`` tokens of all ranks: sizes of the whole layer, shared by tp·ep GPUs."""

    hidden: int
    inter: int
    top_k: int
    num_experts: int
    tp: int = 1
    ep: int = 1
    gated: bool = True
    dtype: str = "bfloat16"
    weight_only: bool = False
    layout: str = ""
    """How DeepEP hands tokens over: ``masked`` (low latency, room for every expert), ``contiguous`` (high throughput),
    or ``auto``: the first for batches of decodes. Empty: every rank sees the tokens of all."""


@dataclass(frozen=True)
class Collective:
    """A collective over ``gpus`` GPUs of ``a`` rows of ``row`` 16-bit elements; the message is the whole, not a
    share."""

    op: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``alltoall``."""
    gpus: int
    row: int
    graph: bool = True
    """Launched from a captured graph."""


@dataclass(frozen=True)
class Exchange:
    """DeepEP's exchange of the ``a`` tokens of a data-parallel rank: to the ranks of their experts, or back."""

    phase: str
    """``dispatch`` or ``combine``."""
    mode: str
    """``low_latency`` or ``high_throughput``; ``auto``: the first for batches of decodes, the other with prompts."""
    hidden: int
    top_k: int
    num_experts: int
    ranks: int
    """GPUs that the experts are spread over."""
    domain: int
    """GPUs that the link joins; the network joins the others."""
    tp: int = 1
    """GPUs that share the tokens of a rank."""
    dtype: str = "bfloat16"
    """What a token is sent in: ``fp8`` with a scale for every 128 numbers, or ``bfloat16``."""

    @property
    def crosses(self) -> bool:
        """Some ranks are only reached over the network."""
        return self.ranks > self.domain


Kernel = (
    Gemm
    | Elementwise
    | Quantize
    | Attention
    | LatentAttention
    | SparseAttention
    | BlockSparseAttention
    | CompressedAttention
    | HyperConnection
    | Recurrence
    | Convolution
    | Scan
    | Experts
    | Collective
    | Exchange
)
