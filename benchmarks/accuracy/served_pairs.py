"""Pairs of served points: how far the ratio of two simulated servers is from that of the measured ones.

Two points under the same load (lengths and clients) on servers that differ in something, or two of one server under
loads that differ in clients (then the difference counts for an octave between their numbers: divided by the square
root of the octaves) or in lengths. Which of the two is the first does not matter, so both orders count, and the
quantiles are symmetric. Of two servers with n pairs each counts 1/√n: many points of two servers say more about them,
but they are still two. ``served_errors`` writes what is derived here into its file.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import exp, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.points import Measured, by, sound
from windtunnel.metrics.evidence import QUANTILES, span
from windtunnel.metrics.pairs import BATCH, LENGTHS, Divergence, Table, Twin, common, differences, known_of, of_two

LEAST, SERVERS, FEW = 30, 5, 3
"""Pairs of points, their servers, and those of an engine's or a family's, without which nothing is said."""

SHOWN = 2
"""Kinds of differences of pairs that are told apart by engine and family, and stand in the report, at most."""

Pair = tuple[Measured, Measured]
Kind = tuple[str, ...]
"""What the servers of a pair differ in."""
Floats = NDArray[np.float64]


def twin(one: Measured) -> Twin:
    """The server of a point."""
    return Twin(one.server, one.version)


def pairs(points: Sequence[Measured]) -> dict[Kind, list[Pair]]:
    """Pairs of the points whose simulations are not known to be off, by what they differ in."""
    found: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    known = sound(points)
    for members in by(known, lambda one: (one.load, one.clients)).values():
        for pair in combinations(members, 2):
            if pair[0].setup != pair[1].setup:
                found[differences(*map(twin, pair))].append(pair)
    for members in by(known, lambda one: one.setup).values():
        for pair in combinations(members, 2):
            same = [len({getattr(one, name) for one in pair}) == 1 for name in ("load", "clients")]
            if same == [True, False]:
                found[BATCH].append(pair)
            elif same == [False, True]:
                found[LENGTHS].append(pair)
    return dict(found)


def octaves(pair: Pair) -> float:
    """How far apart the numbers of clients of two points are."""
    return abs(log2(int(pair[0].clients) / int(pair[1].clients)))


def distance(pair: Pair, name: str) -> float:
    """How far the simulated ratio of two points is from the measured one; of BATCH for an octave."""
    far = getattr(pair[1], name) - getattr(pair[0], name)
    one_server = pair[0].setup == pair[1].setup and pair[0].load == pair[1].load
    return float(far / sqrt(octaves(pair)) if one_server else far)


def measured_divergence(points: Sequence[Measured]) -> dict[tuple[Kind, Kind], Divergence]:
    """What pairs of points leave open, by what their servers differ in: of all, of an engine, and of a family on it."""
    found = {}
    for differ, members in sorted(pairs(points).items(), key=lambda item: (len(item[0]), item[0])):
        grouped: dict[Kind, list[Pair]] = defaultdict(list)
        for pair in members:
            of = common(*(one.server for one in pair))
            for length in range(len(of) + 1 if len(differ) <= SHOWN else 1):
                grouped[of[:length]].append(pair)
        for of, own in sorted(grouped.items()):
            one = _divergence(differ, of, own)
            if len(own) >= LEAST and one.servers >= (FEW if of else SERVERS) and (not of or len(own) < len(members)):
                found[differ, of] = one
    return found


def _divergence(differ: Kind, of: Kind, members: Sequence[Pair]) -> Divergence:
    servers = by_servers(members)
    weights = np.array([1 / sqrt(len(servers[key])) for key in map(servers_of, members)])
    steps, first = (symmetric([distance(pair, name) for pair in members], weights) for name in ("steps", "first_token"))
    return Divergence(differ, len(members), len({name for pair in servers for name in pair}), steps, first, of)


def servers_of(pair: Pair) -> tuple[str, ...]:
    """The two servers of a pair; of two loads of one server that one."""
    return tuple(sorted({one.setup for one in pair}))


def by_servers(members: Iterable[Pair]) -> dict[tuple[str, ...], list[Pair]]:
    """Pairs of points by their two servers."""
    found: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in members:
        found[servers_of(pair)].append(pair)
    return dict(found)


def symmetric(values: Sequence[float], weights: Floats) -> tuple[float, ...]:
    """Weighted quantiles of values and of their opposites."""
    sizes = np.abs(values)
    order = np.argsort(sizes)
    shares = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return tuple(
        float(np.sign(quantile - 0.5) * np.interp(abs(2 * quantile - 1), shares, sizes[order]))
        for quantile in QUANTILES
    )


def held(points: Sequence[Measured], table: Table) -> Iterator[tuple[Kind, bool, bool]]:
    """Whether the band of a table holds each pair of points: what they differ in, steps, first token."""
    for differ, members in pairs(points).items():
        for pair in members:
            of = common(*(one.server for one in pair))
            found = known_of(LENGTHS, of, table) if differ == LENGTHS else of_two(twin(pair[0]), twin(pair[1]), table)
            if found is None:
                continue
            inside = []
            for name in ("steps", "first_token"):
                low, high = found.factors(name)
                inside.append(low <= exp(distance(pair, name)) <= high)
            yield differ, inside[0], inside[1]


HEAD = (
    "the two differ in | of | pairs | of servers | TPOT | TTFT | each alone, TPOT | TTFT | held elsewhere, TPOT | TTFT"
)


def report(points: Sequence[Measured]) -> str:
    """What pairs leave open, beside what is open of each point alone, and the share of pairs of one half of the model
    families that is held by what those of the other half leave open."""
    table, (one, other) = measured_divergence(points), halves_of_families(points)
    checked: dict[Kind, list[tuple[bool, bool]]] = defaultdict(list)
    for differ, *inside in (*held(one, measured_divergence(other)), *held(other, measured_divergence(one))):
        checked[differ].append((inside[0], inside[1]))
    lines = [f"| {HEAD} |", "|---|---|" + "---:|" * 8]
    every = pairs(points)
    for (differ, of), found in table.items():
        if len(differ) > SHOWN or len(of) > 1:
            continue
        servers = [[each.server for each in pair] for pair in every[differ]]
        members = [pair for pair, keys in zip(every[differ], servers, strict=True) if common(*keys)[: len(of)] == of]
        cells = [differ_words(differ), ", ".join(of) or "all", f"{found.pairs:,}", f"{found.servers:,}"]
        cells += [span(found.factors(name)) for name in ("steps", "first_token")]
        for name in ("steps", "first_token"):
            logs = [getattr(each, name) for pair in members for each in pair]
            low, high = np.exp(np.quantile(logs, (0.05, 0.95))).tolist()
            cells.append(span((low, high)))
        entries = [] if of else checked.get(differ, [])
        cells += [f"{np.mean([entry[place] for entry in entries]):.0%}" if entries else "" for place in (0, 1)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differ_words(differ: Kind) -> str:
    """For a reader."""
    words: dict[Kind, str] = {
        BATCH: "clients of one server, twice as many",
        LENGTHS: "lengths on one server",
    }
    return words.get(differ, ", ".join(differ))


def halves_of_families(points: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Two halves that have no model family in common, of about as many points."""
    families = sorted(by(points, lambda one: one.server.family).values(), key=len, reverse=True)
    halves: tuple[list[Measured], list[Measured]] = ([], [])
    for members in families:
        min(halves, key=len).extend(members)
    return halves
