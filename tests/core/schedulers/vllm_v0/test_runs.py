"""vLLM's v0 scheduler in whole runs: what clients and logs see, and that equal steps made at once change nothing."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from core.schedulers.vllm_v0.cases import Case, by_core, cases, groups
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE, IGNORED, PREFILLING
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV0
from windtunnel.simulate.run import Iterations

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def serve(
    rows: list[tuple[float, int, int]], policy: VllmV0, follow: tuple[int, ...] = (), *, blocks: int, tokens: int = 64
) -> Record:
    """(Arrival, prompt, output) on one engine whose steps take 1 s, with blocks of 4 tokens."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    n = len(rows)
    demand = Demand(
        arrival=arrival.astype(np.float64),
        prompt_tokens=prompt,
        output_tokens=output,
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.array(follow or (-1,) * n),
        think_time=np.full(n, 0.5),
        max_concurrency=0,
    )
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=tokens, max_num_seqs=4, max_model_len=64)
    fleet = Fleet((Limits(4, tokens, 64, blocks, 4),), (policy,), (times,), (1,), (1,), (False,))
    return run(fleet, demand, 0, np.zeros(n))


def test_prefills_run_alone_and_decodes_wait() -> None:
    record = serve([(0.0, 4, 3), (1.5, 4, 2)], VllmV0(), blocks=20)
    steps = [(row["start"], row["decodes"], row["chunk_tokens"]) for row in record.rows]
    assert steps == [(0.0, 0, 4), (1.0, 1, 0), (2.0, 0, 4), (3.0, 2, 0)]
    assert (record.requests["finish"][0], record.requests["first_token"][1], len(record.stalls)) == (4.0, 3.0, 0)


def test_blocks_on_their_way_take_time_and_a_swapped_request_stalls() -> None:
    policy = VllmV0(preemption_mode="swap", num_cpu_blocks=9, swap_latency=1.0, swap_seconds_per_block=0.25)
    record = serve([(0.0, 8, 4), (0.0, 8, 4)], policy, blocks=5)
    rows = record.rows[record.rows["steps"] > 0]
    assert [(row["steps"], row["transfer"]) for row in rows if row["transfer"]] == [(1, 1.5), (1, 1.5)]
    assert rows["steps"].sum() == 7
    assert record.requests["preemptions"].tolist() == [0, 1]
    (stall,) = record.stalls
    back = rows[np.nonzero(rows["transfer"])[0][-1]]
    assert (stall["request"], stall["last_token"], stall["resumed_token"]) == (1, 1.0, back["start"] + 2.5)
    assert rows["waiting"][1] == 1


def test_an_ignored_request_ends_for_its_client() -> None:
    requests = serve([(1.0, 40, 4), (0.0, 4, 1)], VllmV0(), (1, -1), blocks=5).requests
    assert requests["state"].tolist() == [IGNORED, GONE]
    assert requests["arrival"][1] == pytest.approx(1.5)
    assert requests["finish"][1] == pytest.approx(2.5)


def test_a_prompt_that_evicts_itself_for_ever_is_an_error() -> None:
    policy = VllmV0(chunked_prefill=True, watermark=0.0)
    with pytest.raises(InputError, match="max_num_batched_tokens=8: prompts that take several steps evict each other"):
        serve([(0.0, 18, 2)], policy, blocks=5, tokens=8)


def steps(case: Case, record: Record) -> list[Any]:
    """Every single step: row by row of the log, unrolled."""
    columns = tuple(np.ascontiguousarray(record.rows[field.name]) for field in fields(Iterations))
    ones = np.ones(case.replicas, dtype=np.int64)
    times = iteration_times(columns, (case.times,), 0 * ones, ones)
    return sorted(zip(record.rows["replica"][times.row], times.start, times.duration, times.decodes, strict=True))


def outcome(case: Case, jumps: bool) -> Record | str:
    """The run, or the words of the error that ends it."""
    try:
        return by_core(case, jumps)
    except InputError as error:
        return str(error)


def check_equal(case: Case) -> None:
    """Equal in everything that can be seen, or ended by the same error; every token is emitted once."""
    jumped, stepped = outcome(case, True), outcome(case, False)
    if isinstance(jumped, str) or isinstance(stepped, str):
        assert jumped == stepped
        return
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "state"):
        found, expected = (record.requests[name].astype(np.float64) for record in (jumped, stepped))
        assert np.array_equal(found, expected, equal_nan=True), name
    assert sorted(jumped.stalls.tolist()) == sorted(stepped.stalls.tolist())
    assert steps(case, jumped) == steps(case, stepped)
    requests, rows = jumped.requests, jumped.rows
    emitted = np.where(requests["state"] == GONE, requests["output"], requests["generated"])
    decoded = int((rows["decodes"].astype(np.int64) * rows["steps"] - rows["discarded"]).sum())
    if not np.any(requests["state"] == PREFILLING):  # several prompts may leave a small budget no share of a token
        assert int(np.maximum(emitted - 1, 0).sum()) == decoded + len(jumped.stalls)


@settings(max_examples=200, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_equal_steps_at_once_change_nothing(case: Case) -> None:
    check_equal(case)


@settings(max_examples=40, deadline=None, suppress_health_check=RELAXED)
@given(groups())
def test_equal_steps_of_groups_at_once_change_nothing(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=RELAXED)
@given(groups())
def test_equal_steps_of_groups_at_once_change_nothing_at_length(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_equal_steps_at_once_change_nothing_at_length(case: Case) -> None:
    check_equal(case)
