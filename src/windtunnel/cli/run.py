"""run and report: simulate, and show what a simulation recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, progress, show_json
from windtunnel.errors import InputError
from windtunnel.scenario import DEPLOYMENT, GOALS, Goals, Scenario
from windtunnel.scenario.output_files import Outputs, check_directory

if TYPE_CHECKING:
    from windtunnel.deployment import SLO, Deployment
    from windtunnel.metrics import Summary
    from windtunnel.perf.tabulate.tables import Tabulated
    from windtunnel.simulate.overheads import Overheads
    from windtunnel.simulate.run import Run
    from windtunnel.workload import Workload

DONE, MISSED = 0, 1


def run(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    strict: Annotated[bool, Parameter(negative=(), group=DEPLOYMENT)] = False,
    seeds: Annotated[int, Parameter(group=GOALS)] = 1,
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    bands: Annotated[bool, Parameter(negative="--no-bands", group=OUTPUT)] = True,
    output: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    outputs: Annotated[Outputs, Parameter(name="*", group=OUTPUT)] = Outputs(),  # noqa: B008 - frozen
    as_json: Json = False,
) -> int:
    """Simulate a deployment under a load.

    Without any flag: Qwen3-32B on two H100s, serving an hour of conversations. Engine flags are vLLM's; -tp, -pp, -dp,
    --isl and --osl are understood too. Exit codes: 0 done, 1 a goal is missed, 2 wrong input, 130 interrupted.

    Parameters
    ----------
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    strict
        Refuse kernel times beyond the data: other devices, engine versions, shapes or sizes than were measured.
    seeds
        Repeat under so many seeds, from --seed on, and show 95 % confidence intervals; files are of the first.
    exclude_warmup
        Measure from a tenth of the arrivals' time to the last arrival: neither filling nor draining counts.
    bands
        Say between which values a measured server would lie (90 %), and what perfect kernels would give: four
        simulations instead of one.
    output
        Folder for the run: run.json, requests.parquet, iterations.parquet; for windtunnel report and your notebook.
    as_json
        Print the results as one JSON document instead of the table.
    """
    from windtunnel.metrics import summary, summary_json, uncertainty, unroll
    from windtunnel.simulate.notes import refuse_extrapolation
    from windtunnel.simulate.simulate import batch_times

    _check(seeds, outputs, output)
    deployment, slo, overheads = scenario.deployment(), scenario.goals.limits(), scenario.overheads()
    tables = batch_times(deployment, scenario.server.perf)
    results, documents = [], []
    for seed in range(scenario.load.seed, scenario.load.seed + seeds):
        workload, done = _simulated(scenario, deployment, tables, overheads, seed)
        result = summary(done, slo, exclude_warmup=exclude_warmup)
        documents.append(summary_json(result))
        results.append(replace(result, latencies={}))  # a value for every step, and their statistics are known
        if len(results) == 1:
            doubts = uncertainty(unroll(done))
            if strict:
                refuse_extrapolation(done, doubts.beyond)
            manifest, first = done.manifest, done if output is not None or outputs.wanted() else None
            del done, result  # hundreds of bytes a request, and the ends of the band take as much each
            if bands:
                manifest |= _bands(documents[0], doubts.error, scenario, workload, tables, exclude_warmup)
    _write(first, manifest, output, outputs, slo)
    return _finish(results, documents, manifest, scenario.goals, as_json)


def _check(seeds: int, outputs: Outputs, output: Path | None) -> None:
    """Raise InputError for what cannot be repeated or written, before anything is simulated."""
    if seeds < 1:
        raise InputError(f"seeds={seeds}: must be ≥ 1")
    outputs.check()
    check_directory(output)


def _simulated(
    scenario: Scenario, deployment: "Deployment", tables: "Sequence[Tabulated]", overheads: "Overheads", seed: int
) -> "tuple[Workload, Run]":
    """The load of a seed, and what becomes of it."""
    from windtunnel.simulate.simulate import simulate

    with progress(f"seed {seed}: reading the load"):
        workload = scenario.load.workload(seed)
    with progress(f"seed {seed}: simulating {len(workload):,} requests"):
        return workload, simulate(deployment, workload, seed, tables=tables, overheads=overheads)


def _write(first: "Run | None", manifest: Mapping[str, Any], output: Path | None, outputs: Outputs, slo: "SLO") -> None:
    """The folder and files that were asked for; None where none was."""
    if first is None:
        return
    first = replace(first, manifest=dict(manifest))
    if output is not None:
        first.save(output)
    outputs.write(first, slo)


def _bands(
    said: Mapping[str, Any],
    error: float,
    scenario: Scenario,
    workload: "Workload",
    tables: "Sequence[Tabulated]",
    exclude_warmup: bool,
) -> dict[str, Any]:
    """For the manifest of a run: its error band, from the relative error of its steps, and what perfect kernels would
    give."""
    from windtunnel.metrics import client_json
    from windtunnel.simulate.error_band import error_band, with_perfect_kernels

    def measure(end: "Run") -> Mapping[str, Any]:
        return client_json(end, exclude_warmup=exclude_warmup)

    simulated = scenario.deployment(), workload, scenario.load.seed
    with progress("simulating both ends of the error band"):
        band = error_band(said, error, measure, *simulated, tables, scenario.overheads())
        perfect = client_json(with_perfect_kernels(*simulated))
    return {"bands": band, "roofline": perfect, "bands_without_warmup": exclude_warmup}


def report(
    directory: Path,
    /,
    *,
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = Goals(),  # noqa: B008 - frozen
    exclude_warmup: Annotated[bool, Parameter(negative=(), group=GOALS)] = False,
    outputs: Annotated[Outputs, Parameter(name="*", group=OUTPUT)] = Outputs(),  # noqa: B008 - frozen
    as_json: Json = False,
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
    """
    from windtunnel.metrics import summary, summary_json
    from windtunnel.simulate.run import Run

    outputs.check()
    stored, slo = Run.load(directory), goals.limits()
    if stored.manifest.get("bands_without_warmup") != exclude_warmup:  # they are those of another part of the run
        stored = replace(stored, manifest=stored.manifest | {"bands": None, "roofline": None})
    outputs.write(stored, slo)
    found = summary(stored, slo, exclude_warmup=exclude_warmup)
    return _finish([found], [summary_json(found)], stored.manifest, goals, as_json)


def _finish(
    results: Sequence["Summary"],
    documents: Sequence[dict[str, Any]],
    manifest: Mapping[str, Any],
    goals: Goals,
    as_json: bool,
) -> int:
    from windtunnel.metrics import clean, spread

    around, perfect = manifest.get("bands"), manifest.get("roofline")
    if as_json:
        document = documents[0]
        if len(documents) > 1:
            intervals = clean({name: [each.low, each.high] for name, each in spread(documents).items()})
            document |= {"seeds": len(documents), "interval_95": intervals}
        if around is not None:
            document |= {"bands": dict(around), "roofline": perfect}
        show_json(document)
    else:
        from windtunnel.cli.terminal import show_run

        show_run(results, documents, manifest, around, perfect)
    share = goals.attainment
    reached = share is None or all(result.attainment >= share for result in results)
    return DONE if reached and all(result.meets_slo for result in results) else MISSED
