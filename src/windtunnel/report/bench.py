"""A bench as a page, and as rows for Parquet: every case of a matrix next to the others."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from html import escape
from math import exp, isfinite, log
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.metrics import Interval, Measure, spread
from windtunnel.metrics.comparison import plain
from windtunnel.report.figures import Figure, scatter, titled
from windtunnel.report.page import number, page, plot, table

MEASURES = (
    Measure("capacity", "capacity", "requests/s", 1.0),
    Measure("capacity_per_dollar", "capacity", "requests/s per $/h", 1.0),
    Measure("ttft.mean", "TTFT", "ms", 1e3),
    Measure("ttft.p99", "TTFT p99", "ms", 1e3),
    Measure("tpot.mean", "TPOT", "ms", 1e3),
    Measure("e2el.mean", "E2EL", "s", 1.0),
    Measure("output_throughput", "output", "tokens/s", 1.0),
    Measure("goodput", "goodput", "requests/s", 1.0),
    Measure("attainment", "good", "%", 1e2),
    Measure("gpus", "GPUs", "", 1.0),
    Measure("cost_per_million_output_tokens", "cost", "$/M tokens", 1.0),
)
"""What tables show, as means over the seeds."""
PLOTTED = (
    "capacity",
    "capacity_per_dollar",
    "ttft.mean",
    "tpot.mean",
    "e2el.mean",
    "output_throughput",
    "goodput",
    "cost_per_million_output_tokens",
)
AGAINST = ("ttft.mean", "tpot.mean", "e2el.mean", "output_throughput")
CAPACITY, PER_DOLLAR = "capacity", "capacity_per_dollar"
Known = Mapping[tuple[str, ...], Mapping[str, Interval]]
"""Numbers of a case by its names on the axes."""
LINE = 24
"""Pixels of a case in a plot."""
SIMULATED, LIVE = "simulated", "measured"


@dataclass(frozen=True, eq=False)
class Row:
    """A case, or a load that a server got, and what came of it."""

    names: tuple[str, ...]
    """Of its value on each axis; of what was measured, on each axis of the load."""
    words: Mapping[str, Any] = field(default_factory=dict)
    live: bool = False
    """Measured at the endpoint, not simulated."""
    refusal: str = ""
    """Why it cannot be simulated."""
    documents: tuple[Mapping[str, Any], ...] = ()
    """What ``summary_json`` says of each seed."""
    against: Mapping[str, Interval] = field(default_factory=dict)
    """Differences from what the endpoint did under the same load, seed by seed."""
    meets_goals: bool = True

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Mean over the seeds of every number, with its 95 % confidence interval."""
        return spread(self.documents) if self.documents else {}


def found_of(axes: Sequence[str], load_axes: Sequence[int], rows: Sequence[Row]) -> list[str]:
    """What a bench of capacities says, in sentences."""
    return findings(axes, load_axes, {row.names: row.intervals for row in rows if not row.live})


def shown(rows: Sequence[Row]) -> list[Measure]:
    """The measures that some row has."""
    has = {name for row in rows for name, value in row.intervals.items() if isfinite(value.mean)}
    return [measure for measure in MEASURES if measure.name in has]


def heads(axes: Sequence[str], measures: Sequence[Measure], live: bool) -> list[str]:
    """The first line of the table."""
    units = [f"{measure.title}, {measure.unit}" if measure.unit else measure.title for measure in measures]
    return [*axes, *([""] if live else []), *units]


def cells(
    row: Row,
    axes: Sequence[str],
    load_axes: Sequence[int],
    measures: Sequence[Measure],
    live: bool,
    *,
    halves: bool = True,
) -> list[str]:
    """A line of the table; ``live`` if some rows are measured, not simulated; ``halves``: with confidence intervals."""
    names: Sequence[str] = row.names
    if row.live:
        of_load = dict(zip(load_axes, row.names, strict=True))
        names = [of_load.get(place, "–") for place in range(len(axes))]
    kind = [LIVE if row.live else SIMULATED] if live else []
    found = row.intervals
    return [*names, *kind, *(_value(found.get(measure.name), measure, halves) for measure in measures)]


