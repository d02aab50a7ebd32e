"""Workloads: what arrives when, how long it is, and where it comes from.

What reads and writes files of requests is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from windtunnel.workload.arrivals import AllAtOnce, Arrivals, Constant, Gamma, Modulated, Poisson, Ramp, Renewal, Replay
from windtunnel.workload.builtin import builtin, builtin_names
from windtunnel.workload.columns import Workload
from windtunnel.workload.describe import describe
from windtunnel.workload.lengths import (
    Banded,
    Both,
    Empirical,
    Fixed,
    Lengths,
    Lognormal,
    RangeRatio,
    Split,
    Uniform,
    Zipf,
)
from windtunnel.workload.prompts import prefix_repetition, sessions
from windtunnel.workload.synthetic import generate, stream
from windtunnel.workload.transforms import (
    at_rate,
    copies,
    cut_to,
    head,
    repeat,
    scale_time,
    with_concurrency,
    with_lanes,
    with_recorded_answers,
    with_sessions,
    with_think_time_at_most,
)

if TYPE_CHECKING:
    from windtunnel.workload.own_files import save
    from windtunnel.workload.traces import FORMATS, load_trace

_HOME = {"FORMATS": "traces", "load_trace": "traces", "save": "own_files"}

__all__ = [
    "FORMATS",
    "AllAtOnce",
    "Arrivals",
    "Banded",
    "Both",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "Lognormal",
    "Modulated",
    "Poisson",
    "Ramp",
    "RangeRatio",
    "Renewal",
    "Replay",
    "Split",
    "Uniform",
    "Workload",
    "Zipf",
    "at_rate",
    "builtin",
    "builtin_names",
    "copies",
    "cut_to",
    "describe",
    "generate",
    "head",
    "load_trace",
    "prefix_repetition",
    "repeat",
    "save",
    "scale_time",
    "sessions",
    "stream",
    "with_concurrency",
    "with_lanes",
    "with_recorded_answers",
    "with_sessions",
    "with_think_time_at_most",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
