"""Outputs: the files of a run that were asked for, checked before the simulation and written after it."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.files import require_folder, require_writable, write_whole

if TYPE_CHECKING:
    from windtunnel.simulate.run import Run


Format = Literal[
    "text", "md", "csv", "brief", "scripts", "docker", "systemd", "kubernetes", "leaderworkerset", "llm-d", "kserve",
    "dynamo",
]  # fmt: skip
"""How results are printed, or what files that start a deployment are."""
PRINTED = ("text", "md", "csv", "brief")
"""Those of the screen; files are then scripts."""
FOLDERS = ("launch", "planner_profile")
"""Outputs that are several files in a folder."""
MARKED = ("report", "save_result")
"""Outputs that say who wrote them."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What is printed, and the files that start what was simulated or chosen."""

    launch: Path | None = None
    """Folder for the files that start the deployment, of a plan the winner, and the router before it."""
    format: Format = "text"
    """Print text for a terminal, Markdown for a pull request (md), tables as CSV, or a few lines for a chat (brief); or
    what the files of --launch are: shell scripts for nodes (the default), Compose files, units, or manifests of a
    cluster."""


@dataclass(frozen=True, kw_only=True)
class Outputs(Launched):
    """Where to write what; nothing by default."""

    report: Annotated[Path | None, Parameter(alias="--html")] = None
    """HTML page with tables and plots, in one file that needs no network."""
    perfetto: Path | None = None
    """Batches, requests and counters over time, for Perfetto or Chrome's tracing page."""
    save_result: Path | None = None
    """JSON with the keys of ``vllm bench serve --save-result``."""
    prometheus: Path | None = None
    """Metrics by vLLM's names, in Prometheus' text format."""
    planner_profile: Path | None = None
    """Folder for the profile that Dynamo's planner reads: times of prompts and of decode steps."""

    def check(self) -> None:
        """Raise InputError for a file that could not be written; before hours are spent on what goes in."""
        require_launch(self.launch, self.format)
        for name, path in self.wanted().items():
            if name in FOLDERS:
                require_writable(name, path / "any", in_new_folder=True)
            else:
                require_writable(name, path, ours=name in MARKED)

    def write(self, run: "Run", slo: SLO) -> None:
        """Write every file that was asked for, each whole or not at all. Raises InputError if one cannot be written."""
        from windtunnel.report import FOLDERS as WRITERS
        from windtunnel.report import TEXTS, write_launch

        for name, path in self.wanted().items():
            if name == "launch":
                write_launch(path, run, launched(self.format))
            elif name in FOLDERS:
                WRITERS[name](path, run)
            else:
                write_whole(path, TEXTS[name](run, slo))

    def wanted(self) -> dict[str, Path]:
        """The files that were asked for, by name."""
        paths = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: path for name, path in paths.items() if isinstance(path, Path)}


def require_launch(folder: Path | None, kind: Format) -> None:
    """Raise InputError for a format of files that are not written."""
    if folder is None and kind not in PRINTED:
        raise InputError(f"format={kind}: is of the files of --launch: add --launch FOLDER")


def launched(kind: Format) -> str:
    """What the files of --launch are."""
    return "scripts" if kind in PRINTED else kind


def check_directory(directory: Path | None) -> None:
    """Raise InputError unless a run can be saved there: nothing or an older run stands in its place."""
    if directory is None:
        return
    from windtunnel.simulate.run import require_place

    require_place(directory)
    require_folder("output", directory, directory)
