"""Workloads made from an arrival process and a length distribution: whole, or in pieces that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from zlib import crc32

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.workload.arrivals import AllAtOnce, Arrivals, Gamma, Modulated, Renewal
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Banded, Both, Empirical, Lengths, Lognormal, Split
from windtunnel.workload.rules import LARGEST, Floats, Integers

MOST_REQUESTS = 50_000_000
"""A request takes about a kilobyte while it is simulated."""
SIZE = 1 << 18
"""Requests of a piece."""


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random stream of one purpose: streams of different purposes or seeds are independent."""
    if seed < 0:
        raise InputError(f"seed={seed}: must be ≥ 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, crc32(purpose.encode())])))


def check_count(name: str, value: int) -> None:
    """Refuse a number of requests: none, or more than fit into memory."""
    if value < 1:
        raise InputError(f"{name}={value}: must be ≥ 1")
    if value > MOST_REQUESTS:
        raise InputError(f"{name}={value}: must be ≤ {MOST_REQUESTS:,}: more do not fit into memory")


def generate(
    arrivals: Arrivals,
    lengths: Lengths,
    num_requests: int,
    seed: int = 0,
    *,
    max_concurrency: int = 0,
    name: str = "synthetic",
) -> Workload:
    """Requests with these arrivals and lengths.

    The two draw from their own streams, so another length distribution leaves the arrivals bit for bit as they
    were, and the other way round. ``max_concurrency`` > 0 closes the loop.
    """
    check_count("num_requests", num_requests)
    arrival = arrivals.times(num_requests, stream(seed, "arrivals"))
    prompt, output = lengths.sample(num_requests, stream(seed, "lengths"))
    return Workload.from_columns(
        arrival=arrival, prompt_tokens=prompt, output_tokens=output, max_concurrency=max_concurrency, name=name
    )


@dataclass(frozen=True)
class Drawn:
    """Requests with these arrivals and lengths, as ``generate`` draws them; iterate over it as often as you like.

    Raises InputError where a later request depends on all earlier ones in a way that no piece can know.
    """

    arrivals: Arrivals
    lengths: Lengths
    num_requests: int
    seed: int = 0
    name: str = "synthetic"
    size: int = SIZE
    """Requests of a piece."""

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn in pieces."""
        for name in ("num_requests", "size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1")
        steady = self.arrivals.steady if isinstance(self.arrivals, Modulated) else self.arrivals
        if not isinstance(steady, Gamma | Renewal | AllAtOnce):
            raise InputError(
                f"arrivals {type(steady).__name__}: cannot be drawn in pieces: use a rate, or do not stream"
            )
        drawn = (self.lengths.prompt, self.lengths.output) if isinstance(self.lengths, Both) else (self.lengths,)
        for one in drawn:
            bounded = isinstance(one, Lognormal) and (one.low > 1 or one.high < LARGEST)
            if bounded or isinstance(one, Split):
                raise InputError(f"lengths {one}: cannot be drawn in pieces: draw others, or do not stream")

    def __iter__(self) -> Iterator[Workload]:
        """The pieces, in order."""
        rows = zip(_times(self.arrivals, self._sizes(), self.seed), self._tokens(), strict=True)
        for arrival, (prompt, output) in rows:
            yield Workload.from_columns(arrival=arrival, prompt_tokens=prompt, output_tokens=output, name=self.name)

    def _sizes(self) -> list[int]:
        whole, rest = divmod(self.num_requests, self.size)
        return [self.size] * whole + [rest] * (rest > 0)

    def _tokens(self) -> Iterator[tuple[Integers, Integers]]:
        """Prompt and output tokens; where all prompts are drawn before the first output, by two streams."""
        lengths, rng = self.lengths, stream(self.seed, "lengths")
        second = deepcopy(rng)
        for size in self._sizes():
            if isinstance(lengths, Both):
                lengths.prompt.draw(size, second)
            elif isinstance(lengths, Banded):
                second.random(size)
        done = 0
        for size in self._sizes():
            if isinstance(lengths, Both):
                yield lengths.prompt.draw(size, rng), lengths.output.draw(size, second)
            elif isinstance(lengths, Banded):
                yield lengths.at(rng.random(size), second.random(size))
            else:
                assert isinstance(lengths, Empirical)
                rows = np.arange(done, done + size) % len(lengths.prompt_tokens)
                drawn = rows if lengths.in_order else rng.integers(len(lengths.prompt_tokens), size=size)
                yield lengths.prompt_tokens[drawn], lengths.output_tokens[drawn]
            done += size


def _times(arrivals: Arrivals, sizes: list[int], seed: int) -> Iterator[Floats]:
    """When the requests of each piece arrive."""
    if isinstance(arrivals, Modulated):
        yield from map(arrivals.bent, _times(arrivals.steady, sizes, seed))
    elif isinstance(arrivals, AllAtOnce):
        yield from map(np.zeros, sizes)
    else:
        assert isinstance(arrivals, Gamma | Renewal)
        factor = 1.0
        if arrivals.exact_duration:
            last = 0.0
            for elapsed in _elapsed(arrivals, sizes, seed):
                last = float(elapsed[-1])
            factor = sum(sizes) / arrivals.rate / last
        for elapsed in _elapsed(arrivals, sizes, seed):
            yield elapsed * factor if arrivals.exact_duration else elapsed


def _elapsed(arrivals: Gamma | Renewal, sizes: list[int], seed: int) -> Iterator[Floats]:
    """Times before they are stretched, added up in the order of the whole."""
    rng, passed = stream(seed, "arrivals"), 0.0
    for size in sizes:
        gaps, rate = arrivals.drawn(size, rng)
        sums = np.cumsum(np.concatenate([[passed], gaps]))[1:]
        passed = float(sums[-1])
        yield sums / rate


def cut(workload: Workload, size: int = SIZE) -> Iterator[Workload]:
    """A workload that is there, in pieces. Raises InputError where its requests wait for each other or share text."""
    if workload.released_by_ends or workload.texts is not None:
        raise InputError(f"{workload.name}: its requests wait for each other or share text: do not stream it")
    for first in range(0, len(workload), size):
        yield workload.take(np.arange(first, min(first + size, len(workload))))
