"""A published study's static scenario, searched: ``python -m benchmarks.planning.study TRACE``.

DeepSeek-V3 on up to 256 H200s as prefill and decode pools, output tokens of good requests (first token within 1 s, 50
ms per token) for each GPU and second: ai-dynamo/aisimulate, examples/sweeper/nvopt-ragpulse/01-static.yaml, which has
these axes. TRACE is a day of RAGPulse in several copies, made by ``shared/prototypes/study/mktrace.py COPIES OUT``.
Each engine has to beat those before. Prints the best, how many deployments each rule closed, CPU seconds and memory;
``--certificate`` keeps what ``tests/plan/answer/checker.py`` checks; ``--random N`` also tries N deployments that are
drawn at random; ``--routers`` and ``--autoscalers`` ("policy=planner interval=5 startup=0 most=16") those on the best,
with what no router and no autoscaler is above.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import in_one_line
from benchmarks.planning.scaled import scaled
from windtunnel.deployment import SLO, Deployment, Link, Pool, usual_handover
from windtunnel.deployment.handover import find_handover
from windtunnel.files import write_whole
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.closed import Closed
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput
from windtunnel.plan.goodput.points import good_run
from windtunnel.plan.goodput.pools import light, search_pools
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints, Space
from windtunnel.plan.trial import tables_for
from windtunnel.plan.workers import in_turn, processes
from windtunnel.workload import load_trace

Axes = dict[str, tuple[Any, ...]]
NAMES = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel")
SHAPES = ((8, 1, False), (8, 1, True), (1, 8, True), (1, 8, False))
WIDE = ((16, 1, False), (16, 1, True), (1, 16, True), (1, 16, False))
"""Values of NAMES. vLLM has the fourth on 16 GPUs alone."""
PREFILL: Axes = {
    "max_num_batched_tokens": (1024, 2048, 4096, 8192, 16384, 32768),
    "max_num_seqs": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
}
DECODE: Axes = {"max_num_batched_tokens": (2048, 4096, 8192, 16384), "max_num_seqs": (64, 128, 256, 512, 1024)}
OF_BOTH: Axes = {
    "device": ("h200",),
    "max_model_len": (8192,),
    "kv_cache_dtype": ("fp8",),
    "block_size": (64,),
    "gpu_memory_utilization": (0.9,),
}
SAID_EVERY = 30.0


def side(engine: str, limits: Axes, wide: bool) -> Space:
    """The servers of one side."""
    shapes = [one for one in (*SHAPES, *(WIDE if wide else ())) if engine.startswith("sglang") or one != (1, 8, False)]
    shape: Axes = {name: tuple(sorted({one[place] for one in shapes})) for place, name in enumerate(NAMES)}
    every = [(t, d, e) for t in shape[NAMES[0]] for d in shape[NAMES[1]] for e in shape[NAMES[2]]]
    left_out = tuple(
        {name: (value,) for name, value in zip(NAMES, one, strict=True)} for one in every if one not in shapes
    )
    return Space("deepseek-ai/DeepSeek-V3", OF_BOTH | {"engine": (engine,)} | shape | limits, exclude=left_out)


def fabric(pools: Sequence[Pool]) -> Link:  # noqa: ARG001 - whatever is joined
    """The study's link."""
    return Link(bandwidth=64e9)


def space(engine: str, most: int, wide: bool) -> PoolSpace:
    """All pairs of an engine."""
    return PoolSpace(
        side(engine, PREFILL, wide),
        side(engine, DECODE, wide),
        link=fabric,
        handover=find_handover(usual_handover(engine.partition("-")[0])),
        constraints=Constraints(max_gpus=most),
        ratio=most,
    )


def at_random(whole: PoolSpace, closed: Closed, question: Question, count: int) -> float:
    """The best score of so many deployments, each as likely as any other."""
    draw = np.random.default_rng(0)
    sizes = np.array([family.size for family in closed.families], dtype=float)
    best = 0.0
    for _ in range(count):
        family = closed.families[int(draw.choice(len(sizes), p=sizes / sizes.sum()))]
        prefill = family.prefills[int(draw.integers(len(family.prefills)))]
        decode = family.decodes[int(draw.integers(len(family.decodes)))]
        layout = family.layouts[int(draw.integers(len(family.layouts)))]
        weight = family.weight(layout)
        if closed.offered / weight > best:
            deployment = whole.deployment(prefill.pool, decode.pool, layout)
            best = max(best, good_tokens(question, deployment, best * weight) / weight)
    return best


