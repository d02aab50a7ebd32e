"""Recipes of deployments with separate prefill and decode workers, read as settings of their engines.

The flags are those of srt-slurm's recipes, by the names of ``../shared/truth/disagg/README.md``. TensorRT-LLM states
its limits for each rank of attention data parallelism, SGLang for all of a worker together. Where a recipe is not
known, USUAL stands for it: what most recipes of the engine say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windtunnel.deployment import Engine
from windtunnel.deployment.engine import GATHERED, HIGH_THROUGHPUT, LOW_LATENCY
from windtunnel.errors import InputError

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

MOST_SEQS = 8192
"""Requests of one rank beyond which more seats change nothing; recipes ask for up to 67,584 of a worker."""
DECODE_TOKENS = 512
"""Tokens of a step that a decode worker of SGLang may compute, at least: it never computes prompts."""
SPARE_TOKENS = 200
"""``max_model_len`` beyond prompt and output, as recipes and InferenceX's scripts have it."""
SGLANG = "sglang-0.4.6"
"""Its scheduler, by the release whose rules are simulated."""
NEVER = -1
"""SGLang's ``chunked_prefill_size`` for prompts that are not cut."""


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
    flags = side.flags or USUAL.get((name, side.role), {})
    settings = {"trtllm": _trtllm, "sglang": _sglang}.get(name, _vllm)(side, flags, max_model_len)
    return Engine(
        preset=preset,
        tensor_parallel_size=side.tp // side.ranks,
        data_parallel_size=side.ranks,
        pipeline_parallel_size=side.pp,
        enable_expert_parallel=side.ep > 1,
        max_model_len=max_model_len,
        **(_given(settings) | more),
    )


def _trtllm(side: Side, flags: Flags, longest: int) -> dict[str, Any]:
    tokens, seqs = flags.get("max_num_tokens"), flags.get("max_batch_size")
    if side.role == "decode":
        tokens = max(tokens or 0, seqs or 0) or None
    elif tokens:
        seqs = seqs or max(1, tokens // longest)
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": flags.get("free_gpu_memory_fraction"),
        "async_scheduling": False if flags.get("overlap_scheduler") is False else None,
        **_both(flags),
    }


def _sglang(side: Side, flags: Flags, longest: int) -> dict[str, Any]:
    seqs, chunk = flags.get("max_running_requests"), flags.get("chunked_prefill_size")
    seqs = min(max(1, seqs // side.ranks), MOST_SEQS) if seqs else None
    if side.role == "decode":
        chunk = max(seqs or DECODE_TOKENS, DECODE_TOKENS)
    elif chunk:
        chunk = flags.get("max_prefill_tokens") or longest if chunk == NEVER else max(1, chunk // side.ranks)
    deepep = {"low_latency": LOW_LATENCY, "normal": HIGH_THROUGHPUT}
    exchanges = flags.get("all_to_all") == "deepep" and side.ranks > 1
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": chunk,
        "gpu_memory_utilization": flags.get("mem_fraction_static"),
        "all2all_backend": deepep.get(flags.get("deepep_mode") or "", GATHERED) if exchanges else None,
        **_both(flags),
        **_batching(side, flags),
    }


def _batching(side: Side, flags: Flags) -> dict[str, Any]:
    """SGLang's scheduler, which lets prompts into a step up to its own number of tokens."""
    tokens = flags.get("max_prefill_tokens")
    if side.role != "prefill" or tokens is None:
        return {}
    radix = "false" if flags.get("radix_cache") is False else "true"
    return {"scheduler": f"{SGLANG}:max_prefill_tokens={tokens},radix_cache={radix}", "enable_prefix_caching": None}


def _vllm(side: Side, flags: Flags, longest: int) -> dict[str, Any]:  # noqa: ARG001 - as of the other engines
    names = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    return {name: flags.get(name) for name in names} | _both(flags)


def _both(flags: Flags) -> dict[str, Any]:
    """What all engines call alike."""
    return {
        "kv_cache_dtype": "fp8" if str(flags.get("kv_dtype") or "").startswith("fp8") else None,
        "enable_prefix_caching": False if False in (flags.get("radix_cache"), flags.get("kv_block_reuse")) else None,
        "enforce_eager": True if flags.get("cuda_graphs") is False else None,
        "cudagraph_capture_sizes": _captured(flags),
    }


def _captured(flags: Flags) -> tuple[int, ...] | None:
    """The sizes of captured graphs: those that are named, or with the largest one all powers of two and multiples of
    8 up to it."""
    if flags.get("cuda_graphs") is False:
        return None
    if sizes := flags.get("cuda_graph_batch_sizes"):
        return tuple(sizes)
    largest = flags.get("cuda_graph_max_batch_size")
    if not largest:
        return None
    small = (size for size in (1, 2, 4) if size <= largest)
    return tuple(sorted({*small, *range(8, largest + 1, 8), largest}))


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
