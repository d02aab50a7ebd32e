"""Derive ``data/served_errors.toml`` from served points:
``python -m benchmarks.accuracy.served_errors [points.csv [separate.jsonl]]``.

``points.csv`` is what ``windtunnel validate silicon_sample.csv --mode agg --csv points.csv`` writes; without it, the
points are replayed here. ``separate.jsonl`` are separate workers (``separate_workers``); without it, what the file says
of them stays. The file goes to standard output, what the check found to standard error.

The file is made of all points that can be read. The check divides the points of each (engine, family, device) into two
halves, so that each half has every server and every load but no load of a server is in both; one half decides, and the
share of the other half's measured values within their bands counts, unreadable points among them. That is done for
both halves of DIVISIONS divisions. Servers of a group that is left out altogether are checked, too.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy import served_pairs
from benchmarks.accuracy.points import FEW, OFF, Measured, by, known_bad, measured, readable, sound
from benchmarks.accuracy.separate_workers import Medians, medians, replayed
from windtunnel.errors import InputError
from windtunnel.metrics.evidence import (
    CHAIN,
    ENDS,
    KEYS,
    MIDDLE,
    PRIOR,
    QUANTILES,
    Doubt,
    Group,
    Groups,
    Logs,
    Separate,
    doubt,
    errors_file,
)
from windtunnel.metrics.pairs import Divergence
from windtunnel.validation.served_points import read_points
from windtunnel.validation.served_replay import replay_all, row

LEVEL = 0.9
DIVISIONS, FOLDS = 4, 4

GROUP = 3
"""Length of the key of the groups whose coverage counts: engine, family, device."""
LEAST = 30
"""Points of a group whose coverage is reported alone."""
EVEN = (0.75, 0.99)
"""Share of the points of such a group, left out altogether, that its bands should hold."""
MANY, FAR = 50, {"steps": 0.12, "first_token": 0.22}
"""Points of a group whose median error should not be larger than this."""
ENOUGH = 16
"""Points of a group whose width is adjusted."""
KEPT = {"steps": (0.84, 0.92), "first_token": (0.9, 0.95)}
"""A group's width stays as it is while the share of its other loads within it lies between these."""
KEPT_ELSEWHERE = dict.fromkeys(KEPT, (LEVEL, LEVEL))
"""The same of groups that are left out altogether: nothing of their own says that the width may stay as it is."""
NARROWEST, WIDEST = 0.6, 2.0

Floats = NDArray[np.float64]


def in_order(names: Iterable[str], salt: str) -> list[str]:
    """Names in the order of a hash: any order, but always the same."""
    return sorted(set(names), key=lambda name: sha256(f"{salt}{name}".encode()).hexdigest())


def halves(points: Sequence[Measured], salt: str = "") -> tuple[list[Measured], list[Measured]]:
    """Two halves, see above: a chessboard of servers and loads."""
    found: tuple[list[Measured], list[Measured]] = ([], [])
    for members in by(points, lambda one: one.server[:GROUP]).values():
        setups, loads = (in_order((getattr(one, name) for one in members), salt) for name in ("setup", "load"))
        for one in members:
            found[(setups.index(one.setup) + loads.index(one.load)) % 2].append(one)
    return found


def folds(points: Sequence[Measured]) -> list[list[Measured]]:
    """FOLDS parts, the loads of a server in one each."""
    found: list[list[Measured]] = [[] for _ in range(FOLDS)]
    for members in by(points, lambda one: one.server[:GROUP]).values():
        units = in_order((one.setup + one.load for one in members), "")
        for one in members:
            found[units.index(one.setup + one.load) % FOLDS].append(one)
    return found


