"""Relaxation: a bound on mean E2E latency by a linear program over completions.

Between the completions of the k-th and the next request, a phase, n − k requests wait. So the sum of latencies is
Σ (n − k) · (seconds of the phase), linear in the batches D of each phase and in the work done in it. What couples them:
in each batch a request has at most one token, so what it has left after a phase is at most the batches that follow; in
a phase at most n − k requests are computed, within the limits of each batch; who has ended has nothing left; a prompt
that is not computed leaves all tokens to do. That is the trade between all at once, where each batch is cheap and all
end late, and one after the other. Requests are put into classes of about equal lengths, each rounded down to its
shortest, and phases by a share of the n completions: both only lower the bound. It holds for every scheduler, with
chunks, pauses and evictions.

Two families of rows make up for fractions of requests. First, a request that ends by the k-th completion takes no more
steps than there are batches N_k, and these are at least the k-th fewest steps; the line between both points bounds the
share of a class that has ended. Second, a request that ends in batch c gives a token a batch at most, so after batch N
it has given at least output − (c − N). Summed over all requests that is least if the shorter outputs end first, since
max(0, output − delay) is submodular in both: so after the k-th completion at least Σ_r max(0, O_r − (N_r − N_k)⁺)
tokens are out, with the outputs O_r in rising order, whichever request is the r-th to end.
"""

import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.optimum.bounds import earliest_events, linear_costs, per_context, to_last_token
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.linear import CONSTANT, LinearProgram
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CELLS = (100, 400, 1000, 2500)
"""Classes times phases, of one program after the other while there is time."""
GROWTH = 5
"""Times as long as the program before the next one takes, about."""
TANGENTS = (0.25, 0.5, 0.75)
"""Shares of an output at which the KV that its last tokens read is bounded by a line."""
ROUNDING = 1 - 1e-7


def mean_e2el_bound(problem: Problem, seconds: float, cells: Sequence[int] = CELLS) -> float:
    """Seconds that no schedule's mean E2E latency is below; the best of all linear costs below the batch times.

    Programs get finer and finer while there is time.

    Raises InputError without SciPy.
    """
    costs = linear_costs(problem)
    earliest = np.max([earliest_events(problem.arrival, [to_last_token(problem, cost)], 1) for cost in costs], axis=0)
    first = problem.arrival.min()
    good = sorted(costs, key=lambda cost: -float(to_last_token(problem, cost).alone.mean()))
    likely = _likely(problem, good)
    deadline, best = time.monotonic() + seconds, 0.0
    for most in cells:
        began = time.monotonic()
        for cost in likely:
            phases = _Phases(problem, cost, earliest - first, most)
            best = max(best, phases.bound(max(deadline - time.monotonic(), 0.0)))
        now = time.monotonic()
        if most >= len(problem) ** 2 or now + GROWTH * (now - began) > deadline:
            break
    return best / len(problem) * ROUNDING - float((problem.arrival - first).mean())


def _likely(problem: Problem, costs: list[Cost]) -> list[Cost]:
    """Costs of which one may bound best: that with the most work and that with the longest requests."""
    most = max(costs, key=lambda cost: float(to_last_token(problem, cost).own.sum()))
    return list(dict.fromkeys([most, costs[0]]))


@dataclass(frozen=True)
class _Class:
    """Requests as long as the shortest of them."""

    members: int
    prompt: int
    output: int

    @property
    def contexts(self) -> float:
        """Generated tokens that the decodes of a request read."""
        return self.output * (self.output - 1) / 2


def classes_of(prompt: Integers, output: Integers, most: int) -> list[_Class]:
    """So many classes at most, halved where rounding down takes the most."""
    groups = [np.arange(len(prompt))]

    def lost(group: Integers, of: Integers) -> float:
        return float((of[group] - of[group].min()).sum() / of.sum())

    while len(groups) < most:
        worst = max(groups, key=lambda group: max(lost(group, prompt), lost(group, output)))
        by = prompt if lost(worst, prompt) > lost(worst, output) else output
        if lost(worst, by) == 0:
            break
        values = np.unique(by[worst])
        cut = values[1:][np.argmin(np.abs(values[1:] - np.median(by[worst])))]
        groups = [group for group in groups if group is not worst]
        groups += [worst[by[worst] < cut], worst[by[worst] >= cut]]
    return [_Class(len(group), int(prompt[group].min()), int(output[group].min())) for group in groups]


