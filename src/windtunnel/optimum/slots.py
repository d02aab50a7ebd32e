"""Slots: a bound on mean E2E latency where requests come one after the other, by a linear program over time.

Time is cut into slots. A batch counts in each slot by the share of its time there, and so do its tokens. The program
says how much of each request's prompt and of its later tokens each slot has:

- What a slot's batches take fits it, under every linear cost below the batch times at once: some slots have large
  batches, others small ones, and no single cost is near both.
- A request has one token in a batch at most, and nothing before it arrives; its prompt comes before its later tokens.
- Its latency is at least that of the mean moment of its later tokens and the part of them that then follows, since
  they come one after the other; and that of the mean moment of its prompt and all of them (mean busy times, as of
  Goemans et al., SIAM J. Discrete Math. 15, 2002).

Chunks, pauses and evictions only add work, so the bound holds for every scheduler. What a refill computes again comes
before its token, and no token of it takes less than two that a decode reads: so reading may be early, never late.
"""

import time

import numpy as np
from numpy.typing import NDArray

from windtunnel.optimum.bounds import bounds, linear_costs, to_last_token
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.linear import CONSTANT, LinearProgram
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
Terms = list[tuple[float, int]]
MOST_REQUESTS = 1_000
"""Each has variables for every slot: of more, no program ends in time."""
SLOTS = (12, 25, 50, 80, 120)
"""Of one program after the other while there is time."""
GROWTH = 2.0
"""Power of the slots that the time grows with, at least."""
TANGENT = 0.7
"""Share of a slot's tokens at full pace at which the mean moment within it is bounded by a line."""
ROUNDING = 1 - 1e-7


def mean_e2el_by_slots(problem: Problem, seconds: float, slots: tuple[int, ...] = SLOTS) -> float:
    """Seconds that no schedule's mean E2E latency is below; 0 for requests that come at once, or very many.

    Programs get finer and finer while there is time. Raises InputError without SciPy.
    """
    if len(problem) > MOST_REQUESTS or problem.arrival.min() == problem.arrival.max():
        return 0.0
    deadline, best = time.monotonic() + seconds, 0.0
    for number, most in enumerate(slots):
        began = time.monotonic()
        found = _Slots(problem, most).program.bound(max(deadline - began, 0.0))
        best = max(best, found / len(problem) * ROUNDING - float((problem.arrival - problem.arrival.min()).mean()))
        now = time.monotonic()
        if number + 1 < len(slots) and now + (now - began) * (slots[number + 1] / most) ** GROWTH > deadline:
            break
    return best


