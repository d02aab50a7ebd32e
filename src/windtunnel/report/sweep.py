"""Sweep: latencies and throughput against the rate, as one offline page."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from windtunnel.metrics.comparison import Point, knee_ends
from windtunnel.report.figures import Figure, scatter, titled
from windtunnel.report.page import number, page, plot, table

LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2el": "Whole request"}


def sweep_page(model: str, points: Sequence[Point], knee: Point | None) -> str:
    """The page as text. Raises InputError if plotly is not installed."""
    text = verdict(points, knee)
    kind = "bad" if knee is None else "good"
    rates = [point.rate for point in points]
    served = [point.served if math.isfinite(point.served) else None for point in points]
    figures = {name: _latencies(name, points, knee) for name in LATENCIES}
    figures["served"] = _figure(
        [scatter("lines+markers", "served", rates, served), scatter("lines", "asked", rates, rates)],
        "requests/s served",
        knee,
    )
    rows = [
        (
            *map(number, (point.rate, point.served, point.result.output_throughput)),
            *(number(1e3 * point.result.latencies[name].percentile(90)) for name in LATENCIES),
        )
        for point in points
    ]
    heads = ["requests/s", "served", "output tokens/s", *(f"{name} p90, ms" for name in LATENCIES)]
    sections = [
        f'<header><p class="brand">windtunnel sweep</p><h1>{escape(model)}</h1>'
        f'<p class="verdict {kind}">{escape(text)}</p></header>',
        f'<div class="panel">{table(heads, rows)}</div>',
        "<h2>By request rate</h2>",
        *(plot(name, title, "tall") for name, title in LATENCIES.items()),
        plot("served", "Served against asked", "tall"),
        "<footer>windtunnel · simulated, not measured on the device</footer>",
    ]
    return page(f"Sweep: {model}", sections, figures)


def verdict(points: Sequence[Point], knee: Point | None) -> str:
    """Which of the rates is carried, which next higher one is not, and where that is on a real server."""
    if knee is None:
        return f"Saturated at every rate{on_servers(points)}."
    higher = [point.rate for point in points if point.rate > knee.rate]
    end = f"not {number(min(higher))}" if higher else "the highest rate that was tried"
    return f"Carries {number(knee.rate)} requests/s, {end}{on_servers(points)}."


def on_servers(points: Sequence[Point]) -> str:
    """Where the knee is on a real server, behind the sentence that names it."""
    ends = knee_ends(points)
    if ends is None or ends == (None, None):
        return ""
    low, high = ("below the lowest rate" if rate is None else number(rate) for rate in ends)
    return f" ({low} to {high} on a real server)"


def _latencies(name: str, points: Sequence[Point], knee: Point | None) -> Figure:
    rates = [point.rate for point in points]
    lines = [
        scatter("lines+markers", f"p{level}", rates, [_milliseconds(point, name, level) for point in points])
        for level in (50, 90, 99)
    ]
    return _figure(lines, "ms", knee, type="log")


def _milliseconds(point: Point, name: str, level: float) -> float | None:
    value = point.result.latencies[name].percentile(level)
    return 1e3 * value if math.isfinite(value) else None


def _figure(lines: list[dict[str, Any]], title: str, knee: Point | None, **axis: Any) -> Figure:
    mark = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1.5}}
    shapes = [] if knee is None else [mark | {"x0": knee.rate, "x1": knee.rate}]
    layout = {"xaxis": titled("requests/s asked"), "yaxis": titled(title, **axis), "shapes": shapes}
    return {"data": lines, "layout": layout}