def good_tokens(question: Question, deployment: Deployment, least: float) -> float:
    """Good tokens per second, or 0 where they are not more than the least."""

    def beats(tokens: float, share: float) -> bool:
        return share > 0 and tokens > least

    tables, rate = tables_for(question, deployment), question.workload.request_rate
    found = good_run(question, deployment, rate, tables, beats, only_count=True)
    return 0.0 if found.stopped else found.good_rate


def routed(whole: PoolSpace, answer: SearchResult, question: Question, routers: Sequence[str]) -> str:
    """The best of these routers on the best deployment, and a bound for any router on any layout: what is proven where
    each side has one replica, so that none chooses, and elsewhere what the load asks for."""
    closed = answer.closed
    if answer.best is None or closed is None or closed.best is None:
        return "no deployment to route on"
    p, d, layout = closed.best
    plain = whole.deployment(closed.prefills[p].pool, closed.decodes[d].pool, layout)
    found = max((good_tokens(question, replace(plain, router=name), 0.0) / plain.gpus, name) for name in routers)
    several = min(family.weight(one) for family in closed.families for one in family.layouts if max(one) > 1)
    alone = closed.score if answer.could_be is None else answer.could_be
    return f"{found[1]} {found[0]:.3f}, no router above {max(alone, closed.offered / several):.3f}"


def show(engine: str, answer: SearchResult) -> None:
    """What a search found."""
    assert answer.closed is not None
    if answer.best is not None:
        deployment, _ = answer.measured(answer.best)
        sizes = ", ".join(
            f"{pool.role} {pool.replicas} × {pool.gpus // pool.replicas} GPUs" for pool in deployment.pools
        )
        print(f"{engine}: {answer.best.promise:.3f} tokens/s per GPU: {sizes}; {answer.contenders[0].candidate.name}")
    rules = ", ".join(f"{rule} {count:,}" for rule, count in answer.closed.counts.items())
    print(f"  {answer.closed.counts.total():,} deployments: {rules}")
    if answer.could_be is not None:
        print(f"  what is open may reach {answer.could_be:.3f}")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu, memory = sum(one.ru_utime + one.ru_stime for one in used), max(one.ru_maxrss for one in used) / 1e6
    print(
        f"  {answer.trials:,} simulations, {answer.seconds:.0f} s, {cpu:.0f} CPU-s so far, {memory:.2f} GB", flush=True
    )


def passed(end: float) -> bool:
    """Whether a moment has passed."""
    return time.monotonic() > end


class Watch:
    """Says from time to time how far a search has come."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def said(self, text: str) -> None:
        """Told how far it is."""
        if time.monotonic() - self.last > SAID_EVERY:
            self.last = time.monotonic()
            sys.stderr.write(f"{self.last - self.began:.0f} s: {text}\n")


def main() -> None:
    """Search each engine's space in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.study")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", nargs="+", default=["vllm-0.22", "sglang-0.5"])
    parser.add_argument("--max-gpus", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=900.0)
    parser.add_argument("--only-nodes", action="store_true", help="servers of 8 GPUs alone")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--routers", nargs="+", default=[])
    parser.add_argument("--autoscalers", nargs="+", default=[])
    given = parser.parse_args()
    question = Question(load_trace(given.trace), slo=SLO(ttft=1.0, tpot=0.05), attainment=NO_MINIMUM)
    team = processes(given.workers) if given.workers > 1 else in_turn()
    best = 0.0
    for engine in given.engines:
        whole = space(engine, given.max_gpus, not given.only_nodes)
        stop = partial(passed, time.monotonic() + given.time_limit)
        goal, said = Goodput(whole.constraints), Watch().said
        answer = search_pools(whole, question, goal, team=team, stop=stop, said=said, to_beat=best)
        best = max(best, answer.best.promise if answer.best is not None else 0.0)
        show(engine, answer)
        if given.random and answer.closed is not None:
            print(f"  {given.random:,} at random: {at_random(whole, answer.closed, light(question), given.random):.3f}")
        if given.routers:
            print(f"  router: {routed(whole, answer, light(question), given.routers)}", flush=True)
        if given.autoscalers and answer.closed is not None:
            print(f"  autoscaler: {scaled(whole, answer.closed, light(question), given.autoscalers)}", flush=True)
        if given.certificate is not None:
            target = given.certificate.with_stem(f"{given.certificate.stem}-{engine}")
            write_whole(target, [json.dumps(certificate(answer)) + "\n"])


if __name__ == "__main__":
    sys.exit(in_one_line(main))