class _Slots:
    """The linear program; slots and requests are numbered from 0, the last slot never ends."""

    def __init__(self, problem: Problem, slots: int) -> None:
        self.problem, self.costs, self.program = problem, linear_costs(problem), LinearProgram()
        self.arrival = problem.arrival - problem.arrival.min()
        self.length = bounds(problem).makespan / slots
        self.begins = self.length * np.arange(slots)
        self.decodes = problem.output_tokens - 1
        self.context = (problem.prompt_tokens + 1).astype(np.float64)
        self.read_in_all = max(float(self.context @ self.decodes), 1.0)
        most = float((problem.prompt_tokens + problem.output_tokens).sum())
        self.batches = [self.program.variable(most) for _ in range(slots)]
        # shares of all that is read: what must have been, what is, and what may have been, as the prompt is there
        self.due, self.read, self.may = ([self.program.variable(1.0) for _ in range(slots)] for _ in range(3))
        self.here = [np.nonzero(self.begins + self.length > came)[0].tolist() or [slots - 1] for came in self.arrival]
        self.prompts = [{s: self.program.variable(1.0) for s in here} for here in self.here]
        self.later = [
            {s: self.program.variable(float(more)) for s in here if more}
            for here, more in zip(self.here, self.decodes.tolist(), strict=True)
        ]
        for request in range(len(problem)):
            self._request(request)
            self._latency(request)
        for slot in range(slots):
            self._slot(slot)

    def _request(self, i: int) -> None:
        """All of a request is computed, its later tokens after its prompt and one in a batch at most."""
        add, more = self.program.at_least_zero, float(self.decodes[i])
        add(*((1.0, part) for part in self.prompts[i].values()), (-1.0, CONSTANT))
        if not more:
            return
        add(*((1.0, tokens) for tokens in self.later[i].values()), (-more, CONSTANT))
        for s in self.here[i]:
            add((1.0, self.batches[s]), (-1.0, self.later[i][s]))
            add(*((more, self.prompts[i][k]) for k in self.here[i] if k <= s),
                *((-1.0, self.later[i][k]) for k in self.here[i] if k <= s))  # fmt: skip

    def _latency(self, i: int) -> None:
        """When a request ends at the earliest, which is what counts."""
        add, more = self.program.at_least_zero, int(self.decodes[i])
        alone = max(float(to_last_token(self.problem, cost).alone[i]) for cost in self.costs)
        emitted, each = self._least(i)
        longest = float(self.begins[-1] + self.length + self.arrival[i] + each.sum() + alone)
        end = self.program.variable(longest)
        self.program.costs[end] = 1.0
        add((1.0, end), (-float(self.arrival[i]) - alone, CONSTANT))
        moments = {s: max(float(self.begins[s]), float(self.arrival[i])) for s in self.here[i]}
        add((1.0, end), *((-moment, self.prompts[i][s]) for s, moment in moments.items()), (-each.sum(), CONSTANT))
        if not more:
            return
        follow = float(each @ np.arange(more)) / more + emitted / 2
        terms: Terms = [(-moment / more, self.later[i][s]) for s, moment in moments.items()]
        if emitted > 0:
            # y tokens take y · emitted s or more, so their mean moment lies y · emitted / 2 after the slot's begin
            touched = TANGENT * self.length / emitted
            for s in self.here[i]:
                squared = self.program.variable(2 * touched * more)
                add((1.0, squared), (-2 * touched, self.later[i][s]), (touched**2, CONSTANT))
                terms.append((-emitted / 2 / more, squared))
        add((1.0, end), *terms, (-follow, CONSTANT))

    def _least(self, i: int) -> tuple[float, Floats]:
        """(Least seconds of a batch that gives a request a token, of the work up to each later one.)"""
        context = self.problem.prompt_tokens[i] + np.arange(1, self.decodes[i] + 1)
        given = [cost.base + cost.per_token + cost.per_sequence for cost in self.costs]
        work = [one + reading(cost) * context for one, cost in zip(given, self.costs, strict=True)]
        return max(given), np.max(work, axis=0)

    def _slot(self, s: int) -> None:
        """What a slot's batches can do, and what has been read before its end."""
        add, problem, limits = self.program.at_least_zero, self.problem, self.problem.limits
        here = [i for i in range(len(problem)) if s in self.prompts[i]]
        several = [i for i in here if self.decodes[i]]
        prompt, size = problem.prompt_tokens.astype(float), limits.block_size
        if s + 1 < len(self.begins):
            for cost in self.costs:
                add(
                    (self.length, CONSTANT),
                    (-cost.base, self.batches[s]),
                    (-reading(cost) * self.read_in_all, self.read[s]),
                    *((-cost.per_token * prompt[i] - cost.per_sequence, self.prompts[i][s]) for i in here),
                    *((-cost.per_token - cost.per_sequence, self.later[i][s]) for i in several),
                )
        for limit, of_prompt, of_later in (
            (limits.max_num_batched_tokens, prompt, np.ones(len(problem))),
            (problem.prefill_tokens, prompt, np.zeros(len(problem))),
            (limits.max_num_seqs, np.ones(len(problem)), np.ones(len(problem))),
            (limits.num_blocks, prompt / size, np.ceil(self.context / size)),
        ):
            terms: Terms = [(-float(of_prompt[i]), self.prompts[i][s]) for i in here]
            add((float(limit), self.batches[s]), *terms, *((-float(of_later[i]), self.later[i][s]) for i in several))
        share = self.context / self.read_in_all
        add((1.0, self.due[s]), *((-float(share[i]), self.later[i][s]) for i in several))
        add((-1.0, self.may[s]), *((float(share[i] * self.decodes[i]), self.prompts[i][s]) for i in several))
        for more, less in ((self.read, self.due), (self.may, self.read)):
            add(*((1.0, one) for one in more[: s + 1]), *((-1.0, one) for one in less[: s + 1]))


def reading(cost: Cost) -> float:
    """Seconds that a token of context costs a later token at least, be it read or, after an eviction, computed again.

    A refill of c ≥ 2 tokens, the last m of them in the batch that gives the token, stands for 2 (c − m) + 2 (m − 1) ≥ c
    tokens read, each in the batch that computes it.
    """
    return min(cost.per_kv_token, cost.per_token / 2)
