"""Notes: what the reader of a run should know about its load and its end."""

from windtunnel.core.engine import Demand, Fleet
from windtunnel.simulate.run import UNFINISHED, Requests

_NO_HASH_IDS = "prefix caching is on, but the trace has no hash_ids: no shared prefixes are known, "
QUIET = (
    _NO_HASH_IDS + "so only requests recomputed after preemption get cache hits",
    _NO_HASH_IDS + "and cache hits of requests recomputed after preemption are not simulated in a pipeline",
)
"""Notes of what is as expected for most loads: said in passing, not as a warning. The second is of pipelines."""


def about_load(demand: Demand, cut: int, fleet: Fleet) -> list[str]:
    """Requests that are rejected or cut, and shared prompts that are not known or not looked for."""
    found, limit = [], fleet.limits[0]
    if refused := int(demand.refused.sum()):
        whole = fleet.policies[0].refuse_long_prompts
        longest = f", or their prompts the {limit.max_num_batched_tokens} tokens of a step" if whole else ""
        found.append(
            f"{refused} of {len(demand.refused)} requests can never run and were rejected: they exceed max_model_len="
            f"{limit.max_model_len} or the {limit.num_blocks * limit.block_size} tokens of KV cache{longest}"
        )
    if cut:
        found.append(f"{cut} requests end at max_model_len={limit.max_model_len}, before their full output")
    if demand.hash_ids is not None and not all(settings.can_cache_prefixes for settings in fleet.policies):
        found.append(
            "prompts of this workload begin alike, but this scheduler is simulated without prefix caching: all are "
            "computed"
        )
    if demand.hash_ids is None and any(settings.prefix_caching for settings in fleet.policies):
        pipelines = any(settings.pipeline_parallel_size > 1 for settings in fleet.policies)
        found.append(QUIET[pipelines])
    return found


def about_the_unfinished(requests: Requests, fleet: Fleet) -> list[str]:
    """Requests that never finish, and why."""
    stuck = int((requests.status == UNFINISHED).sum())
    reason = fleet.policies[0].why_unfinished
    return [f"{stuck} requests never finish: {reason}, as in the engine"] if stuck else []
