"""vLLM's v1 scheduler of the compiled core, step by step: what it decides is read from its seats."""

from collections import deque
from collections.abc import Iterable
from operator import itemgetter

import numpy as np

from windtunnel.core.records import GONE, NONE
from windtunnel.core.schedulers.vllm_v1.encoder import CONTENT, STEP
from windtunnel.core.schedulers.vllm_v1.steady import REQUEST, YIELDED
from windtunnel.core.seats import NEVER, NOW, WHO
from windtunnel.policy import Limits, VllmV1, generated
from windtunnel.replay.drafts import drawn
from windtunnel.replay.lane import Lane
from windtunnel.replay.loop import Decision, Part, Record, interval_words
from windtunnel.replay.recording import Recording
from windtunnel.replay.stepper import ONLY


class Core:
    """A lane of the core; requests have the recording's numbers outside, and the core's inside."""

    def __init__(self, recording: Recording, room: Limits, rules: VllmV1) -> None:
        rows = list(recording.requests)
        self.by_priority = rules.admission_order == "priority"
        if self.by_priority:  # the core takes equals by number, the engine by name
            rows.sort(key=lambda row: (0 if recording.has_sessions else row.arrival, row.id))
        self.ranks = [row.rank for row in rows]
        self.numbers = {rank: r for r, rank in enumerate(self.ranks)}
        output = [generated(row.prompt_tokens, row.output_tokens, room) for row in rows]
        drafts = drawn(recording.config["spec"], [row.id for row in rows], output) if rules.drafts else None
        self.lane = Lane(rows, room, rules, [row.arrival for row in rows], output, drafts=drafts)
        self.stepper = self.lane.stepper
        most = room.max_model_len if rules.async_scheduling and not rules.stop_at_last_token else 0
        self.overruns = {
            r for r, (row, tokens) in enumerate(zip(rows, output, strict=True)) if row.prompt_tokens + tokens < most
        }
        """Requests that are scheduled once too often."""
        self.victims: list[int] = []
        """Preempted in the latest decision, in the order of the running list."""
        self.outcomes: deque[tuple[list[int], list[int]]] = deque()
        """(Emitted, finished) of each step in flight."""
        self.outcome: Record = {}
        """What became of the drafts of the step that ended last."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.lane.free_blocks

    @property
    def interval(self) -> Record:
        """What prefill_schedule_interval looks at."""
        lane = self.lane.lane
        return interval_words(int(lane["last_prefill_step"]), int(lane["executed"]), bool(lane["capacity_bound"]))

    def encoded(self, decision: Decision) -> Record:
        """What the encoder computes in the step that was decided, and what its cache holds."""
        encoder, lane = self.stepper.state.extra.encoder, self.lane.lane
        names = [name for row in self.lane.rows for _, _, name in row.images]
        found = {}
        for part in decision.parts:
            r = self.numbers[part.r]
            steps = encoder.inputs[encoder.first[r] : encoder.first[r + 1], STEP]
            found[self.lane.rows[r].id] = np.flatnonzero(steps == lane["encoder_step"]).tolist()
        dropped = encoder.dropped[ONLY, : lane["encoder_dropped"]]
        return {
            "encoder": {name: inputs for name, inputs in found.items() if inputs},
            "encoder_free": int(lane["encoder_free"]),
            "encoder_freed": [names[np.argmax(encoder.inputs[:, CONTENT] == content)] for content in dropped],
        }

    @property
    def preemptions(self) -> list[int]:
        """How often each request was preempted."""
        found = self.lane.preemptions
        return [found[self.numbers[rank]] for rank in range(len(found))]

    @property
    def running(self) -> list[int]:
        """The running list."""
        return self._ranks(self.stepper.running())

    @property
    def waiting(self) -> list[int]:
        """The queue; a victim whose last token is in flight stands in it, too, where it was put back."""
        columns, ghosts = self.lane.columns, self.lane.linked("ghost")
        if self.by_priority:
            queue = [*self._heap(int(self.lane.lane["head"])), *ghosts]
            queue.sort(key=lambda r: (columns["key"][r], columns["arrival"][r], r))
        else:
            back = self.victims if ghosts else []
            queue = [*back, *(r for r in self.lane.linked("head") if r not in back)]
        return self._ranks(queue)

    def _heap(self, r: int) -> list[int]:
        """All in the heap under ``r``."""
        if r == NONE:
            return []
        row = self.lane.columns[r]
        return [r, *self._heap(int(row["next"])), *self._heap(int(row["previous"]))]

    def _ranks(self, numbers: Iterable[int]) -> list[int]:
        return [self.ranks[r] for r in numbers]

    def release(self, r: int, time: int) -> None:
        """A request that waited for others will come at that time."""
        self.lane.columns[self.numbers[r]]["arrival"] = time

    def place(self, r: int) -> tuple[float, int]:
        """A request's place in the order of arrival."""
        return float(self.lane.columns[self.numbers[r]]["arrival"]), r

    def deliver(self, r: int) -> None:
        """A request arrives: it takes its place in the queue."""
        number = self.numbers[r]
        self.stepper.deliver(number, float(self.lane.columns[number]["arrival"]))

    def schedule(self, now: float) -> Decision | None:
        """Decide the next step; None if it is empty. The seats show the decision until it is launched."""
        columns = self.lane.columns
        before, contexts = self.stepper.running(), columns["context"].copy()
        scheduled, preempted = self.stepper.decide(now)
        if not scheduled and not preempted:
            self.stepper.pass_over(False)
            return None
        after = self.stepper.running()
        self.victims = [r for r in before if r not in after]
        admitted = {self.ranks[r]: int(columns[r]["context"] - contexts[r]) for r in after if r not in before}
        return Decision(self._parts(after), self._ranks(self.victims), admitted)

    def launch(self, decision: Decision, end: float) -> None:
        """The decision takes effect; its tokens count when its output arrives."""
        if decision.parts:
            emitted = [part.r for part in decision.parts if part.emits and not self._has_ended(part.r)]
            self.stepper.conclude(end)
            self.outcomes.append((emitted, [r for r in emitted if self._has_ended(r)]))
        else:
            self.stepper.pass_over(True)
            self.outcomes.append(([], []))
        self.victims = []

    def update(self, decision: Decision, end: float) -> tuple[list[int], list[int]]:
        """The output of the oldest step in flight arrives: (emitted, finished)."""
        del decision, end
        return self.outcomes.popleft()

    def _has_ended(self, r: int) -> bool:
        return not np.isnan(self.lane.columns[self.numbers[r]]["finish"])

    def _parts(self, running: dict[int, int]) -> list[Part]:
        """What the step computes, in order of admission; victims whose tokens stayed where they stood."""
        columns, clock = self.lane.columns, int(self.lane.lane["clock"])
        parts: list[tuple[int, Part]] = []
        for r, ends in running.items():
            row = columns[r]
            if ends != NEVER and (ends > clock or r in self.overruns) and row["held_clock"] != clock + 1:
                context = int(row["prompt"] + row["output"] - 1 - ends + clock)
                parts.append((int(row["sequence"]), Part(self.ranks[r], 1, context, True, True)))
        owner = {int(columns[r]["sequence"]): r for r in (*running, *self.victims)}
        for sequence, tokens, context in self.stepper.chunks():
            r = owner[sequence]
            known = int(columns[r]["prompt"] + columns[r]["generated"])
            emits = r in running and context + tokens == known
            parts.append((sequence, Part(self.ranks[r], tokens, context, False, emits)))
        return [part for _, part in sorted(parts, key=itemgetter(0))]


