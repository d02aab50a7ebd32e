"""``dataclass`` as in Python's dataclasses, made when it is first used.

Python writes the source of six methods for every frozen class and compiles it: a tenth of a short run's time goes into
two hundred classes, of which most runs make no object. Here a class gets its methods when one of them, or its fields,
are looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass as made_at_once
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
                made_at_once(kind, **options)

    for name in left.copy():
        setattr(kind, name, _Later(name, kind, make))
    return kind


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - it is exported
else:
    dataclass = _made_later
