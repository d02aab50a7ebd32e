"""The plots of the report as plain dicts that plotly.js draws; colours and fonts come from the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import SLO
from windtunnel.metrics import Distribution, Steps, Summary, Timeline, group_share, timeline
from windtunnel.metrics.handed import parts_in_order

Floats = NDArray[np.float64]
Figure = dict[str, Any]

BINS = 600
"""Bins of the timelines; each point is the exact mean over its bin."""


def scatter(mode: str, name: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Figure:
    """A trace of ``lines`` or ``markers``; ``meta`` is its place among the colours of the page."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def titled(title: str, **more: Any) -> Figure:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


def figures(steps: Steps, summary: Summary, slo: SLO | None) -> dict[str, Figure]:
    """Every plot by the name of its place on the page: {"data": traces, "layout": layout}."""
    requests, bands = steps.run.requests, (steps.run.manifest.get("bands") or {}).get("factors", {})
    return {
        "requests-cdf": _cdfs(summary, ("ttft", "e2el", "queue"), "s", slo, bands),
        "tokens-cdf": _cdfs(summary, ("tpot", "itl"), "ms", slo, bands),
        "timeline": over_time(timeline(steps, BINS)),
        "breakdown": _breakdown(steps, summary),
        "prompts": _lengths(requests.prompt_tokens, "prompt tokens", 0),
        "outputs": _lengths(requests.output_tokens, "output tokens", 1),
        "arrivals": _arrivals(requests.arrival),
        **({"first-token": _first_token(steps)} if steps.run.handovers else {}),
    }


def _cdfs(
    summary: Summary, names: tuple[str, ...], unit: str, slo: SLO | None, bands: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """Distributions of latencies with their limits, and thinly those at both ends of the 90 % band."""
    factor = 1000.0 if unit == "ms" else 1.0
    traces: list[Figure] = []
    shapes: list[Figure] = []
    notes: list[Figure] = []
    largest, smallest = 0.0, math.inf
    for index, name in enumerate(names):
        values, percents = cdf(summary.latencies[name])
        hover = f"{name} ≤ %{{x}} {unit} for %{{y:.2f}} %<extra></extra>"
        points = rounded(values * factor), rounded(percents, 6)
        traces.append(scatter("lines", name, *points, line={"width": 2}, meta=index, hovertemplate=hover))
        for end in bands.get(name, {}).get("90", ()) if summary.latencies[name].count else ():
            thin = {"line": {"width": 1, "dash": "dot"}, "opacity": 0.5, "showlegend": False, "hoverinfo": "skip"}
            x, y = rounded(values * factor * end), rounded(percents, 6)
            traces.append(scatter("lines", f"{name}, end of the band", x, y, meta=index, **thin))
        if summary.latencies[name].count:
            largest = max(largest, float(values[-1]) * factor)
            smallest = min(smallest, summary.latencies[name].percentile(1) * factor)
        limit = slo.limits.get(name) if slo else None
        if limit is not None:
            shapes.append(upright(limit * factor, index, dash="dot", width=1.5))
            at = {"x": limit * factor, "y": 0.5, "yref": "paper", "xanchor": "left", "yanchor": "middle", "xshift": 3}
            notes.append({**at, "text": f"{name} limit", "showarrow": False, "meta": index})
    wide = largest > 50 * max(smallest, 1e-9) and smallest < math.inf
    across = titled(f"{' · '.join(names)} ({unit})", rangemode="tozero")
    if wide:
        low = np.floor(np.log10(max(smallest, largest * 1e-5)) * 2) / 2
        across |= {"type": "log", "range": [low, np.ceil(np.log10(largest) * 4) / 4], "dtick": 1}
        for note in notes:
            note["x"] = math.log10(max(note["x"], 1e-9))
    upwards = titled("% of values", range=[0, 101])
    return {"data": traces, "layout": {"xaxis": across, "yaxis": upwards, "shapes": shapes, "annotations": notes}}


def upright(x: float, place: int, **line: Any) -> Figure:
    """A line from the bottom to the top of a figure, in the colour of its place."""
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line, "meta": place}


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
    below = titled("seconds after the first arrival", anchor="y4", rangemode="tozero")
    layout: Figure = {"xaxis": below, "hovermode": "x"}
    height = 1 / len(rows)
    for place, (title, series) in enumerate(rows):
        number = str(place + 1) if place else ""
        top = 1 - place * height
        domain = [round(top - height + 0.03, 4), round(top, 4)]
        layout[f"yaxis{number}"] = titled(title, domain=domain, rangemode="tozero", nticks=5)
        for name, values, colour in series:
            line = {"width": 1.4, "shape": "hvh"}
            data.append(scatter("lines", name, times, rounded(values), yaxis=f"y{number}", line=line, meta=colour))
    return {"data": data, "layout": layout}


SLOWEST = 0.1
"""Share of the requests whose time to first token is shown next to the mean."""


def _first_token(steps: Steps) -> Figure:
    """Bars of the parts of the time to first token: the mean of all requests, and of the slowest tenth."""
    first = steps.run.requests.first_token - steps.run.requests.arrival
    known = np.flatnonzero(~np.isnan(first))
    slowest = known[np.argsort(first[known], kind="stable")][len(known) - -(-len(known) // round(1 / SLOWEST)) :]
    data = []
    for place, (name, (begin, end)) in enumerate(parts_in_order(steps.run).items()):
        means = [1000 * float((end - begin)[rows].mean()) if len(rows) else 0.0 for rows in (known, slowest)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": ["all requests", "slowest 10 %"],
                "x": rounded(np.array(means)),
                "name": name,
                "meta": place,
                "hovertemplate": f"{name}: %{{x}} ms<extra></extra>",
            }
        )
    layout = {"barmode": "stack", "bargap": 0.25, "legend": {"traceorder": "normal"}}
    axes = {"xaxis": titled("mean time to first token, ms", rangemode="tozero"), "yaxis": {"autorange": "reversed"}}
    return {"data": data, "layout": layout | axes}


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
                        "text": [f"{name} {100 * share:.0f} %"],
                        "textposition": "inside",
                        "insidetextanchor": "middle",
                        "textangle": 0,
                        "meta": index,
                        "hovertemplate": f"{name}: %{{x:.1f}} %<extra></extra>",
                    }
                )
                index += 1
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.25,
            "legend": {"traceorder": "normal"},
            "uniformtext": {"minsize": 10, "mode": "hide"},
            "xaxis": titled("% of the step time", range=[0, 100]),
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
    layout = {"xaxis": titled(title), "yaxis": titled(unit), "bargap": 0, "showlegend": False}
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
