"""What holds for every scheduler that is a value, whatever it decides."""

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest

from core.queueing import SYNCHRONOUS, serve, sojourn
from windtunnel.policy import Limits, Policy, scheduler
from windtunnel.policy.unified import POLICIES, infermax_grid

COSTS: dict[str, Any] = {"base": 0.02, "token": 1e-4, "kv_token": 1e-6}
LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=1024, num_blocks=256, block_size=16)
PATIENT = {"dynamic": "dynamic:max_queue_delay=0"}
"""Presets that wait on purpose, told not to."""
GRID = infermax_grid()


def lengths(seed: int, n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, 900, n), rng.integers(1, 120, n)


@pytest.mark.parametrize("name", POLICIES)
def test_without_contention_schedulers_are_alike(name: str) -> None:
    """Requests that come one after the other's end: nothing is left to decide but the chunks of a prompt."""
    prompt, output = lengths(4, 40)
    settings = scheduler(PATIENT.get(name, name))
    budget = settings.max_num_batched_tokens if isinstance(settings, Policy) else 0
    arrival = 10.0 * np.arange(40, dtype=np.float64)
    steps = np.ceil(prompt / (budget or LIMITS.max_num_batched_tokens))
    own = sojourn(serve(arrival, prompt, output, **COSTS, limits=LIMITS, policy=settings))
    usual = sojourn(serve(arrival, prompt, output, **COSTS, limits=LIMITS, policy=SYNCHRONOUS))
    assert own == pytest.approx(usual + (steps - 1) * COSTS["base"], rel=1e-11)


def bound(prompt: Any, output: Any, reads: int) -> float:
    """Seconds that no schedule of these requests, all there at time 0, can undercut; see test_theory."""
    area = int((output * prompt + output * (output - 1) // 2).sum())
    work = int((prompt + output - 1).sum())
    steps = max(
        int(output.max()),
        ceil(work / LIMITS.max_num_batched_tokens),
        ceil(area / (LIMITS.num_blocks * LIMITS.block_size)),
        ceil(int(output.sum()) / LIMITS.max_num_seqs),
    )
    return float(COSTS["base"] * steps + COSTS["token"] * work + COSTS["kv_token"] * reads)


@pytest.mark.parametrize("seed", range(2))
def test_no_variant_of_infermaxs_grid_beats_the_bound(seed: int) -> None:
    prompt, output = lengths(seed, 120)
    reads = int(((output - 1) * prompt + output * (output - 1) // 2).sum())
    least = bound(prompt, output, reads)
    found = {}
    for name, policy in GRID.items():
        record = serve(np.zeros(120), prompt, output, **COSTS, limits=LIMITS, policy=policy)
        assert not np.isnan(record.requests["finish"]).any(), name
        found[name] = float(record.requests["finish"].max())
    assert min(found.values()) >= least
    assert max(found.values()) < 6 * least, "the grid would say nothing if all were far from it"
    assert len(set(found.values())) > len(found) / 2


@pytest.mark.parametrize("seed", range(2))
def test_evictions_need_a_policy_that_evicts(seed: int) -> None:
    prompt, output = lengths(seed, 120)
    for name, policy in GRID.items():
        evicted = serve(np.zeros(120), prompt, output, **COSTS, limits=LIMITS, policy=policy).requests["preemptions"]
        assert policy.preemption != "none" or evicted.sum() == 0, name


@pytest.mark.parametrize(("tokens", "prefill", "most"), [(0, 100, 100), (64, 100, 64), (64, 0, 64), (0, 0, 1024)])
def test_a_chunk_respects_both_limits_of_tokens(tokens: int, prefill: int, most: int) -> None:
    """A source has P alone; C holds, too, and the smaller one decides."""
    prompt, output = lengths(0, 60)
    settings = Policy(chunked_prefill=True, max_num_batched_tokens=tokens, max_num_prefill_tokens=prefill)
    rows = serve(np.zeros(60), prompt, output, **COSTS, limits=LIMITS, policy=settings).rows
    step = np.cumsum(rows["steps"] > 0)
    assert np.bincount(step, weights=rows["chunk_tokens"]).max() == most


def test_the_two_prefill_batches_of_mindspores_report() -> None:
    """Its text has the coefficient 1/64, its code opens the queue at more than batch_size // 32 prompts."""
    limits = replace(LIMITS, max_num_seqs=128)
    own = POLICIES["mindspore"]
    settings = (own, replace(own, prefill_batch_share=1 / 32), replace(own, prefill_batch_share=0.0, prefill_batch=5))
    assert [each.prefills_together(limits) for each in settings] == [2, 4, 128 // 32 + 1]
