"""Other forms of what a screen shows: Markdown for a pull request, CSV for a spreadsheet, a few lines for a chat."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

FORM: ContextVar[str] = ContextVar("form", default="text")
"""The form in which tables are printed: text for a terminal, or one of FORMS."""
IN_BRIEF = (("goal", "capacity"), ("load", "throughput"), ("cost", "confidence"))
"""The facts that are told in brief, a line for each pair."""
MOST_COLUMNS, MOST_ROWS = 6, 4
"""Of a table that is told in brief."""
GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def markdown(parts: "Sequence[Table | Text | str]") -> str:
    """Tables as Markdown tables, names with what there is to say as a list, remarks as quotes."""
    from rich.table import Table
    from rich.text import Text

    blocks: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            blocks.append("\n".join(_table(part) if part.show_header else _facts(part)))
        else:
            text = " ".join((part.plain if isinstance(part, Text) else part).split())
            blocks.append(f"> {text}" if isinstance(part, Text) else text)
    return "\n\n".join(block for block in blocks if block) + "\n"


def brief(parts: "Sequence[Table | Text | str]") -> str:
    """What was asked, the answer, the first table if it is small, and the facts that matter: a line each."""
    from rich.table import Table

    said = [" ".join(part.split()) for part in parts if isinstance(part, str) and part.strip()]
    lines = [*said[:1], " ".join(text if text.endswith((".", ":")) else f"{text}." for text in said[1:])]
    tables = [part for part in parts if isinstance(part, Table)]
    first = next((one for one in tables if one.show_header), None)
    if first and len(first.columns) <= MOST_COLUMNS:
        name, *columns = (" ".join(str(column.header).split()) for column in first.columns)
        rows = (f"{cells[0].strip(' █')} {' / '.join(cells[1:])}" for cells in list(_rows(first))[:MOST_ROWS])
        lines.append(" ".join(f"{name} ({' / '.join(columns)}): {'; '.join(rows)}".split()))
    facts = {name.strip(): " ".join(text.split()) for one in tables if not one.show_header for name, text in _rows(one)}
    lines += ["; ".join(f"{name} {facts[name]}" for name in pair if name in facts) for pair in IN_BRIEF]
    return "".join(f"{line}\n" for line in lines if line)


def comma_separated(parts: "Sequence[Table | Text | str]") -> str:
    """The tables as CSV, a blank line between two; pairs of names and texts are rows of two cells."""
    from rich.table import Table

    texts = []
    for part in parts:
        if isinstance(part, Table):
            page = io.StringIO()
            written = csv.writer(page, lineterminator="\n")
            if part.show_header:
                written.writerow(" ".join(str(column.header).split()) for column in part.columns)
            written.writerows([_bare(cell.strip()) for cell in row] for row in _rows(part))
            texts.append(page.getvalue())
    return "\n".join(texts)


def _rows(whole: "Table") -> Iterator[list[str]]:
    """The cells of each row, in one line each."""
    columns = [["; ".join(str(cell).split("\n")) for cell in column.cells] for column in whole.columns]
    for row in zip(*columns, strict=True):
        yield list(row)


def _table(whole: "Table") -> Iterator[str]:
    if whole.title:
        yield from (f"**{whole.title}**", "")
    yield f"| {' | '.join(_escaped(str(column.header)) for column in whole.columns)} |"
    yield f"|{'|'.join('---' if column.justify == 'left' else '--:' for column in whole.columns)}|"
    for row in _rows(whole):
        yield f"| {' | '.join(_escaped(cell) for cell in row)} |"


def _facts(grid: "Table") -> Iterator[str]:
    for name, text in _rows(grid):
        yield f"- **{name.strip()}**: {' '.join(text.split())}"


def _bare(cell: str) -> str:
    """A number without the commas between its thousands."""
    return cell.replace(",", "") if GROUPED.fullmatch(cell) else cell


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


FORMS = {"md": markdown, "csv": comma_separated, "brief": brief}
"""Markdown, comma-separated values, and the few lines that a chat has room for."""
