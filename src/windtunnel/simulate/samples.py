"""Several sequences for each prompt (OpenAI's ``n``): one group for a scheduler that forks, requests elsewhere."""

from typing import Any

import numpy as np

from windtunnel.core.engine import Fleet, Integers, Record
from windtunnel.errors import InputError
from windtunnel.workload import Workload


def groups_of(workload: Workload, fleet: Fleet) -> Integers | None:
    """Who belongs together, where schedulers know that; see ``Demand.sample_of``.

    Elsewhere each sequence is a request, as in vLLM since 0.6.4 (ParallelSampleSequenceGroup) and in its v1 engine
    (ParentRequest). Raises InputError where these would go to different replicas, which one client's request never
    does.
    """
    if workload.sample_of is None:
        return None
    forks = [getattr(policy, "forks", False) for policy in fleet.policies]
    if all(forks):
        return workload.sample_of
    if any(forks) or max(fleet.replicas) > 1:
        raise InputError(
            "n: the sequences of a request would go to different replicas: simulate one replica with its share of the "
            "load, or take scheduler=vllm-0.6-v0, which keeps them together"
        )
    return None


def refused_together(workload: Workload, groups: Integers, fleet: Fleet, output: Integers, refused: Any) -> Any:
    """Which rows are refused: all of a request of which one is, or which does not fit an empty engine as a whole."""
    found = refused.copy()
    for limit in fleet.limits:
        shared = workload.prompt_tokens // limit.block_size
        own = -(-(workload.prompt_tokens + np.maximum(output, 1) - 1) // limit.block_size) - shared
        needed = np.bincount(groups, own, len(own)) + shared
        found |= needed[groups] > limit.num_blocks
    return np.bincount(groups, found, len(found))[groups] > 0


def about_samples(workload: Workload, groups: Integers | None) -> list[str]:
    """What is simulated of them."""
    if workload.sample_of is None:
        return []
    prompts = len(np.unique(workload.sample_of))
    what = f"{len(workload):,} sequences of {prompts:,} prompts, a row each: "
    if groups is None:
        return [what + "each is a request, as the engine makes of them, that shares its prompt's text with the others"]
    return [what + "as up to vLLM 0.6.3, those of a prompt share its blocks and are scheduled together"]


def swapped(record: Record) -> dict[str, float]:
    """How often sequences went to the host, and how many seconds steps waited for blocks on their way; nothing where
    none did."""
    if "swaps" not in (record.requests.dtype.names or ()) or not record.requests["swaps"].any():
        return {}
    return {"sequences": int(record.requests["swaps"].sum()), "seconds": float(record.rows["transfer"].sum())}
