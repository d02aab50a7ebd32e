"""From a name to a scheduler or router: a preset with settings, a name in a Python file, a plug-in."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

from windtunnel.errors import InputError, unknown
from windtunnel.policy import get_next_batch, routing, vllm_v0, vllm_v1
from windtunnel.policy.get_next_batch import GetNextBatch
from windtunnel.policy.routing import Conductor, DynamoKv, PrefixAware, RouteView, Routing
from windtunnel.policy.settings import Settings
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.trtllm import Trtllm
from windtunnel.policy.unified import POLICIES, Policy
from windtunnel.policy.vllm_v0 import VllmV0
from windtunnel.policy.vllm_v1 import VllmV1
from windtunnel.policy.whole_batches import WholeBatches

PRESETS: dict[str, VllmV1 | VllmV0 | Policy | Sglang | Trtllm | WholeBatches] = {
    **vllm_v1.VERSIONS,
    "vllm": vllm_v1.VERSIONS["vllm-0.32"],
    **vllm_v0.VERSIONS,
    "sglang-0.5.23": Sglang(),
    "sglang-0.5": Sglang(),
    "sglang-0.4.6": Sglang(version="0.4.6"),
    **POLICIES,
    "trtllm-1.0": Trtllm(),
    "static": WholeBatches(),
}
"""Every scheduler that has a name; ``vllm`` is the version that runs have by default."""

IN_PYTHON = {get_next_batch.NAME: GetNextBatch}
"""Schedulers in Python that have a name."""

Scheduler = Settings | Callable[[], Any]
"""Settings of a scheduler that windtunnel knows, or a function that makes a ``PythonScheduler`` or a
``ColumnScheduler`` for each rank."""

ENTRY_POINTS = "windtunnel.schedulers"
"""Group of entry points in which a package offers its schedulers."""

ROUTERS = {
    "round_robin": "replicas in turn",
    "random": "a replica drawn at random, from a stream of its own",
    "least_outstanding": "the replica with the fewest requests queued and running, the first of equals",
    "vllm_dp": "the replica with the lowest 4 · waiting + running, as vLLM balances ranks: counted every 0.1 s",
    "power_of_two": "of two replicas drawn at random the one with fewer requests",
    "session_affinity": "the replica of the session's request before; a new session goes where the fewest requests are",
    "prefix_aware": "the highest sum of llm-d's scores: prefix found, queue, load, tokens, KV",
    "dynamo_kv": "the least work to add, as Dynamo's KV router counts it: prefill not cached, KV in progress",
    "conductor": "the lowest expected TTFT, as Mooncake's Conductor: cached prefix, queue, KV from another replica",
}
"""Name → what it does. Ranks inside a replica are always balanced by vLLM's own rule, ``vllm_dp``."""

FORMULAS = {"prefix_aware": PrefixAware(), "dynamo_kv": DynamoKv(), "conductor": Conductor()}
"""Routers that have settings."""

BY_NAME = {
    "round_robin": routing.ROUND_ROBIN,
    "random": routing.RANDOM,
    "least_outstanding": routing.LEAST_OUTSTANDING,
    "vllm_dp": routing.VLLM_DP,
    "power_of_two": routing.POWER_OF_TWO,
    "session_affinity": routing.SESSION_AFFINITY,
}
"""The numbers of the others."""


class Router(NamedTuple):
    """A router as loops take it."""

    number: int
    route_score: Callable[..., float] | None = None
    """The user's function that ``ROUTE_SCORE`` asks."""
    routing: Routing | None = None
    """The settings of ``SCORED``."""


ALIASES = {"chunk": "max_num_batched_tokens", "order": "admission_order", "interval": "reschedule_interval"}
"""Short words for fields."""

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def find_scheduler(text: str) -> Scheduler:
    """The scheduler that ``text`` names.

    ``sarathi`` or ``sarathi:chunk=512``: a preset, some of its settings changed.
    ``./mine.py:Name`` or ``./mine.py:Name:alpha=2``: what stands under a name in a Python file: a class with
    ``schedule`` (made with these arguments), an object with it (copied for each rank), or settings of
    ``windtunnel.policy``. Any other name is looked for among the entry points of the group
    ``windtunnel.schedulers``, with the same meanings.

    Raises:
        InputError: there is no such file or name, or a setting is wrong.
    """
    name, _, settings = text.partition(":")
    if name.endswith(".py"):
        name, _, settings = settings.partition(":")
        return _made(text, python_object(text, name), _arguments(settings))
    if name in PRESETS:
        return scheduler(text)
    if name in IN_PYTHON:
        return _made(text, IN_PYTHON[name], _arguments(settings))
    from importlib.metadata import entry_points  # loads forty modules, and few schedulers are plug-ins

    plug_ins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plug_ins:
        raise unknown("scheduler", name, [*PRESETS, *IN_PYTHON, *plug_ins])
    return _made(text, plug_ins[name].load(), _arguments(settings))


def scheduler(text: str) -> Settings:
    """The settings that ``preset`` or ``preset:field=value,field=value…`` names.

    Raises:
        InputError: an unknown preset or field, a value that is not of the field's type, or one out of its range.
    """
    name, _, rest = text.partition(":")
    if name not in PRESETS:
        raise unknown("scheduler", name, PRESETS)
    return _changed("scheduler", text, PRESETS[name], rest)


