"""vLLM's flags as settings; a flag that is called like its setting is taken as it is.

Sources: vllm/engine/arg_utils.py, vllm/config of 0.32; the connectors of vllm/distributed/kv_transfer.
"""

import re
from collections.abc import Collection, Mapping
from math import prod
from typing import Any, get_type_hints

from windtunnel.deployment import Engine
from windtunnel.deployment.engine import (
    ATTENTION_BACKENDS,
    ENGINE_DTYPES,
    EXCHANGES,
    GATHERED,
    GRAPH_MODES,
    HIGH_THROUGHPUT,
    LINEAR_BACKENDS,
    LOW_LATENCY,
    MOE_BACKENDS,
)
from windtunnel.deployment.resolve import COMPRESSED_BLOCK, SAME_METHOD
from windtunnel.errors import InputError
from windtunnel.launch.asked import ADD_STORE, Asked, Settings, environment_value
from windtunnel.launch.drafts import usual_acceptance
from windtunnel.launch.facts import OF_IMAGE
from windtunnel.launch.table import table
from windtunnel.model import MLA, Attention
from windtunnel.model.adapters import require_adaptable
from windtunnel.model.draft_heads import draft_head
from windtunnel.model.quantization import KV_DTYPE_BYTES

SIMPLE = {flag: field for flag, field in table("vllm").used.items() if flag.replace("-", "_") == field}
"""Flags that are called like their setting."""
TYPES = get_type_hints(Engine)
TRANSFER, EXTRA = "kv-transfer-config.", "kv-transfer-config.kv-connector-extra-config."
CONNECTORS = {
    "NixlConnector": "vllm-0.32-nixl-pull",
    "NixlPullConnector": "vllm-0.32-nixl-pull",
    "NixlPushConnector": "vllm-0.32-nixl-push",
    "MooncakeConnector": "vllm-0.32-mooncake",
}
"""Connectors that hand KV from one side to the other → their rules."""
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "prefill": "prefill", "decode": "decode"}
MODES = {"NONE": True, "0": True}
LARGEST_BLOCK = 64
EXCHANGE = "VLLM_ALL2ALL_BACKEND"
SYMMETRIC = "VLLM_USE_NCCL_SYMM_MEM"
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
SAMPLED_BY_IMAGE = (0, 8), (0, 11, 0)
"""First and last releases whose image has FlashInfer and takes its sampler unless told otherwise: wheels came without
it, and from 0.11.1 on it must be asked for (docker/Dockerfile, vllm/v1/sample/ops/topk_topp_sampler.py, vLLM #26859).
"""
PARTITION = "VLLM_PP_LAYER_PARTITION"
SP_LEAST = "compilation-config.pass-config.sp-min-token-num"
SP_SWITCHES = tuple(f"compilation-config.pass-config.{name}" for name in ("enable-sp", "enable-sequence-parallelism"))
GIB = 2**30


