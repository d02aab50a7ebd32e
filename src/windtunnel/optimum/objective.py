"""Objective: what a schedule is to be good at, one number that is to be small."""

import math
from fractions import Fraction
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError, unknown

MEASURES = ("makespan", "mean-e2el", "mean-ttft", "mean-tpot")
Integers = NDArray[np.int64]
GOODPUT = "goodput"
FINEST = 10_000
"""Largest denominator that weights are rounded to, so that programs count in whole numbers."""


class Whole(NamedTuple):
    """Weights as whole numbers."""

    makespan: int
    mean_e2el: int
    mean_ttft: int
    mean_tpot: int
    scale: int
    """What the weight 1 is."""


@dataclass(frozen=True)
class Objective:
    """A weighted sum of seconds, or the share of requests that miss a limit."""

    makespan: float = 0.0
    """Weight of the time from the first arrival to the last token."""
    mean_e2el: float = 0.0
    """Weight of the mean time from arrival to the last token."""
    mean_ttft: float = 0.0
    """Weight of the mean time from arrival to the first token."""
    mean_tpot: float = 0.0
    """Weight of the mean time from one token to the next, of requests with more than one."""
    goodput: SLO | None = None
    """Limits of a good request, in seconds; then there are no weights."""

    def __post_init__(self) -> None:
        for weight in self.weights:
            if not (math.isfinite(weight) and weight >= 0):
                raise InputError(f"objective: weight {weight}: must be ≥ 0 and finite")
        if self.goodput is not None and not self.goodput.limits:
            raise InputError("objective=goodput: of which limits? add --goodput, e.g. ttft:300 tpot:50")
        if any(self.weights) == (self.goodput is not None):
            raise InputError("objective: give weights, or the limits of goodput; they are not of one unit")

    @classmethod
    def parse(cls, text: str, limits: SLO | None = None) -> Self:
        """``makespan``, ``makespan+0.5*mean-ttft`` or ``goodput``, which takes its limits from ``limits``.

        Raises InputError for anything else.
        """
        if text == GOODPUT:
            return cls(goodput=limits or SLO())
        weights: dict[str, float] = {}
        for term in text.split("+"):
            weight, times, name = term.strip().rpartition("*")
            if name.strip() not in MEASURES:
                raise unknown("objective", name.strip(), (*MEASURES, GOODPUT))
            field = name.strip().replace("-", "_")
            if field in weights:
                raise InputError(f"objective={text!r}: {name} is given twice")
            try:
                weights[field] = float(weight) if times else 1.0
            except ValueError as error:
                raise InputError(f"objective={text!r}: {weight!r} is not a number") from error
        makespan, e2el, ttft, tpot = (weights.get(name.replace("-", "_"), 0.0) for name in MEASURES)
        return cls(makespan, e2el, ttft, tpot)

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """As ``MEASURES``."""
        return self.makespan, self.mean_e2el, self.mean_ttft, self.mean_tpot

    @property
    def first_tokens_only(self) -> bool:
        """Whether all ends with the last first token: what comes after it does not count."""
        return self.mean_ttft > 0 and not (self.makespan or self.mean_e2el or self.mean_tpot)

    def sum_of(self, makespan: float, mean_e2el: float, mean_ttft: float, mean_tpot: float) -> float:
        """The weighted sum of values, or of bounds."""
        values = (makespan, mean_e2el, mean_ttft, mean_tpot)
        return sum(w * v for w, v in zip(self.weights, values, strict=True) if w)

    def shown(self, value: float) -> float:
        """A value or bound as it is told: of goodput the share of good requests."""
        return value if self.goodput is None else 1.0 - value

    def whole(self) -> Whole:
        """The weights as whole numbers, rounded where they are no fractions of small numbers."""
        parts = [Fraction(weight).limit_denominator(FINEST) for weight in self.weights]
        scale = int(np.lcm.reduce([part.denominator for part in parts]))
        makespan, e2el, ttft, tpot = (int(part * scale) for part in parts)
        return Whole(makespan, e2el, ttft, tpot, scale)

    def token_weights(self, output_tokens: Integers) -> tuple[int, list[int]]:
        """(What all other weights are multiplied by; the weight of each request's time from first to last token).

        Whole numbers: of ``mean_tpot``, for the sum over all requests. They are rounded down where no number up to
        ``FINEST`` makes all of them whole, so that a bound stays one.
        """
        several = [int(tokens) - 1 for tokens in output_tokens if tokens > 1]
        weight = self.whole().mean_tpot * len(output_tokens)
        if not weight or not several:
            return 1, [0] * len(output_tokens)
        shares = {gaps: Fraction(weight, len(several) * gaps) for gaps in set(several)}
        times = min(math.lcm(*(share.denominator for share in shares.values())), FINEST)
        return times, [math.floor(shares[int(tokens) - 1] * times) if tokens > 1 else 0 for tokens in output_tokens]

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        if self.goodput is not None:
            return GOODPUT
        terms = [(weight, name) for weight, name in zip(self.weights, MEASURES, strict=True) if weight]
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for weight, name in terms)


MAKESPAN, MEAN_E2EL, MEAN_TTFT = Objective(makespan=1.0), Objective(mean_e2el=1.0), Objective(mean_ttft=1.0)
MEAN_TPOT = Objective(mean_tpot=1.0)


def in_order(text: str, limits: SLO | None = None) -> tuple[Objective, ...]:
    """``makespan,mean-ttft``: objectives of which the first counts most. Raises InputError as ``Objective.parse``."""
    found = tuple(Objective.parse(part.strip(), limits) for part in text.split(","))
    if len(set(found)) < len(found):
        raise InputError(f"objective={text!r}: the same objective twice")
    return found