def _value(interval: Interval | None, measure: Measure, halves: bool) -> str:
    if interval is None or not isfinite(interval.mean):
        return "–"
    if not measure.unit:
        return f"{interval.mean:,.0f}"
    half = measure.scale * interval.half_width
    around = f" ± {number(half, 2)}" if halves and isfinite(half) and half else ""
    return number(measure.scale * interval.mean) + around


def differences(row: Row, base: Row) -> list[str]:
    """How far a simulated row is from what was measured under its load, for each of AGAINST."""
    found = []
    for name in AGAINST:
        measured, own = base.intervals.get(name), row.against.get(name)
        share = own.mean / measured.mean if own and measured and measured.mean else float("nan")
        found.append(f"{100 * share:+.1f} %".replace("-", "−") if isfinite(share) else "–")
    return found


def pairs(rows: Sequence[Row], load_axes: Sequence[int]) -> Iterator[tuple[Row, Row]]:
    """Each simulated row and the measured one of its load."""
    measured = {row.names: row for row in rows if row.live}
    for row in rows:
        base = measured.get(tuple(row.names[place] for place in load_axes)) if not row.live else None
        if base is not None and row.documents:
            yield row, base


def warned_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What runs warn of, and whom; of all it says so."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for text in dict.fromkeys(text for document in row.documents for text in document.get("warnings", ())):
            found.setdefault(text, []).append(" ".join(row.names))
    everyone = sum(bool(row.documents) and not row.live for row in rows)
    return {text: ["all"] if len(names) == everyone else names for text, names in found.items()}


def titles() -> list[str]:
    """Of the columns of ``differences``."""
    by_name = {measure.name: measure.title for measure in MEASURES}
    return [by_name[name] for name in AGAINST]


def bench_page(title: str, axes: Sequence[str], load_axes: Sequence[int], rows: Sequence[Row], note: str) -> str:
    """The page as text, plotly.js included. Raises InputError if plotly is not installed."""
    measures, live = shown(rows), any(row.live for row in rows)
    lines = [cells(row, axes, load_axes, measures, live) for row in rows if row.documents]
    sections = [
        f'<header><p class="brand">windtunnel bench</p><h1>{escape(title)}</h1>'
        f'<p class="sub">{escape(note)}</p></header>',
        *(f"<p>{escape(text)}.</p>" for text in found_of(axes, load_axes, rows)),
        f'<div class="panel">{table(heads(axes, measures, live), lines)}</div>',
    ]
    if live:
        against = [[*row.names, *differences(row, base)] for row, base in pairs(rows, load_axes)]
        sections += [
            "<h2>Simulated against measured</h2>",
            f'<div class="panel">{table([*axes, *titles()], against)}</div>',
        ]
    warned = [[" · ".join(names), text] for text, names in warned_of(rows).items()]
    if warned:
        sections += ["<h2>What to know</h2>", f'<div class="panel">{table(["of", ""], warned, "words")}</div>']
    refused = [[*row.names, row.refusal] for row in rows if row.refusal]
    if refused:
        sections += ["<h2>What cannot run</h2>", f'<div class="panel">{table([*axes, "why"], refused, "words")}</div>']
    figures = {
        f"measure-{place}": _figure(measure, load_axes, rows)
        for place, measure in enumerate(measures)
        if measure.name in PLOTTED
    }
    sections += [plot(name, "", "free") for name in figures]
    sections.append("<footer>windtunnel · simulated, not measured on the device</footer>")
    return page(title, sections, figures)


