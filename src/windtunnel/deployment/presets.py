"""Engines by name and version: the defaults and habits that change between engines and their versions."""

from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown


@dataclass(frozen=True)
class MemoryRules:
    """What an engine's profile run finds besides weights, by version, as server logs print it
    (``python -m benchmarks.accuracy.kv_memory`` compares)."""

    bytes_per_logit: float
    """Of sampling for ``max_num_seqs`` requests, at its peak."""
    sampled_states: int
    """Hidden states of all tokens that are alive while it samples."""
    layer_states: int | None
    """Hidden states alive in a layer; None: the dry run is too short for its layers to count."""
    reserve_gib: tuple[tuple[int, float], ...]
    """Outside PyTorch's allocator, by GPUs that work together, GiB; between two of them, that of the smaller."""
    graphs_inside: bool = False
    """CUDA graphs are estimated, and taken from the share, before the KV cache is laid out."""

    @property
    def without_cuda(self) -> "MemoryRules":
        """The rules on other devices than NVIDIA's, where PyTorch's own sampler stays (35.5 bytes a logit on an MI250
        with 0.17)."""
        return replace(self, bytes_per_logit=max(self.bytes_per_logit, TORCH_BYTES_PER_LOGIT))

    @property
    def with_flashinfer(self) -> "MemoryRules":
        """The rules where FlashInfer's kernel samples, which sorts no logits."""
        return replace(self, bytes_per_logit=min(self.bytes_per_logit, FLASHINFER_BYTES_PER_LOGIT))

    def reserve(self, gpus: int) -> float:
        """GiB outside PyTorch's allocator on each of this many GPUs that work together."""
        return max(pair for pair in self.reserve_gib if pair[0] <= gpus)[1]


TORCH_BYTES_PER_LOGIT = 38.3
"""Of PyTorch's own top-p and top-k: 38.1 to 38.5 in 13 logs of vLLM 0.6.6 to 0.11.0."""
FLASHINFER_BYTES_PER_LOGIT = 12.0
"""Of FlashInfer's top-p and top-k: three numbers of 32 bits a logit; logs of 0.10.1.1 agree."""
MEMORY_V0 = MemoryRules(TORCH_BYTES_PER_LOGIT, 1, 3, ((1, 0.26), (2, 0.28), (4, 0.61)))
"""vLLM 0.6.4 to 0.7.3: 109.8 kB a token of unchunked prompts is three hidden and three
intermediate states."""
MEMORY_TORCH_SAMPLER = MemoryRules(TORCH_BYTES_PER_LOGIT, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)))
"""vLLM 0.8 to 0.16, whose sampler is PyTorch's own; eight GPUs derived from two logs of 0.10.0."""
MEMORY_FLASHINFER_SAMPLER = MemoryRules(14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)))
"""vLLM 0.17 to 0.21, on CUDA (12 to 18.6 in six logs)."""
MEMORY_SECOND_RUNNER = MemoryRules(46, 2, 4, ((1, 0.26), (2, 0.61)))
"""vLLM from 0.31 on: Llama-3.1-8B on an A100, 256 requests, 1.44 GiB of activations. SGLang leaves activations out."""
MEMORY_TRTLLM = MemoryRules(0, 2, None, ((1, 2.5),))
"""TensorRT-LLM 1.2 on an H200: 0.14 GiB of PyTorch's and 2.55 GiB of other memory."""


