"""calibrate: host and client overheads from measured runs, and corrections of kernels from records of steps."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT
from windtunnel.errors import InputError
from windtunnel.files import require_writable
from windtunnel.perf import require_source


def calibrate(
    runs: Annotated[tuple[Path, ...], Parameter(name="RUN")] = (),
    /,
    *,
    steps: Path | None = None,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("calibration.yaml"),
    perf: str = "auto",
) -> None:
    """Find the host and client overheads of a deployment from measured runs of it, or records of its steps.

    Writes a small YAML file that run and validate take as --calibration, and prints the errors that remain.

    Parameters
    ----------
    runs
        Folders with run.json and requests.jsonl, as validate reads them; all of one deployment.
    steps
        Instead of runs: JSON lines with the batch and the seconds of each step of one rank, next to the run.json that
        says what served. {"decodes": 32, "kv_tokens": 40960, "chunks": [[512, 0]], "seconds": 0.021}, or the
        forward-pass metrics of SGLang and Dynamo. Also fits factors on products, attention and prompts; every fourth
        stretch of the steps decides nothing and shows the errors.
    output
        File to write.
    perf
        Kernel times: auto, measured, modelled, roofline (perfect kernels, no host work) or profile:FOLDER.
    """
    if runs and steps is not None:
        raise InputError(f"steps={str(steps)!r}: calibrate from runs or from steps, not from both: leave one out")
    if not runs and steps is None:
        raise InputError("no runs: give the folder of a measured run, or --steps FILE")
    require_writable("output", output)
    require_source(perf)
    if steps is not None:
        _of_steps(steps, output, perf)
    else:
        _of_runs(runs, output, perf)


def _of_runs(runs: tuple[Path, ...], output: Path, perf: str) -> None:
    from windtunnel.validation.calibrate import calibrate as search
    from windtunnel.validation.calibrate import document
    from windtunnel.validation.measured_run import find_measured_runs, read_measured_run

    measured = [read_measured_run(path) for folder in runs for path in find_measured_runs(folder)]
    found = search([(one.measurement, one.pool()) for one in measured], perf)
    said = f"misfit {found.misfit[0]:.4f} before, {found.misfit[1]:.4f} after"
    _write(output, document(found, [one.measurement for one in measured]), said)


def _of_steps(steps: Path, output: Path, perf: str) -> None:
    from windtunnel.validation.measured_run import read_measured_pool
    from windtunnel.validation.step_fit import fit_steps
    from windtunnel.validation.step_records import read_step_records

    records = read_step_records(steps)
    pool, note = read_measured_pool(steps.parent / "run.json")
    found = fit_steps(pool, records, perf)
    before, after = found.before["all"], found.after["all"]
    said = (
        f"median error of {before.steps:,} steps that decided nothing: {100 * before.median:.1f} % before, "
        f"{100 * after.median:.1f} % "
        f"after; of their sum: {100 * before.total:+.1f} % before, {100 * after.total:+.1f} % after"
    )
    if not found.helps:
        said += "; the corrections do not help: do not use them"
    _write(output, found.document(), "; ".join(filter(None, [note, said])))


def _write(output: Path, document: dict[str, Any], said: str) -> None:
    import yaml

    from windtunnel.files import write_whole

    text = yaml.safe_dump(document, sort_keys=False)
    sys.stdout.write(f"{text}{said}; written to {output}\n")
    write_whole(output, [text])
