"""Recipes of deployments with separate prefill and decode workers, read as settings of their engines.

The flags are those of srt-slurm's recipes, by the names of ``../shared/truth/disagg/README.md``. WORDS has the engine's
own flag for each, which ``launch`` reads as it reads launch lines. Where a recipe is not known, USUAL stands for it:
what most recipes of the engine say.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine
from windtunnel.errors import InputError
from windtunnel.launch import read_flags

Flags = Mapping[str, Any]

USUAL: dict[tuple[str, str], Flags] = {
    ("trtllm", "prefill"): {
        "max_num_tokens": 16_384,
        "kv_dtype": "fp8",
        "cuda_graphs": False,
        "overlap_scheduler": False,
    },
    ("trtllm", "decode"): {"kv_dtype": "fp8"},
    ("sglang", "prefill"): {"chunked_prefill_size": 131_072, "kv_dtype": "fp8_e4m3", "cuda_graphs": False},
    ("sglang", "decode"): {"kv_dtype": "fp8_e4m3"},
}
"""(engine, side) → flags of a recipe that is not known."""

DECODE_TOKENS = 512
"""Tokens of a step that a decode worker of SGLang may compute, at least: it never computes prompts."""
SPARE_TOKENS = 200
"""``max_model_len`` beyond prompt and output, as recipes and InferenceX's scripts have it."""

WORDS: dict[str, dict[str, str]] = {
    "trtllm": {
        "max_batch_size": "max-batch-size",
        "max_num_tokens": "max-num-tokens",
        "free_gpu_memory_fraction": "kv-cache-config.free-gpu-memory-fraction",
        "kv_dtype": "kv-cache-config.dtype",
        "kv_block_reuse": "kv-cache-config.enable-block-reuse",
        "chunked_prefill": "enable-chunked-prefill",
        "cuda_graph_batch_sizes": "cuda-graph-config.batch-sizes",
        "cuda_graph_max_batch_size": "cuda-graph-config.max-batch-size",
        "moe_backend": "moe-config.backend",
        "low_precision_moe_combine": "moe-config.use-low-precision-moe-combine",
        "stream_interval": "stream-interval",
        "postprocess_workers": "num-postprocess-workers",
    },
    "sglang": {
        "max_running_requests": "max-running-requests",
        "chunked_prefill_size": "chunked-prefill-size",
        "max_prefill_tokens": "max-prefill-tokens",
        "max_total_tokens": "max-total-tokens",
        "mem_fraction_static": "mem-fraction-static",
        "kv_dtype": "kv-cache-dtype",
        "attention_backend": "attention-backend",
        "moe_backend": "moe-runner-backend",
        "all_to_all": "moe-a2a-backend",
        "deepep_mode": "deepep-mode",
        "eplb_redundant_experts": "ep-num-redundant-experts",
        "stream_interval": "stream-interval",
        "scheduler_recv_interval": "scheduler-recv-interval",
        "cuda_graph_batch_sizes": "cuda-graph-bs",
        "cuda_graph_max_batch_size": "cuda-graph-max-bs",
    },
    "vllm": {
        "max_num_seqs": "max-num-seqs",
        "max_num_batched_tokens": "max-num-batched-tokens",
        "gpu_memory_utilization": "gpu-memory-utilization",
        "kv_dtype": "kv-cache-dtype",
        "radix_cache": "enable-prefix-caching",
    },
}
"""Engine → what a recipe's fact is called there; the others choose kernels, or change no time and memory."""
OFF: dict[str, dict[str, tuple[str, Any]]] = {
    "trtllm": {"overlap_scheduler": ("disable-overlap-scheduler", True), "cuda_graphs": ("cuda-graph-config", None)},
    "sglang": {"radix_cache": ("disable-radix-cache", True), "cuda_graphs": ("disable-cuda-graph", True)},
    "vllm": {"cuda_graphs": ("enforce-eager", True)},
}
"""Engine → the flag, and its value, that turns off what a recipe says is off."""


@dataclass(frozen=True)
class Side:
    """The prefill or the decode workers of a deployment."""

    role: str
    workers: int
    tp: int
    """GPUs of one worker in each stage."""
    pp: int = 1
    ep: int = 1
    """Ranks of the experts."""
    ranks: int = 1
    """Of attention data parallelism, among the GPUs of ``tp``."""
    flags: Flags = field(default_factory=dict, hash=False)
    """Of the recipe; empty: it is not known."""

    @property
    def gpus(self) -> int:
        """GPUs of all workers."""
        return self.workers * self.tp * self.pp


def engine(side: Side, preset: str, max_model_len: int, **more: Any) -> Engine:
    """The engine of each of the side's workers. Raises InputError for a layout that cannot be."""
    if side.tp % side.ranks or side.ep not in (1, side.tp):
        raise InputError(
            f"{side.role}: tp={side.tp} with attention_dp={side.ranks} and ep={side.ep}: the GPUs of a worker form "
            "equal ranks, and share the experts whole or not at all"
        )
    name = preset.partition("-")[0]
    facts = side.flags or USUAL.get((name, side.role), {})
    settings = read_flags(name, _layout(name, side, max_model_len) | _flags(name, facts), {"engine": preset})
    tokens, seqs = settings.get("max_num_batched_tokens"), settings.get("max_num_seqs")
    if name == "trtllm" and side.role == "prefill" and tokens and not seqs:
        settings["max_num_seqs"] = max(1, tokens // max_model_len)
    if name == "trtllm" and side.role == "decode" and seqs and not tokens:
        settings["max_num_batched_tokens"] = seqs
    if name == "sglang" and side.role == "decode" and not tokens:
        settings["max_num_batched_tokens"] = max(seqs or DECODE_TOKENS, DECODE_TOKENS)
    return Engine(**{"preset": preset, **settings, **more})


def _layout(name: str, side: Side, longest: int) -> dict[str, Any]:
    """The flags that say how a worker's GPUs share the work, and how long a request may be."""
    if name == "vllm":
        return {
            "tensor-parallel-size": side.tp // side.ranks,
            "data-parallel-size": side.ranks,
            "pipeline-parallel-size": side.pp,
            "enable-expert-parallel": side.ep > 1,
            "max-model-len": longest,
        }
    sizes = {"tp-size": side.tp, "pp-size": side.pp, "ep-size": side.ep}
    if name == "trtllm":
        return {**sizes, "enable-attention-dp": side.ranks > 1, "max-seq-len": longest}
    sizes["context-length"] = longest
    return {**sizes, "dp-size": side.ranks, "enable-dp-attention": side.ranks > 1, "disaggregation-mode": side.role}


def _flags(name: str, facts: Flags) -> dict[str, Any]:
    """Facts of a recipe as flags of its engine."""
    found = {WORDS[name][fact]: value for fact, value in facts.items() if fact in WORDS[name]}
    return found | dict(flag for fact, flag in OFF[name].items() if facts.get(fact) is False)
