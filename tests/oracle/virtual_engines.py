"""Virtual engines a second time, in plain Python: several schedulers of one replica, whose steps share the stages of a
pipeline (AsyncLLMEngine.run_engine_loop and LLMEngine.add_request of vLLM 0.8.5). Each scheduler is a replay's lane."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from windtunnel.perf.batch_times import StageTimes
from windtunnel.policy import VllmV0
from windtunnel.replay.recording import RecordedRequest, Recording
from windtunnel.replay.vllm_v0 import SAME_NAME, Decision, Scheduler


@dataclass
class Engine:
    """One of them, and its step in flight."""

    scheduler: Scheduler
    asks: bool = False
    flight: Decision | None = None
    end: float = inf
    order: int = 0


@dataclass
class Served:
    """What a replica did."""

    engines: list[Engine]
    engine_of: dict[int, int] = field(default_factory=dict)
    scheduled: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[int, float, float, int]] = field(default_factory=list)
    """(Engine, start in the first stage, end, decodes)."""


def engine(policy: VllmV0, limits: Any, rows: list[RecordedRequest]) -> Engine:
    """One with its share of the blocks."""
    stages = policy.pipeline_parallel_size
    config = {name: getattr(policy, name) for name in SAME_NAME} | {
        "num_gpu_blocks": limits.num_blocks // stages,
        "num_cpu_blocks": policy.num_cpu_blocks // stages,
        "block_size": limits.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "enable_chunked_prefill": policy.chunked_prefill,
        "policy": policy.admission_order,
    }
    return Engine(Scheduler(Recording(config, {}, tuple(rows))))


def serve(policy: VllmV0, limits: Any, times: StageTimes, rows: list[RecordedRequest]) -> Served:
    """Serve requests, in order of arrival."""
    served = Served([engine(policy, limits, rows) for _ in times.stages])
    free, coming, arrival = [0.0] * len(times.stages), list(range(len(rows))), served.engines[0].scheduler.arrival
    while True:
        due = min(served.engines, key=lambda one: (one.end, one.order))
        now = min(due.end, arrival[coming[0]] if coming else inf)
        if now == inf:
            return served
        if due.end <= now:
            assert due.flight is not None
            due.scheduler.update(due.flight, due.end)
            due.flight, due.end, due.asks = None, inf, True
        while coming and arrival[coming[0]] <= now:
            _deliver(served, coming.pop(0))
        for k, one in enumerate(served.engines):
            if one.asks and one.flight is None:
                one.asks = False
                _decide(served, policy, times, k, now, free)


def _deliver(served: Served, r: int) -> None:
    load = [len(one.scheduler.waiting) + len(one.scheduler.running) + len(one.scheduler.swapped)
            for one in served.engines]  # fmt: skip
    k = served.engine_of[r] = load.index(min(load))
    served.engines[k].scheduler.deliver(r)
    served.engines[k].asks = True


def _decide(served: Served, policy: VllmV0, times: StageTimes, k: int, now: float, free: list[float]) -> None:
    one = served.engines[k]
    while (decision := one.scheduler.schedule(now)) and not decision.parts:
        one.scheduler.update(decision, now)
    if decision is None:
        return
    chunks = [(part.tokens - part.hit, part.start + part.hit) for part in decision.prefills]
    seconds, sends = times.passage(len(decision.decodes), sum(part.start for part in decision.decodes), chunks)
    waits = policy.transfer_time(decision.blocks_out, decision.blocks_in)
    start, ready = max(now, free[0]), now
    for stage, own in enumerate(seconds):
        free[stage] = max(ready, free[stage]) + (own + waits)
        ready = free[stage] + (sends[stage] if stage < len(sends) else 0.0)
    one.flight, one.end, one.order = decision, free[-1], len(served.steps) + 1
    served.steps.append((k, start, free[-1], len(decision.decodes)))
    for part in decision.prefills:
        served.scheduled.setdefault(part.r, start)
