"""Prefill and decode pools: from a deployment to what the engine room wants to know, and from its record to columns."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.disaggregation.handover import Crossing, Handed
from windtunnel.core.engine import Demand, Fleet
from windtunnel.deployment import Deployment, Handover
from windtunnel.deployment.memory import KVBudget
from windtunnel.errors import InputError
from windtunnel.policy.named import Router, find_router
from windtunnel.policy.routing import Conductor
from windtunnel.simulate.run import Handovers, Requests

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

GRID = 2.0**-30
"""Seconds of which all parts of a time to first token but one are multiples, so that sums are exact."""


def routers_of(deployment: Deployment) -> tuple[Router, Router]:
    """The routers of the two sides, which in mixed pools are the same one.

    Raises InputError for a rule of prompts on the side that computes none.
    """
    first, name = find_router(deployment.router), deployment.decode_router or deployment.router
    second = first if name == deployment.router else find_router(name)
    if deployment.disaggregated and isinstance(second.routing, Conductor):
        raise InputError(
            f"decode_router {name!r}: Conductor chooses where a prompt is computed: give another decode_router, e.g. "
            "least_outstanding"
        )
    return first, second


Sending = Callable[[Integers], tuple[Floats, Floats]]
"""From the tokens of prompts: bytes of each, and seconds of work for the link from the end of the prompt on."""


def sending_of(deployment: Deployment, budgets: list[KVBudget]) -> Sending:
    """What the link has to do: whole blocks, to all GPUs of a decode rank, which take part at once.

    Of a prompt that leaves in chunks or layers, what its last one makes is sent when it is computed; the others were,
    while it went on.
    """
    taker = next(i for i, pool in enumerate(deployment.pools) if pool.role == "decode")
    pool, budget = deployment.pools[taker], budgets[taker]
    gpus = pool.engine.tensor_parallel_size * pool.engine.pipeline_parallel_size
    link, rules = deployment.link, deployment.handover
    chunk = min(one.engine.resolved("max_num_batched_tokens") for one in deployment.pools if one.role == "prefill")

    def sending(prompts: Integers) -> tuple[Floats, Floats]:
        blocks = -(-prompts // budget.block_size)
        sizes = (blocks * budget.block_bytes * gpus).astype(np.float64)
        share = np.ones(len(sizes))
        if rules.transfer == "chunked":
            share = ((prompts - 1) % chunk + 1) / np.maximum(prompts, 1)
        elif rules.transfer == "layerwise":
            share /= pool.model.num_layers
        return sizes, link.work(sizes, blocks * pool.model.num_layers, share)

    return sending


def between_of(deployment: Deployment, budgets: list[KVBudget], demand: Demand) -> tuple[Crossing, Sending]:
    """The link, the rules and the work of each request; and what that would be for other prompts."""
    sending, crossing = sending_of(deployment, budgets), Crossing(deployment.link, deployment.handover)
    if deployment.handover.transfer == "none":
        return crossing, sending
    sizes, work = sending(demand.prompt_tokens)
    return replace(crossing, kv_bytes=sizes, work=work), sending


def about_waits(rules: Handover, record: Handed) -> list[str]:
    """Requests whose wait the engine gave up, or would have, for a run's notes."""
    if rules.on_expiry != "wait":
        lost = len(record.lost) - (len(record.lives.lost) if record.lives else 0)
        return [f"{lost} requests ended with an error: a lease or a timeout ran out"] * bool(lost)
    handed = record.handovers
    waits = {
        "lease": handed["transfer_start"] - handed["prefill_end"],
        "timeout": handed["admitted"] - handed["asked"],
    }
    found = []
    for name, seconds in waits.items():
        if late := int((seconds > getattr(rules, name)).sum()):
            limit = getattr(rules, name)
            found.append(
                f"{late} requests waited longer than the hand-over's {name} of {limit:g} s: the engine gives up; "
                "on_expiry=fail in --handover simulates that"
            )
    return found


def handovers_of(requests: Requests, record: Handed, fleet: Fleet) -> Handovers:
    """The columns of ``Handovers``, for requests whose times are the client's."""
    handed, engine = record.handovers, record.requests
    first, goes = engine["first_token"], handed["goes"] > 0
    moved = goes & ~np.isnan(handed["transfer_end"])
    ttft = requests.first_token - requests.arrival
    gated = handed["asked"] < handed["prefill_end"]
    parts = dict.fromkeys(("queue", "held", "admission", "transfer", "join"), np.zeros(0))
    parts["queue"] = engine["scheduled"] - np.where(gated, handed["admitted"], engine["arrival"])
    parts["held"] = np.where(gated, 0.0, handed["asked"] - handed["prefill_end"])
    parts["admission"] = handed["admitted"] - np.where(gated, engine["arrival"], handed["asked"])
    parts["transfer"] = handed["transfer_end"] - np.where(gated, handed["prefill_end"], handed["admitted"])
    parts["join"] = first - handed["transfer_end"]
    later = moved & (first > handed["prefill_end"])  # the first token comes from the decode replica
    for name in parts:
        seen = later | (name == "queue") | ((name == "admission") & gated)
        parts[name] = np.where(seen, np.nan_to_num(parts[name]), 0.0)
    parts["held"] = parts["held"] + (ttft - (first - engine["arrival"]))
    parts = {name: np.round(np.nan_to_num(part) / GRID) * GRID for name, part in parts.items()}
    unknown = np.isnan(ttft)
    parts["prefill"] = ttft - sum(parts.values())
    columns = {f"ttft_{name}": np.where(unknown, np.nan, part) for name, part in parts.items()}
    lane = handed["prefill_lane"]
    pool_of_replica = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas)
    replica = np.where(lane < 0, -1, record.replica_of_lane[lane])
    return Handovers(
        prefill_pool=np.where(lane < 0, -1, pool_of_replica[replica]),
        prefill_replica=replica,
        kv_bytes=record.kv_bytes,
        **columns,
    )
