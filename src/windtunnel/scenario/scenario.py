"""Scenario: a deployment, the load on it and its goals, by the names of the flags, from flags, a file or Python."""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from windtunnel.deployment import SLO, Deployment, Engine, Pool, parse_goodput, parse_slo
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.scenario.load_flags import Load

if TYPE_CHECKING:
    from windtunnel.simulate.overheads import Overheads

MAIN_JOB = {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 2}
"""What is simulated when no model is named."""
WORDS = {"preset": "engine"}
"""Fields whose flag and file key are another word than their name in Python."""
DEPLOYMENT, ENGINE, WORKLOAD, GOALS = (
    Group(name, sort_key=place)
    for place, name in enumerate(("Deployment", "Engine, in vLLM's words", "Workload", "Goals and measurement"))
)
"""How the help arranges the flags."""


def word(field: str) -> str:
    """The flag of a field, without the dashes in front."""
    return WORDS.get(field, field).replace("_", "-")


@dataclass(frozen=True)
class Server:
    """One replica: a model on GPUs, run by an engine."""

    model: str = "Qwen/Qwen3-32B"
    """A name of ``windtunnel list models``, or a config.json or its folder. Without one: Qwen3-32B on two GPUs."""
    _: KW_ONLY
    device: str = "h100"
    """The GPU, a name of ``windtunnel list devices``."""
    devices_file: Path | None = None
    """TOML file with devices of your own, or other values for known ones."""
    perf: Literal["auto", "measured", "modelled", "roofline"] = "auto"
    """Kernel times: measured where there is data and modelled elsewhere (auto), or one of the two alone; roofline:
    perfect kernels and no host work, what no server can beat."""
    engine: Annotated[Engine, Parameter(name="*", group=ENGINE)] = field(default_factory=Engine)

    def pool(self, replicas: int = 1) -> Pool:
        """So many of these replicas, every default of the engine filled in. Raises InputError for what cannot run."""
        gpu = device(self.device, (self.devices_file,) if self.devices_file else ())
        return Pool(load_model(self.model), gpu, self.engine, replicas)


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What the deployment should reach."""

    goodput: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Limits in ms that a good request keeps all of, as vLLM writes them: ``ttft:300 tpot:50 e2el:20000``."""
    attainment: float | None = None
    """Share of requests that must be good, e.g. 0.99; if they are not, the exit code is 1."""
    slo: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Percentiles in s that must hold: ``ttft_p99=0.3 tpot_p90=0.05``; if they do not, the exit code is 1."""

    def __post_init__(self) -> None:
        """Refuse limits that cannot be read, and a share of requests without limits for a request."""
        self.limits()
        if self.attainment is not None and not 0.0 < self.attainment <= 1.0:
            raise InputError(f"attainment={self.attainment:g}: must be a share, > 0 and ≤ 1")
        if self.attainment is not None and not self.goodput:
            raise InputError(f"attainment={self.attainment:g}: of which limits? add goodput, e.g. ttft:300 tpot:50")

    def limits(self) -> SLO:
        """Both kinds of limits, in seconds."""
        return replace(parse_goodput(self.goodput), percentiles=parse_slo(self.slo))


@dataclass(frozen=True)
class Scenario:
    """A deployment, the load on it and its goals."""

    server: Annotated[Server, Parameter(name="*", group=DEPLOYMENT)] = field(default_factory=Server)
    _: KW_ONLY
    replicas: Annotated[int, Parameter(group=DEPLOYMENT)] = 1
    """Copies of the server behind the router."""
    router: Annotated[str, Parameter(group=DEPLOYMENT)] = "round_robin"
    """Which replica gets a request: a name of ``windtunnel list routers``, or a function, ``./mine.py:score``."""
    calibration: Annotated[Path | None, Parameter(group=DEPLOYMENT)] = None
    """File of ``windtunnel calibrate``: host and client overheads of your deployment."""
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = field(default_factory=Load)
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = field(default_factory=Goals)

    def deployment(self) -> Deployment:
        """What serves. Raises InputError for what cannot run."""
        return Deployment(pools=(self.server.pool(self.replicas),), router=self.router)

    def overheads(self) -> "Overheads":
        """What is simulated beyond the tables. Raises InputError for a calibration file that cannot be read."""
        from windtunnel.simulate.overheads import ENGINE_CLOCK, read_overheads

        return read_overheads(self.calibration) if self.calibration else ENGINE_CLOCK


@cache
def places() -> dict[str, tuple[str, ...]]:
    """Where each word of a scenario stands: key of the file → names of the fields that lead to it."""
    return {word(path[-1]).replace("-", "_"): path for path, _ in _leaves(Scenario)}


def _leaves(kind: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and type of every plain field."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from (((entry.name, *inner), leaf) for inner, leaf in _leaves(hint))
        else:
            yield (entry.name,), hint


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
    from pydantic import TypeAdapter, ValidationError

    types = dict(_leaves(Scenario))
    found = {}
    for text, value in words.items():
        key = text.replace("-", "_")
        if key not in places():
            raise InputError(f"{origin}{unknown('key', key, places())}")
        kind = types[places()[key]]
        parts = value.split() if isinstance(value, str) and _is_list(kind) else value
        try:
            found[key] = TypeAdapter(kind).validate_python(parts)
        except ValidationError as error:
            raise InputError(f"{origin}{key}={value!r}: {error.errors()[0]['msg'].lower()}") from error
    return found


def _is_list(hint: Any) -> bool:
    """Whether a type is a tuple, or may be one: its values can be written in one line, separated by spaces."""
    return get_origin(hint) is tuple or any(_is_list(part) for part in get_args(hint))


def read_words(path: Path, name: str) -> dict[str, Any]:
    """A YAML file of `word: value`. Raises InputError, which begins with the name, for anything else."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise InputError(f"{name}: must be lines of `word: value`, with the words of the flags")
    return {str(key): value for key, value in document.items()}
