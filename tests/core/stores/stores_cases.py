"""Random fleets with KV stores, and what must be equal in two records of one."""

from dataclasses import replace
from typing import Any

import numpy as np

from core.loop_cases import Case, equal_rows, merged
from windtunnel.core.disaggregation.handover import Crossing
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.records import GONE, REFUSED
from windtunnel.deployment import Handover, Link
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1, can_ever_run
from windtunnel.policy.routing import SCORED, DynamoKv, PrefixAware
from windtunnel.policy.tiers import Eviction, Sharing, Tier
from windtunnel.policy.vllm_v1 import VERSIONS

LONGEST = 96
FIELDS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens")


def a_tier(rng: np.random.Generator, block: int, shared: Sharing | None = None) -> Tier:
    """Of few chunks or many, that is fast or slow."""
    sharing: Sharing = shared or rng.choice(["replica", "pool", "deployment"]).item()
    eviction: Eviction = rng.choice(["lru", "lru", "fifo"]).item()
    return Tier(
        name=str(rng.choice(["host", "disk"])),
        chunks=int(rng.choice([3, 12, 1000, 1000])),
        chunk_tokens=int(rng.choice([1, 1, 2, 4])) * block,
        read_s=float(rng.choice([0.0, 0.01, 0.25])),
        write_s=float(rng.choice([0.0, 0.0, 0.3])),
        latency=float(rng.choice([0.0, 0.5, 3.0])),
        shared_by=sharing,
        eviction=eviction,
        write_after=int(rng.choice([0, 0, 0, 1, 2])),
        generated=bool(rng.random() < 0.3),
    )


def a_policy(rng: np.random.Generator) -> VllmV1:
    """Of any version, or of none that there has been."""
    policy = VERSIONS[str(rng.choice(list(VERSIONS)))]
    if rng.random() < 0.5:
        names = ("reserve_full_prompt", "skip_unfit_prompts", "plain_blocks_first", "adaptive_threshold", "track_place")
        flags: Any = {name: bool(rng.random() < 0.5) for name in names}
        policy = replace(
            policy,
            chunked_prefill=bool(rng.random() < 0.8),
            watermark=float(rng.choice([0.0, 0.05])),
            max_num_active_seqs=int(rng.choice([0, 0, 3])),
            long_prefill_token_threshold=int(rng.choice([0, 0, 7])),
            prefill_schedule_interval=int(rng.choice([1, 1, 1, 3])),
            return_victim_tokens=True,
            **flags,
        )
    if rng.random() < 0.5:
        policy = replace(policy, async_scheduling=bool(rng.random() < 0.5) and policy.return_victim_tokens)
    return policy


