"""Notes: what the reader of a run should know about its load and its end; and what a strict one is refused for."""

from windtunnel.core.engine import Demand, Fleet
from windtunnel.errors import InputError
from windtunnel.simulate.run import UNFINISHED, Requests, Run
from windtunnel.simulate.samples import about_samples
from windtunnel.workload import Workload

_NO_HASH_IDS = "prefix caching is on, but the trace has no hash_ids: no shared prefixes are known, "
NEVER = "can never run and were rejected"
"""What is said of requests that the engine refuses."""
QUIET = (
    _NO_HASH_IDS + "so only requests recomputed after preemption get cache hits",
    _NO_HASH_IDS + "and cache hits of requests recomputed after preemption are not simulated in a pipeline",
)
"""Notes of what is as expected for most loads: said in passing, not as a warning. The second is of pipelines."""


def about_load(demand: Demand, cut: int, fleet: Fleet, workload: Workload) -> list[str]:
    """Requests that are rejected or cut, shared prompts that are not known or not looked for, several sequences."""
    found, longest = [], min(limit.max_model_len for limit in fleet.limits)
    if refused := int(demand.refused.sum()):
        pools = zip(fleet.limits, fleet.policies, strict=True)
        steps = [limit.max_num_batched_tokens for limit, settings in pools if settings.refuse_long_prompts]
        whole = f", or their prompts the {min(steps):,} tokens of a step" if steps else ""
        memory = min(limit.num_blocks * limit.block_size for limit in fleet.limits)
        found.append(
            f"{refused:,} of {len(demand.refused):,} requests {NEVER}: they exceed "
            f"max_model_len={longest} or the {memory:,} tokens of KV cache{whole}"
        )
    if cut:
        found.append(f"{cut:,} requests end at max_model_len={longest}, before their full output")
    roles = fleet.roles or ("mixed",) * len(fleet.policies)
    blind = [not one.can_cache_prefixes for one, role in zip(fleet.policies, roles, strict=True) if role != "decode"]
    if demand.knows_contents and any(blind):
        found.append(
            "prompts of this workload share prefixes, but this scheduler is simulated without prefix caching: all are "
            "computed; compare it with --no-enable-prefix-caching"
        )
    caching = [settings for settings in fleet.policies if settings.prefix_caching]
    if not demand.knows_contents and caching:
        found.append(QUIET[any(not settings.without_known_prefixes().prefix_caching for settings in caching)])
    return found + about_samples(workload, demand.sample_of)


def about_the_unfinished(requests: Requests, fleet: Fleet) -> list[str]:
    """Requests that never finish, and why."""
    stuck = int((requests.status == UNFINISHED).sum())
    reason = " or ".join(dict.fromkeys(settings.why_unfinished for settings in fleet.policies))
    return [f"{stuck:,} requests never finish: {reason}, as in the engine"] if stuck else []


def refuse_extrapolation(run: Run, beyond: float) -> None:
    """Raise InputError if the batch times of a run are beyond the kernel data.

    ``beyond`` is the share of its time beyond the ends of tables (``metrics.uncertainty``).

    They are where a pool's device or engine has no tables, where those of another engine version answered, and where a
    kernel of the run was asked beyond the ends of its table or took the efficiency of another shape. What no table of
    any device holds (norms, copies, chunks with context, host work) is modelled all the same, and no reason to refuse.
    """
    for pool, origins in zip(run.manifest["pools"], run.manifest["provenance"], strict=True):
        first = origins[0]
        if first["source"] != "kernel database":
            raise InputError(f"strict: kernel times of {pool['device']} would be modelled: {first['reason']}")
        if first["version_rule"] != "exact":
            raise InputError(
                f"strict: the kernel database has no {first['backend']} {first['wanted']} on {first['system']}: ask "
                f"for what it has, kernel_version={first['version']}"
            )
    if beyond > 0:
        raise InputError(
            f"strict: {100 * beyond:.2f} % of the batch time is beyond the kernel data: `windtunnel explain` names the "
            "operators; leave out strict, or choose another model, parallelism or batch limits"
        )
