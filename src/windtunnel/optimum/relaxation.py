"""Relaxation: a bound on mean E2E latency by a linear program over completions.

Between two completions, a phase, as many requests wait as have not ended. So the sum of latencies is linear in the ends
of phases, and these are base · (batches so far) + (work so far). Work so far is that of the requests that have ended
and of those that run: the machine shares its time among many because that makes batches cheap, and then all of them end
late. The program says how much of each:

- Requests form groups by the phase in which they end. Which they are is open, how many is known: s in each group. A
  request gets one token a batch at most, so a group gets at most s · D tokens in a phase of D batches. This is linear,
  and it says how far a group must have come before its own phase.
- A request with j of its O tokens has brought at least j · (least of its seconds per token), one that has ended all of
  its seconds; the same for what both use of each limit, of which N batches have N times as much.
- Requests are put into classes by their least seconds per token. Those of a class that have ended brought at least as
  much as equally many of its smallest: a convex function of their number, bounded by lines. So nothing is lost by
  lengths that differ within a class but for requests that run.

Tokens that a group has a window of phases or more before it ends count when the window begins, which is later than they
are. Chunks, pauses and evictions only add work, so the bound holds for every scheduler.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.optimum.bounds import Work, earliest_events, linear_costs, per_context, to_last_token
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.linear import CONSTANT, LinearProgram
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Terms = list[tuple[float, int]]
CELLS = (100, 400, 1000, 1600, 2500, 4000)
"""Classes times phases, of one program after the other while there is time."""
GROWTH = 1.5
"""Power of the cells that the time grows with, at least."""
PHASES = 2.5
"""Phases of a program, in square roots of its cells."""
WINDOW, LEAST_WINDOW = 2.0, 8
"""Phases that a group is followed for, in shares of requests that run at once, and at least."""
PLACES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of a class at which what its smallest requests bring is touched by a line."""
BINDING = 0.5
"""A limit is left out that needs less than this share of the batches that another one needs."""
TANGENTS = (0.25, 0.5, 0.75)
"""Shares of a phase's completions at which the sum of their ends is bounded by a line."""
NOTHING = 1e-9
"""Share of a sum that is rounding."""
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
    for number, most in enumerate(cells):
        began = time.monotonic()
        for cost in likely:
            phases = _Phases(problem, cost, earliest - first, most)
            best = max(best, phases.bound(max(deadline - time.monotonic(), 0.0)))
        now = time.monotonic()
        if most >= len(problem) ** 2 or number == len(cells) - 1:
            break
        if now + (now - began) * (cells[number + 1] / most) ** GROWTH > deadline:
            break
    return best / len(problem) * ROUNDING - float((problem.arrival - first).mean())


def _likely(problem: Problem, costs: list[Cost]) -> list[Cost]:
    """Costs of which one may bound best: that with the most work and that with the longest requests."""
    most = max(costs, key=lambda cost: float(to_last_token(problem, cost).own.sum()))
    return list(dict.fromkeys([most, costs[0]]))


def least_per_token(problem: Problem, cost: Cost) -> Floats:
    """The least seconds per token of each request, without the base of its batches, however many tokens it has so far.

    With j tokens it has brought its prompt and j − 1 decodes of rising context, W(j). W(j)/j is least at 1, at the
    output, or where the prompt's share and the context's are equal.
    """
    prompt, output, read = problem.prompt_tokens.astype(np.float64), problem.output_tokens, per_context(cost)
    each = cost.per_token + cost.per_sequence + read * prompt
    beyond = cost.per_token * prompt + cost.per_pair * prompt**2 + cost.per_sequence - each  # of the prompt
    between = np.sqrt(2 * np.maximum(beyond, 0.0) / read) if read else np.ones_like(prompt)
    places = (np.clip(place, 1, output) for place in (1, np.floor(between), np.ceil(between), output))
    least: Floats = np.min([beyond / at + each + read * (at - 1) / 2 for at in places], axis=0)
    return least


def classes_of(rates: Floats, output: Integers, most: int) -> list[Integers]:
    """The requests of each class, ``most`` classes or fewer: a class is cut where the lowest rates of its two halves
    then leave out the least."""
    groups = [np.argsort(rates, kind="stable")]
    while len(groups) < most:
        cuts = []
        for number, group in enumerate(groups):
            later = np.cumsum(output[group][::-1])[::-1]
            gained = (rates[group] - rates[group[0]]) * later
            cuts.append((float(gained.max()), number, int(gained.argmax())))
        gain, number, at = max(cuts)
        if gain <= 0:
            break
        group = groups.pop(number)
        groups += [group[:at], group[at:]]
    return groups


