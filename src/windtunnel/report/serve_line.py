"""The command that starts what was simulated: ``vllm serve``, SGLang's ``launch_server`` or ``trtllm-serve``."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from windtunnel.deployment.engine import GATHERED, SCHEDULER_FLAGS
from windtunnel.deployment.engine_scheduler import SIZES
from windtunnel.deployment.presets import ALIASES, EnginePreset, preset
from windtunnel.deployment.resolve import KEPT_STATES
from windtunnel.deployment.store import Store
from windtunnel.deployment.usual_sizes import other_capture_sizes
from windtunnel.launch.sglang import (
    BUFFERED,
    FP4_INDEX,
    HOST_RATIO,
    MODES,
    RULES,
    SCHEDULER,
    SHORT,
    WRITES,
    WRITTEN,
    ZIGZAG,
)
from windtunnel.launch.table import table
from windtunnel.launch.trtllm import EXACT, MOST, NO_EVICT, PARTS, WAITS
from windtunnel.launch.vllm import ALIGNED, ALIGNED_STATES, GIB, SAMPLER, SIMPLE, SYMMETRIC, TYPES
from windtunnel.policy import scheduler as settings_of
from windtunnel.report.handover_flags import sglang_transfer, trtllm_transfer, vllm_transfer

SCHEDULER_VALUES = {name: default for name, default in SCHEDULER_FLAGS.items() if default is not None}
BOTH_SIDES = {name for name in SIMPLE.values() if "bool" in str(TYPES[name])}
BY_RULE = {"scheduler_reserve_full_isl", "enforce_eager"}
VALUES = tuple(name for name in SIMPLE.values() if name not in BOTH_SIDES)
SWITCHES = tuple(name for name in SIMPLE.values() if name in BOTH_SIDES - BY_RULE)
"""Settings that vLLM's flags are called like, in the order of its table: with a value, and on or off."""
SILENT: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "all2all_backend": (GATHERED,),
    "enable_dbo": (False,),
    "enable_eplb": (False,),
    "dtype": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enable_expert_parallel": (False,),
    "enable_prefix_caching": (True,),
    "disable_custom_all_reduce": (False,),
    "mamba_ssm_cache_dtype": ("auto",),
    "attention_backend": ("auto",),
    "moe_backend": ("auto",),
    "linear_backend": ("auto",),
    "cpu_offload_gb": (0.0,),
    "prefill_schedule_interval": (1,),
    "stream_interval": (1,),
    "api_server_count": (None,),
    "max_loras": (0,),
    "max_lora_rank": (16,),
    **{name: (default,) for name, default in SCHEDULER_VALUES.items()},
}
"""Values that are vLLM's own defaults on every device and need no flag."""
DEEPEP_MODES = {backend: mode for mode, backend in MODES.items()}
"""Backends of the exchange, as SGLang's ``--deepep-mode`` calls them."""
SGLANG_DISPATCHED, SGLANG_MOST_DISPATCHED = 128, 1024
"""Tokens of a rank that low-latency kernels of SGLang take by default, and at most."""
OF_FRONT = {
    "decode_context_parallel_size": 1,
    "stream_interval": 1,
    "scheduler_recv_interval": 1,
    "api_server_count": None,
    "mamba_ssm_cache_dtype": "auto",
    "attention_backend": "auto",
    "moe_backend": "auto",
    "cpu_offload_gb": 0.0,
    "swa_full_tokens_ratio": None,
    "num_redundant_experts": 0,
}
"""Settings of SGLang with a value, and what needs no flag."""
SPARSE = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM")
"""Architectures whose attention chooses among tokens."""
FP8 = {ours: theirs for theirs, ours in SHORT.items()}
"""vLLM's short name of a cache's type, as SGLang calls it."""
BF16 = {"bfloat16": "bf16"}
OPTIONS_FILES = {"mixed": "trtllm.yaml", "prefill": "context.yaml", "decode": "generation.yaml"}
"""Settings without a flag of trtllm-serve go to this file, which is written first."""