def groups(points: Sequence[Measured]) -> dict[tuple[str, ...], Group]:
    """Every group, with the widths that its own loads need where they are left out in turn; that of all servers is what
    a group needs that is left out altogether."""
    found, parts = plain_groups(points), folds(points)
    needed: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for part in parts:
        rest = plain_groups([one for other in parts if other is not part for one in other])
        for one in readable(part):
            needed[one.server[:GROUP]] += needed_widths(one, rest)
    for members, others in without_own(points):
        needed[()] += [widths for one in readable(members) for widths in needed_widths(one, others)]
    for key in found:
        if len(key) in (0, GROUP):
            enough = len(needed[key]) >= ENOUGH
            kept = KEPT if key else KEPT_ELSEWHERE
            found[key] = replace(found[key], width=adjusted(np.array(needed[key]), kept) if enough else (1.0, 1.0))
    return found


def without_own(points: Sequence[Measured]) -> Iterator[tuple[list[Measured], Groups]]:
    """The points of each group of servers, and the groups that are made of all other points."""
    for key, members in by(points, lambda one: one.server[:GROUP]).items():
        yield members, plain_groups([one for one in points if one.server[:GROUP] != key])


def adjusted(needed: Floats, kept: Mapping[str, tuple[float, float]] = KEPT) -> tuple[float, float]:
    """The factors (steps, first token) with which a group holds no less and no more than these shares of its points."""
    factors = []
    for widths, shares_kept in zip(needed.T, kept.values(), strict=True):
        least, most = np.quantile(widths, shares_kept)
        factors.append(float(np.clip(least if least > 1 else min(most, 1.0), NARROWEST, WIDEST)))
    return factors[0], factors[1]


def needed_widths(one: Measured, others: Groups) -> list[tuple[float, float]]:
    """How many times as wide the bands of a point would have to be; nothing for what is known to be wrong."""
    found = doubt(one.server, one.error, others)
    if found.nearest.known_bad:
        return []
    low, high = ENDS[LEVEL]
    widths = []
    for name in ("steps", "first_token"):
        logs, value = getattr(found, name), getattr(one, name)
        beyond = value - logs[MIDDLE]
        side = logs[high] - logs[MIDDLE] if beyond > 0 else logs[MIDDLE] - logs[low]
        widths.append(abs(beyond) / max(side, 0.01))
    return [(widths[0], widths[1])]


def plain_groups(points: Sequence[Measured]) -> dict[tuple[str, ...], Group]:
    """Every group of CHAIN with other servers than the one that it is in; what is known to be wrong is in no other."""
    bad, good = known_bad(points), sound(points)
    found: dict[tuple[str, ...], Group] = {}
    for length in range(len(CHAIN)):
        for key, members in sorted(by(good, lambda one, length=length: one.server[:length]).items()):  # type: ignore[misc]
            larger = next((found[key[:n]] for n in range(length - 1, -1, -1) if key[:n] in found), None)
            if larger is None or larger.points > len(members) or length == GROUP:
                found[key] = group(members, key)
                if length < GROUP:
                    found[key] = replace(found[key], elsewhere=elsewhere(good, key))
    return found | {key: replace(group(readable(members), key), known_bad=True) for key, members in sorted(bad.items())}


def elsewhere(points: Sequence[Measured], key: tuple[str, ...]) -> tuple[Logs, Logs]:
    """Quantiles (steps, first token) of a server with this key whose family was not measured on its device.

    The measured families on devices are exchangeable, each by n / (n + PRIOR) for its n loads, however many points it
    has; FEW points say nothing, since they cannot be known to be wrong either. Those of the same family weigh
    s / (s + PRIOR) for their sum s, those of the same engine as much of the rest, all of them what is left.
    """
    units = {
        unit: members for unit, members in by(points, lambda one: one.server[:GROUP]).items() if len(members) >= FEW
    }
    known = {unit: (loads := loads_of(members)) / (loads + PRIOR) for unit, members in units.items()}
    weights, left = dict.fromkeys(units, 0.0), 1.0
    for length in range(len(key), -1, -1):
        alike = [unit for unit in units if unit[:length] == key[:length]]
        total = sum(known[unit] for unit in alike)
        share = left * total / (total + PRIOR) if length else left
        for unit in alike:
            weights[unit] += share * known[unit] / total
        left -= share
    shares = [weights[unit] / len(members) for unit, members in units.items() for _ in members]
    counted = [one for members in units.values() for one in members]
    steps, first = (
        np.quantile([getattr(one, name) for one in counted], QUANTILES, weights=shares, method="inverted_cdf")
        for name in OFF
    )
    return tuple(steps.tolist()), tuple(first.tolist())


