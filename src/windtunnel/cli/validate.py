"""validate: simulations against what real engines measured."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.deployment import Engine
from windtunnel.errors import InputError, unknown
from windtunnel.files import require_writable
from windtunnel.hardware import device as device_named
from windtunnel.perf import require_source
from windtunnel.scenario import ENGINE, Server

if TYPE_CHECKING:
    from windtunnel.validation.comparison import Options
    from windtunnel.validation.measured_run import MeasuredRun
    from windtunnel.validation.served_points import Served


SERVED_POINTS = Path("silicon_sample.csv")
DONE, PARTLY = 0, 1


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """How everything that was measured is simulated."""

    perf: str = "auto"
    """Kernel times: auto, measured, modelled, or roofline (perfect kernels, no host work)."""
    strict: Annotated[bool, Parameter(negative=())] = False
    """Refuse kernel times beyond the data: other devices, engine versions, shapes or sizes than were measured."""
    calibration: Path | None = None
    """File of windtunnel calibrate: host and client overheads."""
    seed: int = 0
    """Of lengths and arrivals that a vllm bench result does not hold."""
    same_prompts: Annotated[bool, Parameter(negative=())] = False
    """Of a measured run whose prompt lengths come again, with nothing that tells what was cached: they were the same
    prompts."""

    def options(self) -> "Options":
        """These settings as one value. Raises InputError for a calibration that cannot be read."""
        from windtunnel.simulate.overheads import overheads_of
        from windtunnel.validation.comparison import Options

        require_source(self.perf)
        overheads = overheads_of(self.calibration)
        return Options(self.perf, overheads, self.strict)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which served points are looked at, and where their errors are written."""

    backend: str | None = None
    """Of served points: only those of this engine."""
    mode: Literal["agg", "disagg"] | None = None
    """Of served points: only those of servers that prefill and decode (agg), or of separate ones (disagg)."""
    sample: int | None = None
    """Of served points: this many, always the same ones, instead of all."""
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None
    """Of served points: write each with its errors, or why it was not simulated, to this file."""


def validate(
    target: Annotated[Path, Parameter(name="TARGET")],
    /,
    *,
    model: str | None = None,
    device: str | None = None,
    engine: Annotated[Engine, Parameter(name="*", group=ENGINE)] = Engine(),  # noqa: B008 - frozen
    simulated: Annotated[Simulated, Parameter(name="*")] = Simulated(),
    steps: Annotated[bool, Parameter(negative=())] = False,
    ablation: Annotated[bool, Parameter(negative=())] = False,
    chosen: Annotated[Chosen, Parameter(name="*")] = Chosen(),
    as_json: Json = False,
) -> int:
    """Compare simulations with measurements.

    Exit codes: 0 done, 1 a run of several could not be simulated, 2 wrong input.

    Parameters
    ----------
    target
        A measured run (a folder with run.json and requests.jsonl, or a folder of such folders); a JSON file of vllm
        bench serve --save-result, whose server the flags describe; a .jsonl file of measured points (one batch, or
        the means of a run, a line) or of served points of separate prefill and decode workers; or silicon_sample.csv,
        the served points of the kernel database (a file like it, or this name for its own).
    model
        What served a vllm bench result; without it, the model that the file names. Of points: only this one.
    device
        The GPU of a vllm bench result. Of points: only those of this system.
    steps
        Of a measured run: also show its decode steps, recovered from the requests, with the simulated ones.
    ablation
        Switch off each modelled cause in turn, and show the errors without it.
    as_json
        Print one JSON document instead of tables; seconds.
    """
    if chosen.csv is not None:
        require_writable("csv", chosen.csv)
    options = simulated.options()
    if steps and target.suffix in (".csv", ".jsonl", ".json"):
        raise InputError(f"steps: are of a measured run, a folder, and {str(target)!r} is none: leave it out")
    if target.suffix == ".csv" or (target.suffix == ".jsonl" and _of_pools(target)):
        if engine != Engine():
            raise InputError(f"{str(target)!r}: its points say what served: leave out engine flags")
        system = device if device is None else device_named(device).name
        wanted = {"backend": chosen.backend, "mode": chosen.mode, "model_path": model, "system": system}
        return _served(target, wanted, chosen.sample, options, ablation, chosen.csv, as_json)
    for name, value in vars(chosen).items():
        if value is not None:
            raise InputError(f"{name}={str(value)!r}: is for served points: {str(target)!r} holds none")
    if target.suffix == ".jsonl":
        if engine != Engine():
            raise InputError(f"{str(target)!r}: its points say what served: leave out engine flags")
        return _points(target, {"model": model, "device": device}, options, as_json)
    if target.is_dir() or not target.exists():
        if (model, device, engine) != (None, None, Engine()):
            raise InputError(f"{str(target)!r}: run.json says what served: leave out model, device and engine flags")
        return _measured_runs(target, simulated, steps, ablation, as_json)
    return _bench(target, model, device, engine, options, simulated.seed, as_json)


