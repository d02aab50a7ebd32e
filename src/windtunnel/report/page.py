"""A page in a single file that needs no network: its frame, its plots with plotly.js to draw them, words and tables.

Numbers are as people read them, and every string is escaped.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.report.figures import Figure
from windtunnel.simulate.notes import QUIET

FOLDER = Path(__file__).parent
CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def page(title: str, sections: Iterable[str], figures: Mapping[str, Figure], own: str = "") -> str:
    """The whole page: sections of HTML, and the figures that go into their places, see ``plot``; ``own`` is the
    page's own script, see ``script``.

    Raises:
        InputError: plotly is not installed.
    """
    plots = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · windtunnel</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        f'<link rel="icon" href="data:,"><style>{_text("page.css")}</style></head>\n<body><main>'
        + "\n".join(sections)
        + f'</main>\n<script type="application/json" id="figures">{plots}</script>\n<script>{_plotly()}</script>\n'
        f"<script>{_text('page.js')}</script>\n{own}</body></html>\n"
    )


def script(name: str, data: object) -> str:
    """A script of this folder, with its data under its name."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="{name}-data">{text}</script>\n<script>{_text(name + ".js")}</script>\n'


def plot(name: str, title: str, kind: str, caption: str = "") -> str:
    """The place of a figure; ``kind`` sets its height."""
    head = f"<h3>{escape(title)}</h3>" if title else ""
    foot = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'<div class="panel">{head}<div class="plot {kind}" id="{name}"></div>{foot}</div>'


def warnings(texts: Iterable[str]) -> str:
    """A list of what the reader should know, and below it, in small letters, what is as expected for most loads."""
    found = list(texts)
    items = "".join(f"<li>{escape(text)}</li>" for text in found if not text.endswith(QUIET))
    quiet = "".join(f'<p class="caption">{escape(text)}</p>' for text in found if text.endswith(QUIET))
    return (f'<ul class="warnings">{items}</ul>' if items else "") + quiet


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js as the installed package ships it, read without importing the package."""
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        file = Path(folder) / "package_data" / "plotly.min.js"
        if file.is_file():
            return file.read_text(encoding="utf-8").replace("</script", "<\\/script")
    raise InputError("report: plotly is not installed, and its JavaScript draws the plots: pip install plotly")


LONG_LIST = 12
DIGEST = re.compile("[0-9a-f]{32,}")


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits and thousands separated; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def many(count: int, one: str) -> str:
    """So many of something: ``1 start``, ``0 starts``."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def seconds(value: float) -> str:
    """A duration in the unit that suits it: ms, s, min or h."""
    if not math.isfinite(value):
        return "–"
    for limit, factor, unit in ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{number(value * factor)} {unit}"
    return f"{number(value / 3600)} h"


def span(low: float, high: float) -> str:
    """Two durations with two digits each, in the unit that suits the longer one."""
    for limit, factor, unit in ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if high < limit:
            return f"{number(low * factor, 2)}-{number(high * factor, 2)} {unit}"
    return f"{number(low / 3600, 2)}-{number(high / 3600, 2)} h"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{number(value * 100)} %" if math.isfinite(value) else "–"


def money(value: float) -> str:
    """US dollars."""
    return f"${number(value)}" if math.isfinite(value) else "–"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """An HTML table of numbers, of ``words``, or a ``list`` of names and values; every cell is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" if column else "<td></td>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if columns else ""
    look = f' class="{kind}"' if kind else ""
    return f"<table{look}>{top}<tbody>{body}</tbody></table>"


def card(name: str, value: str, more: str = "") -> str:
    """One key number, with a line of context."""
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows (dotted name, value); what is unset is left out."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                rows += flatten(item, f"{prefix}{key}[{index}]." if len(value) > 1 else f"{prefix}{key}.")
        elif value is not None and value not in ("", [], ()):
            size = key.endswith("_bytes") and isinstance(value, int)
            rows.append((f"{prefix}{key}", f"{value / 2**30:.2f} GiB" if size else plain(value)))
    return rows


def plain(value: Any) -> str:
    """A setting as text: floats with six significant digits, long digests and lists cut."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        shown = [*value[: LONG_LIST // 2], "…", value[-1]] if len(value) > LONG_LIST else value
        return ", ".join(map(plain, shown))
    text = "" if value is None else str(value)
    return f"{text[:12]}…" if DIGEST.fullmatch(text) else text
