"""The command that starts what was simulated: ``vllm serve``, SGLang's ``launch_server`` or ``trtllm-serve``."""

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from windtunnel.deployment.engine import AUTO, GATHERED, HIGH_THROUGHPUT, LOW_LATENCY, SCHEDULER_FLAGS
from windtunnel.deployment.presets import ALIASES, EnginePreset, preset
from windtunnel.report.handover_flags import sglang_transfer, trtllm_transfer, vllm_transfer

SCHEDULER_VALUES = {name: default for name, default in SCHEDULER_FLAGS.items() if default is not None}
VALUES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "all2all_backend",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "block_size",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "num_gpu_blocks_override",
    *SCHEDULER_VALUES,
)
SWITCHES = (
    "enable_expert_parallel",
    "enable_dbo",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
)
SILENT: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "all2all_backend": (GATHERED,),
    "enable_dbo": (False,),
    "dtype": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enable_expert_parallel": (False,),
    "enable_prefix_caching": (True,),
    **{name: (default,) for name, default in SCHEDULER_VALUES.items()},
}
"""Values that are vLLM's own defaults on every device and need no flag."""
DEEPEP_MODES = {LOW_LATENCY: "low_latency", HIGH_THROUGHPUT: "normal", AUTO: "auto"}
"""Backends of the exchange, as SGLang's ``--deepep-mode`` calls them."""
SGLANG_DISPATCHED, SGLANG_MOST_DISPATCHED = 128, 1024
"""Tokens of a rank that low-latency kernels of SGLang take by default, and at most."""
FP8 = {"fp8": "fp8_e4m3"}
"""vLLM's short name of a cache's type, as SGLang calls it."""
OPTIONS_FILES = {"mixed": "trtllm.yaml", "prefill": "context.yaml", "decode": "generation.yaml"}
"""Settings without a flag of trtllm-serve go to this file, which is written first."""
MAX_UTILIZATION = "trtllm-max-utilization"


def serve_line(pool: Mapping[str, Any], handover: Mapping[str, Any] | None = None) -> str:
    """The command for one replica of a pool, from its entry in a manifest, without what the engine does anyway.

    ``handover``: the rules by which prefill and decode pools hand over, from the specification of the deployment.
    If no command starts it, because its scheduler is not the engine's or the engine lacks its parallelism, a comment
    that says why.
    """
    engine = pool.get("engine", {})
    chosen = preset(engine.get("preset", ALIASES["vllm"]))
    scheduler = engine.get("scheduler")
    own = (None, chosen.name, chosen.rules, *([MAX_UTILIZATION] if chosen.backend == "trtllm" else []))
    if scheduler not in own:
        return f"# no command starts this: {chosen.name} has no scheduler {scheduler!r}"
    model = shlex.quote(str(pool.get("model", "MODEL")))
    role, shared = str(pool.get("role", "mixed")), bool(pool.get("lockstep"))
    apart, rules = role != "mixed", handover or {}
    if chosen.backend == "vllm":
        return " ".join([_vllm(model, engine, chosen), *(vllm_transfer(role, rules) if apart else ())])
    if chosen.backend == "sglang":
        return _sglang(model, engine, shared, sglang_transfer(role, rules) if apart else {})
    return _trtllm(model, engine, shared, role)


def _vllm(model: str, engine: Mapping[str, Any], chosen: EnginePreset) -> str:
    """Flags by the names of vllm/engine/arg_utils.py."""
    words = ["vllm", "serve", model]
    for name in VALUES:
        value = engine.get(name)
        if value is not None and value not in SILENT.get(name, ()):
            words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
    for name in SWITCHES:
        value = engine.get(name)
        if value is not None and value not in SILENT.get(name, ()):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    if engine.get("scheduler_reserve_full_isl") is False and chosen.scheduler_reserve_full_isl:
        words.append("--no-scheduler-reserve-full-isl")
    if drafts := engine.get("num_speculative_tokens"):
        settings = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
        words += ["--speculative-config", shlex.quote(settings)]
    if engine.get("enforce_eager"):
        words.append("--enforce-eager")
    return " ".join(words)


