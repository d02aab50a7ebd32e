"""Planning measured: ``python -m benchmarks.planning exact|speed [--ray] [--requests N] [--repeats N]``.

``exact`` searches five spaces, and each of them again by brute force: the same best, with how many of the simulations?
``speed`` times the search of one space with one and two workers, on processes and on Ray, in turn and on warm workers:
simulations per second, CPU seconds per simulation, and the wall-clock gain. Prints Markdown tables.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.planning_speed import Race, speed
from windtunnel.deployment import parse_goodput
from windtunnel.plan.objective import LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints, Space
from windtunnel.plan.workers import Team, in_turn, processes
from windtunnel.workload import builtin

REQUESTS = 1000
BATCHES = {"max_num_seqs": (32, 64, 128, 256, 512), "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192)}


@dataclass(frozen=True)
class Case:
    """A space and what is asked of it."""

    space: Space
    trace: str
    goodput: tuple[str, ...]
    objective: Objective
    perf: str = "modelled"

    def question(self, requests: int) -> Question:
        """The question about so many requests."""
        slo = parse_goodput(self.goodput)
        return Question(builtin(self.trace, num_requests=requests), slo=slo, perf=self.perf)


def cases() -> list[Case]:
    """Five spaces of 200 to 300 points: dense and expert models, three traces, three objectives."""
    rate = RatePerDollar()
    devices: dict[str, Any] = {"device": ("h100", "a100", "l40s"), "tensor_parallel_size": (1, 2, 4)}
    small = Space("Llama-3.1-8B", devices | BATCHES)
    middle: dict[str, Any] = {
        "device": ("h100", "h200", "a100"),
        "tensor_parallel_size": (1, 2, 4),
        "max_model_len": (16384,),
    }
    large: dict[str, Any] = {
        "device": ("h100", "h200", "a100"),
        "tensor_parallel_size": (2, 4, 8),
        "kv_cache_dtype": ("auto", "fp8"),
        "max_num_seqs": (32, 64, 128, 256),
        "max_num_batched_tokens": (512, 1024, 2048, 8192),
        "max_model_len": (8192,),
    }
    experts: dict[str, Any] = {
        "device": ("h100", "a100"),
        "tensor_parallel_size": (1, 2),
        "data_parallel_size": (1, 2),
        "enable_expert_parallel": (False, True),
        "max_model_len": (16384,),
        **BATCHES,
    }
    return [
        Case(small, "azure-conv", ("ttft:500", "tpot:40"), rate),
        Case(Space("Qwen/Qwen3-32B", middle | BATCHES), "azure-code", ("ttft:1000", "tpot:50"), rate),
        Case(Space("Llama-3.1-70B", large), "azure-conv", ("ttft:2000", "tpot:80"), LeastForRate(20.0, Constraints())),
        Case(Space("Qwen/Qwen3-30B-A3B", experts), "sharegpt", ("ttft:500", "tpot:30"), rate),
        Case(small, "azure-code", ("ttft:300",), LeastForRate(60.0, Constraints(), count_gpus=True)),
    ]


def exact(requests: int, team: Team) -> None:
    """Search and brute force, space by space."""
    print("| space | points | candidates | brute force | search | share | the same best | value |")
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for case in cases():
        asked, enumeration = case.question(requests), case.space.enumerate(with_price=case.objective.needs_price)
        found = search(enumeration, asked, case.objective, team=team)
        whole = search(enumeration, asked, case.objective, team=team, top=len(enumeration.candidates))
        assert found.best is not None and whole.best is not None
        own = whole.entries[found.best.index].promise
        print(
            f"| {case.space.model}, {case.trace}, {case.objective.name} | {enumeration.size} "
            f"| {len(enumeration.candidates)} | {whole.trials} | {found.trials} | {found.trials / whole.trials:.1%} "
            f"| {'yes' if found.best.index == whole.best.index else f'{own / whole.best.promise - 1:+.2%}'} "
            f"| {case.objective.value(found.best.promise):.4g} {case.objective.unit} |",
            flush=True,
        )


def race(requests: int) -> Race:
    """The search whose speed is measured."""
    case = cases()[0]
    few = {**case.space.axes, "max_num_seqs": (64, 128, 256), "max_num_batched_tokens": (1024, 2048, 4096)}
    return Race(Space(case.space.model, few).enumerate(with_price=True), case.question(requests), case.objective)


def main(argv: Sequence[str]) -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args(argv)
    if words.what == "exact":
        exact(words.requests, processes(words.workers) if words.workers > 1 else in_turn())
        return
    teams = [("processes", processes(1)), ("processes", processes(2))]
    if words.ray:
        from windtunnel.plan.workers import on_ray

        teams.append(("Ray", on_ray(None, 2)))
    speed(race(words.requests), words.repeats, teams)


if __name__ == "__main__":
    main(sys.argv[1:])
