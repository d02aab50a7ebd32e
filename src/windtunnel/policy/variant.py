"""llm-d's variant autoscaler by its queueing model: the requests/s that a replica serves within limits on its means.

A replica is an M/M/1 queue of limited length, whose rate of service depends on how many it serves. Three parameters say
how long an iteration takes; an extended Kalman filter learns them from the means of TTFT and time per token that are
seen. Rules and constants: llm-d-workload-variant-autoscaler b08b1c77 (February 2026), pkg/analyzer/queueanalyzer.go and
internal/engines/analyzers/queueingmodel/tuner, and the README of that analyzer (pull request 893, March 2026).
"""

from collections.abc import Callable
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.policy.look import Look, Traffic

Floats = NDArray[np.float64]

START = (5e-3, 5e-5, 5e-8)
"""Parameters where none can be guessed: seconds of an iteration, for each token computed, for each token of KV read."""
FACTORS = (0.01, 100.0)
"""Of the parameters at the start: the least and the most that they may become."""
BASE = 0.9
"""Share of the time per token that is taken for an iteration's own at the start."""
CHANGE = 0.05
"""Standard deviation of a parameter's change from look to look, as a share of it."""
NOISE = 0.05 / 1.96
"""Standard deviation of what is seen, as a share of it."""
MOST_SURPRISE = 7.378
"""Normalised squared innovation from which on a look is an outlier."""
QUEUE, QUEUE_OF_TUNER = 100, 10
"""Requests that may wait: when a replica is sized; times its seats when parameters are learned."""
MARGIN = 1e-3
"""The least rate that is tried is this share of the lowest rate of service; the most is below the highest by it."""
HALVINGS, CLOSE = 100, 1e-6
"""Of a search for a rate, and the relative distance at which it ends."""
STEP = 1e-4
"""Relative step of a derivative."""


class Means(NamedTuple):
    """What the model expects at a rate, in seconds and requests/s."""

    wait: float
    prefill: float
    token: float
    throughput: float

    @property
    def ttft(self) -> float:
        """Until the first token, its decode included."""
        return self.wait + self.prefill + self.token


@dataclass(frozen=True, eq=False)
class Replica:
    """The queueing model of one replica."""

    parameters: Floats
    prompt: float
    answer: float
    seats: int
    queue: int

    def iteration(self, running: Floats) -> Floats:
        """Seconds of an iteration by its number of requests, each at the mean of its tokens."""
        alpha, beta, gamma = self.parameters
        computed = (self.prompt + self.answer) / (self.answer + 1)
        found: Floats = alpha + running * (beta * computed + gamma * (self.prompt + self.answer / 2))
        return found

    def prefill(self, running: Floats) -> Floats:
        """Seconds of a prompt."""
        found: Floats = self.iteration(running) + (self.parameters[1] + self.parameters[2]) * self.prompt
        return found

    @cached_property
    def rates(self) -> Floats:
        """Requests/s that end, by how many are served."""
        n = np.arange(1.0, self.seats + 1)
        _, beta, gamma = self.parameters
        token = self.iteration(n) + beta + gamma * (self.prompt + self.answer / 2)
        found: Floats = n / (self.prefill(n) + self.answer * token)
        return found

    def means(self, rate: float) -> Means:
        """In the steady state of a birth-and-death process: p[n] = p[n − 1] · rate / (service rate of n)."""
        rates, most = self.rates, self.seats + self.queue
        logs = np.concatenate([[0.0], np.log(rate / rates), np.full(self.queue, np.log(rate / rates[-1]))]).cumsum()
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        number = np.arange(most + 1.0)
        served, throughput = float((np.minimum(number, self.seats) * shares).sum()), rate * (1 - float(shares[-1]))
        prefill, wait = float(self.prefill(np.array(served))), (float((number * shares).sum()) - served) / throughput
        return Means(max(wait, 0.0), prefill, (served / throughput - prefill) / self.answer, throughput)

    def sized(self, ttft: float, token: float) -> float | None:
        """Requests/s that it serves within limits on its means; None where not even one alone keeps them."""
        least, most = self.rates[0] * MARGIN, self.rates[-1] * (1 - MARGIN)
        found = [
            _rate_at(lambda rate: self.means(rate).ttft, ttft, least, most),
            _rate_at(lambda rate: self.means(rate).token, token, least, most),
        ]
        rates = [rate for rate in found if rate is not None]
        return self.means(min(rates)).throughput if len(rates) == len(found) else None


