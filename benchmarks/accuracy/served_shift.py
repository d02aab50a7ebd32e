"""Shift: by how much the expected time per token of a group of servers moves to what was measured of them.

A group is an (engine, family, device). Its shift is the median of log(measured ÷ simulated) of its time per token,
drawn to zero as few loads know it. It is kept where it helps out of sample: each server (dtype, model, layout) is left
out in turn, and the medians of those left out must come nearer by GAIN. First tokens do not move: their medians made
things worse but for the very same server, which a calibration is for.

``python -m benchmarks.accuracy.served_shift`` prints the groups of ``data/served_errors.toml`` with what this is worth.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.accuracy.points import Measured
from windtunnel.metrics.evidence import KEYS, MIDDLE, PRIOR, Group, Groups, served_groups

GROUP, SERVERS = 3, 3
"""Length of the key of a group, and servers that it must have."""
GAIN = 0.002
"""By which the median |log| of servers left out must fall: less is chance."""

Key = tuple[str, ...]


def shrunk(groups: Sequence[Group]) -> float:
    """The median of groups' medians, by their points, drawn to zero: loads count as n / (n + PRIOR)."""
    loads = sum(one.loads for one in groups)
    return weighted_median([one.steps[MIDDLE] for one in groups], groups) * loads / (loads + PRIOR)


def weighted_median(values: Sequence[float], groups: Sequence[Group]) -> float:
    """The median of values that count as often as their groups have points."""
    return float(np.median(np.repeat(values, [one.points for one in groups])))


def left_out(servers: Sequence[Group]) -> tuple[float, float]:
    """Median |log| of servers as simulated, and with the shift of all others."""
    raw = [abs(one.steps[MIDDLE]) for one in servers]
    moved = [abs(one.steps[MIDDLE] - shrunk([other for other in servers if other is not one])) for one in servers]
    return weighted_median(raw, servers), weighted_median(moved, servers)


def servers_of(groups: Groups) -> dict[Key, list[Group]]:
    """The servers of every group that has enough of them."""
    found: dict[Key, list[Group]] = defaultdict(list)
    for key, one in groups.items():
        if len(key) == len(KEYS) and not one.known_bad and key[:GROUP] in groups:
            found[key[:GROUP]].append(one)
    return {key: servers for key, servers in found.items() if len(servers) >= SERVERS}


def shifted_groups(groups: Groups) -> dict[Key, Group]:
    """The groups with their shifts, where those help."""
    found = {key: replace(one, shift=0.0) for key, one in groups.items()}
    for key, servers in servers_of(groups).items():
        before, after = left_out(servers)
        if before - after >= GAIN:
            found[key] = replace(found[key], shift=round(shrunk([groups[key]]), 3))
    return found


def moved(one: Measured, known: Groups) -> float:
    """The shift of a point's server."""
    group = known.get(one.server[:GROUP])
    return group.shift if group else 0.0


def error(logs: Sequence[float]) -> float:
    """Median of |simulated ÷ measured − 1|."""
    return float(np.median(np.abs(np.expm1(-np.array(logs)))))


def main() -> None:
    """Print the groups, and what the shift of the others is worth to a server that is left out."""
    known = shifted_groups(served_groups())
    raw, moved_, weights = [], [], []
    for key, servers in sorted(servers_of(known).items()):
        (before, after), shift = left_out(servers), known[key].shift
        print(f"{', '.join(key)}: {len(servers)} servers, |log| {before:.3f}, left out {after:.3f}; shift {shift}")
        raw.append(before)
        moved_.append(after if shift else before)
        weights.append(known[key])
    before, after = (weighted_median(values, weights) for values in (raw, moved_))
    print(f"all: {before:.3f}, {after:.3f} with the shifts that are kept")


if __name__ == "__main__":
    main()