def a_demand(rng: np.random.Generator, n: int, limits: Limits) -> Demand:
    """Prompts of few kinds whose beginnings are alike, open or closed, some in sessions."""
    size, kinds = limits.block_size, int(rng.choice([1, 3, 8]))
    prompt = rng.integers(1, int(rng.choice([20, LONGEST - 20])), n)
    output = np.minimum(rng.integers(1, int(rng.choice([3, 30])), n), LONGEST - prompt)
    gap = float(rng.choice([0.0, 1.0, 10.0, 40.0]))
    arrival = np.cumsum(rng.integers(0, 3, n) * gap if rng.random() < 0.5 else rng.exponential(gap, n))
    none = np.zeros(n)
    demand = Demand(
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        overruns=(rng.random(n) < (0.3 if rng.random() < 0.3 else 0.0)) & (prompt + output < LONGEST),
        refused=np.array([not can_ever_run(int(p), int(o), limits) for p, o in zip(prompt, output, strict=True)]),
        follow=np.full(n, -1),
        think_time=none,
        max_concurrency=int(rng.integers(1, 8)) if rng.random() < 0.3 else 0,
    )
    if rng.random() < 0.3:
        follow = np.full(n, -1)
        follow[: n // 2] = np.arange(n // 2, n // 2 + n // 2)
        demand = replace(demand, follow=follow, think_time=rng.exponential(gap + 0.1, n))
    if rng.random() < 0.3:  # prompts that begin with an earlier one, or with the whole text of the session so far
        other = np.array([int(rng.integers(-1, max(i, 1))) if i else -1 for i in range(n)])
        others = prompt[other]
        if (demand.follow >= 0).any():
            other = np.full(n, -1)
            other[n // 2 : n // 2 + n // 2] = np.arange(n // 2)
            others = (prompt + output)[other]
        begins = np.where(other >= 0, np.minimum(prompt, others) * (rng.random(n) < 0.8), 0)
        return replace(demand, begins=tree_of(other, begins.astype(np.int64)))
    ids: list[int] = []
    offsets = [0]
    for tokens in prompt.tolist():
        count, kind = tokens // size, int(rng.integers(0, kinds))
        common = min(count, int(rng.integers(0, LONGEST // size)))
        ids += [kind * 1000 + k for k in range(common)] + [10**6 + len(ids) + k for k in range(count - common)]
        offsets.append(len(ids))
    return replace(demand, hash_ids=(np.array(offsets), np.array(ids, dtype=np.int64)), hash_block_size=size)


def tree_of(other: Any, begins: Any) -> tuple[Any, Any]:
    """Each text hangs on the one that wrote the last token that they share."""
    above, tokens = np.full(len(other), -1), np.zeros(len(other), dtype=np.int64)
    for i in range(len(other)):
        owner, shared = int(other[i]), int(begins[i])
        while owner >= 0 and shared <= tokens[owner]:
            owner = int(above[owner])
        if owner >= 0 and shared > 0:
            above[i], tokens[i] = owner, shared
    return above, tokens


def stored_case(seed: int, n: int = 24) -> Case:
    """Mixed pools of vLLM, of which at least one has a store."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 4, 4]))
    policy = a_policy(rng)
    budget = int(rng.choice([24, 40, 200])) if policy.chunked_prefill else 200
    blocks = int(rng.choice([LONGEST // block + 2, 2 * LONGEST // block, 6 * LONGEST // block]))
    limits = Limits(int(rng.choice([3, 16])), budget, LONGEST, blocks, block)
    lanes = int(rng.choice([1, 1, 2]))
    together = lanes > 1 and bool(rng.random() < 0.5)
    times = linear(
        *(1.0, 0.125, 0.0, 0.0) if rng.random() < 0.5 else (0.5, 0.01, 0.001, 1e-5),
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        max_model_len=LONGEST,
        ranks=lanes if together else 1,
        per_expert_token=0.01 if together else 0.0,
    )
    pools = 1 + bool(rng.random() < 0.2)
    tiers = [tuple(a_tier(rng, block) for _ in range(rng.integers(k == 0, 3))) for k in range(pools)]
    if pools > 1 and rng.random() < 0.5:
        tiers[1] = tuple(replace(tier, read_s=2 * tier.read_s) for tier in tiers[0])
    router, settings = int(rng.choice([0, 1, 2, 3, 5, 6, SCORED])), None
    if router == SCORED:
        settings = [PrefixAware(), DynamoKv()][rng.integers(2)]
    fleet = Fleet(
        limits=(limits,) * pools,
        policies=(replace(policy, prefix_caching=True, admission_order="fcfs", victim="newest"),) * pools,
        times=(times,) * pools,
        replicas=(int(rng.integers(1, 4)),) * pools,
        lanes=(lanes,) * pools,
        lockstep=(together,) * pools,
        tiers=tuple(tiers),
        routing=settings,
    )
    demand = a_demand(rng, n, limits)
    return Case(fleet, demand, (router, router), rng.random(n))


def a_handover(rng: np.random.Generator) -> Handover:
    """Any rules of the hand-over."""
    transfer: Any = rng.choice(["none", "pull", "push", "chunked"]).item()
    first: Any = rng.choice(["prefill", "relayed", "decode"]).item() if transfer != "none" else "prefill"
    gate: Any = {"none": "after_prefill", "chunked": "before_prefill"}.get(transfer)
    rules = Handover(
        transfer,
        first,
        gate=gate or rng.choice(["before_prefill", "after_prefill"]).item(),
        reserved_decode_tokens=int(rng.choice([0, 0, 1, 7])),
        reservation=rng.choice(["memory", "seats", "seats_and_few"]).item(),
        max_local_prefill_length=int(rng.choice([0, 0, 10])),
        proxy=float(rng.choice([0.0, 0.5])),
    )
    if rng.random() < 0.3:
        then: Any = "fail" if first == "relayed" else rng.choice(["fail", "recompute"]).item()
        lease, timeout = float(rng.choice([0.125, 1.0, 10.0])), float(rng.choice([2.0, np.inf]))
        rules = replace(rules, lease=lease, timeout=timeout, on_expiry=then)
    return rules


def apart_case(seed: int, n: int = 24) -> Case:
    """Prefill and decode pools of vLLM, of which at least one has a store."""
    case = stored_case(seed, n)
    rng = np.random.default_rng([seed, 5])
    fleet, demand = case.fleet, case.demand
    policy: Any = fleet.policies[0]
    policy = replace(policy, return_victim_tokens=True)
    which = int(rng.integers(1, 4))
    tiers = [tuple(a_tier(rng, fleet.limits[0].block_size) for _ in range(rng.integers(1, 3))) for _ in range(2)]
    if rng.random() < 0.6:
        tiers[1] = tuple(replace(tier, read_s=2 * tier.read_s) for tier in tiers[0])
    served = replace(
        fleet,
        limits=tuple(replace(fleet.limits[0], max_num_seqs=int(rng.choice([3, 16]))) for _ in range(2)),
        policies=(policy, replace(policy, async_scheduling=bool(rng.random() < 0.5))),
        times=fleet.times[:1] * 2,
        replicas=tuple(int(count) for count in rng.integers(1, 4, 2)),
        lanes=fleet.lanes[:1] * 2,
        lockstep=fleet.lockstep[:1] * 2,
        roles=("prefill", "decode"),
        tiers=tuple(some if which >> k & 1 else () for k, some in enumerate(tiers)),
    )
    if fleet.routing:  # the decode side is asked for one token less
        demand = replace(demand, prompt_tokens=np.maximum(demand.prompt_tokens, 2))
    room = demand.prompt_tokens + demand.output_tokens + 8 > fleet.limits[0].num_blocks * fleet.limits[0].block_size
    work: Any = demand.prompt_tokens * float(rng.choice([0.0, 0.125]))
    sharing: Any = rng.choice(["fifo", "fair"]).item()
    contention: Any = rng.choice(["none", "source", "destination", "both"]).item()
    link = Link(latency=float(rng.choice([0.0, 0.25, 3.0])), sharing=sharing, contention=contention)
    crossing = Crossing(link, a_handover(rng), work * 10, work)
    demand = replace(demand, refused=demand.refused | room)
    return Case(served, demand, case.routers, rng.random((2, n)), crossing)


def differences(x: Record, y: Record) -> list[str]:
    """What is not equal; a jump of one may be two of the other."""
    found = [name for name in FIELDS if not np.array_equal(x.requests[name], y.requests[name], equal_nan=True)]
    ends = [np.where(np.isin(one.requests["state"], (GONE, REFUSED)), one.requests["state"], 0) for one in (x, y)]
    if not np.array_equal(ends[0], ends[1]):
        found.append("state")
    if merged(x.rows) != merged(y.rows):
        found.append("rows")
    stalls = [np.sort(one.stalls, order=("request", "resumed_token", "last_token")) for one in (x, y)]
    if not equal_rows(*stalls):
        found.append("stalls")
    if x.tiers != y.tiers:
        found.append(f"stores: {x.tiers} and {y.tiers}")
    return found
