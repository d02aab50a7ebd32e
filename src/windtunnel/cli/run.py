"""run and report: simulate, and show what a simulation recorded."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, Verbose, progress, show_json
from windtunnel.cli.pasted import Tried, show_pasted
from windtunnel.errors import InputError
from windtunnel.scenario import DEPLOYMENT, GOALS, Goals, Scenario
from windtunnel.scenario.ends import in_document, with_ends
from windtunnel.scenario.load_flags import require_seeds
from windtunnel.scenario.output_files import Outputs, check_directory

if TYPE_CHECKING:
    from windtunnel.deployment import SLO, Deployment
    from windtunnel.metrics import Bands, Steps, Summary
    from windtunnel.perf.tabulate.tables import Tabulated
    from windtunnel.simulate.overheads import Overheads
    from windtunnel.simulate.run import Run
    from windtunnel.workload import Workload

DONE, MISSED = 0, 1
MMAP_THRESHOLD, TRIM_THRESHOLD = (-3, 64 << 20), (-1, 256 << 20)
"""Parameters of ``mallopt``, and bytes."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """What to say of a run beyond what it did."""

    bands: Annotated[Literal["share", "rate"] | None, Parameter(negative="--no-bands")] = "rate"
    """Ranges that cover 9 of 10 real servers: under this load at this rate (rate), or with the load scaled to each
    server's capacity (share). Takes five simulations instead of one."""
    gap: Annotated[bool, Parameter(negative=())] = False
    """Say how far the first seed's run is from the best that any scheduler could do on this engine."""
    operators: Annotated[bool, Parameter(negative=())] = False
    """Show the operators of the first seed's run: seconds, bytes moved, and shares of its steps' time."""
    stream: Annotated[bool, Parameter(negative=())] = False
    """For 10 million requests and more: keep none, and print exact counts and means, and percentiles within 0.1 %."""


