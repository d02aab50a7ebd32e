"""Where the batch time comes from and goes to: shares by source (measured, …) and by operator group."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from windtunnel.metrics.steps import Steps
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.stage_times import whole

SOURCES = ("measured", "interpolated", "modelled")


def time_share(steps: Steps) -> dict[str, float]:
    """Share of the simulated step time by source: measured, interpolated, modelled; NaN where it is unknown."""
    return {
        **dict.fromkeys(SOURCES, float("nan")),
        **_shares(steps, steps.run.sources, "modelled", SOURCES),
    }


def group_share(steps: Steps) -> dict[str, float]:
    """Share of the simulated step time by operator group, and "host" for the time in which the GPU waits for it."""
    return _shares(steps, steps.run.groups, "host", ())


def _shares(
    steps: Steps, parts: tuple[dict[str, BatchTimes], ...], rest: str, names: tuple[str, ...]
) -> dict[str, float]:
    """Σ over the log of each part's own step time, over the whole.

    Host work that runs beside the GPU is left out of the parts, since it costs nothing while the GPU is slower; where
    it is not, the time that no part explains goes to ``rest``. The stages of a pipeline count one after the other.
    """
    total = float(steps.all_busy.sum())
    if not parts or total <= 0:
        return {}
    found = dict.fromkeys(names, 0.0)
    for name in dict.fromkeys(name for by_name in parts for name in by_name):
        times = (whole(table) for table in steps.run.times)
        tables = tuple(_part(by_name, name, table) for by_name, table in zip(parts, times, strict=True))
        if any(_weighs(table) for table in tables):
            found[name] = float(steps.run.iteration_times(tables).duration.sum())
        else:
            found.setdefault(name, 0.0)
    found[rest] = found.get(rest, 0.0) + max(total - sum(found.values()), 0.0)
    everything = sum(found.values())
    return {name: seconds / everything for name, seconds in found.items()}


def _part(parts: Mapping[str, BatchTimes], name: str, times: BatchTimes) -> BatchTimes:
    """The named part of one pool, without overlapped host work; all zero where the pool has no such part."""
    silent = np.zeros_like(times.host_overlapped)
    if name in parts:
        return replace(parts[name], host_overlapped=silent)
    return replace(
        times,
        decode_tokens=np.zeros_like(times.decode_tokens),
        mixed_tokens=np.zeros_like(times.mixed_tokens),
        sequences=silent,
        host_overlapped=silent,
        host_serial=silent,
        decode_attention=np.zeros_like(times.decode_attention),
        mixed_attention=np.zeros_like(times.mixed_attention),
        prefill_attention=np.zeros_like(times.prefill_attention),
        prefill_base=0.0,
        expert_tokens=np.zeros_like(times.expert_tokens),
    )


def _weighs(table: BatchTimes) -> bool:
    arrays = (
        table.decode_tokens,
        table.mixed_tokens,
        table.sequences,
        table.host_serial,
        table.decode_attention,
        table.mixed_attention,
        table.prefill_attention,
        table.expert_tokens,
    )
    return table.prefill_base > 0 or any(bool(array.any()) for array in arrays)