def settings(asked: Asked) -> Settings:
    """What the flags of a line set. Raises InputError for a value that is none."""
    found = Settings({field: _simple(asked, flag, field) for flag, field in SIMPLE.items()})
    engine = found.engine
    if engine["max_model_len"] == -1:
        engine["max_model_len"] = None
    engine["quantization"] = quantization(asked, "quantization")
    engine["kv_cache_dtype"] = kv_dtype(asked, "kv-cache-dtype")
    if engine["dtype"] not in (None, *ENGINE_DTYPES):
        asked.refused["dtype"] = "the type of the weights: 16 bits stand for it"
        engine["dtype"] = None
    if asked.given("enforce-eager") is False:
        engine["enforce_eager"] = None
    engine["api_server_count"] = max(1, engine["api_server_count"] or 1) if engine["api_server_count"] else None
    load_balancer(asked, engine, "eplb-config.num-redundant-experts")
    engine["states_per_request"] = _states(asked)
    engine["indexer_kv_dtype"] = index_dtype(asked, INDEX, FP4_INDEX)
    engine["attention_backend"] = attention_backend(asked, "attention-backend")
    engine["moe_backend"] = moe_backend(asked, "moe-backend")
    engine["linear_backend"] = linear_backend(asked, "linear-backend")
    engine["fuse_allreduce_rms"] = asked.given(FUSION)
    engine["enable_symm_mem"] = True if asked.line.env.get(SYMMETRIC) == "1" else None
    engine["flashinfer_sampler"] = _sampled_by_flashinfer(asked)
    engine["pipeline_layers"] = cut_points(asked, PARTITION)
    _in_parts(asked, engine)
    _adapters(asked, engine)
    _exchange(asked, engine)
    _graphs(asked, engine)
    _cache_bytes(asked, engine)
    _drafts(asked, engine)
    _transfer(asked, found)
    if asked.truth("data-parallel-hybrid-lb") or asked.truth("data-parallel-external-lb"):
        asked.unused["data-parallel-hybrid-lb"] = "ranks are balanced by vLLM's own rule"
        asked.unused["data-parallel-external-lb"] = "ranks are balanced by vLLM's own rule"
    for flag in ("disaggregation-mode", "is-prefill-worker", "is-decode-worker"):
        value = asked.get(flag)
        found.role = (
            {"is-prefill-worker": "prefill", "is-decode-worker": "decode"}.get(flag, str(value))
            if value
            else found.role
        )
    found.role = ROLES.get(found.role, "")
    return found


def _sampled_by_flashinfer(asked: Asked) -> bool | None:
    """Whether FlashInfer samples where releases would not by themselves: as the line says, or as the image does."""
    said = asked.line.env.get(SAMPLER)
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(asked.line.facts.get(OF_IMAGE, "")))[:3])
    first, last = SAMPLED_BY_IMAGE
    return True if said == "1" or (said is None and first <= numbers <= last) else None


def cut_points(asked: Asked, variable: str) -> tuple[int, ...] | None:
    """Layers of each stage, as a variable of the environment has them. Raises InputError for what are no numbers."""
    text = asked.line.env.get(variable, "")
    try:
        return tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise InputError(f"{variable}={text}: must be whole numbers with commas") from None


def _in_parts(asked: Asked, engine: dict[str, Any]) -> None:
    """Sequence parallelism, where the line says from how many tokens on: otherwise that depends on the device."""
    least = asked.integer(SP_LEAST)
    on = [flag for flag in SP_SWITCHES if asked.truth(flag)]
    if on and least:
        engine["sequence_parallel_min_tokens"] = least
    for flag in on if not least else ():
        asked.refused[flag] = f"from how many tokens on sums are made in parts: add {SP_LEAST.rpartition('.')[2]}"
        asked.kernels.add(flag)


def _simple(asked: Asked, flag: str, field: str) -> Any:
    if asked.line.flags.get(flag) is None:
        return None
    kind = str(TYPES[field])
    if "bool" in kind:
        return asked.truth(flag)
    if "int" in kind:
        return asked.integer(flag)
    return asked.number(flag) if "float" in kind else asked.text(flag)


def quantization(asked: Asked, flag: str) -> str | None:
    """A quantisation that windtunnel follows; the checkpoint's own needs no word."""
    asks = asked.text(flag)
    if not asks:
        return None
    stored = asked.model.quantization if asked.model else None
    if stored is not None:
        known = {each.method for each in stored.formats}
        if known <= SAME_METHOD.get(asks, set()):
            return asks
        if asks == "modelopt_fp4":
            asked.refused[flag] = f"weights in 4 bits: those of the checkpoint's name stand for them, {stored.methods}"
        else:
            asked.unused[flag] = f"the checkpoint is stored as {stored.methods}"
        return None
    if asks != "fp8" and asked.model is not None:
        asked.refused[flag] = (
            "weights are quantised while they are loaded: those of the checkpoint's name stand for them"
        )
        return None
    return asks


def in_groups(asked: Asked, parts: int, gpus: int) -> None:
    """Experts in groups of GPUs, in slices within each: as much memory, work and traffic of a GPU as whole ones."""
    asked.refused["ep-size"] = (
        f"shapes of kernels: experts in {parts} groups of slices; whole ones on each of {gpus} GPUs stand for it"
    )
    asked.kernels.add("ep-size")