def _figure(measure: Measure, load_axes: Sequence[int], rows: Sequence[Row]) -> Figure:
    """A point for each row that has the measure; a line for each setting, a colour for each load."""
    loads: dict[str, list[tuple[str, Interval]]] = {}
    for row in rows:
        value = row.intervals.get(measure.name)
        if value is None or not isfinite(value.mean):
            continue
        of_load = row.names if row.live else tuple(row.names[place] for place in load_axes)
        rest = [name for place, name in enumerate(row.names) if place not in load_axes]
        label = LIVE if row.live else " · ".join(rest) or SIMULATED
        loads.setdefault(" · ".join(of_load) or "all", []).append((label, value))
    data = []
    for place, (load, points) in enumerate(loads.items()):
        values = [float(f"{measure.scale * value.mean:.6g}") for _, value in points]
        trace = scatter("markers", load, values, [label for label, _ in points], marker={"size": 9}, meta=place)
        halves = [value.half_width for _, value in points]
        if all(map(isfinite, halves)):
            trace["error_x"] = {"type": "data", "array": [measure.scale * half for half in halves], "thickness": 1.6}
        data.append(trace)
    lines = len({label for points in loads.values() for label, _ in points})
    unit = f" ({measure.unit})" if measure.unit else ""
    layout = {
        "xaxis": titled(measure.title + unit, type="log"),
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": len(data) > 1,
        "height": 140 + LINE * lines,
    }
    return {"data": data, "layout": layout}


def bench_columns(axes: Sequence[str], load_axes: Sequence[int], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row of plain values for each case and seed: its names, its words as JSON, and every number of the run."""
    found = []
    for row in rows:
        places = load_axes if row.live else range(len(axes))
        names = dict.fromkeys(axes, "") | {axes[place]: name for place, name in zip(places, row.names, strict=True)}
        words = json.dumps({word: plain(value) for word, value in row.words.items()})
        head = names | {"kind": LIVE if row.live else SIMULATED, "words": words, "refusal": row.refusal}
        for repetition, document in enumerate(row.documents or ({},)):
            numbers = {f"{name}_value" if name in head else name: value for name, value in _flat(document)}
            found.append(head | {"repetition": repetition} | numbers)
    return found


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}_")
        elif value is None or (isinstance(value, int | float) and key != "schema_version"):
            yield prefix + key, None if value is None else float(value)


def findings(axes: Sequence[str], load_axes: Sequence[int], cases: Known) -> list[str]:
    """Sentences; none for a bench that does not look for capacities."""
    known = {names: found for names, found in cases.items() if CAPACITY in found}
    return [*_best_of_loads(load_axes, known), *_of_axes(axes, load_axes, known)] if known else []


def _best_of_loads(load_axes: Sequence[int], known: Known) -> Iterator[str]:
    loads: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for names in known:
        loads.setdefault(tuple(names[place] for place in load_axes), []).append(names)
    for load, cases in loads.items():
        said, title = [], " ".join(load) or "the load"
        for measure, unit in ((CAPACITY, "requests/s"), (PER_DOLLAR, "requests/s per $/h")):
            values = {names: known[names][measure].mean for names in cases if measure in known[names]}
            best = max(values, key=lambda names: (values[names], names), default=None)
            if best is None or not values[best] > 0:
                continue
            rest = " ".join(name for place, name in enumerate(best) if place not in load_axes)
            said.append(f"{rest} ({number(values[best])} {unit})")
        none = sum(known[names][CAPACITY].mean == 0 for names in cases)
        text = f"{title}: most {', most for its price '.join(said)}" if said else f"{title}: nothing keeps the limits"
        yield text + (f"; {none} of {len(cases)} keep the limits at no rate" if none and said else "")


def _of_axes(axes: Sequence[str], load_axes: Sequence[int], known: Known) -> Iterator[str]:
    """Of each axis that is not of the load: its values by the mean share of the best value, all else being equal."""
    for place, axis in enumerate(axes):
        if place in load_axes:
            continue
        shares: dict[str, list[float]] = {}
        for rest in dict.fromkeys(names[:place] + names[place + 1 :] for names in known):
            alike = {names[place]: known[names] for names in known if names[:place] + names[place + 1 :] == rest}
            values = {name: found[CAPACITY].mean for name, found in alike.items()}
            most = max(values.values())
            for name, value in values.items():
                if most > 0 and value > 0 and isfinite(value):
                    shares.setdefault(name, []).append(log(value / most))
        if len(shares) < 2:
            continue
        means = {name: exp(sum(found) / len(found)) for name, found in shares.items()}
        order = sorted(means, key=lambda name: -means[name])
        yield f"{axis}, of the best one's capacity where both keep the limits: " + ", ".join(
            f"{name} {100 * means[name]:.0f} %" for name in order
        )
