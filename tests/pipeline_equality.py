"""Random cases for the comparison of pipelines on the reference engine and on the compiled core."""

from dataclasses import replace
from typing import Any

import numpy as np
from equality import Case, _integer_times, _linear_times, _random_times, cases
from hypothesis import strategies as st

from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.stage_times import StageTimes
from windtunnel.policy import VllmV1, can_ever_run, generated
from windtunnel.reference.loop import Loop, Replica, Router, least_outstanding, random_choice, round_robin, vllm_dp
from windtunnel.reference.pipeline import Pipeline, table_passage
from windtunnel.reference.request import Request
from windtunnel.reference.vllm_v1 import Scheduler


@st.composite
def pipeline_cases(draw: st.DrawFn) -> Case:
    """Two to four stages that take equal or different times, with sends or without."""
    case = draw(cases().filter(lambda case: not case.lockstep))
    stages = draw(st.sampled_from([2, 2, 2, 3, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = VllmV1(
        chunked_prefill=case.policy.chunked_prefill,
        reserve_full_prompt=case.policy.reserve_full_prompt,
        watermark=case.policy.watermark,
        async_scheduling=draw(st.booleans()),
        pipeline_parallel_size=stages,
    )
    kind = draw(st.sampled_from([_integer_times, _linear_times, _random_times]))
    tables = [table_of_stage(kind, case, rng) for _ in range(stages)]
    tokens = case.limits.max_num_batched_tokens + 1
    sends: Any = np.zeros((stages - 1, tokens))
    if draw(st.booleans()):
        sends = rng.random((stages - 1, tokens)) if kind is _random_times else np.ones((stages - 1, tokens))
    return replace(case, policy=policy, times=StageTimes(tuple(tables), sends))  # type: ignore[arg-type]


def table_of_stage(kind: Any, case: Case, rng: np.random.Generator) -> BatchTimes:
    """A stage's tables: one, two or three times the usual, except random ones."""
    table: BatchTimes = kind(case.limits, 1, rng)
    if kind is _random_times:
        return table
    times = int(rng.integers(1, 4))
    return replace(
        table,
        decode_tokens=table.decode_tokens * times,
        mixed_tokens=table.mixed_tokens * times,
    )


def by_reference(case: Case) -> tuple[list[Request], list[Replica]]:
    """The case on the reference engine."""
    requests = []
    for i, (a, p, o, m) in enumerate(zip(case.arrival, case.prompt, case.output, case.max_tokens, strict=True)):
        known = generated(int(p), int(o), case.limits)
        refused = not can_ever_run(int(p), int(o), case.limits)
        requests.append(Request(i, float(a), int(p), known, int(m), refused))
    passage = table_passage(case.times)  # type: ignore[arg-type]

    def rank() -> Pipeline:
        return Pipeline(Scheduler(case.limits, case.policy), case.policy, passage)

    replicas = [Replica([rank() for _ in range(case.lanes)]) for _ in range(case.replicas)]
    routers: list[Router] = [round_robin, random_choice(list(case.uniforms)), least_outstanding, vllm_dp]
    follow = {i: int(f) for i, f in enumerate(case.follow) if f >= 0}
    clients = (list(case.think_time), case.max_concurrency, list(case.turnaround))
    loop = Loop(replicas, routers[case.router], requests, follow, *clients)
    loop.run()
    return requests, replicas
