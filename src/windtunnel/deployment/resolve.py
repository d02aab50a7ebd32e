"""Fill in an engine's defaults as vLLM does for a model and a device; refuse what cannot work or is not simulated.

Then say which steps of a resolved engine are split into two micro-batches, to hide the exchange of experts.
"""

from dataclasses import replace

from windtunnel.deployment.engine import (
    AUTO,
    ENGINE_DTYPES,
    GATHERED,
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    ONE_KERNEL,
    ONE_SIDED,
    Engine,
)
from windtunnel.deployment.engine_scheduler import (
    named_settings,
    require_own_settings,
    require_stages,
    with_named_scheduler,
)
from windtunnel.deployment.presets import EnginePreset, preset, require_pipeline
from windtunnel.deployment.spread_prompts import require_spread_prompts
from windtunnel.errors import InputError
from windtunnel.hardware import GIB, Device
from windtunnel.model import MLP, Model, MoE, Quantization
from windtunnel.model.adapters import require_adaptable
from windtunnel.model.draft_heads import draft_head
from windtunnel.model.layers import Layer
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.spec import VOCAB_PADDING, layers_of_stages
from windtunnel.policy import Settings

OF_PRESET = ("gpu_memory_utilization", "async_scheduling", "enable_prefix_caching", "scheduler_reserve_full_isl")
"""Arguments whose defaults change with the engine and its version alone."""

SAME_METHOD = {
    "fp8": {"fp8", "fp8_block"},
    "modelopt": {"fp8"},
    "modelopt_fp4": {"nvfp4"},
    "modelopt_mixed": {"fp8", "fp8_block", "mxfp8", "nvfp4"},
    "mxfp4": {"mxfp4"},
    "awq": {"int4"},
    "awq_marlin": {"int4"},
    "gptq": {"int4", "int8"},
    "gptq_marlin": {"int4", "int8"},
    "compressed-tensors": {"fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int8"},
}
"""vLLM's name in ``quantization`` -> methods of a checkpoint that it stands for."""

NATIVE_SINCE = {"fp8": 89, "fp8_block": 89, "mxfp8": 100, "nvfp4": 100, "mxfp4": 100}
"""Compute capability × 10 from which products are computed in the method's own type; older devices unpack weights."""

LONG_CONTEXT = 32768
"""Longest context up to which vLLM before v1 computes prompts whole unless told otherwise."""

COMPRESSED_BLOCK = 256
"""Tokens of a block where entries of the cache stand for several (vLLM and SGLang alike)."""

KEPT_STATES = 3
"""States of recurrent layers that SGLang has room for, for each request that runs, while it caches prefixes."""

SGLANG_LARGEST, TRTLLM_LARGEST = 512, 2048
"""Largest batches of decodes that SGLang and TensorRT-LLM capture as CUDA graphs."""

FP8_BLOCK = 128
"""Side of a block of fp8 weights with one scale."""


def resolve_engine(engine: Engine, model: Model, device: Device) -> Engine:
    """The engine with every None filled in for this model on this device. Resolving twice changes nothing.

    Raises InputError for a setting that vLLM would refuse, and for one that is not simulated yet.
    """
    chosen = preset(engine.preset)
    require_own_settings(engine)
    effective_model(model, device, engine)
    require_shardable(engine, model, device)
    require_exchange(engine, chosen, model)
    require_spread_prompts(engine, model)
    if engine.cpu_offload_gb and chosen.backend == "trtllm":
        raise InputError(f"cpu_offload_gb={engine.cpu_offload_gb:g}: TensorRT-LLM has no such flag; leave it out")
    _require_one_domain(engine, device)
    length = _model_len(engine, model)
    chunked = engine.enable_chunked_prefill
    if chunked is None:
        chunked = length > LONG_CONTEXT if chosen.before_v1 else chosen.enable_chunked_prefill
    named = named_settings(engine.scheduler)
    if engine.scheduler is not None:
        chunked = named is None or named.chunked_prefill
    refuses = not chosen.enable_chunked_prefill if named is None else named.refuse_long_prompts
    ranks = engine.data_parallel_size if model.has_moe else 1
    tokens, seqs = _batch_limits(
        engine, _defaults(device, chosen, ranks, chunked, engine.num_speculative_tokens > 0), length, chunked or refuses
    )
    resolved = replace(
        engine,
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        enable_chunked_prefill=chunked,
        block_size=engine.block_size or _block_size(model, device, engine.backend),
        dtype=effective_model(model, device, engine).dtype,
        all2all_backend=_exchange(engine, model, device),
        **{name: getattr(chosen, name) for name in OF_PRESET if getattr(engine, name) is None},
    )
    if engine.states_per_request is None:
        resolved = replace(resolved, states_per_request=_states(resolved, model, named))
    if engine.async_scheduling is None and engine.pipeline_parallel_size > 1 and chosen.turns_stages_synchronous:
        resolved = replace(resolved, async_scheduling=False)
    if engine.scheduler is not None:
        resolved = with_named_scheduler(resolved, engine)
    model.resolve_kv_cache_dtype(engine.kv_cache_dtype)
    _require_pipeline(resolved, model)
    return replace(resolved, cudagraph_capture_sizes=capture_sizes(resolved, device))


