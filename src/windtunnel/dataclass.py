"""``dataclass`` as in Python's dataclasses, made when it is first used.

Python writes the source of six methods for every frozen class and compiles it: a tenth of a short run's time goes into
two hundred classes, of which half of the runs make no object. Here a class gets its methods when one of them, or its
fields, are looked at, and those that print, compare and hash are the same function for all classes.
"""

from collections.abc import Callable
from dataclasses import dataclass as made_at_once
from dataclasses import fields
from operator import attrgetter
from reprlib import recursive_repr
from threading import RLock
from typing import TYPE_CHECKING, Any

ONE_AT_A_TIME = RLock()
"""A class is made once, whichever thread uses it first."""
NAMES = ("__init__", "__repr__", "__dataclass_fields__", "__dataclass_params__", "__match_args__")
"""What every dataclass gets."""
COMPARED = ("__eq__", "__hash__")
"""What one with ``eq`` also gets."""


class _Later:
    """Stands in a class for what ``make`` puts in its place."""

    def __init__(self, name: str, kind: type, make: Callable[[], None]) -> None:
        self._name, self._kind, self._make = name, kind, make

    def __get__(self, instance: object, owner: type) -> Any:
        self._make()
        found = getattr(self._kind, self._name)
        return found if instance is None or not hasattr(found, "__get__") else found.__get__(instance, owner)


def _made_later(kind: Any = None, /, **options: Any) -> Any:
    """As ``dataclasses.dataclass``."""
    if kind is None:
        return lambda found: _made_later(found, **options)
    if options.keys() & {"slots", "order"} or "__init__" in vars(kind):  # another class, or made without our noticing
        return made_at_once(kind, **options)
    wanted = NAMES + (COMPARED if options.get("eq", True) else ())
    left = [name for name in wanted if name not in vars(kind)]

    def make() -> None:
        with ONE_AT_A_TIME:
            if left:
                for name in left:
                    delattr(kind, name)
                left.clear()
                made_at_once(kind, **options | {"repr": False, "eq": False})
                _complete(kind, options)

    for name in left.copy():
        setattr(kind, name, _Later(name, kind, make))
    return kind


def _complete(kind: Any, options: dict[str, Any]) -> None:
    """Add what prints, compares and hashes, where the class has none."""
    own, every = vars(kind), fields(kind)
    for name in ("repr", "eq"):
        setattr(kind.__dataclass_params__, name, options.get(name, True))
    if options.get("repr", True) and "__repr__" not in own:
        kind.__repr__ = _printed(tuple(each.name for each in every if each.repr))
    if not options.get("eq", True):
        return
    explicit = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    if "__eq__" not in own:
        kind.__eq__ = _compared(tuple(each.name for each in every if each.compare))
    if not explicit:
        hashed = (each.name for each in every if (each.compare if each.hash is None else each.hash))
        kind.__hash__ = _hashed(tuple(hashed)) if options.get("frozen") else None


def _printed(names: tuple[str, ...]) -> Callable[..., str]:
    def printed(self: object) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({values})"

    return recursive_repr()(printed)


def _compared(names: tuple[str, ...]) -> Callable[..., Any]:
    values = _values_of(names)

    def equal(self: object, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _hashed(names: tuple[str, ...]) -> Callable[..., int]:
    values = _values_of(names)

    def hashed(self: object) -> int:
        return hash(values(self))

    return hashed


def _values_of(names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda found: tuple([getattr(found, name) for name in names])


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - it is exported
else:
    dataclass = _made_later