def loads_of(points: Iterable[Measured]) -> int:
    """Independent loads of servers among points."""
    return len({(one.setup, one.load) for one in points})


def around_other_loads(points: Sequence[Measured], name: str) -> list[float]:
    """Quantiles of how far the loads of a server lie from the median of its other loads: what a run of one's own leaves
    open. Servers whose simulations are known to be wrong are not asked."""
    distances: list[float] = []
    for members in by(sound(points), lambda one: one.setup).values():
        loads = by(members, lambda one: one.load)
        for load, own in loads.items():
            others = [getattr(one, name) for one in members if one.load != load]
            distances += [getattr(one, name) - float(np.median(others)) for one in own if others]
    return [float(value) for value in np.quantile(distances, QUANTILES)]


def group(points: Sequence[Measured], key: tuple[str, ...]) -> Group:
    """What was measured of these points."""
    steps, first = (np.quantile([getattr(one, name) for one in points], QUANTILES) for name in OFF)
    return Group(
        points=len(points),
        loads=loads_of(points),
        error=float(np.quantile([one.error for one in points], 0.95)),
        steps=tuple(steps.tolist()),
        first_token=tuple(first.tolist()),
        models=tuple(sorted({one.server.model for one in points})),
        key=key,
    )


@dataclass(frozen=True)
class Held:
    """Whether a band held a measured value, of steps and of the first token, and how wide the band of steps was."""

    one: Measured
    steps: bool
    first_token: bool
    width: float
    known_bad: bool


def held(points: Sequence[Measured], table: Groups) -> list[Held]:
    """What the bands of a table do with points."""
    found = []
    for one in points:
        said = doubt(one.server, one.error, table)
        steps, first = (said.factors(name, LEVEL) for name in OFF)
        inside = [
            low <= np.exp(getattr(one, name)) <= high for name, (low, high) in zip(OFF, (steps, first), strict=True)
        ]
        found.append(Held(one, bool(inside[0]), bool(inside[1]), steps[1] - steps[0], said.nearest.known_bad))
    return found


def checked(points: Sequence[Measured]) -> list[Held]:
    """Every point in the half that decides nothing, once in each division."""
    found = []
    for division in range(DIVISIONS):
        one, other = halves(points, str(division))
        found += held(other, groups(one)) + held(one, groups(other))
    return found


def left_out(points: Sequence[Measured]) -> list[Held]:
    """Every point with the bands of other groups than its own."""
    width = groups(points)[()].width
    found = []
    for members, others in without_own(points):
        found += held(members, dict(others) | {(): replace(others[()], width=width)})
    return found


@dataclass(frozen=True)
class Moved:
    """A point that can be read, and what a table moves it by."""

    one: Measured
    known: Doubt

    def left(self, name: str) -> float:
        """log(measured ÷ simulated) after it."""
        return float(getattr(self.one, name) - (self.known.shift if name == "steps" else self.known.first_shift))


def moved(points: Sequence[Measured], known: Groups) -> list[Moved]:
    """Points that can be read, as a table expects them."""
    return [Moved(one, doubt(one.server, one.error, known)) for one in readable(points)]