class _Phases:
    """The linear program under one cost; every amount is of what is left after a phase."""

    def __init__(self, problem: Problem, cost: Cost, earliest: Floats, cells: int) -> None:
        n = len(problem)
        self.limits, self.cost, self.earliest = problem.limits, cost, earliest
        self.prefill_tokens = problem.prefill_tokens
        phases = min(n, max(int(cells**0.5 * 1.8), cells // n))
        self.ranks = np.unique(np.round(np.linspace(0, n, phases + 1)).astype(int)).tolist()
        self.classes = classes_of(problem.prompt_tokens, problem.output_tokens, max(cells // phases, 1))
        self.per_context = per_context(cost)
        self.steps = np.sort(to_last_token(problem, cost).steps)
        self.program = LinearProgram()
        self.longest = longest = float(to_last_token(problem, cost).alone.sum()) + float(problem.arrival.max())
        last = len(self.ranks) - 1
        self.batches = [self.program.variable(longest / max(cost.base, 1e-12)) for _ in range(last)]
        self.times = [self.program.variable(longest) for _ in range(last)]
        self.left = [self._class(one) for one in self.classes]
        for phase in range(1, last + 1):
            self._phase(phase)
        for phase in range(1, last):
            self._shares_that_end(phase)
            self._tokens_out(phase)

    def bound(self, seconds: float) -> float:
        """Sum of latencies, from the first arrival on (s).

        Within a phase each request ends no earlier than the phase begins, nor than the earliest time of its rank; the
        sum of the larger of both is convex in the first, and bounded by lines.
        """
        costs, add, constant = self.program.costs, self.program.at_least_zero, 0.0
        for phase, end in enumerate(self.times, start=1):
            costs[end] = 1.0
            inner = self.earliest[self.ranks[phase - 1] : self.ranks[phase] - 1]
            if phase == 1:
                constant = float(inner.sum())
            elif len(inner):
                total = self.program.variable(len(inner) * self.longest)
                costs[total] = 1.0
                for late in sorted({round(share * len(inner)) for share in (0.0, *TANGENTS, 1.0)}):
                    rest = float(inner[late:].sum())
                    add((1.0, total), (-float(late), self.times[phase - 2]), (-rest, CONSTANT))
        return constant + self.program.bound(seconds)

    def _class(self, one: _Class) -> list[list[list[tuple[float, int]]]]:
        """Prompts, decodes, generated tokens that these read, and requests that are left after each phase."""
        totals = (one.members, one.members * (one.output - 1), one.members * one.contexts, one.members)
        left: list[list[list[tuple[float, int]]]] = []
        for total in totals:
            inner = [[(1.0, self.program.variable(float(total)))] for _ in range(len(self.ranks) - 2)]
            left.append([[(float(total), CONSTANT)], *inner, []])
        for amount in left:
            for before, after in itertools.pairwise(amount):
                self.program.at_least_zero(*before, *_times(-1.0, after))
        more = one.output - 1
        for prompts, decodes, contexts, requests in list(zip(*left, strict=True))[1:-1]:
            add = self.program.at_least_zero
            add(*requests, *_times(-1.0, prompts))
            if not more:
                continue
            add(*decodes, *_times(-float(more), prompts))
            add(*_times(float(more), requests), *_times(-1.0, decodes))
            add(*_times(one.contexts, requests), *_times(-1.0, contexts))
            add(*_times(float(more), decodes), *_times(-1.0, contexts))
            for last in sorted({int(share * more) for share in TANGENTS} - {0}):
                read = last * one.output - last * (last + 1) / 2
                slope = one.output - last - 1
                lines = (*_times(read - slope * last, requests), *_times(float(slope), decodes))
                add(*lines, *_times(-1.0, contexts))
        return left

    def _done(self, c: int, phases: range, amount: int) -> list[tuple[float, int]]:
        """What of an amount is done in these phases."""
        left = self.left[c][amount]
        return [*left[phases.start - 1], *_times(-1.0, left[phases.stop - 1])]

    def _phase(self, phase: int) -> None:
        """What a phase's batches can do, and when it ends."""
        add, n, limits = self.program.at_least_zero, self.ranks[-1], self.limits
        ended, batches = self.ranks[phase - 1], [(1.0, self.batches[phase - 1])]
        if phase > 1:
            batches.append((-1.0, self.batches[phase - 2]))
        add(*batches)
        add((1.0, self.batches[phase - 1]), (-float(self.steps[self.ranks[phase] - 1]), CONSTANT))
        computed, tokens, of_prompts, memory = [], [], [], []
        work: list[tuple[float, int]] = []
        waiting: list[tuple[float, int]] = []
        for c, one in enumerate(self.classes):
            prompts, decodes, contexts = (self._done(c, range(phase, phase + 1), amount) for amount in range(3))
            waiting += self.left[c][3][phase]
            add(*_times(float(one.members), batches), *_times(-1.0, [*prompts, *decodes]))
            computed += [*prompts, *decodes]
            tokens += [*_times(float(one.prompt), prompts), *decodes]
            of_prompts += _times(float(one.prompt), prompts)
            memory += [*_times(float(one.prompt), [*prompts, *decodes]), *contexts]
            work += self._work_done(c, one, phase)
        if phase < len(self.ranks) - 1:
            add(*waiting, (-float(n - self.ranks[phase]), CONSTANT))
            add(*_times(-1.0, waiting), (float(n - self.ranks[phase]), CONSTANT))
        for most, used in (
            (min(limits.max_num_seqs, n - ended), computed),
            (limits.max_num_batched_tokens, tokens),
            (self.prefill_tokens, of_prompts),
            (limits.num_blocks * limits.block_size, memory),
        ):
            add(*_times(float(most), batches), *_times(-1.0, used))
        end = (1.0, self.times[phase - 1])
        add(end, (-self.cost.base, self.batches[phase - 1]), *_times(-1.0, work))
        add(end, (-float(self.earliest[self.ranks[phase] - 1]), CONSTANT))

    def _steps(self, one: _Class) -> int:
        """Batches that a request takes part in at least."""
        return one.output - 1 - (-one.prompt // self.prefill_tokens)

    def _shares_that_end(self, phase: int) -> None:
        """No class has ended more of its requests than the batches so far allow, given the fewest there can be."""
        fewest = float(self.steps[self.ranks[phase] - 1])
        for c, one in enumerate(self.classes):
            more = self._steps(one) - fewest
            if more > 0:
                left = _times(more / one.members, self.left[c][3][phase])
                self.program.at_least_zero((1.0, self.batches[phase - 1]), (-fewest - more, CONSTANT), *left)

    def _tokens_out(self, phase: int) -> None:
        """Tokens that are out after a phase: all of those that have ended, and what the others cannot give later."""
        add, now = self.program.at_least_zero, self.batches[phase - 1]
        outputs = np.sort(np.repeat([one.output for one in self.classes], [one.members for one in self.classes]))
        ended = self.ranks[phase]
        out: list[tuple[float, int]] = [(-float(outputs[:ended].sum()), CONSTANT)]
        for c in range(len(self.classes)):
            out += [*self._done(c, range(1, phase + 1), 0), *self._done(c, range(1, phase + 1), 1)]
        for later in range(phase + 1, len(self.ranks)):
            group = outputs[self.ranks[later - 1] : self.ranks[later]]
            before = self.program.variable(float(group.mean()))  # of each, at least: the sum is convex in the lengths
            add((1.0, before), (-float(group.mean()), CONSTANT), (1.0, self.batches[later - 1]), (-1.0, now))
            out.append((-float(len(group)), before))
        add(*out)

    def _work_done(self, c: int, one: _Class, phase: int) -> list[tuple[float, int]]:
        """Seconds beside the base, from the first phase to the end of this one."""
        cost = self.cost
        amounts = (
            cost.per_token * one.prompt + cost.per_pair * one.prompt**2 + cost.per_sequence,
            cost.per_token + cost.per_sequence + self.per_context * one.prompt,
            self.per_context,
        )
        done: list[tuple[float, int]] = []
        for each, left in zip(amounts, self.left[c], strict=False):
            done += [*_times(each, left[0]), *_times(-each, left[phase])]
        return done


def _times(factor: float, terms: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(factor * coefficient, variable) for coefficient, variable in terms]
