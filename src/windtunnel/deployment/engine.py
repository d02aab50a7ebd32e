"""Settings of one serving engine, by vLLM's argument names."""

from dataclasses import field, fields
from math import isfinite
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment.presets import preset
from windtunnel.errors import InputError, unknown
from windtunnel.policy.routing import RankBalancer

ENGINE_DTYPES = {"auto": "auto", "half": "float16", "float16": "float16", "bfloat16": "bfloat16"}
STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")
INDEX_DTYPES = ("auto", "bfloat16", "fp8", "mxfp4")
MOE_BACKENDS = ("auto", "triton", "cutlass", "flashinfer_cutlass", "flashinfer_trtllm", "marlin", "deep_gemm")
LINEAR_BACKENDS = ("auto", "cutlass", "deep_gemm", "flashinfer_cutlass", "flashinfer_cutedsl", "triton")
ATTENTION_BACKENDS = (
    *("auto", "flash_attn", "flash_attn_mla", "flashinfer", "flashinfer_mla", "flashinfer_mla_sparse", "triton_attn"),
    *("triton_mla", "flashmla", "flashmla_sparse", "cutlass_mla", "fa3", "fa4", "triton", "trtllm_mha", "trtllm_mla"),
    "trtllm",
)
DECODES_ALONE, PIECES, WHOLE = "FULL_DECODE_ONLY", "PIECEWISE", "FULL"
GRAPH_MODES = (DECODES_ALONE, PIECES, WHOLE)
POLICIES = ("fcfs", "priority")
GATHERED = "allgather_reducescatter"
"""Every rank sees the tokens of all, and the sums of its experts are scattered."""
LOW_LATENCY, HIGH_THROUGHPUT, AUTO = "deepep_low_latency", "deepep_high_throughput", "deepep_auto"
ONE_SIDED = "flashinfer_nvlink_one_sided"
ONE_KERNEL = "megamoe"
EXCHANGES = (GATHERED, LOW_LATENCY, HIGH_THROUGHPUT, AUTO, ONE_SIDED, ONE_KERNEL)
"""The ways in which ranks send tokens to each other's experts, by vLLM's names (config/parallel.py); ``deepep_auto`` is
SGLang's ``--deepep-mode auto``: low latency for decodes, high throughput for prompts; ``flashinfer_nvlink_one_sided``
are TensorRT-LLM's kernels, which write into the memory of other GPUs; ``megamoe`` is SGLang's name of DeepGEMM's
kernel, which exchanges tokens while it multiplies others."""
SCHEDULING = {"scheduling": True}
"""Marks an argument that only the engine's own scheduler reads."""

MOST = {
    "tensor_parallel_size": 4096,
    "pipeline_parallel_size": 4096,
    "data_parallel_size": 4096,
    "prefill_context_parallel_size": 4096,
    "max_num_seqs": 65_536,
    "max_num_batched_tokens": 1_048_576,
}
"""Tables have an entry for each of these; no engine is run with more."""
AS_STORED = "stored"
"""A word for no ``quantization``: the weights as the checkpoint has them."""
SMALL_BLOCKS = (1, 8)
"""Block sizes of vLLM (vllm/config/cache.py) that are no multiples of 16, what its attention kernels read."""