def effective_model(model: Model, device: Device, engine: Engine) -> Model:
    """The model as the engine computes it: ``dtype``, ``quantization`` and what the device can compute natively.

    Raises InputError when ``quantization`` contradicts the checkpoint.
    """
    if engine.dtype != "auto":
        model = model.with_dtype(ENGINE_DTYPES[engine.dtype])
    if engine.mamba_ssm_cache_dtype != "auto":
        model = model.with_state_bytes(DTYPE_BYTES[engine.mamba_ssm_cache_dtype])
    if engine.decode_context_parallel_size > 1:
        if engine.backend == "trtllm":
            raise InputError(
                f"decode_context_parallel_size={engine.decode_context_parallel_size}: simulated for vLLM and SGLang; "
                "leave it out"
            )
        model = model.with_context_parts(engine.decode_context_parallel_size, engine.tensor_parallel_size)
    if engine.indexer_kv_dtype != "auto":
        model = model.with_index_dtype(engine.indexer_kv_dtype)
        if engine.indexer_kv_dtype == "mxfp4" and not device.is_blackwell_datacentre:
            raise InputError(
                f"indexer_kv_dtype='mxfp4': its kernels are for data-centre Blackwell, not for {device.name}; use 'fp8'"
            )
    stored, asked = model.quantization, engine.quantization
    if asked and stored and not {each.method for each in stored.formats} <= SAME_METHOD.get(asked, {asked}):
        raise InputError(
            f"quantization={asked!r}: {model.name} is stored as {stored.methods}; leave it out or load the 16-bit model"
        )
    if asked and not stored:
        if asked != "fp8":
            raise InputError(
                f"quantization={asked!r}: {model.name} is a 16-bit checkpoint; only 'fp8' is made on loading: for "
                f"{asked} give that checkpoint's config.json as the model"
            )
        stored = Quantization("fp8")
    return model.with_quantization(stored and _computed(stored, device, engine))


def _computed(stored: Quantization, device: Device, engine: Engine) -> Quantization:
    """With what the device and the engine make of the activations of each format."""
    if device.sm_version and device.sm_version < NATIVE_SINCE.get(stored.method, 0):
        stored = replace(stored, weight_only=True)
    if _casts_activations(stored, device, engine):
        stored = replace(stored, weight_only=False)
    return replace(stored, beside=stored.beside and _computed(stored.beside, device, engine))


def _casts_activations(stored: Quantization, device: Device, engine: Engine) -> bool:
    """SGLang and TensorRT-LLM multiply mxfp4 experts with 8-bit activations on data-centre Blackwell; vLLM only where
    it is told to (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8), which a model with ``weight_only`` off stands for."""
    return stored.method == "mxfp4" and engine.backend != "vllm" and device.is_blackwell_datacentre


