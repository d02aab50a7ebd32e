"""compare(scenario, variants) → Comparison: several schedulers or settings under the same requests."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, log2, nan
from typing import Any, NamedTuple

import numpy as np

from windtunnel.deployment import Deployment
from windtunnel.deployment.title import title
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
from windtunnel.metrics.comparison import ends_of
from windtunnel.metrics.ends import End, end_of
from windtunnel.metrics.pairs import OCTAVE, Divergence, divergence
from windtunnel.optimum.served import gaps
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy.named import find_router, find_scheduler
from windtunnel.scenario import Scenario, vary, words_of
from windtunnel.scenario.load_flags import require_seeds
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload.columns import Workload

BASELINE = "baseline"
"""Name of the scenario that the others are variants of."""
SEEDS = 5
BINS = 300
"""Bins of each time line."""
SYNCHRONOUS = {"async_scheduling": "false"}
ALIKE = 0.01
"""Relative difference below which steps take as long."""


def compare(
    scenario: Scenario,
    variants: Mapping[str, Mapping[str, Any] | Scenario],
    *,
    seeds: int = SEEDS,
    exclude_warmup: bool = False,
    confidence: float = 0.95,
    gap: bool = False,
    bands: bool = True,
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
        gap: compare how far each is from what no scheduler beats as well; over the whole run.
        bands: say between which values the differences lie on measured servers: two more runs of each variant.

    Raises:
        InputError: no variant, an unknown word, a wrong value, or a variant with another seed.
    """
    require_seeds(seeds)
    given, scenarios = scenario, _scenarios(scenario, variants)
    scenario = scenarios[BASELINE]
    drawn = tuple(range(scenario.load.seed, scenario.load.seed + seeds))
    found, without = list[Variant](), list[str]()
    for name, varied in scenarios.items():
        runs = _simulate(varied, drawn, exclude_warmup, gap)
        documents = tuple(summary_json(run.result) | run.gaps for run in runs)
        intervals = spread(documents, confidence)
        differences = paired_spread(documents, found[0].documents if found else documents, confidence)
        ends = None
        if bands and found and documents != found[0].documents:
            pair = (found[0].documents[0], documents[0])
            try:
                ends = ends_of(intervals, differences, documents[0], *_ends(scenario, varied, pair, exclude_warmup))
            except InputError as error:  # both were simulated as asked: a scheduler fails at other times of steps
                without.append(f"{name}: no band of servers, faster and slower steps: {error}")
        found.append(
            Variant(
                name=name,
                words=_other_words(scenario, varied),
                loads=tuple(run.load for run in runs),
                documents=documents,
                verdicts=tuple(verdict for run in runs for verdict in run.result.verdicts),
                intervals=intervals,
                differences=differences,
                first=runs[0].result,
                timeline=runs[0].timeline,
                ends=ends,
            )
        )
    said = (*_other_conditions(given, scenarios), *_warnings(found), *without)
    return Comparison(_title(scenario, found[0]), drawn, confidence, tuple(found), said)


def _other_words(scenario: Scenario, varied: Scenario) -> dict[str, Any]:
    base = words_of(scenario)
    return {word: value for word, value in words_of(varied).items() if value != base[word]}


def _scenarios(scenario: Scenario, variants: Mapping[str, Mapping[str, Any] | Scenario]) -> dict[str, Scenario]:
    """The baseline and its variants, all of which decide when the baseline does or, where a variant cannot and no word
    says otherwise, when the step before has ended: a step's lead is no merit of a scheduler."""
    if not variants:
        raise InputError("nothing to compare with: give at least one variant, e.g. max_num_seqs=64")
    found = _varied(scenario, variants)
    said = any(each.server.engine.async_scheduling is not None for each in (scenario, *_given(scenario, variants)))
    if said or {True} != _decides_ahead(scenario) or all(_decides_ahead(each) == {True} for each in found.values()):
        return found
    try:
        return _varied(vary(scenario, SYNCHRONOUS), variants)
    except InputError:  # nothing that all can do: said in a warning
        return found


def _given(scenario: Scenario, variants: Mapping[str, Mapping[str, Any] | Scenario]) -> Iterator[Scenario]:
    for words in variants.values():
        yield words if isinstance(words, Scenario) else vary(scenario, words)


def _decides_ahead(scenario: Scenario) -> set[bool | None]:
    """Whether the pools decide while the step before runs."""
    return {pool.engine.async_scheduling for pool in scenario.deployment().pools}


def _varied(scenario: Scenario, variants: Mapping[str, Mapping[str, Any] | Scenario]) -> dict[str, Scenario]:
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
        found[name] = varied if isinstance(words, Scenario) else _decided_alike(scenario, varied)
    return found


