"""Workloads: what arrives when, how long it is, and where it comes from."""

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
from windtunnel.workload.own_files import save
from windtunnel.workload.prompts import prefix_repetition, sessions
from windtunnel.workload.synthetic import generate, stream
from windtunnel.workload.traces import FORMATS, load_trace
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