def run(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    pasting: Annotated[Tried, Parameter(name="*", group=DEPLOYMENT)] = Tried(),  # noqa: B008 - frozen
    seeds: Annotated[int, Parameter(group=GOALS)] = 1,
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    details: Annotated[Details, Parameter(name="*", group=OUTPUT)] = Details(),
    output: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    outputs: Annotated[Outputs, Parameter(name="*", group=OUTPUT)] = Outputs(),  # noqa: B008 - frozen
    as_json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Simulate a deployment under a load.

    Without flags: Qwen3-32B on two H100s. Engine flags are vLLM's. Exit codes: 0 done, 1 goal missed, 2 wrong input.

    Parameters
    ----------
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    seeds
        Repeat with this many seeds, from --seed on, and show 95 % confidence intervals; files are of the first.
    exclude_warmup
        Measure from a tenth of the arrivals' time to the last arrival: neither filling nor draining counts.
    output
        Folder for the run: run.json, requests.parquet, iterations.parquet; for windtunnel report and your notebook.
        With --stream: requests-*.parquet, written piece by piece.
    as_json
        Print the results as one JSON document instead of the table.
    verbose
        Show all details: more percentiles, steps, energy, what the ranges rest on, what perfect kernels would give.
    """
    from windtunnel.metrics import summary, summary_json
    from windtunnel.simulate.simulate import batch_times

    if pasting.dry_run:
        return show_pasted(pasting.lines, scenario, as_json)
    _check(seeds, outputs, output)
    if details.stream:
        return _in_pieces(scenario, details, as_json, (seeds > 1, exclude_warmup), outputs, output)
    default_goal, scenario = not scenario.goals.limits(), replace(scenario, goals=scenario.goals.or_default())
    deployment, slo, overheads = scenario.deployment(), scenario.goals.limits(), scenario.overheads()
    tables, results, documents = batch_times(deployment, scenario.server.perf), [], []
    for seed in range(scenario.load.seed, scenario.load.seed + seeds):
        workload, done, steps = _simulated(scenario, deployment, tables, overheads, seed)
        result = summary(done, slo, exclude_warmup=exclude_warmup, steps=steps)
        documents.append(summary_json(result))
        results.append(replace(result, latencies={}))  # a value for every step, and their statistics are known
        if len(results) == 1:
            around, manifest = _judged(steps, documents[0], pasting.strict, scenario, details)
            first = done if output is not None or outputs.wanted() else None
            del done, result, steps  # hundreds of bytes a request, and what follows takes as much
            if details.bands:
                with progress("simulating faster and slower servers"):
                    ends = with_ends(around, scenario, deployment, workload, tables, exclude_warmup=exclude_warmup)
                manifest |= in_document(ends) | {"bands_without_warmup": exclude_warmup}
    code = _finish(results, documents, manifest, Shown(scenario.goals, default_goal, as_json, verbose, scenario))
    _write(first, manifest, output, outputs, slo)
    return code


def keep_freed_memory() -> None:
    """Of glibc (``man mallopt``): arrays of up to 64 MB that are freed stay for the next simulation of a run, of up
    to five, instead of going back to the system page by page and coming again."""
    if sys.platform == "linux" and hasattr(system := ctypes.CDLL(None), "mallopt"):
        for parameter, size in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            system.mallopt(parameter, size)


def _in_pieces(
    scenario: Scenario,
    details: Details,
    as_json: bool,
    given: tuple[bool, ...],
    outputs: Outputs,
    output: Path | None,
) -> int:
    """Simulate without keeping requests and steps; ``given``: seeds and exclude_warmup."""
    from windtunnel.cli.run_streamed import run_streamed

    refused = dict(zip(("seeds", "exclude_warmup"), given, strict=True))
    refused |= {"gap": details.gap, "operators": details.operators} | dict.fromkeys(outputs.wanted(), True)
    default_goal = not scenario.goals.limits()
    return run_streamed(replace(scenario, goals=scenario.goals.or_default()), refused, as_json, default_goal, output)


@dataclass(frozen=True)
class Shown:
    """How results are shown."""

    goals: Goals
    default_goal: bool
    """Whether the goals are ours, since none were given."""
    as_json: bool
    verbose: bool
    scenario: Scenario | None = None
    """What was simulated, where that is known."""


def _check(seeds: int, outputs: Outputs, output: Path | None) -> None:
    """Raise InputError for what cannot be repeated or written, before anything is simulated."""
    require_seeds(seeds)
    outputs.check()
    check_directory(output)


def _simulated(
    scenario: Scenario, deployment: "Deployment", tables: "Sequence[Tabulated]", overheads: "Overheads", seed: int
) -> "tuple[Workload, Run, Steps]":
    """The load of a seed, what becomes of it, and its steps for all who look at them."""
    from windtunnel.metrics import unroll
    from windtunnel.simulate.simulate import simulate

    keep_freed_memory()
    with progress(f"seed {seed}: reading the load"):
        workload = scenario.load.workload(seed)
    with progress(f"seed {seed}: simulating {len(workload):,} requests"):
        done = simulate(deployment, workload, seed, tables=tables, overheads=overheads)
    require_some_fit(done)
    return workload, done, unroll(done)


def require_some_fit(done: "Run") -> None:
    """Raise InputError where the engine rejects every request: none of them fits."""
    from windtunnel.simulate.notes import NEVER
    from windtunnel.simulate.run import REJECTED

    if len(done.requests.status) and (done.requests.status == REJECTED).all():
        said = done.manifest["warnings"]
        raise InputError(f"no request fits: {next((each for each in said if NEVER in each), said[0])}")


def _judged(
    steps: "Steps", document: Mapping[str, Any], strict: bool, scenario: Scenario, details: Details
) -> "tuple[Bands, dict[str, Any]]":
    """How sure a run is, and its manifest with what was asked for."""
    from windtunnel.metrics import bands
    from windtunnel.simulate.notes import refuse_extrapolation

    around = replace(bands(steps.run, document, steps=steps), unchanged_rate=details.bands == "rate")
    if strict:
        refuse_extrapolation(steps.run, around.uncertainty.beyond)
    return around, steps.run.manifest | _asked(steps.run, scenario, details)


def _asked(done: "Run", scenario: Scenario, details: Details) -> dict[str, Any]:
    """For the manifest of a run: how far it is from the least that any scheduler takes, and its operators'
    seconds and shares."""
    from windtunnel.scenario.ends import nothing_shared

    found: dict[str, Any] = {}
    if (other := nothing_shared(scenario)) is not None:
        found["nothing_shared"] = other
    if details.gap:
        from windtunnel.optimum.served import gaps

        found["gap"] = gaps(done)
    if details.operators:
        from windtunnel.metrics import group_bytes, group_seconds, unroll
        from windtunnel.perf.tabulate.by_operator import by_operator, bytes_by_operator

        pools = scenario.deployment().pools
        with progress("asking every operator"):
            tables = tuple(by_operator(pool, scenario.server.perf) for pool in pools)
            moved = tuple(bytes_by_operator(pool) for pool in pools)
        seconds = group_seconds(unroll(replace(done, groups=tables)))
        everything = sum(seconds.values())
        found["operators"] = {name: part / everything for name, part in seconds.items()}
        found["operator_seconds"] = seconds
        found["operator_bytes"] = group_bytes(unroll(replace(done, groups=moved)))
    return found


def _write(first: "Run | None", manifest: Mapping[str, Any], output: Path | None, outputs: Outputs, slo: "SLO") -> None:
    """The folder and files that were asked for; None where none was."""
    if first is None:
        return
    first = replace(first, manifest=dict(manifest))
    if output is not None:
        first.save(output)
    outputs.write(first, slo)


def report(
    directory: Path,
    /,
    *,
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = Goals(),  # noqa: B008 - frozen
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    outputs: Annotated[Outputs, Parameter(name="*", group=OUTPUT)] = Outputs(),  # noqa: B008 - frozen
    as_json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Show a run again, or write it in another form.

    Parameters
    ----------
    directory
        What `windtunnel run --output` wrote.
    exclude_warmup
        Measure from a tenth of the arrivals' time to the last arrival.
    as_json
        Print the results as one JSON document instead of the table.
    verbose
        Show all details: more percentiles, steps, energy, what the ranges rest on, what perfect kernels would give.
    """
    from windtunnel.metrics import summary, summary_json
    from windtunnel.simulate.run import Run

    outputs.check()
    default_goal = not goals.limits()
    goals = goals.or_default()
    stored, slo = Run.load(directory), goals.limits()
    if stored.manifest.get("bands_without_warmup") != exclude_warmup:  # they are those of another part of the run
        stored = replace(stored, manifest=stored.manifest | {"bands": None, "roofline": None})
    found = summary(stored, slo, exclude_warmup=exclude_warmup)
    shown = Shown(goals, default_goal, as_json, verbose)
    code = _finish([found], [summary_json(found)], stored.manifest, shown)
    outputs.write(stored, slo)
    return code


def _finish(
    results: Sequence["Summary"], documents: Sequence[dict[str, Any]], manifest: Mapping[str, Any], shown: Shown
) -> int:
    from windtunnel.metrics import clean, spread

    around, perfect, goals = manifest.get("bands"), manifest.get("roofline"), shown.goals
    if shown.as_json:
        document = documents[0] | {"goal": goals.to_json()}
        if len(documents) > 1:
            intervals = clean({name: [each.low, each.high] for name, each in spread(documents).items()})
            document |= {"seeds": len(documents), "interval_95": intervals}
        if around is not None:
            document |= {"bands": dict(around), "roofline": perfect}
        asked = ("gap", "operators", "operator_seconds", "operator_bytes", "nothing_shared")
        document |= {name: manifest[name] for name in asked if manifest.get(name) is not None}
        show_json(document)
    else:
        from windtunnel.cli.run_screen import show_run
        from windtunnel.cli.terminal import show_gaps, show_shares

        show_run(
            results, documents, manifest, goals.limits(), goals.attainment, shown.verbose, shown.scenario,
            shown.default_goal,
        )  # fmt: skip
        if manifest.get("gap") is not None:
            show_gaps(manifest["gap"])
        if manifest.get("operators") is not None:
            shares = manifest["operators"]
            show_shares(shares, *(manifest.get(f"operator_{kind}", {}) for kind in ("seconds", "bytes")))
    return MISSED if any(goals.missed(result) for result in results) else DONE