def _of_pools(path: Path) -> bool:
    from windtunnel.validation.pool_points import holds_pool_points

    return holds_pool_points(path)


def _measured_runs(folder: Path, simulated: Simulated, steps: bool, ablation: bool, as_json: bool) -> int:
    """Every measured run below a folder; of several, one that cannot be simulated says why."""
    from windtunnel.validation.comparison import compare, document
    from windtunnel.validation.markdown import comparison_table
    from windtunnel.validation.measured_run import find_measured_runs, read_measured_run
    from windtunnel.validation.step_times import steps_table

    paths, options = find_measured_runs(folder), simulated.options()
    runs = [read_measured_run(path, same_prompts=simulated.same_prompts) for path in paths]
    if ablation:
        for run in runs:
            run.require_known_prompts()
        return _ablation([], runs, options, as_json)
    documents: list[dict[str, Any]] = []
    texts = []
    for run in runs:
        try:
            run.require_known_prompts()
            found = compare(run.measurement, run.pool(), options)
        except InputError as reason:
            if paths == [folder]:
                raise
            documents.append({"run": run.name, "unsupported": str(reason)})
            texts.append(f"### {run.name}\n\nNot supported: {reason}\n\n")
        else:
            documents.append(document(found))
            texts.append(comparison_table(found) + "\n")
            if steps:
                texts.append(steps_table(run.measurement, run.pool(), perf=options.perf) + "\n")
    if as_json:
        show_json(documents[0] if paths == [folder] else {"schema_version": 1, "runs": documents})
    else:
        sys.stdout.write("".join(texts))
    return PARTLY if any("unsupported" in one for one in documents) else DONE


def _points(path: Path, wanted: dict[str, str | None], options: "Options", as_json: bool) -> int:
    from windtunnel.validation import point_replay
    from windtunnel.validation.measured_points import read_measured_points

    points = read_measured_points(path)
    for name, value in wanted.items():
        points = _only(points, name, value)
    results = [point_replay.replay(point, options) for point in points]
    if as_json:
        show_json(point_replay.document(results))
    else:
        sys.stdout.write(point_replay.text(results))
    return DONE


def _bench(
    path: Path, model: str | None, device: str | None, engine: Engine, options: "Options", seed: int, as_json: bool
) -> int:
    from windtunnel.validation.bench_result import read_bench_result
    from windtunnel.validation.comparison import compare, document
    from windtunnel.validation.markdown import comparison_table

    measurement, served = read_bench_result(path, seed)
    if device is None:
        raise InputError(f"{str(path)!r}: does not say which GPU served: add --device")
    name = model or served
    if not name:
        raise InputError(f"{str(path)!r}: does not say which model served: add --model")
    found = compare(measurement, Server(name, device=device, engine=engine).pool(), options)
    if as_json:
        show_json(document(found))
    else:
        sys.stdout.write(comparison_table(found))
    return DONE


def _served(
    path: Path,
    wanted: dict[str, str | None],
    sample: int | None,
    options: "Options",
    ablation: bool,
    csv: Path | None,
    as_json: bool,
) -> int:
    from windtunnel.files import write_whole
    from windtunnel.validation import served_replay
    from windtunnel.validation.markdown import served_text
    from windtunnel.validation.pool_points import read_pool_points
    from windtunnel.validation.served_points import read_points

    if path.suffix == ".jsonl":
        points: list[Served] = [*read_pool_points(path)]
    else:
        points = read_points(None if path == SERVED_POINTS and not path.exists() else path)
    for name, value in wanted.items():
        points = _only(points, name, value)
    if sample is not None:
        if sample < 1:
            raise InputError(f"sample={sample}: must be ≥ 1")
        points = served_replay.sample(points, sample)
    if ablation:
        return _ablation([point for point in points if point.mode == "agg"], [], options, as_json)
    results = served_replay.replay_all(points, options)
    if as_json:
        show_json(served_replay.document(results))
    else:
        sys.stdout.write(served_text(results))
    if csv is not None:
        write_whole(csv, [served_replay.as_csv(results)])
    return DONE


def _ablation(points: "list[Served]", runs: "list[MeasuredRun]", options: "Options", as_json: bool) -> int:
    from dataclasses import asdict

    from windtunnel.metrics import clean
    from windtunnel.validation.ablation import ablate, ablation_table

    found = list(ablate(points, runs, options))
    if as_json:
        show_json(clean({"schema_version": 1, "without": [asdict(one) for one in found]}))
    else:
        sys.stdout.write(ablation_table(found))
    return DONE


def _only(points: list[Any], name: str, value: str | None) -> list[Any]:
    if value is None:
        return points
    kept = [point for point in points if getattr(point, name) == value]
    if not kept:
        raise unknown(name, value, {getattr(point, name) for point in points})
    return kept
