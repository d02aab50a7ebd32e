"""Planning measured: ``python -m benchmarks.planning exact|others|models|speed [--ray] [--requests N] [--repeats N]``.

``exact`` searches five spaces, and each of them again by brute force: the same best, with how many of the simulations?
``others`` searches the same spaces at random and by TPE (extra ``optuna``), with ten times as many simulations.
``models`` plans four models on three devices under two loads, with CPU seconds where ``--workers 1``, and a part of the
space again by brute force (``--requests 0``: what 120 s of a load bring).
``speed`` times the search of one space with one and two workers, on processes and on Ray, in turn and on warm workers:
simulations per second, CPU seconds per simulation, and the wall-clock gain. Prints Markdown tables.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.planning.speed import Race, speed
from windtunnel.deployment import parse_goodput
from windtunnel.model import load_model
from windtunnel.plan.objective import LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.several.models import Models
from windtunnel.plan.space import Constraints, Enumeration, Space
from windtunnel.plan.what_if import what_if
from windtunnel.plan.workers import Team, in_turn, lasting, processes
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


MODELS = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B")
RATES = {"azure-conv": 20.0, "azure-code": 10.0}
"""Requests per second of each load."""


def models(requests: int, team: Team) -> None:
    """Every model under both loads: what it takes, and whether brute force on a part of the space agrees."""
    slo, limits = parse_goodput(("ttft:1000", "tpot:50")), Constraints()
    cases: dict[str, tuple[Question, Objective]] = {
        load: (
            Question(builtin(load, num_requests=requests or int(120 * rate)), slo=slo, confidence=0.9),
            LeastForRate(rate, limits),
        )
        for load, rate in RATES.items()
    }
    print(
        "| model | load | candidates | simulations | $/h | brute force of a part: candidates, simulations, the same |"
    )
    print("|---|---|---:|---:|---:|---|")
    began, found = time.process_time(), {}
    with lasting(team) as lasts:
        for model in MODELS:
            axes: dict[str, Any] = {
                "device": ("h100", "h200", "b200"), "tensor_parallel_size": (1, 2, 4, 8), "max_num_seqs": (128, 512),
                "max_num_batched_tokens": (2048, 8192), "kv_cache_dtype": ("auto", "fp8"), "max_model_len": (16384,),
            } | defaults_of(model)  # fmt: skip
            space = Space(model, axes)
            found[model] = what_if(space.enumerate(with_price=True), cases, team=lasts).answers
        spent = time.process_time() - began
        for model, answers in found.items():
            for load, answer in answers.items():
                part = [one for one in answer.enumeration.candidates if one.settings["max_num_seqs"] == 128]
                few = Enumeration(tuple(part[::3]), answer.enumeration.pruned)
                own, whole = (search(few, *cases[load], top=top, team=lasts) for top in (1, len(few.candidates)))
                best = answer.objective.value(answer.best.promise) if answer.best else float("nan")
                same = "yes" if own.best and whole.best and own.best.index == whole.best.index else "no"
                print(
                    f"| {model} | {load}@{RATES[load]:g} | {len(answer.enumeration.candidates)} | {answer.trials} "
                    f"| {best:.4g} | {len(few.candidates)}, {own.trials} of {whole.trials}, {same} |",
                    flush=True,
                )
    matrix = Models(found)
    for load in matrix.loads:
        print(f"\n{load}: " + ", ".join(f"{model} +{100 * matrix.regret(model, load):.0f} %" for model in MODELS))
    print(f"\n{spent:.0f} CPU-s in this process for all searches, brute force not counted")


def defaults_of(model: str) -> dict[str, tuple[Any, ...]]:
    """Axes that not every model has."""
    experts = {"enable_expert_parallel": (False, True)} if load_model(model).has_moe else {}
    return experts | ({} if load_model(model).quantization else {"quantization": ("stored", "fp8")})


def race(requests: int) -> Race:
    """The search whose speed is measured."""
    case = cases()[0]
    few = {**case.space.axes, "max_num_seqs": (64, 128, 256), "max_num_batched_tokens": (1024, 2048, 4096)}
    return Race(Space(case.space.model, few).enumerate(with_price=True), case.question(requests), case.objective)


def main(argv: Sequence[str]) -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exact", "others", "models", "speed"))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args(argv)
    if words.what == "others":
        from benchmarks.planning.others import others

        others(cases(), words.requests, processes(words.workers) if words.workers > 1 else in_turn())
        return
    if words.what in ("exact", "models"):
        work = exact if words.what == "exact" else models
        work(words.requests, processes(words.workers) if words.workers > 1 else in_turn())
        return
    teams = [("processes", processes(1)), ("processes", processes(2))]
    if words.ray:
        from windtunnel.plan.workers import on_ray

        teams.append(("Ray", on_ray(None, 2)))
    speed(race(words.requests), words.repeats, teams)


if __name__ == "__main__":
    main(sys.argv[1:])
