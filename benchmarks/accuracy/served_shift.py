"""Shift: by how much the estimate of a group of servers moves to what was measured of them, and what that is worth.

A group is an (engine, family, device), or one model in one dtype on one device whose simulations are known to be off.
Its shift is the median of log(measured ÷ simulated) of the time per token, drawn to zero as few loads know it; it is
kept where it made the errors of loads smaller that it was not taken from (folds), by GAIN at least. First tokens do not
move: their medians made things worse but for the very same server, which a calibration is for.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.accuracy.points import SMALLEST, Measured, by, known_bad, readable
from windtunnel.metrics.evidence import PRIOR

GROUP, ENOUGH = 3, 16
"""Length of the key of a group, and points that it must have."""
GAIN = 0.002
"""By which the median |log| of points outside must fall: less is chance."""

Key = tuple[str, ...]


def drawn_median(points: Sequence[Measured]) -> float:
    """The median of a group's steps, drawn to zero: loads count as n / (n + PRIOR)."""
    loads = len({(one.setup, one.load) for one in points})
    return float(np.median([one.steps for one in points])) * loads / (loads + PRIOR)


def grouped(points: Sequence[Measured]) -> dict[Key, list[Measured]]:
    """The readable points of every group; what is known to be wrong is in no other."""
    bad = known_bad(points)
    sound = [one for one in readable(points) if one.server[:SMALLEST] not in bad]
    found = by(sound, lambda one: one.server[:GROUP])
    return {**found, **{key: readable(members) for key, members in bad.items()}}


def shifts(parts: Sequence[Sequence[Measured]]) -> dict[Key, float]:
    """Group → shift, where that helps; ``parts``: folds that have no load of a server in common."""
    points = [one for part in parts for one in part]
    bad, found = set(known_bad(points)), {}
    for key, members in grouped(points).items():
        mine = [[one for one in part if one in set(members)] for part in parts]
        before, after = [], []
        for part in mine:
            others = [one for other in mine if other is not part for one in other]
            if part and others:
                moved = drawn_median(others)
                before += [abs(one.steps) for one in part]
                after += [abs(one.steps - moved) for one in part]
        helps = bool(before) and float(np.median(before)) - float(np.median(after)) >= GAIN
        if helps and (len(members) >= ENOUGH or key in bad):
            found[key] = drawn_median(members)
    return found


def moved(one: Measured, known: dict[Key, float]) -> float:
    """The shift of a point's server."""
    return known.get(one.server[:SMALLEST], known.get(one.server[:GROUP], 0.0))


def error(logs: Sequence[float]) -> float:
    """Median of |simulated ÷ measured − 1|."""
    return float(np.median(np.abs(np.expm1(-np.array(logs)))))
