"""Random fleets of every scheduler, and what must be equal in two records of one."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.core.disaggregation.handover import Crossing, Handed
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.records import GONE, REFUSED
from windtunnel.deployment.handover import HANDOVERS
from windtunnel.deployment.links import Link
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, Settings, Sglang, VllmV0, VllmV1
from windtunnel.policy.routing import SCORED, Conductor, DynamoKv, PrefixAware
from windtunnel.policy.unified import POLICIES

MODEL_LEN, LONGEST = 24576, 590 * 16
SEEN = (
    *("arrival", "scheduled", "first_token", "finish", "preemptions", "lane", "state", "generated", "cached_tokens"),
)
MIXED = ("vllm", "cache", "priority", "sglang", "radix", "sarathi", "trtllm-max-utilization", "v0")
HANDING = ("vllm", "cache", "sglang", "trtllm-max-utilization")
COUNTED = ("freed", "came", "came_there", "sent", "moved", "stuck")
"""Of a hand-over, what failures need to know; the old loops do not write it down."""
ROUTERS = (0, 1, 2, 3, 5, 6, SCORED)


@dataclass(frozen=True)
class Case:
    """A fleet, its requests, and its router; of prefill and decode pools one each, and what is between them."""

    fleet: Fleet
    demand: Demand
    routers: tuple[int, int]
    uniforms: Any
    crossing: Crossing | None = None


def policy_of(kind: str, asynchronous: bool) -> tuple[Settings, int, int]:
    """(Settings, tokens of a step, tokens of a block) of a scheduler."""
    if kind == "vllm":
        return VllmV1(async_scheduling=asynchronous), 2048, 16
    if kind == "cache":
        return VllmV1(async_scheduling=asynchronous, prefix_caching=True), 2048, 16
    if kind == "priority":
        ordered = {"admission_order": "priority", "victim": "lowest_priority"}
        return VllmV1(async_scheduling=asynchronous, **ordered), 2048, 16  # type: ignore[arg-type]
    if kind in ("sglang", "radix"):
        return Sglang(radix_cache=kind == "radix"), 8192, 1
    if kind == "engines":
        return VllmV0(pipeline_parallel_size=3 if asynchronous else 2), MODEL_LEN, 16
    return (VllmV0() if kind == "v0" else POLICIES[kind]), MODEL_LEN, 16


def requests(rng: np.random.Generator, n: int, replicas: int) -> Demand:
    """Poisson arrivals and lognormal lengths."""
    rate = float(rng.choice([6.4, 31.0, 60.0])) * replicas
    prompt, output = (np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, n), 1, 4096) for mean in (512, 200))
    none = np.zeros(n)
    demand = Demand(
        arrival=np.cumsum(rng.exponential(1 / rate, n)),
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
        overruns=none.astype(bool),
        refused=none.astype(bool),
        follow=np.full(n, -1),
        think_time=none,
        max_concurrency=0,
    )
    if rng.random() < 0.4:
        demand = replace(demand, max_concurrency=int(rng.integers(1, 12)))
    if rng.random() < 0.3:
        follow = np.full(n, -1)
        follow[: n // 2] = np.arange(n // 2, n // 2 + n // 2)
        demand = replace(demand, follow=follow, think_time=rng.exponential(1, n))
    if demand.max_concurrency and rng.random() < 0.5:
        demand = replace(demand, turnaround=rng.exponential(0.1, n))
    if rng.random() < 0.3:
        demand = replace(demand, refused=rng.random(n) < 0.1)
    if rng.random() < 0.4:
        demand = replace(demand, arrival=np.round(demand.arrival, 1))
    return demand


def with_contents(rng: np.random.Generator, demand: Demand) -> Demand:
    """Prompts that begin alike."""
    ids: list[int] = []
    offsets = [0]
    for prompt in demand.prompt_tokens.tolist():
        count, kind = prompt // 16, int(rng.integers(0, 5))
        shared = min(count, int(rng.integers(0, 40)))
        ids += [kind * 1000 + k for k in range(shared)] + [10**6 + len(ids) + k for k in range(count - shared)]
        offsets.append(len(ids))
    return replace(demand, hash_ids=(np.array(offsets), np.array(ids, dtype=np.int64)), hash_block_size=16)


def little_memory(rng: np.random.Generator, demand: Demand, block: int) -> tuple[Demand, int]:
    """(The requests that fit, the blocks): plenty, or so few that requests are evicted."""
    tokens = int(rng.choice([600, 9000])) * 16
    if tokens < 10_000:
        demand = replace(demand, refused=demand.refused | (demand.prompt_tokens + demand.output_tokens > LONGEST))
    return demand, tokens // block


def times(tokens: int, ranks: int = 1) -> Any:
    """Of a step; ``ranks`` > 1: of a mixture of experts, whose ranks wait for each other."""
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": 64, "max_model_len": MODEL_LEN}
    experts: dict[str, Any] = {"ranks": ranks, "per_expert_token": 1e-6} if ranks > 1 else {}
    return linear(6e-3, 20e-6, 40e-9, 1e-9, **limits, **experts)


def mixed_case(seed: int, n: int = 40, kinds: tuple[str, ...] = MIXED) -> Case:
    """Mixed pools."""
    rng = np.random.default_rng(seed)
    replicas, lanes, kind = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2])), str(rng.choice(kinds))
    together = bool(rng.random() < 0.5) and lanes > 1 and kind not in ("v0", "engines")
    policy, tokens, block = policy_of(kind, bool(rng.random() < 0.5))
    demand = requests(rng, n, replicas)
    if rng.random() < 0.3:
        demand = replace(demand, overruns=rng.random(n) < 0.3)
    if kind == "priority":
        demand = replace(demand, priority=rng.integers(0, 3, n))
    if kind in ("cache", "radix"):
        demand = with_contents(rng, demand)
    router, settings = int(rng.choice(ROUTERS)), None
    if router == SCORED:
        settings = [PrefixAware(), DynamoKv(), Conductor()][rng.integers(3 if kind == "cache" else 2)]
    demand, blocks = little_memory(rng, demand, block)
    pools = 1 + bool(rng.random() < 0.2)
    stages, tables = policy.pipeline_parallel_size, times(tokens, lanes if together else 1)
    if stages > 1:
        lanes, tables = 1, StageTimes((tables,) * stages, np.full((stages - 1, tokens + 1), 1e-3))
    limits = Limits(int(rng.choice([64, 8])), tokens, MODEL_LEN, blocks * stages, block)
    fleet = Fleet(
        limits=(limits,) * pools,
        policies=(policy,) * pools,
        times=(tables,) * pools,
        replicas=(replicas,) * pools,
        lanes=(lanes,) * pools,
        lockstep=(together,) * pools,
        routing=settings,
    )
    return Case(fleet, demand, (router, router), rng.random(n))


def handing_case(seed: int, n: int = 40, kinds: tuple[str, ...] = HANDING) -> Case:
    """A prefill pool and a decode pool."""
    rng = np.random.default_rng(seed)
    rules, kind = HANDOVERS[list(HANDOVERS)[seed % len(HANDOVERS)]], str(rng.choice(kinds))
    policy, tokens, block = policy_of(kind, bool(rng.random() < 0.5))
    if rng.random() < 0.3 and kind != "sglang":
        rules = replace(rules, max_local_prefill_length=300)
    if rng.random() < 0.3:
        rules = replace(rules, proxy=0.01)
    counts, lanes = (int(rng.integers(1, 4)), int(rng.integers(1, 4))), int(rng.choice([1, 1, 2]))
    demand = requests(rng, n, counts[0])
    demand = replace(demand, output_tokens=np.minimum(demand.output_tokens, int(rng.choice([3, 60, 800]))))
    demand, blocks = little_memory(rng, demand, block)
    limits = Limits(int(rng.choice([64, 8])), tokens, MODEL_LEN, blocks, block)
    ends: Any = str(rng.choice(["none", "source", "destination", "both"]))
    sharing: Any = str(rng.choice(["fifo", "fair"]))
    fleet = Fleet(
        limits=(limits,) * 2,
        policies=(policy,) * 2,
        times=(times(tokens),) * 2,
        replicas=counts,
        lanes=(lanes,) * 2,
        lockstep=(False,) * 2,
        roles=("prefill", "decode"),
    )
    routers = int(rng.choice(ROUTERS[:5])), int(rng.choice(ROUTERS[:5]))
    crossing = Crossing(Link(sharing=sharing, contention=ends), rules, work=rng.exponential(0.05, n))
    return Case(fleet, demand, routers, rng.random((2, n)), crossing)


# What must be equal.


def by_lane(rows: Any) -> Any:
    """The steps of the log lane by lane, without what idle lanes hold, and without what only folding looks at."""
    rows = rows[(rows["steps"] > 0) | (rows["chunk_tokens"] > 0)]
    rows["paused"] = 0
    return rows[np.lexsort((np.arange(len(rows)), rows["start"], rows["lane"], rows["replica"]))]


def merged(rows: Any) -> list[list[Any]]:
    """The log lane by lane, with equal steps that follow each other in one row, as if no jump had been cut."""
    table = [dict(zip(rows.dtype.names, row, strict=True)) for row in by_lane(rows).tolist()]
    found: list[dict[str, Any]] = []
    for k, one in enumerate(table):
        single = k + 1 == len(table) or table[k + 1]["steps"] > 0
        if found and single and goes_on(found[-1], one):
            found[-1]["steps"] += one["steps"]
        else:
            found.append(one)
    return [list(one.values()) for one in found]


def goes_on(last: dict[str, Any], one: dict[str, Any]) -> bool:
    """Whether a row has more of the equal steps of another one."""
    alike = ("replica", "lane", "decodes", "chunk_tokens", "discarded")
    if min(last["steps"], one["steps"]) == 0 or any(last[name] != one[name] for name in alike):
        return False
    kv_tokens = last["kv_tokens"] + last["steps"] * one["decodes"]
    context = last["chunk_context"] + last["steps"] * one["chunk_tokens"]
    return bool(one["kv_tokens"] == kv_tokens and one["chunk_context"] == context)


def equal_rows(a: Any, b: Any) -> bool:
    """Of two arrays of records."""
    return len(a) == len(b) and all(np.array_equal(a[name], b[name], equal_nan=True) for name in a.dtype.names)


def unlike(x: Record, y: Record) -> list[str]:
    """What is not equal in two records; a jump of one may be two of the other."""
    found = [name for name in SEEN if not np.array_equal(x.requests[name], y.requests[name], equal_nan=True)]
    if not equal_rows(by_lane(x.rows), by_lane(y.rows)) and merged(x.rows) != merged(y.rows):
        found.append("rows")
    stalls = [np.sort(one.stalls, order=("request", "resumed_token", "last_token")) for one in (x, y)]
    if not equal_rows(*stalls):
        found.append("stalls")
    if isinstance(x, Handed) and isinstance(y, Handed):
        names = [name for name in x.handovers.dtype.names or () if name not in COUNTED]
        if not equal_rows(x.handovers[names], y.handovers[names]):
            found.append("handovers")
    return found


TOLD = ("scheduled", "first_token", "finish", "preemptions", "cached_tokens", "lane", "output")
PASSED = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end", "goes", "stays",
          "prefill_lane", "source", "destination")  # fmt: skip


def alike(a: Any, b: Any) -> bool:
    """NaN equals NaN."""
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


def handed_unlike(fleet: Fleet, a: Handed, b: Handed) -> list[str]:
    """What is not equal: a is the reference's, b the core's. What a decode replica gives memory or takes into its queue
    while it decides a step counts in the core's row of that step, and in the reference's next one."""
    found = [name for name in TOLD if not alike(a.requests[name], b.requests[name])]
    found += [name for name in PASSED if not alike(a.handovers[name], b.handovers[name])]
    found += [name for name in ("kv_bytes", "lost", "rank_of_lane") if not alike(getattr(a, name), getattr(b, name))]
    if any(((a.requests["state"] == state) != (b.requests["state"] == state)).any() for state in (GONE, REFUSED)):
        found.append("state")
    if not equal_rows(*(np.unique(one.stalls) for one in (a, b))):
        found.append("stalls")
    roles = np.repeat(fleet.roles, fleet.replicas)
    for one in (a, b):
        for name in ("used_blocks", "waiting"):
            one.rows[name][roles[one.rows["replica"]] == "decode"] = 0
    steps = b.rows[(b.rows["steps"] > 0) | (b.rows["chunk_tokens"] > 0)]  # and not what idle lanes hold
    if merged(a.rows) != merged(steps):
        found.append("rows")
    return found
