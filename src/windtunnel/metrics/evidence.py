"""Evidence: how far measured servers were from simulated ones, and what that says about another server.

``data/served_errors.toml`` holds quantiles of log(measured ÷ simulated) of served points, for groups of servers from
all of them down to one model on as many GPUs of one device (CHAIN). A server's quantiles are those of its smallest
group, drawn towards those of the larger ones by how few independent loads of servers it has: w·own + (1 − w)·larger
with w = n / (n + PRIOR), the shrinkage of a random-effects model. A server whose family was not measured on its device
may be off as any of the measured families on devices is: its quantiles are those of their mixture (``elsewhere``).
Groups that are known to be wrong (``known_bad``) are in no larger one, so that they widen nothing but their own.
``benchmarks.accuracy.served_errors`` derives the file.
"""

from collections.abc import Mapping
from functools import cache
from math import exp, isnan
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment.presets import preset
from windtunnel.files import read_toml
from windtunnel.simulate.overheads import Agreement

ERRORS = Path(__file__).parents[1] / "data" / "served_errors.toml"

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MIDDLE = 2
ENDS = {0.5: (1, 3), 0.9: (0, 4)}
"""Share of measured servers between two of the quantiles → their places."""

KEYS = ("engine", "family", "device", "dtype", "model", "layout")
CHAIN = tuple(KEYS[:length] for length in range(len(KEYS) + 1))
"""What the servers of a group have in common, from the largest group to the smallest."""

WIDE = 4.0
"""Times as long on a slow server as on a fast one: beyond that nobody is confident."""
PRIOR = 4.0
"""Independent loads of servers that a larger group counts for: of 1, 2, 4 and 8, the one that holds the shares of most
groups."""

Logs = tuple[float, ...]
"""One for each of QUANTILES."""

Factors = tuple[float, float]


class ServerKey(NamedTuple):
    """A server, as far as evidence tells servers apart."""

    engine: str
    family: str
    """The model's architecture."""
    device: str
    dtype: str
    """Of the weights."""
    model: str
    layout: str
    """How the model is spread over GPUs: ``TP4``, ``TP1 DP4 EP``."""


def server_key(pool: Mapping[str, Any]) -> ServerKey:
    """The server of a pool, from what ``Pool.spec`` and a run's manifest say of it."""
    engine = pool["engine"]
    layout = f"TP{engine['tensor_parallel_size']}"
    for name, short in (("pipeline", "PP"), ("data", "DP"), ("prefill_context", "PCP")):
        size = engine.get(f"{name}_parallel_size", 1)
        layout += f" {short}{size}" if size > 1 else ""
    layout += " EP" if engine["enable_expert_parallel"] else ""
    dtype = pool["quantization"] or "16 bits"
    return ServerKey(
        preset(engine["preset"]).backend, pool["architecture"], pool["device"], dtype, pool["model"], layout
    )


@dataclass(frozen=True)
class Group:
    """What was measured of a group of servers."""

    points: int
    loads: int
    """Independent ones: servers of different versions, devices, parallelism or weights, times their loads."""
    error: float
    """Relative error of their kernels (``metrics.uncertainty``): 95 % of the points have less."""
    steps: Logs
    """Quantiles of log(measured ÷ simulated) of the time per output token."""
    first_token: Logs
    """Of the time to first token."""
    models: tuple[str, ...]
    width: Factors | None = None
    """How much wider than the quantiles (steps, first token) other loads of its servers need it, for all servers:
    other groups; None: as much as the larger group."""
    known_bad: bool = False
    key: tuple[str, ...] = ()
    """What its servers have in common: the first of KEYS."""
    elsewhere: tuple[Logs, Logs] | None = None
    """Quantiles (steps, first token) for a server of it whose family was not measured on its device; None: of a group
    that knows families on devices."""

    @property
    def words(self) -> str:
        """``90 points of Qwen3-32B on h100_sxm, vllm``."""
        names = list(dict.fromkeys(name.rpartition("/")[2] for name in self.models))
        models = " and ".join(names) if len(names) < 3 else f"{len(names)} models"
        common = dict(zip(KEYS, self.key, strict=False))
        where = f" on {common['device']}" if "device" in common else ", all devices"
        return f"{self.points:,} points of {models}{where}, {common.get('engine', 'all engines')}"


Groups = Mapping[tuple[str, ...], Group]
"""By their keys."""


LONG = 4096
"""Tokens from which prompts are long: separate workers were measured with prompts of 1,024 and of 8,192."""


