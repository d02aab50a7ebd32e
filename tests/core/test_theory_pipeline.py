"""A pipeline as a tandem of queues: where DistServe's formula holds, and what vLLM's engine makes of it."""

import numpy as np
import pytest

from core.queueing import Floats, check, estimate, poisson, poisson_shares, serve, stationary
from windtunnel.core.engine import Record
from windtunnel.policy import Limits, VllmV1

N = 40_000
"""Requests in each replication."""
STAGES, STAGE = 2, 0.5
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=2, max_model_len=4, num_blocks=8, block_size=1)
"""Prompts of two tokens: one request to a step."""
ENGINE = VllmV1(async_scheduling=False, pipeline_parallel_size=STAGES)


def pass_through(arrival: Floats) -> Record:
    """Requests through two stages of half a second."""
    return serve(arrival, 2, base=STAGE, limits=LIMITS, policy=ENGINE, stages=STAGES)


def tandem(rate: float) -> float:
    """Mean sojourn in two stages of D/2 each with Poisson arrivals (DistServe, section 3.1): D + λD²/(4(2 − λD))."""
    return 1 + rate / (4 * (2 - rate))


def blocking_tandem(rate: float, states: int = 160) -> float:
    """Mean sojourn where arrivals are seen only when the oldest step in flight has ended, as vLLM's engine does.

    Embedded chain at those moments, for q requests that wait and f ∈ {0, 1} steps still in flight, which then have half
    a second left. Without one, the engine starts one step, or two if it can, and looks up when the first has ended, a
    second later; with one, it starts one if it can and looks up half a second later. L over a cycle divided by λ.
    """
    half, whole = poisson_shares(rate * STAGE, states), poisson_shares(rate, states)
    chain = np.zeros((2 * states, 2 * states))
    lasted, held = np.zeros(2 * states), np.zeros(2 * states)
    for q in range(states):
        present = max(q, 1)
        empty_left, empty_next = max(present - 2, 0), states * (present >= 2)
        busy_left, busy_next = max(q - 1, 0), states * (q >= 1)
        for row, start, left, arrivals in (
            (q, empty_next, empty_left, whole),
            (states + q, busy_next, busy_left, half),
        ):
            chain[row, start + left : start + states] = arrivals[: states - left]
            chain[row, start + states - 1] += 1 - chain[row].sum()
        lasted[q], held[q] = 1 + (1 / rate if q == 0 else 0), present + rate / 2
        lasted[states + q], held[states + q] = STAGE, STAGE * (q + 1) + rate * STAGE**2 / 2
    share = stationary(chain)
    return float(share @ held) / float(share @ lasted) / rate


@pytest.mark.parametrize("rate", [0.4, 0.8, 1.4])
def test_an_engine_that_waits_for_its_oldest_step(rate: float) -> None:
    """Exact for the engine; the tandem formula, in which every stage looks up at every arrival, is a lower bound."""
    found = estimate(lambda rng: pass_through(poisson(rng, rate, N)))
    check(found, blocking_tandem(rate))
    assert found.low > tandem(rate)


def test_with_requests_always_waiting_it_is_the_tandem() -> None:
    """n requests at once: the first after both stages, then one in every half second."""
    n = 50
    found = pass_through(np.zeros(n))
    assert found.requests["finish"] == pytest.approx(1 + STAGE * np.arange(n), rel=1e-12)


def test_the_tandem_waits_as_long_as_its_first_stage_makes() -> None:
    """The formula is M/D/1 of one stage, and the time in the other: what is left of a pipeline under Poisson load."""
    rate = 1.2
    first = STAGE + rate * STAGE**2 / (2 * (1 - rate * STAGE))
    assert tandem(rate) == pytest.approx(first + STAGE)
    assert blocking_tandem(1e-6) == pytest.approx(tandem(1e-6), rel=1e-5)
    assert tandem(1.9) < blocking_tandem(1.9) < 1.1 * tandem(1.9)
