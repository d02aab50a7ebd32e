"""SGLang's flags as settings. It counts GPUs, requests and chunks of all ranks of attention together, windtunnel each.

Sources: sglang/srt/server_args.py of 0.5; sglang/srt/managers/schedule_policy.py.
"""

from typing import Any, get_args

from windtunnel.deployment.engine import AUTO, GATHERED, HIGH_THROUGHPUT, LOW_LATENCY, ONE_KERNEL, ONE_SIDED
from windtunnel.deployment.presets import preset
from windtunnel.deployment.resolve import KEPT_STATES
from windtunnel.errors import InputError
from windtunnel.launch.asked import Asked, Settings
from windtunnel.launch.vllm import (
    acceptance,
    attention_backend,
    cut_points,
    head_of_drafts,
    in_groups,
    index_dtype,
    kv_dtype,
    linear_backend,
    load_balancer,
    moe_backend,
    quantization,
)
from windtunnel.model import MLA
from windtunnel.policy.sglang import Order

MODES = {"low_latency": LOW_LATENCY, "normal": HIGH_THROUGHPUT, "auto": AUTO}
"""``--deepep-mode`` → how tokens are exchanged."""
WRITTEN = {ONE_KERNEL: ONE_KERNEL, "flashinfer": ONE_SIDED}
"""Other words of ``--moe-a2a-backend``: kernels that write into the memory of other GPUs; FlashInfer's are those of
TensorRT-LLM (token_dispatcher/flashinfer.py)."""
SHORT = {"fp8_e4m3": "fp8"}
"""SGLang's name of a cache's type → vLLM's short one."""
RULES = ("sglang-0.5.23", "sglang-0.5", "sglang-0.4.6")
"""Names of its scheduler."""
FP4_INDEX = ("enable-deepseek-v4-fp4-indexer", "enable-dsa-fp4-indexer")
"""Switches that keep index keys in 4 bits (its #26209 and #30546)."""
MOST_SEQS = 65_536
PREFILL_TOKENS = 16384
SCHEDULER: dict[str, tuple[str, Any]] = {
    "max-prefill-tokens": ("max_prefill_tokens", PREFILL_TOKENS),
    "schedule-policy": ("schedule_policy", "fcfs"),
    "schedule-conservativeness": ("schedule_conservativeness", 1.0),
    "enable-mixed-chunk": ("enable_mixed_chunk", False),
    "prefill-max-requests": ("prefill_max_requests", 0),
    "prefill-decode-interval": ("prefill_decode_interval", 0),
    "prefill-decode-interval-min-bs": ("prefill_decode_interval_min_bs", 0),
    "min-free-slots-delay": ("min_free_slots_delay", 0),
    "max-queued-requests": ("max_queued_requests", 0),
    "radix-eviction-policy": ("radix_eviction_policy", "lru"),
    "enable-priority-scheduling": ("enable_priority_scheduling", False),
    "schedule-low-priority-values-first": ("schedule_low_priority_values_first", False),
    "priority-scheduling-preemption-threshold": ("priority_scheduling_preemption_threshold", 10),
    "enable-prefill-delayer": ("enable_prefill_delayer", False),
    "prefill-delayer-max-delay-passes": ("prefill_delayer_max_delay_passes", 30),
    "prefill-delayer-token-usage-low-watermark": ("prefill_delayer_token_usage_low_watermark", 0.0),
    "prefill-delayer-queue-min-ratio": ("prefill_delayer_queue_min_ratio", 0.0),
    "prefill-delayer-max-delay-ms": ("prefill_delayer_max_delay_ms", 5000.0),
}
"""Flags → settings of its scheduler, and their defaults (server_args.py of 0.4.6 and 0.5.23)."""
POLICIES = get_args(Order)
DRAFTS = 3
"""Steps of a draft where the line names an algorithm alone (auto_choose_speculative_params for DeepSeek and Llama)."""
SMALL, LARGEST = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16)), 512


def settings(asked: Asked) -> Settings:
    """What the flags of a line set. Raises InputError for a value that is none."""
    gpus, ranks = asked.integer("tp-size") or 1, asked.integer("dp-size") or 1
    together = ranks if asked.truth("enable-dp-attention") else 1
    if gpus % together:
        raise InputError(f"--dp-size={ranks} with --enable-dp-attention: must divide --tp-size={gpus}")
    apart, copies = 1 if together > 1 else ranks, _copies(asked, gpus, together)
    dense, cache = not asked.experts, kv_dtype(asked, "kv-cache-dtype")
    engine: dict[str, Any] = {
        "tensor_parallel_size": gpus // (together * copies),
        "pipeline_parallel_size": asked.integer("pp-size"),
        "decode_context_parallel_size": asked.integer("dcp-size"),
        "prefill_context_parallel_size": copies if copies > 1 else None,
        "data_parallel_size": together if together > 1 else (apart if dense and apart > 1 else None),
        "max_model_len": asked.integer("context-length"),
        "max_num_seqs": _shared(asked.integer("max-running-requests"), together),
        "gpu_memory_utilization": asked.number("mem-fraction-static"),
        "block_size": _page(asked),
        "dtype": asked.text("dtype") or None,
        "kv_cache_dtype": SHORT.get(cache, cache) if cache else None,
        "quantization": quantization(asked, "quantization"),
        "enable_prefix_caching": False if asked.truth("disable-radix-cache") or _misses(asked) else None,
        "async_scheduling": False if asked.truth("disable-overlap-schedule") else None,
        "enforce_eager": True if asked.truth("disable-cuda-graph") else None,
        "disable_custom_all_reduce": True if asked.truth("disable-custom-all-reduce") else None,
        "stream_interval": asked.integer("stream-interval"),
        "scheduler_recv_interval": asked.integer("scheduler-recv-interval"),
        "api_server_count": asked.integer("tokenizer-worker-num"),
        "mamba_ssm_cache_dtype": asked.text("mamba-ssm-dtype") or None,
        "swa_full_tokens_ratio": _share_of_windows(asked),
        "indexer_kv_dtype": index_dtype(asked, "", *FP4_INDEX),
        "attention_backend": attention_backend(asked, "attention-backend"),
        "moe_backend": moe_backend(asked, "moe-runner-backend"),
        "linear_backend": _of_weights(asked),
        "cpu_offload_gb": asked.number("cpu-offload-gb") or None,
        "fuse_allreduce_rms": True if asked.truth("enable-flashinfer-allreduce-fusion") else None,
        "enable_symm_mem": True if asked.truth("enable-symm-mem") else None,
        "pipeline_layers": cut_points(asked, "SGLANG_PP_LAYER_PARTITION"),
    }
    found = Settings(engine, replicas=1 if dense else apart)
    _chunk(asked, engine, together)
    _experts(asked, engine, gpus, together * copies)
    if total := asked.integer("max-total-tokens"):
        engine["num_gpu_blocks_override"] = max(2, total // (engine["block_size"] or 1))
    if not engine["enforce_eager"]:
        engine["cudagraph_capture_sizes"] = _captured(asked)
    _states(asked, engine, together)
    _drafts(asked, engine)
    _scheduler(asked, engine)
    _hand_over(asked, found)
    _balance(asked, together)
    _layout(asked, engine, together)
    _host_memory(asked, found, gpus * (engine["pipeline_parallel_size"] or 1))
    return found


ZIGZAG = ("zigzag", "in-seq-split")
"""Strategies that give a GPU an early and a late piece of a prompt; the second is the name of older releases."""


def _copies(asked: Asked, gpus: int, together: int) -> int:
    """GPUs, or groups of them, over which prompts are spread: as many as are said, or all where attention is whole on
    each (arg_groups/model_overrides/deepseek_v2.py and deepseek_v4_hook.py of 0.5.23)."""
    size = asked.integer("attn-cp-size") or 1
    if not asked.truth("enable-prefill-cp"):
        if size > 1:
            asked.refused["attn-cp-size"] = "attention is repeated, and no prompts are spread without enable-prefill-cp"
        asked.unused["cp-strategy"] = "no prompts are spread"
        return 1
    model = asked.model
    if model is not None and (model.compresses or (model.has_mla and (size == 1 or _exchanges(asked)))):
        size = gpus // together
    if gpus % (together * size):
        raise InputError(f"--attn-cp-size={size}: must divide --tp-size={gpus} over {together} ranks of attention")
    return size


def _exchanges(asked: Asked) -> bool:
    """Whether spreading prompts brings DeepEP with it: of latent attention that attends to all, and of sparse attention
    in pieces."""
    mixers = [layer.attention for _, layer in asked.model.layers] if asked.model else []
    latent = [mixer for mixer in mixers if isinstance(mixer, MLA)]
    dense = bool(latent) and not any(mixer.index_top_k for mixer in latent)
    return dense or (bool(latent) and asked.text("cp-strategy") in ZIGZAG)


def _of_weights(asked: Asked) -> str | None:
    """The kernel for products in the format that the weights have: 4 bits or 8."""
    stored = asked.model.quantization if asked.model else None
    narrow = stored is not None and "nvfp4" in {each.method for each in stored.formats}
    flag, other = ("fp4-gemm-backend", "fp8-gemm-backend")[:: 1 if narrow else -1]
    asked.unused[other] = f"the weights are multiplied in {4 if narrow else 8} bits, if in few"
    return linear_backend(asked, flag)


def _shared(value: int | None, ranks: int) -> int | None:
    return None if value is None else min(max(1, value // ranks), MOST_SEQS)


def _page(asked: Asked) -> int | None:
    """Tokens of a page; 1, its default, is no size of windtunnel's kernels for it."""
    return asked.integer("page-size")


def _misses(asked: Asked) -> bool:
    """Whether the environment switches the prefix cache off in effect."""
    env = asked.line.env
    return any(
        env.get(name, "0").lower() in ("1", "true")
        for name in ("SGLANG_RADIX_FORCE_MISS", "SGLANG_RADIX_DISABLE_REUSE")
    )


def _chunk(asked: Asked, engine: dict[str, Any], ranks: int) -> None:
    """Tokens of a step: a rank's chunk, or where prompts are not cut what a batch of them, or the longest, has."""
    chunk = asked.integer("chunked-prefill-size")
    if chunk is None:
        return
    if chunk > 0:
        engine["max_num_batched_tokens"] = max(1, chunk // ranks, engine["max_num_seqs"] or 1)
        return
    engine["enable_chunked_prefill"] = False
    if longest := engine["max_model_len"]:
        engine["max_num_batched_tokens"] = max(asked.integer("max-prefill-tokens") or PREFILL_TOKENS, longest)


def _experts(asked: Asked, engine: dict[str, Any], gpus: int, ranks: int) -> None:
    """Experts whole or in slices, and how their tokens are exchanged."""
    backend = asked.text("moe-a2a-backend") or ("deepep" if asked.truth("moe-a2a-backend") else "")
    if engine["prefill_context_parallel_size"] and _exchanges(asked):
        backend = "deepep"
    parts = asked.integer("ep-size") or 1
    if backend and backend != "none":
        parts = gpus
    if not asked.experts:
        for flag in ("ep-size", "moe-a2a-backend", "deepep-mode", "enable-two-batch-overlap", "enable-eplb"):
            asked.unused[flag] = "the model has no experts"
        return
    if parts not in (1, gpus):
        in_groups(asked, parts, gpus)
    engine["enable_expert_parallel"] = True if parts > 1 else None
    load_balancer(asked, engine, "ep-num-redundant-experts")
    if backend == "deepep" and ranks > 1:
        engine["all2all_backend"] = MODES.get(asked.text("deepep-mode") or "auto", AUTO)
    elif backend in WRITTEN and ranks > 1:
        engine["all2all_backend"] = WRITTEN[backend]
    elif backend not in ("", "none"):
        asked.refused["moe-a2a-backend"] = "how ranks exchange tokens: gathering those of all stands for it"
    if backend != "deepep" or ranks == 1:
        asked.unused["deepep-mode"] = "no ranks exchange tokens by DeepEP"
    if asked.truth("enable-two-batch-overlap"):
        if engine.get("all2all_backend", GATHERED) not in (GATHERED, *WRITTEN.values()):
            engine["enable_dbo"] = True
        else:
            asked.refused["enable-two-batch-overlap"] = (
                "two micro-batches: only DeepEP's exchange is known to run alongside kernels"
            )


def _share_of_windows(asked: Asked) -> float | None:
    """The room of layers with a window, where the model has some among others."""
    flag, model = "swa-full-tokens-ratio", asked.model
    if model is not None and not model.compresses and len({bool(layer.window) for _, layer in model.layers}) == 1:
        asked.unused[flag] = "no layers with a window stand among others"
        return None
    return asked.number(flag)


def _states(asked: Asked, engine: dict[str, Any], ranks: int) -> None:
    """Room for states of recurrent layers: this many for each request that runs, by how they are kept for prefixes."""
    places = asked.integer("max-mamba-cache-size")
    keeps = engine["enable_prefix_caching"] is not False
    if asked.model is not None and not asked.model.state_bytes():
        for flag in ("mamba-ssm-dtype", "max-mamba-cache-size", *STATES):
            asked.unused[flag] = "the model keeps no states"
        engine["mamba_ssm_cache_dtype"] = None
        return
    strategy = asked.text("mamba-radix-cache-strategy")
    buffered = keeps and strategy in BUFFERED
    ahead = BUFFERED[strategy] if buffered and engine["async_scheduling"] is not False else 1
    each = KEPT_STATES + ahead * buffered if keeps else 1
    if buffered:
        engine["states_per_request"] = each
    elif keeps and strategy not in ("", "auto", "no_buffer"):
        asked.refused["mamba-radix-cache-strategy"] = "how many states are kept for each request"
    elif not keeps:
        for flag in ("mamba-radix-cache-strategy", "mamba-max-states-per-path"):
            asked.unused[flag] = "no states are kept but those of running requests"
    if places:
        engine["max_num_seqs"] = min(engine["max_num_seqs"] or places, max(1, places // ranks // each))
    if "mamba-track-interval" in asked.line.flags and buffered:
        asked.refused["mamba-track-interval"] = "after how many tokens a state is kept: here after every page"
    else:
        asked.unused["mamba-track-interval"] = "no states are kept while a request decodes"


STATES = ("mamba-radix-cache-strategy", "mamba-track-interval")
BUFFERED = {"extra_buffer": 2, "extra_buffer_lazy": 1}
"""Strategies that keep states while requests decode → how many more a request has, if the next step is scheduled while
this one runs; else one (model_runner_kv_cache_mixin.py of 0.5.9)."""


def _captured(asked: Asked) -> tuple[int, ...] | None:
    if sizes := asked.sizes("cuda-graph-bs"):
        return sizes
    largest = asked.integer("cuda-graph-max-bs")
    if not largest:
        return None
    return tuple(sorted({size for size in (*SMALL, *range(LARGEST, largest + 1, 32)) if size <= largest} | {largest}))


def _drafts(asked: Asked, engine: dict[str, Any]) -> None:
    algorithm = asked.text("speculative-algorithm")
    if not algorithm or algorithm.lower() == "none":
        return
    steps, tokens = asked.integer("speculative-num-steps"), asked.integer("speculative-num-draft-tokens")
    wide = (asked.integer("speculative-eagle-topk") or 1) > 1
    drafts = (tokens - 1 if wide and tokens else steps) or (tokens - 1 if tokens else None) or DRAFTS
    engine["num_speculative_tokens"] = max(1, drafts)
    name = "mtp" if algorithm == "EAGLE" and not asked.text_of("speculative-draft-model-path") else algorithm
    engine["acceptance_length"] = acceptance(asked, name, max(1, steps or drafts), None)
    engine["speculative_model"] = head_of_drafts(asked, "speculative-draft-model-path", algorithm)
    if wide:
        asked.refused["speculative-eagle-topk"] = "drafts form a tree: a chain of as many tokens stands for it"


def _scheduler(asked: Asked, engine: dict[str, Any]) -> None:
    """Its scheduler with other settings than it has by default; another release's where a comment names that."""
    own: dict[str, Any] = {"enable_prefix_caching": None, "async_scheduling": None, "enable_chunked_prefill": None}
    if str(asked.line.facts.get("scheduler")).partition(":")[0] in RULES:
        engine.update(own)
        return
    words = []
    for flag, (name, usual) in SCHEDULER.items():
        value = asked.truth(flag) if usual is False else asked.get(flag)
        if value not in (None, usual):
            words.append(f"{name}={str(value).lower()}")
    policy = asked.text("schedule-policy")
    if policy and policy not in POLICIES:
        asked.refused["schedule-policy"] = "which request is next: first come first served stands for it"
        words = [word for word in words if not word.startswith("schedule_policy")]
    if not words:
        return
    if engine["enable_prefix_caching"] is False:
        words.append("radix_cache=false")
    if engine["async_scheduling"] is False:
        words.append("disable_overlap_schedule=true")
    if engine.get("enable_chunked_prefill") is False:
        words.append("chunked_prefill=false")
    engine.update(own, scheduler=f"{preset(asked.preset).rules}:{','.join(words)}")


def _hand_over(asked: Asked, found: Settings) -> None:
    mode = asked.text("disaggregation-mode")
    if mode not in ("prefill", "decode"):
        return
    found.role = mode
    reserved = asked.integer("num-reserved-decode-tokens")
    polls = asked.integer("disaggregation-decode-polling-interval") if mode == "decode" else None
    words = {"reserved_decode_tokens": reserved, "polling_interval": polls}
    given = (f" {name}={value}" for name, value in words.items() if value is not None)
    found.handover = "sglang-0.5-bootstrap" + "".join(given)
    asked.unused["disaggregation-transfer-backend"] = "all of them send chunk by chunk: the link says how fast"


def _host_memory(asked: Asked, found: Settings, gpus: int) -> None:
    """HiCache: ``--hicache-size`` GB of host memory of each GPU, else as many times what that keeps; nothing where no
    prefixes are kept, as on decode servers (arg_groups/hicache_hook.py and pool_host/base.py of 0.5.23)."""
    keeps = found.role != "decode" and not asked.truth("disable-radix-cache") and not _misses(asked)
    flags = [flag for flag in asked.line.flags if flag.startswith(("hicache-", "enable-hierarchical"))]
    if not keeps or not asked.truth("enable-hierarchical-cache"):
        asked.unused |= dict.fromkeys(flags, "no prefixes are kept in host memory")
        return
    writes = asked.text("hicache-write-policy") or "write_through"
    if asked.preset == RULES[-1] or (asked.integer("pp-size") or 1) > 1 or writes not in WRITES:
        asked.refused |= dict.fromkeys(flags, "prefixes come back from host memory instead of being computed again")
        return
    size = asked.number("hicache-size")
    room = f"capacity={size * 1e9 * gpus:.0f}" if size else f"ratio={asked.number('hicache-ratio') or HOST_RATIO:g}"
    found.stores.append(" ".join(("tier=host", room, *WRITES[writes])))


HOST_RATIO = 2.0
WRITES = {"write_through": (), "write_through_selective": ("write_after=1",), "write_back": ("on_eviction=true",)}
"""``--hicache-write-policy`` → words of a store."""


def _balance(asked: Asked, ranks: int) -> None:
    """Which rank gets a request: here the one with the fewest, the waiting ones counted four times."""
    flag = "load-balance-method"
    method = asked.text(flag)
    if ranks == 1 or method in ("", "auto", "round_robin", "total_requests", "shortest_queue"):
        asked.unused[flag] = "ranks get requests by how many they have"
    else:
        asked.refused[flag] = "which rank gets a request: the one with the fewest stands for it"


def _layout(asked: Asked, engine: dict[str, Any], ranks: int) -> None:
    """Dense layers and the head are divided over all GPUs unless the line says otherwise. Without a model a line is no
    whole one, and says nothing by what it leaves out."""
    dense, head = asked.line.flags.get("moe-dense-tp-size"), asked.truth("enable-dp-lm-head")
    if ranks == 1:
        asked.unused["enable-dp-lm-head"] = asked.unused["moe-dense-tp-size"] = "there are no ranks of attention"
        return
    if asked.model is not None and asked.experts:
        engine["shared_head"] = True if not head else None
        divides = dense != 1 and len({type(layer.mlp) for _, layer in asked.model.layers}) > 1
        engine["shared_dense"] = True if divides else None
