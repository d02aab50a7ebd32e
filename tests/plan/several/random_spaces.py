"""Random spaces of at most 400 points over every kind of axis, with a random load, goal and objective."""

from dataclasses import dataclass, replace
from itertools import count
from math import prod
from random import Random
from typing import Any

import numpy as np

from windtunnel.deployment import Link, parse_goodput
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput
from windtunnel.plan.objective import EnergyPerToken, LeastForRate, Objective, Purchase, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.space import Constraints, Space
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate

MOST, LEAST = 400, 8
"""Points; and the share of them, as a divisor, that can run at least: of most random spaces nothing can."""
DENSE, SECOND, EXPERTS = "Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
ONE_SIDE: dict[str, tuple[Any, ...]] = {
    "device": ("h100", "l40s", "a100"),
    "tensor_parallel_size": (1, 2, 4),
    "max_num_seqs": (4, 16, 64, 256),
    "max_num_batched_tokens": (256, 1024, 4096),
    "kv_cache_dtype": ("auto", "fp8"),
    "quantization": (None, "fp8"),
    "block_size": (16, 32),
    "gpu_memory_utilization": (0.92, 0.8),
    "enforce_eager": (False, True),
    "async_scheduling": (True, False),
    "enable_prefix_caching": (True, False),
    "max_model_len": (2048, 1024),
}
WHOLE: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1, 2),
    "router": (
        "round_robin",
        "least_outstanding",
        "vllm_dp",
        "prefix_aware:prefix=1,queue=3",
        "dynamo_kv:overlap_credit=0",
    ),
    "engine": ("vllm", "sglang-0.5", "vllm-0.16", "trtllm-1.0"),
    "enable_chunked_prefill": (True, False),
    "store": ("none", "tier=host capacity=2e9", "tier=host capacity=1e9 + tier=disk capacity=9e9 read=5e9 write=3e9"),
}
AUTOSCALE = (
    "none",
    "policy=thresholds most=4 interval=2 startup=1",
    "policy=hpa kv=0.2 most=3 interval=1 startup=0",
    "policy=foresight rps=20 least=2 most=4 interval=2",
    "policy=variant most=4 interval=2 startup=1",
    "policy=planner target=latency most=3 interval=2 startup=0",
)
ROUTERS = ("round_robin", "least_outstanding", "power_of_two", "prefix_aware:prefix=1,queue=3")
OF_EXPERTS: dict[str, tuple[Any, ...]] = {"data_parallel_size": (1, 2), "enable_expert_parallel": (False, True)}


@dataclass(frozen=True, eq=False)
class Case:
    """A space and what is asked of it."""

    space: Space | PoolSpace
    question: Question
    objective: Objective
    other: Space | None = None
    """The same axes of another model, of which the better one is chosen."""

    @property
    def name(self) -> str:
        models = " or ".join(one.model for one in (self.space, self.other) if one)
        return f"{models}, {self.objective.name}, {', '.join(self.space.axes)}"


def case(seed: int, most: int = MOST, requests: int = 200, plain: bool = False) -> Case:
    """The case of a seed, of whose space an eighth can run; ``plain``: of mixed servers with vLLM's scheduler, which
    other tests have compiled. Otherwise one in five is of two models, one of sessions in lanes, and one of separate
    pools."""
    if seed % 5 == 3 and not plain:
        most //= 8  # lanes are tried up to thousands
    for attempt in count():
        one = _case(Random(f"{seed} {attempt}"), seed, most, requests, plain)
        if len(one.space.enumerate(with_price=one.objective.needs_price).candidates) * LEAST >= most:
            return one
    raise AssertionError


