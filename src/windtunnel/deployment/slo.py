"""Service-level objectives: limits that every request should meet, and limits on percentiles over all requests."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown, warn

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
PERCENTILE_METRICS = ("ttft", "tpot", "itl", "e2el", "queue")
ATTAINMENT = 0.9
"""Share of requests that must keep the limits of a request by default (DistServe's choice)."""
UNITS = {"ms": 1e-3, "s": 1.0}
DOUBTFUL = (1e-3, 100.0)
"""Seconds between which a limit without a unit is taken without a warning."""
FIRST_TOKEN = ("ttft", "queue")
"""Latencies up to the first token, which have other causes besides the steps."""


class PercentileLimit(NamedTuple):
    """``metric`` at ``percentile`` over all requests must be ≤ ``seconds``."""

    metric: str
    percentile: float
    seconds: float


@dataclass(frozen=True)
class SLO:
    """Limits in seconds. A request is good when it meets ``ttft``, ``tpot`` and ``e2el``; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None
    percentiles: tuple[PercentileLimit, ...] = ()

    def __post_init__(self) -> None:
        for name in GOODPUT_METRICS:
            value = getattr(self, name)
            if value is not None:
                _require_seconds(name, value)
        for limit in self.percentiles:
            if limit.metric not in PERCENTILE_METRICS:
                raise unknown("metric", limit.metric, PERCENTILE_METRICS)
            if not 0 < limit.percentile <= 100:
                raise InputError(f"{limit.metric}_p{limit.percentile:g}: a percentile must be > 0 and ≤ 100")
            _require_seconds(limit.metric, limit.seconds)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that every request should meet, by metric."""
        values = {name: getattr(self, name) for name in GOODPUT_METRICS}
        return {name: value for name, value in values.items() if value is not None}

    def with_later_first_tokens(self, factor: float) -> "SLO":
        """The limits that say of first tokens (and queues) what these say of such that come that many times as late."""
        percentiles = tuple(
            limit._replace(seconds=limit.seconds / factor) if limit.metric in FIRST_TOKEN else limit
            for limit in self.percentiles
        )
        ttft = None if self.ttft is None else self.ttft / factor
        return replace(self, ttft=ttft, percentiles=percentiles)

    def divided_by(self, factor: float) -> "SLO":
        """The limits that say of all latencies what these say of such that are that many times as long."""
        limits = {name: value / factor for name, value in self.limits.items()}
        percentiles = tuple(limit._replace(seconds=limit.seconds / factor) for limit in self.percentiles)
        return replace(self, percentiles=percentiles, **limits)

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self.limits or self.percentiles)


def limits_of(limits: Mapping[str, float]) -> SLO:
    """``{"ttft": 0.3, "tpot": 0.05}``, seconds, as an SLO. Raises InputError for another name."""
    for name in limits:
        if name not in GOODPUT_METRICS:
            raise unknown("goodput metric", name, GOODPUT_METRICS)
    return SLO(limits.get("ttft"), limits.get("tpot"), limits.get("e2el"))


def parse_goodput(texts: Iterable[str]) -> SLO:
    """``["ttft:300", "tpot:50"]``, milliseconds as vLLM's ``--goodput``, or with units (``ttft:0.3s``), as an SLO.

    Raises InputError otherwise; warns of a bare number under 1 ms or above 100 s.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if name not in GOODPUT_METRICS:
            raise unknown("goodput metric", name, GOODPUT_METRICS)
        if not colon:
            raise InputError(f"goodput {text!r}: must be METRIC:TIME, e.g. ttft:300 (ms) or ttft:0.3s")
        if name in limits:
            raise InputError(f"goodput {text!r}: {name} is given twice")
        limits[name] = _seconds(text, value, "ms")
    return SLO(limits.get("ttft"), limits.get("tpot"), limits.get("e2el"))


def parse_slo(texts: Iterable[str]) -> tuple[PercentileLimit, ...]:
    """``["ttft_p99=0.3"]``, seconds, or with units (``300ms``), as limits on percentiles.

    Raises InputError for anything else; warns as ``parse_goodput``.
    """
    limits: list[PercentileLimit] = []
    for text in texts:
        name = re.split("[_=]", text)[0]
        if name not in PERCENTILE_METRICS:
            raise unknown("metric", name, PERCENTILE_METRICS)
        match = re.fullmatch(r"([a-z0-9]+)_p(\d+(?:\.\d+)?)=(.+)", text)
        if not match:
            raise InputError(f"slo {text!r}: must be METRIC_pPERCENTILE=TIME, e.g. ttft_p99=0.3 (s) or ttft_p99=300ms")
        limit = PercentileLimit(match[1], float(match[2]), _seconds(text, match[3], "s"))
        SLO(percentiles=(limit,))
        if any((one.metric, one.percentile) == (limit.metric, limit.percentile) for one in limits):
            raise InputError(f"slo {text!r}: {limit.metric} at this percentile is given twice: leave one out")
        limits.append(limit)
    return tuple(limits)


def _seconds(text: str, value: str, unit: str) -> float:
    """``300``, ``300ms`` or ``0.3s`` in seconds; a bare number has the flag's own unit.

    Raises InputError for anything else.
    """
    match = re.fullmatch(r"\s*(.*?)\s*(ms|s|)\s*", value)
    assert match is not None
    try:
        seconds = float(match[1]) * UNITS[match[2] or unit]
    except ValueError as error:
        raise InputError(f"{text!r}: {value!r} is no time: write 300ms or 0.3s") from error
    if not match[2] and isfinite(seconds) and seconds > 0 and not DOUBTFUL[0] <= seconds <= DOUBTFUL[1]:
        other = next(name for name in UNITS if name != unit)
        warn(f"{text}: is {_time(seconds)}: if you mean {match[1]} {other}, write {match[1]}{other}")
    return seconds


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def _require_seconds(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise InputError(f"{name}={value}: a limit must be a positive number of seconds")


def goal_words(slo: SLO, attainment: float) -> str:
    """The limits in words; nothing without any."""
    limits = " and ".join(f"{name} ≤ {1e3 * value:g} ms" for name, value in slo.limits.items())
    found = [f"{100 * attainment:g} % of requests with {limits}"] if limits else []
    found += [f"{one.metric} p{one.percentile:g} ≤ {1e3 * one.seconds:g} ms" for one in slo.percentiles]
    return "; ".join(found)
