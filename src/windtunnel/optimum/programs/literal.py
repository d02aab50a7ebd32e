"""The literal program: InferMax's constraint program (arXiv 2411.07447), request by request and batch by batch, with
chunked prefill.

It is the oracle of the others on few requests and batches. What its description leaves open or has wrong is settled as
an engine behaves: requests that have ended hold nothing, a batch starts after its requests have arrived, memory is
counted in blocks, and an evicted request computes prompt and generated tokens again.
"""

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.programs.solver import LONGEST, Total, Units, cp_model
from windtunnel.optimum.rules import ends_early, orders
from windtunnel.optimum.schedule import Batch


@dataclass
class Literal:
    """The program over this many batches; ``model`` is for ``solve``, and ``batches`` reads its solution.

    Where first tokens alone count and requests may be evicted it ends with the last of them, and for goodput a request
    that misses a limit need not end: what comes after does not count.
    ``most`` keeps other objectives at a value or below.
    """

    problem: Problem
    units: Units
    objective: Objective
    horizon: int
    forbidden: frozenset[str] = frozenset()
    """Rules of ``RULES`` that hold."""
    most: tuple[tuple[Objective, float], ...] = ()
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = cp_model().CpModel()
        requests = range(len(self.problem))
        self.computed = [[self._tokens(i) for _ in range(self.horizon)] for i in requests]
        self.evicted = [[self.model.new_bool_var("") for _ in range(self.horizon)] for _ in requests]
        self.emits = [[self.model.new_bool_var("") for _ in range(self.horizon)] for _ in requests]
        self.held: list[list[Any]] = [[] for _ in requests]
        self.seconds: list[list[Any]] = [[] for _ in requests]
        self.decoded: list[list[Any]] = [[] for _ in requests]
        self.begun: list[list[Any]] = [[] for _ in requests]
        self.decoding = [self.model.new_bool_var("") for _ in range(self.horizon)]
        for i in requests:
            self._request(i)
        for first, second in orders(self.problem, self.forbidden):
            for earlier, later in zip(self.begun[first], self.begun[second], strict=True):
                self.model.add(earlier >= later)
        self._batches()

    def _tokens(self, i: int) -> Any:
        peak = int(self.problem.prompt_tokens[i] + self.problem.output_tokens[i] - 1)
        return self.model.new_int_var(0, min(peak, self.problem.limits.max_num_batched_tokens), "")

    def _if(self, condition: Any) -> Any:
        """A truth value that is equal to a linear condition, given with its opposite."""
        holds, (yes, no) = self.model.new_bool_var(""), condition
        self.model.add(yes).only_enforce_if(holds)
        self.model.add(no).only_enforce_if(holds.negated())
        return holds

    def _request(self, i: int) -> None:
        """Input, memory and progress of a request from batch to batch; I, m, c, d, e, g in the paper's letters."""
        model, prompt, output = self.model, int(self.problem.prompt_tokens[i]), int(self.problem.output_tokens[i])
        peak = prompt + output - 1
        size: Any = prompt
        held: Any = 0
        emitted: Any = 0
        for j in range(self.horizon):
            c, e, g = self.computed[i][j], self.evicted[i][j], self.emits[i][j]
            d = self._if((held >= size, held <= size - 1))
            works = self._if((c >= 1, c == 0))
            m, after = model.new_int_var(0, peak, ""), model.new_int_var(prompt, peak + 1, "")
            both = self._both(e, d)
            model.add(after == held + 1).only_enforce_if(both)
            model.add(after == size).only_enforce_if(both.negated())
            model.add(m == 0).only_enforce_if(e)
            model.add(c == 0).only_enforce_if(e)
            model.add(held >= 1).only_enforce_if(e)
            model.add(m == held + c).only_enforce_if(e.negated())
            model.add(m <= size).only_enforce_if([e.negated(), d.negated()])
            model.add(c <= 1).only_enforce_if(d)
            full = self._if((m >= size, m <= size - 1))
            model.add_bool_and(works, full).only_enforce_if(g)
            model.add_bool_or(works.negated(), full.negated()).only_enforce_if(g.negated())
            if "chunks" in self.forbidden:
                model.add(works == g)
            ended = self._if((emitted >= output, emitted <= output - 1))
            model.add(m == 0).only_enforce_if(ended)
            self._obey(i, j, works, d, e, held, ended)
            self.decoded[i].append(self._both(d, works))
            self.seconds[i].append(self._work(c, works, self.decoded[i][j], held, m, peak))
            self.held[i].append(m)
            size, held, emitted = after, m, emitted + g
        if self.objective.goodput is None:
            model.add(emitted >= (1 if ends_early(self.objective, self.forbidden) else output))

    def _obey(self, i: int, j: int, works: Any, decodes: Any, evicted: Any, held: Any, ended: Any) -> None:
        """What the rules say of a request in a batch."""
        model = self.model
        begun = model.new_bool_var("")
        if j:
            model.add(begun >= self.begun[i][j - 1])
            model.add(begun <= self.begun[i][j - 1] + works)
        else:
            model.add(begun == works)
        model.add(begun >= works)
        self.begun[i].append(begun)
        if "evictions" in self.forbidden:
            model.add(evicted == 0).only_enforce_if(ended.negated())
        if "pauses" in self.forbidden:
            model.add_bool_or(works, evicted, self._if((held == 0, held >= 1)))
        if "mixing" in self.forbidden:
            model.add(self.decoding[j] == 1).only_enforce_if(works, decodes)
            model.add(self.decoding[j] == 0).only_enforce_if(works, decodes.negated())

    def _both(self, a: Any, b: Any) -> Any:
        both = self.model.new_bool_var("")
        self.model.add_multiplication_equality(both, [a, b])
        return both

    def _work(self, c: Any, works: Any, decodes: Any, held: Any, m: Any, peak: int) -> Any:
        """Units that a request adds to a batch: its tokens, and the KV that a decode reads or the pairs of a chunk."""
        model, cost, whole = self.model, self.units.cost, self.units.whole
        reads, pairs = model.new_int_var(0, peak, ""), model.new_int_var(0, peak**2, "")
        model.add(reads == m).only_enforce_if(decodes)
        model.add(reads == 0).only_enforce_if(decodes.negated())
        if whole(cost.per_pair):
            squares = [model.new_int_var(0, peak**2, "") for _ in range(2)]
            for square, side in zip(squares, (held, m), strict=True):
                model.add_multiplication_equality(square, [side, side])
            chunk = self._both(works, decodes.negated())
            model.add(pairs == squares[1] - squares[0]).only_enforce_if(chunk)
            model.add(pairs == 0).only_enforce_if(chunk.negated())
        else:
            model.add(pairs == 0)
        time = whole(cost.per_token) * c + whole(cost.per_kv_token) * reads
        return time + whole(cost.per_pair) * pairs + whole(cost.per_sequence) * works

    def _batches(self) -> None:
        """Limits and times of every batch, and the objective."""
        model, limits, requests = self.model, self.problem.limits, range(len(self.problem))
        first = float(self.problem.arrival.min())
        arrivals = [self.units.whole(float(arrival) - first) for arrival in self.problem.arrival]
        end: Any = 0
        ends, used_before = [], None
        for j in range(self.horizon):
            tokens = sum(self.computed[i][j] for i in requests)
            model.add(tokens <= limits.max_num_batched_tokens)
            if self.problem.prefill_tokens < limits.max_num_batched_tokens:
                decoded = sum(self.decoded[i][j] for i in requests)
                model.add(tokens - decoded <= self.problem.prefill_tokens)
            model.add(sum(self._blocks(self.held[i][j]) for i in requests) <= limits.num_blocks)
            holds = [self._if((self.held[i][j] >= 1, self.held[i][j] == 0)) for i in requests]
            model.add(sum(holds) <= limits.max_num_seqs)
            used = self._if((tokens >= 1, tokens == 0))
            if used_before is not None:
                model.add(used <= used_before)
            used_before = used
            idle = model.new_int_var(0, max(arrivals), "")
            for i in requests:
                if arrivals[i]:
                    works = self._if((self.computed[i][j] >= 1, self.computed[i][j] == 0))
                    model.add(end + idle >= arrivals[i]).only_enforce_if(works)
            end = end + idle + self.units.whole(self.units.cost.base) * used + sum(self.seconds[i][j] for i in requests)
            ends.append(end)
        for objective, value in self.most:
            model.add(self._total(objective, ends) <= Total(self.problem, objective, self.units).of(value))
        model.minimize(self._total(self.objective, ends))

    def _total(self, objective: Objective, ends: list[Any]) -> Any:
        """An objective as ``Total`` says."""
        requests = range(len(self.problem))
        if objective.goodput is not None:
            return sum(self._misses(i, objective.goodput, ends) for i in requests)
        weights = objective.whole()
        times, gaps = objective.token_weights(self.problem.output_tokens)
        total: Any = weights.makespan * times * len(self.problem) * ends[-1] if weights.makespan else 0
        if weights.mean_e2el:
            outputs = self.problem.output_tokens.tolist()
            total = total + weights.mean_e2el * times * sum(self._event(i, outputs[i], ends) for i in requests)
        if weights.mean_ttft:
            total = total + weights.mean_ttft * times * sum(self._event(i, 1, ends) for i in requests)
        for i, gap in enumerate(gaps):
            if gap:
                first, last, _ = self._moments(i, ends)
                between = self.model.new_int_var(0, LONGEST, "")
                self.model.add(between == last - first)
                total = total + gap * between
        return total

    def _blocks(self, held: Any) -> Any:
        size = self.problem.limits.block_size
        if size == 1:
            return held
        blocks = self.model.new_int_var(0, self.problem.limits.num_blocks, "")
        self.model.add(size * blocks >= held)
        return blocks

    def _event(self, i: int, wanted: int, ends: list[Any]) -> Any:
        """When a request has this many tokens, or later."""
        time = self.model.new_int_var(0, LONGEST, "")
        emitted: Any = 0
        for j, end in enumerate(ends):
            if j == 0:
                self.model.add(time >= end)
            else:
                before = self._if((emitted >= wanted, emitted <= wanted - 1))
                self.model.add(time >= end).only_enforce_if(before.negated())
            emitted = emitted + self.emits[i][j]
        return time

    def _moments(self, i: int, ends: list[Any]) -> tuple[Any, Any, Any]:
        """When a request has its first and its last token, if it has them, and how many it has in the end."""
        model, output = self.model, int(self.problem.output_tokens[i])
        first, last = (model.new_int_var(0, LONGEST, "") for _ in range(2))
        emitted: Any = 0
        for j, end in enumerate(ends):
            for time, wanted in ((first, 1), (last, output)):
                here = self._if((emitted == wanted - 1, emitted != wanted - 1))
                model.add(time == end).only_enforce_if(here, self.emits[i][j])
            emitted = emitted + self.emits[i][j]
        return first, last, emitted

    def _misses(self, i: int, limits: SLO, ends: list[Any]) -> Any:
        """Whether a request misses a limit."""
        model, units, output = self.model, self.units, int(self.problem.output_tokens[i])
        good = model.new_bool_var("")
        first, last, emitted = self._moments(i, ends)
        model.add(emitted >= output).only_enforce_if(good)
        arrival = units.whole(float(self.problem.arrival[i] - self.problem.arrival.min()))
        for begin, end, limit in (
            (arrival, first, limits.ttft),
            (arrival, last, limits.e2el),
            (first, last, None if limits.tpot is None else limits.tpot * (output - 1)),
        ):
            if limit is not None:
                model.add(end <= begin + units.whole_limit(limit)).only_enforce_if(good)
        return 1 - good

    def batches(self, value: Callable[[Any], int]) -> Iterator[Batch]:
        """The schedule of a solution; what a request has left behind when it ended is no eviction."""
        left = self.problem.output_tokens.tolist()
        for j in range(self.horizon):
            lost = tuple(i for i, row in enumerate(self.evicted) if value(row[j]) and left[i])
            tokens = {i: value(row[j]) for i, row in enumerate(self.computed) if value(row[j])}
            for i, row in enumerate(self.emits):
                left[i] -= value(row[j])
            yield Batch(0.0, tokens, lost)