def shifted(points: Sequence[Measured]) -> str:
    """What the middle of other points' evidence is worth, in words: of the other half, and of all other servers."""
    halved, alone = [], []
    for division in range(DIVISIONS):
        one, other = halves(points, str(division))
        for half, rest in ((one, other), (other, one)):
            halved += moved(rest, plain_groups(half))
    for server, members in by(points, lambda one: one.server).items():
        alone += moved(members, plain_groups([one for one in points if one.server != server]))
    (tpot, tpot_after), (ttft, ttft_after) = (
        (typical(getattr(each.one, name) for each in halved), typical(each.left(name) for each in halved))
        for name in OFF
    )
    return (
        f"Median error of the half that decides nothing: tpot {tpot:.1%}, in the middle of what the other half knows "
        f"{tpot_after:.1%}, of what all servers but that one know {typical(each.left('steps') for each in alone):.1%}; "
        f"ttft {ttft:.1%}, {ttft_after:.1%} where the other half has the same server. {beyond(halved)}"
    )


def typical(logs: Iterable[float]) -> float:
    """Median relative error of times whose logs are off by these."""
    return float(np.median(np.abs(np.expm1(-np.array(list(logs))))))


def beyond(halved: Sequence[Moved]) -> str:
    """How many groups of MANY points are further off than FAR, in words."""
    large = [
        members
        for members in by(halved, lambda each: each.one.server[:GROUP]).values()
        if len({id(each.one) for each in members}) >= MANY
    ]
    before, after = (
        sum(
            any(typical(off(each, name) for each in members) > limit for name, limit in FAR.items())
            for members in large
        )
        for off in (lambda each, name: getattr(each.one, name), Moved.left)
    )
    limits = " or ".join(f"{limit:.0%} ({name})" for name, limit in zip(("tpot", "ttft"), FAR.values(), strict=True))
    return f"Of {len(large)} groups of {MANY} points {before} are beyond {limits}, {after} so moved."


def shares(found: Sequence[Held]) -> str:
    """How much bands hold, in words."""
    steps, first = (np.mean([getattr(one, name) for one in found]) for name in OFF)
    return f"{steps:.1%} of the measured tpot and {first:.1%} of the ttft"


def evenly(found: Sequence[Held]) -> str:
    """Of how many groups bands hold about nine tenths, in words."""
    least, most = EVEN
    large = [members for members in by_group(found).values() if len(members) >= LEAST]
    even = [sum(least <= np.mean([getattr(one, name) for one in members]) <= most for members in large) for name in OFF]
    return f"{even[0]} (tpot) and {even[1]} (ttft) of {len(large)} such groups are held to {least:.0%} to {most:.0%}"


