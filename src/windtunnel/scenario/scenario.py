"""Scenario: a deployment, the load on it and its goals, by the names of the flags, from flags, a file or Python."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field, fields, is_dataclass, replace
from functools import cache
from inspect import Parameter as Argument
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

from cyclopts import Group, Parameter

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO, Deployment, parse_goodput, parse_slo
from windtunnel.errors import InputError
from windtunnel.files import typed_words
from windtunnel.scenario.load_flags import Load
from windtunnel.scenario.pools import Pools, as_texts
from windtunnel.scenario.server import MAIN_JOB, Server
from windtunnel.scenario.words import leaves, read_words, word

if TYPE_CHECKING:
    from windtunnel.metrics import Summary
    from windtunnel.metrics.streamed import StreamSummary
    from windtunnel.simulate.overheads import Overheads

T = TypeVar("T", bound=Callable[..., Any])

DEPLOYMENT, POOLS, WORKLOAD, GOALS = (
    Group(name, sort_key=place)
    for name, place in (("Deployment", 0), ("Pools", 1), ("Workload", 2), ("Goals and measurement", 3))
)
"""How the help arranges the flags."""


DEFAULT_GOAL = ("ttft:500", "tpot:50")
"""What is asked of a run without goals: what people notice as quick."""


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What the deployment should reach."""

    goodput: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Limits that a good request meets, in ms as vLLM has them or with units: ``ttft:300 tpot:0.05s e2el:20s``."""
    attainment: float | None = None
    """Share of requests that must be good, e.g. 0.99; if they are not, the exit code is 1."""
    slo: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Percentiles that must hold, in s or with units: ``ttft_p99=0.3 tpot_p90=50ms``; otherwise the exit code is 1."""

    def __post_init__(self) -> None:
        """Refuse limits that cannot be read, and a share of requests without limits for a request."""
        self.limits()
        if self.attainment is not None and not 0.0 < self.attainment <= 1.0:
            raise InputError(f"attainment={self.attainment:g}: must be a share, > 0 and ≤ 1")
        if self.attainment is not None and not self.goodput:
            raise InputError(f"attainment={self.attainment:g}: of which limits? add goodput, e.g. ttft:300 tpot:50")

    def or_default(self) -> "Goals":
        """These goals, or the default one where there are none."""
        return self if self.limits() else replace(self, goodput=DEFAULT_GOAL)

    def to_json(self) -> dict[str, list[str]]:
        """For the document of a run: the limits, as they were given."""
        return {"goodput": list(self.goodput), "slo": list(self.slo)}

    def limits(self) -> SLO:
        """Both kinds of limits, in seconds."""
        return replace(parse_goodput(self.goodput), percentiles=parse_slo(self.slo))

    def missed(self, found: "Summary | StreamSummary") -> list[str]:
        """Which of them a run misses, in words."""
        share, missed = self.attainment, []
        if share is not None and not found.attainment >= share:  # NaN without requests
            missed.append(f"attainment {found.attainment:.3f} of {share:g}")
        if not found.meets_slo:
            missed.append(f"slo {' '.join(self.slo)} is missed")
        return missed


@dataclass(frozen=True)
class Scenario:
    """A deployment, the load on it and its goals."""

    server: Annotated[Server, Parameter(name="*", group=DEPLOYMENT)] = field(default_factory=Server)
    _: KW_ONLY
    replicas: Annotated[int, Parameter(group=DEPLOYMENT)] = 1
    """Copies of the server behind the router."""
    router: Annotated[str, Parameter(group=DEPLOYMENT)] = "round_robin"
    """Which replica gets a request: a name of ``windtunnel list routers``, or a function, ``./mine.py:score``."""
    pools: Annotated[Pools, Parameter(name="*", group=POOLS)] = field(default_factory=Pools)
    calibration: Annotated[Path | None, Parameter(group=DEPLOYMENT)] = None
    """File of ``windtunnel calibrate``: host and client overheads of your deployment."""
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = field(default_factory=Load)
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = field(default_factory=Goals)

    def deployment(self) -> Deployment:
        """What serves. Raises InputError for what cannot run."""
        return self.pools.deployment(self.server, self.replicas, self.router)

    def overheads(self) -> "Overheads":
        """What is simulated beyond the tables. Raises InputError for a calibration file that cannot be read."""
        from windtunnel.simulate.overheads import overheads_of

        return overheads_of(self.calibration)