def lines_below(amounts: Floats) -> list[tuple[float, float]]:
    """(start, slope) of lines below the sum of the z smallest amounts, for z from 0 to all.

    The sum is convex in z, so the line that touches it at any place is below it everywhere.
    """
    rising = np.sort(amounts)
    sums = np.cumsum(rising) - rising
    places = sorted({min(int(share * len(rising)), len(rising) - 1) for share in PLACES})
    return list(dict.fromkeys((float(sums[at] - rising[at] * at), float(rising[at])) for at in places))


class _Phases:
    """The linear program under one cost; phases, groups and what is so far are numbered from 0."""

    def __init__(self, problem: Problem, cost: Cost, earliest: Floats, cells: int) -> None:
        n, self.cost, self.earliest, self.work = len(problem), cost, earliest, to_last_token(problem, cost)
        self.output, least = problem.output_tokens, least_per_token(problem, cost)
        most = min(n, max(int(PHASES * cells**0.5), cells // n))
        self.classes = classes_of(least, self.output, max(cells // most, 1))
        most = min(n, int((most * max(cells, most) / len(self.classes)) ** 0.5))
        self.ranks = np.unique(np.round(np.linspace(0, n, most + 1)).astype(int)).tolist()
        self.phases = len(self.ranks) - 1
        uses = uses_that_bind(problem, self.work)
        self.needs = [(self.work.own, least), *((total, per_token) for total, per_token, _ in uses)]
        self.limits = [limit for *_, limit in uses]
        self.window = self._window()
        self.program = LinearProgram()
        self.longest = float(self.work.alone.sum()) + float(problem.arrival.max())
        self.batches = self._variables(self.longest / max(cost.base, 1e-12))
        self.times = self._variables(self.longest)
        self.ended = [self._variables(len(group)) for group in self.classes]
        self.tokens = [self._tokens(group) for group in self.classes]
        self.so_far = [self._variables(float(total.sum())) for total, _ in self.needs]
        self.beyond = [[self._beyond(c, *need) for c in range(len(self.classes))] for need in self.needs]
        for phase in range(self.phases):
            self._phase(phase)
            self._rates(phase)
        for group, ended, tokens in zip(self.classes, self.ended, self.tokens, strict=True):
            self._outputs(self.output[group].astype(np.float64), ended, tokens)

    def _window(self) -> int:
        """Phases that a group is followed for."""
        batches = max(float(total.sum()) / limit for (total, _), limit in zip(self.needs[1:], self.limits, strict=True))
        running = float(self.output.sum()) / max(batches, 1.0)
        return max(int(WINDOW * running / len(self.output) * self.phases), LEAST_WINDOW)

    def bound(self, seconds: float) -> float:
        """Sum of latencies, from the first arrival on (s).

        Within a phase each request ends no earlier than the phase begins, nor than the earliest time of its rank; the
        sum of the larger of both is convex in the first, and bounded by lines.
        """
        costs, add = self.program.costs, self.program.at_least_zero
        constant = float(self.earliest[: self.ranks[1] - 1].sum())
        costs[self.times[0]] = 1.0
        for phase, end in enumerate(self.times[1:], start=1):
            costs[end] = 1.0
            inner = self.earliest[self.ranks[phase] : self.ranks[phase + 1] - 1]
            if len(inner):
                total = self.program.variable(len(inner) * self.longest)
                costs[total] = 1.0
                for late in sorted({round(share * len(inner)) for share in (0.0, *TANGENTS, 1.0)}):
                    rest = float(inner[late:].sum())
                    add((1.0, total), (-float(late), self.times[phase - 1]), (-rest, CONSTANT))
        return constant + self.program.bound(seconds)

    def _variables(self, end: float) -> list[int]:
        """One for each phase: what is so far at its end."""
        return [self.program.variable(end) for _ in range(self.phases)]

    def _tokens(self, group: Integers) -> list[list[int]]:
        """For each phase in which requests of a class may end, their tokens by phase; see ``_first``."""
        total = float(self.output[group].sum())
        return [
            [self.program.variable(total) for _ in range(self._first(phase), phase + 1)] for phase in range(self.phases)
        ]

    def _first(self, ending: int) -> int:
        """The first phase for which an amount is kept; it holds those of all phases before as well."""
        return max(ending - self.window, 0)

    def _given(self, c: int, phase: int) -> list[tuple[int, int]]:
        """(The group's phase, its tokens of class c that count in a phase)."""
        last = min(phase + self.window, self.phases - 1)
        return [(end, self.tokens[c][end][phase - self._first(end)]) for end in range(phase, last + 1)]

    def _beyond(self, c: int, total: Floats, least: Floats) -> list[int]:
        """What those of a class that have ended brought beyond their tokens at the lowest rate; empty if nothing."""
        group = self.classes[c]
        beyond = np.maximum(total[group] - least[group].min() * self.output[group], 0.0)
        if beyond.sum() <= NOTHING * total[group].sum():
            return []
        found = self._variables(float(beyond.sum()))
        self._at_least(beyond, self.ended[c], found)
        return found

    def _at_least(self, amounts: Floats, ended: list[int], brought: list[int]) -> None:
        """Those that have ended brought at least what equally many of the smallest do, and never less than before."""
        add = self.program.at_least_zero
        for start, slope in lines_below(amounts):
            for now, some in zip(brought, ended, strict=True):
                add((1.0, now), (-slope, some), (-start, CONSTANT))
        for phase in range(1, self.phases):
            add(*self._in_phase(brought, phase))

    def _in_phase(self, so_far: list[int], phase: int) -> Terms:
        """What a phase adds."""
        return [(1.0, so_far[phase]), *([(-1.0, so_far[phase - 1])] if phase else [])]

    def _outputs(self, outputs: Floats, ended: list[int], tokens: list[list[int]]) -> None:
        """Who ends in a phase has all tokens by then; in the end all have."""
        add = self.program.at_least_zero
        given = self._variables(float(outputs.sum()))
        self._at_least(outputs, ended, given)
        for phase, own in enumerate(tokens):
            add(*((1.0, each) for each in own), *_times(-1.0, self._in_phase(given, phase)))
            add(*self._in_phase(ended, phase))
        add((1.0, given[-1]), (-float(outputs.sum()), CONSTANT))
        add((1.0, ended[-1]), (-float(len(outputs)), CONSTANT))

    def _phase(self, phase: int) -> None:
        """What the batches so far can do, and when the phase ends."""
        add, batches, end = self.program.at_least_zero, self.batches[phase], (1.0, self.times[phase])
        last = self.ranks[phase + 1]
        add(*self._in_phase(self.batches, phase))
        add((1.0, batches), (-float(np.sort(self.work.steps)[last - 1]), CONSTANT))
        add(end, (-float(self.earliest[last - 1]), CONSTANT))
        ended: Terms = [(1.0, each[phase]) for each in self.ended]
        add(*ended, (-float(last), CONSTANT))
        add(*_times(-1.0, ended), (float(last), CONSTANT))
        for number, so_far in enumerate(self.so_far):
            given: Terms = []
            for c, group in enumerate(self.classes):
                least = float(self.needs[number][1][group].min())
                given += [(-least, tokens) for _, tokens in self._given(c, phase)]
            add(*self._in_phase(so_far, phase), *given)
            can = [(self.limits[number - 1], batches)] if number else [end, (-self.cost.base, batches)]
            add(*can, (-1.0, so_far[phase]), *((-1.0, each[phase]) for each in self.beyond[number] if each))

    def _rates(self, phase: int) -> None:
        """A token a batch for each request of a group, at most."""
        given: dict[int, Terms] = {}
        for c in range(len(self.classes)):
            for end, tokens in self._given(c, phase):
                given.setdefault(end, []).append((-1.0, tokens))
        for end, terms in given.items():
            of_all = [(1.0, self.batches[phase])]
            batches = of_all if phase == self._first(end) else self._in_phase(self.batches, phase)
            size = float(self.ranks[end + 1] - self.ranks[end])
            self.program.at_least_zero(*_times(size, batches), *terms)


def uses_that_bind(problem: Problem, work: Work) -> list[tuple[Floats, Floats, float]]:
    """(What each request uses of a limit, per token so far at least, the limit), where it may say how many batches.

    Blocks of later tokens are as many as of the first or more; of anything else the prompt's part comes first.
    """
    blocks = -(-problem.prompt_tokens // problem.limits.block_size)
    per_token = [*(used / problem.output_tokens for used, _ in work.uses[:-1]), blocks.astype(np.float64)]
    batches = [float(used.sum()) / limit for used, limit in work.uses]
    return [
        (used.astype(np.float64), least, float(limit))
        for (used, limit), least, needed in zip(work.uses, per_token, batches, strict=True)
        if needed >= BINDING * max(batches)
    ]


def _times(factor: float, terms: Terms) -> Terms:
    return [(factor * coefficient, variable) for coefficient, variable in terms]
