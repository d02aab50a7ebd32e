"""The prefix cache of the compiled core on a real trace of shared prefixes."""

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from oracle.loop import Loop, Replica, round_robin
from oracle.replica import Group, table_time
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.workload.traces import load_trace
from windtunnel.workload.transforms import head

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
LONGEST, BLOCK = 131_072, 16


def tokens(ids: list[int], size: int, prompt: int) -> tuple[int, ...]:
    """Equal numbers are equal tokens; all tokens of a block are one object, to save memory."""
    return tuple(chain.from_iterable(repeat(number, size) for number in ids))[:prompt]


@pytest.mark.long
@pytest.mark.skipif(not TRACE.exists(), reason="the traces are not here")
@pytest.mark.parametrize(
    ("blocks", "replicas", "seconds_per_token", "policy"),
    [
        (30_000, 8, 5e-6, VllmV1(prefix_caching=True)),
        (9_000, 1, 2e-5, VllmV1(prefix_caching=True, reserve_full_prompt=False, plain_blocks_first=False)),
    ],
)
def test_hits_of_the_conversation_trace_are_those_of_the_reference(
    blocks: int, replicas: int, seconds_per_token: float, policy: VllmV1
) -> None:
    workload = head(load_trace(TRACE), 2_000)
    assert workload.hash_ids is not None
    offsets, values = workload.hash_ids
    limits = Limits(256, 8192, LONGEST, blocks, BLOCK)
    times = linear(
        6e-3, seconds_per_token, 4e-9, 1e-11, max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=LONGEST
    )
    n = len(workload)
    demand = Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        overruns=np.zeros(n, dtype=bool),
        refused=workload.prompt_tokens + workload.output_tokens > min(LONGEST, blocks * BLOCK),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        hash_ids=workload.hash_ids,
        hash_block_size=workload.hash_block_size,
    )
    found = run(Fleet((limits,), (policy,), (times,), (replicas,), (1,), (False,)), demand, 0, np.zeros(n)).requests
    requests = []
    for i in range(n):
        prompt, output = int(workload.prompt_tokens[i]), int(workload.output_tokens[i])
        contents = tokens(values[offsets[i] : offsets[i + 1]].tolist(), workload.hash_block_size, prompt)
        arrival, refused = float(workload.arrival[i]), bool(demand.refused[i])
        requests.append(Request(i, arrival, prompt, output, output, refused, tokens=contents))
    schedulers = [Scheduler(limits, policy) for _ in range(replicas)]
    Loop([Replica([Group([one], table_time(times), 2)]) for one in schedulers], round_robin, requests).run()
    assert found["cached_tokens"].tolist() == [request.cached_tokens for request in requests]
    assert np.array_equal(found["finish"], [request.finish for request in requests], equal_nan=True)
    assert found["cached_tokens"].sum() > 0
