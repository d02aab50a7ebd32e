"""How long requests are: small values with one method, ``sample(n, rng)`` → (prompt, output) tokens.

`Both` pairs two independent one-sided distributions (`Fixed`, `Uniform`, `RangeRatio`, `Lognormal`, `Zipf`), each with
``draw(n, rng)`` → n tokens. Every bound is a parameter; nothing is clipped that is not asked for.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.workload.quantiles import Quantiles
from windtunnel.workload.rules import LARGEST, Floats, Integers


class Lengths(Protocol):
    """Anything that can say how long the prompts and outputs of n requests are."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Tokens of n prompts and of their outputs, each ≥ 1."""
        ...


class OneLength(Protocol):
    """A distribution of one token count."""

    def draw(self, n: int, rng: np.random.Generator) -> Integers:
        """The token counts ≥ 1."""
        ...


def _check_tokens(name: str, value: float) -> None:
    if not 1 <= value <= LARGEST:
        raise InputError(f"{name}={value:g}: must be from 1 to 2^40 tokens")


def _check_range(low: float, high: float) -> None:
    _check_tokens("low", low)
    _check_tokens("high", high)
    if low > high:
        raise InputError(f"low={low:g}, high={high:g}: low ≤ high must hold")


@dataclass(frozen=True)
class Fixed:
    """Always the same count."""

    tokens: int
    """The length of every request, ≥ 1."""

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        _check_tokens("tokens", self.tokens)

    def draw(self, n: int, rng: np.random.Generator) -> Integers:  # noqa: ARG002 - no chance involved
        """One count, n times."""
        return np.full(n, self.tokens, np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every whole number from low to high (both included) equally often."""

    low: int
    """Fewest tokens, ≥ 1."""
    high: int
    """Most tokens, ≥ low."""

    def __post_init__(self) -> None:
        """Refuse empty ranges."""
        _check_range(self.low, self.high)

    def draw(self, n: int, rng: np.random.Generator) -> Integers:
        """Uniform counts."""
        return rng.integers(self.low, self.high, n, np.int64, endpoint=True)


def RangeRatio(tokens: int, ratio: float) -> Uniform:  # noqa: N802 - reads as the other distributions do
    """Uniform from ⌊tokens·(1−ratio)⌋ (at least 1) to ⌈tokens·(1+ratio)⌉: vLLM's `--random-range-ratio`, 0 ≤ ratio < 1.

    This is the rule of vLLM's `RandomDataset`; there the tokenizer's special tokens come off the prompt first.
    """
    if not 0 <= ratio < 1:
        raise InputError(f"random_range_ratio={ratio:g}: must be ≥ 0 and < 1 (0 is a fixed length)")
    _check_tokens("tokens", tokens)
    return Uniform(max(1, math.floor(tokens * (1 - ratio))), math.ceil(tokens * (1 + ratio)))


@dataclass(frozen=True)
class Lognormal:
    """A lognormal count, rounded up; values above ``high`` or below ``low`` are drawn again.

    ``mean`` is the mean before rounding and bounding: μ = ln(mean) − σ²/2.
    """

    mean: float
    """Mean tokens without bounds, ≥ 1."""
    sigma: float
    """Standard deviation of the logarithm, ≥ 0; 0.8 to 1.3 is usual for chat."""
    high: int = LARGEST
    """Most tokens; a draw above it is repeated, so the mean falls a little."""
    low: int = 1
    """Fewest tokens; a draw below it is repeated."""

    def __post_init__(self) -> None:
        """Refuse bounds that (nearly) no draw would satisfy."""
        _check_tokens("mean", self.mean)
        _check_range(self.low, self.high)
        if not 0 <= self.sigma <= 10:
            raise InputError(f"sigma={self.sigma:g}: must be from 0 to 10")
        if not self._share_inside() >= 0.01:
            raise InputError(
                f"low={self.low}, high={self.high}: only {self._share_inside():.2g} of a lognormal of mean "
                f"{self.mean:g} and sigma {self.sigma:g} lies inside; widen the bounds"
            )

    def _share_inside(self) -> float:
        mu = math.log(self.mean) - self.sigma**2 / 2
        if self.sigma == 0:
            return float(self.low <= math.ceil(self.mean) <= self.high)
        below = [math.erfc(-(math.log(x) - mu) / self.sigma / math.sqrt(2)) / 2 for x in (self.low, self.high) if x > 0]
        return below[1] - (below[0] if self.low > 1 else 0.0)

    def draw(self, n: int, rng: np.random.Generator) -> Integers:
        """Lognormal counts inside the bounds."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        tokens = np.empty(n)
        wanted = np.arange(n)
        while len(wanted):
            tokens[wanted] = np.ceil(rng.lognormal(mu, self.sigma, len(wanted)))
            wanted = wanted[~((tokens[wanted] >= self.low) & (tokens[wanted] <= self.high))]
        return tokens.astype(np.int64)


@dataclass(frozen=True)
class Zipf:
    """Counts from low to high with probability ∝ 1/(rank)^theta, the rank of a count being count − low + 1."""

    theta: float
    """Skew, ≥ 0: 0 is uniform, larger prefers short requests."""
    low: int
    """Fewest tokens, ≥ 1."""
    high: int
    """Most tokens, ≥ low, at most 10 million more."""

    def __post_init__(self) -> None:
        """Refuse empty and enormous ranges."""
        _check_range(self.low, self.high)
        if self.high - self.low > 10_000_000:
            raise InputError(f"high={self.high}: must be at most 10 million above low={self.low}")
        if not 0 <= self.theta <= 20:
            raise InputError(f"theta={self.theta:g}: must be from 0 to 20")

    def draw(self, n: int, rng: np.random.Generator) -> Integers:
        """Zipf-distributed counts by inversion."""
        chance = np.cumsum(np.arange(1, self.high - self.low + 2, dtype=np.float64) ** -self.theta)
        ranks = np.searchsorted(chance, rng.random(n) * chance[-1], side="right")
        counts: Integers = ranks.astype(np.int64) + self.low
        return counts


@dataclass(frozen=True)
class Both:
    """Prompt and output drawn independently."""

    prompt: OneLength
    """Distribution of prompt tokens."""
    output: OneLength
    """Distribution of output tokens."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """All prompts first, then all outputs."""
        return self.prompt.draw(n, rng), self.output.draw(n, rng)


@dataclass(frozen=True)
class Split:
    """A total drawn first, then divided at a fixed prompt:output ratio, as Vidur's uniform and Zipf generators do."""

    total: OneLength
    """Distribution of prompt + output tokens, ≥ 2."""
    prompt_to_output: float
    """P:D ratio, > 0: the output has ⌈total/(1 + ratio)⌉ tokens, at least 1 being left for the prompt."""

    def __post_init__(self) -> None:
        """Refuse ratios that are not positive."""
        if not (math.isfinite(self.prompt_to_output) and self.prompt_to_output > 0):
            raise InputError(f"prompt_to_output={self.prompt_to_output:g}: must be finite and > 0")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Totals divided into prompt and output; a total of 1 cannot be divided."""
        total = self.total.draw(n, rng)
        if total.min() < 2:
            raise InputError(f"total={total.min()}: must be ≥ 2 tokens to be divided into prompt and output")
        output = np.minimum(np.ceil(total / (1 + self.prompt_to_output)).astype(np.int64), total - 1)
        return total - output, output


@dataclass(frozen=True, eq=False)
class Empirical:
    """Pairs of a trace, drawn jointly with replacement, so that prompt and output keep their correlation."""

    prompt_tokens: Integers
    """Prompt tokens of the observed requests."""
    output_tokens: Integers
    """Output tokens of the same requests."""
    in_order: bool = False
    """Take the pairs in their order (from the start again when they run out) instead of at random."""

    def __post_init__(self) -> None:
        """Refuse empty and unequal columns."""
        prompts, outputs = len(self.prompt_tokens), len(self.output_tokens)
        if prompts != outputs or not prompts:
            raise InputError(f"{prompts} prompt and {outputs} output lengths: must be equally many, at least 1")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Pairs of the trace."""
        rows = (
            np.arange(n) % len(self.prompt_tokens) if self.in_order else rng.integers(len(self.prompt_tokens), size=n)
        )
        return self.prompt_tokens[rows], self.output_tokens[rows]


@dataclass(frozen=True)
class Banded:
    """Prompts by a table of quantiles, outputs by one table for each band of prompts: keeps how the two depend.

    The bands hold equal shares of the requests, shortest prompts first. Counts are rounded to whole tokens.
    """

    prompt: Quantiles
    """Prompt tokens."""
    outputs: tuple[Quantiles, ...]
    """Output tokens, per band."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Prompts at random levels, then outputs at random levels of each prompt's band."""
        return self.at(rng.random(n), rng.random(n))

    def at(self, level: Floats, other: Floats) -> tuple[Integers, Integers]:
        """Prompts and outputs at these levels, 0 to 1."""
        band = (level * len(self.outputs)).astype(np.int64)
        output = np.empty(len(level))
        for index, table in enumerate(self.outputs):
            output[band == index] = table.at(other[band == index])
        return _whole(self.prompt.at(level)), _whole(output)


def _whole(tokens: Floats) -> Integers:
    whole: Integers = np.maximum(np.rint(tokens), 1).astype(np.int64)
    return whole
