"""TensorRT-LLM's Python schedulers written once more, object by object: what the core's seats are compared with.

The functions are named after those of pyexecutor/scheduler/scheduler.py whose rules they follow. A request is prompt
("C"), generation ("G"), or one whose last token is known to be on its way ("T").
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from windtunnel.replay.recording import TICKS_PER_SECOND, RecordedRequest, Recording, coefficients, known
from windtunnel.replay.trtllm import CONFIG

Key = tuple[int, ...]


@dataclass(eq=False)
class Request:
    """One request, and what the executor knows of it."""

    row: RecordedRequest
    declared: int
    tokens: list[int]
    state: str = "C"
    prompt: int = 0
    position: int = 0
    chunk: int = 0
    scheduled: int = 0
    """Tokens that it got or that are on their way."""
    emitted: int = 0
    cached: int = 0
    sequence: int = 0
    """Tokens that its blocks are for."""
    blocks: int = 0
    found: int = 0
    started: bool = False
    stores: bool = False
    holds: list[Key] = field(default_factory=list)

    @property
    def first(self) -> bool:
        """It has not begun."""
        return self.state == "C" and not self.started

    @property
    def left(self) -> int:
        """Tokens of its prompt."""
        return self.prompt - self.position


class Engine:
    """One rank."""

    def __init__(self, recording: Recording) -> None:
        self.config = known(recording.config, CONFIG)
        self.size: int = self.config["tokens_per_block"]
        self.unit: int = self.config["chunk_unit_size"] or self.size
        self.most: int = self.config["max_num_tokens"]
        self.free: int = self.config["num_blocks"]
        spec = self.config["spec"] or {"k": 0, "accept": 0.0}
        self.drafts, self.accept = int(spec["k"]), float(spec["accept"])
        self.extra = max(self.drafts - 1, 0)
        flying = not self.config["disable_overlap_scheduler"]
        self.beyond = self.drafts and (3 * self.drafts - 1 if flying else 2 * self.drafts - 2)
        self.active: list[Request] = []
        self.waiting: list[Request] = []
        self.fitting: list[Request] = []
        self.held_back = 0
        self.references: dict[Key, int] = {}

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # KV cache manager

    def keys(self, request: Request) -> list[Key]:
        return [tuple(request.tokens[: k * self.size]) for k in range(1, request.prompt // self.size + 1)]

    def analyze_prefix_reuse(self, request: Request) -> Key | None:
        request.found = 0
        for key in self.keys(request):
            if key not in self.references:
                request.found = min(request.found, (request.prompt - 1) // self.size)
                return key
            request.found += 1
        request.found = min(request.found, (request.prompt - 1) // self.size)
        return None

    def shared(self, request: Request) -> int:
        """Found blocks that others hold."""
        return sum(self.references[key] > 0 for key in self.keys(request)[: request.found]) if request.first else 0

    def remaining_blocks_to_completion(self, request: Request) -> int:
        all_tokens = request.row.prompt_tokens + request.declared
        return self.blocks_of(all_tokens + self.beyond) - request.blocks - self.shared(request)

    def needed_blocks_one_step(self, request: Request) -> int:
        if request.first:
            return self.blocks_of(request.prompt + self.extra) - self.shared(request)
        return 0 if request.state == "C" else self.blocks_of(request.sequence + 1 + self.drafts) - request.blocks

    def resize(self, request: Request, tokens: int) -> None:
        """Its blocks are for so many tokens more, or fewer."""
        request.sequence += tokens
        self.free -= self.blocks_of(request.sequence) - request.blocks
        request.blocks = self.blocks_of(request.sequence)

    def right(self, request: Request) -> int:
        """How many drafts in a row are right behind the tokens that it has or will have."""
        stream, found = Random(f"{request.row.id}:{request.scheduled}"), 0
        while found < self.drafts and stream.random() < self.accept:
            found += 1
        return found

    def add_sequence(self, request: Request) -> None:
        request.started, request.cached = True, request.prompt
        request.sequence = request.prompt + self.extra
        request.blocks = self.blocks_of(request.sequence)
        self.free -= request.blocks - request.found
        request.holds = self.keys(request)[: request.found]
        for key in request.holds:
            self.free -= self.references[key] == 0
            self.references[key] += 1
        hit = request.position = request.found * self.size + self.beginning(request)
        if hit and hit + request.chunk < request.prompt:
            request.chunk = max((hit + request.chunk) // self.size * self.size - hit, 0)
        request.chunk = min(request.chunk, request.left)

    def beginning(self, request: Request) -> int:
        """Tokens that the first new block shares with a stored one behind the same text; a free leaf is not found again
        (claimLeafBlock): its block is this request's, which has paid for one already."""
        before, most = request.found * self.size, min(request.prompt - 1, (request.found + 1) * self.size)
        best: Key = ()
        alike = 0
        for key in self.references if self.config["enable_partial_reuse"] else ():
            if not before < len(key) <= before + self.size or key[:before] != tuple(request.tokens[:before]):
                continue
            if not self.config["copy_on_partial_reuse"] and not self.free_leaf(key):
                continue
            pairs = zip(key[before:], request.tokens[before:most], strict=False)
            same = next((k for k, (one, other) in enumerate(pairs) if one != other), min(len(key), most) - before)
            if same > alike:
                best, alike = key, same
        if best and self.free_leaf(best):
            del self.references[best]
        return max(alike, 0)

    def free_leaf(self, key: Key) -> bool:
        """Whether nobody holds a block, and none follows it, as none does one that is partly filled."""
        followed = len(key) % self.size == 0 and any(
            len(other) > len(key) and other[: len(key)] == key for other in self.references
        )
        return not self.references[key] and not followed

    def store_context_blocks(self, request: Request) -> None:
        request.stores = False
        for key in self.keys(request):
            if key not in self.references:
                self.references[key] = 1
                request.holds.append(key)

    def free_resources(self, request: Request) -> None:
        if self.config["enable_partial_reuse"] and self.config["enable_block_reuse"]:
            answer = [-1 - request.row.rank * 10**6 - k for k in range(request.row.output_tokens - 1)]
            text = (*request.tokens[: request.row.prompt_tokens], *answer)
            for end in [*range(self.size, len(text) + 1, self.size), len(text)]:
                if text[:end] not in self.references:
                    self.references[text[:end]] = 1
                    request.holds.append(text[:end])
        self.free += request.blocks - len(request.holds)
        for key in request.holds:
            self.references[key] -= 1
            self.free += self.references[key] == 0
        request.holds, request.blocks = [], 0

    # Capacity scheduler

    def contributed_blocks(self) -> set[Key]:
        parts = [one for one in self.active if one.state == "C" and one.started and self.config["enable_block_reuse"]]
        return {key for one in parts if (key := self.analyze_prefix_reuse(one)) is not None}

    def beneficial_to_skip(self, request: Request, contributed: set[Key]) -> bool:
        if not request.first or not self.config["enable_block_reuse"]:
            return False
        key = self.analyze_prefix_reuse(request)
        if key in contributed:
            return True
        contributed |= {key} if key is not None else set()
        return False

    def guaranteed_no_evict(self) -> None:
        static, contributed = self.config["capacity_scheduler_policy"] == "STATIC_BATCH", self.contributed_blocks()
        self.fitting = [one for one in self.active if one.state != "C"]
        free = self.free - sum(map(self.remaining_blocks_to_completion, self.fitting))
        if static and self.fitting:
            return
        for one in [one for one in self.active if one.state == "C"]:
            if not static and self.beneficial_to_skip(one, contributed):
                continue
            if (wanted := self.remaining_blocks_to_completion(one)) > free:
                return
            free -= wanted
            self.fitting.append(one)

    def max_utilization(self) -> list[Request]:
        contributed, self.fitting, paused = self.contributed_blocks(), [], []
        free, coming = self.free, list(self.active)
        while coming:
            one = coming[0]
            if self.beneficial_to_skip(one, contributed):
                coming.pop(0)
                continue
            if (wanted := self.needed_blocks_one_step(one)) <= free:
                free -= wanted
                self.fitting.append(coming.pop(0))
                continue
            started = [
                k for k, other in enumerate(coming) if other.state == "G" or (other.state == "C" and other.started)
            ]
            if not started:
                break
            free += coming[started[-1]].blocks
            paused.append(coming[started[-1]])
            del coming[started[-1] :]
        return paused

    # Micro-batch scheduler

    def compute(self, request: Request, chunk: int) -> int:
        reusable = request.found * self.size if request.first else 0
        return chunk if reusable <= 0 or reusable + chunk < request.left else max(0, request.left - reusable)

    def micro_batch(self) -> tuple[list[Request], list[Request]]:
        contexts: list[Request] = []
        generations: list[Request] = []
        tokens, chunked = 0, self.config["enable_chunked_prefill"]
        for one in self.fitting:
            if one.state == "T":
                continue
            cost = 1 + self.drafts if one.state == "G" else 0 if chunked else max(1, self.compute(one, one.left))
            if tokens + cost > self.most:
                break
            tokens += cost
            one.chunk = one.left
            (generations if one.state == "G" else contexts).append(one)
        left = self.most - tokens
        costs = [self.compute(one, one.left) for one in contexts]
        if not chunked or (sum(min(cost, self.most) for cost in costs) <= left and max(costs, default=0) <= self.most):
            return contexts, generations
        together = self.config["chunking_policy"] == "EQUAL_PROGRESS"
        (self.equal_progress if together else self.first_come_first_served)(contexts, left)
        contexts = [one for one in contexts if one.chunk > 0]
        return sorted(contexts, key=lambda one: one.chunk == one.left), generations

    def first_come_first_served(self, contexts: list[Request], left: int) -> None:
        for one in contexts:
            one.chunk = left if left < self.compute(one, one.left) else one.left
            if self.compute(one, one.chunk) > self.most:
                one.chunk = min(self.most, one.left)
            if one.chunk < one.left:
                one.chunk = one.chunk // self.unit * self.unit
            left -= self.compute(one, one.chunk)

    def equal_progress(self, contexts: list[Request], left: int) -> None:
        for one in contexts:
            one.chunk = 0
        grown = True
        while left > 0 and grown:
            grown = False
            for one in contexts:
                chunk = min(one.chunk + self.unit, one.left)
                more = self.compute(one, chunk) - self.compute(one, one.chunk)
                if more <= left and chunk <= self.most:
                    grown |= chunk > one.chunk
                    one.chunk, left = chunk, left - more

    # Executor

    def waits(self, contexts: list[Request], generations: list[Request]) -> bool:
        iters, ratio = self.config["batch_wait_timeout_iters"], self.config["batch_wait_max_tokens_ratio"]
        if not (iters or ratio) or not contexts or not generations:
            return False
        tokens = sum(one.prompt for one in contexts) + len(generations) * (1 + self.drafts)
        waits: bool = self.held_back < iters and tokens < ratio * self.most
        self.held_back = self.held_back + 1 if waits else 0
        return waits

    def pause(self, request: Request) -> None:
        self.free_resources(request)
        request.tokens += [-1 - len(request.tokens)] * (request.row.prompt_tokens + request.scheduled - request.prompt)
        request.prompt = request.row.prompt_tokens + request.scheduled
        request.state, request.position, request.started = "C", 0, False

    def schedule(self) -> tuple[list[Request], list[Request], list[Request], list[Request]]:
        while self.waiting and len(self.active) < self.config["max_batch_size"]:
            self.active.append(self.waiting.pop(0))
        paused = []
        for one in self.active:
            one.found = 0
        if self.config["capacity_scheduler_policy"] == "MAX_UTILIZATION":
            paused = self.max_utilization()
        else:
            self.guaranteed_no_evict()
        contexts, generations = self.micro_batch()
        for one in paused:
            self.pause(one)
        if self.waits(contexts, generations):
            return [], generations, paused, contexts
        return contexts, generations, paused, []

    def launch(self, contexts: list[Request], generations: list[Request]) -> list[tuple[Request, int, int]]:
        """Who gets how many tokens, and how many of its drafts are wrong."""
        for one in contexts:
            one.position += one.chunk
        done = [one for one in contexts if one.left == 0]
        for one in done:
            one.state, one.stores = "G", bool(self.config["enable_block_reuse"])
        emitting = []
        for one in [*done, *generations]:
            known_end = self.config["overlap_end"] == "to_complete" and not self.config["disable_overlap_scheduler"]
            if known_end and one.scheduled + 1 >= one.declared:
                one.state = "T"
            ended = one.scheduled >= one.row.output_tokens
            right = 0 if one in done or ended else self.right(one)
            tokens = 1 if ended else min(1 + right, one.row.output_tokens - one.scheduled)
            one.scheduled += tokens
            one.cached += 0 if one in done else tokens
            emitting.append((one, tokens, 0 if one in done else self.drafts - right))
        return emitting

    def land(self, emitting: list[tuple[Request, int, int]]) -> tuple[list[str], list[str]]:
        """The step of these has ended: (who got a token, who ended)."""
        for one, _, wrong in emitting:
            if one.stores:
                self.store_context_blocks(one)
            if one in self.active:
                self.resize(one, -wrong)
        got = [one for one, _, _ in emitting if one.emitted < one.row.output_tokens]
        for one, tokens, _ in emitting:
            one.emitted = min(one.emitted + tokens, one.row.output_tokens)
        ended = [one for one in got if one.emitted == one.row.output_tokens]
        for one in ended:
            self.active.remove(one)
            self.free_resources(one)
        return [one.row.id for one in got], [one.row.id for one in ended]


