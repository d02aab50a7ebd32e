"""Sizes: whole numbers that a layer or a model cannot do without."""

from windtunnel.errors import InputError


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
