"""State flow: the program of optimal schedules without chunked prefill, in counts of equal requests.

Equal requests (prompt, output, arrival) are counted, not told apart: how many wait, how many hold memory with g tokens
out, how many were evicted with g tokens out, at each boundary between batches. So its size does not grow with the
number of equal requests, and that they could change places costs nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.programs.solver import LONGEST, Total, Units, cp_model
from windtunnel.optimum.rules import ends_early, orders
from windtunnel.optimum.schedule import Batch, Schedule

ADMIT, DECODE, PAUSE, EVICT, REFILL = "admit", "decode", "pause", "evict", "refill"
Arc = tuple[int, int, str, int]
"""(class, batch, kind, tokens out before the batch)."""


@dataclass(frozen=True)
class Kind:
    """Requests that are equal."""

    prompt: int
    output: int
    arrival: float
    members: tuple[int, ...]


def kinds_of(problem: Problem, apart: bool = False) -> list[Kind]:
    """The classes of equal requests; ``apart``: each is one of its own."""
    found: dict[tuple[int, int, float, int], list[int]] = defaultdict(list)
    columns = (problem.prompt_tokens, problem.output_tokens, problem.arrival)
    for i, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        found[*key, i if apart else 0].append(i)
    return [Kind(*key[:3], tuple(members)) for key, members in found.items()]


@dataclass
class Flow:
    """The program over this many batches; ``model`` is for ``solve``, and ``batches`` reads its solution.

    Where first tokens alone count and requests may be evicted it ends with the last of them, and for goodput a request
    that misses a limit need not end: what comes after does not count.
    ``most`` keeps other objectives at a value or below. For goodput, equal requests
    are kept separate, since each has a first and a last token of its own.
    """

    problem: Problem
    units: Units
    objective: Objective
    horizon: int
    forbidden: frozenset[str] = frozenset()
    """Rules of ``RULES`` that hold, beside that prompts are computed whole."""
    most: tuple[tuple[Objective, float], ...] = ()
    model: Any = field(init=False)
    arcs: dict[Arc, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.model = cp_model().CpModel()
        apart = any(aim.goodput for aim in (self.objective, *(aim for aim, _ in self.most)))
        self.order = list(orders(self.problem, self.forbidden))
        self.kinds = kinds_of(self.problem, apart or bool(self.order))
        for kind in self.kinds:
            if kind.prompt > self.problem.prefill_tokens:
                raise InputError(
                    f"request {kind.members[0]}: its prompt of {kind.prompt} tokens is longer than the "
                    f"{self.problem.prefill_tokens} of a batch, and state flow knows no chunks: use --program literal"
                )
        self.unbegun: list[list[Any]] = []
        self.unfinished: list[list[Any]] = []
        for c, kind in enumerate(self.kinds):
            self._class(c, kind)
        self.by_batch: list[list[tuple[Arc, Any]]] = [[] for _ in range(self.horizon)]
        for arc, count in self.arcs.items():
            self.by_batch[arc[1]].append((arc, count))
        place = {kind.members[0]: c for c, kind in enumerate(self.kinds)}
        for first, second in self.order:
            for earlier, later in zip(self.unbegun[place[first]][1:], self.unbegun[place[second]][1:], strict=True):
                self.model.add(earlier <= later)
        self._batches()

    def _arc(self, c: int, j: int, kind: str, g: int) -> Any:
        """A count of requests."""
        members, name = len(self.kinds[c].members), f"{kind}_{c}_{j}_{g}"
        arc = self.model.new_bool_var(name) if members == 1 else self.model.new_int_var(0, members, name)
        self.arcs[c, j, kind, g] = arc
        return arc

    def _class(self, c: int, kind: Kind) -> None:
        """The flow of a class; how many of it have not begun, and not ended, before each batch."""
        model, number, most = self.model, len(kind.members), self.problem.prefill_tokens
        waiting: Any = number
        resident: dict[int, Any] = {}
        evicted: dict[int, Any] = {}
        ended: Any = 0
        unbegun, unfinished = [], []
        for j in range(self.horizon):
            unbegun.append(waiting)
            unfinished.append(number - ended)
            admit = self._arc(c, j, ADMIT, 0)
            model.add(admit <= waiting)
            waiting = waiting - admit
            after: dict[int, Any] = defaultdict(int)
            after[1] += admit
            for g in range(1, min(j, kind.output - 1) + 1):
                decode = self._arc(c, j, DECODE, g)
                after[g + 1] += decode
                pause = 0 if "pauses" in self.forbidden else self._arc(c, j, PAUSE, g)
                evict = 0 if "evictions" in self.forbidden else self._arc(c, j, EVICT, g)
                model.add(resident.get(g, 0) == decode + pause + evict)
                after[g] += pause
                if "evictions" not in self.forbidden and kind.prompt + g <= most:
                    refill = self._arc(c, j, REFILL, g)
                    model.add(refill <= evicted.get(g, 0))
                    after[g + 1] += refill
                    evicted[g] = evicted.get(g, 0) - refill
                evicted[g] = evicted.get(g, 0) + evict
            ended = ended + after.pop(kind.output, 0)
            resident = after
        self._end(unbegun, unfinished, waiting, number - ended)

    def _end(self, unbegun: list[Any], unfinished: list[Any], waiting: Any, left: Any) -> None:
        """Keep what waits before each batch of a class, and let all that counts be done after the last."""
        self.unbegun.append(unbegun)
        self.unfinished.append(unfinished)
        if ends_early(self.objective, self.forbidden):
            self.model.add(waiting == 0)
        elif self.objective.goodput is None:
            self.model.add(left == 0)

    def _seconds(self, arc: Arc) -> int:
        """Units that one request of an arc adds to its batch."""
        c, _, kind, g = arc
        cost, context = self.units.cost, self.kinds[c].prompt + g
        if kind == DECODE:
            return self.units.whole(cost.per_token + cost.per_kv_token * context + cost.per_sequence)
        if kind in (ADMIT, REFILL):
            return self.units.whole(cost.per_token * context + cost.per_pair * context**2 + cost.per_sequence)
        return 0

    def _batches(self) -> None:
        """Limits and times of every batch, and the objective."""
        model, limits = self.model, self.problem.limits
        first, latest = float(self.problem.arrival.min()), float(self.problem.arrival.max())
        online = latest > first
        spans: list[Any] = []
        used_before = None
        for rows in self.by_batch:
            active = [(arc, count) for arc, count in rows if arc[2] in (ADMIT, DECODE, REFILL)]
            resident = [(arc, count) for arc, count in rows if arc[2] != EVICT]
            model.add(sum(self._tokens(arc) * count for arc, count in active) <= limits.max_num_batched_tokens)
            whole = [(arc, count) for arc, count in active if arc[2] != DECODE]
            model.add(sum(self._tokens(arc) * count for arc, count in whole) <= self.problem.prefill_tokens)
            model.add(sum(self._blocks(arc) * count for arc, count in resident) <= limits.num_blocks)
            model.add(sum(count for _, count in resident) <= limits.max_num_seqs)
            used = model.new_bool_var("")
            for c, kind in enumerate(self.kinds):
                model.add(sum(count for arc, count in active if arc[0] == c) <= len(kind.members) * used)
            model.add(sum(count for _, count in active) >= used)
            if used_before is not None:
                model.add(used <= used_before)
            used_before = used
            if "mixing" in self.forbidden:
                self._unmixed(active)
            seconds = self.units.whole(self.units.cost.base) * used + sum(
                self._seconds(arc) * count for arc, count in active
            )
            spans.append(self._online(active, seconds, sum(spans), first) if online else seconds)
        for objective, value in self.most:
            model.add(self._total(objective, spans) <= Total(self.problem, objective, self.units).of(value))
        model.minimize(self._total(self.objective, spans))

    def _total(self, objective: Objective, spans: list[Any]) -> Any:
        """An objective as ``Total`` says."""
        if objective.goodput is not None:
            return sum(self._misses(c, kind, objective.goodput, spans) for c, kind in enumerate(self.kinds))
        weights = objective.whole()
        times, gaps = objective.token_weights(self.problem.output_tokens)
        total: Any = weights.makespan * times * len(self.problem) * sum(spans) if weights.makespan else 0
        for weight, waiting in ((weights.mean_e2el, self.unfinished), (weights.mean_ttft, self.unbegun)):
            if weight:
                counts = [sum(rows[j] for rows in waiting) for j in range(self.horizon)]
                total = total + weight * times * self._waited(counts, spans, len(self.problem))
        if any(gaps):
            of_class = [gaps[kind.members[0]] for kind in self.kinds]
            rows = list(zip(of_class, self.unfinished, self.unbegun, strict=True))
            counts = [sum(gap * (ends[j] - begins[j]) for gap, ends, begins in rows) for j in range(self.horizon)]
            total = total + self._waited(counts, spans, sum(gaps))
        return total

    def _misses(self, c: int, kind: Kind, limits: SLO, spans: list[Any]) -> Any:
        """Whether the one request of a class misses a limit."""
        model, units = self.model, self.units
        good, first = model.new_bool_var(""), model.new_int_var(0, LONGEST, "")
        arrival = units.whole(kind.arrival - float(self.problem.arrival.min()))
        ends, end = [], 0
        for j, span in enumerate(spans):
            end = end + span
            for arc, count in self.by_batch[j]:
                if arc[0] != c or arc[2] in (PAUSE, EVICT):
                    continue
                if arc[2] == ADMIT:
                    model.add(first == end).only_enforce_if(count)
                    if limits.ttft is not None:
                        model.add(end <= arrival + units.whole_limit(limits.ttft)).only_enforce_if(count, good)
                if arc[3] + 1 == kind.output:
                    ends.append(count)
                    if limits.e2el is not None:
                        model.add(end <= arrival + units.whole_limit(limits.e2el)).only_enforce_if(count, good)
                    if limits.tpot is not None:
                        most = units.whole_limit(limits.tpot * (kind.output - 1))
                        model.add(end <= first + most).only_enforce_if(count, good)
        model.add(sum(ends) >= good)
        return 1 - good

    def _unmixed(self, active: list[tuple[Arc, Any]]) -> None:
        """Let a batch compute prompts or decodes."""
        decodes, number = self.model.new_bool_var(""), len(self.problem)
        self.model.add(sum(count for arc, count in active if arc[2] == DECODE) <= number * decodes)
        self.model.add(sum(count for arc, count in active if arc[2] != DECODE) <= number * (1 - decodes))

    def _online(self, active: list[tuple[Arc, Any]], seconds: Any, before: Any, first: float) -> Any:
        """From the end of the batch before to the end of this one: it may wait for an arrival."""
        idle = self.model.new_int_var(0, self.units.whole(float(self.problem.arrival.max()) - first), "")
        for arc, count in active:
            arrival = self.units.whole(self.kinds[arc[0]].arrival - first)
            if arc[2] == ADMIT and arrival > 0:
                admits = self.model.new_bool_var("")
                self.model.add(count <= len(self.kinds[arc[0]].members) * admits)
                self.model.add(before + idle >= arrival).only_enforce_if(admits)
        return idle + seconds

    def _waited(self, counts: list[Any], spans: list[Any], most: int) -> Any:
        """The spans of batches times what waits for their ends, ``most`` at once."""
        return sum(self._product(count, span, most) for count, span in zip(counts, spans, strict=True))

    def _product(self, count: Any, span: Any, most: int) -> Any:
        if isinstance(count, int):
            return span * count
        left, seconds = self.model.new_int_var(0, most, ""), self.model.new_int_var(0, LONGEST, "")
        product = self.model.new_int_var(0, LONGEST * most, "")
        self.model.add(left == count)
        self.model.add(seconds == span)
        self.model.add_multiplication_equality(product, [left, seconds])
        return product

    def _tokens(self, arc: Arc) -> int:
        return 1 if arc[2] == DECODE else self.kinds[arc[0]].prompt + arc[3]

    def _blocks(self, arc: Arc) -> int:
        return self.problem.limits.blocks(self.kinds[arc[0]].prompt + arc[3] - (arc[2] == PAUSE))

    def batches(self, value: Callable[[Any], int]) -> Iterator[Batch]:
        """The schedule of a solution; whoever of a class came first into a state leaves it first."""
        waiting = [list(kind.members) for kind in self.kinds]
        resident: dict[tuple[int, int], list[int]] = defaultdict(list)
        evicted: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rows in self.by_batch:
            tokens: dict[int, int] = {}
            lost: list[int] = []
            later: list[tuple[dict[tuple[int, int], list[int]], tuple[int, int], int]] = []
            for arc, variable in rows:
                c, _, kind, g = arc
                source = {ADMIT: waiting[c], REFILL: evicted[c, g]}.get(kind, resident[c, g])
                for _ in range(value(variable)):
                    i = source.pop(0)
                    if kind in (ADMIT, DECODE, REFILL):
                        tokens[i] = self._tokens(arc)
                        later.append((resident, (c, g + 1), i))
                    elif kind == EVICT:
                        lost.append(i)
                        later.append((evicted, (c, g), i))
                    else:
                        later.append((resident, (c, g), i))
            for place, state, i in later:
                place[state].append(i)
            yield Batch(0.0, tokens, tuple(lost))

    def hint(self, schedule: Schedule) -> None:
        """Begin the search with a schedule without chunks."""
        counts = self._counts(schedule)
        for arc, variable in self.arcs.items():
            self.model.add_hint(variable, counts.get(arc, 0))

    def _counts(self, schedule: Schedule) -> Mapping[Arc, int]:
        class_of = {i: c for c, kind in enumerate(self.kinds) for i in kind.members}
        counts: dict[Arc, int] = defaultdict(int)
        out = dict.fromkeys(class_of, 0)
        holds: set[int] = set()
        for j, batch in enumerate(schedule.batches[: self.horizon]):
            for i in batch.evicted:
                counts[class_of[i], j, EVICT, out[i]] += 1
            holds -= set(batch.evicted)
            for i in holds - batch.tokens.keys():
                counts[class_of[i], j, PAUSE, out[i]] += 1
            for i in batch.tokens:
                kind = DECODE if i in holds else REFILL if out[i] else ADMIT
                counts[class_of[i], j, kind, out[i]] += 1
                out[i] += 1
                holds.add(i)
                if out[i] == self.kinds[class_of[i]].output:
                    holds.remove(i)
        return counts
