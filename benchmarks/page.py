"""A page of experiments: one text for each, into which what was measured is filled."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

PLACE = Path(__file__).parents[1] / "docs" / "experiments"
"""Where pages of experiments and their charts are."""


@dataclass(frozen=True)
class Findings:
    """What an experiment measured."""

    facts: Mapping[str, Any]
    """Name in the text → number or table."""
    charts: Mapping[str, str] = field(default_factory=dict)
    """File name → SVG."""


def written(template: Path, findings: Findings) -> str:
    """The text of an experiment with its numbers."""
    return with_minus(template.read_text(encoding="utf-8").format(**findings.facts))


def with_minus(text: str) -> str:
    """Negative numbers with the sign of a minus."""
    return re.sub(r"(?<=[ (])-(?=\d)", "−", text)


def files_of(folder: Path, experiments: Mapping[str, ModuleType], ending: str = "") -> dict[str, str]:
    """Name → text of a page and its charts: the folder's intro.md, a text for each experiment, and ``ending``."""
    found = {name: module.findings() for name, module in experiments.items()}
    parts = [(folder / "intro.md").read_text(encoding="utf-8")]
    parts += [written(folder / f"{name}.md", findings) for name, findings in found.items()]
    charts = {name: svg for findings in found.values() for name, svg in findings.charts.items()}
    return {f"{folder.name}.md": "\n".join((*parts, ending)).rstrip("\n") + "\n", **charts}


def save(files: Mapping[str, str]) -> None:
    """Write the files of a page, and say where they are."""
    PLACE.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (PLACE / file).write_text(text, encoding="utf-8")
        print(PLACE / file)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers with three significant digits."""
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
