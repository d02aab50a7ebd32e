"""Served points beside their simulations, as ``validate --csv`` writes them, and which of them say something."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, TypeVar

import numpy as np

from windtunnel.metrics.evidence import ServerKey

SMALLEST = 5
"""Length of the key of what may be known to be wrong: one model in one dtype on one device."""

FEW, ODD = 5, 0.1
"""Points that can say that a group is known to be wrong: its median beyond OFF, its 90 % band beyond SPREAD, or a
larger share of them than ODD unreadable."""
OFF = {"steps": log(1.3), "first_token": log(1.75)}
SPREAD = {"steps": log(2.5), "first_token": log(6.0)}

One = TypeVar("One")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Measured:
    """One served point beside its simulation."""

    server: ServerKey
    setup: str
    """Which of the independent servers it was."""
    load: str
    error: float
    """Relative error of its kernels."""
    steps: float
    """log(measured ÷ simulated) of the time per output token."""
    first_token: float
    """Of the time to first token."""
    unreadable: bool = False
    clients: str = ""
    """How many requests were in flight."""

    @property
    def version(self) -> str:
        """Of the engine."""
        return self.setup.rpartition("/")[2]


SAME = ("backend", "system", "isl", "osl", "concurrency")
"""Rows that are equal in these and, to nine digits, in what was measured tell of one measurement."""


def measured(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """The points that were simulated, from the lines of ``validate --csv``: each measurement once."""
    found: dict[tuple[str, ...], Measured] = {}
    for one in rows:
        if not one["reason"]:
            latencies = (f"{float(one[name]):.9g}" for name in ("ttft_measured", "tpot_measured"))
            found.setdefault((*(str(one[name]) for name in SAME), *latencies), _measured(one))
    return list(found.values())


def _measured(one: Mapping[str, Any]) -> Measured:
    server = ServerKey(*(str(one[name]) for name in ("backend", "family", "system", "dtype", "checkpoint", "layout")))
    steps, first = (log(float(one[f"{name}_measured"]) / float(one[f"{name}_simulated"])) for name in ("tpot", "ttft"))
    return Measured(
        server=server,
        setup="/".join([*server, str(one["version"])]),
        load=f"{one['isl']}/{one['osl']}",
        error=float(one["kernel_error"]),
        steps=steps,
        first_token=first,
        unreadable=bool(one["unreadable"]),
        clients=str(one["concurrency"]),
    )


def by(points: Iterable[One], key: Callable[[One], Value]) -> dict[Value, list[One]]:
    """Points by a key."""
    found: dict[Value, list[One]] = defaultdict(list)
    for one in points:
        found[key(one)].append(one)
    return dict(found)


def readable(points: Iterable[Measured]) -> list[Measured]:
    """The points that say something."""
    return [one for one in points if not one.unreadable]


def known_bad(points: Iterable[Measured]) -> dict[tuple[str, ...], list[Measured]]:
    """The points of servers whose simulations are known to be wrong, by the first SMALLEST parts of their key."""
    return {key: members for key, members in by(points, lambda one: one.server[:SMALLEST]).items() if is_bad(members)}


def sound(points: Sequence[Measured]) -> list[Measured]:
    """The points that can be read, of servers whose simulations are not known to be wrong."""
    bad = known_bad(points)
    return [one for one in readable(points) if one.server[:SMALLEST] not in bad]


def is_bad(points: Sequence[Measured]) -> bool:
    """Whether simulations of these servers are known to be wrong: far off, anywhere, or of points that say little."""
    said = readable(points)
    if len(said) < FEW:
        return False
    if len(said) < (1 - ODD) * len(points):
        return True
    for name, limit in OFF.items():
        low, middle, high = np.quantile([getattr(one, name) for one in said], (0.05, 0.5, 0.95))
        if abs(middle) > limit or high - low > SPREAD[name]:
            return True
    return False
