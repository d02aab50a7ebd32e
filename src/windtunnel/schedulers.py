"""Find a scheduler or router by what a user writes: a preset with settings, a name in a Python file, a plug-in."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast, get_args

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError, unknown
from windtunnel.policy import PRESETS, Settings, scheduler
from windtunnel.reference.custom import PythonScheduler
from windtunnel.routing import ROUTE_SCORE, router_number

ENTRY_POINTS = "windtunnel.schedulers"
"""Group of entry points in which a package offers its schedulers."""

Scheduler = Settings | Callable[[], PythonScheduler]
"""Settings of a scheduler that windtunnel knows, or a function that makes schedulers in Python, one for each rank."""


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
    plug_ins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plug_ins:
        raise unknown("scheduler", name, [*PRESETS, *plug_ins])
    return _made(text, plug_ins[name].load(), _arguments(settings))


def require_names(deployment: Deployment) -> None:
    """Raise InputError unless there is everything that a deployment names: its router, and the pools' schedulers."""
    find_router(deployment.router)
    for pool in deployment.pools:
        if pool.engine.scheduler:
            find_scheduler(pool.engine.scheduler)


def find_router(name: str) -> tuple[int, Callable[..., float] | None]:
    """The number of a router in the core, and the user's function that it asks: ``./mine.py:score``, or None.

    Raises:
        InputError: there is no such router, file or function.
    """
    path, _, rest = name.partition(":")
    if not path.endswith(".py"):
        return router_number(name), None
    score = python_object(name, rest)
    if not callable(score):
        raise InputError(f"router {name!r}: must be a function of (replica, outstanding, prompt_tokens, arrival)")
    return ROUTE_SCORE, score


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
    except Exception as error:
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
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


def _made(text: str, found: object, arguments: Mapping[str, Any]) -> Scheduler:
    if isinstance(found, type) and callable(getattr(found, "schedule", None)):
        return _factory(text, found, arguments)
    if isinstance(found, get_args(Settings)):
        known = [field.name for field in fields(found)]
        for name in arguments:
            if name not in known:
                raise unknown(f"setting of {text.partition(':')[0]}", name, known)
        return cast(Settings, replace(found, **arguments))
    if not callable(getattr(found, "schedule", None)):
        raise InputError(
            f"scheduler {text!r}: is a {type(found).__name__}: must be a class or object with a method schedule, or "
            "settings of windtunnel.policy"
        )
    if arguments:
        raise InputError(f"scheduler {text!r}: an object takes no settings: name its class instead")
    return cast(Scheduler, partial(deepcopy, found))


def _factory(text: str, kind: type, arguments: Mapping[str, Any]) -> Callable[[], PythonScheduler]:
    try:
        kind(**arguments)
    except TypeError as error:
        raise InputError(f"scheduler {text!r}: {error}") from error
    return partial(kind, **arguments)
