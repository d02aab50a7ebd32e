"""Variants on one page: numbers, paired differences, distributions and timelines."""

from collections.abc import Sequence
from html import escape
from math import isfinite, isnan, nan

import numpy as np

from windtunnel.metrics import Comparison, Interval, Measure, Variant
from windtunnel.metrics.comparison import plain
from windtunnel.report.figures import Figure, cdf, over_time, rounded, scatter, titled, upright
from windtunnel.report.page import number, page, plot, table, warnings

SERVERS = "on a real server"
"""Heads a column of differences on measured servers."""
ROUNDING = 1e-9
"""Share of a mean below which its interval is that of sums of floating-point numbers."""
DISTRIBUTIONS = {
    "ttft": ("Time to first token", "s"),
    "tpot": ("Time per output token", "ms"),
    "e2el": ("Whole request", "s"),
}


def comparison_page(*comparisons: Comparison) -> str:
    """The page as text, plotly.js included; several comparisons, of other loads, one below the other.

    Raises:
        InputError: plotly is not installed.
    """
    sections: list[str] = []
    figures: dict[str, Figure] = {}
    for place, comparison in enumerate(comparisons):
        before = f"load-{place}-" if place else ""
        sections += _sections(comparison, before)
        figures |= {f"{before}{name}": figure for name, figure in comparison_figures(comparison).items()}
    sections.append("<footer>windtunnel · simulated, not measured on the device</footer>")
    return page(comparisons[0].title, sections, figures)


def _sections(comparison: Comparison, before: str) -> list[str]:
    """What the page says of one comparison; the names of its plots begin with ``before``."""
    confidence = f"{100 * comparison.confidence:g} % confidence intervals over {len(comparison.seeds)} seeds"
    first = f"Of seed {comparison.seeds[0]}."
    return [
        f'<header><p class="brand">windtunnel comparison</p><h1>{escape(comparison.title)}</h1>'
        f'<p class="sub">{len(comparison.variants)} variants under {_seeds(comparison)}</p>'
        f"{warnings(comparison.warnings)}</header>",
        f'<div class="panel">{_settings(comparison)}</div>',
        "<h2>What each does</h2>",
        f'<div class="panel">{_values(comparison)}</div>',
        f"<h2>Difference from the {escape(comparison.baseline.name)}</h2>",
        f'<div class="panel">{_differences(comparison)}<p class="caption">Taken seed by seed, under the same requests, '
        f"with {confidence}; in parentheses: not significant.</p>{_on_servers(comparison)}</div>",
        '<div style="margin-top:12px">',
        plot(
            f"{before}ratios",
            "",
            "ratios",
            f"Value divided by the {comparison.baseline.name}'s; bars are {confidence}.",
        ),
        "</div>",
        "<h2>Distributions</h2>",
        '<div class="triple">',
        *(
            plot(f"{before}{name}-cdf", title, "cdf", f"{first} Colours as above.")
            for name, (title, _) in DISTRIBUTIONS.items()
        ),
        "</div>",
        "<h2>Over time</h2>",
        '<div class="pair">',
        *(
            plot(f"{before}line-{place}", variant.name, "timeline", first)
            for place, variant in enumerate(comparison.variants)
        ),
        "</div>",
    ]


def comparison_figures(comparison: Comparison) -> dict[str, Figure]:
    """Every plot by the name of its place on the page."""
    lines = {f"line-{place}": over_time(variant.timeline) for place, variant in enumerate(comparison.variants)}
    _share_ranges(list(lines.values()))
    return {
        "ratios": _ratios(comparison),
        **{f"{name}-cdf": _cdfs(comparison.variants, name, unit) for name, (_, unit) in DISTRIBUTIONS.items()},
        **lines,
    }


def difference(comparison: Comparison, variant: Variant, measure: Measure) -> str:
    """A variant's difference in per cent of the baseline (where that is 0: in its unit); in brackets if it may be 0."""
    absolute, share = variant.differences[measure.name], comparison.relative(variant, measure.name)
    if absolute.mean == 0 and not absolute.half_width > 0:
        return "same"
    text = _signed(share, 100, " %") if isfinite(share.mean) else _signed(absolute, measure.scale)
    return text if absolute.differs or isnan(absolute.mean) else f"({text})"


def changed(share: float) -> str:
    """A relative change: ``−11 %``; more than double as a factor."""
    if not isfinite(share):
        return "overloaded"
    if share > 1:
        return f"× {1 + share:.1f}"
    return f"{'−' if share < 0 else '+'}{100 * abs(share):.0f} %"


def on_servers(comparison: Comparison, variant: Variant, measure: Measure) -> str:
    """Between which values a variant's difference lies on 90 % of measured servers, as ``difference`` has it."""
    if variant.ends is None:
        return ""
    low, high = variant.ends.differences[measure.name]
    if low == high or isnan(low):
        return "same" if low == 0 else ""
    share = comparison.span(variant, measure.name)
    if share is None:
        return f"{_signed(Interval(low, nan, 1), measure.scale)} to {_signed(Interval(high, nan, 1), measure.scale)}"
    return " to ".join(changed(one - 1) for one in share)


