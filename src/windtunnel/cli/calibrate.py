"""calibrate: host and client overheads from measured runs."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT
from windtunnel.errors import InputError
from windtunnel.files import require_writable
from windtunnel.perf import require_source


def calibrate(
    runs: Annotated[tuple[Path, ...], Parameter(name="RUN")],
    /,
    *,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("calibration.yaml"),
    perf: str = "auto",
) -> None:
    """Find the host and client overheads of a deployment from measured runs of it.

    Writes a small YAML file that run and validate take as --calibration, and prints the errors that remain.

    Parameters
    ----------
    runs
        Folders with run.json and requests.jsonl, as validate reads them; all of one deployment.
    output
        File to write.
    perf
        Kernel times: auto, measured, modelled, roofline (perfect kernels, no host work) or profile:FOLDER.
    """
    import yaml

    from windtunnel.files import write_whole
    from windtunnel.validation.calibrate import calibrate as search
    from windtunnel.validation.calibrate import document
    from windtunnel.validation.measured_run import find_measured_runs, read_measured_run

    if not runs:
        raise InputError("no runs: give the folder of a measured run")
    require_writable("output", output)
    require_source(perf)
    measured = [read_measured_run(path) for folder in runs for path in find_measured_runs(folder)]
    found = search([(one.measurement, one.pool()) for one in measured], perf)
    text = yaml.safe_dump(document(found, [one.measurement for one in measured]), sort_keys=False)
    sys.stdout.write(f"{text}misfit {found.misfit[0]:.4f} before, {found.misfit[1]:.4f} after; written to {output}\n")
    write_whole(output, [text])