def serve_line(pool: Mapping[str, Any], handover: Mapping[str, Any] | None = None) -> str:
    """The command for one replica of a pool, from its entry in a manifest, without what the engine does anyway.

    ``handover``: the rules by which prefill and decode pools hand over, from the specification of the deployment.
    If no command starts it, because its scheduler is not the engine's or the engine lacks its parallelism, a comment
    that says why.
    """
    engine = pool.get("engine", {})
    chosen = preset(engine.get("preset", ALIASES["vllm"]))
    scheduler = engine.get("scheduler")
    if not _starts(chosen, scheduler):
        return f"# no command starts this: {chosen.name} has no scheduler {scheduler!r}"
    model = shlex.quote(str(pool.get("model", "MODEL")))
    role, shared = str(pool.get("role", "mixed")), bool(pool.get("lockstep"))
    apart, rules = role != "mixed", handover or {}
    if chosen.backend == "vllm":
        return " ".join([_vllm(model, pool, chosen), *(vllm_transfer(role, rules) if apart else ())])
    if chosen.backend == "sglang":
        return _sglang(model, pool, shared, sglang_transfer(role, rules) if apart else {})
    return _trtllm(model, pool, shared, role)


def _starts(chosen: EnginePreset, scheduler: str | None) -> bool:
    """Whether flags of the engine start this scheduler: its own, with settings that it has flags for."""
    if scheduler in (None, chosen.name, chosen.rules):
        return True
    name = str(scheduler).partition(":")[0]
    own_rules = {"sglang": RULES, "trtllm": (NO_EVICT, MOST, EXACT)}
    if name not in own_rules.get(chosen.backend, ()):
        return False
    plain, own = settings_of(name), settings_of(str(scheduler))
    followed = {"radix_cache", "disable_overlap_schedule", "chunked_prefill", *SIZES, "balance_timeout"}
    followed |= {setting for setting, _ in SCHEDULER.values()} | {setting for setting, _ in WAITS.values()} | OF_TRTLLM
    return all(
        getattr(plain, each.name) == getattr(own, each.name) or each.name in followed
        for each in fields(plain)  # type: ignore[arg-type]
    )


OF_TRTLLM = {
    *("enable_block_reuse", "enable_balance", "timeout_iters", "chunking_policy", "disable_overlap_scheduler"),
    *("capacity_scheduler_policy", "enable_partial_reuse", "copy_on_partial_reuse"),
}
"""Settings of TensorRT-LLM's scheduler that its YAML can express, other than those in ``WAITS``."""


def _vllm(model: str, pool: Mapping[str, Any], chosen: EnginePreset) -> str:
    """Flags by the names of vllm/engine/arg_utils.py."""
    engine = pool.get("engine", {})
    words = [*_cuts("VLLM", engine), *_switched_on(engine), "vllm", "serve", model]
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
        settings = json.dumps(_drafter(engine.get("speculative_model")) | {"num_speculative_tokens": drafts})
        words += ["--speculative-config", shlex.quote(settings)]
    if copies := engine.get("num_redundant_experts"):
        words += ["--enable-eplb"] * (not engine.get("enable_eplb"))
        words += ["--eplb-config", shlex.quote(json.dumps({"num_redundant_experts": copies}))]
    if engine.get("enforce_eager"):
        words.append("--enforce-eager")
    if engine.get("max_loras"):
        words.append("--enable-lora")
    if engine.get("states_per_request") == ALIGNED_STATES:
        words += ["--mamba-cache-mode", ALIGNED]
    if (index := engine.get("indexer_kv_dtype", "auto")) != "auto":
        said = {"use_fp4_indexer_cache": True} if index == "mxfp4" else {"indexer_kv_dtype": BF16.get(index, index)}
        words += ["--attention-config", shlex.quote(json.dumps(said))]
    if compiled := _compilation(pool, engine):
        words += ["--compilation-config", shlex.quote(json.dumps(compiled))]
    return " ".join([*words, *_offloading(pool.get("stores", ()))])


def _offloading(stores: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """vLLM's own store in host memory, where need be with its connector's settings; others are set up by files."""
    if len(stores) != 1 or stores[0].get("ratio"):
        return ()
    store = Store(**stores[0])
    chunk, threshold = store.chunk_tokens, store.write_after
    if store != Store(capacity=store.capacity, chunk_tokens=chunk, write_after=threshold):
        return ()
    if not chunk and not threshold:
        return "--kv-offloading-size", f"{store.capacity / GIB:.12g}"
    extra = {"cpu_bytes_to_use": round(store.capacity), "block_size": chunk, "store_threshold": threshold}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {name: value for name, value in extra.items() if value},
    }
    return "--kv-transfer-config", shlex.quote(json.dumps(config))