def _rate_at(value: Callable[[float], float], limit: float, least: float, most: float) -> float | None:
    """The rate at which a value that grows with it reaches a limit; None: it is above it at the least."""
    if value(least) > limit:
        return None
    if value(most) <= limit:
        return most
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        seen = value(middle)
        if abs(seen - limit) <= CLOSE * limit:
            return middle
        least, most = (least, middle) if seen > limit else (middle, most)
    return (least + most) / 2


@dataclass
class Tuner:
    """Parameters as they are learned."""

    parameters: Floats | None = None
    covariance: Floats | None = None
    start: Floats | None = None
    """The first parameters, whose ``FACTORS`` bound what is learned; None: they are guessed."""

    def learn(self, seen: Traffic) -> None:
        """From what was seen since the look before; nothing where the model has no steady state at that rate, or where
        it would be an outlier."""
        if self.start is None:
            self.start = np.array(guess(seen) or START)
        if self.parameters is None or self.covariance is None:
            self.parameters, self.covariance = self.start, np.diag((CHANGE * self.start) ** 2)
        now, observed = self.parameters, np.array([seen.ttft, seen.token])
        expected, slopes = self._expected(now, seen), []
        for k, step in enumerate(STEP * now):
            moved = self._expected(now + step * np.eye(len(now))[k], seen)
            if expected is None or moved is None:
                return
            slopes.append((moved - expected) / step)
        assert expected is not None
        slope, surprise = np.array(slopes).T, observed - expected
        before = self.covariance + np.diag((CHANGE * now) ** 2)
        spread = slope @ before @ slope.T + np.diag((NOISE * observed) ** 2)
        gain = before @ slope.T @ np.linalg.inv(spread)
        moved = np.clip(now + gain @ surprise, *(factor * self.start for factor in FACTORS))
        if surprise @ np.linalg.solve(spread, surprise) < MOST_SURPRISE:
            self.parameters, self.covariance = moved, (np.eye(len(now)) - gain @ slope) @ before

    def _expected(self, parameters: Floats, seen: Traffic) -> Floats | None:
        """TTFT (as the tuner has it, without the token's own decode) and time per token; None: no steady state."""
        replica = Replica(parameters, seen.prompt, seen.answer, seen.seats, QUEUE_OF_TUNER * seen.seats)
        if seen.rate > replica.rates[-1] * (1 - MARGIN):
            return None
        means = replica.means(seen.rate)
        return np.array([means.wait + means.prefill, means.token])


def guess(seen: Traffic) -> tuple[float, float, float] | None:
    """Parameters from one look, as if iterations took what they take of a request alone; None where one is not > 0."""
    alpha = BASE * seen.token
    both = (seen.ttft - alpha) / seen.prompt
    gamma = (seen.token - alpha - both) / (seen.prompt + (seen.answer + 1) / 2 - 1)
    found = alpha, both - gamma, gamma
    return found if min(found) > 0 else None


class Sizing:
    """The rule of one run: parameters are learned from look to look."""

    def __init__(
        self, ttft: float, tpot: float, slo_multiplier: float, start: tuple[float, float, float] | None = None
    ) -> None:
        self.ttft, self.tpot, self.slo_multiplier = ttft, tpot, slo_multiplier
        self.tuner = Tuner(start=None if start is None else np.array(start))

    def wanted(self, look: Look) -> int:
        """As many as the rate needs, each at the most that keeps the limits; as many as there are where nothing was
        seen, or no rate keeps them."""
        if not look.traffic:
            return look.replicas
        for one in look.traffic:
            self.tuner.learn(one)
        assert self.tuner.parameters is not None
        alpha, beta, gamma = parameters = self.tuner.parameters
        rates = [one.rate for one in look.traffic]
        prompt, answer = (
            float(np.average([getattr(one, name) for one in look.traffic], weights=rates))
            for name in ("prompt", "answer")
        )
        ttft, token, shortest = self.ttft, self.tpot, self.slo_multiplier * alpha
        if ttft == inf:
            ttft, token = shortest + (beta + gamma) * prompt, shortest + beta + gamma * (prompt + (answer + 1) / 2)
        rate = Replica(parameters, prompt, answer, look.traffic[0].seats, QUEUE).sized(float(ttft), float(token))
        return look.replicas if rate is None else ceil(sum(rates) / rate)