def report(points: Sequence[Measured]) -> str:
    """What the check found, as a page has it."""
    found, elsewhere = checked(points), left_out(points)
    sound = [one for one in found if not one.known_bad]
    lines = [
        f"Bands of the half that decides hold {shares(sound)} of the other half ({DIVISIONS} divisions of "
        f"{len(points):,} points; median width of the tpot's {np.median([one.width for one in found]):.3f}). Servers "
        f"of a group that is left out altogether: {shares(elsewhere)}; {evenly(elsewhere)}. {shifted(points)}",
        "",
        "| engine | model family | device | points | tpot held | ttft held | tpot band | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    table = groups(points)
    for key, members in sorted(by_group(found).items()):
        if len(members) < LEAST * DIVISIONS:
            continue
        good = [one for one in members if not one.known_bad]
        steps, first = (np.mean([getattr(one, name) for one in good or members]) for name in OFF)
        bad = sorted({group.models[0] for name, group in table.items() if group.known_bad and name[:GROUP] == key})
        outside = "" if 0.8 <= steps <= 0.97 and 0.8 <= first <= 0.97 else "not held to 80-97 %"
        notes = [*([f"systematically off: {', '.join(bad)}"] if bad else []), *([outside] if outside and good else [])]
        width = np.median([one.width for one in members])
        lines.append(
            f"| {' | '.join(key)} | {len(members) // DIVISIONS} | {steps:.0%} | {first:.0%} | {width:.2f} "
            f"| {'; '.join(notes)} |"
        )
    return "\n".join(lines)


def by_group(found: Iterable[Held]) -> dict[tuple[str, ...], list[Held]]:
    """What bands held, by the group of the points."""
    grouped: dict[tuple[str, ...], list[Held]] = defaultdict(list)
    for one in found:
        grouped[one.one.server[:GROUP]].append(one)
    return dict(grouped)


def render(points: Sequence[Measured], separate: Medians) -> str:
    """The text of the file."""
    lines = [
        "# How far measured servers are from simulated ones: windtunnel/metrics/evidence.py reads this file.",
        "# Derived by `python -m benchmarks.accuracy.served_errors` from the served points of the kernel database.",
        f"# key: {', '.join(KEYS)}. steps, first_token: quantiles {', '.join(f'{100 * q:g}' for q in QUANTILES)} % of",
        "# log(measured / simulated).",
    ]
    lines += ["group = [", *(f"  {{ {', '.join(_entry(one))} }}," for one in groups(points).values()), "]"]
    lines += ["", "# differ: what the two servers of each pair of points differ in (windtunnel/metrics/pairs.py)."]
    lines += ["pair = [", *map(_pair, served_pairs.measured_divergence(points).values()), "]"]
    engines = by(points, lambda one: one.server.engine)
    for engine, members in {"all": list(points), **dict(sorted(engines.items()))}.items():
        lines += ["", f"[other_loads.{engine}]"]
        lines += [f"{name} = {_numbers(around_other_loads(members, name))}" for name in OFF]
    lines += ["", "# separate_workers: middles of log(measured / simulated) of separate prefill and decode workers."]
    for (engine, prompts), middle in separate.items():
        lines += [f"[separate_workers.{engine}.{prompts}]", f"families = {_texts(middle.families)}"]
        lines += [f"points = {middle.points}"]
        lines += [f"{name} = {getattr(middle, name):.3f}" for name in OFF]
    return "\n".join(lines) + "\n"


def known_separate() -> Medians:
    """What the file says of separate workers."""
    table = errors_file().get("separate_workers", {})
    return {
        (engine, prompts): Separate(**found | {"families": tuple(found["families"])}, engine=engine, prompts=prompts)
        for engine, lengths in table.items()
        for prompts, found in lengths.items()
    }


def _entry(one: Group) -> list[str]:
    parts = [f"key = {_texts(one.key)}", f"models = {_texts(one.models)}"]
    parts += [f"points = {one.points}", f"loads = {one.loads}", f"error = {one.error:.3f}"]
    parts += [f"{name} = {_numbers(getattr(one, name))}" for name in OFF]
    parts += [f"elsewhere = [{', '.join(map(_numbers, one.elsewhere))}]"] if one.elsewhere else []
    parts += [f"width = [{one.width[0]:.2f}, {one.width[1]:.2f}]"] if one.width else []
    return [*parts, *(["known_bad = true"] if one.known_bad else [])]


def _pair(one: Divergence) -> str:
    parts = [
        f"differ = {_texts(one.differ)}",
        f"of = {_texts(one.of)}",
        f"pairs = {one.pairs}",
        f"servers = {one.servers}",
    ]
    return f"  {{ {', '.join([*parts, *(f'{name} = {_numbers(getattr(one, name))}' for name in OFF)])} }},"


def _numbers(values: Iterable[float]) -> str:
    return f"[{', '.join(f'{value:.3f}' for value in values)}]"


def _texts(values: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


def main(paths: Sequence[str]) -> int:
    """Print the file and, on standard error, the check; 2 after a wrong input."""
    try:
        if paths:
            with Path(paths[0]).open(encoding="utf-8", newline="") as file:
                points = measured(one for one in csv.DictReader(file) if one["mode"] == "agg")
        else:
            points = measured(map(row, replay_all([point for point in read_points() if point.mode == "agg"])))
        separate = medians(replayed(Path(paths[1]))) if paths[1:] else known_separate()
    except (InputError, OSError) as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    sys.stdout.write(render(points, separate))
    sys.stderr.write(f"{report(points)}\n\n{served_pairs.report(points)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
