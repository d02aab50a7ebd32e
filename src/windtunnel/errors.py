"""Errors that a user can mend, and checks of whole numbers. Everything else is a bug and keeps its traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """A wrong input: the message gives the value, the rule and the way out, in one line.

    The command line prints it and exits with 2.
    """


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like ``name``, or None when nothing does; what ``name`` begins comes first."""
    by_lower = {choice.lower(): choice for choice in choices}
    begun = sorted((choice for choice in by_lower if name and choice.startswith(name.lower())), key=len)
    found = begun or get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """The error for a name that does not exist: says which one was probably meant, or which there are."""
    known = sorted(choices)
    match = nearest(name, known)
    hint = f"did you mean {match!r}?" if match else f"known: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"
    return InputError(f"unknown {kind} {name!r}: {hint}")


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
