"""Describe a workload in numbers and in text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.workload.columns import Workload
from windtunnel.workload.rules import Floats, Integers

PERCENTILES = (10, 25, 50, 75, 90, 95, 99)
BARS = " ▏▎▍▌▋▊▉█"


def describe(workload: Workload) -> dict[str, Any]:
    """Rows, rate, burstiness and lengths as a JSON-able dictionary (None where a number does not exist).

    ``gap_cv`` is the coefficient of variation of the gaps between arrivals (1 for Poisson) and ``burstiness`` =
    1/gap_cv² the gamma shape of `vllm bench serve` that has it. ``rate_cv`` is that of the requests per minute over
    whole minutes, minus what a Poisson process of the mean rate would show: 0 means no drift.
    ``correlation`` is Spearman's, of prompt and output tokens.
    """
    gaps = np.diff(workload.arrival[~np.isnan(workload.arrival)])
    cv = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else math.nan
    summary = {
        **workload.spec(),
        "gap_cv": cv,
        "burstiness": 1 / cv**2 if cv > 0 else math.nan,
        "rate_cv": rate_cv(workload.arrival),
        "prompt_tokens": lengths(workload.prompt_tokens),
        "output_tokens": lengths(workload.output_tokens),
        "prompt_to_output": float(workload.prompt_tokens.sum() / workload.output_tokens.sum()),
        "correlation": rank_correlation(workload.prompt_tokens, workload.output_tokens),
        "declared_limits": int(np.count_nonzero(workload.max_tokens != workload.output_tokens)),
        "priorities": len(np.unique(workload.priority)),
        **_sessions(workload),
        **_sharing(workload),
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in summary.items()
    }


def lengths(values: Integers | Floats) -> dict[str, float]:
    """Mean, least, most and percentiles (linear interpolation) of token counts or seconds."""
    levels = np.percentile(values, PERCENTILES)
    shown = {f"p{level}": float(value) for level, value in zip(PERCENTILES, levels, strict=True)}
    return {"mean": float(values.mean()), "min": values.min().item(), **shown, "max": values.max().item()}


def rate_cv(arrival: Floats, window: float = 60.0) -> float:
    """Relative spread of the rate between windows (s) beyond Poisson noise; NaN below three windows."""
    released = arrival[~np.isnan(arrival)]
    windows = int((released[-1] - released[0]) // window)
    if windows < 3:
        return math.nan
    counts = np.histogram(released - released[0], bins=windows, range=(0, windows * window))[0]
    return float(math.sqrt(max(counts.var() - counts.mean(), 0.0)) / counts.mean())


def rank_correlation(a: Integers, b: Integers) -> float:
    """Spearman's rank correlation, ties given their mean rank; NaN when one side does not vary."""
    ranks = [_mean_ranks(side) for side in (a, b)]
    if min(float(side.std()) for side in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _mean_ranks(values: Integers) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2.0)[group]
    return ranks


def _sessions(workload: Workload) -> dict[str, Any]:
    members = workload.session >= 0
    turns = int(np.count_nonzero(members))
    sessions = len(np.unique(workload.session[members]))
    offsets, parents = workload.waits
    waiting = np.diff(offsets) > 0
    think = workload.think_time[waiting]
    return {
        "sessions": sessions,
        "turns_per_session": turns / sessions if sessions else math.nan,
        "depth": depth(workload),
        "forks": int(np.count_nonzero(np.bincount(parents) > 1)) if len(parents) else 0,
        "joins": int(np.count_nonzero(np.diff(offsets) > 1)),
        "mean_think_time": float(think.mean()) if len(think) else math.nan,
        "think_time": lengths(think) if len(think) else None,
    }


def depth(workload: Workload) -> int:
    """The most requests of which each waits for the one before."""
    offsets, parents = (part.tolist() for part in workload.waits)
    found: list[int] = []
    for row in range(len(workload)):  # parents stand before their children
        found.append(1 + max((found[parent] for parent in parents[offsets[row] : offsets[row + 1]]), default=0))
    return max(found)


def _sharing(workload: Workload) -> dict[str, Any]:
    """Share of hashed blocks that an earlier request had already (what an endless prefix cache would hit)."""
    if workload.hash_ids is None or not len(workload.hash_ids[1]):
        return {"blocks": 0, "shared_blocks": math.nan}
    values = workload.hash_ids[1]
    return {"blocks": len(values), "shared_blocks": 1 - len(np.unique(values)) / len(values)}


def histogram(values: npt.ArrayLike, bins: int = 20, log: bool = False) -> tuple[Floats, Integers]:
    """Edges (bins + 1) and counts of the values that are numbers; ``log`` for edges in equal ratios (values > 0)."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    low, high = float(numbers.min()), float(numbers.max())
    if low == high:
        high = low + 1
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high
    return edges, np.histogram(numbers, edges)[0].astype(np.int64)


def text_histogram(edges: Floats | Sequence[float], counts: Integers | Sequence[int], width: int = 40) -> list[str]:
    """One line per bin: its lower edge, a bar of at most ``width`` letters, its count."""
    most = max(int(max(counts)), 1)
    labels = [f"{edge:,.0f}" if edge >= 100 or edge == int(edge) else f"{edge:.3g}" for edge in list(edges)[:-1]]
    margin = max(map(len, labels))
    lines = []
    for label, count in zip(labels, counts, strict=True):
        eighths = round(int(count) * width * 8 / most)
        bar = BARS[-1] * (eighths // 8) + (BARS[eighths % 8] if eighths % 8 else "")
        lines.append(f"{label:>{margin}} {bar:<{width}} {int(count):,}".rstrip())
    return lines
