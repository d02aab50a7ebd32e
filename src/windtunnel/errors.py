"""Errors that a user can mend, and checks of words and numbers. Everything else is a bug and keeps its traceback."""

import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class InputError(ValueError):
    """A wrong input: the message gives the value, the rule and the way out, in one line.

    The command line prints it and exits with 2.
    """


class UnknownName(InputError):  # noqa: N818 - it says what is wrong
    """A name that does not exist, wherever it stands: a slip of the pen, never a matter of what goes together."""


class InputWarning(UserWarning):
    """An input that is taken as it is, and is probably meant otherwise; the command line prints it and goes on."""


def warn(text: str) -> None:
    """Warn of an input, once."""
    warnings.warn(text, InputWarning, stacklevel=3)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like ``name``, or None when nothing does; what ``name`` begins comes first."""
    by_lower = {choice.lower(): choice for choice in choices}
    begun = sorted((choice for choice in by_lower if name and choice.startswith(name.lower())), key=len)
    found = begun or get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown(kind: str, name: str, choices: Iterable[str], of: str = "") -> UnknownName:
    """The error for a name that does not exist: says which one was probably meant, or which there are. ``of``: what it
    would belong to."""
    known = sorted(choices)
    match = nearest(name, known)
    hint = f"did you mean {match!r}?" if match else f"known: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"
    return UnknownName(f"unknown {kind} {name!r}{of and f' of {of}'}: {hint}")


def require_words(settings: Any, of: str = "") -> None:
    """Raise UnknownName unless every field of a dataclass that takes one of some words (``Literal``) has one of them.

    ``of``: what is said after the field's name.
    """
    kind: Any = type(settings)
    for name, words in _words(kind).items():
        if (value := getattr(settings, name)) not in words:
            raise unknown(f"{name}{of}", str(value), [word for word in words if word is not None])


@cache
def _words(kind: Any) -> dict[str, tuple[str | None, ...]]:
    """Field → its words, and None if it may have none."""
    found = {name: words_of(hint) for name, hint in get_type_hints(kind).items()}
    return {name: words for name, words in found.items() if words}


def words_of(hint: Any) -> tuple[str | None, ...]:
    """The words that a type allows (``Literal``), and None if it may be none; empty for other types."""
    parts = get_args(hint) if NoneType in get_args(hint) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    if not words or not all(isinstance(word, str) for word in words):
        return ()
    return (*words, None) if NoneType in parts else words


def require_positive(owner: str, **values: int) -> None:
    """Raise InputError unless every value is an integer ≥ 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{owner}: {name}={value!r}: must be an integer ≥ 1")


def require_not_negative(owner: str, **values: int) -> None:
    """Raise InputError unless every value is an integer ≥ 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{owner}: {name}={value!r}: must be an integer ≥ 0")