@cache
def places() -> dict[str, tuple[str, ...]]:
    """Where each word of a scenario stands: key of the file → names of the fields that lead to it."""
    return {word(path[-1]).replace("-", "_"): path for path, _ in leaves(Scenario)}


@cache
def types() -> dict[str, Any]:
    """The type of each word of a scenario, by key of the file."""
    kinds = dict(leaves(Scenario))
    return {key: kinds[path] for key, path in places().items()}


def with_words(function: T, axes: bool = False) -> T:
    """The function, whose ``**words`` are those of a scenario: notebooks and ``help`` look at its signature, so that
    Tab completes them. ``axes``: each may be several."""
    own = signature(function)
    taken = [each for each in own.parameters.values() if each.kind is not Argument.VAR_KEYWORD]
    names = {"model", *(each.name for each in taken)}
    words = [
        Argument(name, Argument.KEYWORD_ONLY, annotation=Any if axes else kind, default=None)
        for name, kind in types().items()
        if name not in names
    ]
    cast(Any, function).__signature__ = own.replace(parameters=[*taken, *words])
    return function


def load_scenario(path: Path) -> Scenario:
    """The scenario that a YAML file describes, with the words of the flags as keys and the flags' defaults.

    Raises InputError for a file that cannot be read, an unknown key (with the nearest) or a wrong value.
    """
    values = main_job_unless_model(read_scenario(path))
    scenario: Scenario = _assemble(Scenario, {places()[key]: value for key, value in values.items()})
    return scenario


def main_job_unless_model(values: dict[str, Any]) -> dict[str, Any]:
    """The values, or where they name no model the main job's under them."""
    return values if "model" in values else MAIN_JOB | values


def _assemble(kind: Any, values: dict[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> Any:
    hints = get_type_hints(kind)
    parts = {}
    for entry in fields(kind):
        place = (*path, entry.name)
        if is_dataclass(hints[entry.name]):
            parts[entry.name] = _assemble(hints[entry.name], values, place)
        elif place in values:
            parts[entry.name] = values[place]
    return kind(**parts)


def vary(scenario: Scenario, words: Mapping[str, Any], origin: str = "") -> Scenario:
    """The scenario with other values for some of its words, each given as a file or a flag gives it.

    Raises InputError for an unknown word (with the nearest) or a wrong value, both after the ``origin`` of the words,
    and for values that contradict each other.
    """
    changes = check_words(words, origin)
    varied: Scenario = _replace(scenario, {places()[key]: value for key, value in changes.items()})
    return varied


def _replace(part: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), value in changes.items():
        inner.setdefault(name, {})[tuple(rest)] = value
    parts = {name: found[()] if () in found else _replace(getattr(part, name), found) for name, found in inner.items()}
    return replace(part, **parts)


def words_of(scenario: Scenario) -> dict[str, Any]:
    """The value of every word of a scenario."""
    found = {}
    for key, path in places().items():
        value: Any = scenario
        for name in path:
            value = getattr(value, name)
        found[key] = value
    return found


def read_scenario(path: Path) -> dict[str, Any]:
    """The values that a scenario file gives, by key, each of its type. Raises InputError as ``load_scenario``."""
    name = f"scenario {str(path)!r}"
    return check_words(read_words(Path(path), name), f"{name}: ")


def check_words(words: Mapping[str, Any], origin: str = "") -> dict[str, Any]:
    """The values by key, each of its type. Raises InputError, which names the origin, for a wrong word or value."""
    return typed_words(as_texts(words, origin), types(), origin)
