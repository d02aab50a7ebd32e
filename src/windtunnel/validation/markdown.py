"""Markdown: comparisons as tables for a page or a terminal."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from windtunnel.metrics.bands import LEVEL
from windtunnel.validation.comparison import Comparison, relative_error
from windtunnel.validation.measurement import METRICS, STATISTICS
from windtunnel.validation.served_replay import Result, coverage, groups, held, simulated

NOTHING = "–"
LEAST = 30
"""Points of a group whose coverage is shown."""


def per_cent(value: float | None, signed: bool = False) -> str:
    """A share in per cent, ``signed`` with its sign."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{value * 100:{'+' if signed else ''}.1f} %"


def comparison_table(found: Comparison) -> str:
    """A comparison: latencies of both sides, errors, and other differences."""
    measurement, pool = found.measurement, found.pool
    lines = [
        f"### {measurement.name}",
        "",
        f"{pool.model.name} on {pool.device.name}, simulated as {pool.engine.preset}: {found.finished:,} of "
        f"{len(measurement.workload):,} requests",
        "",
        f"| ms | | {' | '.join(STATISTICS)} |",
        f"|---|---|{'---:|' * len(STATISTICS)}",
    ]
    for name in METRICS:
        measured, simulated = measurement.side.latencies[name], found.simulated.latencies[name]
        for label, values in (("measured", measured), ("simulated", simulated)):
            cells = (f"{values[key] * 1e3:,.1f}" if isfinite(values[key]) else NOTHING for key in STATISTICS)
            lines.append(f"| {name} | {label} | {' | '.join(cells)} |")
        errors = " | ".join(per_cent(relative_error(measured[key], simulated[key]), True) for key in STATISTICS)
        lines.append(f"| | error | {errors} |")
    lines += ["", *_pairs(found), _facts(found), *(f"\nNote: {text}." for text in dict.fromkeys(found.warnings)), ""]
    return "\n".join(lines)


def _pairs(found: Comparison) -> list[str]:
    if not found.paired:
        return []
    head = ["| request by request | median APE | MAPE | bias | KS distance |", "|---|---:|---:|---:|---:|"]
    rows = [
        f"| {name} | {per_cent(found.paired[name]['median_ape'])} | {per_cent(found.paired[name]['mape'])} | "
        f"{per_cent(found.paired[name]['bias'], True)} | {found.ks[name]:.3f} |"
        for name in METRICS
    ]
    return [*head, *rows, ""]


def _facts(found: Comparison) -> str:
    rates = (found.measurement.side.output_throughput, found.simulated.output_throughput)
    shares = ", ".join(f"{share * 100:.0f} % {name}" for name, share in found.time_share.items())
    measured, simulated = (NOTHING if one is None else "yes" if one else "no" for one in found.saturated)
    occupancy = ""
    if found.occupancy:
        distance = found.occupancy["mean_distance"]
        occupancy = (
            f" Requests running and waiting differ by {distance['running']:.1f} and {distance['waiting']:.1f} on "
            f"average (counted from the {found.occupancy['from']})."
        )
    return (
        f"Output tokens/s: {rates[0]:,.0f} measured, {rates[1]:,.0f} simulated "
        f"({per_cent(relative_error(*rates), True)}). Saturated: {measured} measured, {simulated} simulated."
        f"{occupancy} {found.kv_blocks:,} KV blocks a rank, {found.preemptions} preemptions. Step time: {shares}."
    )


def groups_table(rows: Sequence[dict[str, Any]]) -> str:
    """Served points by group."""
    head = "| | rows | simulated | TTFT median APE | MAPE | bias | TPOT median APE | MAPE | bias |"
    lines = [head, "|---|" + "---:|" * 8]
    for row in rows:
        cells = [
            per_cent(row[metric][name], name == "bias") if metric in row else NOTHING
            for metric in ("ttft", "tpot")
            for name in ("median_ape", "mape", "bias")
        ]
        lines.append(f"| {row['group']} | {row['rows']} | {row['simulated']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def served_text(results: Sequence[Result]) -> str:
    """Coverage, errors by group, and why rows were not simulated."""
    known = len(simulated(results))
    aggregated = [result for result in results if result.point.mode == "agg"]
    parts = [f"{known:,} of {len(results):,} rows simulated ({per_cent(known / len(results))})"]
    if 0 < len(aggregated) < len(results):
        covered = len(simulated(aggregated))
        parts.append(
            f"of the aggregated ones {covered:,} of {len(aggregated):,} ({per_cent(covered / len(aggregated))})"
        )
    text = ["; ".join(parts) + ".", groups_table(groups(results)), *bands_text(results), *refusals(results)]
    return "\n\n".join(text) + "\n"


def refusals(results: Sequence[Result]) -> list[str]:
    """How many rows of which models were not simulated, by reason; reasons that differ only in numbers are merged."""
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.reason:
            alike.setdefault(re.sub(r"\S*\d\S*", "", result.reason), []).append(result)
    lines = []
    for members in sorted(alike.values(), key=len, reverse=True):
        models = Counter(result.point.model_path for result in members).most_common()
        served = ", ".join(f"{model} {count:,}" for model, count in models)
        others = " (and the like)" if len({result.reason for result in members}) > 1 else ""
        lines.append(f"Not simulated ({len(members):,}): {members[0].reason}{others}: {served}")
    return lines


def bands_text(results: Sequence[Result]) -> list[str]:
    """How many of the measured values lie within their bands, in all and by group; nothing without any."""
    known = simulated(results)
    if not known:
        return []
    shares = [f"{per_cent(held(known, metric))} of the measured {metric}" for metric in ("tpot", "ttft")]
    head = [
        "| engine | model family | device | points | tpot held | band | ttft held | band | |",
        "|---|---|---|" + "---:|" * 5 + "---|",
    ]
    rows = [
        f"| {' | '.join(row['group'])} | {row['points']} | {per_cent(row['tpot']['held'])} | {row['tpot']['band']} | "
        f"{per_cent(row['ttft']['held'])} | {row['ttft']['band']} | {_bad(row)} |"
        for row in coverage(known)
        if row["points"] >= LEAST
    ]
    texts = [f"The {100 * LEVEL:.0f} % bands hold {' and '.join(shares)}.", *(["\n".join(head + rows)] if rows else [])]
    unreadable = Counter(result.unreadable for result in known if result.unreadable)
    return texts + [f"Unreadable ({count:,}): {reason}" for reason, count in unreadable.most_common()]


def _bad(row: Mapping[str, Any]) -> str:
    return f"systematically off: {', '.join(row['known_bad'])}" if row["known_bad"] else ""
