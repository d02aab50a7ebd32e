"""What may be in flight together in a pipeline, when it starts, and that the real schedulers decide the same."""

import os
import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay.handmade_schedules import random_recording
from replay.record_vllm_v1 import driven, spelled_out
from vllm_v1_pipeline_driver import passage

from oracle.loop import Loop, Replica, round_robin
from oracle.pipeline import Pipeline, table_passage
from oracle.tests.pipelines import ROOMY, constant, serve, steps, tokens
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Passage, StageTimes, linear
from windtunnel.policy import VllmV1
from windtunnel.policy.vllm_v1 import VERSIONS
from windtunnel.replay.recording import Recording
from windtunnel.replay.vllm_v1 import CONFIG, SINCE_0_31, limits, policy
from windtunnel.replay.vllm_v1 import VERSIONS as RELEASES

WHEELS = os.environ.get("WINDTUNNEL_VLLM_V1", "")
"""A folder of releases, as in tests/replay/test_vllm_v1.py."""
DRIVER = Path(__file__).parents[1] / "vllm_v1_pipeline_driver.py"
CASES = int(os.environ.get("WINDTUNNEL_VLLM_V1_CASES", "400"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_VLLM_V1_SEED", "0"))


def test_a_decode_waits_for_its_token_and_another_request_fills_the_pipeline() -> None:
    _, pipeline = serve([(0.0, 4, 3), (0.5, 4, 2)], constant([1.0, 1.0]))
    assert steps(pipeline) == [
        (1, 0.0, 2.0, {0: 4}),
        (1, 2.0, 4.0, {0: 1, 1: 4}),
        (1, 4.0, 6.0, {0: 1, 1: 1}),
    ]


def test_an_arrival_is_seen_when_the_oldest_step_has_ended() -> None:
    """The engine waits for the oldest step once it has found nothing more to do."""
    _, pipeline = serve([(0.0, 64, 3), (0.0, 4, 3), (0.1, 4, 1)], constant([1.0, 1.0]))
    assert steps(pipeline) == [
        (1, 0.0, 2.0, {0: 64}),
        (0, 1.0, 3.0, {1: 4}),
        (1, 2.0, 4.0, {0: 1, 2: 4}),
        (0, 3.0, 5.0, {1: 1}),
        (1, 4.0, 6.0, {0: 1}),
        (0, 5.0, 7.0, {1: 1}),
    ]


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    requests, pipeline = serve([(0.0, 192, 2)], constant([1.0, 1.0]))
    assert steps(pipeline) == [
        (1, 0.0, 2.0, {0: 64}),
        (0, 1.0, 3.0, {0: 64}),
        (1, 2.0, 4.0, {0: 64}),
        (1, 4.0, 6.0, {0: 1}),
    ]
    assert requests[0].first_token == 4.0


def test_stages_and_sends_make_a_tandem_of_queues() -> None:
    """The second batch waits for the slow second stage; the latency of a lone batch is the sum of all parts."""
    _, pipeline = serve([(0.0, 64, 1), (0.0, 64, 1), (0.0, 64, 1)], constant([1.0, 3.0, 2.0], 0.5), stages=3)
    assert [end for _, _, end, _ in steps(pipeline)] == [7.0, 10.0, 13.0]


@pytest.mark.parametrize("stages", [[1.0, 1.0], [2.0, 1.0, 1.0], [0.5, 0.25, 1.0, 0.5]])
def test_a_full_pipeline_ends_a_step_every_slowest_stage(stages: list[float]) -> None:
    _, pipeline = serve([(0.0, 64, 1)] * 40, constant(stages, 0.25), ROOMY, len(stages), async_scheduling=True)
    ends = [end for _, _, end, _ in steps(pipeline)]
    assert [later - earlier for earlier, later in pairwise(ends)] == [max(stages)] * 39


def test_sends_that_are_longer_than_what_is_in_flight_hides_leave_bubbles() -> None:
    """Two steps in flight at most, each on its way for 2.5 s, end every 1.25 s, although no stage takes so long."""
    _, pipeline = serve([(0.0, 64, 1)] * 10, constant([1.0, 1.0], 0.5))
    assert [end for _, _, end, _ in steps(pipeline)][-3:] == [11.0, 12.5, 13.5]


def test_scheduled_asynchronously_one_more_step_is_decided_ahead() -> None:
    """Lanes take turns; a lane's next step is decided before its tokens are known, and starts when they are."""
    rows = [(0.0, 64, 3), (0.0, 64, 3)]
    _, pipeline = serve(rows, constant([1.0, 1.0]), async_scheduling=True)
    assert steps(pipeline) == [
        (1, 0.0, 2.0, {0: 64}),
        (0, 1.0, 3.0, {1: 64}),
        (1, 2.0, 4.0, {0: 1}),
        (0, 3.0, 5.0, {1: 1}),
        (1, 4.0, 6.0, {0: 1}),
        (0, 5.0, 7.0, {1: 1}),
    ]
    late = (1.5, 4, 1)
    for asynchronous, start in ((False, 2.0), (True, 3.0)):
        requests, _ = serve([*rows, late], constant([1.0, 1.0]), async_scheduling=asynchronous)
        assert requests[2].scheduled == start


def test_chunks_do_not_wait_for_tokens() -> None:
    """Nothing is sampled before the prompt's end, so the stages are never idle."""
    _, pipeline = serve(
        [(0.0, 64 * 8, 1)], constant([1.0, 1.0]), replace(ROOMY, max_model_len=600), async_scheduling=True
    )
    assert [end for _, _, end, _ in steps(pipeline)] == [float(2 + i) for i in range(8)]


def test_a_request_can_be_preempted_while_it_is_in_flight_and_its_token_still_counts() -> None:
    few = replace(ROOMY, num_blocks=3, max_num_batched_tokens=8)
    requests, pipeline = serve([(0.0, 4, 6), (0.0, 6, 6)], constant([1.0, 1.0]), few)
    evicting = next(step for step in pipeline.journal if step.batch.preempted)
    assert (evicting.start, requests[1].stalls, requests[1].preemptions) == (2.0, [(3.0, 14.0)], 1)
    assert [request.generated for request in requests] == [6, 6]


@pytest.mark.parametrize(("waits", "admitted"), [(True, {2: 1}), (False, {1: 4})])
def test_who_is_passed_over_while_steps_with_it_are_in_flight(waits: bool, admitted: dict[int, int]) -> None:
    """Request 0 decodes and takes the blocks of request 1, whose two chunks are in flight; request 2 is behind it."""
    policy = VllmV1(False, reserve_full_prompt=False, pipeline_parallel_size=4, wait_for_output=waits)
    policy = replace(policy, chunked_prefill=True, async_scheduling=False)
    scheduler = Scheduler(replace(ROOMY, max_num_seqs=4, max_num_batched_tokens=4, num_blocks=3), policy)
    for i, prompt in enumerate((4, 8, 1)):
        scheduler.add(Request(i, 0.0, prompt, 6, 6))
    first = scheduler.schedule()
    assert [tokens(scheduler.schedule()) for _ in range(2)] == [{1: 4}, {1: 4}]
    scheduler.update(first, 1.0)
    assert tokens(scheduler.schedule()) == {0: 1}
    assert tokens(scheduler.schedule()) == admitted
    assert [request.id for request in scheduler.waiting] == ([1] if waits else [2])


def test_nothing_runs_for_ever_when_nothing_can_run() -> None:
    pipeline = serve([(0.0, 4, 1)], constant([1.0, 1.0]), replace(ROOMY, num_blocks=2))[1]
    pipeline.scheduler.add(Request(9, 0.0, 50, 1, 1))
    assert pipeline.schedule(9.0, inf) is None


def test_tables_of_stages() -> None:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 400}
    one, two = linear(1.0, 0.1, 0.0, 0.0, **sizes), linear(2.0, 0.0, 0.0, 0.0, **sizes)
    times = StageTimes((one, two), [[0.01 * n for n in range(65)]])  # type: ignore[arg-type]
    assert times.passage(2, 10, [(3, 0)]) == Passage([1.5, 2.0], [0.05])
    batch = Batch(64)
    batch.add(Request(0, 0.0, 5, 1, 1, prefill_tokens=5), 5)
    assert table_passage(times)(batch) == Passage([1.5, 2.0], [0.05])


@pytest.mark.parametrize(
    ("stages", "sends", "message"),
    [
        (1, (0, 65), "1 stages: a pipeline has at least 2"),
        (2, (1, 64), r"sends has shape \(1, 64\): must be \(1, 65\)"),
        (3, (1, 65), r"must be \(2, 65\)"),
    ],
)
def test_tables_that_do_not_fit_together(stages: int, sends: tuple[int, int], message: str) -> None:
    table = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=400)
    with pytest.raises(InputError, match=message):
        StageTimes((table,) * stages, np.zeros(sends))
    if stages == 2:
        with pytest.raises(InputError, match="negative or non-finite"):
            StageTimes((table,) * stages, np.full((1, 65), -1.0))
        other = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=9, max_model_len=400)
        with pytest.raises(InputError, match="tables of 2 sizes"):
            StageTimes((table, other), np.zeros((1, 65)))