def open_ends(comparison: Comparison) -> list[str]:
    """What measured servers leave open, a sentence for each kind of evidence."""
    found: dict[str, list[str]] = {}
    for variant in comparison.variants:
        if variant.ends:
            found.setdefault(variant.ends.divergence.words, []).append(variant.name)
    others = len(comparison.variants) - 1
    return [
        f"{SERVERS}{'' if len(names) == others else f' ({chr(59).join(names)})'}: {words}"
        for words, names in found.items()
    ]


def _signed(interval: Interval, scale: float, unit: str = "") -> str:
    if not isfinite(interval.mean):
        return "–"
    sign = "−" if interval.mean < 0 else "+"
    wide = isfinite(interval.half_width) and not 0 < interval.half_width < ROUNDING * abs(interval.mean)
    half = f" ± {number(scale * interval.half_width, 2)}" if wide else ""
    return f"{sign}{number(scale * abs(interval.mean))}{half}{unit}"


def _seeds(comparison: Comparison) -> str:
    first, last = comparison.seeds[0], comparison.seeds[-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def _settings(comparison: Comparison) -> str:
    words = list(dict.fromkeys(word for variant in comparison.variants for word in variant.words))
    rows = [
        [variant.name, *(_setting(variant.words[word]) if word in variant.words else "" for word in words)]
        for variant in comparison.variants
    ]
    return table(["variant", *words], rows, "words")


def _setting(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_setting, value))
    return "default" if value is None else str(plain(value))


def _values(comparison: Comparison) -> str:
    rows = [
        [_title(measure), *(_value(variant.intervals[measure.name], measure.scale) for variant in comparison.variants)]
        for measure in comparison.measures
    ]
    return table(["", *(variant.name for variant in comparison.variants)], rows)


def _title(measure: Measure) -> str:
    return f"{measure.title} ({measure.unit})" if measure.unit else measure.title


def _value(interval: Interval, scale: float) -> str:
    half = f" ± {number(scale * interval.half_width, 2)}" if isfinite(interval.half_width) else ""
    return f"{number(scale * interval.mean)}{half}"


def _differences(comparison: Comparison) -> str:
    others = comparison.variants[1:]
    rows = [
        [measure.title, *(difference(comparison, variant, measure) for variant in others)]
        for measure in comparison.measures
    ]
    return table(["", *(variant.name for variant in others)], rows)


def _on_servers(comparison: Comparison) -> str:
    others = [variant for variant in comparison.variants if variant.ends]
    if not others:
        return ""
    rows = [
        [measure.title, *(on_servers(comparison, variant, measure) for variant in others)]
        for measure in comparison.measures
    ]
    words = escape(" ".join(open_ends(comparison)))
    return f'{table(["", *(f"{each.name}, {SERVERS}" for each in others)], rows)}<p class="caption">{words}</p>'


def _ratios(comparison: Comparison) -> Figure:
    """Value over the baseline's for each measure that the baseline has, with the paired interval."""
    measures = [measure for measure in comparison.measures if comparison.baseline.intervals[measure.name].mean > 0]
    data = []
    for place, variant in enumerate(comparison.variants):
        shares = [comparison.relative(variant, measure.name) for measure in measures]
        values = rounded(np.array([1 + share.mean for share in shares]), 6)
        titles, hover = [measure.title for measure in measures], "%{y}: %{x} of the baseline's<extra></extra>"
        trace = scatter("markers", variant.name, values, titles, marker={"size": 9}, meta=place, hovertemplate=hover)
        half = np.array([share.half_width for share in shares])
        if place and np.isfinite(half).any():
            trace["error_x"] = {"type": "data", "array": rounded(half, 4), "thickness": 1.6, "width": 5}
        data.append(trace)
    layout = {
        "xaxis": titled(f"share of the {comparison.baseline.name}'s value", type="log"),
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": True,
        "scattermode": "group",
        "shapes": [upright(1, 0, width=1.2)],
    }
    return {"data": data, "layout": layout}


def _cdfs(variants: Sequence[Variant], name: str, unit: str) -> Figure:
    factor = 1000.0 if unit == "ms" else 1.0
    data = []
    for place, variant in enumerate(variants):
        values, percents = cdf(variant.first.latencies[name])
        hover = f"{escape(variant.name)}: %{{y:.2f}} % ≤ %{{x}} {unit}<extra></extra>"
        points = rounded(values * factor), rounded(percents, 6)
        data.append(scatter("lines", variant.name, *points, line={"width": 2}, meta=place, hovertemplate=hover))
    layout = {
        "xaxis": titled(f"{name} ({unit})", type="log"),
        "yaxis": titled("% of requests", range=[0, 101]),
        "showlegend": False,
    }
    return {"data": data, "layout": layout}


def _share_ranges(figures: Sequence[Figure]) -> None:
    """Give each axis the same range in all figures, so that heights and times can be compared by eye."""
    largest: dict[str, float] = {}
    for trace in (trace for figure in figures for trace in figure["data"]):
        for letter, axis in (("x", "xaxis"), ("y", f"yaxis{trace['yaxis'][1:]}")):
            values = [value for value in trace[letter] if value is not None]
            largest[axis] = max(largest.get(axis, 0.0), *values)
    for figure in figures:
        for axis, top in largest.items():
            figure["layout"][axis] = figure["layout"][axis] | {"range": [0, 1.04 * top or 1.0]}
