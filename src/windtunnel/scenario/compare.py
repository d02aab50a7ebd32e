"""compare(scenario, variants) → Comparison: several schedulers or settings under the same requests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import (
    Comparison,
    Summary,
    Timeline,
    Variant,
    paired_spread,
    spread,
    summary,
    summary_json,
    timeline,
    unroll,
)
from windtunnel.policy.named import find_router, find_scheduler
from windtunnel.scenario import Scenario, vary, words_of
from windtunnel.scenario.load_flags import TRACE
from windtunnel.simulate.simulate import simulate

BASELINE = "baseline"
"""Name of the scenario that the others are variants of."""
SEEDS = 5
BINS = 300
"""Bins of each time line."""


def compare(
    scenario: Scenario,
    variants: Mapping[str, Mapping[str, Any] | Scenario],
    *,
    seeds: int = SEEDS,
    exclude_warmup: bool = False,
    confidence: float = 0.95,
) -> Comparison:
    """Simulate a scenario and variants of it under the same seeds, and compare each variant with the scenario.

    Under one seed all variants serve the same requests (where a variant changes words of the load, requests drawn from
    the same random streams). So differences are taken seed by seed, and what the draw does to all of them cancels out.

    Args:
        scenario: what the others are compared with.
        variants: by name, other values for some words of the scenario (``{"max_num_seqs": 64}``), or a whole scenario.
        seeds: how many, from the scenario's own seed on.
        exclude_warmup: measure from a tenth of the arrivals' time to the last arrival.
        confidence: of the intervals, from Student's distribution over the seeds.

    Raises:
        InputError: no variant, an unknown word, a wrong value, or a variant with another seed.
    """
    if seeds < 1:
        raise InputError(f"seeds={seeds}: must be ≥ 1")
    scenarios = _scenarios(scenario, variants)
    drawn = tuple(range(scenario.load.seed, scenario.load.seed + seeds))
    found: list[Variant] = []
    for name, varied in scenarios.items():
        runs = _simulate(varied, drawn, exclude_warmup)
        documents = tuple(summary_json(run.result) for run in runs)
        words = {word: value for word, value in words_of(varied).items() if value != words_of(scenario)[word]}
        found.append(
            Variant(
                name=name,
                words=words,
                loads=tuple(run.load for run in runs),
                documents=documents,
                verdicts=tuple(verdict for run in runs for verdict in run.result.verdicts),
                intervals=spread(documents, confidence),
                differences=paired_spread(documents, found[0].documents if found else documents, confidence),
                first=runs[0].result,
                timeline=runs[0].timeline,
            )
        )
    return Comparison(_title(scenario, found[0]), drawn, confidence, tuple(found), tuple(_warnings(found)))


def _scenarios(scenario: Scenario, variants: Mapping[str, Mapping[str, Any] | Scenario]) -> dict[str, Scenario]:
    if not variants:
        raise InputError("nothing to compare with: give at least one variant, e.g. max_num_seqs=64")
    found = {BASELINE: scenario}
    for name, words in variants.items():
        if name in found:
            raise InputError(f"variant {name!r}: the name of the scenario itself: choose another")
        varied = words if isinstance(words, Scenario) else vary(scenario, words, f"variant {name!r}: ")
        if varied.load.seed != scenario.load.seed:
            raise InputError(
                f"variant {name!r}: seed={varied.load.seed}: all are simulated under the same seeds, from "
                f"{scenario.load.seed} on: leave it out"
            )
        require_names(varied.deployment())
        found[name] = varied
    return found


def require_names(deployment: Deployment) -> None:
    """Raise InputError unless there is everything that a deployment names: its router, and the pools' schedulers."""
    find_router(deployment.router)
    for pool in deployment.pools:
        if pool.engine.scheduler:
            find_scheduler(pool.engine.scheduler)


class _Seed(NamedTuple):
    """What is kept of one run."""

    result: Summary
    timeline: Timeline
    load: str


def _simulate(scenario: Scenario, seeds: tuple[int, ...], exclude_warmup: bool) -> list[_Seed]:
    deployment, slo, overheads = scenario.deployment(), scenario.goals.limits(), scenario.overheads()
    found = []
    for seed in seeds:
        workload, perf = scenario.load.workload(seed), scenario.server.perf
        run = simulate(deployment, workload, seed, perf=perf, overheads=overheads)
        steps = unroll(run)
        result = summary(run, slo, exclude_warmup=exclude_warmup, steps=steps)
        found.append(_Seed(result, timeline(steps, BINS), run.manifest["workload"]["digest"]))
    return found


def _title(scenario: Scenario, baseline: Variant) -> str:
    pool = scenario.deployment().pools[0]
    replicas = f"{pool.replicas} replicas of " if pool.replicas > 1 else ""
    load = scenario.load.trace or ("random" if scenario.load.is_random else TRACE)
    return (
        f"{pool.model.name} on {replicas}{pool.engine.world_size} × {pool.device.name}, {pool.engine.preset}; {load}: "
        f"{baseline.first.total:,} requests"
    )


def _warnings(variants: Sequence[Variant]) -> Iterator[str]:
    """What the first runs warn of, each once, and of whom; and whether seeds say anything."""
    notes: dict[str, list[str]] = {}
    for variant in variants:
        for text in variant.first.warnings:
            notes.setdefault(text, []).append(variant.name)
    for text, names in notes.items():
        yield text if len(names) == len(variants) else f"{', '.join(names)}: {text}"
    if len(variants[0].loads) > 1 and len({load for variant in variants for load in variant.loads}) == 1:
        yield "the load is the same under every seed: intervals do not say how other loads would differ"