_Known = TypeVar("_Known")


def _changed(what: str, text: str, settings: _Known, rest: str) -> _Known:
    """The settings of a scheduler or router with what ``field=value,field=value…`` says."""
    kinds = settable(settings)
    pairs = [tuple(part.strip() for part in pair.partition("=")) for pair in filter(None, rest.split(","))]
    for word, _, _ in pairs:  # all of them before the first value
        if ALIASES.get(word, word) not in kinds:
            names = [*kinds, *(short for short in ALIASES if ALIASES[short] in kinds)]
            raise unknown("setting", word, names, f"{what} {text.partition(':')[0]!r}")
    values: dict[str, Any] = {}
    for word, equals, value in pairs:
        field = ALIASES.get(word, word)
        if not equals:
            raise InputError(f"{what} setting {word!r}: give a value, {word}=…")
        if field in values:
            raise InputError(f"{what} {text!r}: {field} is given twice")
        values[field] = _value(word, value, kinds[field])
    return cast(_Known, replace(cast(Any, settings), **values))


def settable(settings: object) -> dict[str, Any]:
    """Field → type of what text can set: everything but functions."""
    hints = get_type_hints(type(settings))
    return {
        field.name: hints[field.name]
        for field in fields(cast(Any, settings))
        if hints[field.name] in (int, float, bool) or all(isinstance(one, str) for one in get_args(hints[field.name]))
    }


def _value(word: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in TRUTHS:
            raise InputError(f"{word}={text!r}: must be true or false")
        return TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{word}={text!r}: must be {'a whole number' if kind is int else 'a number'}") from None
    return text


def python_object(text: str, name: str) -> object:
    """What stands under ``name`` in the Python file that ``text`` begins with. Raises InputError if nothing does."""
    path = Path(text.partition(":")[0])
    if not path.is_file():
        raise InputError(f"{text!r}: there is no file {str(path)!r}")
    if not name:
        raise InputError(f"{text!r}: name what it defines, e.g. {path!s}:MyScheduler")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{text!r}: {type(error).__name__} while it was read: {error}") from error
    names = [each for each in vars(module) if not each.startswith("_")]
    if name not in names:
        raise unknown(f"name in {str(path)!r}:", name, names)
    return getattr(module, name)


def _arguments(text: str) -> dict[str, Any]:
    """``a=1,b=x`` as arguments: numbers and true or false where they look like it, otherwise text."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"setting {part!r}: must be name=value")
        found[name.strip()] = _guessed(value.strip())
    return found


def _guessed(text: str) -> Any:
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


def _made(text: str, found: object, arguments: Mapping[str, Any]) -> Scheduler:
    decides = any(callable(getattr(found, name, None)) for name in ("schedule", "schedule_columns"))
    if isinstance(found, type) and decides:
        return _factory(text, found, arguments)
    if isinstance(found, Settings):
        known = [field.name for field in fields(cast(Any, found))]
        for name in arguments:
            if name not in known:
                raise unknown("setting", name, known, text.partition(":")[0])
        return cast(Settings, replace(cast(Any, found), **arguments))
    if not decides:
        raise InputError(
            f"scheduler {text!r}: is a {type(found).__name__}: must be a class or object with a method schedule (or "
            "schedule_columns), or settings of windtunnel.policy"
        )
    if arguments:
        raise InputError(f"scheduler {text!r}: an object takes no settings: name its class instead")
    return cast(Scheduler, partial(deepcopy, found))


def _factory(text: str, kind: type, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        kind(**arguments)
    except (Exception, SystemExit) as error:
        what = "" if isinstance(error, InputError) else f"{type(error).__name__} while it was made: "
        raise InputError(f"scheduler {text!r}: {what}{error}") from error
    return partial(kind, **arguments)


def find_router(text: str) -> Router:
    """The router that ``text`` names.

    ``least_outstanding``, ``prefix_aware``, ``prefix_aware:queue=2,kv=1``: a name, some of its settings changed.
    ``./mine.py:score``: a function in a Python file, of four arguments (``ROUTE_SCORE``) or of eight (``RouteView``).

    Raises:
        InputError: there is no such router, setting, file or function.
    """
    name, _, rest = text.partition(":")
    if name.endswith(".py"):
        return _router_of(text, python_object(text, rest))
    if name in FORMULAS:
        return Router(routing.SCORED, routing=_changed("router", text, FORMULAS[name], rest))
    if name not in BY_NAME:
        raise unknown("router", name, ROUTERS)
    if rest:
        raise InputError(f"router {text!r}: {name} has no settings")
    return Router(BY_NAME[name])


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with this many arguments."""
    try:
        signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _router_of(text: str, function: object) -> Router:
    if callable(function):
        if _takes(function, 4):
            return Router(routing.ROUTE_SCORE, route_score=function)
        if _takes(function, 8):
            return Router(routing.SCORED, routing=RouteView(route_view=function))
    raise InputError(
        f"router {text!r}: must be a function of (replica, outstanding, prompt_tokens, arrival), or of these and "
        "(waiting, prefill_tokens, active_tokens, cached_tokens)"
    )
