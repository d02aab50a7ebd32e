"""Predictions of output lengths: what a scheduler that decides by them is told, rightly or wrongly."""

from collections.abc import Callable
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, unknown
from windtunnel.policy.named import python_object

Integers = NDArray[np.int64]
Predictor = Callable[[Integers, Integers, np.random.Generator], Integers]
"""(prompt tokens, real output tokens, random numbers) → predicted output tokens, of all requests at once."""

LONGEST = 2**31 - 1
PREDICTORS = ("oracle", "noisy:0.6", "classes:4", "classes:4:0.2", "others", "FILE.py:FUNCTION")
"""The forms of a predictor's name."""


def predictor(text: str) -> Predictor:
    """The predictor of this name.

    Args:
        text: ``oracle`` (the real length), ``noisy:SIGMA`` (times a lognormal factor of median 1), ``classes:SIZE``
            (the end of its class, each SIZE times as long as the one before; ``classes:SIZE:WRONG``: for that share of
            requests of a class next to it), ``others`` (lengths of other requests) or ``FILE.py:FUNCTION`` (a
            Predictor of yours).

    Raises:
        InputError: another name, or numbers out of range.
    """
    name, *rest = text.split(":")
    if name.endswith(".py"):
        return _checked(text, python_object(text, ":".join(rest)))
    numbers = [_number(text, word) for word in rest]
    if name == "oracle" and not numbers:
        return lambda _, output, __: output
    if name == "others" and not numbers:
        return lambda _, output, rng: rng.permutation(output)
    if name == "noisy" and len(numbers) == 1:
        return lambda _, output, rng: noisy(output, numbers[0], rng)
    if name == "classes" and len(numbers) in (1, 2) and numbers[0] > 1 and (len(numbers) < 2 or numbers[1] <= 1):
        return lambda _, output, rng: classwise(output, numbers[0], numbers[1] if len(numbers) > 1 else 0.0, rng)
    raise unknown("predictor of outputs", text, PREDICTORS)


def noisy(output: Integers, spread: float, rng: np.random.Generator) -> Integers:
    """As often too long as too short, by a lognormal factor with this spread of its logarithm."""
    return _whole(np.asarray(output * np.exp(spread * rng.standard_normal(len(output))), dtype=np.float64))


def classwise(output: Integers, size: float, wrong: float, rng: np.random.Generator) -> Integers:
    """The end of the class that holds the length; for a share ``wrong`` of the requests that of a class next to it."""
    number = np.ceil(np.log(output) / np.log(size) - 1e-9)
    step = np.where(rng.random(len(output)) < wrong, rng.choice([-1.0, 1.0], len(output)), 0.0)
    return _whole(np.asarray(size ** np.maximum(number + step, 0), dtype=np.float64))


def _whole(lengths: NDArray[np.float64]) -> Integers:
    return np.clip(lengths, 1, LONGEST).astype(np.int64)


def _number(text: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise InputError(f"predictor {text!r}: {word!r} is no number, e.g. noisy:0.6") from None
    if not (isfinite(value) and value >= 0):
        raise InputError(f"predictor {text!r}: {word} must be ≥ 0")
    return value


def _checked(text: str, found: object) -> Predictor:
    """The user's function, which must give a length of at least 1 to every request."""
    if not callable(found):
        raise InputError(f"predictor {text!r}: is no function of (prompt_tokens, output_tokens, rng)")

    def predict(prompt: Integers, output: Integers, rng: np.random.Generator) -> Integers:
        try:
            lengths = np.asarray(found(prompt, output, rng))
        except Exception as error:
            raise InputError(f"predictor {text!r}: {type(error).__name__}: {error}") from error
        if lengths.shape != output.shape or not np.issubdtype(lengths.dtype, np.number) or not (lengths >= 1).all():
            raise InputError(f"predictor {text!r}: must return {len(output):,} numbers ≥ 1, one for each request")
        return _whole(lengths.astype(np.float64))

    return predict
