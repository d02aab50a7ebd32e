"""The page: one text per experiment, into which what was measured is filled."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Findings:
    """What an experiment measured."""

    facts: Mapping[str, Any]
    """Name in the text → number or table."""
    charts: Mapping[str, str] = field(default_factory=dict)
    """File name → SVG."""


def written(name: str, findings: Findings) -> str:
    """The text of an experiment, ``name.md`` next to this module, with its numbers."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8").format(**findings.facts)
    return re.sub(r"(?<=[ (])-(?=\d)", "−", text)


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