def kv_dtype(asked: Asked, flag: str) -> str | None:
    """A type of the KV cache that windtunnel knows."""
    value = asked.get(flag)
    word = str(value[0] if isinstance(value, list) else value)
    if value is None or word == "auto":
        return None
    plain = {"bf16": "bfloat16", "half": "float16"}.get(word, word)
    if plain in KV_DTYPE_BYTES:
        return plain
    asked.refused[flag] = "the type of the KV cache: 8 bits stand for it"
    return "fp8"


def _adapters(asked: Asked, engine: dict[str, Any]) -> None:
    """Room for adapters, where they are on (LoRAConfig: one of rank 16)."""
    on = asked.truth("enable-lora")
    engine["max_loras"] = engine["max_loras"] or 1 if on else None
    if not on:
        for flag in OF_ADAPTERS:
            asked.unused[flag] = "adapters are off"
        engine["max_lora_rank"] = None
        return
    try:
        if asked.model is not None:
            require_adaptable(asked.model)
    except InputError:
        for flag in ("enable-lora", "max-loras", "max-lora-rank"):
            asked.refused[flag] = "adapters take memory, and their products time in every layer"
        engine["max_loras"] = engine["max_lora_rank"] = None


OF_ADAPTERS = ("max-loras", "max-lora-rank", "max-cpu-loras", "lora-modules", "fully-sharded-loras")


def _exchange(asked: Asked, engine: dict[str, Any]) -> None:
    """Exchanges and micro-batches, where the ranks make them."""
    if engine["all2all_backend"] is None:  # before 0.11 a variable said it
        engine["all2all_backend"] = asked.line.env.get(EXCHANGE)
    named = engine["all2all_backend"]
    shares = asked.experts and engine["enable_expert_parallel"] and (engine["data_parallel_size"] or 1) > 1
    if named not in (None, GATHERED) and (named not in EXCHANGES or not shares):
        if shares:
            asked.refused["all2all-backend"] = "how ranks exchange tokens: gathering those of all stands for it"
        else:
            asked.unused["all2all-backend"] = "no ranks share experts"
        engine["all2all_backend"] = None
    if engine["enable_dbo"] and engine["all2all_backend"] not in (LOW_LATENCY, HIGH_THROUGHPUT):
        asked.refused["enable-dbo"] = (
            "two micro-batches hide the exchange: only DeepEP's is known to run alongside kernels"
        )
        engine["enable_dbo"] = None
    if not engine["enable_dbo"]:
        for flag in ("dbo-decode-token-threshold", "dbo-prefill-token-threshold"):
            asked.unused[flag] = "nothing is split"
            engine[flag.replace("-", "_")] = None
    if engine["enable_expert_parallel"] and not asked.experts:
        asked.unused["enable-expert-parallel"] = "the model has no experts"
        engine["enable_expert_parallel"] = None


def _graphs(asked: Asked, engine: dict[str, Any]) -> None:
    """Captured graphs: sizes as a list or by the largest, none at all; kinds of them are reported."""
    sizes = asked.sizes("compilation-config.cudagraph-capture-sizes")
    largest = asked.integer("max-cudagraph-capture-size")
    if largest and not sizes:
        sizes = tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest)
    mode = asked.text("compilation-config.cudagraph-mode").upper()
    level = str(asked.get("compilation-config.mode"))
    if mode == "NONE" or sizes == () or largest == 0 or str(asked.get("optimization-level")) == "0":
        engine["enforce_eager"] = True
    elif mode in GRAPH_MODES:
        engine["cudagraph_mode"] = mode
    elif mode not in ("", "FULL_AND_PIECEWISE"):
        asked.refused["compilation-config.cudagraph-mode"] = "which steps run from graphs"
    if level not in ("None", "3", "VLLM_COMPILE"):
        asked.refused["compilation-config.mode"] = "what is compiled: kernels that are not fused take longer"
        asked.kernels.add("compilation-config.mode")
    engine["cudagraph_capture_sizes"] = sizes if sizes and not engine["enforce_eager"] else None