@dataclass(frozen=True)
class EnginePreset:
    """What one version of an engine does by default."""

    name: str
    """``<backend>-<version>``."""
    async_scheduling: bool
    """A step is scheduled while the one before it still runs."""
    scheduler_reserve_full_isl: bool
    """A prompt is admitted only when blocks for all of it are free."""
    gpu_memory_utilization: float
    max_capture_size: int = 512
    """Largest batch of tokens that is captured as a CUDA graph."""
    max_capture_size_blackwell: int = 512
    """Largest such batch on data-centre Blackwell."""
    captures_max_num_seqs: bool = False
    """``max_num_seqs`` itself is captured too."""
    lacks: tuple[str, ...] = ("watermark", "prefill_schedule_interval")
    """Flags of newer versions of its scheduler."""
    since: str = ""
    """Release from which on its minor version is this; before, the preset before it stands for it."""
    scheduler: str = ""
    """Name of its scheduler among ``windtunnel.policy.PRESETS``; empty: its own."""
    enable_prefix_caching: bool = True
    """Prefix caching is on by default, as far as it is simulated."""
    enable_chunked_prefill: bool = True
    """Prompts are cut by default; otherwise one that exceeds ``max_num_batched_tokens`` is refused."""
    graphs_prefill: bool = True
    """Small batches with prefill run from captured graphs too, all but their attention."""
    launches_early: bool = False
    """Every kernel's prologue runs while the one before it ends (programmatic dependent launch, from Hopper on)."""
    overlaps_prologues: bool = True
    """Some kernels' do (the engine's libraries of 2025 and later)."""
    one_block_per_head: bool = False
    """Decodes of grouped queries read the keys once for every query head, and never in parts (TensorRT-LLM 0.11: masked
    multi-head attention, whose multi-block mode is a build flag that is off)."""
    fuses_all_reduce: bool = True
    """All-reduce, residual and norm are one kernel where the device can (from Hopper on)."""
    own_all_reduce: bool = True
    """Small messages are added up by a kernel of the engine's own, otherwise by NCCL."""
    pads_experts: bool = False
    """On Hopper experts in 8-bit blocks are DeepGEMM's grouped products at any batch size, all of whose room is
    multiplied (vLLM 0.11 and 0.12: ``deepgemm_moe_permute`` names expert 0 for rows that nobody fills; 0.13 skips them,
    0.15 chooses other kernels)."""
    pads_ranks: bool = False
    """Ranks in lockstep are padded to the tokens of the largest in every step, not only where a graph holds it, unless
    nothing is captured (vLLM up to 0.16: ``allow_dp_padding``, before 0.12 ``get_dp_padding``)."""
    deepep: bool = True
    """DeepEP's exchange can be chosen by a flag, and two micro-batches hide it (vLLM from 0.11.1 on, SGLang)."""
    pipelines: tuple[bool, ...] = ()
    """Values of ``async_scheduling`` with which a pipeline of stages is simulated."""
    turns_stages_synchronous: bool = False
    """With stages it turns ``async_scheduling`` off itself (SGLang, server_args.py), or has a loop that knows no such
    setting (TensorRT-LLM, pyexecutor/py_executor.py)."""
    before_v1: bool = False
    """vLLM's engine before v1: steps of prompts or of decodes, nothing compiled, most work of the host between steps.
    Prompts are cut by default only for models of more than 32,768 tokens (vllm/engine/arg_utils.py of 0.5.4 to 0.8)."""
    server_per_rank: bool = False
    """As many API servers as data-parallel ranks by default (vllm/entrypoints/cli/serve.py, from 0.15 on); else one."""
    balancer_rotates: bool = False
    """API servers begin with the next rank after every request, see ``policy.routing.RankBalancer``."""
    counts_in_flight: bool = False
    """API servers count their own requests in flight, see ``policy.routing.RankBalancer``."""
    shares_memory: bool = True
    """``gpu_memory_utilization`` covers weights, activations and KV cache together (vLLM). SGLang's share
    (``mem_fraction_static``) leaves activations out; TensorRT-LLM's (``free_gpu_memory_fraction``) is of what is left
    next to weights and activations."""
    memory: MemoryRules = MEMORY_SECOND_RUNNER
    """What is taken besides weights and KV cache."""

    @property
    def backend(self) -> str:
        """Name of the engine, as in the kernel database."""
        return self.name.partition("-")[0]

    @property
    def version(self) -> str:
        """Version of the engine."""
        return self.name.partition("-")[2]

    @property
    def release(self) -> str:
        """A release that it stands for: the one whose rules it has, or the first."""
        name, _, found = self.rules.partition("-")
        if name != self.backend or not found.startswith(f"{self.version}."):
            found = self.since or self.version
        return found if found.count(".") > 1 else f"{found}.0"

    @property
    def rules(self) -> str:
        """Name of the scheduler that it runs."""
        return self.scheduler or self.name