class Drafting(Core):
    """The same with speculation: a step yields one token of a request, or several."""

    def __init__(self, recording: Recording, room: Limits, rules: VllmV1) -> None:
        super().__init__(recording, room, rules)
        self.flying: deque[tuple[list[int], list[tuple[int, int]], list[int]]] = deque()
        """(Requests, those that get tokens and how many, those that end) of each step in flight."""

    def launch(self, decision: Decision, end: float) -> None:
        """The decision takes effect; its tokens count when its output arrives."""
        columns, parts = self.lane.columns, []
        scheduled = [self.numbers[part.r] for part in decision.parts]
        if scheduled:
            flight = self.stepper.state.extra.flights[ONLY, int(self.lane.lane["flight"])]
            self.stepper.conclude(end)
            parts = flight[: sum(r not in self.victims for r in scheduled)].tolist()
        else:
            self.stepper.pass_over(True)
        given = [(part[REQUEST], part[YIELDED]) for part in parts if part[YIELDED]]
        known = columns["generated"] + columns["promised"]
        ended = [r for r, _ in given if known[r] == columns["output"][r]]
        self.flying.append((scheduled, given, ended))
        self.victims = []

    def update(self, decision: Decision, end: float) -> tuple[list[int], list[int]]:
        """The output of the oldest step in flight arrives: (emitted, finished)."""
        del decision, end
        columns, (parts, given, ended) = self.lane.columns, self.flying.popleft()
        names = [row.id for row in self.lane.rows]
        self.outcome = {
            "accepted": {names[r]: tokens for r, tokens in given},
            "computed": {names[r]: int(columns["context"][r]) for r in parts if columns["state"][r] != GONE},
        }
        return self._ranks(r for r, _ in given), self._ranks(ended)

    def _parts(self, running: dict[int, int]) -> list[Part]:
        """What the step computes, in order of admission."""
        who, now = self.lane.seats[[WHO, NOW], : self.lane.lane["top"]]
        left = {int(self.lane.columns[r]["sequence"]): r for r in self.victims}
        chunks = [chunk for chunk in self.stepper.chunks() if chunk[0] in left]
        parts = [(n, Part(self.ranks[left[n]], tokens, context, False)) for n, tokens, context in chunks]
        for r, count in zip(who.tolist(), now.tolist(), strict=True):
            if r in running and count:
                row = self.lane.columns[r]
                start, known = int(row["context"]), int(row["prompt"] + row["generated"])
                drafts = start + count - known - int(row["unknown"])
                decodes = start >= int(row["seated_with"])
                part = Part(self.ranks[r], count, start, decodes, drafts >= 0, max(drafts, 0))
                parts.append((int(row["sequence"]), part))
        return [part for _, part in sorted(parts, key=itemgetter(0))]
