"""Classes that are made when they are first used are those that Python would have made at once."""

import dataclasses
import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from windtunnel.dataclass import dataclass


@dataclass(frozen=True)
class Kept:
    """Of a module, so that it can be pickled."""

    a: int
    b: tuple[int, ...] = ()


def family(make: Callable[..., Any]) -> tuple[type, ...]:
    """A class, one with more fields, and one without equality."""

    class Named(ABC):
        @property
        @abstractmethod
        def name(self) -> str: ...

    @make(frozen=True)
    class First(Named):
        a: int
        b: list[int] = field(default_factory=list)
        name: str = "x"

    @make(frozen=True, kw_only=True)
    class Second(First):
        c: float = 2.0

        def __post_init__(self) -> None:
            if self.c < 0:
                raise ValueError("c")

        def __repr__(self) -> str:
            return f"S{super().__repr__()}"

    @make(eq=False)
    class Third:
        a: int = 1

    @make(unsafe_hash=False)
    class Fourth:
        a: int = 1
        b: int = field(default=2, compare=False)
        c: int = field(default=3, repr=False)

    @make(frozen=True, repr=False)
    class Fifth:
        a: int
        b: int = field(default=2, hash=False)

        def __hash__(self) -> int:
            return 7

    return First, Second, Third, Fourth, Fifth


def test_equal_to_pythons() -> None:
    for ours, pythons in zip(family(dataclass), family(dataclasses.dataclass), strict=True):
        assert inspect.signature(ours) == inspect.signature(pythons)
        found, expected = ours(a=3), pythons(a=3)
        if pythons.__dataclass_params__.repr:  # type: ignore[attr-defined]
            assert repr(found) == repr(expected)
        assert dataclasses.asdict(found) == dataclasses.asdict(expected)
        assert [each.name for each in dataclasses.fields(ours)] == [each.name for each in dataclasses.fields(pythons)]
        assert getattr(ours, "__match_args__", None) == getattr(pythons, "__match_args__", None)
        assert (ours(a=3) == found) == (pythons(a=3) == expected)
        assert set(vars(ours)) == set(vars(pythons))
        assert (ours.__hash__ is None) == (pythons.__hash__ is None)
        assert str(ours.__dataclass_params__) == str(pythons.__dataclass_params__)  # type: ignore[attr-defined]
        assert (found == 3, found == ours(a=4)) == (expected == 3, expected == pythons(a=4))


def test_prints_itself_within_itself() -> None:
    @dataclass
    class Ring:
        a: object = None

    ring = Ring()
    ring.a = ring
    assert repr(ring).endswith("Ring(a=...)")


@pytest.mark.parametrize("which", [0, 1])
def test_frozen(which: int) -> None:
    found = family(dataclass)[which](a=1)
    with pytest.raises(FrozenInstanceError):
        found.a = 2
    assert dataclasses.replace(found, a=2).a == 2


def test_a_check_of_a_derived_class_comes_first_of_all() -> None:
    with pytest.raises(ValueError, match="c"):
        family(dataclass)[1](a=1, c=-1.0)


@pytest.mark.parametrize("looked_at", [hash, repr, dataclasses.fields, vars])
def test_looking_at_an_object_that_was_not_made_by_its_class(looked_at: Callable[[Any], Any]) -> None:
    @dataclass(frozen=True)
    class Bare:
        a: int

    found = Bare.__new__(Bare)
    vars(found)["a"] = 3
    looked_at(found)
    assert (found, hash(found)) == (Bare(3), hash(Bare(3)))


def test_pickled_and_hashed() -> None:
    assert pickle.loads(pickle.dumps(Kept(1, (2,)))) == Kept(1, (2,))
    assert len({Kept(1), Kept(1), Kept(2)}) == 2
    assert [hash(each(a=1)) for each in family(dataclass)[3:][1:]] == [7]
