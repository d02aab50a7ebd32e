"""Built-in workloads: generators fitted to public traces, so that nothing has to be downloaded.

The fits are data (``data/workloads.toml``), made by ``python -m benchmarks.fit_workloads``; docs/workloads.md shows
them next to the originals. No trace is shipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.errors import unknown
from windtunnel.files import read_toml
from windtunnel.workload.arrivals import AllAtOnce, Arrivals, Gamma, Modulated, Renewal
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Banded, Both, Lengths, Lognormal
from windtunnel.workload.quantiles import Quantiles
from windtunnel.workload.synthetic import Drawn, check_count, generate

Fit = Mapping[str, Any]
NO_TIMES = "the source has lengths only: Poisson arrivals at 1 request/s are our convention, not a fit"
"""What is noted of such a source as long as nobody gives a rate."""


@cache
def _fits() -> dict[str, Any]:
    return read_toml(Path(__file__).parents[1] / "data" / "workloads.toml")


def builtin_names() -> list[str]:
    """The names that `builtin` knows."""
    return sorted(_fits()["workloads"])


def fit_of(name: str) -> Fit:
    """The fitted numbers of a built-in workload; InputError gives the nearest name."""
    known = _fits()["workloads"]
    if name not in known:
        raise unknown("workload", name, known)
    fit: Fit = known[name]
    return fit


def builtin(
    name: str,
    *,
    seed: int = 0,
    num_requests: int | None = None,
    request_rate: float | None = None,
    max_concurrency: int = 0,
) -> Workload:
    """A workload like the trace of this name: by default as many requests at the same rate.

    Another number or rate stretches the trace's drift of the rate over the whole run; burstiness and lengths stay.
    ``request_rate=inf`` sends all requests at 0. The last request arrives at exactly num_requests / request_rate.
    Assumptions behind a workload whose source publishes no times or lengths are in the workload's notes.
    """
    fit = fit_of(name)
    count = fit["num_requests"] if num_requests is None else num_requests
    rate = fit["request_rate"] if request_rate is None else request_rate
    check_count("num_requests", count)
    arrivals = arrivals_of(fit, rate, count)
    workload = generate(arrivals, lengths_of(fit), count, seed, max_concurrency=max_concurrency, name=name)
    drawn = (NO_TIMES,) if "no_times" in fit and request_rate is None else ()
    return replace(workload, notes=(*((fit["assumed"],) if "assumed" in fit else ()), *drawn))


def in_pieces(name: str, num_requests: int, seed: int = 0) -> Drawn:
    """``builtin(name)`` with any number of requests, piece by piece."""
    fit = fit_of(name)
    return Drawn(arrivals_of(fit, fit["request_rate"], num_requests), lengths_of(fit), num_requests, seed, name)


def arrivals_of(fit: Fit, request_rate: float, num_requests: int) -> Arrivals:
    """The arrival process of a fit at another rate, its drift stretched over num_requests / request_rate seconds."""
    if math.isinf(request_rate):
        return AllAtOnce()
    steady: Arrivals
    if "gaps" in fit:
        shape = Quantiles(tuple(_fits()["levels"]["gaps"]), tuple(fit["gaps"]))
        steady = Renewal(request_rate, shape, exact_duration=True)
    else:
        steady = Gamma(request_rate, fit.get("burstiness", 1.0), exact_duration=True)
    if "profile" not in fit:
        return steady
    return Modulated(steady, tuple(fit["profile"]), num_requests / request_rate / len(fit["profile"]))


def lengths_of(fit: Fit) -> Lengths:
    """The length distribution of a fit."""
    if "prompt_mean" in fit:
        return Both(
            Lognormal(fit["prompt_mean"], fit["prompt_sigma"]), Lognormal(fit["output_mean"], fit["output_sigma"])
        )
    levels = _fits()["levels"]
    outputs = tuple(Quantiles(tuple(levels["output"]), tuple(band)) for band in fit["outputs"])
    return Banded(Quantiles(tuple(levels["prompt"]), tuple(fit["prompt"])), outputs)
