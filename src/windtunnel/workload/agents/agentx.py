"""AgentX: recorded sessions of agents, replayed in lanes for a fixed time.

Each lane's first play starts somewhere inside its session: what lies before is history, of which only the last turn of
each conversation is sent, to fill the cache (a primer), and some more turns, all with one output token. When all that
has drained the window opens, and the rest comes as recorded. A lane whose session has ended plays the next one from the
beginning. A play shares nothing with other ones but tools and system prompts.

Sources: SemiAnalysisAI/InferenceX at 843c625 (benchmarks/benchmark_lib.sh), SemiAnalysisAI/aiperf at 211ad67
(docs/tutorials/agentx-mvp.md), ai-dynamo/aiperf at 01a4d17 (docs/benchmark-modes/semianalysis-agentx-faq.md),
ai-dynamo/aisimulate at 179d853 (docs/agentic-profile.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.workload import texts
from windtunnel.workload.agents.measured import Measured
from windtunnel.workload.columns import Workload
from windtunnel.workload.synthetic import check_count, stream

FASTEST_TOKEN = 1e-3
"""Seconds in which no server makes an output token: plays are prepared that last for the window even then."""


@dataclass(frozen=True)
class Rules:
    """What a published version says."""

    seconds: float
    """The window."""
    start: tuple[float, float] = (0.25, 0.75)
    """Shares of its turns between which a lane's first play starts."""
    warm_up: int = 0
    """Turns of each lane that are sent before the window, after the primers."""
    tree_idle: float = math.inf
    """Seconds for which nothing of a session may be in flight."""
    system_idle: float = math.inf
    """Seconds for which nothing at all may be in flight."""
    grace: float = math.inf
    """Seconds after the window when what is in flight is cancelled."""
    longest: int | None = None
    """Sessions with a longer request, prompt and output together, are left out; None: with none."""


VERSIONS = {
    "agentx": Rules(3600.0, warm_up=10, tree_idle=300.0, system_idle=10.0),
    "agentx-mvp": Rules(1800.0, start=(0.0, 1.0), system_idle=10.0),
    "agentx-aiperf": Rules(1800.0, start=(0.0, 1.0), tree_idle=10.0),
    "agentx-aisimulate": Rules(3600.0, tree_idle=300.0, system_idle=10.0, grace=30.0),
}
"""InferenceX; the first text of AIPerf; AIPerf's newer one; AISimulate, whose second round of primers finds all that
the first left."""


def rules_of(version: str, seconds: float | None = None, longest: int | None = None) -> Rules:
    """The rules of a version, with another window, and without longer requests. Raises InputError for an unknown
    version."""
    if version not in VERSIONS:
        raise unknown("replay", version, VERSIONS)
    rules = replace(VERSIONS[version], longest=longest)
    return rules if seconds is None else replace(rules, seconds=seconds)


