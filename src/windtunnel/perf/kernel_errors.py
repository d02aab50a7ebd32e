"""Kernel errors: how wrong the time of one kernel may be, by its family, its source and its distance to the data.

``data/kernel_errors.toml`` holds the errors; ``python -m benchmarks.accuracy.kernel_errors`` derives that file by
taking points out of the kernel database and predicting them from the rest.
"""

from functools import cache
from pathlib import Path

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.files import read_toml
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, KernelTimes

ERRORS = Path(__file__).parents[1] / "data" / "kernel_errors.toml"

HOST = "host"
"""The family of work that no kernel does."""


@dataclass(frozen=True)
class FamilyErrors:
    """Relative errors of a family of kernels: standard deviations of the log of the time, a normal law's at the 90th
    percentile of what was found."""

    measured: float
    """Repeated measurements of one point."""
    interpolated: float
    """Every third token count (or context) taken out."""
    rule: float
    """What is derived from a table by rule, and has no data on any device: chunks with context, kernels that only move
    memory."""
    modelled: float
    """Shapes taken out: the efficiency of the nearest ones stands in."""
    roofline: float
    """Nothing but the device's specification and the efficiency of a similar one."""


def relative_error(kernel: Kernel, found: KernelTimes) -> Floats:
    """Standard deviation of the log of each time.

    A kernel beyond its data keeps the error of other shapes for the first octave, and half as much again is added for
    every further one; without any data the roofline's error holds, and nothing is thought worse than that.
    """
    errors = family_errors(kernel.error_family)
    octaves = np.nan_to_num(found.distance, nan=0.0, posinf=0.0)
    further = errors.modelled * (1.0 + 0.5 * np.maximum(octaves - 1.0, 0.0))
    worst = max(errors.roofline, errors.modelled)
    modelled = np.where(np.isinf(found.distance), worst, np.minimum(further, worst))
    modelled = np.where(np.isnan(found.distance), errors.rule, modelled)
    near = np.where(found.sources == INTERPOLATED, errors.interpolated, modelled)
    return np.where(found.sources == MEASURED, errors.measured, near)


def family_errors(family: str) -> FamilyErrors:
    """The errors of a family; ``other`` stands in for one that was not derived."""
    table = _errors()
    return table.get(family, table["other"])


@cache
def _errors() -> dict[str, FamilyErrors]:
    return {name: FamilyErrors(**values) for name, values in read_toml(ERRORS).items()}