def _require_pipeline(engine: Engine, model: Model) -> None:
    """Raise InputError for a pipeline that cannot be, or is not simulated."""
    layers_of_stages(model.num_layers, engine.pipeline_parallel_size, engine.pipeline_layers)
    require_stages(engine.scheduler, engine.pipeline_parallel_size)
    require_pipeline(preset(engine.preset), engine.pipeline_parallel_size, bool(engine.async_scheduling))
    if engine.pipeline_parallel_size > 1 and engine.num_speculative_tokens:
        raise InputError(
            f"pipeline_parallel_size={engine.pipeline_parallel_size} with num_speculative_tokens="
            f"{engine.num_speculative_tokens}: not simulated together; use one of them"
        )
    if engine.pipeline_parallel_size > 1 and engine.data_parallel_size > 1 and model.has_moe:
        raise InputError(
            f"pipeline_parallel_size={engine.pipeline_parallel_size} with data_parallel_size="
            f"{engine.data_parallel_size}: not simulated for {model.name}, whose ranks share experts; use one of them"
        )


def _block_size(model: Model, device: Device, backend: str) -> int:
    """16, but the latent-attention kernels of Hopper and later read blocks of 64 (FlashMLA); 32 in TensorRT-LLM.
    DeepSeek-V4's blocks hold two entries of the most compressed layers (vLLM's announcement of the model)."""
    if model.compresses:
        return COMPRESSED_BLOCK
    if backend == "trtllm":
        return 32
    return 64 if model.has_mla and device.sm_version >= 90 else 16


def _states(engine: Engine, model: Model, named: Settings | None) -> int:
    """States of a request that runs: SGLang sets two aside that the tree of prefixes may keep (ratio of
    ``max_mamba_cache_size`` to running requests in its model_runner_kv_cache_mixin.py, 0.5.9)."""
    keeps = engine.enable_prefix_caching if named is None else getattr(named, "radix_cache", False)
    recurs = bool(model.state_bytes()) and not model.compresses
    return KEPT_STATES if engine.backend == "sglang" and keeps and recurs else 1


def _model_len(engine: Engine, model: Model) -> int:
    limit = model.max_position_embeddings
    if engine.max_model_len is None:
        return limit
    if engine.max_model_len > limit:
        raise InputError(
            f"max_model_len={engine.max_model_len}: {model.name} has positions for {limit} tokens; use ≤ {limit}"
        )
    return engine.max_model_len


def _batch_limits(engine: Engine, defaults: tuple[int, int], length: int, any_length: bool) -> tuple[int, int]:
    """``max_num_batched_tokens`` and ``max_num_seqs``: the defaults, then vLLM's rules (0.32).

    ``any_length``: a prompt of any length is cut, or refused when it comes; otherwise a step must hold the longest.
    """
    tokens, seqs = defaults
    seqs = engine.max_num_seqs or seqs
    if engine.max_num_batched_tokens is None:
        tokens = min(tokens, seqs * length)
        tokens = tokens if any_length else max(tokens, length)
        tokens = max(tokens, engine.max_num_seqs or 0)
    else:
        tokens = engine.max_num_batched_tokens
    if engine.max_num_seqs is None:
        seqs = min(seqs, tokens)
    if tokens < seqs:
        raise InputError(f"max_num_batched_tokens={tokens}: must be ≥ max_num_seqs={seqs}")
    if not any_length and tokens < length:
        raise InputError(
            f"max_num_batched_tokens={tokens}: must be ≥ max_model_len={length} without chunked prefill; "
            "raise it, lower max_model_len or enable chunked prefill"
        )
    return tokens, seqs


