"""The ``vllm serve`` line that starts what was simulated."""

import shlex
from collections.abc import Mapping
from typing import Any

VALUES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "block_size",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "num_gpu_blocks_override",
    "long_prefill_token_threshold",
)
SWITCHES = ("enable_expert_parallel", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
SILENT: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "dtype": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enable_expert_parallel": (False,),
    "enable_prefix_caching": (True,),
    "long_prefill_token_threshold": (0,),
}
"""Values that are vLLM's own defaults on every device and need no flag."""


def serve_line(pool: Mapping[str, Any]) -> str:
    """The command for one replica of a pool, from its entry in a manifest, without what vLLM does anyway."""
    engine = pool.get("engine", {})
    words = ["vllm", "serve", shlex.quote(str(pool.get("model", "MODEL")))]
    for name in VALUES:
        value = engine.get(name)
        if value is not None and value not in SILENT.get(name, ()):
            words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
    for name in SWITCHES:
        value = engine.get(name)
        if value is not None and value not in SILENT.get(name, ()):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    if engine.get("enforce_eager"):
        words.append("--enforce-eager")
    if engine.get("scheduling_policy", "fcfs") != "fcfs":
        words += ["--scheduling-policy", shlex.quote(str(engine["scheduling_policy"]))]
    return " ".join(words)