@dataclass(frozen=True)
class Engine:
    """One engine's arguments. None: the preset's default for the model and device, filled in by ``resolve_engine``."""

    preset: str = "vllm-0.32"
    """Engine and version whose defaults and scheduler are simulated; ``vllm`` stands for the default."""
    tensor_parallel_size: int = 1
    """GPUs that share every layer."""
    pipeline_parallel_size: int = 1
    """Stages of layers, one after the other."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each stage (``VLLM_PP_LAYER_PARTITION``); None: equal numbers, as the engine divides what is left."""
    data_parallel_size: int = 1
    """Ranks with their own requests and KV cache; with mixture of experts they step together."""
    decode_context_parallel_size: int = 1
    """GPUs of those that share every layer over which the cached tokens of a request are spread, where they would all
    hold the same (latent attention, fewer KV heads than GPUs)."""
    prefill_context_parallel_size: int = 1
    """Times that a replica has its layers and its cache, so that each computes a part of every prompt; experts are
    divided among all of its GPUs (SGLang's ``attn_cp_size``)."""
    enable_expert_parallel: bool = False
    """Whole experts per GPU instead of slices of every expert."""
    all2all_backend: str = GATHERED
    """How ranks that share experts exchange tokens: ``allgather_reducescatter``, ``deepep_low_latency``,
    ``deepep_high_throughput``, ``deepep_auto`` (SGLang: the first of the two for decodes, the other for prompts),
    ``flashinfer_nvlink_one_sided`` or ``megamoe`` (SGLang), both in one NVLink domain."""
    enable_dbo: bool = False
    """Two micro-batches in turn, so that one computes while the other's tokens are exchanged (SGLang's
    ``enable_two_batch_overlap``)."""
    dbo_decode_token_threshold: int | None = None
    """Least tokens of a batch of decodes that is split; None: the engine's, 32 in vLLM."""
    dbo_prefill_token_threshold: int | None = None
    """Least tokens of a batch with prompts that is split; None: the engine's, 512 in vLLM."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens."""
    max_num_seqs: int | None = None
    """Most requests in one step of one rank."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step of one rank."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that the engine may use."""
    block_size: int | None = None
    """Tokens in a block of the KV cache."""
    dtype: str = "auto"
    """``auto`` (as the checkpoint), ``bfloat16`` or ``float16``."""
    kv_cache_dtype: str = "auto"
    """``auto``, ``bfloat16``, ``float16``, ``fp8``, ``fp8_e4m3`` or ``fp8_e5m2``."""
    quantization: str | None = None
    """``fp8`` quantises a 16-bit model while it is loaded; else it must be the checkpoint's own method."""
    enable_prefix_caching: bool | None = field(default=None, metadata=SCHEDULING)
    """Share full blocks of equal prefixes, and cache finished requests' blocks until evicted."""
    enable_chunked_prefill: bool | None = field(default=None, metadata=SCHEDULING)
    """A prompt may be computed in several steps."""
    num_gpu_blocks_override: int | None = None
    """Blocks of the KV cache instead of what fits into memory."""
    async_scheduling: bool | None = None
    """Schedule the next step while the current one runs."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    sequence_parallel_min_tokens: int | None = None
    """Tokens from which a batch whose number the GPUs of a layer divide is normalised in parts: its sums are scattered
    and gathered instead of reduced (``enable_sp`` and ``sp_min_token_num`` of vLLM's compiler passes). None: never."""
    disable_custom_all_reduce: bool = False
    """Use NCCL for all-reduces instead of the engine's own kernel."""
    watermark: float = field(default=0.0, metadata=SCHEDULING)
    """Share of the blocks that must stay free when a request is admitted."""
    scheduler_reserve_full_isl: bool | None = field(default=None, metadata=SCHEDULING)
    """Admit a prompt only when blocks for all of it are free."""
    scheduling_policy: str = field(default="fcfs", metadata=SCHEDULING)
    """``fcfs``, or ``priority``: the lowest number first, and the highest is preempted first."""
    long_prefill_token_threshold: int = field(default=0, metadata=SCHEDULING)
    """Most tokens that one request computes in a step, so that long prompts leave room for others; 0: no limit."""
    prefill_schedule_interval: int = field(default=1, metadata=SCHEDULING)
    """Steps of vLLM's ranks in lockstep from one that may run prompts to the next; from 0.33 on of any engine."""
    scheduler: str | None = None
    """A scheduler other than the engine's: a name of ``windtunnel list schedulers``, with its own settings as in
    ``sarathi:chunk=512``, or one of yours, ``./mine.py:MyScheduler``."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Token counts captured as CUDA graphs."""
    num_speculative_tokens: int = 0
    """Tokens that a draft (a multi-token prediction layer) proposes in each step; 0: no speculative decoding."""
    speculative_model: str | None = None
    """Name of the EAGLE-3 head that drafts; None: a layer like the model's last one does (multi-token prediction)."""
    acceptance_length: float | None = None
    """Mean tokens per step with speculation, including the verified token. The schedulers of vLLM's v1, SGLang 0.5 and
    trtllm-1.0 draw for each request and step which drafts are right (in mixed pools without stores, not in ``serve``);
    elsewhere a step yields the mean."""
    cudagraph_mode: str | None = None
    """By vLLM's names. ``FULL_DECODE_ONLY``: graphs of decodes alone, though the engine would capture small batches
    with prompts; ``PIECEWISE``: attention outside of graphs, for decodes too; ``FULL``: one graph, with prompts too;
    None: as the engine does."""
    prompt_graph_tokens: int | None = None
    """Largest batch with prompts that runs from graphs, attention outside of them, in an engine that captures decodes
    alone (``torch_compile_config`` of TensorRT-LLM); None: as the engine does."""
    shared_head: bool = False
    """Ranks that exchange tokens divide the output head among them (SGLang without ``enable_dp_lm_head``), or that of
    drafts alone (TensorRT-LLM's ``enable_lm_head_tp_in_adp``)."""
    shared_dense: bool = False
    """They divide dense layers, too (SGLang without ``moe_dense_tp_size=1``)."""
    num_redundant_experts: int = 0
    """Copies of experts in addition to the experts themselves: they take memory, and keep the GPUs' loads even, see
    enable_eplb."""
    enable_eplb: bool = False
    """A load balancer keeps the GPUs' loads of experts even without copies, by their places (vLLM and SGLang: a flag).
    What that saves was measured for TensorRT-LLM alone."""
    swa_full_tokens_ratio: float | None = None
    """Tokens that layers with a window have room for, for each that those without have (SGLang's flag of that name);
    None: their windows are set aside for every request that runs."""
    mamba_ssm_cache_dtype: str = "auto"
    """Of the states of recurrent layers: ``auto`` (as the checkpoint says), ``float32``, ``bfloat16``, ``float16``."""
    indexer_kv_dtype: str = "auto"
    """Of the keys that the index of sparse attention caches: ``auto`` (as the engine: 8 bits, MiniMax-M3's in 16),
    ``bfloat16``, ``fp8``, or ``mxfp4`` on data-centre Blackwell."""
    states_per_request: int | None = None
    """States of recurrent layers that are set aside for each request that runs. None: the engine's: one, and with
    cached prefixes three in SGLang; its ``extra_buffer`` has five, vLLM's ``mamba_cache_mode`` ``align`` two."""
    max_loras: int = 0
    """LoRA adapters in GPU memory, over which requests are spread evenly (vLLM with ``--enable-lora``); 0: none."""
    max_lora_rank: int = 16
    """Rank that there is room for in each."""
    cpu_offload_gb: float = 0.0
    """GiB of each GPU's weights that stay in host memory and cross PCIe in every step: of routed experts those that its
    tokens choose (vLLM), or all (SGLang)."""
    attention_backend: str = "auto"
    """Whose kernel computes attention, by the engine's name in small letters, such as ``flash_attn`` (vLLM), ``fa3``
    (SGLang), where the kernel database has it; ``auto``: the one with most measurements."""
    moe_backend: str = "auto"
    """Whose kernel computes experts, by vLLM's names: ``triton``, ``cutlass``, ``flashinfer_cutlass``,
    ``flashinfer_trtllm``, ``marlin``, ``deep_gemm``, where the kernel database has it; ``auto``: the fastest."""
    linear_backend: str = "auto"
    """Whose kernel multiplies matrices in 8 or 4 bits, by vLLM's names: ``cutlass``, ``deep_gemm``,
    ``flashinfer_cutlass``, ``flashinfer_cutedsl``, ``triton``, where the kernel database has it; ``auto``: the fastest.
    """
    fuse_allreduce_rms: bool | None = None
    """Sums over GPUs and the norm behind them are one kernel, where the device can (vLLM's ``pass_config``, SGLang's
    ``enable_flashinfer_allreduce_fusion``); None: as the engine does."""
    enable_symm_mem: bool = False
    """NCCL gathers and scatters in memory that lies at one address on all GPUs (SGLang's flag of that name, vLLM's
    ``VLLM_USE_NCCL_SYMM_MEM``)."""
    flashinfer_sampler: bool = False
    """FlashInfer's kernel chooses tokens, which takes less memory than PyTorch's (vLLM's
    ``VLLM_USE_FLASHINFER_SAMPLER``; its images of 0.8 to 0.11.0 did so by themselves)."""
    low_precision_combine: bool = False
    """Experts' outputs return to their ranks in the type of the experts' weights (TensorRT-LLM's
    ``use_low_precision_moe_combine``), 8 or 4 bits, where an exchange of kernels takes them back."""
    scheduler_recv_interval: int = 1
    """Steps of decodes from one look at new requests to the next (SGLang's flag of that name)."""
    stream_interval: int = 1
    """Tokens of a streamed event, after the first token."""
    api_server_count: int | None = None
    """Processes that take requests in and tokenise, in addition to the engine's; the client's clock sees them. Those of
    vLLM choose the data-parallel rank, each without knowing what the others send. None: one, or in vLLM from 0.15 on
    as many as ranks."""
    kernel_version: str | None = None
    """Version of the engine in the kernel database whose timings are wanted; None: the nearest to the preset's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "preset", preset(self.preset).name)
        if self.quantization == AS_STORED:
            object.__setattr__(self, "quantization", None)
        for name in ("tensor", "pipeline", "data", "decode_context", "prefill_context"):
            self._require_integer(f"{name}_parallel_size", 1)
        self._check_around()
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            self._require_integer(name, 1, optional=True)
        self._check_sizes()
        self._require_integer("num_gpu_blocks_override", 2, optional=True)
        self._require_integer("long_prefill_token_threshold", 0)
        self._require_integer("prefill_schedule_interval", 1)
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            self._require_integer(name, 0, optional=True)
        if self.all2all_backend not in EXCHANGES:
            raise unknown("all2all_backend", self.all2all_backend, EXCHANGES)
        utilization = self.gpu_memory_utilization
        if utilization is not None and not (isfinite(utilization) and 0 < utilization <= 1):
            raise InputError(f"gpu_memory_utilization={utilization}: must be > 0 and ≤ 1")
        if not (isfinite(self.watermark) and 0 <= self.watermark < 1):
            raise InputError(f"watermark={self.watermark}: must be ≥ 0 and < 1")
        self._check_speculation()
        if self.dtype not in ENGINE_DTYPES:
            raise unknown("dtype", self.dtype, ENGINE_DTYPES)
        if self.scheduling_policy not in POLICIES:
            raise unknown("scheduling_policy", self.scheduling_policy, POLICIES)
        self._normalise_sizes()

    def _require_integer(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: must be an integer ≥ {least}")

    def _check_sizes(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InputError(f"{name}={value}: must be ≤ {most:,}, the most that is simulated")
        size = self.block_size
        if size is not None and self.backend == "vllm" and size not in SMALL_BLOCKS and size % 16:
            raise InputError(f"block_size={size}: vLLM's kernels read blocks of 1, 8 or a multiple of 16 tokens")

    def _check_around(self) -> None:
        """What is around the scheduler: graphs, states, windows, and the front end."""
        for name in ("scheduler_recv_interval", "stream_interval"):
            self._require_integer(name, 1)
        self._require_integer("api_server_count", 1, optional=True)
        for name, value, known in (
            ("cudagraph_mode", self.cudagraph_mode, (None, *GRAPH_MODES)),
            ("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, STATE_DTYPES),
            ("indexer_kv_dtype", self.indexer_kv_dtype, INDEX_DTYPES),
            ("attention_backend", self.attention_backend, ATTENTION_BACKENDS),
            ("moe_backend", self.moe_backend, MOE_BACKENDS),
            ("linear_backend", self.linear_backend, LINEAR_BACKENDS),
        ):
            if value not in known:
                raise unknown(name, str(value), [each for each in known if each])
        for name, least in (("num_redundant_experts", 0), ("max_loras", 0), ("max_lora_rank", 1)):
            self._require_integer(name, least)
        for name in ("states_per_request", "prompt_graph_tokens", "sequence_parallel_min_tokens"):
            self._require_integer(name, 1, optional=True)
        if not (isfinite(self.cpu_offload_gb) and self.cpu_offload_gb >= 0):
            raise InputError(f"cpu_offload_gb={self.cpu_offload_gb}: must be ≥ 0")
        ratio = self.swa_full_tokens_ratio
        if ratio is not None and not (isfinite(ratio) and 0 < ratio <= 1):
            raise InputError(f"swa_full_tokens_ratio={ratio}: must be > 0 and ≤ 1")

    def _check_speculation(self) -> None:
        self._require_integer("num_speculative_tokens", 0)
        most, length = self.num_speculative_tokens + 1, self.acceptance_length
        if self.num_speculative_tokens and length is None:
            raise InputError(
                f"num_speculative_tokens={self.num_speculative_tokens}: needs acceptance_length, the mean number of "
                f"tokens that a step yields (1 to {most})"
            )
        if self.speculative_model and not self.num_speculative_tokens:
            raise InputError(
                f"speculative_model={self.speculative_model!r}: drafts nothing: add num_speculative_tokens"
            )
        if length is not None and not (isfinite(length) and 1 <= length <= most):
            raise InputError(f"acceptance_length={length}: must be ≥ 1 and ≤ num_speculative_tokens + 1 = {most}")

    def _normalise_sizes(self) -> None:
        for name in ("cudagraph_capture_sizes", "pipeline_layers"):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
                raise InputError(f"{name}={list(sizes)}: must be integers ≥ 1")
            in_order = tuple(sizes) if name == "pipeline_layers" else tuple(sorted(set(sizes)))
            object.__setattr__(self, name, in_order)

    @property
    def backend(self) -> str:
        """Name of the engine, as in the kernel database."""
        return preset(self.preset).backend

    @property
    def world_size(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.expert_ranks

    @property
    def expert_ranks(self) -> int:
        """Copies of all layers but experts that a replica has; they divide the experts among them."""
        return self.data_parallel_size * self.prefill_context_parallel_size

    def spec(self) -> dict[str, Any]:
        """Every setting, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def api_servers(self) -> int:
        """Processes that take requests in."""
        ranks = self.data_parallel_size if preset(self.preset).server_per_rank else 1
        return self.api_server_count or ranks

    @property
    def balancer(self) -> RankBalancer:
        """What gives requests to its data-parallel ranks. Engines other than vLLM decide in one process."""
        servers = self.api_servers if self.backend == "vllm" else 1
        chosen = preset(self.preset)
        return RankBalancer(servers, chosen.balancer_rotates, chosen.counts_in_flight)

    def resolved(self, name: str) -> int:
        """A whole number that ``resolve_engine`` has filled in, such as ``max_num_batched_tokens``."""
        value = getattr(self, name)
        if not isinstance(value, int):
            raise TypeError(f"{name} is not set: resolve_engine fills it in")
        return value


SCHEDULER_FLAGS: dict[str, Any] = {
    each.name: each.default for each in fields(Engine) if each.metadata.get("scheduling")
}
"""Arguments that only the engine's own scheduler reads, and what they are where they are not given."""
