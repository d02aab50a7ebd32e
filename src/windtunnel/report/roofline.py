"""The roofline of a batch: each operator's arithmetic intensity and attained rate, under what the device allows."""

from html import escape
from typing import Any

from windtunnel.deployment import Pool
from windtunnel.perf.explain import Explanation, Row
from windtunnel.report.figures import scatter, titled
from windtunnel.report.page import page, percent, plot, seconds, table

EDGE = 4.0
"""Factor by which the lines extend beyond the operators."""


def roofline_page(pool: Pool, batch: str, found: Explanation) -> str:
    """The page as text, plotly.js included. Operators that compute nothing appear only in the table."""
    title = f"{batch} on {pool.model.name}, {pool.device.name}"
    least = sum(_least(row) for row in found.rows)
    total = found.total_seconds
    sections = (
        f'<header><p class="brand">windtunnel roofline</p><h1>{escape(title)}</h1>'
        f'<p class="sub">step {seconds(total)}, ± {percent(found.error)}; perfect kernels and no host: '
        f"{seconds(least)}, {percent(least / total)} of it</p></header>",
        plot("roofline", "", "timeline", "Logarithmic axes; both lines are the device's own, not what kernels attain."),
        table(
            ("operator", "bound by", "time", "least", "of peak FLOP/s", "of bandwidth", "source", "error"),
            [_cells(row) for row in found.rows],
        ),
    )
    return page(title, sections, {"roofline": figure(pool, found)})


def figure(pool: Pool, found: Explanation) -> dict[str, Any]:
    """Operators as points (FLOPs per byte, FLOP/s) by group, and the roof of each arithmetic rate."""
    rows = [row for row in found.rows if row.flops > 0 and row.bytes > 0 and row.group != "communication"]
    groups = list(dict.fromkeys(row.group for row in rows))
    traces = [_points(name, place, [row for row in rows if row.group == name]) for place, name in enumerate(groups)]
    intensities = [row.flops / row.bytes for row in rows] or [1.0]
    low, high = min(intensities) / EDGE, max(intensities) * EDGE
    for rate, peak in pool.device.flops.items():
        ridge = peak / pool.device.memory_bandwidth
        points = sorted({low, ridge, high} if low < ridge < high else {low, high})
        attained = [min(peak, x * pool.device.memory_bandwidth) for x in points]
        line = {"width": 1.5, "dash": "dot"}
        traces.append(scatter("lines", f"{rate} peak", points, attained, line=line, meta=len(traces)))
    axes = {"xaxis": "FLOPs per byte", "yaxis": "FLOP/s"}
    return {"data": traces, "layout": {key: titled(text, type="log") for key, text in axes.items()}}


def _points(name: str, place: int, rows: list[Row]) -> dict[str, Any]:
    return scatter(
        "markers",
        name,
        [row.flops / row.bytes for row in rows],
        [row.flops / row.busy for row in rows],
        text=[f"{row.name}: {row.shape}, {row.at}" for row in rows],
        hovertemplate="%{text}<br>%{x:.3g} FLOPs/byte, %{y:.3s}FLOP/s<extra></extra>",
        marker={"size": 9},
        meta=place,
    )


def _least(row: Row) -> float:
    """Seconds of a perfect kernel, less what is hidden of it: the attained shares are of the peaks."""
    return row.seconds * max(row.compute_share, row.bandwidth_share)


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.bound,
        seconds(row.seconds),
        seconds(_least(row)),
        percent(row.compute_share),
        percent(row.bandwidth_share),
        row.source,
        f"± {percent(row.error)}",
    ]
