"""InferMax's loop request by request: equal to the unified scheduler's fast form, and what only this one can do."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from windtunnel import Ask, step
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Policy, UserScheduler, VllmV1
from windtunnel.policy.get_next_batch import GetNextBatch
from windtunnel.policy.named import find_scheduler

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=400, block_size=4)
ONE = replace(LIMITS, num_blocks=10, block_size=1)


def served(policy: Any, limits: Limits, seed: int, ranked: bool = False) -> Record:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 25))
    none = np.zeros(n, dtype=bool)
    demand = Demand(
        arrival=np.cumsum(rng.exponential(1.0, n)),
        prompt_tokens=rng.integers(1, 30, n),
        output_tokens=rng.integers(1, 24, n),
        overruns=none,
        refused=none,
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        priority=rng.integers(0, 3, n) if ranked else None,
    )
    within = {name: getattr(limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    times = linear(0.5, 0.01, 0.001, 1e-5, **within)
    return run(Fleet((limits,), (policy,), (times,), (1,), (1,), (False,)), demand, 0, np.zeros(n))


def own(**settings: Any) -> UserScheduler:
    return UserScheduler(partial(GetNextBatch, **settings), VllmV1(async_scheduling=False))


@pytest.mark.parametrize("seed", [seed for seed in range(16) if seed % 8 != 7])
def test_it_is_the_unified_scheduler_where_memory_suffices(seed: int) -> None:
    """Not with chunks first in mixed batches: of the decodes there all or none take part."""
    chunked, mixed, first = bool(seed & 1), bool(seed & 2), bool(seed & 4)
    limits = replace(LIMITS, max_num_batched_tokens=16) if chunked else LIMITS
    order: Any = "prefill_first" if first else "decode_first"
    groups = "part-way+waiting+decodes" if first else "decodes+part-way+waiting"
    fast = Policy(group_order=order, mixed=mixed, chunked_prefill=chunked, pass_over=True)
    found = served(own(groups=groups, mixed=mixed, chunked=chunked), limits, seed)
    assert found.requests["finish"] == pytest.approx(served(fast, limits, seed).requests["finish"], rel=1e-12)


def test_a_waiting_request_evicts_those_of_lower_rank() -> None:
    """8 of 10 blocks are taken, an urgent one needs 5: the less urgent and later of both runs' 4 must go."""
    urgent = Ask(prompt_tokens=5, max_tokens=2, priority=-1)
    early, late = (Ask(prompt_tokens=4, max_tokens=3, generated=1, arrival=at) for at in (0.0, 1.0))
    asked: Any = partial(step, waiting=[urgent], running=[early, late], limits=ONE)
    decision = asked(GetNextBatch(groups="waiting+running", evict_for="waiting"))
    assert decision.evict == [late]
    assert decision.tokens == {urgent: 5, early: 1}
    for evict_for in ("running", "none"):
        assert asked(GetNextBatch(groups="waiting+running", evict_for=evict_for)).tokens == {early: 1, late: 1}
    assert asked(GetNextBatch(evict_for="waiting")).tokens == {early: 1, late: 1}  # they are in the batch before it


def test_groups_go_in_their_order() -> None:
    new, again = Ask(prompt_tokens=20, max_tokens=2), Ask(prompt_tokens=20, max_tokens=2, preemptions=1, generated=0)
    asked: Any = partial(step, waiting=[new, again], limits=replace(LIMITS, max_num_batched_tokens=30))
    assert list(asked(GetNextBatch("evicted+running+new")).tokens.items()) == [(again, 20), (new, 10)]
    assert list(asked(GetNextBatch("new+evicted+running")).tokens.items()) == [(new, 20), (again, 10)]
    assert asked(GetNextBatch("new+evicted+running", max_num_prefill_tokens=25)).tokens == {new: 20, again: 5}
    assert asked(GetNextBatch("new+evicted+running", chunked=False)).tokens == {new: 20}


@pytest.mark.parametrize("evict_for", ["running", "waiting"])
@pytest.mark.parametrize("seed", range(8))
def test_all_requests_end_in_little_memory(seed: int, evict_for: str) -> None:
    limits = replace(LIMITS, num_blocks=16, max_num_seqs=4)
    found = served(
        own(evict_for=evict_for, groups="evicted+new+running", chunked=bool(seed % 2)), limits, seed, ranked=True
    )
    assert not np.isnan(found.requests["finish"]).any()
    assert (found.rows["used_blocks"] <= limits.num_blocks).all()


def test_what_is_wrong_is_named() -> None:
    for text, message in (
        ("get-next-batch:groups=decodes+waiting", "some that are running are in no group: add running"),
        ("get-next-batch:groups=decode+waiting", "group 'decode': .*decodes"),
        ("get-next-batch:evict_for=all", "evict_for 'all'"),
        ("get-next-batch:max_num_prefill_tokens=-1", "must be ≥ 0"),
    ):
        with pytest.raises(InputError, match=message):
            find_scheduler(text)
