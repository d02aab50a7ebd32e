"""Findings: what a bench of capacities says, in sentences: the best case of each load, and what each axis decides."""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, isfinite, log

from windtunnel.metrics import Interval
from windtunnel.report.page import number

CAPACITY, PER_DOLLAR = "capacity", "capacity_per_dollar"
Known = Mapping[tuple[str, ...], Mapping[str, Interval]]
"""Numbers of a case by its names on the axes."""


def findings(axes: Sequence[str], load_axes: Sequence[int], cases: Known) -> list[str]:
    """Sentences; none for a bench that does not look for capacities."""
    known = {names: found for names, found in cases.items() if CAPACITY in found}
    return [*_best_of_loads(load_axes, known), *_of_axes(axes, load_axes, known)] if known else []


def _best_of_loads(load_axes: Sequence[int], known: Known) -> Iterator[str]:
    loads: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for names in known:
        loads.setdefault(tuple(names[place] for place in load_axes), []).append(names)
    for load, cases in loads.items():
        said, title = [], " ".join(load) or "the load"
        for measure, unit in ((CAPACITY, "requests/s"), (PER_DOLLAR, "requests/s per $/h")):
            values = {names: known[names][measure].mean for names in cases if measure in known[names]}
            best = max(values, key=lambda names: (values[names], names), default=None)
            if best is None or not values[best] > 0:
                continue
            rest = " ".join(name for place, name in enumerate(best) if place not in load_axes)
            said.append(f"{rest} ({number(values[best])} {unit})")
        none = sum(known[names][CAPACITY].mean == 0 for names in cases)
        text = f"{title}: most {', most for its price '.join(said)}" if said else f"{title}: nothing keeps the limits"
        yield text + (f"; {none} of {len(cases)} keep the limits at no rate" if none and said else "")


def _of_axes(axes: Sequence[str], load_axes: Sequence[int], known: Known) -> Iterator[str]:
    """Of each axis that is not of the load: its values by the mean share of the best value, all else being equal."""
    for place, axis in enumerate(axes):
        if place in load_axes:
            continue
        shares: dict[str, list[float]] = {}
        for rest in dict.fromkeys(names[:place] + names[place + 1 :] for names in known):
            alike = {names[place]: known[names] for names in known if names[:place] + names[place + 1 :] == rest}
            values = {name: found[CAPACITY].mean for name, found in alike.items()}
            most = max(values.values())
            for name, value in values.items():
                if most > 0 and value > 0 and isfinite(value):
                    shares.setdefault(name, []).append(log(value / most))
        if len(shares) < 2:
            continue
        means = {name: exp(sum(found) / len(found)) for name, found in shares.items()}
        order = sorted(means, key=lambda name: -means[name])
        yield f"{axis}, of the best one's capacity where both keep the limits: " + ", ".join(
            f"{name} {100 * means[name]:.0f} %" for name in order
        )
