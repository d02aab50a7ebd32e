"""Pairs: how far the ratio of two simulated servers is from the ratio of the two measured ones.

What simulations of two servers get wrong alike, such as the kernels of one device and engine, cancels out of their
ratio. What does not is known from measured servers, taken two by two under the same load: quantiles of the difference
of their log(measured ÷ simulated), by what the two differ in. Of one server with two numbers of clients it grows as a
random walk does, with the square root of the octaves between them: nothing is open between equal batches, the more the
further they are from each other. Quantiles of an engine's pairs, and of a model family's on it, are drawn towards those
of all by how few servers they have, as ``metrics.evidence`` does. ``benchmarks.accuracy.served_pairs`` derives them,
and ``data/served_errors.toml`` holds them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from math import copysign, exp, hypot, nan, sqrt
from typing import Any, NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.deployment.presets import preset
from windtunnel.metrics.evidence import (
    ENDS,
    MIDDLE,
    PRIOR,
    Doubt,
    Factors,
    Logs,
    ServerKey,
    doubt,
    drawn,
    errors_file,
    server_key,
    span,
)

BATCH: tuple[str, ...] = ("batch",)
LENGTHS: tuple[str, ...] = ("lengths",)
"""What two measurements of one server differ in: clients, for an octave of which the quantiles are; or lengths."""
OCTAVE = 1.0


class Twin(NamedTuple):
    """A server, as far as pairs tell servers apart."""

    key: ServerKey
    version: str
    """Of the engine."""


@dataclass(frozen=True)
class Divergence:
    """By which factors the ratio of two measured servers differs from that of the simulated ones."""

    differ: tuple[str, ...]
    """What the two servers of each pair differ in, e.g. ``("layout",)``; BATCH, LENGTHS: one server, two loads."""
    pairs: int
    """Pairs of measured points; 0 where none differ in so much: then the errors of both servers are taken to be
    independent of each other."""
    servers: int
    """Servers that they are of."""
    steps: Logs
    """Logs of factors on the times of a step."""
    first_token: Logs
    """Logs of factors on the times to first token."""
    of: tuple[str, ...] = ()
    """What both servers of each pair have in common: engine, model family; nothing: all pairs."""
    octaves: float | None = None
    """Of BATCH: how far apart the two batches are."""

    def times(self, factor: float) -> "Divergence":
        """Quantiles that many times as far from the simulated ratio."""
        steps, first = (tuple(factor * log for log in logs) for logs in (self.steps, self.first_token))
        return replace(self, steps=steps, first_token=first)

    def joined(self, other: "Divergence") -> "Divergence":
        """What is open where two servers differ in this and, independently, in something else."""
        steps, first = (
            tuple(copysign(hypot(one, two), one) for one, two in zip(own, theirs, strict=True))
            for own, theirs in ((self.steps, other.steps), (self.first_token, other.first_token))
        )
        return replace(self, differ=(*self.differ, *other.differ), steps=steps, first_token=first)

    def factors(self, latency: str, level: float = 0.9) -> Factors:
        """The factors at both ends; ``latency`` is steps or first_token."""
        low, high = ENDS[level]
        logs: Logs = getattr(self, latency)
        return exp(logs[low]), exp(logs[high])

    @property
    def words(self) -> str:
        """``412 measured pairs that differ in layout: TPOT -9…+10 %, TTFT -21…+27 %``."""
        ends = ", ".join(
            f"{name} {span(self.factors(key))}" for name, key in (("TPOT", "steps"), ("TTFT", "first_token"))
        )
        what, common = " and ".join(self.differ), "".join(f"{name}, " for name in self.of).removesuffix(", ")
        of = f" ({common})" if common else ""
        if not self.pairs:
            return f"no measured pairs that differ in {what}, errors taken as independent: {ends}"
        if self.octaves is None:
            return f"{self.pairs:,} measured pairs of servers{of} that differ in {what}: {ends}"
        batches = f"batches that differ by a factor of {2**self.octaves:.3g}"
        return f"{self.pairs:,} measured pairs of one server{of} with other numbers of clients; for {batches}: {ends}"


def differences(one: Twin, other: Twin) -> tuple[str, ...]:
    """What two servers differ in: names of KINDS in their order; BATCH where they are one server."""
    values = zip(ServerKey._fields, one.key, other.key, strict=True)
    found = {name for name, own, theirs in values if own != theirs}
    if "family" in found:
        found -= {"dtype"}
        found |= {"model"}
    found -= {"family"}
    if "engine" not in found and one.version != other.version:
        found.add("version")
    return tuple(name for name in KINDS if name in found) or BATCH


KINDS = ("engine", "version", "device", "model", "dtype", "layout")
"""What servers differ in, in the order of names."""


Table = Mapping[tuple[tuple[str, ...], tuple[str, ...]], Divergence]
"""By what the servers of a pair differ in, and what they have in common."""


@cache
def measured_pairs() -> Table:
    """The pairs of the file."""
    found = [
        Divergence(
            differ=tuple(row["differ"]),
            pairs=row["pairs"],
            servers=row["servers"],
            steps=tuple(row["steps"]),
            first_token=tuple(row["first_token"]),
            of=tuple(row["of"]),
        )
        for row in errors_file()["pair"]
    ]
    return {(one.differ, one.of): one for one in found}


def common(one: ServerKey, other: ServerKey) -> tuple[str, ...]:
    """Engine and model family of two servers, as far as they have them in common."""
    if one.engine != other.engine:
        return ()
    return (one.engine, one.family) if one.family == other.family else (one.engine,)


def known_of(differ: tuple[str, ...], of: tuple[str, ...], table: Table) -> Divergence | None:
    """The quantiles of pairs that differ in this, or in least more, of the smallest group, drawn towards the larger
    ones; None where there are none."""
    wide = [pairs for (names, group), pairs in table.items() if not group and set(differ) <= set(names)]
    if not wide:
        return None
    found = min(wide, key=lambda pairs: (len(pairs.differ), -pairs.pairs))
    for length in range(1, len(of) + 1):
        own = table.get((found.differ, of[:length]))
        if own is not None:
            weight = own.servers / (own.servers + PRIOR)
            steps, first = (
                drawn(getattr(own, name), getattr(found, name), weight) for name in ("steps", "first_token")
            )
            found = replace(own, steps=steps, first_token=first)
    return found


def divergence(
    one: Iterable[Mapping[str, Any]],
    other: Iterable[Mapping[str, Any]],
    *,
    octaves: float = OCTAVE,
    other_lengths: bool = False,
) -> Divergence:
    """What is open between two deployments: that of the two pools of which least is known.

    Args:
        one: what ``Pool.spec`` says of the pools of the first.
        other: of the second.
        octaves: how far apart their batches are, which matters between equal servers.
        other_lengths: whether their requests have other lengths as well.
    """
    pairs = [(_twin(own), _twin(theirs)) for own, theirs in product(one, other)]
    found = [of_two(*pair, octaves=octaves) for pair in pairs]
    widest = max(range(len(found)), key=lambda place: found[place].steps[-1] - found[place].steps[0])
    lengths = known_of(LENGTHS, common(*(twin.key for twin in pairs[widest])), measured_pairs())
    return found[widest].joined(lengths) if other_lengths and lengths else found[widest]


def of_two(one: Twin, other: Twin, table: Table | None = None, *, octaves: float = OCTAVE) -> Divergence:
    """What is open between two servers.

    Of pairs that differ in as much, or in least more, the quantiles; where there are none, or simulations of either
    server are known to be off, those of two independent errors: the square root of the sum of squared logs.
    """
    differ = differences(one, other)
    known = known_of(differ, common(one.key, other.key), measured_pairs() if table is None else table)
    if differ == BATCH and known is not None:
        return replace(known.times(sqrt(octaves)), octaves=octaves)
    doubts = [doubt(each.key, nan) for each in (one, other)]
    if known is None or any(found.nearest.known_bad for found in doubts):
        return _independent(differ, *doubts)
    return known


def _independent(differ: tuple[str, ...], one: Doubt, other: Doubt) -> Divergence:
    """Quantiles of the ratio of two servers whose errors know nothing of each other."""

    def of_ratio(name: str) -> Logs:
        below, above = getattr(one, name), getattr(other, name)
        middle = above[MIDDLE] - below[MIDDLE]
        sizes = [
            hypot(high - above[MIDDLE], below[MIDDLE] - low) for high, low in zip(above, reversed(below), strict=True)
        ]
        return tuple(middle + copysign(size, place - MIDDLE) for place, size in enumerate(sizes))

    return Divergence(differ, 0, 0, of_ratio("steps"), of_ratio("first_token"))


def _twin(pool: Mapping[str, Any]) -> Twin:
    return Twin(server_key(pool), preset(pool["engine"]["preset"]).version)
