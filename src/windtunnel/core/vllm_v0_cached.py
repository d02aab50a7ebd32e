"""vLLM's v0 scheduler in the compiled core with a prefix cache: the same kernels, with tables of blocks."""

from windtunnel.core.vllm_v0 import arrays, check, conclude, decide, enqueue, pass_over, steady_run, step, update_bound
from windtunnel.core.vllm_v0_records import CachedArrays as Arrays

__all__ = [
    "Arrays",
    "arrays",
    "check",
    "conclude",
    "decide",
    "enqueue",
    "pass_over",
    "steady_run",
    "step",
    "update_bound",
]