def _defaults(device: Device, chosen: EnginePreset, ranks: int, chunked: bool, drafts: bool) -> tuple[int, int]:
    """Tokens and requests by the device's memory: vLLM's; SGLang's ``chunked_prefill_size`` and
    ``max_running_requests``, which ranks of attention share (server_args.py of 0.5; with drafts 48 of them,
    arg_groups/speculative_hook.py of 0.5.23); TensorRT-LLM's ``max_num_tokens``
    and ``max_batch_size`` (llm_args.py, 1.0). Before v1 vLLM asked no device (SchedulerConfig of 0.6)."""
    memory, backend = device.memory_bytes / GIB, chosen.backend
    if chosen.before_v1:
        return (512 if chunked else 2048), 256
    if backend == "sglang":
        tokens = 16384 if memory >= 160 else 8192 if memory >= 60 else 4096
        return max(tokens // ranks, 1), max((48 if drafts and chosen.name == "sglang-0.5" else 2048) // ranks, 1)
    if backend == "trtllm":
        return 8192, 2048
    if memory >= 160:
        return 16384, 1024
    if memory >= 70 and not device.name.startswith("a100"):
        return 8192, 1024
    return 2048, 256


# --- captured graphs --------------------------------------------------------------------------------------------------


def capture_sizes(engine: Engine, device: Device) -> tuple[int, ...]:
    """Captured token counts of a resolved engine, ascending; empty without CUDA graphs.

    vLLM 0.32: up to min(2·max_num_seqs, 512 or 1024 on data-centre Blackwell, max_num_batched_tokens): 1, 2, 4, then by
    8 below 256 and by 16 from there, and max_num_seqs itself.
    """
    if engine.enforce_eager or engine.all2all_backend == HIGH_THROUGHPUT:
        return ()
    chosen = preset(engine.preset)
    if engine.cudagraph_capture_sizes is not None:
        return tuple(
            size for size in engine.cudagraph_capture_sizes if size <= engine.resolved("max_num_batched_tokens")
        )
    if chosen.backend != "vllm":
        return _decode_sizes(
            chosen.backend, min(engine.resolved("max_num_seqs"), engine.resolved("max_num_batched_tokens"))
        )
    limit = chosen.max_capture_size_blackwell if device.is_blackwell_datacentre else chosen.max_capture_size
    largest = min(2 * engine.resolved("max_num_seqs"), limit, engine.resolved("max_num_batched_tokens"))
    sizes = {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest}
    if chosen.captures_max_num_seqs and engine.resolved("max_num_seqs") <= largest:
        sizes.add(engine.resolved("max_num_seqs"))
    return tuple(sorted(sizes))


def _decode_sizes(backend: str, seqs: int) -> tuple[int, ...]:
    """Batches of decodes that engines capture which graph nothing else.

    SGLang 0.5 (server_args.py): 1, 2, 4, 8, 12, 16, by 8 to 256, by 16 to 512, ``cuda_graph_max_bs``. TensorRT-LLM 1.0
    (llm_args.py): 1, 2, 4, by 8 to 128, then doubling.
    """
    if backend == "sglang":
        sizes = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, SGLANG_LARGEST + 1, 16), min(seqs, SGLANG_LARGEST)}
    else:
        sizes = {1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048, min(seqs, TRTLLM_LARGEST)}
    return tuple(sorted(size for size in sizes if size <= seqs))


# --- division over GPUs -----------------------------------------------------------------------------------------------


def require_shardable(engine: Engine, model: Model, device: Device) -> None:
    """Raise InputError when heads, widths, experts or vocabulary cannot be divided as the engine asks."""
    tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.expert_ranks
    if tp > device.gpus_per_domain and tp % device.gpus_per_domain:
        raise InputError(
            f"tensor_parallel_size={tp}: {device.gpus_per_domain} {device.name} GPUs share a {device.link} domain; use "
            "a multiple of that, or no more"
        )
    for name in ("shared_head", "shared_dense"):
        if getattr(engine, name) and not (model.has_moe and engine.data_parallel_size > 1):
            raise InputError(f"{name}: needs data-parallel ranks of a mixture of experts; leave it out")
    if engine.enable_expert_parallel and not model.has_moe:
        raise InputError(f"enable_expert_parallel: {model.name} has no experts; leave it out")
    if engine.enable_eplb and not engine.enable_expert_parallel:
        raise InputError("enable_eplb: balances experts that GPUs divide: add enable_expert_parallel, or leave it out")
    _require_additions(engine, model, device)
    for _, layer in model.layers:
        _require_mixer(layer, tp, device, model)
        mlp, dense = layer.mlp, layer.beside or layer.mlp
        if isinstance(dense, MLP):
            _require_width(
                "intermediate_size", dense.intermediate_size, ranks if engine.shared_dense else tp, "mlp", model
            )
        if not isinstance(mlp, MoE):
            continue
        if not engine.enable_expert_parallel:
            _require_width("moe_intermediate_size", mlp.intermediate_size, ranks, "experts", model)
        elif ranks > mlp.num_experts:
            raise InputError(
                f"enable_expert_parallel over {ranks} GPUs: {model.name} has {mlp.num_experts} experts; use fewer GPUs"
            )
        if mlp.shared_intermediate_size:
            _require_width("shared experts' size", mlp.shared_intermediate_size, tp, "shared_experts", model)
    padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        raise InputError(f"tensor_parallel_size={tp}: must divide the padded vocabulary {padded} of {model.name}")