def _states(asked: Asked) -> int | None:
    """States of a request: two where the last one of a block is kept for prefixes (``MambaSpec`` in
    vllm/v1/kv_cache_interface.py)."""
    mode = asked.text("mamba-cache-mode")
    if asked.model is not None and not asked.model.state_bytes():
        asked.unused["mamba-cache-mode"] = "the model keeps no states"
    elif mode == ALIGNED:
        return ALIGNED_STATES
    elif mode not in ("", "none"):
        asked.refused["mamba-cache-mode"] = "a state is kept for every block"
    return None


def load_balancer(asked: Asked, engine: dict[str, Any], copies: str) -> None:
    """A load balancer of experts, with copies of them (their flag) or without, where GPUs divide them."""
    engine["num_redundant_experts"] = asked.integer(copies)
    balanced = asked.truth("enable-eplb")
    if balanced and not engine["enable_expert_parallel"]:
        asked.unused["enable-eplb"] = "experts are not divided among GPUs"
        balanced = False
    engine["enable_eplb"] = True if balanced and not engine["num_redundant_experts"] else None


def moe_backend(asked: Asked, flag: str) -> str | None:
    """Whose kernel computes experts, by vLLM's names, which SGLang has too; TensorRT-LLM writes them large."""
    named = asked.text(flag).lower()
    found = {"deepgemm": "deep_gemm"}.get(named, named)
    if not asked.experts and flag in asked.line.flags:
        asked.unused[flag] = "the model has no experts"
        return None
    return _kernel(asked, flag, found, MOE_BACKENDS, "computes the experts")


def linear_backend(asked: Asked, flag: str) -> str | None:
    """Whose kernel multiplies matrices, by vLLM's names, most of which SGLang has as well."""
    return _kernel(asked, flag, asked.text(flag).lower(), LINEAR_BACKENDS, "multiplies matrices")


def _kernel(asked: Asked, flag: str, named: str, known: Collection[str], does: str) -> str | None:
    """The kernel that is named, if it is known; None for the fastest."""
    if named in ("", "auto"):
        return None
    if named in known:
        return named
    asked.refused[flag] = f"which kernel {does}: the fastest one that is known stands for it"
    asked.kernels.add(flag)
    return None


def attention_backend(asked: Asked, flag: str) -> str | None:
    """Whose kernel computes attention, by the engine's name in small letters."""
    found = asked.text(flag).lower()
    if found in ("", "auto"):
        return None
    mixers = [layer.attention for _, layer in asked.model.layers] if asked.model else []
    timed = not asked.model or any(type(mixer) in (Attention, MLA) for mixer in mixers)
    if timed and found in ATTENTION_BACKENDS:
        return found
    asked.refused[flag] = "which attention kernel runs: the one that is known stands for it"
    asked.kernels.add(flag)
    return None


def index_dtype(asked: Asked, flag: str, *switches: str) -> str | None:
    """The type of index keys by its name, or 4 bits by a switch."""
    on = next((switch for switch in switches if asked.truth(switch)), None)
    named = "mxfp4" if on else {"bf16": "bfloat16", "auto": ""}.get(asked.text(flag), asked.text(flag))
    if not named:
        return None
    mixers = [layer.attention for _, layer in asked.model.layers if layer.attention] if asked.model else []
    known = {each for mixer in mixers for each in mixer.index_dtypes} if asked.model else {named}
    if named in known:
        return named
    if known:
        asked.refused[on or flag] = "the type of index keys: that of the engine's default stands for it"
    else:
        asked.unused[on or flag] = "the model has no index of sparse attention"
    return None


INDEX, FP4_INDEX = "attention-config.indexer-kv-dtype", "attention-config.use-fp4-indexer-cache"
FUSION = "compilation-config.pass-config.fuse-allreduce-rms"
ALIGNED, ALIGNED_STATES = "align", 2


