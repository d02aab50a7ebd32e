"""Pipelines of the reference on handmade workloads, with stages that take plain numbers."""

from collections.abc import Sequence

from oracle.loop import Loop, Replica, round_robin
from oracle.pipeline import PassageTime, Pipeline
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler
from windtunnel.perf.batch_times import Passage
from windtunnel.policy import Limits, VllmV1

ROOMY = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400, num_blocks=1000, block_size=4)


def constant(stages: Sequence[float], send: float = 0.0) -> PassageTime:
    """Every batch takes these seconds in the stages, and ``send`` between two."""
    return lambda _: Passage(list(stages), [send] * (len(stages) - 1))


def serve(
    rows: Sequence[tuple[float, int, int]],
    passage: PassageTime,
    limits: Limits = ROOMY,
    stages: int = 2,
    async_scheduling: bool = False,
) -> tuple[list[Request], Pipeline]:
    """Requests (arrival, prompt, output) served by one pipeline of vLLM 0.32."""
    policy = VllmV1(pipeline_parallel_size=stages, async_scheduling=async_scheduling)
    requests = [Request(i, arrival, prompt, output, output) for i, (arrival, prompt, output) in enumerate(rows)]
    pipeline = Pipeline(Scheduler(limits, policy), policy, passage)
    Loop([Replica([pipeline])], round_robin, requests).run()
    return requests, pipeline


def tokens(batch: Batch) -> dict[int, int]:
    """Tokens of each request in a step."""
    return {part.request.id: part.tokens for part in batch.scheduled}


def steps(pipeline: Pipeline) -> list[tuple[int, float, float, dict[int, int]]]:
    """(lane, start, end, tokens) of each step, in order of decision."""
    return [(step.rank, step.start, step.end, tokens(step.batch)) for step in pipeline.journal]