def _decided_alike(scenario: Scenario, varied: Scenario) -> Scenario:
    """The variant, deciding when the scenario does, unless its words say otherwise or it cannot: a scheduler whose
    default is another async_scheduling would be compared with a step's lead or lag."""
    if varied.server.engine.async_scheduling != scenario.server.engine.async_scheduling:
        return varied
    ahead, own = _decides_ahead(scenario), _decides_ahead(varied)
    if own == ahead or len(ahead) > 1:
        return varied
    try:
        alike = vary(varied, {"async_scheduling": str(next(iter(ahead))).lower()})
        alike.deployment()
    except InputError:
        return varied
    return alike


def _other_conditions(given: Scenario, scenarios: Mapping[str, Scenario]) -> Iterator[str]:
    """Which variants decide at another time than the scenario by no word of theirs, or made all decide as they do."""
    base = scenarios[BASELINE]
    ahead, word = _decides_ahead(base), base.server.engine.async_scheduling
    if word != given.server.engine.async_scheduling:
        yield (
            "to compare like with like, all are simulated with async_scheduling=false: not every variant can run with "
            "true"
        )
        return
    for name, varied in scenarios.items():
        same_word = varied.server.engine.async_scheduling == word
        own = _decides_ahead(varied)
        if same_word and own != ahead:
            yield (
                f"{name}: cannot have the {BASELINE}'s async_scheduling={_said(ahead)}: for a fair comparison add "
                f"async_scheduling={_said(own)} to both"
            )
        elif not same_word and own == ahead:
            yield f"{name}: simulated with the {BASELINE}'s async_scheduling={_said(ahead)}, to compare like with like"


def _said(ahead: set[bool | None]) -> str:
    return " and ".join(sorted(str(bool(each)).lower() for each in ahead))


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
    gaps: dict[str, Any]


def _ends(
    base: Scenario, varied: Scenario, documents: Sequence[Mapping[str, Any]], exclude_warmup: bool
) -> tuple[list[End], Divergence]:
    """The first seed's run where the variant's steps take less long, and longer, than they do next to the baseline's.

    ``documents`` are what both runs of that seed say as simulated.
    """
    deployment, limits, seed = varied.deployment(), varied.goals.limits(), varied.load.seed
    workloads = [each.load.workload(seed) for each in (base, varied)]
    tables = [batch_times(each.deployment(), each.server.perf) for each in (base, varied)]
    sizes = [document["batch_size"] or nan for document in documents]
    octaves = abs(log2(sizes[1] / sizes[0])) if all(map(isfinite, sizes)) else OCTAVE
    open_ = divergence(
        *([pool.spec() for pool in each.deployment().pools] for each in (base, varied)),
        octaves=octaves if _same_steps(*tables) else max(octaves, OCTAVE),
        other_lengths=not _same_lengths(*workloads),
    )
    ends = []
    for steps, first in zip(*(open_.factors(name) for name in ("steps", "first_token")), strict=True):
        scaled = [table.scaled(steps) for table in tables[1]]
        run = simulate(deployment, workloads[1], seed, tables=scaled, overheads=varied.overheads())
        ends.append(end_of(run, (steps, first), limits, exclude_warmup=exclude_warmup))
    return ends, open_


def _same_steps(one: Sequence[Tabulated], other: Sequence[Tabulated]) -> bool:
    """Whether the same batch takes as long: what sets two variants apart is then which batches they run."""
    own, theirs = ([table.times.batch(1, 1000, []) for table in tables] for tables in (one, other))
    return len(own) == len(theirs) and bool(np.allclose(own, theirs, rtol=ALIKE))


def _same_lengths(one: Workload, other: Workload) -> bool:
    """Whether requests have the same lengths, in whatever order and however often."""
    names = ("prompt_tokens", "output_tokens")
    return all(np.array_equal(np.unique(getattr(one, name)), np.unique(getattr(other, name))) for name in names)


def _simulate(scenario: Scenario, seeds: tuple[int, ...], exclude_warmup: bool, gap: bool) -> list[_Seed]:
    deployment, slo, overheads = scenario.deployment(), scenario.goals.limits(), scenario.overheads()
    tables, found = batch_times(deployment, scenario.server.perf), []
    for seed in seeds:
        run = simulate(deployment, scenario.load.workload(seed), seed, tables=tables, overheads=overheads)
        steps = unroll(run)
        result = summary(run, slo, exclude_warmup=exclude_warmup, steps=steps)
        distances = {"gap": gaps(run)} if gap else {}
        found.append(_Seed(result, timeline(steps, BINS), run.manifest["workload"]["digest"], distances))
    return found


def _title(scenario: Scenario, baseline: Variant) -> str:
    return f"{title(scenario.deployment().spec()['pools'])}; {scenario.load.source}: {baseline.first.total:,} requests"


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
