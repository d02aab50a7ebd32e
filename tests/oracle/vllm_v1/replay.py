"""The readable text of vLLM's v1 scheduler as the scheduler of a replay."""

from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

from oracle.vllm_v1.encoder import EncoderLimits
from oracle.vllm_v1.request import Image, Request
from oracle.vllm_v1.scheduler import Scheduler
from oracle.vllm_v1.speculation import Speculation, proposes_none
from windtunnel.policy import Limits, VllmV1, generated
from windtunnel.replay import vllm_v1
from windtunnel.replay.loop import Decision, Part, Record, interval_words
from windtunnel.replay.recording import Recording, known


class Readable:
    """The scheduler, by numbers of requests."""

    def __init__(
        self, recording: Recording, room: Limits, rules: VllmV1, drafting: Speculation, encoder: EncoderLimits
    ) -> None:
        self.scheduler = Scheduler(room, rules, drafting, encoder)
        self.outcome: Record = {}
        """What became of the drafts of the step that ended last."""
        self.requests = [
            Request(
                id=row.rank,
                arrival=row.arrival,
                prompt_tokens=row.prompt_tokens,
                output_tokens=generated(row.prompt_tokens, row.output_tokens, room),
                max_tokens=row.output_tokens,
                priority=row.priority,
                name=row.id,
                tokens=row.tokens + row.answer,
                adapter=row.adapter,
                images=tuple(Image(*image) for image in row.images),
            )
            for row in recording.requests
        ]

    @property
    def running(self) -> list[int]:
        """The running list."""
        return _numbers(self.scheduler.running)

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return _numbers(self.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.scheduler.free_blocks

    @property
    def encoded(self) -> Record:
        """What the encoder computes in the step that was decided, and what its cache holds."""
        encoder = self.scheduler.encoder
        return {
            "encoder": {request.name: inputs for request, inputs in encoder.scheduled.items()},
            "encoder_free": encoder.free,
            "encoder_freed": encoder.dropped,
        }

    @property
    def interval(self) -> Record:
        """What prefill_schedule_interval looks at."""
        one = self.scheduler
        return interval_words(one.last_prefill_step, one.executed, one.capacity_bound)

    @property
    def preemptions(self) -> list[int]:
        """How often each request was preempted."""
        return [request.preemptions for request in self.requests]

    def release(self, r: int, time: int) -> None:
        """A request that waited for others will come at that time."""
        self.requests[r].arrival = time

    def place(self, r: int) -> tuple[float, int]:
        """A request's place in the order of arrival."""
        return self.requests[r].arrival, r

    def deliver(self, r: int) -> None:
        """A request arrives."""
        self.scheduler.add(self.requests[r])

    def schedule(self, now: float) -> Decision | None:
        """Decide the next step; None if it is empty."""
        batch = self.scheduler.schedule(now)
        if not batch.scheduled and not batch.preempted:
            return None
        parts = [Part(part.request.id, *part[1:]) for part in batch.scheduled]  # their fields have one order
        admitted = {request.id: hit for request, hit in batch.admitted.items()}
        return Decision(parts, _numbers(batch.preempted), admitted, batch)

    def launch(self, decision: Decision, end: float) -> None:
        """Nothing changes before the output arrives."""

    def update(self, decision: Decision, end: float) -> tuple[list[int], list[int]]:
        """The output of the oldest step in flight arrives: (emitted, finished)."""
        emitted, finished = self.scheduler.update(decision.engines, end)
        self.outcome = {
            "accepted": {one.name: count for one, count in decision.engines.sampled.items()},
            "computed": {
                part.request.name: part.request.num_computed_tokens
                for part in decision.engines.scheduled
                if not part.request.finished
            },
        }
        return _numbers(emitted), _numbers(finished)


def _numbers(requests: Iterable[Request]) -> list[int]:
    return [request.id for request in requests]


SPECULATION: Record = {"k": 0, "method": "ngram", "accept": 0.0, "propose": 1.0}
"""Drafts of a step, who makes them, how likely each is right, and how likely n-grams propose any."""


def speculation(asked: Mapping[str, Any] | None, recording: Recording) -> Speculation:
    """The drafts of a recording: which are right is drawn for each request and token, as the recorder does."""
    given = known(asked or {}, SPECULATION, "setting of spec")
    most, accept = given["k"], given["accept"]
    names = [row.id for row in recording.requests]

    def accepted(request: Request, drafts: int) -> int:
        stream, right = Random(f"{names[request.id]}:{request.generated}"), 0
        while right < drafts and stream.random() < accept:
            right += 1
        return right

    def proposed(request: Request) -> int:
        if given["method"] != "ngram":
            return int(most)
        stream = Random(f"p:{names[request.id]}:{request.generated}")
        return stream.randint(1, most) if stream.random() < given["propose"] else 0

    return Speculation(most, given["method"], accepted, proposed if most else proposes_none)


def replay(recording: Recording, version: str) -> Iterator[Record]:
    """As ``windtunnel.replay.vllm_v1.replay``, by plain objects: some thousand steps a second."""
    room, rules = vllm_v1.settings_of(recording, version)
    config = vllm_v1.config_of(recording)
    drafting = speculation(recording.config.get("spec"), recording)
    budgets = (config["encoder_compute_budget"], config["encoder_cache_size"])
    encoder = EncoderLimits(*budgets, config["disable_chunked_mm_input"], shift=int(drafting.drops_last_hit))
    one = Readable(recording, room, rules, drafting, encoder)
    encodes = "encoder_cache_size" in recording.config
    yield from vllm_v1.records(
        one,
        recording,
        version,
        rules,
        decided=lambda _: one.encoded if encodes else {},
        ended=lambda: one.outcome if drafting.num_speculative_tokens else {},
    )
