"""Tiny workloads on the reference's unified scheduler, step by step."""

from typing import NamedTuple

from oracle.loop import Loop, Replica, round_robin
from oracle.replica import Group, table_time
from oracle.schedulers.unified import Scheduler
from oracle.vllm_v1.request import Request
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Policy

SMALL = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=40, block_size=4)


class Step(NamedTuple):
    """What one step did, by the letters of the requests."""

    start: float
    tokens: dict[str, int]
    evicted: str
    used_blocks: int
    transfer_time: float


def requests(*rows: tuple[float, ...], priorities: tuple[int, ...] = ()) -> list[Request]:
    """Requests a, b, c… of (arrival, prompt, output) or (arrival, prompt, output, declared)."""
    found = []
    for i, (arrival, prompt, output, *declared) in enumerate(rows):
        priority = priorities[i] if priorities else 0
        limit = int(declared[0]) if declared else int(output)
        found.append(Request(i, arrival, int(prompt), int(output), limit, False, priority))
    return found


def steps(policy: Policy, asked: list[Request], limits: Limits = SMALL) -> list[Step]:
    """Every step of a second each until all requests have ended."""
    times = linear(
        1.0,
        0.0,
        0.0,
        0.0,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    group = Group([Scheduler(limits, policy)], table_time(times))
    Loop([Replica([group])], round_robin, asked).run()
    assert all(request.finished for request in asked)
    return [
        Step(
            step.start,
            {"abcdefghij"[part.request.id]: part.tokens for part in step.batch.scheduled},
            "".join("abcdefghij"[one.id] for one in step.batch.preempted),
            step.used_blocks,
            step.batch.transfer_time,
        )
        for step in group.journal
    ]


def tokens(policy: Policy, asked: list[Request], limits: Limits = SMALL) -> list[dict[str, int]]:
    """Tokens of each request in each step."""
    return [step.tokens for step in steps(policy, asked, limits)]


def firsts(found: list[Step]) -> dict[str, float]:
    """When each request was scheduled first, in that order."""
    start: dict[str, float] = {}
    for step in found:
        for name in step.tokens:
            start.setdefault(name, step.start)
    return start
