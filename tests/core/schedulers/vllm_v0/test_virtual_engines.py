"""vLLM's v0 engine with stages: one scheduler for each, against a second writing of what is around the schedulers."""

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from equality import stages_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.virtual_engines import serve

from core.schedulers.vllm_v0.cases import Case, cases, lengths
from core.schedulers.vllm_v0.test_runs import check_equal, outcome
from core.test_theory_pipelines import tandem
from windtunnel.core.engine import run
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes
from windtunnel.policy import Limits, VllmV0
from windtunnel.replay.recording import TICKS_PER_SECOND, RecordedRequest
from windtunnel.simulate.run import Iterations

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
ROOMY = Limits(max_num_seqs=64, max_num_batched_tokens=4000, max_model_len=4000, num_blocks=10_000, block_size=16)


@st.composite
def staged_cases(draw: st.DrawFn) -> Case:
    """Two to four stages that take equal or different times."""
    case = draw(cases())
    times = draw(stages_of(case.limits))
    policy = replace(case.policy, pipeline_parallel_size=len(times.stages))
    blocks = case.limits.num_blocks * draw(st.sampled_from([1, len(times.stages)]))
    return replace(case, times=times, policy=policy, limits=replace(case.limits, num_blocks=blocks))


@st.composite
def alone_cases(draw: st.DrawFn) -> Case:
    """One replica whose clients do not wait, without shared beginnings; arrivals are whole milliseconds."""
    case = draw(staged_cases())
    n = len(case.arrival)
    return replace(
        case,
        policy=replace(case.policy, prefix_caching=False),
        arrival=np.round(case.arrival, 3),
        replicas=1,
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
    )


def check_against_oracle(case: Case) -> None:
    """Requests and steps are equal, to the bit."""
    rows: list[RecordedRequest] = []
    for i, ((prompt, output), at) in enumerate(zip(lengths(case), case.arrival.tolist(), strict=True)):
        tokens = tuple(-1000 * (i + 1) - k for k in range(prompt))
        ticks = round(at * TICKS_PER_SECOND)
        rows.append(RecordedRequest(str(i), i, ticks, prompt, max(output, 1), int(case.priority[i]), tokens))
    if not all(output for _, output in lengths(case)):
        return
    found = outcome(case, True)
    if isinstance(found, str):
        return
    assert isinstance(case.times, StageTimes)
    served = serve(case.policy, case.limits, case.times, rows)
    for name in ("first_token", "finish", "preemptions", "state"):
        mine = [served.engines[served.engine_of[r]].scheduler.columns[name][r] for r in range(len(rows))]
        assert np.array_equal(found.requests[name], np.array(mine), equal_nan=True), name
    scheduled = [served.scheduled.get(r, np.nan) for r in range(len(rows))]
    assert np.array_equal(found.requests["scheduled"], scheduled, equal_nan=True)
    columns = tuple(np.ascontiguousarray(found.rows[field.name]) for field in fields(Iterations))
    steps = iteration_times(columns, (case.times,), np.zeros(1, np.int64), np.ones(1, np.int64))
    lanes, decodes = (found.rows[name][steps.row].tolist() for name in ("lane", "decodes"))
    mine = sorted(zip(lanes, steps.start.tolist(), decodes, strict=True))
    assert mine == sorted((k, start, decodes) for k, start, _, decodes in served.steps)
    np.testing.assert_allclose(
        np.sort(steps.start + steps.duration), sorted(end for *_, end, _ in served.steps), rtol=1e-12
    )


@settings(max_examples=40, deadline=None, suppress_health_check=RELAXED)
@given(alone_cases())
def test_each_stage_has_a_scheduler(case: Case) -> None:
    check_against_oracle(case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=RELAXED)
@given(alone_cases())
def test_each_stage_has_a_scheduler_at_length(case: Case) -> None:
    check_against_oracle(case)


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(staged_cases())
def test_equal_rounds_at_once_change_nothing(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(staged_cases())
def test_equal_rounds_at_once_change_nothing_at_length(case: Case) -> None:
    check_equal(case)


def test_as_many_requests_as_stages_keep_all_stages_at_work() -> None:
    record, _ = tandem([1.0, 1.0, 1.0], 0.0, 64, 200, 3, VllmV0(), ROOMY)
    requests = record.requests
    assert requests["first_token"].tolist() == [3.0, 4.0, 5.0]
    assert (requests["finish"] - requests["first_token"]).tolist() == [597.0] * 3
    assert (requests["lane"].tolist(), len(record.rows)) == ([0, 1, 2], 9)  # prompts, equal rounds, last decodes


def test_the_slowest_stage_is_the_pace() -> None:
    record, _ = tandem([1.0, 2.0], 0.0, 64, 100, 2, VllmV0(), ROOMY)
    assert (record.requests["finish"] - record.requests["first_token"]).tolist() == [99 * 4.0] * 2


def test_engines_do_not_step_together_so_their_log_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    for folds in (False, True):
        monkeypatch.setattr("core.test_theory_pipelines.run", partial(run, jumps=False, folds=folds))
        record, _ = tandem([1.0, 1.0], 0.0, 64, 40, 5, VllmV0(), ROOMY)
        logs.append(record.rows.tolist())
    assert logs[0] == logs[1]


def test_a_request_goes_where_fewest_are() -> None:
    """Two arrive at once, and then one after each that ends."""
    record, _ = tandem([1.0, 1.0], 0.0, 64, 5, 7, VllmV0(), ROOMY)
    assert record.requests["lane"].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert (record.requests["state"] == GONE).all()


def test_each_engine_has_its_share_of_the_blocks() -> None:
    """Eight blocks, four for each of two engines; together they use all."""
    limits = replace(ROOMY, num_blocks=8)
    record, _ = tandem([1.0, 1.0], 0.0, 48, 3, 2, VllmV0(watermark=0.0), limits)
    rows = record.rows
    assert sorted(rows["used_blocks"].tolist())[-1] == 8
    assert rows["lane"].tolist()[:2] == [0, 1]


def test_what_its_engines_have_no_blocks_for_is_refused() -> None:
    with pytest.raises(InputError, match="pipeline_parallel_size=2: the engine of each stage has KV blocks for 2400"):
        VllmV0(pipeline_parallel_size=2).check(replace(ROOMY, num_blocks=300))
