"""Uncertainty: how wrong the times of a run's steps may be, from the errors of the kernels in them."""

from dataclasses import dataclass, replace

import numpy as np

from windtunnel.metrics.steps import Steps
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.kernel_errors import HOST, family_errors
from windtunnel.perf.stage_times import whole


@dataclass(frozen=True)
class Uncertainty:
    """Of all steps of a run together; NaN where its tables do not say."""

    error: float
    """Relative error of the step time (standard deviation of its log), as if all kernels erred the same way."""
    beyond: float
    """Share of the step time in kernels that were asked beyond the data, or on a device that has none."""


def uncertainty(steps: Steps) -> Uncertainty:
    """The errors of all kernels and of the host work, weighted by their time in the run.

    Kernels of a family err together, since they come from one table, and families are not told apart here: errors add
    up. What cancels in a measured server is the business of the served level (``windtunnel.bands``).
    """
    total = float(steps.all_busy.sum())
    if not steps.run.doubts or not all(steps.run.doubts) or total <= 0:
        return Uncertainty(float("nan"), float("nan"))
    host = family_errors(HOST).modelled * (total - _seconds(steps, tuple(whole(table) for table in steps.run.times)))
    error, beyond = (_seconds(steps, tuple(part[name] for part in steps.run.doubts)) for name in ("error", "beyond"))
    return Uncertainty((error + max(host, 0.0)) / total, beyond / total)


def _seconds(steps: Steps, tables: tuple[BatchTimes, ...]) -> float:
    """Seconds of all steps under these tables, without host work."""
    silent = tuple(
        replace(table, host_overlapped=np.zeros_like(table.host_serial), host_serial=np.zeros_like(table.host_serial))
        for table in tables
    )
    return float(steps.run.iteration_times(silent).duration.sum())