def _cache_bytes(asked: Asked, engine: dict[str, Any]) -> None:
    """Bytes of the KV cache of a GPU, as blocks."""
    flag = "kv-cache-memory-bytes"
    given = asked.number(flag) if asked.get(flag) != "" else None
    if given is None or asked.model is None:
        return
    usual = COMPRESSED_BLOCK if asked.model.compresses else LARGEST_BLOCK if asked.model.has_mla else 16
    size = engine["block_size"] or usual
    tp, parts = engine["tensor_parallel_size"] or 1, engine["decode_context_parallel_size"] or 1
    model = asked.model.with_context_parts(parts, tp) if parts > 1 else asked.model
    token = model.kv_bytes_per_token(engine["kv_cache_dtype"] or "auto", tp)
    if token:
        engine["num_gpu_blocks_override"] = max(2, int(given // (size * token)))


def _drafts(asked: Asked, engine: dict[str, Any]) -> None:
    """Drafts, and how many of their tokens are right."""
    drafts = asked.integer("speculative-config.num-speculative-tokens")
    method = asked.text("speculative-config.method")
    if drafts is None and not method and not asked.text("speculative-config.model"):
        return
    engine["num_speculative_tokens"] = drafts = drafts or 1
    length = asked.number("speculative-config.synthetic-acceptance-length")
    engine["acceptance_length"] = acceptance(asked, method or "draft_model", drafts, length)
    engine["speculative_model"] = head_of_drafts(asked, "speculative-config.model", method)
    if method in ("ngram", "suffix", "ngram_gpu"):
        asked.refused["speculative-config.method"] = (
            "drafts are looked up and cost no kernels: a prediction layer stands for it"
        )


ALONE = ("draft_model", "standalone", "drafttarget")
HEADS = ("eagle", "mtp", "medusa", "dflash", "dspark", "mlp", "assistant")


def head_of_drafts(asked: Asked, flag: str, method: str) -> str | None:
    """The EAGLE-3 head that drafts; any other head costs what the model's own prediction layer would, a whole model
    more. vLLM knows heads by their names where no method is given."""
    name = asked.text_of(flag)
    if method.lower() in ALONE or (name and not method and not any(word in name.lower() for word in HEADS)):
        asked.refused[flag] = (
            "a whole model drafts, and takes memory: a prediction layer like the model's stands for it"
        )
        return None
    try:
        if name and asked.model is not None:
            draft_head(asked.model, name)
            return name
    except InputError:
        asked.unused[flag] = "where the draft comes from: its cost is that of the model's own prediction layers"
    return None


def acceptance(asked: Asked, method: str, drafts: int, given: float | None) -> float:
    """Tokens of a step: what the line or the environment says, else what was measured elsewhere."""
    forced = environment_value(asked.line.env, "SGLANG_SIMULATE_ACC_LEN")
    accepted = environment_value(asked.line.env, "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS")
    given = given or forced or (None if accepted is None else accepted + 1)
    if "acceptance_length" in asked.line.facts:
        given = float(asked.line.facts["acceptance_length"])
    if given is not None:
        return min(max(given, 1.0), drafts + 1.0)
    length, where = usual_acceptance(asked.line.model, method, drafts)
    asked.notes["acceptance_length"] = f"{length:g}, as measured for {where} on coding prompts: give your own"
    return length


# --- where KV goes ----------------------------------------------------------------------------------------------------


def _transfer(asked: Asked, found: Settings) -> None:
    """Connectors: a hand-over between pools, stores behind them, or both."""
    flags = {
        flag.removeprefix(TRANSFER): value for flag, value in asked.line.flags.items() if flag.startswith(TRANSFER)
    }
    several = asked.line.flags.get(f"{EXTRA}connectors")
    one = _nested(flags)
    for config in several if isinstance(several, list) else [one]:
        if isinstance(config, Mapping):
            _connector(asked, config, found)
    if (size := asked.number("kv-offloading-size")) is not None:
        found.stores.append(f"tier=host capacity={size * GIB:.0f}")
    role = found.role or ROLES.get(str(one.get("kv-role", one.get("kv_role", ""))), "")
    found.role = role


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    prefix = EXTRA.removeprefix(TRANSFER)
    extra = {flag.removeprefix(prefix): value for flag, value in flags.items() if flag.startswith(prefix)}
    plain = {flag: value for flag, value in flags.items() if not flag.startswith(prefix)}
    return plain | {"kv-connector-extra-config": extra}


def _connector(asked: Asked, config: Mapping[str, Any], found: Settings) -> None:
    config = {str(key).replace("_", "-"): value for key, value in config.items()}
    extra = {
        str(key).replace("_", "-"): value for key, value in (config.get("kv-connector-extra-config") or {}).items()
    }
    name = str(config.get("kv-connector", ""))
    if not name or name == "MultiConnector":
        return
    if name in CONNECTORS:
        found.handover = _handover(CONNECTORS[name], config, extra)
        found.role = found.role or ROLES.get(str(config.get("kv-role")), "")
    elif store := _store(asked, name, extra, found.engine):
        found.stores.append(store)
    else:
        known = name.startswith(("Offloading", "SimpleCPUOffload", "LMCache", "MooncakeStore"))
        lacks = ADD_STORE if known else "is no connector that is simulated"
        asked.refused[f"{TRANSFER}kv-connector"] = f"where KV goes: {name}: {lacks}"


def _handover(usual: str, config: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    words = [usual]
    if isinstance(lease := extra.get("kv-lease-duration"), int | float):
        words.append(f"lease={lease:g}")
    if config.get("kv-load-failure-policy") == "recompute":
        words.append("on_expiry=recompute")
    return " ".join(words)


def _mooncake(asked: Asked, engine: Mapping[str, Any]) -> str | None:
    """What all GPUs give of their hosts' memory (vllm/distributed/mooncake_store.py); None where the file that says it
    is not here, or another process has the memory."""
    ranks = tuple(f"{name}_parallel_size" for name in ("tensor", "pipeline", "data", "prefill_context"))
    gpus = prod(engine[name] or 1 for name in ranks)
    segment, mode = asked.line.flags.get(f"{MOONCAKE}global-segment-size"), asked.line.flags.get(f"{MOONCAKE}mode")
    if mode not in ("embedded", None) or not (mode or segment):
        return None
    found = re.fullmatch(r"([\d.]+)\s*([kmg]?)b?", str(segment or SEGMENT).strip().lower())
    if found is None:
        raise InputError(f"{MOONCAKE}global-segment-size={segment}: must be bytes, such as 4GB")
    each = float(found[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": GIB}[found[2]]
    return f"tier=shared capacity={each * gpus * asked.line.replicas:.0f}"


MOONCAKE, SEGMENT = "mooncake-config.", 4 * GIB
"""Keys of the file that MOONCAKE_CONFIG_PATH names, and what each GPU gives by default."""


def _store(asked: Asked, name: str, extra: Mapping[str, Any], engine: Mapping[str, Any]) -> str | None:
    """A store in windtunnel's words; None for a connector that is none, or whose size is not said."""
    if name.startswith("MooncakeStore"):
        return _mooncake(asked, engine)
    gpus = (engine["tensor_parallel_size"] or 1) * (engine["pipeline_parallel_size"] or 1)
    if name in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        each = extra.get("cpu-bytes-to-use-per-rank")
        size = extra.get("cpu-bytes-to-use") or (each * gpus if isinstance(each, int | float) else None)
        chunk = extra.get("block-size")
    elif name.startswith("LMCache"):
        local = environment_value(asked.line.env, "LMCACHE_MAX_LOCAL_CPU_SIZE")
        size, chunk = (local * GIB * gpus if local else None), extra.get("lmcache.chunk-size") or 256
    else:
        return None
    if not isinstance(size, int | float) or isinstance(size, bool):
        return None
    words = f"tier=host capacity={size:.0f}" + (f" chunk_tokens={chunk}" if isinstance(chunk, int) else "")
    threshold = extra.get("store-threshold")
    return words + (f" write_after={threshold}" if isinstance(threshold, int) and threshold > 0 else "")
