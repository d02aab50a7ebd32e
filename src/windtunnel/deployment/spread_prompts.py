"""Prefill context parallelism: copies of a server's layers compute a part of every prompt each, and gather its keys.

vLLM gives each copy two of twice as many chunks, an early one and a late one, so that all see as many pairs of tokens,
and every so-many-th decode (v1/worker/gpu/pcp_manager.py). SGLang does the same with prompts (``zigzag``), or gives
each every so-many-th token (``interleave``); its decodes are whole on all of them (layers/cp).
"""

from windtunnel.deployment.engine import GATHERED, ONE_KERNEL, ONE_SIDED, Engine
from windtunnel.errors import InputError
from windtunnel.model import MLA, CompressedAttention, Model

ONE_SERVER = 8
"""GPUs up to which SGLang spreads prompts of sparse and compressed attention (arg_groups/model_overrides/deepseek_v2.py
of 0.5.23)."""
RELEASES = {"vllm": ("vllm-0.32", "vllm-0.33"), "sglang": ("sglang-0.5",)}
GRAPHS = {"vllm-0.32": (), "vllm-0.33": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")}
"""Models with sparse attention that vLLM captures with it."""


def spreads_decodes(engine: Engine) -> bool:
    """Whether copies divide decodes as well."""
    return engine.backend == "vllm" and engine.prefill_context_parallel_size > 1


def divides_head(engine: Engine) -> bool:
    """Whether copies divide the output head: SGLang's, where attention has no ranks."""
    spread = engine.prefill_context_parallel_size > 1
    return spread and engine.backend == "sglang" and engine.data_parallel_size == 1


def require_spread_prompts(engine: Engine, model: Model) -> None:
    """Raise InputError where the engine does not spread prompts, or that is not simulated."""
    if engine.prefill_context_parallel_size == 1:
        return
    given = f"prefill_context_parallel_size={engine.prefill_context_parallel_size}"
    known = RELEASES.get(engine.backend, ())
    if engine.preset not in known:
        raise InputError(
            f"{given}: simulated for vllm-0.32, vllm-0.33 and sglang-0.5, not for {engine.preset}; use one"
        )
    others = {
        "decode_context_parallel_size": engine.decode_context_parallel_size > 1,
        "pipeline_parallel_size": engine.pipeline_parallel_size > 1,
        "speculative_model": engine.speculative_model is not None,
        "enable_dbo": engine.enable_dbo,
        "max_loras": engine.max_loras > 0,
        "sequence_parallel_min_tokens": engine.sequence_parallel_min_tokens is not None,
        "all2all_backend": engine.all2all_backend in (ONE_KERNEL, ONE_SIDED),
        "shared_head": engine.shared_head,
        "shared_dense": engine.shared_dense,
    }
    for name in (name for name, on in others.items() if on):
        raise InputError(f"{given} with {name}={getattr(engine, name)}: not simulated together; leave one out")
    (_vllm if engine.backend == "vllm" else _sglang)(given, engine, model)


def _vllm(given: str, engine: Engine, model: Model) -> None:
    """``PCPManager.validate_config``: latent attention alone."""
    mixers = [layer.attention for _, layer in model.layers]
    if not all(isinstance(mixer, MLA) for mixer in mixers):
        raise InputError(
            f"{given}: vLLM spreads prompts only with latent attention, which {model.name} lacks; leave it out"
        )
    sparse = any(mixer.index_top_k for mixer in mixers if isinstance(mixer, MLA))
    if sparse and not engine.enforce_eager and model.architecture not in GRAPHS[engine.preset]:
        raise InputError(
            f"{given}: {engine.preset} does not capture sparse attention with it; add enforce_eager, or use "
            "preset='vllm-0.33' with DeepSeek-V3.2 or GLM-5"
        )


def _sglang(given: str, engine: Engine, model: Model) -> None:
    """What its overrides for models assert: one server of 8 GPUs for sparse attention, whole attention on each GPU and
    DeepEP for latent attention, and no recurrent layers."""
    mixers = [layer.attention for _, layer in model.layers if layer.attention]
    if not model.has_moe or (model.state_bytes() and not model.compresses):
        raise InputError(f"{given}: simulated for experts without recurrent layers, not for {model.name}; leave it out")
    compressed = any(isinstance(mixer, CompressedAttention) for mixer in mixers)
    sparse = any(isinstance(mixer, MLA) and mixer.index_top_k for mixer in mixers)
    if (compressed or sparse) and engine.world_size > ONE_SERVER:
        raise InputError(
            f"{given} over {engine.world_size} GPUs: SGLang spreads prompts of {model.name} over 8; use fewer"
        )
    if compressed and engine.data_parallel_size > 1:
        raise InputError(
            f"{given} with data_parallel_size={engine.data_parallel_size}: SGLang has it without ranks alone; use 1"
        )
    if not sparse and any(isinstance(mixer, MLA) for mixer in mixers):
        whole = engine.tensor_parallel_size == 1
        if not whole or not engine.enable_expert_parallel or engine.all2all_backend == GATHERED:
            raise InputError(
                f"{given}: SGLang spreads prompts of {model.name} with whole attention on each GPU and DeepEP: use "
                "tensor_parallel_size=1, enable_expert_parallel and all2all_backend='deepep_auto'"
            )


def require_prompts(engine: Engine, role: str) -> None:
    """Raise InputError for a decode pool that spreads prompts, which both engines refuse."""
    if role == "decode" and engine.prefill_context_parallel_size > 1:
        raise InputError(
            f"prefill_context_parallel_size={engine.prefill_context_parallel_size}: a decode pool computes no prompts; "
            "set it for the prefill pool"
        )
