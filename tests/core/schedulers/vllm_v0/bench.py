"""A bench for vLLM's v0 scheduler: small requests, steps of 10 ms, blocks of 4 tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.replay.recording import TICKS_PER_SECOND, RecordedRequest, Recording
from windtunnel.replay.vllm_v0 import Decision, Scheduler


def request(
    rank: int, prompt: int, output: int = 9, *, priority: int = 0, shared: int = 0, arrival: float | None = None
) -> RecordedRequest:
    """r0, r1 …, arriving at 0, 1, … ms; the first ``shared`` tokens are those of all requests."""
    tokens = tuple(range(shared)) + tuple(-1000 * (rank + 1) - i for i in range(prompt - shared))
    ticks = round((rank / 1000 if arrival is None else arrival) * TICKS_PER_SECOND)
    return RecordedRequest(f"r{rank}", rank, ticks, prompt, output, priority, tokens)


@dataclass(frozen=True)
class Step:
    """A decision, by names of requests."""

    tokens: dict[str, int]
    """Of each request that takes part, cached ones included; prefills first."""
    hits: dict[str, int]
    prefills: int
    computed: int
    preempted: list[str]
    swapped_out: list[str]
    swapped_in: list[str]
    ignored: list[str]
    blocks_out: int
    blocks_in: int


class Bench:
    """A lane whose steps take 10 ms, from 1 s on."""

    def __init__(self, *requests: RecordedRequest, arrived: Any = None, **config: object) -> None:
        """``arrived``: those that are in the queue already; None: all."""
        settings = {"num_gpu_blocks": 90, "block_size": 4} | config
        self.lane = Scheduler(Recording(settings, {}, requests))
        self.number = {one.id: one.rank for one in requests}
        self.now = 1.0
        for name in self.number if arrived is None else arrived:
            self.arrive(name)

    def arrive(self, name: str) -> None:
        """A request joins the queue."""
        self.lane.deliver(self.number[name])

    def step(self) -> Step:
        """Decide a step, and let it end."""
        decision = self.lane.schedule(self.now)
        if decision is None:
            return Step({}, {}, 0, 0, [], [], [], [], 0, 0)
        step = self._named(decision)
        self.now += 0.01
        self.lane.update(decision, self.now)
        return step

    def steps(self, count: int) -> list[dict[str, int]]:
        """Tokens in each of so many steps."""
        return [self.step().tokens for _ in range(count)]

    def ids(self, numbers: Sequence[int]) -> list[str]:
        """Names of requests."""
        return [self.lane.rows[r].id for r in numbers]

    @property
    def running(self) -> list[str]:
        """The running list."""
        return self.ids(self.lane.running)

    @property
    def waiting(self) -> list[str]:
        """The queue."""
        return self.ids(self.lane.waiting)

    @property
    def free(self) -> tuple[int, int]:
        """Free blocks on the device and on the host."""
        return int(self.lane.lane["free"]), int(self.lane.lane["cpu_free"])

    def blocks(self, name: str, count: int) -> list[int]:
        """The first blocks that a request got, with a prefix cache."""
        first = int(self.lane.columns["table"][self.number[name]])
        return [int(block) for block in self.lane.stepper.state.extra.cache.tables[first : first + count]]

    def _named(self, decision: Decision) -> Step:
        return Step(
            tokens={self.lane.rows[part.r].id: part.tokens for part in decision.parts},
            hits={self.lane.rows[part.r].id: part.hit for part in decision.prefills if part.hit},
            prefills=len(decision.prefills),
            computed=sum(part.tokens - part.hit for part in decision.parts),
            preempted=self.ids(decision.preempted),
            swapped_out=self.ids(decision.swapped_out),
            swapped_in=self.ids(decision.swapped_in),
            ignored=self.ids(decision.ignored),
            blocks_out=decision.blocks_out,
            blocks_in=decision.blocks_in,
        )
