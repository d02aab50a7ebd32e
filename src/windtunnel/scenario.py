"""Scenario: a deployment, the load on it and its goals, by the names of the flags, from flags, a file or Python."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter

from windtunnel.deployment import SLO, Deployment, Engine, Pool, parse_goodput, parse_slo
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import device
from windtunnel.load import Load
from windtunnel.model import load_model

MAIN_JOB = {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 2}
"""What is simulated when no model is named."""
WORDS = {"preset": "engine"}
"""Fields whose flag and file key are another word than their name in Python."""
LISTS = ("goodput", "slo")
"""Keys whose values may be written in one line, separated by spaces."""

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
    perf: Literal["auto", "measured", "roofline"] = "auto"
    """Kernel times: measured where there is data and modelled elsewhere (auto), or from one of the two alone."""
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
    """Which replica gets a request, a name of ``windtunnel list routers``."""
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = field(default_factory=Load)
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = field(default_factory=Goals)

    def deployment(self) -> Deployment:
        """What serves. Raises InputError for what cannot run."""
        return Deployment(pools=(self.server.pool(self.replicas),), router=self.router)


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


def read_scenario(path: Path) -> dict[str, Any]:
    """The values that a scenario file gives, by key, each of its type. Raises InputError as ``load_scenario``."""
    from pydantic import TypeAdapter, ValidationError

    types = dict(_leaves(Scenario))
    found = {}
    for key, value in _parse(Path(path)).items():
        if key not in places():
            raise InputError(f"scenario {str(path)!r}: {unknown('key', key, places())}")
        words = value.split() if isinstance(value, str) and key in LISTS else value
        try:
            found[key] = TypeAdapter(types[places()[key]]).validate_python(words)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].lower()
            raise InputError(f"scenario {str(path)!r}: {key}={value!r}: {rule}") from error
    return found


def _parse(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"scenario {str(path)!r}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"scenario {str(path)!r}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise InputError(f"scenario {str(path)!r}: must be lines of `word: value`, with the words of the flags")
    return {str(key).replace("-", "_"): value for key, value in document.items()}
