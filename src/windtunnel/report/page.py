"""A page in a single file that needs no network: its frame, its plots, and plotly.js to draw them."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.report.figures import Figure

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
    """A list of what the reader should know."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="warnings">{items}</ul>' if items else ""


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
