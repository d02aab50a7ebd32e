"""The log: blocks are held for others while a lane is idle, and none is counted twice or lost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pools_cases import equal_requests, tandem
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.rebuild import step_ends
from windtunnel.deployment import Handover, Link
from windtunnel.policy import Limits

BLOCKS, BLOCK = 400, 4


def block_seconds(found: Handed, fleet: Any, replica: int) -> float:
    """Blocks times seconds of a replica that its log has, in steps of prompts and between them."""
    rows = found.rows[found.rows["replica"] == replica]
    row, start, end = step_ends(rows, fleet.times[replica : replica + 1], np.zeros(9, np.int64), np.ones(9, np.int64))
    held = rows["transfer"][(rows["steps"] == 0) & (rows["transfer"] > 0)].sum() * BLOCKS
    return float((rows["used_blocks"][row] * (end - start)).sum() + held)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["pull", "push"]), st.sampled_from([0.0, 0.3]))
def test_a_prefill_replica_holds_every_prompt_until_it_has_been_fetched(
    seed: int, transfer: Any, latency: float
) -> None:
    """Blocks times seconds of every request, and of those that are fetched during a step until that has ended: what is
    held is noted down step by step."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    limits = tuple(Limits(seats, 64, 64, BLOCKS, BLOCK) for seats in (1, 64))
    fleet = replace(tandem(0.2, 0.01), limits=limits)
    arrival = np.cumsum(rng.exponential(rng.choice([0.1, 1.0]), n))
    demand = equal_requests(arrival, output=3)
    demand = replace(demand, prompt_tokens=rng.integers(1, 30, n))
    crossing = Crossing(Link(latency=latency), Handover(transfer, "prefill"), rng.exponential(0.5, n), np.ones(n))
    found = run(fleet, demand, (0, 0), np.zeros((2, n)), crossing)
    fetched, begun = found.handovers["transfer_end"], found.requests["scheduled"]
    starts, ends = begun, found.handovers["prefill_end"]
    at = np.searchsorted(np.sort(starts), fetched, side="right") - 1
    during = np.sort(ends)[at]  # a step of one prompt each
    blocks = -(-demand.prompt_tokens // BLOCK)
    assert block_seconds(found, fleet, 0) == pytest.approx((blocks * (np.maximum(fetched, during) - begun)).sum())
