"""Small SGLang engines, run round by round."""

from collections import deque
from itertools import count

from windtunnel.reference.sglang import Batch, Scheduler
from windtunnel.reference.sglang_request import Request, Settings

SHARED = list(range(100))
"""Tokens for prompts that begin alike."""
PRIVATE = count(1_000_000)


def ask(name: str, prompt: int | list[int], output: int, declared: int | None = None) -> Request:
    """A request; ``prompt`` a length of private tokens, or the tokens."""
    tokens = [next(PRIVATE) for _ in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(name, tokens, output, declared or output)


def engine(*requests: Request, **settings: object) -> Scheduler:
    plain: dict[str, object] = {"max_total_tokens": 1000, "disable_radix_cache": True}
    scheduler = Scheduler(Settings(**(plain | settings)))  # type: ignore[arg-type]
    scheduler.waiting += requests
    return scheduler


def one_round(scheduler: Scheduler) -> Batch | None:
    batch = scheduler.schedule()
    if batch is not None:
        scheduler.update(batch)
    return batch


def rounds(scheduler: Scheduler, number: int) -> list[str]:
    """Mode and tokens of each round, like ``extend a3 b4``."""
    return [words(one_round(scheduler)) for _ in range(number)]


def words(batch: Batch | None) -> str:
    """One of them."""
    parts = [f"{part.request.id}{part.tokens}" for part in batch.scheduled] if batch else []
    return " ".join([batch.mode if batch else "idle", *parts])


class Overlapped:
    """The same with the overlap schedule: a round's outcome is told when the one after it is decided."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.flying: deque[Batch] = deque()

    def one_round(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.flying.append(batch)
        if len(self.flying) == 2 or (batch is None and self.flying):
            self.scheduler.update(self.flying.popleft())
        return batch

    def rounds(self, number: int) -> list[str]:
        return [words(self.one_round()) for _ in range(number)]