def _require_additions(engine: Engine, model: Model, device: Device) -> None:
    """Checks what a server loads in addition to its model: a draft head, LoRA adapters."""
    if engine.speculative_model:
        head = draft_head(model, engine.speculative_model)
        _require_mixer(head.layer, engine.tensor_parallel_size, device, model)
    if engine.max_loras:
        if engine.backend != "vllm":
            raise InputError(f"max_loras={engine.max_loras}: simulated for vLLM alone; leave it out")
        require_adaptable(model)


def possible_tensor_parallel_sizes(engine: Engine, model: Model, device: Device) -> list[int]:
    """Tensor parallel sizes that the model can be divided by on this device, ascending."""
    found = []
    for size in range(1, device.gpus_per_domain + 1):
        try:
            require_shardable(replace(engine, tensor_parallel_size=size), model, device)
        except InputError:
            continue
        found.append(size)
    return found


def _require_mixer(layer: Layer, tp: int, device: Device, model: Model) -> None:
    attention = layer.attention
    if attention is None:
        return
    _require_heads(attention.num_heads, tp, device.gpus_per_domain, model)
    what, number, repeated = attention.groups or ("heads", attention.num_heads, False)
    if number % tp and not (repeated and tp % number == 0):
        rule = "must divide, or be a multiple of, the" if repeated else "must divide the"
        raise InputError(f"tensor_parallel_size={tp}: {rule} {number} {what} of {model.name}")


def _require_heads(heads: int, tp: int, most: int, model: Model) -> None:
    if heads % tp:
        sizes = ", ".join(str(size) for size in range(1, most + 1) if heads % size == 0)
        raise InputError(
            f"tensor_parallel_size={tp}: must divide the {heads} heads of {model.name}; use one of {sizes}"
        )


def _require_width(what: str, width: int, shards: int, part: str, model: Model) -> None:
    """A dense or expert layer of this width in ``shards`` slices; block-scaled fp8 needs slices of whole blocks."""
    if width % shards:
        raise InputError(f"{shards} GPUs: must divide {what}={width} of {model.name}; use another parallelism")
    slices = width // shards
    if shards > 1 and model.weight_dtype(part) == "fp8_block" and slices % FP8_BLOCK:
        raise InputError(
            f"{shards} GPUs: {what}={width} of {model.name} leaves slices of {slices}, but fp8 weights are scaled in "
            f"blocks of {FP8_BLOCK}; use fewer GPUs{', or expert parallelism' if part == 'experts' else ''}"
        )


LEAST_SPLIT = 2
"""Tokens that make two micro-batches."""
VLLM_THRESHOLDS = (32, 512)
"""``dbo_decode_token_threshold`` and ``dbo_prefill_token_threshold`` (vllm/config/parallel.py)."""


ONE_NODE = 8
"""GPUs of an NVLink domain up to which TensorRT-LLM gathers the tokens of all ranks."""
IN_4_BITS = ("nvfp4", "mxfp4")


def _exchange(engine: Engine, model: Model, device: Device) -> str:
    """How ranks exchange tokens: as is said, or as TensorRT-LLM chooses: in racks its ranks write into each other's
    memory if experts have 4-bit weights (``AlltoallMethodType`` of its fused experts; measured rows agree)."""
    shares = model.has_moe and engine.enable_expert_parallel and engine.data_parallel_size > 1
    if engine.backend != "trtllm" or engine.all2all_backend != GATHERED or not shares:
        return engine.all2all_backend
    writes = device.gpus_per_domain > ONE_NODE and model.weight_dtype("experts") in IN_4_BITS
    return ONE_SIDED if writes else GATHERED