VLLM_0_32 = EnginePreset(
    "vllm-0.32",
    async_scheduling=True,
    scheduler_reserve_full_isl=True,
    gpu_memory_utilization=0.92,
    max_capture_size_blackwell=1024,
    captures_max_num_seqs=True,
    lacks=(),
    pipelines=(True, False),
    server_per_rank=True,
    balancer_rotates=True,
    counts_in_flight=True,
)
VLLM_0_16 = EnginePreset(
    "vllm-0.16",
    async_scheduling=True,
    scheduler_reserve_full_isl=False,
    gpu_memory_utilization=0.9,
    pipelines=(False,),
    memory=MEMORY_TORCH_SAMPLER,
    server_per_rank=True,
    pads_ranks=True,
)
"""Asynchronous scheduling is the default from 0.14 on, as the release notes of 0.14.0 say."""
VLLM_0_13 = replace(
    VLLM_0_16,
    name="vllm-0.13",
    async_scheduling=False,
    fuses_all_reduce=False,
    scheduler="vllm-0.12",
    server_per_rank=False,
)
VLLM_0_12 = replace(VLLM_0_13, name="vllm-0.12", scheduler="", pads_experts=True)
VLLM_0_17 = replace(
    VLLM_0_16, name="vllm-0.17", scheduler="vllm-0.16", memory=MEMORY_FLASHINFER_SAMPLER, pads_ranks=False
)
VLLM_0_19 = replace(VLLM_0_17, name="vllm-0.19", scheduler="vllm-0.20", scheduler_reserve_full_isl=True)
VLLM_0_20 = replace(VLLM_0_19, name="vllm-0.20", scheduler="", gpu_memory_utilization=0.92)
VLLM_0_22 = replace(
    VLLM_0_20,
    name="vllm-0.22",
    scheduler="vllm-0.20",
    memory=replace(MEMORY_FLASHINFER_SAMPLER, graphs_inside=True),
)
"""vLLM 0.22 to 0.30 have the memory of their logs ("without CUDA graph memory profiling")."""
VLLM_0_24 = replace(VLLM_0_22, name="vllm-0.24", scheduler="", lacks=())
VLLM_0_25 = replace(VLLM_0_24, name="vllm-0.25", scheduler="vllm-0.24", balancer_rotates=True)
VLLM_0_27 = replace(VLLM_0_25, name="vllm-0.27", counts_in_flight=True)
VLLM_0_28 = replace(VLLM_0_27, name="vllm-0.28", max_capture_size_blackwell=1024)
VLLM_0_29 = replace(VLLM_0_28, name="vllm-0.29", captures_max_num_seqs=True)
VLLM_0_6 = EnginePreset(
    "vllm-0.6",
    async_scheduling=False,
    scheduler_reserve_full_isl=False,
    gpu_memory_utilization=0.9,
    max_capture_size=256,
    max_capture_size_blackwell=256,
    scheduler="vllm-0.8-v0",
    enable_prefix_caching=False,
    graphs_prefill=False,
    fuses_all_reduce=False,
    overlaps_prologues=False,
    deepep=False,
    before_v1=True,
    pipelines=(False,),
    memory=MEMORY_V0,
)
SGLANG_0_5 = EnginePreset(
    "sglang-0.5",
    True,
    True,
    0.88,
    graphs_prefill=False,
    shares_memory=False,
    since="0.5.22",
    scheduler="sglang-0.5.23",
    pipelines=(False,),
    turns_stages_synchronous=True,
)
"""From 0.5.22 on nobody decodes past a declared length. From 0.5.1 to 0.5.21 they do: 0.4.6 stands for those releases,
although by 0.5.5 a retraction keeps no margin."""
TENSORRT_LLM = EnginePreset(
    "trtllm-1.0",
    async_scheduling=True,
    scheduler_reserve_full_isl=True,
    gpu_memory_utilization=0.9,
    graphs_prefill=False,
    deepep=False,
    shares_memory=False,
    scheduler="trtllm-guaranteed-no-evict",
    enable_prefix_caching=False,
    enable_chunked_prefill=False,
    pipelines=(False,),
    turns_stages_synchronous=True,
    memory=MEMORY_TRTLLM,
)
TENSORRT_LLM_0_11 = replace(
    TENSORRT_LLM,
    name="trtllm-0.11",
    async_scheduling=False,
    overlaps_prologues=False,
    own_all_reduce=False,
    one_block_per_head=True,
    fuses_all_reduce=False,
)
PRESETS: dict[str, EnginePreset] = {
    preset.name: preset
    for preset in (
        replace(VLLM_0_32, name="vllm-0.33"),
        VLLM_0_32,
        replace(VLLM_0_32, name="vllm-0.31", scheduler="vllm-0.32"),
        VLLM_0_29,
        VLLM_0_28,
        VLLM_0_27,
        VLLM_0_25,
        VLLM_0_24,
        VLLM_0_22,
        VLLM_0_20,
        VLLM_0_19,
        VLLM_0_17,
        VLLM_0_16,
        replace(VLLM_0_16, name="vllm-0.15", scheduler="vllm-0.16"),
        replace(VLLM_0_16, name="vllm-0.14", scheduler="vllm-0.16", server_per_rank=False),
        VLLM_0_13,
        VLLM_0_12,
        replace(VLLM_0_12, name="vllm-0.11", since="0.11.1", scheduler="vllm-0.12"),
        replace(VLLM_0_13, name="vllm-0.10", deepep=False, scheduler=""),
        replace(VLLM_0_13, name="vllm-0.8", deepep=False, scheduler="vllm-0.10", pads_ranks=False),
        VLLM_0_6,
        SGLANG_0_5,
        replace(SGLANG_0_5, name="sglang-0.4.6", since="", scheduler=""),
        TENSORRT_LLM_0_11,
        TENSORRT_LLM,
        replace(TENSORRT_LLM, name="trtllm-1.1", launches_early=True),
    )
}
ALIASES = {"vllm": "vllm-0.32"}