def steps(recording: Recording) -> Iterator[dict[str, Any]]:
    """The records of the steps of one rank, less their times but for ``t_end``."""
    engine, times = Engine(recording), {k: v * TICKS_PER_SECOND for k, v in coefficients(recording).items()}
    declared = engine.config["declared_max_new_tokens"]
    rows = recording.requests
    coming = [Request(row, declared or row.output_tokens, list(row.tokens), prompt=row.prompt_tokens) for row in rows]
    depth = 1 if engine.config["disable_overlap_scheduler"] else 2
    now, end, left = 0, 0, len(coming)
    flying: list[tuple[int, dict[str, Any], list[tuple[Request, int, int]]]] = []
    while left or flying:
        while coming and coming[0].row.arrival <= now:
            engine.waiting.append(coming.pop(0))
        contexts, generations, paused, held = engine.schedule() if left else ([], [], [], [])
        if contexts or generations:
            new = [one for one in contexts if one.first]
            for one in new:
                engine.add_sequence(one)
            for one in generations:
                engine.resize(one, 1 + engine.drafts)
            starts = {one.row.id: one.position for one in contexts} | {one.row.id: one.cached for one in generations}
            tokens = sum(one.chunk for one in contexts)
            ticks = times["base"] + times["per_prefill_tok"] * tokens + times["per_decode"] * len(generations)
            end = max(now, end) + round(ticks + times["per_ctx"] * sum(starts.values()))
            record = {
                "t_end": round(end / TICKS_PER_SECOND, 9),
                "scheduled": {one.row.id: one.chunk for one in contexts}
                | {one.row.id: 1 + engine.drafts for one in generations},
                "start_pos": starts,
                "context": [one.row.id for one in contexts],
                "generation": [one.row.id for one in generations],
                "new": [one.row.id for one in new],
                "cached_hit": {one.row.id: starts[one.row.id] for one in new if starts[one.row.id]},
                "paused": [one.row.id for one in paused],
                "held_by_batch_wait": [one.row.id for one in held],
                "num_fitting": len(engine.fitting),
                "active_order": [one.row.id for one in engine.active],
                "waiting_order": [one.row.id for one in engine.waiting],
                "free_blocks": engine.free,
            }
            flying.append((end, record, engine.launch(contexts, generations)))
            if len(flying) < depth:
                continue
        if flying:
            then, record, emitting = flying.pop(0)
            now = max(now, then)
            emitted, finished = engine.land(emitting)
            left -= len(finished)
            yield record | {"emitted": emitted, "finished": finished, "free_after_update": engine.free}
        elif coming:
            now = max(now, coming[0].row.arrival)
        else:
            return
