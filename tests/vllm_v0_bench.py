"""A bench for vLLM's v0 scheduler of the reference: small requests, steps of 10 ms."""

from collections.abc import Sequence

from windtunnel.reference.vllm_v0 import Scheduler
from windtunnel.reference.vllm_v0_request import Batch, Request
from windtunnel.reference.vllm_v0_settings import Settings


def request(rank: int, prompt: int, output: int = 9, *, priority: int = 0, shared: int = 0) -> Request:
    """r0, r1 …, arriving at 0, 1, … ms; the first ``shared`` tokens are everybody's."""
    tokens = tuple(range(shared)) + tuple(-1000 * (rank + 1) - i for i in range(prompt - shared))
    return Request(f"r{rank}", rank, rank / 1000, tokens, output, priority)


class Bench:
    """A scheduler whose steps take 10 ms."""

    def __init__(self, *requests: Request, **config: object) -> None:
        self.scheduler = Scheduler(Settings.from_config({"num_gpu_blocks": 90, "block_size": 4} | config))
        self.now = 1.0
        for one in requests:
            self.scheduler.add(one)

    def decide(self) -> Batch:
        return self.scheduler.schedule(self.now)

    def step(self) -> Batch:
        batch = self.decide()
        self.now += 0.01
        self.scheduler.update(batch, self.now)
        return batch

    def steps(self, count: int) -> list[dict[str, int]]:
        return [tokens(self.step()) for _ in range(count)]


def tokens(batch: Batch) -> dict[str, int]:
    return {part.request.id: part.tokens for part in batch.scheduled}


def hits(batch: Batch) -> dict[str, int]:
    return {part.request.id: part.hit for part in batch.prefills if part.hit}


def ids(requests: Sequence[Request]) -> list[str]:
    return [one.id for one in requests]