def _case(random: Random, seed: int, most: int, requests: int, plain: bool) -> Case:
    model = random.choice((DENSE, DENSE, EXPERTS))
    two, lanes, pools = (seed % 5 == which and not plain for which in (2, 3, 4))
    objective = _objective(random, lanes)
    axes = ONE_SIDE | (OF_EXPERTS if model == EXPERTS else {})
    of_side = {name: WHOLE[name] for name in ("store", "engine")}
    axes |= {"router": WHOLE["router"]} if plain else of_side if pools else WHOLE
    scales = isinstance(objective, Goodput) or (
        isinstance(objective, LeastForRate) and objective.purchase == Purchase()
    )
    axes |= {"autoscale": AUTOSCALE} if scales and not (plain or pools or lanes) else {}
    space: Space | PoolSpace
    if pools:
        ratio = random.choice((1, 2, 3))
        routers = tuple(random.sample(ROUTERS, random.randint(1, 2)))
        behind = random.choice(((None,), (None, "random")))
        each = int((most / (1, 3, 7)[ratio - 1] / len(routers) / len(behind)) ** 0.5)
        prefill, decode = (_space(random, model, axes, each) for _ in range(2))
        link = Link(bandwidth=50e9, latency=1e-5)
        space = PoolSpace(prefill, decode, link=lambda _: link, ratio=ratio, routers=routers, decode_routers=behind)
    else:
        space = _space(random, model, axes, most)
    load = _sessions(random, requests) if lanes else _load(random, requests)
    limits = random.choice((("ttft:400", "tpot:30"), ("ttft:1500",), ("tpot:25",), ("e2el:4000",)))
    share = random.choice((0.5, 0.9, 0.99)) if not isinstance(objective, Goodput) else random.choice((NO_MINIMUM, 0.8))
    asked = Question(
        load, slo=parse_goodput(limits), attainment=share, tolerance=0.05, perf="modelled", seed=seed, in_lanes=lanes
    )
    if not lanes and random.random() < 0.3:
        asked = replace(asked, draws=((seed + 1, _load(random, requests)),))
    return Case(space, asked, objective, replace(space, model=SECOND) if two and isinstance(space, Space) else None)


def _space(random: Random, model: str, axes: dict[str, tuple[Any, ...]], most: int) -> Space:
    """Some values of some axes, in random order, and of the others the first."""
    chosen: dict[str, tuple[Any, ...]] = {"device": axes["device"][:1], "max_model_len": (2048,)}
    for axis in random.sample(sorted(axes), len(axes)):
        values = random.sample(axes[axis], random.randint(1, len(axes[axis])))
        if prod(len(each) for each in (chosen | {axis: tuple(values)}).values()) <= most:
            chosen[axis] = tuple(values)
    return Space(model, chosen)


def _load(random: Random, requests: int) -> Workload:
    prompt, answer = random.choice(((300, 60), (800, 20), (100, 150)))
    lengths = Both(Lognormal(prompt, 0.7, 4 * prompt), Lognormal(answer, 0.7, 4 * answer))
    return generate(
        Gamma(random.choice((5.0, 40.0)), random.choice((0.5, 1.0))), lengths, requests, random.randrange(99)
    )


def _sessions(random: Random, requests: int) -> Workload:
    """Turns that all begin with one of two texts."""
    turns = random.choice((3, 5))
    number = np.repeat(np.arange(requests // turns), turns)
    return Workload.from_columns(
        prompt_tokens=[random.choice((200, 400, 800)) for _ in number],
        output_tokens=[random.choice((20, 60)) for _ in number],
        session=number,
        think_time=[0.5] * len(number),
    )


def _objective(random: Random, lanes: bool) -> Objective:
    limits = Constraints(max_gpus=random.choice((4, 8)))
    rate = random.choice((10.0, 40.0))
    choices: tuple[Objective, ...] = (
        RatePerDollar(),
        RatePerDollar(count_gpus=True),
        EnergyPerToken(),
        LeastForRate(rate, Constraints()),
        LeastForRate(rate, Constraints(max_gpus=16), count_gpus=True),
        LeastForRate(rate, Constraints(), purchase=Purchase(whole_nodes=True, spare=1)),
        Goodput(limits),
        Goodput(limits, per_dollar=True),
    )
    if lanes:
        return random.choice((RatePerDollar(of="lanes"), LeastForRate(20.0, Constraints(), of="lanes")))
    return random.choice(choices)
