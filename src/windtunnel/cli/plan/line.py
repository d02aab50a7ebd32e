"""The user's launch line among the deployments that plan searches: what to change in it, and what that saves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.cli.plan.flags import Available, Axes, Values, defaults, split
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.deployment import Deployment, Pool
    from windtunnel.plan.search_result import SearchResult
    from windtunnel.plan.space import Space

CHANGED = ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype")
"""What is searched around a line, besides what other flags name: what a restart changes. The rest stays."""
AS_IT_IS = {
    "pipeline_parallel_size": "1",
    "data_parallel_size": "1",
    "enable_expert_parallel": "false",
    "quantization": "stored",
}
"""Axes that keep the line's value, and what they are where it has none."""
OF_POOLS = ("store", "autoscale")
"""Words of a line that are texts; its stores together are one value of an axis."""
FROM_SPACE = ("router", "replicas", "device")


class Change(NamedTuple):
    """A setting that the best has otherwise."""

    name: str
    line: str
    best: str


class Judged(NamedTuple):
    """A line against the best that was found."""

    rate: float
    """Requests per second within the limits; 0: it keeps them at none, infinite: the load is too short to fill it."""
    price_per_hour: float
    gpus: int
    best_rate: float
    best_price_per_hour: float
    best_gpus: int
    changes: tuple[Change, ...]
    unit: str = "requests/s"
    """Of the rates; ``lanes`` of a load of sessions that all start at once."""
    flags: tuple[Change, ...] = ()
    """The changes of one server as flags of its engine."""

    @property
    def shown(self) -> tuple[Change, ...]:
        """What to change, for people: flags, and what no flag of a server says."""
        return (
            (*(each for each in self.changes if each.name in FROM_SPACE), *self.flags) if self.flags else self.changes
        )

    @property
    def saves(self) -> float:
        """Share of the line's cost of a request (of its GPU time where a price is not known) that the best saves."""
        priced = self.price_per_hour > 0 and self.best_price_per_hour > 0
        cost, best = (self.price_per_hour, self.best_price_per_hour) if priced else (self.gpus, self.best_gpus)
        if self.rate == 0:
            return 1.0
        if math.isinf(self.rate) or math.isinf(self.best_rate):
            return 1.0 - best / cost
        return 1.0 - (best / self.best_rate) / (cost / self.rate)

    @property
    def helps(self) -> bool:
        """Whether the best serves a request for less, by what a figure shows."""
        return bool(self.changes) and round(100 * self.saves) > 0

    @property
    def sentence(self) -> str:
        """For people: what the line serves, and what its changes save."""
        served = {0.0: "Your line keeps the limits at no rate", math.inf: "This load does not fill your line"}.get(
            self.rate, f"Your line serves {self.rate:.3g} {self.unit} within the limits on {_gpus(self.gpus)}"
        )
        if not self.helps:
            return f"{served}. Nothing that was searched serves a request for less."
        found = "it is not filled" if math.isinf(self.best_rate) else f"it serves {self.best_rate:.3g}"
        saved = "" if self.rate == 0 else f": {self._saved}"
        return f"{served}. With the changes below {found} on {_gpus(self.best_gpus)}{saved}."

    @property
    def _saved(self) -> str:
        share = round(100 * self.saves)
        what = "a request costs" if self.price_per_hour > 0 and self.best_price_per_hour > 0 else "a request takes"
        time = "" if what.endswith("costs") else " GPU time"
        return f"{what} {share} % less{time}"

    def spec(self) -> dict[str, Any]:
        """For JSON."""
        changes = [f"{change.name} {change.line} → {change.best}" for change in self.changes]
        found = {key: value for key, value in self._asdict().items() if key != "unit" or value == "lanes"}
        flags = [f"{change.name} {change.line} → {change.best}" for change in self.flags]
        found |= {"changes": changes, "flags": flags, "saves": self.saves}
        return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in found.items()}


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def space_of_line(
    lines: Sequence[str],
    model: str | None,
    axes: Axes,
    available: Available,
    devices_file: Path | None,
    routers: Values,
) -> "tuple[Space, Deployment]":
    """What is searched around launch lines, and the deployment that they are.

    Raises InputError for lines of one side, and for what cannot run.
    """
    from windtunnel.deployment.prices import priced
    from windtunnel.scenario import Scenario
    from windtunnel.scenario.pasted import read_pasted
    from windtunnel.scenario.scenario import vary

    pasted = read_pasted(lines, model)
    if sides := [role for role in ("prefill", "decode", "mixed") if role in pasted.words]:
        raise InputError(f"from: {sides[0]}: plan changes the line of one whole server: give that")
    if "hf_overrides" in pasted.words:
        raise InputError(
            "from: other values of the model's config are not searched: give --model a changed config.json"
        )
    usual = {"device": split(axes.devices)[0], "devices_file": devices_file}
    words = {key: value for key, value in usual.items() if value is not None} | dict(pasted.words)
    line = vary(Scenario(), words, "from: ").deployment()
    pools = tuple(replace(pool, device=priced(pool.device, available.prices)) for pool in line.pools)
    words = {axis: getattr(pools[0].engine, axis) for axis in CHANGED} | words
    return space_around(words, axes, available, devices_file, routers), replace(line, pools=pools)