def test_a_pipeline_has_stages() -> None:
    with pytest.raises(InputError, match="pipeline_parallel_size=0: must be ≥ 1"):
        VllmV1(pipeline_parallel_size=0)


def case(seed: int, version: str) -> tuple[Recording, dict[str, Any], VllmV1]:
    """A random workload and settings with 2 to 4 stages; asynchronous from 0.32 on only."""
    recording, rng = random_recording(seed), random.Random(seed)
    stages = rng.choice([2, 2, 3, 4])
    asynchronous = version in SINCE_0_31 and rng.random() < 0.5
    config = CONFIG | recording.config | {"pipeline_parallel_size": stages, "async_scheduling": asynchronous}
    only = {name: config[name] for name in CONFIG}
    return recording, config, replace(policy(only, version), pipeline_parallel_size=stages)


def ours(recording: Recording, config: dict[str, Any], rules: VllmV1) -> list[dict[str, Any]]:
    room = limits({name: config[name] for name in CONFIG})

    def ticks(batch: Batch) -> Passage:
        context = sum(part.start for part in batch.scheduled)
        found = passage(rules.pipeline_parallel_size, sum(part.tokens for part in batch.scheduled), context)
        return Passage(*found)  # type: ignore[arg-type]

    pipeline = Pipeline(Scheduler(room, rules), rules, ticks)
    requests = [
        Request(i, row.arrival, row.prompt_tokens, row.output_tokens, row.output_tokens, priority=row.priority)
        for i, row in enumerate(recording.requests)
    ]
    for request, row in zip(requests, recording.requests, strict=True):
        request.name, request.tokens = row.id, row.tokens
        request.output_tokens = min(row.output_tokens, room.max_model_len - row.prompt_tokens)
    Loop([Replica([pipeline])], round_robin, requests).run()
    return [
        {
            "scheduled": {part.request.name: part.tokens for part in step.batch.scheduled},
            "start_pos": {part.request.name: part.start for part in step.batch.scheduled},
            "free_blocks": room.num_blocks - step.used_blocks,
            "end": step.end,
            "emits": [part.request.name for part in step.batch.scheduled if part.emits],
        }
        for step in pipeline.journal
    ]