def preset(name: str) -> EnginePreset:
    """The preset of this name; ``vllm`` is the default of new runs. Raises InputError with the nearest name."""
    full = ALIASES.get(name, name)
    if full not in PRESETS:
        raise unknown("engine preset", name, [*PRESETS, *ALIASES])
    return PRESETS[full]


def require_pipeline(engine_preset: EnginePreset, stages: int, async_scheduling: bool) -> None:
    """Raise InputError when the engine's pipelines are not simulated, or it has none with these settings.

    vLLM 0.10 and 0.12 refuse asynchronous scheduling with a pipeline (config/vllm.py). From 0.14 on it is on, but
    with the first of its model runners the first stage waits for the tokens of each step before the next
    (v1/worker/gpu_model_runner.py), so that nothing overlaps.
    """
    if stages == 1 or async_scheduling in engine_preset.pipelines:
        return
    given = f"pipeline_parallel_size={stages}"
    if engine_preset.async_scheduling and not engine_preset.turns_stages_synchronous:
        raise InputError(
            f"{given}: with async_scheduling, its default, {engine_preset.name} runs one step at a time through all "
            "stages, which is not simulated; use async_scheduling=False or preset='vllm-0.32'"
        )
    raise InputError(f"{given}: {engine_preset.name} has no async_scheduling with it; leave that out")