class Separate(NamedTuple):
    """How far measured deployments with separate prefill and decode workers were from simulated ones."""

    steps: float
    """Middle of log(measured ÷ simulated) of the time per output token."""
    first_token: float
    """Of the time to first token."""
    points: int
    engine: str
    prompts: str
    """``short`` or ``long``."""
    families: tuple[str, ...]
    """Whose models were measured: nothing is known of others."""

    @property
    def words(self) -> str:
        """``27 points of separate workers of sglang with long prompts``."""
        return f"{self.points} points of separate workers of {self.engine} with {self.prompts} prompts"


@dataclass(frozen=True)
class Doubt:
    """Between which factors on the simulated times a measured server would lie."""

    steps: Logs
    """Logs of factors on all times of the simulation, under a load scaled to each server's capacity."""
    first_token: Logs
    """Logs of factors on times to first token, which have other causes too: host, client, admission."""
    nearest: Group
    """The smallest group that knows servers like it."""
    calibrated: bool = False
    """Whether its own measured run narrows the band."""
    separate: Separate | None = None
    """What is known of separate workers like its own; None: it has mixed ones, or none like them were measured."""

    @property
    def shift(self) -> float:
        """Log of the factor on simulated steps for the best estimate of one measured server: the middle of ``steps``,
        where its family was measured on its device. Elsewhere it helped no server that it was not taken from
        (``benchmarks.accuracy.served_errors``). Separate workers have their own."""
        if self.calibrated:
            return 0.0
        if self.separate is not None:
            return self.separate.steps
        return self.steps[MIDDLE] if "device" in KEYS[: len(self.nearest.key)] else 0.0

    @property
    def first_shift(self) -> float:
        """The same of the time to first token, where this model was measured in this layout: of other servers it made
        first tokens worse (``benchmarks.accuracy.served_errors``). Separate workers have their own."""
        if self.calibrated:
            return 0.0
        if self.separate is not None:
            return self.separate.first_token
        return self.first_token[MIDDLE] if len(self.nearest.key) == len(KEYS) else 0.0

    @property
    def shifted_as(self) -> str:
        """What was measured that says so, in words."""
        return self.nearest.words if self.separate is None else self.separate.words

    def factors(self, latency: str, level: float) -> Factors:
        """The factors at both ends; ``latency`` is steps or first_token."""
        low, high = ENDS[level]
        logs: Logs = getattr(self, latency)
        return exp(logs[low]), exp(logs[high])

    def below(self, latency: str, share: float) -> float:
        """The factor that this share of servers stays below."""
        normal = NormalDist()
        places = [normal.inv_cdf(quantile) for quantile in QUANTILES]
        return exp(float(np.interp(normal.inv_cdf(share), places, getattr(self, latency))))

    @property
    def words(self) -> str:
        """``90 points of Qwen3-32B on h100_sxm, vllm: -4…+19 %``: what was measured of servers like it."""
        if self.calibrated:
            return f"your own run, and how other loads of one server differ: {span(self.factors('steps', 0.9))}"
        return f"{self.nearest.words}: {span(self.factors('steps', 0.9))}"

    @property
    def grade(self) -> tuple[str, str]:
        """How sure the times are in one word, and why: high where this model was measured on this device, medium where
        its family or the engine was, low elsewhere, where simulations are known to be off, and where steps may take
        more than ``WIDE`` times as long on one server as on another."""
        if self.calibrated:
            return "high", "calibrated with your own run"
        low, high = self.factors("steps", 0.9)
        if high > WIDE * low:
            return "low", f"steps may take {low:.2g} to {high:.2g} times as long as simulated"
        points = f"{self.nearest.points:,} measured points"
        if self.nearest.known_bad:
            return "low", f"simulations of servers like this are known to be off ({points})"
        known = (
            ("model", "high", "this model was measured on this device"),
            ("device", "medium", "models of this family were measured on this device"),
            ("family", "medium", "models of this family were measured on other devices"),
            ("engine", "low", "nothing like it was measured: judged by all servers of the engine"),
        )
        common = KEYS[: len(self.nearest.key)]
        nothing = ("low", "nothing like it was measured: judged by all servers")
        word, why = next(((word, why) for key, word, why in known if key in common), nothing)
        return word, f"{why} ({points})"

    @property
    def warning(self) -> str | None:
        """What is known to be wrong with simulations of this server."""
        if not self.nearest.known_bad or self.calibrated:
            return None
        steps, first = (self.factors(latency, 0.9) for latency in ("steps", "first_token"))
        return (
            f"simulations of this server are known to be off: {self.nearest.words}, "
            f"measured {steps[0]:.2g} to {steps[1]:.2g} times the simulated "
            f"time per token and {first[0]:.2g} to {first[1]:.2g} times the simulated time to first token"
        )