def space_around(
    words: Mapping[str, Any], axes: Axes, available: Available, devices_file: Path | None, routers: Values
) -> "Space":
    """What is searched around a server, from its words: what a restart changes, and what flags name."""
    from windtunnel.model import load_model
    from windtunnel.plan.space import AND, AXES, typed_values

    name = str(words["model"])
    given = {entry.name for entry in fields(axes) if getattr(axes, entry.name) != getattr(Axes(), entry.name)}
    around = _around(words, defaults(load_model(name), routers), given)
    devices = tuple(split(axes.devices if "devices" in given else (str(words["device"]),)))
    searched = replace(axes, devices=devices, **around)
    space = available.priced(searched.space(name, available.constraints(), devices_file, routers))
    named = {text.partition("=")[0].replace("-", "_") for text in axes.axis}
    fixed = {
        axis: [value] if isinstance(value, tuple) else typed_values(axis, [value])
        for axis, value in words.items()
        if axis in AXES and axis not in (*CHANGED, *AS_IT_IS, *FROM_SPACE, *OF_POOLS, *given, *named)
    }
    if (stores := words.get("store")) and "store" not in named:
        fixed["store"] = (AND.join(stores),)
    return replace(space, axes={**fixed, **space.axes})


def _around(
    words: Mapping[str, Any], usual: Mapping[str, Sequence[str]], given: set[str]
) -> dict[str, tuple[str, ...]]:
    """The axes that the user leaves to the line: its value first, and for those of CHANGED the usual ones."""
    found = {}
    for axis in CHANGED:
        if axis not in given:
            first = _texts(words.get(axis))
            found[axis] = (*first, *(text for text in usual[axis] if text not in first))
    for axis, plain in AS_IT_IS.items():
        if axis not in given:
            found[axis] = _texts(words.get(axis)) or (plain,)
    return found


def _texts(value: Any) -> tuple[str, ...]:
    return () if value is None else (str(value).lower() if isinstance(value, bool) else str(value),)


def judged(line: "Deployment | None", answer: "SearchResult") -> Judged | None:
    """The line against the winner of a search; None without a line, or where nothing was found."""
    if line is None or answer.best is None:
        return None
    from windtunnel.plan.capacity import capacity

    best, rate = answer.measured(answer.best)
    found = capacity(line, answer.question)
    engine, other = line.pools[0].engine.spec(), best.pools[0].engine.spec()
    changes = [
        Change(name, str(engine[name]), str(other[name]))
        for name in answered(answer)
        if engine.get(name) != other.get(name)
    ]
    if line.pools[0].device != best.pools[0].device:
        changes.insert(0, Change("device", line.pools[0].device.name, best.pools[0].device.name))
    if line.replicas != best.replicas:
        changes.append(Change("replicas", str(line.replicas), str(best.replicas)))
    if line.router != best.router and best.replicas > 1:
        changes.append(Change("router", line.router, best.router))
    of_best, unit = (rate, best.price_per_hour, best.gpus), answer.question.unit
    flags = changed_flags(line.pools[0], best.pools[0])
    return Judged(found.rate, line.price_per_hour, line.gpus, *of_best, tuple(changes), unit, flags)


def changed_flags(pool: "Pool", other: "Pool") -> tuple[Change, ...]:
    """Flags of the command that starts a server, and what they are for another one; none where no command starts
    either."""
    from windtunnel.launch import read_source
    from windtunnel.report.serve_line import serve_line

    texts = [serve_line(each.spec()) for each in (pool, other)]
    if any(text.startswith("#") for text in texts):
        return ()
    (line,), (best,) = (read_source(text) for text in texts)
    names = {**line.spelled, **best.spelled}
    return tuple(
        Change(name, _said(line.flags.get(flag)), _said(best.flags.get(flag)))
        for flag, name in names.items()
        if line.flags.get(flag) != best.flags.get(flag)
    )


def _said(value: Any) -> str:
    """The value of a flag."""
    if value is None:
        return "not set"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def answered(answer: "SearchResult") -> list[str]:
    """The settings of engines that were searched."""
    settings: Mapping[str, Any] = answer.enumeration.candidates[0].settings
    return [name for name in settings if name not in ("device", "router", "replicas", "engine", "store")]
