"""Small SGLang engines, run round by round."""

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

from windtunnel.replay.recording import RecordedRequest
from windtunnel.replay.sglang import Round, Scheduler

SHARED = list(range(100))
"""Tokens for prompts that begin alike."""
PRIVATE = count(1_000_000)


@dataclass(eq=False)
class Ask:
    """A request."""

    name: str
    tokens: list[int]
    output: int
    declared: int
    priority: int = 0


def ask(name: str, prompt: int | list[int], output: int, declared: int | None = None, priority: int = 0) -> Ask:
    """A request; ``prompt`` a length of private tokens, or the tokens."""
    tokens = [next(PRIVATE) for _ in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Ask(name, tokens, output, declared or output, priority)


class Engine(Scheduler):
    """The core's scheduler, with names for its requests."""

    def __init__(self, asks: list[Ask], config: dict[str, object], version: str = "sglang-0.4.6") -> None:
        rows = [
            RecordedRequest(one.name, rank, 0, len(one.tokens), one.output, one.priority, tuple(one.tokens))
            for rank, one in enumerate(asks)
        ]
        super().__init__(rows, config, [one.declared for one in asks], version)
        self.asks = asks
        self.flying: deque[list[Round]] = deque()
        self.ended = 0.0

    def __getattr__(self, name: str) -> Any:
        """What its only rank knows."""
        return getattr(self.__dict__["ranks"][0], name)

    def number(self, name: str) -> int:
        return next(r for r, one in enumerate(self.asks) if one.name == name)

    def names(self, numbers: list[int]) -> list[str]:
        return [self.asks[r].name for r in numbers]

    def arrive(self, *names: str) -> None:
        for name in names:
            self.deliver(self.number(name))

    def schedule_one(self) -> Round | None:
        """What its only rank decides."""
        rounds = self.schedule()
        return None if rounds is None else rounds[0]

    def one_round(self) -> Round | None:
        """A round; with the overlap schedule its outcome is told when the one after it is decided."""
        rounds = self.schedule()
        if rounds is not None:
            self.flying.append(rounds)
        if len(self.flying) == (2 if self.overlaps else 1) or (rounds is None and self.flying):
            self.ended += 1.0
            self.update(self.flying.popleft(), self.ended)
        return None if rounds is None else rounds[0]

    def rounds(self, number: int) -> list[str]:
        """Mode and tokens of each round, like ``extend a3 b4``."""
        return [self.words(self.one_round()) for _ in range(number)]

    def words(self, batch: Round | None) -> str:
        if batch is None:
            return "idle"
        return " ".join([batch.mode, *(f"{self.asks[part.r].name}{part.tokens}" for part in batch.parts)])

    def finished(self, name: str) -> bool:
        row = self.columns[self.number(name)]
        return bool(row["generated"] == row["output"])


def engine(*asks: Ask, later: tuple[Ask, ...] = (), **settings: object) -> Engine:
    """An engine in whose queue ``asks`` wait; those of ``later`` may arrive. ``version``: sglang-0.4.6 if not given."""
    version = str(settings.pop("version", "sglang-0.4.6"))
    plain: dict[str, object] = {"max_total_tokens": 1000, "disable_radix_cache": True}
    made = Engine([*asks, *later], plain | settings, version)
    made.arrive(*(one.name for one in asks))
    return made
