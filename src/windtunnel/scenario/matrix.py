"""Matrix: scenarios that differ along several axes (workloads, schedulers, engines, devices, …), from one file."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, UnknownName, unknown
from windtunnel.files import read_text, typed
from windtunnel.scenario.load_flags import Load, require_seeds
from windtunnel.scenario.scenario import Scenario, check_words, main_job_unless_model, places, vary
from windtunnel.scenario.words import parse_words, read_words, written

OWN_WORDS = {"seeds": int, "exclude_warmup": bool, "capacity": bool, "endpoint": str, "endpoint_model": str}
"""Words of the file besides those of run, ``matrix`` and ``exclude``."""
MOST = 10_000
"""Cases of a file; more are a slip."""

Words = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One place of a matrix."""

    names: tuple[str, ...]
    """The name of its value on each axis."""
    words: Words
    """What the axes say."""
    scenario: Scenario | None
    """None: its words contradict each other."""
    refusal: str = ""
    """Why it cannot be simulated."""


@dataclass(frozen=True)
class Matrix:
    """What a file asks for."""

    axes: tuple[str, ...]
    cases: tuple[Case, ...]
    load_axes: tuple[int, ...]
    """Places of the axes whose values say something of the load."""
    seeds: int = 1
    """Each case is simulated under this many, from its own seed on."""
    exclude_warmup: bool = False
    capacity: bool = False
    """Each case is simulated at the highest rate at which it keeps its goals."""
    endpoint: str | None = None
    """URL of a server that gets the same loads."""
    endpoint_model: str | None = None
    """The name that it serves the model under; None: the first of its list."""

    def __post_init__(self) -> None:
        """Refuse what cannot be repeated, and a model without a server."""
        require_seeds(self.seeds)
        if self.capacity and self.endpoint is not None:
            raise InputError(f"endpoint={self.endpoint!r}: gets a load at its own rate: leave out capacity")
        if self.endpoint_model is not None and self.endpoint is None:
            raise InputError(f"endpoint_model={self.endpoint_model!r}: of which server? add endpoint")

    def load_names(self, case: Case) -> tuple[str, ...]:
        """What names the load of a case."""
        return tuple(case.names[place] for place in self.load_axes)


SUITE = "suite"
"""The name of the file that is shipped."""


def found_file(path: Path) -> Path:
    """The file of a name: one that is there, else the one that is shipped under it. Raises InputError for one word that
    is neither."""
    if path.is_file() or path.suffix or path.name != str(path):
        return path
    if str(path) != SUITE:  # whose results stand in a folder of this name
        raise InputError(f"bench {str(path)!r}: is no file, and no shipped bench but {SUITE!r}")
    return Path(__file__).parents[1] / "data" / f"{SUITE}.yaml"


def read_matrix(path: Path) -> Matrix:
    """What a YAML or TOML file asks for: words of run, ``matrix``, ``exclude`` and OWN_WORDS.

    Raises InputError for a file that cannot be read, an unknown word, axis or name (with the nearest), a wrong value,
    and two axes that set the same word.
    """
    origin = f"bench {str(path)!r}: "
    document = _document(path, origin)
    own = {key: _own(key, document.pop(key), origin) for key in OWN_WORDS if key in document}
    axes = _axes(document.pop("matrix", None), origin)
    left_out = _left_out(document.pop("exclude", ()), axes, origin)
    common = check_words(document, origin)
    cases, used = [], set[int]()
    for names in product(*axes.values()):
        named = dict(zip(axes, names, strict=True))
        matching = {place for place, rule in enumerate(left_out) if all(named[axis] in rule[axis] for axis in rule)}
        used |= matching
        if not matching:
            cases.append(_case(names, common, [axes[axis][name] for axis, name in named.items()], origin))
    if unused := [place for place in range(len(left_out)) if place not in used]:
        raise InputError(f"{origin}exclude: entry {unused[0] + 1} leaves nothing out")
    if not cases:
        raise InputError(f"{origin}exclude: leaves no case")
    load = {field.name for field in fields(Load)}
    load_axes = [place for place, axis in enumerate(axes.values()) if any(load & {*words} for words in axis.values())]
    return Matrix(tuple(axes), tuple(cases), tuple(load_axes), **own)


