"""What the page of a search draws: cost against latency, and the numbers from which it finds winners itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.plan.elimination import Entry
from windtunnel.plan.objective import purchase_of
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import SHORT, said
from windtunnel.plan.survey import Surveyed
from windtunnel.report.figures import Figure, scatter, titled


def short(axis: str) -> str:
    """An axis by its short name, or with spaces; that of a side of pools behind the side."""
    side, space, name = axis.partition(" ")
    return f"{side} {SHORT.get(name, name)}" if space and name in SHORT else SHORT.get(axis, axis.replace("_", " "))


def label(answer: SearchResult, index: int) -> str:
    """The settings of a candidate that differ within the space, in short."""
    return ", ".join(_parts(answer, index).values())


def labels_apart(answer: SearchResult, indices: Sequence[int]) -> tuple[list[str], str]:
    """What sets these candidates apart, each in short, and what they have in common."""
    found = [_parts(answer, index) for index in indices]
    common = {axis: text for axis, text in found[0].items() if all(each.get(axis) == text for each in found)}
    if len(found) == 1:
        return [", ".join(found[0].values())], ""
    apart = [", ".join(text for axis, text in each.items() if axis not in common) for each in found]
    return apart, ", ".join(common.values())


def _parts(answer: SearchResult, index: int) -> dict[str, str]:
    """The settings of a candidate that differ within the space, by axis; the device is always said."""
    axes: dict[str, set[str]] = {}
    for contender in answer.contenders.values():
        for axis, value in contender.candidate.settings.items():
            axes.setdefault(axis, set()).add(repr(value))
    settings = answer.contenders[index].candidate.settings
    found = {"device": str(settings["device"])} if "device" in settings else {}
    differ = (axis for axis in settings if len(axes[axis]) > 1 and axis != "device")
    return found | {axis: f"{short(axis)} {said(settings[axis])}" for axis in differ}


def cost_per_million(answer: SearchResult, index: int, outcome: Outcome) -> float:
    """USD for a million output tokens of one replica at this rate; NaN without a price."""
    hourly = answer.contenders[index].candidate.scaled(1).price_per_hour
    if hourly <= 0 or not outcome.output_throughput > 0:
        return math.nan
    return hourly / 3600 / outcome.output_throughput * 1e6


def pareto(answer: SearchResult, surveyed: Sequence[Surveyed]) -> Figure:
    """Cost against ttft, coloured by tpot; the front over all three stands out. Growing queues are left out."""
    rows = [(one.index, outcome) for one in surveyed for outcome in one.outcomes if outcome.met]
    values = np.array(
        [
            (
                cost_per_million(answer, index, outcome),
                outcome.latencies["ttft"]["p90"] * 1e3,
                outcome.latencies["tpot"]["p90"] * 1e3,
            )
            for index, outcome in rows
        ]
    ).reshape(-1, 3)
    best = set(front(values).tolist())
    shades = values[:, 2][~np.isnan(values[:, 2])]
    scale: dict[str, Any] = {
        "colorscale": "Viridis",
        "cmin": float(shades.min(initial=0)),
        "cmax": float(shades.max(initial=1)),
    }
    data = []
    for name, chosen, size, opacity in (("others", False, 6, 0.35), ("Pareto front", True, 10, 1.0)):
        places = [place for place in range(len(rows)) if (place in best) == chosen and not math.isnan(values[place, 0])]
        texts = [
            f"{label(answer, rows[p][0])}<br>{rows[p][1].rate:.3g} {answer.question.unit} per replica" for p in places
        ]
        marker = scale | {
            "size": size,
            "opacity": opacity,
            "color": [round(float(values[p, 2]), 3) for p in places],
            "showscale": chosen,
            "colorbar": {"title": {"text": "tpot p90 (ms)"}},
            "line": {"width": 1 if chosen else 0},
        }
        hover = (
            "%{text}<br>$%{x:.3g} per million output tokens<br>ttft p90 %{y:.3g} ms, "
            "tpot p90 %{marker.color:.3g} ms<extra></extra>"
        )
        x, y = ([round(float(values[p, column]), digits) for p in places] for column, digits in ((0, 5), (1, 3)))
        data.append(scatter("markers", name, x, y, text=texts, marker=marker, hovertemplate=hover))
    data += _winner(answer)
    layout = {
        "xaxis": titled("$ per million output tokens", type="log"),
        "yaxis": titled("ttft p90 (ms)", type="log"),
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def _winner(answer: SearchResult) -> list[dict[str, Any]]:
    """The winner, with all its replicas, where the limits hold."""
    best = answer.best
    if best is None or best.held is None:
        return []
    deployment, _ = answer.measured(best)
    tokens, ttft = best.held.output_throughput, best.held.latencies["ttft"]["p90"] * 1e3
    hourly = purchase_of(answer.objective).price(deployment)
    if not (hourly > 0 and tokens > 0 and math.isfinite(ttft)):
        return []
    cost = hourly / 3600 / tokens * 1e6
    star = {"size": 16, "symbol": "star", "line": {"width": 1}}
    hover = "the winner<br>$%{x:.3g} per million output tokens<br>ttft p90 %{y:.3g} ms<extra></extra>"
    return [scatter("markers", "winner", [round(cost, 5)], [round(ttft, 3)], marker=star, hovertemplate=hover)]


def slices(answer: SearchResult, surveyed: Sequence[Surveyed]) -> dict[str, Any]:
    """What the page needs to find winners under other limits: every surveyed rate with its percentiles."""
    return {
        "metrics": ["ttft", "tpot", "itl", "e2el", "queue"],
        "statistics": ["mean", "p50", "p90", "p95", "p99"],
        "slo": _asked(answer),
        "found": [_found(answer, entry) for entry in answer.ranking],
        "configurations": [_configuration(answer, one) for one in surveyed],
    }


def _found(answer: SearchResult, entry: Entry) -> dict[str, Any]:
    """A configuration of the ranking, as it was simulated with all its replicas."""
    deployment, rate = answer.measured(entry)
    count = f"{deployment.replicas} × " if deployment.replicas > 1 else ""
    name = f"{count}{label(answer, entry.index)}"
    purchase = purchase_of(answer.objective)
    gpus, price = purchase.gpus(deployment), purchase.price(deployment)
    return {"name": name, "gpus": gpus, "price": price, "rate": float(f"{rate:.5g}")}


def _asked(answer: SearchResult) -> dict[str, dict[str, Any]]:
    """The limits that were asked for, as closely as the percentiles of the page can express them."""
    known = ("p50", "p90", "p95", "p99")
    found: dict[str, dict[str, Any]] = {}
    for name, limit in answer.question.slo.limits.items():
        share = 100 * answer.question.attainment
        found[name] = {"statistic": min(known, key=lambda text: abs(float(text[1:]) - share)), "limit": limit}
    for name, level, limit in answer.question.slo.percentiles:
        nearest = min(known, key=lambda text, level=level: abs(float(text[1:]) - level))  # type: ignore[misc]
        found[name] = {"statistic": nearest, "limit": limit}
    return found


def _configuration(answer: SearchResult, one: Surveyed) -> dict[str, Any]:
    replica = answer.contenders[one.index].candidate.scaled(1)
    return {
        "name": label(answer, one.index),
        "price": replica.price_per_hour,
        "gpus": replica.gpus,
        "device": " + ".join(dict.fromkeys(pool.device.name for pool in replica.pools)),
        "tp": replica.pools[-1].engine.tensor_parallel_size,
        "seqs": replica.pools[-1].engine.resolved("max_num_seqs"),
        "points": [_point(outcome) for outcome in one.outcomes],
    }


def _point(outcome: Outcome) -> dict[str, Any]:
    def numbers(values: Mapping[str, float]) -> list[float | None]:
        return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.values()]

    values = {name: numbers(statistics) for name, statistics in outcome.latencies.items()}
    return {"rate": float(f"{outcome.rate:.5g}"), "steady": outcome.met, "values": values}


def front(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows [n, m] of which no other row is at most as large in every column and smaller in one; ascending.

    Smaller is better. Rows with NaN are never in the front; equal rows all are.
    """
    rows = np.flatnonzero(~np.isnan(values).any(axis=1))
    kept: list[int] = []
    order = rows[np.lexsort(values[rows].T[::-1])]
    for row in order:
        against = values[kept]
        if not len(against) or not ((against <= values[row]).all(axis=1) & (against < values[row]).any(axis=1)).any():
            kept.append(int(row))
    return np.array(sorted(kept), dtype=np.int64)