def agentx(corpus: Workload, rules: Rules, lanes: int, seed: int = 0) -> Workload:
    """The plays of these sessions, with what counts of them. ``seed`` draws their order and where first ones start.

    Raises InputError for a corpus without sessions of two requests or more.
    """
    if lanes < 1:
        raise InputError(f"lanes={lanes}: must be ≥ 1")
    traces = _Traces(corpus, rules.longest)
    order = stream(seed, "agentx").permutation(len(traces.rows)).tolist()
    long = [s for s in order if len(traces.rows[s]) > 1]
    if not long:
        short = f" of at most {rules.longest:,} tokens" if rules.longest else ""
        raise InputError(
            f"{corpus.name}: AgentX starts inside sessions, and none has two requests{short}: give another"
        )
    starts = stream(seed, "agentx starts").uniform(*rules.start, lanes)
    plays = _Plays(traces, rules)
    for lane in range(lanes):
        plays.add_started(long[lane % len(long)], float(starts[lane]))
    for s in _later(traces, rules, order, lanes, (long * (lanes // len(long) + 1))[:lanes]):
        plays.add(s)
    return plays.workload(lanes)


class _Traces:
    """The sessions of a corpus, by their rows."""

    def __init__(self, corpus: Workload, longest: int | None = None) -> None:
        self.corpus = corpus
        n = len(corpus)
        begins = corpus.texts or (np.full(n, -1, np.int64), np.zeros(n, np.int64))
        offsets, parents = (part.tolist() for part in corpus.waits)
        self.after = [parents[offsets[r] : offsets[r + 1]] for r in range(n)]
        self.prompt, self.output = corpus.prompt_tokens.tolist(), corpus.output_tokens.tolist()
        self.think = corpus.think_time.tolist()
        numbers = np.where(corpus.session >= 0, corpus.session, -1 - np.arange(n)).tolist()
        rows: dict[int, list[int]] = {}
        for r in texts.earlier_first(begins, corpus.waits).tolist():
            rows.setdefault(numbers[r], []).append(r)
        self.rows = list(rows.values())
        if longest is not None:
            texts_of = (corpus.prompt_tokens + corpus.output_tokens).tolist()
            self.rows = [one for one in self.rows if max(texts_of[r] for r in one) <= longest]
        self.arrival = self._offsets(corpus.arrival.tolist())
        self.others, self.tokens = (part.tolist() for part in begins)
        self.first, self.shared = self._beginnings(numbers)
        """(Of each row the first text that it shares something with, how much of it other plays have.)"""

    def _offsets(self, arrival: list[float]) -> list[float]:
        """Seconds from the session's first request; of those that wait, that of the latest one before."""
        found = [0.0] * len(arrival)
        for rows in self.rows:
            first = min(arrival[r] for r in rows if not self.after[r])
            for r in rows:
                found[r] = max(
                    (found[p] for p in self.after[r]), default=arrival[r] - first if not self.after[r] else 0.0
                )
        return found

    def _beginnings(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        first, upto = list(range(len(self.others))), list(self.prompt)
        system = [0] * len(first) if self.corpus.system_tokens is None else self.corpus.system_tokens.tolist()
        for r in (r for rows in self.rows for r in rows):
            other, tokens = self.others[r], self.tokens[r]
            if other < 0:
                continue
            first[r], upto[r] = first[other], min(tokens, upto[other])
            if numbers[other] != numbers[r]:  # what sessions share, all plays do
                system[first[r]] = max(system[first[r]], upto[r])
                self.others[r] = -1
        return first, [min(upto[r], system[first[r]]) for r in range(len(first))]

    def least_seconds(self, s: int, gap: float) -> float:
        """How long a play lasts at least, if the server takes no time for prompts and gaps are cut."""
        ends: dict[int, float] = {}
        for r in self.rows[s]:
            start = max((ends[p] for p in self.after[r]), default=0.0)
            ends[r] = start + min(self.think[r], gap) + FASTEST_TOKEN * self.output[r]
        return max(ends.values())


def _later(traces: _Traces, rules: Rules, order: list[int], lanes: int, started: list[int]) -> list[int]:
    """The sessions that follow the first plays, as many as the window can need: all are played before any is again."""
    gap = min(rules.tree_idle, rules.system_idle)
    least = [traces.least_seconds(s, gap) for s in range(len(traces.rows))]
    free = [0.0] * lanes
    heapify(free)
    found: list[int] = []
    waiting = [s for s in order if s not in set(started)]
    while free[0] < rules.seconds:
        waiting = waiting or list(order)
        found.append(waiting.pop(0))
        heapreplace(free, free[0] + least[found[-1]])
        check_count("AgentX: number of plays", len(found))
    return found


@dataclass
class _Plays:
    """The rows of plays, one behind the other."""

    traces: _Traces
    rules: Rules
    columns: dict[str, list[Any]] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    """First text → the first row here that has its beginning."""
    warm_up: list[int] = field(default_factory=list)
    opening: list[int] = field(default_factory=list)
    plays: int = 0

    def __post_init__(self) -> None:
        names = ("session", "arrival", "after", "think_time", "prompt_tokens", "output_tokens", "begins")
        self.columns = {name: [] for name in names}

    def add(self, s: int) -> None:
        """A whole play."""
        traces, rows = self.traces, self.traces.rows[s]
        at = self._places(rows)
        for r, begins in zip(rows, self._begins(rows, at, set()), strict=True):
            self._append(r, [at[p] for p in traces.after[r]], traces.think[r], traces.output[r], begins)
        self.plays += 1

    def add_started(self, s: int, share: float) -> None:
        """One that starts behind this share of its turns, at least one and not all."""
        traces, rows = self.traces, self.traces.rows[s]
        cut = min(max(int(share * len(rows)), 1), len(rows) - 1)
        history, future = set(rows[:cut]), rows[cut:]
        live = {self._own_parent(r) for r in future if traces.after[r]} & history
        primers = [r for r in rows[:cut] if r in live] or [rows[cut - 1]]
        ahead = future[: min(self.rules.warm_up, len(future) - 1)]
        kept, short = [*primers, *future], {*primers, *ahead}
        at = self._places(kept)
        for r, begins in zip(kept, self._begins(kept, at, short), strict=True):
            after = [] if r in live or r in history else [at[p] for p in traces.after[r] if p in at] or [at[primers[0]]]
            think = 0.0 if r in short else traces.think[r]
            if r not in short and not any(p in at and p not in short for p in traces.after[r]):
                self.opening.append(at[r])
            self._append(r, after, think, 1 if r in short else traces.output[r], begins)
            if not after:
                self.columns["arrival"][-1] = 0.0
        self.warm_up += [at[r] for r in kept if r in short]
        self.plays += 1

    def _own_parent(self, r: int) -> int:
        """The turn before of its own conversation: the one that its prompt begins with, else the first it waits for."""
        parents = self.traces.after[r]
        other: int = self.traces.others[r]
        return other if other in parents else parents[0]

    def _places(self, rows: Sequence[int]) -> dict[int, int]:
        first = len(self.columns["session"])
        return {r: first + k for k, r in enumerate(rows)}

    def _begins(self, rows: Sequence[int], at: dict[int, int], short: set[int]) -> list[tuple[int, int] | None]:
        """With whose text each begins: of rows left out, those here that share most of it; of the ``short`` ones, whose
        answers are other ones, the prompt."""
        traces, local = self.traces, {r: k for k, r in enumerate(self._family(rows))}
        others = np.array([local.get(traces.others[r], -1) for r in local])
        tokens = np.array([traces.tokens[r] for r in local])
        kept = texts.taken((others, np.where(others >= 0, tokens, 0)), np.array([local[r] for r in rows]))
        found: list[tuple[int, int] | None] = []
        for k, r in enumerate(rows):
            other = -1 if kept is None else int(kept[0][k])
            if other >= 0 and kept is not None:
                most = traces.prompt[rows[other]] if rows[other] in short else math.inf
                found.append((at[rows[other]], int(min(kept[1][k], most))))
                continue
            holder = self.holders.setdefault(traces.first[r], at[r])
            shared = traces.shared[r] if holder != at[r] else 0
            held = (
                self.columns["prompt_tokens"][holder]
                if holder < at[rows[0]]
                else traces.prompt[rows[holder - at[rows[0]]]]
            )
            found.append((holder, min(shared, held)) if shared else None)
        return found

    def _family(self, rows: Sequence[int]) -> list[int]:
        """The rows, and those whose texts they begin with."""
        found: dict[int, None] = {}
        for r in rows:
            above = [r]
            while (other := self.traces.others[above[-1]]) >= 0 and other not in found:
                above.append(other)
            found |= dict.fromkeys(reversed(above))
        return list(found)

    def _append(self, r: int, after: list[int], think: float, output: int, begins: tuple[int, int] | None) -> None:
        values = (self.plays, self.traces.arrival[r], after, think, self.traces.prompt[r], output, begins)
        for name, value in zip(self.columns, values, strict=True):
            self.columns[name].append(value)

    def workload(self, lanes: int) -> Workload:
        """All of them, with the numbers that they get once they have been put in order."""
        corpus, rules, n = self.traces.corpus, self.rules, len(self.columns["session"])
        columns: dict[str, Any] = self.columns
        found = Workload.from_columns(
            **columns, priority=np.arange(n), lanes=lanes, name=corpus.name, notes=corpus.notes, sort=True
        )
        place = np.empty(n, np.int64)
        place[found.priority] = np.arange(n)
        before, opening = (np.sort(place[np.array(rows, np.int64)]) for rows in (self.warm_up, self.opening))
        gaps = {"idle_gap": rules.system_idle, "tree_gap": rules.tree_idle, "grace": rules.grace}
        measured = Measured(before, opening, rules.seconds, **gaps)
        return replace(found, priority=np.zeros(n, np.int64), measured=measured)
