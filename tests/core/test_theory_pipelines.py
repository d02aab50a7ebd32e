"""Closed forms of pipelines as oracle: a tandem of queues, whose slowest stage is the pace."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, Policy, Settings, Sglang, VllmV1
from windtunnel.policy.unified import SARATHI, TRTLLM_GUARANTEED_NO_EVICT

ONE_BY_ONE = Limits(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=4000, num_blocks=10_000, block_size=16)
"""A prompt of 64 tokens fills a step."""


AHEAD, BEHIND = VllmV1(), VllmV1(async_scheduling=False)
NO_EVICT = replace(TRTLLM_GUARANTEED_NO_EVICT, chunked_prefill=True, refuse_long_prompts=False)
OTHERS: list[Settings] = [
    BEHIND,
    Sglang(),
    Sglang(radix_cache=False, schedule_policy="lof"),
    Policy(chunked_prefill=True),
    Policy(group_order="prefill_first", mixed=False, chunked_prefill=True),
    NO_EVICT,
    replace(SARATHI, max_num_batched_tokens=64, max_num_seqs=0),
]


def tandem(
    stages: list[float],
    send: float,
    prompt: int,
    output: int,
    count: int,
    settings: Settings = AHEAD,
    limits: Limits = ONE_BY_ONE,
) -> tuple[Record, StageTimes]:
    """Equal requests that arrive at 0, in a pipeline whose steps always take as long."""
    sizes = {"max_num_batched_tokens": limits.max_num_batched_tokens, "max_num_seqs": limits.max_num_seqs}
    tables = tuple(linear(seconds, 0.0, 0.0, 0.0, max_model_len=limits.max_model_len, **sizes) for seconds in stages)
    times = StageTimes(tables, np.full((len(stages) - 1, limits.max_num_batched_tokens + 1), send))
    fleet = Fleet((limits,), (settings.with_stages(len(stages)),), (times,), (1,), (1,), (False,))
    alone, zeros = np.full(count, -1), np.zeros(count)
    demand = Demand(
        arrival=zeros,
        prompt_tokens=np.full(count, prompt),
        output_tokens=np.full(count, output),
        overruns=np.zeros(count, dtype=np.bool_),
        refused=np.zeros(count, dtype=np.bool_),
        follow=alone,
        think_time=zeros,
        max_concurrency=0,
    )
    return run(fleet, demand, 0, zeros), times


@pytest.mark.parametrize("settings", [AHEAD, *OTHERS])
@pytest.mark.parametrize("stages", [[1.0, 1.0], [1.0, 3.0], [2.0, 0.5, 1.0]])
def test_a_request_alone_passes_all_stages_for_every_token(stages: list[float], settings: Settings) -> None:
    record, _ = tandem(stages, 0.25, 64, 20, 1, settings)
    latency = sum(stages) + 0.25 * (len(stages) - 1)
    assert record.requests["first_token"][0] == latency
    assert record.requests["finish"][0] == 20 * latency


@pytest.mark.parametrize("stages", [[1.0, 1.0], [1.0, 3.0], [2.0, 0.5, 1.0], [1.0, 2.0, 2.0, 1.0]])
def test_prompts_end_one_by_one_at_the_pace_of_the_slowest_stage(stages: list[float]) -> None:
    record, _ = tandem(stages, 0.25, 64, 1, 50)
    first = sum(stages) + 0.25 * (len(stages) - 1)
    assert record.requests["finish"].tolist() == [first + i * max(stages) for i in range(50)]


@pytest.mark.parametrize("settings", OTHERS)
@pytest.mark.parametrize("stages", [[1.0, 1.0], [1.0, 3.0], [2.0, 0.5, 1.0], [1.0, 2.0, 2.0, 1.0]])
def test_without_sends_as_many_steps_as_stages_are_enough_for_that(stages: list[float], settings: Settings) -> None:
    record, _ = tandem(stages, 0.0, 64, 1, 50, settings)
    assert record.requests["finish"].tolist() == [sum(stages) + i * max(stages) for i in range(50)]


@pytest.mark.parametrize("settings", OTHERS)
def test_chunks_follow_each_other_where_the_engine_does_not_wait_for_the_one_before(settings: Settings) -> None:
    """vLLM and SGLang send the next chunk while the one before is on its way; others pass over a prompt in flight."""
    record, _ = tandem([1.0, 1.0], 0.0, 256, 1, 1, settings)
    waits = isinstance(settings, Policy)
    assert record.requests["finish"][0] == (8.0 if waits else 5.0)


@pytest.mark.parametrize("settings", [AHEAD, *OTHERS])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_as_many_lanes_as_equal_stages_keep_all_of_them_at_work(stages: int, settings: Settings) -> None:
    """Each request decodes once in a round of all stages, and no stage is ever idle between the first and last step."""
    record, times = tandem([1.0] * stages, 0.0, 64, 200, stages, settings)
    requests = record.requests
    assert (requests["finish"] - requests["first_token"]).tolist() == [199.0 * stages] * stages
    steps = iteration_times(record.rows, (times,), np.zeros(1, np.int64), np.ones(1, np.int64))
    end = (steps.start + steps.duration).max()
    assert steps.busy.sum() * stages == len(steps.row) * stages
    assert end == len(steps.row) + stages - 1  # a bubble of stages − 1 at the begin and at the end
