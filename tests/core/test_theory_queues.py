"""Queueing theory as oracle: the core against formulas that were not fitted to it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.queueing import SYNCHRONOUS, Floats, check, estimate, poisson, poisson_shares, serve, sojourn, stationary
from windtunnel.core.engine import Record
from windtunnel.policy import Limits

N = 40_000
"""Requests in each replication."""


def one_at_a_time(longest: int = 16) -> Limits:
    return Limits(
        max_num_seqs=1, max_num_batched_tokens=longest, max_model_len=longest + 1, num_blocks=longest, block_size=16
    )


def md1(rate: float, service: float) -> float:
    """Mean sojourn with Poisson arrivals and equal services: D + λD²/(2(1 − λD))."""
    return service + rate * service**2 / (2 * (1 - rate * service))


def mg1(rate: float, mean: float, square: float) -> float:
    """Pollaczek and Khinchine: mean sojourn by the first two moments of the service."""
    return mean + rate * square / (2 * (1 - rate * mean))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_d_1(load: float) -> None:
    found = estimate(lambda rng: serve(poisson(rng, load, N), base=1.0, limits=one_at_a_time()))
    check(found, md1(load, 1.0))


@pytest.mark.parametrize("speed_up", [1.3, 1.7])
def test_tensor_parallelism_is_a_faster_server(speed_up: float) -> None:
    """DistServe, section 3.1: D/K + RD²/(2K(K − RD)) for a speed-up K."""
    rate = 0.8
    found = estimate(lambda rng: serve(poisson(rng, rate, N), base=1 / speed_up, limits=one_at_a_time()))
    check(found, 1 / speed_up + rate / (2 * speed_up * (speed_up - rate)))


def test_m_m_1() -> None:
    """Geometric prompts: mean by Pollaczek and Khinchine, 90 % quantile ln 10/(μ − λ) but for the time of a token."""
    rate, tokens, n = 0.7, 1000, 2 * N
    limits = one_at_a_time(2**15)

    def one(rng: np.random.Generator) -> Record:
        return serve(poisson(rng, rate, n), rng.geometric(1 / tokens, n), token=1e-3, limits=limits)

    check(estimate(one), mg1(rate, 1.0, (2 - 1 / tokens) * tokens**2 * 1e-6))
    check(estimate(one, lambda values: np.percentile(values, 90)), math.log(10) / (1 - rate), bias=1e-3)


def test_m_g_1_with_lognormal_prompts() -> None:
    """Services from 1,000 quantiles of a lognormal distribution with coefficient of variation 1.3, moments exact."""
    rate, rng = 0.7, np.random.default_rng(5)
    prompts = np.ceil(np.sort(rng.lognormal(6.0, 1.0, 1000))).astype(np.int64)
    token = 1 / float(prompts.mean())
    limits = one_at_a_time(int(prompts.max()))

    def one(rng: np.random.Generator) -> Record:
        return serve(poisson(rng, rate, N), rng.choice(prompts, N), token=token, limits=limits)

    check(estimate(one), mg1(rate, 1.0, float((prompts**2).mean()) * token**2), precision=0.015)


def bulk(rate: float, size: int, states: int = 400) -> float:
    """Mean sojourn of M/D^b/1 with services of 1: batches of up to b, an idle server starts with one request.

    Embedded chain at the ends of services: q' = max(q − b, 0) + A, or A after an idle time; A is Poisson. A service
    that starts with m requests in the system holds m + λ/2 on average; L over a cycle divided by λ (Little).
    """
    arrivals = poisson_shares(rate, states)
    chain = np.zeros((states, states))
    for q in range(states):
        left = max(q - size, 0)
        chain[q, left:] = arrivals[: states - left]
        chain[q, -1] += 1 - chain[q].sum()
    share = stationary(chain)
    started = np.maximum(np.arange(states), 1)
    held, lasted = float(share @ (started + rate / 2)), 1 + float(share[0]) / rate
    return held / lasted / rate


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bulk_service(size: int) -> None:
    """A batch takes as long however many it holds: what batching is worth, at a load of 0.8."""
    rate = 0.8 * size
    limits = Limits(max_num_seqs=size, max_num_batched_tokens=size, max_model_len=2, num_blocks=size, block_size=1)
    check(estimate(lambda rng: serve(poisson(rng, rate, N), base=1.0, limits=limits)), bulk(rate, size))


def test_bulk_service_of_one_is_m_d_1() -> None:
    assert bulk(0.8, 1) == pytest.approx(md1(0.8, 1.0), rel=1e-9)


@pytest.mark.parametrize("size", [250, 1000])
def test_processor_sharing(size: int) -> None:
    """Decodes share the GPU: E[T | x] = x/(1 − ρ), whatever the others' lengths are.

    A step takes c·B for B requests, each of which gets one token. What a request waits for the end of the step that
    runs when it comes is less than two steps of the mean batch.
    """
    load, step = 0.5, 1e-3
    lengths = np.array([250, 1000])
    rate = load / (step * float(lengths.mean()))
    limits = Limits(max_num_seqs=128, max_num_batched_tokens=128, max_model_len=1002, num_blocks=2**14, block_size=16)
    n = N // 4

    def one(rng: np.random.Generator) -> Record:
        return serve(poisson(rng, rate, n), 1, rng.choice(lengths, n), token=step, limits=limits)

    def of_size(record: Record) -> Floats:
        return np.where(record.requests["output"] == size, sojourn(record), np.nan)

    batch = 1 + load / (1 - load)
    check(estimate(one, np.nanmean, of_size), size * step / (1 - load), bias=2 * batch * step)


def test_a_random_split_leaves_poisson_streams() -> None:
    replicas, rate = 4, 0.8

    def one(rng: np.random.Generator) -> Record:
        arrival = poisson(rng, replicas * rate, 2 * N)
        return serve(arrival, base=1.0, limits=one_at_a_time(), replicas=replicas, router=1, uniforms=rng.random(2 * N))

    check(estimate(one), md1(rate, 1.0))


def crommelin(rate: float, servers: int, states: int = 400) -> float:
    """Mean sojourn of M/D/c with services of 1: N(t + 1) = max(N(t) − c, 0) + A for the number present, A Poisson."""
    chain = np.zeros((states, states))
    arrivals = poisson_shares(rate, states)
    for held in range(states):
        left = max(held - servers, 0)
        chain[held, left:] = arrivals[: states - left]
        chain[held, -1] += 1 - chain[held].sum()
    return 1 + float(stationary(chain) @ np.maximum(np.arange(states) - servers, 0)) / rate


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_in_turn_are_a_common_queue(replicas: int) -> None:
    """With equal services, servers that share a queue become free in turn: round robin is M/D/c."""
    rate = 0.8 * replicas

    def one(rng: np.random.Generator) -> Record:
        return serve(poisson(rng, rate, N), base=1.0, limits=one_at_a_time(), replicas=replicas)

    check(estimate(one), crommelin(rate, replicas))


def test_a_common_queue_of_one_server_is_m_d_1() -> None:
    assert crommelin(0.8, 1) == pytest.approx(md1(0.8, 1.0), rel=1e-9)


def classes(rng: np.random.Generator) -> tuple[Floats, Any, Any]:
    """Arrivals, prompts and classes: a third of the requests goes first, and is shorter."""
    first = rng.random(2 * N) < 1 / 3
    return poisson(rng, 0.7, 2 * N), np.where(first, 600, 1200), np.where(first, 0, 1)


RATES, SERVICES = np.array([0.7 / 3, 1.4 / 3]), np.array([0.6, 1.2])
"""Of the classes, with a millisecond a token."""
RESIDUAL = float(RATES @ SERVICES**2) / 2
"""W0: what is left of the service that an arrival finds."""


def served_by(order: Any, rng: np.random.Generator) -> Record:
    arrival, prompt, priority = classes(rng)
    policy = replace(SYNCHRONOUS, admission_order=order)
    return serve(arrival, prompt, token=1e-3, limits=one_at_a_time(1200), priority=priority, policy=policy)


@pytest.mark.parametrize("kind", [0, 1])
def test_priorities(kind: int) -> None:
    """Cobham: W_k = W0/((1 − σ_{k−1})(1 − σ_k)) for classes whose service is not interrupted."""
    loads = np.concatenate(([0.0], np.cumsum(RATES * SERVICES)))
    wait = RESIDUAL / ((1 - loads[kind]) * (1 - loads[kind + 1]))

    def of_kind(record: Record) -> Floats:
        return np.where(record.requests["prompt"] == 600 * (kind + 1), sojourn(record), np.nan)

    found = estimate(lambda rng: served_by("priority", rng), np.nanmean, of_kind)
    check(found, wait + float(SERVICES[kind]), precision=0.015)


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_what_one_class_gains_another_loses(order: str) -> None:
    """Kleinrock's conservation law: Σ ρ_k W_k = ρ W0/(1 − ρ), whatever the order."""
    load = float(RATES @ SERVICES)

    def weighted_wait(record: Record) -> Floats:
        service = record.requests["prompt"] * 1e-3
        return (sojourn(record) - service) * service / float(RATES @ SERVICES / RATES.sum())

    found = estimate(lambda rng: served_by(order, rng), value=weighted_wait)
    check(found, RESIDUAL / (1 - load), precision=0.02)