def span(factors: Factors) -> str:
    """Factors as changes in per cent: ``-4…+19 %``, ``÷3…×12`` where they are beyond a half or double."""
    low, high = factors
    if low < 0.4 or high > 3.0:
        return f"×{low:.2g}…{high:.2g}"
    return f"{100 * (low - 1):+.0f}…{100 * (high - 1):+.0f} %"


def doubt(server: ServerKey, error: float, groups: Groups | None = None, agreement: Agreement | None = None) -> Doubt:
    """What the evidence says about a server whose kernels have this relative error (NaN: as the evidence's).

    With its own measured run, what is left is how far other loads of one server lie from that one; it never makes the
    band wider than it is without.
    """
    table = served_groups() if groups is None else groups
    nearest = table[()]
    steps, first, width = nearest.steps, nearest.first_token, nearest.width or (1.0, 1.0)
    for length in range(1, len(KEYS) + 1):
        group = table.get(server[:length])
        if group is None or nearest.known_bad:
            continue
        if group.points != nearest.points or group.known_bad:  # the larger group is this one: nothing new
            weight = 1.0 if group.known_bad else group.loads / (group.loads + PRIOR)
            steps, first = drawn(group.steps, steps, weight), drawn(group.first_token, first, weight)
        width = group.width or width
        nearest = group
    if nearest.elsewhere is not None:
        steps, first = nearest.elsewhere
    if not nearest.known_bad:
        stretch = 1.0 if isnan(error) else max(error / nearest.error, 1.0)
        steps, first = wider(steps, stretch * width[0]), wider(first, stretch * width[1])
    found = Doubt(steps, first, nearest)
    if agreement is None or agreement.server != server:
        return found
    own = other_loads(server.engine)
    logs = [getattr(found, name) for name in ("steps", "first_token")]
    for number, name in enumerate(("steps", "first_token")):
        at = getattr(agreement, name)
        if at is not None and _narrower(own[name], logs[number]):
            logs[number] = tuple(at + log for log in own[name])
    return Doubt(logs[0], logs[1], nearest, calibrated=True)


def _narrower(one: Logs, other: Logs) -> bool:
    return one[-1] - one[0] < other[-1] - other[0]


def drawn(own: Logs, larger: Logs, weight: float) -> Logs:
    """Quantiles between a group's own and those of a larger one."""
    return tuple(weight * mine + (1 - weight) * theirs for mine, theirs in zip(own, larger, strict=True))


def wider(logs: Logs, factor: float) -> Logs:
    """Quantiles that many times as far from their middle, whose ends contain the simulated value."""
    moved = [logs[MIDDLE] + factor * (log - logs[MIDDLE]) for log in logs]
    return (*(min(log, 0.0) for log in moved[:MIDDLE]), moved[MIDDLE], *(max(log, 0.0) for log in moved[MIDDLE + 1 :]))


@cache
def served_groups() -> Groups:
    """The groups of the file."""
    groups = [Group(**{name: _frozen(value) for name, value in row.items()}) for row in errors_file()["group"]]
    return {group.key: group for group in groups}


def prompts_of(tokens: float) -> str:
    """Whether prompts with this mean of tokens are short or long."""
    return "long" if tokens >= LONG else "short"


def separate_workers(server: ServerKey, prompt: float) -> Separate | None:
    """What is known of separate workers like a server's with prompts of this length; None where its family was not
    measured in separate workers of its engine."""
    prompts = prompts_of(prompt)
    found = errors_file().get("separate_workers", {}).get(server.engine, {}).get(prompts)
    if not found or server.family not in found["families"]:
        return None
    return Separate(**{name: _frozen(value) for name, value in found.items()}, engine=server.engine, prompts=prompts)


def other_loads(engine: str) -> Mapping[str, Logs]:
    """Quantiles of log(measured ÷ simulated) of a server's loads around the median of its other loads."""
    table = errors_file()["other_loads"]
    return {name: tuple(values) for name, values in table.get(engine, table["all"]).items()}


@cache
def errors_file() -> dict[str, Any]:
    """What the file of evidence holds."""
    return read_toml(ERRORS)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