def _document(path: Path, origin: str) -> Words:
    if path.suffix != ".toml":
        found = read_words(path, origin.removesuffix(": "))
    else:
        try:
            found = tomllib.loads(read_text(path))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{origin}not TOML: {error}") from error
    known = {*places(), "matrix", "exclude", *OWN_WORDS}
    for key in found:
        if key.replace("-", "_") not in known:
            raise InputError(f"{origin}{unknown('key', key, known)}")
    return {key.replace("-", "_"): value for key, value in found.items()}


def _own(key: str, value: Any, origin: str) -> Any:
    try:
        return typed(OWN_WORDS[key], value)
    except InputError as error:
        raise InputError(f"{origin}{key}={value!r}: {error}") from error


def _axes(matrix: Any, origin: str) -> dict[str, dict[str, Words]]:
    """Axis → name of a value → its words, each of its type."""
    if not isinstance(matrix, Mapping) or not matrix:
        raise InputError(f"{origin}matrix: must say what is varied, e.g. matrix: {{device: [h100, b200]}}")
    found: dict[str, dict[str, Words]] = {}
    sets: dict[str, str] = {}
    size = 1
    for axis, values in matrix.items():
        found[str(axis)] = dict(_axis(str(axis), values, origin))
        for word in dict.fromkeys(word for words in found[str(axis)].values() for word in words):
            if word in sets:
                raise InputError(f"{origin}matrix: both {sets[word]!r} and {axis!r} set {word}: leave one out")
            sets[word] = str(axis)
        size *= len(found[str(axis)])
    if size > MOST:
        raise InputError(f"{origin}matrix: has {size:,} cases, more than {MOST:,}: split it into several files")
    return found


def _axis(axis: str, values: Any, origin: str) -> Iterator[tuple[str, Words]]:
    """Name and words of each value: of a word's values as a list, or of names with words."""
    where = f"{origin}matrix: {axis}: "
    if isinstance(values, Mapping) and values:
        for name, said in values.items():
            words = parse_words(said, f"{where}{name}") if isinstance(said, str) and said.strip() else said or {}
            if not isinstance(words, Mapping):
                raise InputError(f"{where}{name}: must be words and values, e.g. {{trace: azure-code}}")
            yield str(name), check_words(words, f"{where}{name}: ")
    elif isinstance(values, list | tuple) and values:
        key = axis.replace("-", "_")
        if key not in places():
            hint = "give names with words, e.g. {small: {max_num_seqs: 64}}, or values of a word of run"
            raise InputError(f"{where}a list of what? {unknown('key', axis, places())}; {hint}")
        seen = set()
        for value in values:
            name = written({"": value}).removeprefix("=")
            if name in seen:
                raise InputError(f"{where}{name}: given twice: leave one out")
            seen.add(name)
            yield name, check_words({key: value}, where)
    else:
        raise InputError(f"{where}must be a list of values, or names with words")


def _left_out(rules: Any, axes: Mapping[str, Mapping[str, Words]], origin: str) -> list[dict[str, set[str]]]:
    """Axis → names, for each entry of ``exclude``: a case that has one of the names on each of its axes is left out."""
    where = f"{origin}exclude: "
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, Mapping) and rule for rule in rules):
        raise InputError(f"{where}must be a list of axes with names, e.g. [{{engine: sglang, device: a100}}]")
    found = []
    for rule in rules:
        named: dict[str, set[str]] = {}
        for axis, said in rule.items():
            if axis not in axes:
                raise InputError(f"{where}{unknown('axis', str(axis), axes)}")
            named[axis] = {str(name) for name in (said if isinstance(said, list | tuple) else [said])}
            for name in named[axis]:
                if name not in axes[axis]:
                    raise InputError(f"{where}{unknown(axis, name, axes[axis])}")
        found.append(named)
    return found


def _case(names: tuple[str, ...], common: Words, parts: Sequence[Words], origin: str) -> Case:
    """A case, and whether it can be. Raises InputError for names that there are not."""
    words = {word: value for part in parts for word, value in part.items()}
    try:
        return Case(names, words, vary(Scenario(), main_job_unless_model(common | words)))
    except UnknownName as error:
        raise InputError(f"{origin}{' '.join(names)}: {error}") from error
    except InputError as error:
        return Case(names, words, None, str(error))
