"""Outputs: the files of a run that were asked for, checked before the simulation and written after it."""

import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from windtunnel.deployment import SLO
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.simulate.run import Run


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where to write what; nothing by default."""

    report: Annotated[Path | None, Parameter(alias="--html")] = None
    """HTML page with tables and plots, in one file that needs no network."""
    perfetto: Path | None = None
    """Batches, requests and counters over time, for Perfetto or Chrome's tracing page."""
    save_result: Path | None = None
    """JSON with the keys of ``vllm bench serve --save-result``."""
    prometheus: Path | None = None
    """Metrics by vLLM's names, in Prometheus' text format."""

    def check(self) -> None:
        """Raise InputError for a file that could not be written; before hours are spent on what goes in."""
        for name, path in self.wanted().items():
            check_file(name, path)

    def write(self, run: "Run", slo: SLO) -> None:
        """Write every file that was asked for, each whole or not at all. Raises InputError if one cannot be written."""
        for name, path in self.wanted().items():
            from windtunnel.report import WRITERS

            WRITERS[name](run, path, slo)

    def wanted(self) -> dict[str, Path]:
        """The files that were asked for, by name."""
        paths = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: path for name, path in paths.items() if path is not None}


def check_file(name: str, path: Path) -> None:
    """Raise InputError unless a file of this path can be written."""
    if path.is_dir():
        raise InputError(f"{name} {str(path)!r}: is a folder: give the name of a file")
    check_folder(name, path, path.parent)


def check_folder(name: str, path: Path, folder: Path) -> None:
    """Raise InputError unless a file can be made in the folder, or in the nearest one above it that exists."""
    folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{name} {str(path)!r}: cannot be written ({error.strerror}): choose another place") from error


def check_directory(directory: Path | None) -> None:
    """Raise InputError unless a run can be saved there: nothing or an older run stands in its place."""
    if directory is None:
        return
    if directory.exists() and not directory.is_dir():
        raise InputError(f"output {str(directory)!r}: is a file: give the name of a folder")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "run.json").is_file():
        raise InputError(f"output {str(directory)!r}: holds something that is not a run: choose another folder")
    check_folder("output", directory, directory)