def require_exchange(engine: Engine, chosen: EnginePreset, model: Model) -> None:
    """Raise InputError for an exchange that the engine does not have, or that these ranks do not make.

    vLLM splits a step only with DeepEP's kernels (config/vllm.py: ``use_ubatching``), data-parallel ranks and expert
    parallelism (docs/design/dbo.md).
    """
    backend, given = engine.all2all_backend, f"all2all_backend={engine.all2all_backend!r}"
    if engine.enable_symm_mem and chosen.backend == "trtllm":
        raise InputError("enable_symm_mem: simulated for vLLM and SGLang; TensorRT-LLM has no such flag: leave it out")
    if engine.flashinfer_sampler and chosen.backend != "vllm":
        raise InputError(f"flashinfer_sampler: a choice of vLLM's; {chosen.name} has none: leave it out")
    if backend != GATHERED:
        if not chosen.deepep and (backend != ONE_SIDED or chosen.backend != "trtllm"):
            raise InputError(f"{given}: not simulated for {chosen.name}; use preset='vllm-0.32', or {GATHERED!r}")
        if backend == ONE_KERNEL and chosen.backend != "sglang":
            raise InputError(f"{given}: simulated for SGLang alone; use preset='sglang-0.5', or {GATHERED!r}")
        if backend == AUTO and chosen.backend != "sglang":
            raise InputError(f"{given}: {chosen.name} has no such choice; use {LOW_LATENCY!r} or {HIGH_THROUGHPUT!r}")
        if not (model.has_moe and engine.enable_expert_parallel and engine.expert_ranks > 1):
            raise InputError(
                f"{given}: needs data-parallel ranks of a mixture of experts that hold whole experts; set "
                "data_parallel_size ≥ 2 and enable_expert_parallel, or leave it out"
            )
    if backend == HIGH_THROUGHPUT and engine.cudagraph_capture_sizes:
        raise InputError(
            f"cudagraph_capture_sizes={list(engine.cudagraph_capture_sizes)}: {given} is in no graph; leave one out"
        )
    _require_splitting(engine, chosen)


def _require_one_domain(engine: Engine, device: Device) -> None:
    """Raise InputError for kernels over GPUs that no NVLink joins, into whose memory they write."""
    ranks, written = engine.tensor_parallel_size * engine.expert_ranks, engine.all2all_backend
    joined = device.link == "nvlink" and ranks <= device.gpus_per_domain
    if not joined and (written == ONE_KERNEL or (written == ONE_SIDED and engine.backend != "trtllm")):
        raise InputError(
            f"all2all_backend={written!r} over {ranks} GPUs: {device.gpus_per_domain} {device.name} GPUs share a "
            f"{device.link} domain, and it needs one of NVLink; use {LOW_LATENCY!r}, or fewer GPUs"
        )


def _require_splitting(engine: Engine, chosen: EnginePreset) -> None:
    given = {
        name: getattr(engine, name)
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold")
        if getattr(engine, name) is not None
    }
    if not engine.enable_dbo:
        for name, value in given.items():
            raise InputError(f"{name}={value}: nothing is split without enable_dbo; add it or leave this out")
        return
    if not chosen.deepep:
        raise InputError(f"enable_dbo: not simulated for {chosen.name}; use preset='vllm-0.32', or leave it out")
    if engine.all2all_backend in (GATHERED, ONE_KERNEL, ONE_SIDED):
        raise InputError(
            f"enable_dbo with all2all_backend={engine.all2all_backend!r}: only DeepEP's exchange runs alongside other "
            f"kernels; use all2all_backend={LOW_LATENCY!r} or {HIGH_THROUGHPUT!r}"
        )
    if given and chosen.backend == "sglang":
        name, value = next(iter(given.items()))
        raise InputError(f"{name}={value}: {chosen.name} splits every batch and has no threshold; leave it out")


def split_from(engine: Engine) -> tuple[float, float]:
    """Least tokens of a rank's batch that is split: of decodes alone, and with prompts; infinite where none is.

    SGLang splits every batch (``compute_split_seq_index``), but prompts not with low-latency kernels
    (``TboDPAttentionPreparer.prepare_all_gather`` in two_batch_overlap.py).
    """
    if not engine.enable_dbo:
        return float("inf"), float("inf")
    if engine.backend == "sglang":
        return LEAST_SPLIT, float("inf") if engine.all2all_backend == LOW_LATENCY else LEAST_SPLIT
    given = engine.dbo_decode_token_threshold, engine.dbo_prefill_token_threshold
    decode, prefill = (own if value is None else value for value, own in zip(given, VLLM_THRESHOLDS, strict=True))
    return max(decode, LEAST_SPLIT), max(prefill, LEAST_SPLIT)
