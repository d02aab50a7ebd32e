"""Vidur's loop and schedulers, written a second time from ../shared/notes/vidur.md, with plain lists and no blocks of
windtunnel's: what the oracle has to agree with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf

Chunk = tuple[int, int]
"""(tokens, tokens processed before)."""
StageTime = Callable[[list[Chunk], list[Chunk], bool], float]
"""Seconds of (decodes, chunks) in a stage, and whether it sends on."""


@dataclass(eq=False)
class Item:
    """A request: P and D move at a restart."""

    id: int
    arrival: float
    prompt: int
    output: int
    done: int = 0
    first: float = inf
    end: float = inf
    restarts: int = 0

    @property
    def prefilled(self) -> bool:
        return self.done > self.prompt

    def restart(self) -> None:
        total = self.prompt + self.output
        self.prompt, self.output, self.done = self.done, total - self.done, 0
        self.restarts += 1


@dataclass(eq=False)
class Formed:
    at: float
    parts: list[tuple[Item, int]]
    decodes: list[Chunk]
    chunks: list[Chunk]
    end: float = inf


@dataclass(eq=False)
class Node:
    """One replica. ``rules``: name, cap, blocks, block_size, watermark, chunk, padded, reserved, batch."""

    name: str
    stages: int
    cap: int
    num_blocks: int
    block_size: int
    watermark: int
    tokens: int
    """Of a step: padded for vllm, the chunk for sarathi."""
    reserved: int = 0
    """Blocks of each request of orca."""
    waiting: list[Item] = field(default_factory=list)
    idle: list[Item] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    in_flight: int = 0
    free_at: list[float] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def _fits_new(self, item: Item) -> bool:
        return self.free - ceil(item.prompt / self.block_size) >= self.watermark

    def _admit(self, item: Item) -> None:
        self.waiting.remove(item)
        self.held[item.id] = self.reserved or ceil(item.prompt / self.block_size)

    def _out(self, item: Item) -> None:
        item.restart()
        del self.held[item.id]
        self.waiting.insert(0, item)

    def _decode(self, batch: list[tuple[Item, int]], item: Item) -> None:
        while self.free < 1:
            if not self.idle:
                self._out(item)
                return
            self._out(self.idle.pop())
        if item.done > self.held[item.id] * self.block_size:
            self.held[item.id] += 1
        batch.append((item, 1))

    def form(self) -> list[tuple[Item, int]]:
        return {"vllm": self._vllm, "sarathi": self._sarathi, "orca": self._orca}[self.name]()

    def _vllm(self) -> list[tuple[Item, int]]:
        batch: list[tuple[Item, int]] = []
        while self.waiting and len(self.held) < self.cap and len(batch) < self.cap // self.stages:
            head = self.waiting[0]
            longest = max([head.prompt, *(n for _, n in batch)])
            if not self._fits_new(head) or longest * (len(batch) + 1) > self.tokens:
                break
            self._admit(head)
            batch.append((head, head.prompt))
        if batch:
            return batch
        self.idle.sort(key=lambda item: item.arrival)
        while self.idle and len(batch) < self.cap // self.stages:
            self._decode(batch, self.idle.pop(0))
        return batch

    def _sarathi(self) -> list[tuple[Item, int]]:
        batch: list[tuple[Item, int]] = []
        partial, left = [], []
        while self.idle and len(batch) < self.cap // self.stages:
            item = self.idle.pop(0)
            if item.prefilled:
                self._decode(batch, item)
            else:
                partial.append(item)
        for item in partial:
            tokens = min(item.prompt - item.done, self.tokens - sum(n for _, n in batch))
            if tokens > 0:
                batch.append((item, tokens))
            else:
                left.append(item)
        self.idle = sorted(left + self.idle, key=lambda item: item.arrival)
        while self.waiting and len(self.held) < self.cap and len(batch) < self.cap // self.stages:
            head = self.waiting[0]
            tokens = min(head.prompt, self.tokens - sum(n for _, n in batch))
            if not self._fits_new(head) or tokens <= 0:
                break
            self._admit(head)
            batch.append((head, tokens))
        return batch

    def _orca(self) -> list[tuple[Item, int]]:
        batch = [(item, 1) for item in self.idle[: self.cap]]
        self.idle = self.idle[self.cap :]
        while self.waiting and len(batch) < self.cap and self.free >= self.reserved:
            head = self.waiting[0]
            self._admit(head)
            batch.append((head, head.prompt))
        return batch


Route = Callable[[list[Node]], int]


def run(items: list[Item], nodes: list[Node], route: Route, time: StageTime) -> list[Formed]:
    """All batches, in the order in which they were formed."""
    events: list[tuple[float, int, str, int, Formed | None]] = []
    batches: list[Formed] = []
    for item in items:
        heappush(events, (item.arrival, len(events), "arrival", item.id, None))
    count = len(events)

    def schedule(j: int, now: float) -> None:
        nonlocal count
        node = nodes[j]
        while node.in_flight < node.stages:
            parts = node.form()
            if not parts:
                break
            formed = Formed(
                now,
                parts,
                [(1, item.done) for item, _ in parts if item.prefilled],
                [(n, item.done) for item, n in parts if not item.prefilled],
            )
            batches.append(formed)
            node.in_flight += 1
            at = now
            for stage in range(node.stages):
                seconds = time(formed.decodes, formed.chunks, stage < node.stages - 1)
                at = node.free_at[stage] = max(at, node.free_at[stage]) + seconds
            formed.end = at
            count += 1
            heappush(events, (at, count, "end", j, formed))

    while events:
        now, _, kind, who, formed = heappop(events)
        if kind == "arrival":
            j = route(nodes)
            nodes[j].waiting.append(items[who])
            schedule(j, now)
            continue
        node = nodes[who]
        node.in_flight -= 1
        assert formed is not None
        for item, n in formed.parts:
            _advance(node, item, n, now)
        schedule(who, now)
    return batches


def _advance(node: Node, item: Item, tokens: int, now: float) -> None:
    before = item.prefilled
    item.done += tokens
    if not before and item.done == item.prompt:
        item.done += 1
        item.first = min(item.first, now)
    if item.done == item.prompt + item.output:
        item.end = now
        del node.held[item.id]
    else:
        node.idle.append(item)
