"""A deployment that takes requests as they come: what a server needs that answers while it simulates."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from windtunnel.core.disaggregation.handover import ROLES, Crossing
from windtunnel.core.live.live import Arrival, Live
from windtunnel.core.live.pools import Between, LivePools
from windtunnel.deployment import Deployment
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import VllmV1
from windtunnel.policy.routing import SCORED
from windtunnel.policy.scaling import Foresight, Variant
from windtunnel.simulate.disaggregation import routers_of, sending_of
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.simulate import batch_times, comes_and_goes, fleet_of, router_stream, schedulers_of

__all__ = ["Arrival", "LiveDeployment", "live"]

HOUR = 3600.0
"""Simulated seconds of warming up, in which any engine answers a token or two."""


class LiveDeployment:
    """A deployment's replicas, live: the same engines, schedulers and batch times as in ``simulate``."""

    def __init__(self, deployment: Deployment, idle: Callable[[], Live], hash_block_size: int) -> None:
        """``live`` makes one.

        Args:
            deployment: what is served; pools that prefill come before pools that decode.
            idle: makes the engines before any request.
            hash_block_size: tokens of a block of a prompt whose contents must be named; 0: none need be.
        """
        self.deployment, self.hash_block_size, self._idle = deployment, hash_block_size, idle
        self.engine = idle()
        self.fleet = self.engine.fleet
        rows = zip(self.fleet.policies, self.fleet.limits, self.fleet.roles, strict=True)
        self.longest = min(policy.longest_request(limits) for policy, limits, role in rows if role != "prefill")
        """Tokens of prompt and answer that any replica takes."""

    def warm_up(self) -> None:
        """Compile what serves a request, which takes a while once on a machine, before the first one waits for it."""
        self.engine.arrive(Arrival(1, 2, 2), 0.0)
        self.engine.advance(HOUR)  # not for ever: an autoscaler looks again and again
        self.engine = self._idle()

    @property
    def engine_version(self) -> str:
        """The engine whose rules hold, with its version."""
        return self.deployment.pools[0].engine.preset

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why no replica could ever run such a request; empty where each could."""
        rows = zip(self.fleet.policies, self.fleet.limits, self.fleet.roles, strict=True)
        for policy, limits, role in rows:
            tokens = prompt_tokens + (1 if role == "prefill" else output_tokens)
            if tokens > policy.longest_request(limits):
                return f"{tokens} tokens, more than the {policy.longest_request(limits)} of max_model_len"
            if role != "decode" and prompt_tokens > policy.longest_prompt(limits):
                return f"{prompt_tokens} prompt tokens, more than the {policy.longest_prompt(limits)} of a step"
            kept = prompt_tokens + self.deployment.handover.reserved_decode_tokens if role == "decode" else 0
            if max(-(-(tokens - 1) // limits.block_size), -(-kept // limits.block_size)) > limits.num_blocks:
                return f"{tokens} tokens, more than the KV memory of a replica"
        return ""

    def load(self) -> list[tuple[int, int, float]]:
        """For each replica: requests running and waiting, and the share of its KV blocks in use."""
        state = self.engine.state
        found = []
        for j in range(len(state.replicas) - 1):
            lanes = state.lanes[state.replicas[j] : state.replicas[j + 1]]
            blocks = state.pools["num_blocks"][state.groups["pool"][lanes["group"]]]
            waiting = int(lanes["waiting"].sum())
            used = 1.0 - float(lanes["free"].sum()) / float(blocks.sum())
            found.append((int(lanes["outstanding"].sum()) - waiting, waiting, used))
        return found

    def cache_config(self) -> list[dict[str, str]]:
        """Of each replica, what its server would say of its KV cache."""
        found = []
        for pool, limits, policy in zip(self.deployment.pools, self.fleet.limits, self.fleet.policies, strict=True):
            engine = pool.engine
            facts = {
                "block_size": str(limits.block_size),
                "num_gpu_blocks": str(limits.num_blocks),
                "gpu_memory_utilization": str(engine.gpu_memory_utilization),
                "enable_prefix_caching": str(bool(policy.prefix_caching)),
                "cache_dtype": str(engine.kv_cache_dtype),
            }
            found += [facts] * pool.replicas
        return found

    def replica_of(self, slot: int) -> int:
        """The replica that a request was sent to; the first where none is there for it."""
        state = self.engine.state
        lane = max(self.engine.lane_of(slot), 0)
        return int(state.groups["replica"][state.lanes["group"][lane]])


def live(
    deployment: Deployment,
    seed: int = 0,
    *,
    perf: str = "auto",
    tables: Sequence[Tabulated] | None = None,
    overheads: Overheads = ENGINE_CLOCK,
) -> LiveDeployment:
    """A deployment, ready for requests.

    Args:
        deployment: what is served.
        seed: of the random router.
        perf: where kernel times come from, as in ``simulate``.
        tables: batch times of its pools, if they are known.
        overheads: of the host.

    Raises:
        InputError: it cannot be served live: stores but those of vLLM's v1 in mixed pools, and autoscalers that know
            what is to come.
    """
    places = list(ROLES)
    pools = sorted(deployment.pools, key=lambda pool: places.index(pool.role))
    deployment = replace(deployment, pools=tuple(pools))
    routers = routers_of(deployment)
    policies = schedulers_of(deployment)
    behind_vllm = not deployment.disaggregated and all(isinstance(policy, VllmV1) for policy in policies)
    if any(pool.stores for pool in deployment.pools) and not behind_vllm:
        raise InputError("store: served live behind mixed pools of vLLM's v1 engine; leave it out")
    scalings = [deployment.autoscaler(pool) for pool in deployment.pools]
    if any(scaling and isinstance(scaling.rule, Foresight) for scaling in scalings):
        raise InputError("autoscale: policy=foresight knows what is to come, and a server does not: use planner")
    if any(scaling and isinstance(scaling.rule, Variant) for scaling in scalings):
        raise InputError("autoscale: policy=variant is simulated, but not served: use planner")
    tables = batch_times(deployment, perf) if tables is None else tables
    times = tuple(overheads.applied(table.pipeline or table.times) for table in tables)
    caching = any(policy.prefix_caching for policy in policies) or routers[0].number == SCORED
    by_token = any(policy.shares_parts for policy in policies)
    hash_block_size = (1 if by_token else int(deployment.pools[0].engine.resolved("block_size"))) if caching else 0
    if not caching:
        policies = [policy.without_known_prefixes() for policy in policies]
    budgets = [kv_blocks(pool) for pool in deployment.pools]
    fleet = fleet_of(deployment, times, budgets, policies, routers[0])
    fleet = replace(fleet, **comes_and_goes(deployment, seed))

    def idle() -> Live:
        stream = router_stream(seed)
        if not deployment.disaggregated:
            return Live(fleet, routers[0].number, stream, hash_block_size)
        sending, crosses = sending_of(deployment, budgets), deployment.handover.transfer != "none"
        between = Between(
            (routers[0].number, routers[1].number),
            (stream, np.random.default_rng([seed, crc32(b"decode_router")])),
            Crossing(deployment.link, deployment.handover),
            (lambda prompts: sending(prompts)[1]) if crosses else None,
            (routers[1].route_score, routers[1].routing),
        )
        return LivePools(fleet, between, hash_block_size)

    return LiveDeployment(deployment, idle, hash_block_size)
