"""Which exchanges an engine has, and which of its steps it splits into two micro-batches to hide them."""

from windtunnel.deployment.engine import AUTO, GATHERED, HIGH_THROUGHPUT, LOW_LATENCY, Engine
from windtunnel.deployment.presets import EnginePreset
from windtunnel.errors import InputError
from windtunnel.model import Model

LEAST_SPLIT = 2
"""Tokens that make two micro-batches."""
VLLM_THRESHOLDS = (32, 512)
"""``dbo_decode_token_threshold`` and ``dbo_prefill_token_threshold`` (vllm/config/parallel.py)."""


def require_exchange(engine: Engine, chosen: EnginePreset, model: Model) -> None:
    """Raise InputError for an exchange that the engine does not have, or that these ranks do not make.

    vLLM splits a step only with DeepEP's kernels (config/vllm.py: ``use_ubatching``), data-parallel ranks and expert
    parallelism (docs/design/dbo.md).
    """
    backend, given = engine.all2all_backend, f"all2all_backend={engine.all2all_backend!r}"
    if backend != GATHERED:
        if not chosen.deepep:
            raise InputError(f"{given}: not simulated for {chosen.name}; use preset='vllm-0.32', or {GATHERED!r}")
        if backend == AUTO and chosen.backend != "sglang":
            raise InputError(f"{given}: {chosen.name} has no such choice; use {LOW_LATENCY!r} or {HIGH_THROUGHPUT!r}")
        if not (model.has_moe and engine.enable_expert_parallel and engine.data_parallel_size > 1):
            raise InputError(
                f"{given}: needs data-parallel ranks of a mixture of experts that hold whole experts; set "
                "data_parallel_size ≥ 2 and enable_expert_parallel, or leave it out"
            )
    if backend == HIGH_THROUGHPUT and engine.cudagraph_capture_sizes:
        raise InputError(
            f"cudagraph_capture_sizes={list(engine.cudagraph_capture_sizes)}: {given} is in no graph; leave one out"
        )
    _require_splitting(engine, chosen)


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
    if engine.all2all_backend == GATHERED:
        raise InputError(
            f"enable_dbo with all2all_backend={GATHERED!r}: only DeepEP's exchange runs beside other kernels; use "
            f"all2all_backend={LOW_LATENCY!r} or {HIGH_THROUGHPUT!r}"
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
