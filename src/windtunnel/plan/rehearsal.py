"""Rehearsal: a few requests on one candidate of each kind of scheduler, so that its kernels are compiled once.

Compiling takes longer than most searches. Without this every worker would compile what all of them need.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from windtunnel.deployment import Pool
from windtunnel.deployment.engine_scheduler import engine_scheduler, named_settings
from windtunnel.errors import InputError
from windtunnel.plan.question import Question
from windtunnel.plan.space import Candidate
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import head

REQUESTS = 8


@dataclass(frozen=True)
class Rehearsal:
    """What is simulated for nothing but its kernels."""

    question: Question
    candidate: Candidate


def rehearsals(question: Question, candidates: Iterable[Candidate]) -> list[Rehearsal]:
    """One for each kind of scheduler among the candidates."""
    kinds: dict[str, Candidate] = {}
    for candidate in candidates:
        kinds.setdefault(" ".join(_kind(pool) for pool in candidate.deployment.pools), candidate)
    return [Rehearsal(question, candidate) for candidate in kinds.values()]


def _kind(pool: Pool) -> str:
    """What decides which kernels run: the type of the scheduler's settings, and which parts of its rules it uses."""
    settings = named_settings(pool.engine.scheduler) if pool.engine.scheduler else engine_scheduler(pool.engine)
    parts = (
        "pipeline_parallel_size",
        "prefix_caching",
        "radix_cache",
        "admission_order",
        "long_prefill_token_threshold",
    )
    return f"{type(settings).__name__} {[getattr(settings, part, None) for part in parts]}"


def rehearse(job: Rehearsal) -> None:
    """Simulate the first requests of the load; whether it can be is asked later."""
    try:
        few = head(job.question.workload, REQUESTS)
        simulate(job.candidate.deployment, few, perf=job.question.perf, overheads=job.question.overheads)
    except InputError:
        pass
