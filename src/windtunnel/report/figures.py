"""The plots of the report as plain dicts that plotly.js draws; colours and fonts come from the page."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import SLO
from windtunnel.metrics import Distribution, Steps, Summary, Timeline, group_share, timeline

Floats = NDArray[np.float64]
Figure = dict[str, Any]

BINS = 600
"""Bins of the timelines; each point is the exact mean over its bin."""


def figures(steps: Steps, summary: Summary, slo: SLO | None) -> dict[str, Figure]:
    """Every plot by the name of its place on the page: {"data": traces, "layout": layout}."""
    requests = steps.run.requests
    return {
        "requests-cdf": _cdfs(summary, ("ttft", "e2el", "queue"), "s", slo),
        "tokens-cdf": _cdfs(summary, ("tpot", "itl"), "ms", slo),
        "timeline": over_time(timeline(steps, BINS)),
        "breakdown": _breakdown(steps, summary),
        "prompts": _lengths(requests.prompt_tokens, "prompt tokens", 0),
        "outputs": _lengths(requests.output_tokens, "output tokens", 1),
        "arrivals": _arrivals(requests.arrival),
    }


def _cdfs(summary: Summary, names: tuple[str, ...], unit: str, slo: SLO | None) -> Figure:
    factor = 1000.0 if unit == "ms" else 1.0
    traces: list[Figure] = []
    shapes: list[Figure] = []
    notes: list[Figure] = []
    largest, smallest = 0.0, math.inf
    for index, name in enumerate(names):
        values, percents = cdf(summary.latencies[name])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": rounded(values * factor),
                "y": rounded(percents, 6),
                "line": {"width": 2},
                "meta": index,
                "hovertemplate": f"{name} ≤ %{{x}} {unit} for %{{y:.2f}} %<extra></extra>",
            }
        )
        if summary.latencies[name].count:
            largest = max(largest, float(values[-1]) * factor)
            smallest = min(smallest, summary.latencies[name].percentile(1) * factor)
        limit = slo.limits.get(name) if slo else None
        if limit is not None:
            line = {"type": "line", "x0": limit * factor, "x1": limit * factor, "yref": "paper", "y0": 0, "y1": 1}
            shapes.append({**line, "line": {"dash": "dot", "width": 1.5}, "meta": index})
            at = {"x": limit * factor, "y": 0.5, "yref": "paper", "xanchor": "left", "yanchor": "middle", "xshift": 3}
            notes.append({**at, "text": f"{name} limit", "showarrow": False, "meta": index})
    wide = largest > 50 * max(smallest, 1e-9) and smallest < math.inf
    axis: Figure = {"title": {"text": f"{' · '.join(names)} ({unit})"}, "rangemode": "tozero"}
    if wide:
        low = np.floor(np.log10(max(smallest, largest * 1e-5)) * 2) / 2
        axis = {**axis, "type": "log", "range": [low, np.ceil(np.log10(largest) * 4) / 4], "dtick": 1}
        for note in notes:
            note["x"] = math.log10(max(note["x"], 1e-9))
    return {
        "data": traces,
        "layout": {
            "xaxis": axis,
            "yaxis": {"title": {"text": "% of values"}, "range": [0, 101]},
            "shapes": shapes,
            "annotations": notes,
        },
    }


def over_time(lines: Timeline) -> Figure:
    """Queues, cache, tokens and requests over time, one below the other."""
    times = rounded(lines.centres - lines.edges[0], 6)
    rows = (
        ("requests", (("running", lines.running, 0), ("waiting", lines.waiting, 1))),
        ("KV cache, %", (("KV blocks in use", lines.kv * 100, 2),)),
        ("tokens / s", (("output tokens", lines.output_throughput, 3),)),
        ("requests / s", (("arriving", lines.arrivals, 4), ("finishing", lines.request_throughput, 5))),
    )
    data: list[Figure] = []
    layout: Figure = {
        "xaxis": {"title": {"text": "seconds after the first arrival"}, "anchor": "y4", "rangemode": "tozero"},
        "hovermode": "x",
    }
    height = 1 / len(rows)
    for place, (title, series) in enumerate(rows):
        axis = "y" if place == 0 else f"y{place + 1}"
        top = 1 - place * height
        layout[f"yaxis{place + 1 if place else ''}"] = {
            "title": {"text": title},
            "domain": [round(top - height + 0.03, 4), round(top, 4)],
            "rangemode": "tozero",
            "nticks": 5,
        }
        for name, values, colour in series:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": times,
                    "y": rounded(values),
                    "yaxis": axis,
                    "line": {"width": 1.4, "shape": "hvh"},
                    "meta": colour,
                }
            )
    return {"data": data, "layout": layout}


def _breakdown(steps: Steps, summary: Summary) -> Figure:
    """Two bars of shares: where the step time goes, and where its numbers come from."""
    data = []
    rows = (("by operator", group_share(steps)), ("by source", dict(summary.time_share)))
    index = 0
    for row, shares in rows:
        for name, share in sorted(shares.items(), key=lambda item: -item[1] if row == "by operator" else 0):
            if np.isfinite(share) and share > 0:
                data.append(
                    {
                        "type": "bar",
                        "orientation": "h",
                        "y": [row],
                        "x": [round(share * 100, 3)],
                        "name": name,
                        "text": [f"{name} {share:.0%}"],
                        "textposition": "inside",
                        "insidetextanchor": "middle",
                        "textangle": 0,
                        "meta": index,
                        "hovertemplate": f"{name}: %{{x:.1f}} %<extra></extra>",
                    }
                )
                index += 1
    axis = {"title": {"text": "% of the step time"}, "range": [0, 100]}
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.25,
            "legend": {"traceorder": "normal"},
            "uniformtext": {"minsize": 10, "mode": "hide"},
            "xaxis": axis,
            "yaxis": {"autorange": "reversed"},
        },
    }


def _lengths(values: NDArray[np.int64], title: str, colour: int) -> Figure:
    edges, counts = histogram(np.minimum(values, int(np.percentile(values, 99))) if len(values) else values)
    return _bars(edges, counts, title, "requests", colour)


def _arrivals(arrivals: Floats) -> Figure:
    edges, counts = histogram(arrivals - arrivals.min() if len(arrivals) else arrivals, bins=100)
    return _bars(edges, counts, "arrival, seconds after the first", "requests", 2)


def _bars(edges: Floats, counts: Floats, title: str, unit: str, colour: int) -> Figure:
    widths = np.diff(edges)
    bar = {
        "type": "bar",
        "x": rounded(edges[:-1] + widths / 2, 6),
        "y": counts.tolist(),
        "width": rounded(widths, 6),
        "meta": colour,
        "hovertemplate": "%{x}: %{y} " + unit + "<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": unit}}, "bargap": 0, "showlegend": False}
    return {"data": [bar], "layout": layout}


QUANTILES = 400


def cdf(values: Distribution) -> tuple[Floats, Floats]:
    """Points of the cumulative distribution: 400 equal steps, and as fine as one in 10,000 in the last per cent."""
    percents = np.unique(np.concatenate((np.linspace(0, 100, QUANTILES + 1), np.linspace(99, 100, 101))))
    return values.percentiles(percents), percents


def histogram(values: NDArray[np.generic], bins: int = 50) -> tuple[Floats, Floats]:
    """Edges and counts over equal bins, from the smallest to the largest value; integers get bins of whole width."""
    if len(values) == 0:
        return np.zeros(2), np.zeros(1)
    low, high = float(values.min()), float(values.max())
    if np.issubdtype(values.dtype, np.integer):
        width = max(1, -(-int(high - low + 1) // bins))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    counts, _ = np.histogram(values.astype(np.float64), edges)
    return edges, counts.astype(np.float64)


def rounded(values: Floats, digits: int = 4) -> list[float | None]:
    """Numbers with this many significant digits, None if not finite: a third of the text of full floats."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