def _compilation(pool: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's settings of graphs and of the compiler's passes."""
    least, fuses = engine.get("sequence_parallel_min_tokens"), engine.get("fuse_allreduce_rms")
    passes = {"enable_sp": True, "sp_min_token_num": least} if least else {}
    passes |= {"fuse_allreduce_rms": fuses} if fuses is not None else {}
    found = {
        "cudagraph_capture_sizes": other_capture_sizes(pool),
        "cudagraph_mode": engine.get("cudagraph_mode"),
        "pass_config": passes,
    }
    return {name: value for name, value in found.items() if value}


def _sglang(model: str, pool: Mapping[str, Any], shared: bool, transfer: Mapping[str, Any]) -> str:
    """Flags by the names of sglang/srt/server_args.py. ``shared``: the ranks share experts, so that attention alone is
    data parallel; SGLang then counts GPUs, chunk and requests of all ranks together. ``transfer``: further flags."""
    engine = pool.get("engine", {})
    ranks, rules = engine.get("data_parallel_size") or 1, _sglang_rules(engine)
    together = ranks if shared else 1
    copies = engine.get("prefill_context_parallel_size") or 1
    gpus = together * copies * (engine.get("tensor_parallel_size") or 1)
    stages = engine.get("pipeline_parallel_size") or 1
    blocks, cache = engine.get("num_gpu_blocks_override"), engine.get("kv_cache_dtype", "auto")
    deepep = DEEPEP_MODES.get(engine.get("all2all_backend", GATHERED))
    chunk = _times(engine.get("max_num_batched_tokens"), together)
    settings = {
        "tensor_parallel_size": gpus,
        "pipeline_parallel_size": stages if stages > 1 else None,
        "data_parallel_size": ranks if ranks > 1 else None,
        "enable_expert_parallel": gpus if engine.get("enable_expert_parallel") else None,
        "all2all_backend": _exchange(str(engine.get("all2all_backend", GATHERED)), deepep),
        "max_model_len": engine.get("max_model_len"),
        "max_num_seqs": _times(engine.get("max_num_seqs"), together),
        "max_num_batched_tokens": -1 if rules["chunked_prefill"] is False else chunk,
        "gpu_memory_utilization": engine.get("gpu_memory_utilization"),
        "block_size": engine.get("block_size"),
        "num_gpu_blocks_override": _times(blocks, engine.get("block_size") or 1),
        "dtype": engine.get("dtype"),
        "kv_cache_dtype": None if cache in ("auto", engine.get("dtype")) else FP8.get(cache, cache),
        "quantization": engine.get("quantization"),
        "num_speculative_tokens": _chain(engine.get("num_speculative_tokens"), engine.get("speculative_model")),
        "speculative_model": engine.get("speculative_model"),
        "states_per_request": _buffer(engine, rules),
        **{name: engine.get(name) for name, usual in OF_FRONT.items() if engine.get(name) not in (None, usual)},
    }
    values = {flag: value for field, found in settings.items() for flag, value in _flags("sglang", field, found)}
    values |= _host_memory(pool, gpus * stages)
    values |= {"moe-dense-tp-size": 1 if together * copies > 1 and not engine.get("shared_dense") else None}
    if (kernel := engine.get("linear_backend", "auto")) != "auto":
        values[f"fp{4 if 'nvfp4' in str(pool.get('quantization')) else 8}-gemm-backend"] = kernel
    values |= {"attn-cp-size": copies, "cp-strategy": _strategy(pool)} if copies > 1 else {}
    values |= {**transfer, **{flag: rules.get(name) for flag, (name, usual) in SCHEDULER.items() if usual is not False}}
    switches = {
        "enable-dp-attention": together > 1,
        "enable-prefill-cp": copies > 1,
        "enable-dp-lm-head": together > 1 and not engine.get("shared_head"),
        "enable-two-batch-overlap": bool(engine.get("enable_dbo")),
        "enable-eplb": bool(engine.get("enable_eplb")),
        "enable-hierarchical-cache": bool(pool.get("stores")),
        "enable-symm-mem": bool(engine.get("enable_symm_mem")),
        "enable-flashinfer-allreduce-fusion": bool(engine.get("fuse_allreduce_rms")),
        _fp4_index(pool): engine.get("indexer_kv_dtype") == "mxfp4",
        "disable-radix-cache": rules["radix_cache"] is False,
        "disable-overlap-schedule": engine.get("async_scheduling") is False and stages == 1,
        "disable-cuda-graph": bool(engine.get("enforce_eager")),
        "disable-custom-all-reduce": bool(engine.get("disable_custom_all_reduce")),
        **{flag: bool(rules.get(name)) for flag, (name, usual) in SCHEDULER.items() if usual is False},
    }
    start = ["python", "-m", "sglang.launch_server", "--model-path", model]
    sizes = " ".join(map(str, other_capture_sizes(pool)))
    line = _command([*_cuts("SGLANG", engine), *_buffers(engine, deepep), *start], values, switches)
    return f"{line} --cuda-graph-bs {sizes}" if sizes else line


def _cuts(prefix: str, engine: Mapping[str, Any]) -> list[str]:
    """The variable with the layers of each stage, where they are the user's."""
    layers = engine.get("pipeline_layers")
    return [f"{prefix}_PP_LAYER_PARTITION={','.join(map(str, layers))}"] if layers else []


def _switched_on(engine: Mapping[str, Any]) -> list[str]:
    """vLLM's variables for collectives in symmetric memory, and for FlashInfer's sampler."""
    switches = {"enable_symm_mem": SYMMETRIC, "flashinfer_sampler": SAMPLER}
    return [f"{variable}=1" for field, variable in switches.items() if engine.get(field)]


def _flags(engine: str, field: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The flags that a setting is written with, by the engine's table, and their values."""
    flags = table(engine).flags_of(field)
    return zip(flags, value, strict=False) if isinstance(value, tuple) else [(flags[0], value)]


def _drafter(head: str | None) -> dict[str, str]:
    """vLLM's method, and the head that drafts."""
    return {"method": "eagle3", "model": head} if head else {"method": "mtp"}


def _chain(drafts: int | None, head: str | None) -> tuple[Any, ...] | None:
    """Algorithm, steps, width and tokens of a chain of drafts, the token before them included."""
    return ("EAGLE3" if head else "NEXTN", drafts, 1, drafts + 1) if drafts else None


def _exchange(backend: str, deepep: str | None) -> tuple[str, ...] | None:
    """What exchanges tokens, and DeepEP's mode."""
    if deepep:
        return "deepep", deepep
    return next(((name,) for name, ours in WRITTEN.items() if ours == backend), None)


def _strategy(pool: Mapping[str, Any]) -> str:
    """How SGLang spreads prompts of the model: by tokens where attention chooses among them, else in pieces."""
    return "interleave" if str(pool.get("architecture")) in SPARSE else ZIGZAG[0]


def _fp4_index(pool: Mapping[str, Any]) -> str:
    """SGLang's switch for 4-bit index keys of the model."""
    return FP4_INDEX["V4" not in str(pool.get("architecture"))]


def _buffer(engine: Mapping[str, Any], rules: Mapping[str, Any]) -> str | None:
    """How SGLang keeps states of recurrent layers for prefixes, where it has more of them than by default."""
    more = (engine.get("states_per_request") or 1) - KEPT_STATES
    if more < 1 or rules["radix_cache"] is False:
        return None
    if engine.get("async_scheduling") is False:
        return "extra_buffer" if more == 1 else None
    return next((name for name, states in BUFFERED.items() if states == more), None)


def _host_memory(pool: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """HiCache's flags with a value, by a pool's store."""
    store = next(iter(pool.get("stores", ())), None)
    if store is None:
        return {}
    words = "on_eviction=true" if store.get("on_eviction") else f"write_after={store.get('write_after') or 0}"
    return {
        "hicache-size": round(store["capacity"] / 1e9 / gpus) or None if store.get("capacity") else None,
        "hicache-ratio": store.get("ratio") if store.get("ratio") not in (None, 0.0, HOST_RATIO) else None,
        "hicache-write-policy": next((name for name, each in WRITES.items() if words in each), None),
    }


def _sglang_rules(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler of SGLang with its own settings has besides its defaults; of the engine's own what it has."""
    own = {"chunked_prefill": engine.get("enable_chunked_prefill"), "radix_cache": engine.get("enable_prefix_caching")}
    text = str(engine.get("scheduler") or "")
    name, colon, _ = text.partition(":")
    if not colon or name not in RULES:
        return own
    plain, named = settings_of(name), settings_of(text)
    own = {"chunked_prefill": None, "radix_cache": None}
    names = (*own, *(name for name, _ in SCHEDULER.values()))
    return own | {name: getattr(named, name) for name in names if getattr(named, name) != getattr(plain, name)}


def _buffers(engine: Mapping[str, Any], deepep: str | None) -> list[str]:
    """DeepEP's low-latency buffers, where a rank may decode more than the 128 tokens that SGLang makes them for."""
    tokens = (engine.get("max_num_seqs") or 0) * ((engine.get("num_speculative_tokens") or 0) + 1)
    if deepep in (None, "normal") or tokens <= SGLANG_DISPATCHED:
        return []
    return [f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={min(tokens, SGLANG_MOST_DISPATCHED)}"]


def _trtllm(model: str, pool: Mapping[str, Any], shared: bool, role: str) -> str:
    """Flags by the names of tensorrt_llm/commands/serve.py; the rest by those of llmapi/llm_args.py, in a file."""
    engine = pool.get("engine", {})
    tensor, ranks = engine.get("tensor_parallel_size") or 1, engine.get("data_parallel_size") or 1
    stages = engine.get("pipeline_parallel_size") or 1
    if ranks > 1 and not shared:
        return f"# no command starts this: start {ranks} servers of {tensor * stages} GPUs each, behind a router"
    if ranks > 1 and tensor > 1:
        return f"# no command starts this: TensorRT-LLM has no {ranks} ranks of attention with {tensor} GPUs each"
    gpus = max(tensor, ranks)
    settings = {
        "tensor_parallel_size": gpus,
        "pipeline_parallel_size": stages if stages > 1 else None,
        "enable_expert_parallel": gpus if engine.get("enable_expert_parallel") else None,
        "max_num_seqs": engine.get("max_num_seqs"),
        "max_num_batched_tokens": engine.get("max_num_batched_tokens"),
        "max_model_len": engine.get("max_model_len"),
    }
    found = [pair for field, value in settings.items() for pair in _flags("trtllm", field, value)]
    values = {flag.replace("-", "_"): value for flag, value in found} | {"extra_llm_api_options": OPTIONS_FILES[role]}
    lines = "\n".join(_options(engine, ranks, role, other_capture_sizes(pool)))
    return f"cat > {OPTIONS_FILES[role]} <<'END'\n{lines}\nEND\n" + _command(["trtllm-serve", model], values, {})


def _options(engine: Mapping[str, Any], ranks: int, role: str, sizes: Sequence[int]) -> Iterable[str]:
    """Lines of YAML. It has all settings of the cache, since the file's replace those of the flags."""
    rules, _, _ = str(engine.get("scheduler") or "").partition(":")
    named = settings_of(engine["scheduler"]) if rules in (NO_EVICT, MOST, EXACT) else None
    cache = {
        "enable_block_reuse": bool(engine.get("enable_prefix_caching") or getattr(named, "enable_block_reuse", False)),
        **{name: False for name in PARTS.values() if not getattr(named, name, True)},
        "free_gpu_memory_fraction": engine.get("gpu_memory_utilization"),
        "tokens_per_block": engine.get("block_size"),
        "max_tokens": _times(engine.get("num_gpu_blocks_override"), engine.get("block_size") or 1),
        "dtype": "fp8" if str(engine.get("kv_cache_dtype")).startswith("fp8") else None,
    }
    yield "kv_cache_config:"
    yield from (f"  {name}: {json.dumps(value)}" for name, value in cache.items() if value is not None)
    chunked = engine.get("enable_chunked_prefill") or getattr(named, "chunked_prefill", False)
    yield f"enable_chunked_prefill: {json.dumps(bool(chunked))}"
    if engine.get("dtype") not in (None, "auto"):
        yield f"dtype: {engine['dtype']}"
    if layers := engine.get("pipeline_layers"):
        yield f"pp_partition: {json.dumps(list(layers))}"
    if ranks > 1:
        yield "enable_attention_dp: true"
    if role != "mixed":
        yield from trtllm_transfer(role)
    serial = engine.get("async_scheduling") is False or getattr(named, "disable_overlap_scheduler", False)
    serial = serial and (engine.get("pipeline_parallel_size") or 1) == 1
    if serial and role != "prefill":
        yield "disable_overlap_scheduler: true"
    if engine.get("enforce_eager"):
        yield "cuda_graph_config: null"
    elif sizes:
        yield f"cuda_graph_config:\n  batch_sizes: {json.dumps(list(sizes))}"
    if engine.get("disable_custom_all_reduce"):
        yield "allreduce_strategy: NCCL"
    yield from _front_options(engine)
    if rules == EXACT:
        yield from _exact_options(named)
    if rules == MOST:
        yield "scheduler_config:\n  capacity_scheduler_policy: MAX_UTILIZATION"
    if steps := getattr(named, "balance_timeout", 0):
        steps = round(steps / (engine.get("acceptance_length") or 1.0))
        yield f"attention_dp_config:\n  enable_balance: true\n  timeout_iters: {max(1, steps)}"
    if drafts := engine.get("num_speculative_tokens"):
        mtp = f"MTP\n  num_nextn_predict_layers: {drafts}"
        head = engine.get("speculative_model")
        eagle = f"Eagle3\n  max_draft_len: {drafts}\n  speculative_model: {json.dumps(head)}"
        yield f"speculative_config:\n  decoding_type: {eagle if head else mtp}"


def _exact_options(named: Any) -> Iterable[str]:
    """Lines of YAML for those settings of its step-by-step scheduler that differ from the defaults."""
    usual: Any = settings_of(EXACT)
    names = {"capacity_scheduler_policy": "capacity_scheduler_policy", "context_chunking_policy": "chunking_policy"}
    differs = {flag: getattr(named, name) for flag, name in names.items()}
    differs = {flag: value for flag, value in differs.items() if value != getattr(usual, names[flag])}
    if differs:
        yield f"scheduler_config: {json.dumps(differs)}"
    of_ranks: dict[str, Any] = {"enable_balance": True, "timeout_iters": named.timeout_iters}
    for flag, (setting, _) in WAITS.items():
        group, dot, name = flag.replace("-", "_").partition(".")
        if dot:
            of_ranks[name] = getattr(named, setting)
        elif getattr(named, setting) != getattr(usual, setting):
            yield f"{group}: {json.dumps(getattr(named, setting))}"
    if named.enable_balance:
        yield f"attention_dp_config: {json.dumps(of_ranks)}"


def _front_options(engine: Mapping[str, Any]) -> Iterable[str]:
    """Lines of YAML for what is around the engine, and for what experts return."""
    if (interval := engine.get("stream_interval") or 1) > 1:
        yield f"stream_interval: {interval}"
    if servers := engine.get("api_server_count"):
        yield f"num_postprocess_workers: {servers}"
    if captured := engine.get("prompt_graph_tokens"):
        sizes = f"  capture_num_tokens: {json.dumps([captured])}"
        yield f"torch_compile_config:\n  enable_piecewise_cuda_graph: true\n{sizes}"
    if engine.get("shared_head"):
        yield "enable_lm_head_tp_in_adp: true"
    if (kernel := engine.get("attention_backend", "auto")) != "auto":
        yield f"attn_backend: {kernel.upper()}"
    of_experts: dict[str, Any] = {}
    if (backend := engine.get("moe_backend", "auto")) != "auto":
        of_experts["backend"] = backend.upper()
    if engine.get("low_precision_combine"):
        of_experts["use_low_precision_moe_combine"] = True
    if of_experts:
        yield f"moe_config: {json.dumps(of_experts)}"


def _command(words: list[str], values: Mapping[str, Any], switches: Mapping[str, bool]) -> str:
    """The command with the flags that have a value, and those that are on."""
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", shlex.quote(str(value))]
    return " ".join([*words, *(f"--{name}" for name, on in switches.items() if on)])


def _times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor
