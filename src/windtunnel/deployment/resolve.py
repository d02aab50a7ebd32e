"""Fill in an engine's defaults as vLLM does for a model and a device; refuse what cannot work or is not simulated."""

from dataclasses import replace

from windtunnel.deployment.capture import capture_sizes
from windtunnel.deployment.engine import ENGINE_DTYPES, Engine
from windtunnel.deployment.exchange_rules import require_exchange
from windtunnel.deployment.own_scheduler import (
    named_settings,
    require_own_settings,
    require_stages,
    with_named_scheduler,
)
from windtunnel.deployment.presets import preset, require_pipeline, require_watermark
from windtunnel.deployment.shards import require_shardable
from windtunnel.errors import InputError
from windtunnel.hardware import GIB, Device
from windtunnel.model import Model, Quantization
from windtunnel.model.stages import layers_of_stages

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

COMPRESSED_BLOCK = 256
"""Tokens of a block where entries of the cache stand for several (vLLM and SGLang alike)."""


def resolve_engine(engine: Engine, model: Model, device: Device) -> Engine:
    """The engine with every None filled in for this model on this device. Resolving twice changes nothing.

    Raises InputError for a setting that vLLM would refuse, and for one that is not simulated yet.
    """
    chosen = preset(engine.preset)
    require_watermark(chosen, engine.watermark)
    require_own_settings(engine)
    effective_model(model, device, engine)
    require_shardable(engine, model, device)
    require_exchange(engine, chosen, model)
    length = _model_len(engine, model)
    chunked = chosen.enable_chunked_prefill if engine.enable_chunked_prefill is None else engine.enable_chunked_prefill
    named = named_settings(engine.scheduler)
    if engine.scheduler is not None:
        chunked = getattr(named, "chunked_prefill", True)
    refuses = getattr(named, "refuse_long_prompts", False) or (named is None and not chosen.enable_chunked_prefill)
    ranks = engine.data_parallel_size if model.has_moe else 1
    tokens, seqs = _batch_limits(engine, _defaults(device, engine.backend, ranks), length, chunked or refuses)
    resolved = replace(
        engine,
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        enable_chunked_prefill=chunked,
        block_size=engine.block_size or _block_size(model, device, engine.backend),
        dtype=effective_model(model, device, engine).dtype,
        gpu_memory_utilization=engine.gpu_memory_utilization or chosen.gpu_memory_utilization,
        async_scheduling=chosen.async_scheduling if engine.async_scheduling is None else engine.async_scheduling,
        enable_prefix_caching=chosen.enable_prefix_caching
        if engine.enable_prefix_caching is None
        else engine.enable_prefix_caching,
        scheduler_reserve_full_isl=chosen.scheduler_reserve_full_isl
        if engine.scheduler_reserve_full_isl is None
        else engine.scheduler_reserve_full_isl,
    )
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
    stored, asked = model.quantization, engine.quantization
    if asked and stored and not {each.method for each in stored.formats} <= SAME_METHOD.get(asked, {asked}):
        raise InputError(
            f"quantization={asked!r}: {model.name} is stored as {stored.methods}; leave it out or load the 16-bit model"
        )
    if asked and not stored:
        if asked != "fp8":
            raise InputError(
                f"quantization={asked!r}: {model.name} is a 16-bit checkpoint; only 'fp8' is made on loading"
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
    layers_of_stages(model.num_layers, engine.pipeline_parallel_size)
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


def _defaults(device: Device, backend: str, ranks: int) -> tuple[int, int]:
    """Tokens and requests by the device's memory: vLLM's; SGLang's ``chunked_prefill_size`` and
    ``max_running_requests``, which ranks of attention share (server_args.py of 0.5); TensorRT-LLM's ``max_num_tokens``
    and ``max_batch_size`` (llm_args.py, 1.0)."""
    memory = device.memory_bytes / GIB
    if backend == "sglang":
        tokens = 16384 if memory >= 160 else 8192 if memory >= 60 else 4096
        return max(tokens // ranks, 1), max(2048 // ranks, 1)
    if backend == "trtllm":
        return 8192, 2048
    if memory >= 160:
        return 16384, 1024
    if memory >= 70 and not device.name.startswith("a100"):
        return 8192, 1024
    return 2048, 256