@pytest.mark.long
@pytest.mark.skipif(not WHEELS, reason="WINDTUNNEL_VLLM_V1 names no folder with releases of vLLM")
@pytest.mark.parametrize("version", VERSIONS)
def test_equals_the_real_scheduler_with_several_steps_in_flight(version: str) -> None:
    """The real scheduler of each release, in its engine's loop with a queue of batches, makes the same steps."""
    release = Path(WHEELS) / RELEASES[version]
    if not release.is_dir():
        pytest.skip(f"no {release.name} in {WHEELS}")
    cases = [case(seed, version) for seed in range(FIRST_SEED, FIRST_SEED + CASES)]
    found = [ours(*each) for each in cases]
    asked = [
        spelled_out(recording, len(made) + 1) | {"config": config, "fills_up": rules.decide_after_empty_step}
        for (recording, config, rules), made in zip(cases, found, strict=True)
    ]
    real_steps = driven(release, asked, DRIVER)
    assert len(real_steps) == CASES
    for seed, (theirs, made) in enumerate(zip(real_steps, found, strict=True), FIRST_SEED):
        assert len(theirs) == len(made), f"seed {seed}"
        for number, (mine, real) in enumerate(zip(made, theirs, strict=True)):
            where = f"seed {seed}, step {number}"
            for key in ("scheduled", "start_pos", "free_blocks", "end"):
                assert mine[key] == real[key], f"{where} {key}"
            assert list(mine["scheduled"]) == list(real["scheduled"]), where
            assert set(real["emitted"]) <= set(mine["emits"]), where