def _sglang(model: str, engine: Mapping[str, Any], shared: bool, transfer: Mapping[str, Any]) -> str:
    """Flags by the names of sglang/srt/server_args.py. ``shared``: the ranks share experts, so that attention alone is
    data parallel; SGLang then counts GPUs, chunk and requests of all ranks together. ``transfer``: further flags."""
    ranks = engine.get("data_parallel_size") or 1
    together = ranks if shared else 1
    gpus = together * (engine.get("tensor_parallel_size") or 1)
    stages = engine.get("pipeline_parallel_size") or 1
    blocks, drafts = engine.get("num_gpu_blocks_override"), engine.get("num_speculative_tokens")
    cache = engine.get("kv_cache_dtype", "auto")
    deepep = DEEPEP_MODES.get(engine.get("all2all_backend", GATHERED))
    chunk = _times(engine.get("max_num_batched_tokens"), together)
    values = {
        "tp-size": gpus,
        "pp-size": stages if stages > 1 else None,
        "dp-size": ranks if ranks > 1 else None,
        "ep-size": gpus if engine.get("enable_expert_parallel") else None,
        "moe-a2a-backend": "deepep" if deepep else None,
        "deepep-mode": deepep,
        "context-length": engine.get("max_model_len"),
        "max-running-requests": _times(engine.get("max_num_seqs"), together),
        "chunked-prefill-size": -1 if engine.get("enable_chunked_prefill") is False else chunk,
        "mem-fraction-static": engine.get("gpu_memory_utilization"),
        "page-size": engine.get("block_size"),
        "max-total-tokens": _times(blocks, engine.get("block_size") or 1),
        "dtype": engine.get("dtype"),
        "kv-cache-dtype": None if cache in ("auto", engine.get("dtype")) else FP8.get(cache, cache),
        "quantization": engine.get("quantization"),
        "speculative-algorithm": "NEXTN" if drafts else None,
        "speculative-num-steps": drafts or None,
        "speculative-eagle-topk": 1 if drafts else None,
        "speculative-num-draft-tokens": drafts + 1 if drafts else None,
        **transfer,
    }
    switches = {
        "enable-dp-attention": together > 1,
        "enable-two-batch-overlap": bool(engine.get("enable_dbo")),
        "disable-radix-cache": engine.get("enable_prefix_caching") is False,
        "disable-overlap-schedule": engine.get("async_scheduling") is False and stages == 1,
        "disable-cuda-graph": bool(engine.get("enforce_eager")),
    }
    start = ["python", "-m", "sglang.launch_server", "--model-path", model]
    return _command([*_buffers(engine, deepep), *start], values, switches)


def _buffers(engine: Mapping[str, Any], deepep: str | None) -> list[str]:
    """DeepEP's low-latency buffers, where a rank may decode more than the 128 tokens that SGLang makes them for."""
    tokens = (engine.get("max_num_seqs") or 0) * ((engine.get("num_speculative_tokens") or 0) + 1)
    if deepep in (None, "normal") or tokens <= SGLANG_DISPATCHED:
        return []
    return [f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={min(tokens, SGLANG_MOST_DISPATCHED)}"]


def _trtllm(model: str, engine: Mapping[str, Any], shared: bool, role: str) -> str:
    """Flags by the names of tensorrt_llm/commands/serve.py; the rest by those of llmapi/llm_args.py, in a file."""
    tensor, ranks = engine.get("tensor_parallel_size") or 1, engine.get("data_parallel_size") or 1
    stages = engine.get("pipeline_parallel_size") or 1
    if ranks > 1 and not shared:
        return f"# no command starts this: start {ranks} servers of {tensor * stages} GPUs each, behind a router"
    if ranks > 1 and tensor > 1:
        return f"# no command starts this: TensorRT-LLM has no {ranks} ranks of attention with {tensor} GPUs each"
    gpus = max(tensor, ranks)
    values = {
        "tp_size": gpus,
        "pp_size": stages if stages > 1 else None,
        "ep_size": gpus if engine.get("enable_expert_parallel") else None,
        "max_batch_size": engine.get("max_num_seqs"),
        "max_num_tokens": engine.get("max_num_batched_tokens"),
        "max_seq_len": engine.get("max_model_len"),
        "extra_llm_api_options": OPTIONS_FILES[role],
    }
    lines = "\n".join(_options(engine, ranks, role))
    return f"cat > {OPTIONS_FILES[role]} <<'END'\n{lines}\nEND\n" + _command(["trtllm-serve", model], values, {})


def _options(engine: Mapping[str, Any], ranks: int, role: str) -> Iterable[str]:
    """Lines of YAML. It has all settings of the cache, since the file's replace those of the flags."""
    cache = {
        "enable_block_reuse": bool(engine.get("enable_prefix_caching")),
        "free_gpu_memory_fraction": engine.get("gpu_memory_utilization"),
        "tokens_per_block": engine.get("block_size"),
        "max_tokens": _times(engine.get("num_gpu_blocks_override"), engine.get("block_size") or 1),
        "dtype": "fp8" if str(engine.get("kv_cache_dtype")).startswith("fp8") else None,
    }
    yield "kv_cache_config:"
    yield from (f"  {name}: {json.dumps(value)}" for name, value in cache.items() if value is not None)
    yield f"enable_chunked_prefill: {json.dumps(bool(engine.get('enable_chunked_prefill')))}"
    if engine.get("dtype") not in (None, "auto"):
        yield f"dtype: {engine['dtype']}"
    if ranks > 1:
        yield "enable_attention_dp: true"
    if role != "mixed":
        yield from trtllm_transfer(role)
    serial = engine.get("async_scheduling") is False and (engine.get("pipeline_parallel_size") or 1) == 1
    if serial and role != "prefill":
        yield "disable_overlap_scheduler: true"
    if engine.get("enforce_eager"):
        yield "cuda_graph_config: null"
    if engine.get("scheduler") == MAX_UTILIZATION:
        yield "scheduler_config:\n  capacity_scheduler_policy: MAX_UTILIZATION"
    if drafts := engine.get("num_speculative_tokens"):
        yield f"speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: {drafts}"


def _command(words: list[str], values: Mapping[str, Any], switches: Mapping[str, bool]) -> str:
    """The command with the flags that have a value, and those that are on."""
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", shlex.quote(str(value))]
    return " ".join([*words, *(f"--{name}" for name, on in switches.items() if on)])


def _times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor
