"""TensorRT-LLM's flags, and the keys of its YAML, as settings. Its limits are those of each rank.

Sources: tensorrt_llm/commands/serve.py and llmapi/llm_args.py of 1.x.
"""

from typing import Any

from windtunnel.launch.asked import Asked, Settings
from windtunnel.launch.vllm import acceptance, attention_backend, head_of_drafts, in_groups, kv_dtype, moe_backend
from windtunnel.model import MoE

NO_EVICT, MOST, EXACT = "trtllm-guaranteed-no-evict", "trtllm-max-utilization", "trtllm-1.0"
"""Names of its scheduler: in what matters by its two policies of capacity, and step by step."""
PARTS = {
    "kv-cache-config.enable-partial-reuse": "enable_partial_reuse",
    "kv-cache-config.copy-on-partial-reuse": "copy_on_partial_reuse",
}
"""Flags → settings of its scheduler: whether the beginning of a block is shared as well; both are on."""
OF_PREFIXES = ("kv-cache-config.host-cache-size", *PARTS)
"""Flags of the prefix cache, which say nothing where there is none."""
TIMEOUT = 50
"""Steps that ranks wait for each other's prompts unless told otherwise (``timeout_iters``)."""
WAITS: dict[str, tuple[str, float]] = {
    "attention-dp-config.batching-wait-iters": ("batching_wait_iters", 0),
    "batch-wait-timeout-iters": ("batch_wait_timeout_iters", 0),
    "batch-wait-max-tokens-ratio": ("batch_wait_max_tokens_ratio", 0.0),
}
"""Flags → settings of its scheduler and the value that asks for nothing (llm_args.py)."""
SMALL = (1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048)
"""Batches that are captured by default up to the largest (CudaGraphConfig)."""


def settings(asked: Asked) -> Settings:
    """What the flags and keys of a line set. Raises InputError for a value that is none."""
    gpus, parts = asked.integer("tp-size") or 1, asked.integer("ep-size") or 1
    ranks = gpus if asked.truth("enable-attention-dp") else 1
    block = asked.integer("kv-cache-config.tokens-per-block")
    engine: dict[str, Any] = {
        "tensor_parallel_size": gpus // ranks,
        "pipeline_parallel_size": asked.integer("pp-size"),
        "pipeline_layers": asked.numbers("pp-partition"),
        "data_parallel_size": ranks if ranks > 1 else None,
        "enable_expert_parallel": True if parts > 1 and asked.experts else None,
        "max_num_seqs": asked.integer("max-batch-size"),
        "max_num_batched_tokens": asked.integer("max-num-tokens"),
        "max_model_len": asked.integer("max-seq-len"),
        "gpu_memory_utilization": asked.number("kv-cache-config.free-gpu-memory-fraction"),
        "block_size": block,
        "dtype": asked.text("dtype") or None,
        "kv_cache_dtype": kv_dtype(asked, "kv-cache-config.dtype"),
        "enable_chunked_prefill": asked.given("enable-chunked-prefill"),
        "async_scheduling": False if asked.truth("disable-overlap-scheduler") else None,
        "disable_custom_all_reduce": True if asked.text("allreduce-strategy") == "NCCL" else None,
    }
    if parts > 1 and not asked.experts:
        asked.unused["ep-size"] = "the model has no experts"
    elif parts not in (1, gpus):
        in_groups(asked, parts, gpus)
    if total := asked.integer("kv-cache-config.max-tokens"):
        engine["num_gpu_blocks_override"] = max(2, total // (block or 32))
    if asked.text("allreduce-strategy") not in ("", "AUTO", "NCCL"):
        asked.refused["allreduce-strategy"] = (
            "how sums over GPUs are made: the fastest kernel that is known stands for it"
        )
        asked.kernels.add("allreduce-strategy")
    engine["stream_interval"] = asked.integer("stream-interval")
    servers = [asked.integer(flag) for flag in ("num-serve-frontends", "num-postprocess-workers")]
    engine["api_server_count"] = max((each for each in servers if each), default=None)
    engine["prompt_graph_tokens"] = _prompt_graphs(asked)
    engine["attention_backend"] = attention_backend(asked, "attn-backend")
    engine["moe_backend"] = moe_backend(asked, "moe-config.backend")
    _combine(asked, engine)
    _slots(asked, engine)
    found = Settings(engine)
    _graphs(asked, engine)
    _role(asked, found)
    _drafts(asked, engine)
    _heads(asked, engine)
    _scheduler(asked, engine, found)
    tokens, seqs = engine["max_num_batched_tokens"], engine["max_num_seqs"]
    if tokens and seqs and tokens < seqs:
        engine["max_num_batched_tokens"] = seqs
    return found


def _combine(asked: Asked, engine: dict[str, Any]) -> None:
    """Outputs of experts in few bits, where kernels that write into the memory of other GPUs take them back."""
    flag = "moe-config.use-low-precision-moe-combine"
    if not asked.truth(flag):
        return
    stored = asked.model.weight_dtype("experts") if asked.model and asked.model.has_moe else "nvfp4"
    if not (engine["data_parallel_size"] and engine["enable_expert_parallel"]):
        asked.unused[flag] = "no ranks exchange tokens"
    elif stored not in IN_FEW_BITS:
        asked.unused[flag] = f"the experts are in {stored}"
    else:
        engine["low_precision_combine"] = True


def _slots(asked: Asked, engine: dict[str, Any]) -> None:
    """Slots of all ranks for experts: what there are more of than experts are copies."""
    flag = "moe-config.load-balancer.num-slots"
    slots = asked.integer(flag)
    if slots is None:
        return
    if not engine["enable_expert_parallel"]:
        asked.unused[flag] = "experts are not divided among GPUs"
    elif asked.model is None:
        asked.refused[flag] = "how many copies of experts there are"
    else:
        experts = max(layer.mlp.num_experts for _, layer in asked.model.layers if isinstance(layer.mlp, MoE))
        engine["num_redundant_experts"] = max(0, slots - experts) or None
        engine["enable_eplb"] = True if slots <= experts else None


DRAFTER = "speculative-config.speculative-model"
"""Its flag, with or without ``-dir`` or ``-path`` behind it."""
IN_FEW_BITS = ("fp8", "fp8_block", "nvfp4")


def _graphs(asked: Asked, engine: dict[str, Any]) -> None:
    flags = asked.line.flags
    if "cuda-graph-config" in flags and flags["cuda-graph-config"] is None:
        engine["enforce_eager"] = True
        return
    sizes, largest = asked.sizes("cuda-graph-config.batch-sizes"), asked.integer("cuda-graph-config.max-batch-size")
    if largest and not sizes:
        sizes = tuple(sorted({size for size in SMALL if size <= largest} | {largest}))
    engine["cudagraph_capture_sizes"] = sizes


def _prompt_graphs(asked: Asked) -> int | None:
    """Tokens of the largest captured batch with prompts: up to the most of a step unless sizes are given."""
    captured = asked.sizes("torch-compile-config.capture-num-tokens")
    if asked.truth("torch-compile-config.enable-piecewise-cuda-graph"):
        return max(captured) if captured else asked.integer("max-num-tokens") or PROMPT_TOKENS
    asked.unused["torch-compile-config.capture-num-tokens"] = "batches with prompts are not captured"
    return None


PROMPT_TOKENS = 8192
"""``max_num_tokens`` by default (llm_args.py)."""


def _role(asked: Asked, found: Settings) -> None:
    said = asked.text("disaggregation-mode") or asked.text("server-role").lower()
    found.role = {"context": "prefill", "prefill": "prefill", "generation": "decode", "decode": "decode"}.get(said, "")
    if asked.text("cache-transceiver-config.backend") or found.role:
        timeout = asked.number("cache-transceiver-config.kv-transfer-timeout-ms")
        found.handover = "trtllm-1.0" + (f" timeout={timeout / 1000:g}" if timeout else "")


def _reuses(asked: Asked, found: Settings) -> bool:
    """Whether prompts that begin alike share what is computed: so unless the line says otherwise, but where KV comes
    from another server. Without a model a line is no whole one, and says nothing by what it leaves out."""
    flag = "kv-cache-config.enable-block-reuse"
    said = asked.given(flag)
    if found.role == "decode" or said is False or (said is None and asked.model is None):
        asked.unused |= dict.fromkeys(OF_PREFIXES, "no prefixes are kept")
        if said:
            asked.unused[flag] = "what a decode server gets is whole"
        return False
    return True


def _drafts(asked: Asked, engine: dict[str, Any]) -> None:
    kind = asked.text("speculative-config.decoding-type")
    drafts = asked.integer("speculative-config.num-nextn-predict-layers") or asked.integer(
        "speculative-config.max-draft-len"
    )
    if not kind and not drafts:
        return
    engine["num_speculative_tokens"] = drafts = drafts or 1
    engine["acceptance_length"] = acceptance(asked, kind or "mtp", drafts, None)
    flags = (flag for flag in asked.line.flags if flag.startswith(DRAFTER))
    engine["speculative_model"] = head_of_drafts(asked, next(flags, DRAFTER), kind)


def _heads(asked: Asked, engine: dict[str, Any]) -> None:
    """The head of drafts, which ranks of attention divide."""
    flag = "enable-lm-head-tp-in-adp"
    if not (engine["data_parallel_size"] and engine.get("num_speculative_tokens") and asked.experts):
        asked.unused[flag] = "there are no drafts of ranks of attention, whose head it would divide"
    elif asked.truth(flag):
        engine["shared_head"] = True


def _scheduler(asked: Asked, engine: dict[str, Any], found: Settings) -> None:
    """Capacity by its policies, and ranks that wait for each other's prompts (``attention_dp_config``). With prefixes,
    or where prompts wait or are cut by other rules than usual, its scheduler step by step, with its own words."""
    if str(asked.line.facts.get("scheduler")).partition(":")[0] == EXACT:
        engine |= {"async_scheduling": None, "enable_chunked_prefill": None}
        return
    policy = asked.text("scheduler-config.capacity-scheduler-policy").upper()
    if policy not in ("", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT"):
        asked.refused["scheduler-config.capacity-scheduler-policy"] = "how much memory a request needs to be admitted"
    words: dict[str, Any] = _waits(asked)
    if _reuses(asked, found):
        parts = {name: False for flag, name in PARTS.items() if asked.given(flag) is False}
        words = {"enable_block_reuse": True, **parts, **words}
    balanced = asked.truth("attention-dp-config.enable-balance")
    steps = asked.integer("attention-dp-config.timeout-iters")
    if words:
        if policy == "MAX_UTILIZATION":
            words["capacity_scheduler_policy"] = policy
        if balanced:
            words |= {"enable_balance": True} | ({} if steps is None else {"timeout_iters": steps})
            if asked.integer("attention-dp-config.batching-wait-iters") == 0:
                words["batching_wait_iters"] = 0
        if engine["async_scheduling"] is False:
            words["disable_overlap_scheduler"] = True
        engine["async_scheduling"] = None
    elif balanced:
        length = engine.get("acceptance_length") or 1.0
        words["balance_timeout"] = max(1, round((TIMEOUT if steps is None else steps) * length))
    rules = EXACT if set(words) - {"balance_timeout"} else MOST if policy == "MAX_UTILIZATION" else NO_EVICT
    if rules != NO_EVICT or words:
        if engine["enable_chunked_prefill"]:
            words["chunked_prefill"] = True
        engine["enable_chunked_prefill"] = None
        said = ",".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in words.items()
        )
        engine["scheduler"] = f"{rules}:{said}" if said else rules


def _waits(asked: Asked) -> dict[str, Any]:
    """Settings by which prompts wait for others, or are cut, where the line has others than the usual ones."""
    found: dict[str, Any] = {}
    for flag, (name, usual) in WAITS.items():
        value = asked.number(flag)
        if value is not None and value != usual:
            found[name] = int(value) if isinstance(usual, int) else float(value)
    if not asked.truth("attention-dp-config.enable-balance"):
        asked.unused["attention-dp-config.batching-wait-iters"] = "no ranks wait for each other's prompts"
        found.pop("batching_wait_iters", None)
    chunks = asked.text("scheduler-config.context-chunking-policy").upper()
    if chunks == "EQUAL_PROGRESS" and asked.truth("enable-chunked-prefill"):
        found["chunking_policy"] = chunks
    elif chunks not in ("", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"):
        asked.refused["scheduler-config.context-chunking-policy"] = "how prompts are cut"
    elif chunks:
        asked.unused["scheduler-config.context-chunking-policy"] = "prompts are not cut"
    return found
