"""certify(problem, objective) → Certificate: the best schedule found, and how good the best possible one can be."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import field, replace
from functools import partial
from typing import Any, Literal, get_args

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.optimum.bounds import bounds, linear_costs, most_batches
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.goodput import least_missed
from windtunnel.optimum.heuristics import best_simulated
from windtunnel.optimum.objective import MAKESPAN, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.programs.flow import Flow, kinds_of
from windtunnel.optimum.programs.literal import Literal as LiteralProgram
from windtunnel.optimum.programs.solver import Progress, Total, Units, cp_model, solve
from windtunnel.optimum.programs.start import StartIndex
from windtunnel.optimum.relaxation import mean_e2el_bound
from windtunnel.optimum.rules import AS_BEGUN, batches_after_first_tokens, check_rules, ends_early, keeps
from windtunnel.optimum.schedule import SCHEMA_VERSION, Batch, Outcome, Schedule, as_early_as_possible, check
from windtunnel.optimum.search import search
from windtunnel.optimum.slots import mean_e2el_by_slots
from windtunnel.policy.unified import infermax_grid

Program = Literal["flow", "start", "literal", "none"]
CLOSED = 1e-6
"""Gap below which a schedule is optimal: times are added in another order than in the bound."""
MOST_STATES = 50_000
"""States times batches of the largest program that is given to the solver."""
SEARCHED, RELAXED = 0.2, 0.3
"""Shares of the time limit for the search and for the relaxation, where a program follows."""
SEARCHED_ALONE = 0.5
"""For the search where no program follows."""
SLOTTED = 0.7
"""Share of the relaxation's time for time slots, where they bound anything."""
SEARCH_EACH = 1.0
"""Seconds of search for each request, at most."""
SIMULATED = 0.3
"""After which the best simulated schedule so far is taken."""
ANY = "any schedule"
WHOLE: dict[str, frozenset[str]] = {"flow": frozenset({"chunks"}), "start": AS_BEGUN}
"""What the schedules of a program never do."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A schedule, its value, and a bound that no schedule of its kind is below (for goodput, above)."""

    objective: Objective
    value: float
    """Seconds, or for goodput the share of good requests, under the problem's own batch times."""
    bound: float
    proof: str
    """``optimal``: the gap is closed; ``program``: the solver's bound when it ended; ``relaxation``: a linear program
    over completions or slots of time; ``formula``: see ``bounds``."""
    kind: str
    """The schedules that the bound is for."""
    found_by: str
    """What made the schedule: a variant of the unified scheduler, the search, or the program."""
    seconds: float
    """That it took."""
    formula: float
    """The bound by formula, for every scheduler."""
    linear: float
    """The schedule's value under the linear cost that stands for the batch times in the bound."""
    schedule: Schedule
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Share of the value that a better schedule could save at most; of goodput, of the bound that it could add."""
        return gap(self.value, self.bound) if self.objective.goodput is None else gap(self.bound, self.value)

    def to_json(self) -> dict[str, Any]:
        """The document of ``windtunnel optimum --json``."""
        names = ("value", "bound", "gap", "proof", "kind", "found_by", "seconds", "formula", "linear")
        document = {"objective": str(self.objective)} | {name: getattr(self, name) for name in names}
        rest = {"notes": list(self.notes), "schedule": self.schedule.to_json()}
        return {"schema_version": SCHEMA_VERSION, **document, **rest}


def gap(value: float, bound: float) -> float:
    """Share of a value that lies above its bound."""
    return max(1 - bound / value, 0.0) if value > 0 else 0.0


def formula_bound(problem: Problem, objective: Objective) -> float:
    """What no schedule of a problem is below, by formula: seconds, or the share of requests that must miss a limit."""
    if objective.goodput is None:
        return bounds(problem).of(objective)
    return least_missed(problem, objective.goodput)


def best_cost(problem: Problem, objective: Objective) -> Cost:
    """The linear cost below the batch times that bounds an objective best."""
    return max(linear_costs(problem), key=lambda cost: formula_bound(problem.with_times(cost), objective))


def certify(
    problem: Problem,
    objective: Objective = MAKESPAN,
    *,
    program: Program = "flow",
    seconds: float = 60.0,
    forbid: Collection[str] = (),
    most: tuple[tuple[Objective, float], ...] = (),
    known: Schedule | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Certificate:
    """The best schedule found for a problem, and the best bound proven.

    Args:
        problem: requests, limits and batch times.
        objective: what is to be small; mean-ttft alone is met by schedules that evict all after their first token.
        program: ``flow`` for schedules without chunked prefill; ``start`` also without evictions and pauses;
            ``literal`` with all of them, for few requests; ``none``: search and bounds alone, for any number.
        seconds: time limit; 0: the best simulated schedule and the bound by formula.
        forbid: rules that the schedule must keep, words of ``RULES``.
        most: other objectives, and the values that they must not exceed.
        known: a schedule to begin with, beside the simulated ones.
        workers: threads of the solver.
        progress: called at every better schedule or bound.

    Raises:
        InputError: no schedule is known, OR-Tools is missing, or an argument is wrong.
    """
    if program not in get_args(Program):
        raise unknown("program", program, get_args(Program))
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InputError(f"seconds={seconds}: must be ≥ 0; 0 gives the bound by formula alone")
    forbidden, notes = check_rules(forbid), list[str]()
    if seconds == 0:
        program = "none"
    elif _too_large(problem, objective, program):
        notes.append(f"too many requests, tokens and batches for program {program}: none is asked")
        program = "none"
    forbidden |= WHOLE.get(program, frozenset())
    given = (problem, objective, program, forbidden, most, known, workers, progress, time.monotonic(), seconds)
    return _Work(*given, notes).certificate()


def _too_large(problem: Problem, objective: Objective, program: Program) -> bool:
    """Whether a program that looks at every batch is given up before any schedule says how many batches there are."""
    if program not in WHOLE or objective.goodput is not None or objective.first_tokens_only:
        return False
    return _states(problem, objective, program) * int(problem.output_tokens.max()) > MOST_STATES


def _states(problem: Problem, objective: Objective, program: Program) -> int:
    """States of a program, in each of its batches."""
    if program == "literal":
        return 10 * len(problem)
    kinds = kinds_of(problem, apart=objective.goodput is not None)
    return sum(1 if program == "start" else kind.output for kind in kinds)


@dataclass
class _Work:
    """A certificate in the making."""

    problem: Problem
    objective: Objective
    program: Program
    forbidden: frozenset[str]
    most: tuple[tuple[Objective, float], ...]
    known: Schedule | None
    workers: int
    progress: Progress | None
    began: float
    seconds: float
    notes: list[str] = field(default_factory=list)
    last: tuple[Schedule, Outcome] | None = None

    def certificate(self) -> Certificate:
        """All steps, each while the gap is open; Ctrl-C ends them with what is known by then."""
        self.formula = self.bound = formula_bound(self.problem, self.objective)
        if self.program != "none":
            self._require_solver()
        self.cost = best_cost(self.problem, self.objective)
        self.proof, self.kind = "formula", ANY
        self.found_by, self.schedule, self.value = self._simulated()
        try:
            for step in (self._search, self._relax, self._solve):
                if gap(self.value, self.bound) > CLOSED:
                    step()
        except KeyboardInterrupt:
            self.notes.append("interrupted: this is what was known by then")
        closed = gap(self.value, self.bound) <= CLOSED
        shown, linear = self.objective.shown, self.value
        if self.problem.times != self.cost:
            other = self.problem.with_times(self.cost)
            linear = check(other, as_early_as_possible(other, self.schedule.batches)).value(self.objective)
        return Certificate(
            objective=self.objective,
            value=shown(self.value),
            bound=shown(min(self.bound, self.value)),
            proof="optimal" if closed else self.proof,
            kind=self.kind,
            found_by=self.found_by,
            seconds=time.monotonic() - self.began,
            formula=shown(self.formula),
            linear=shown(linear),
            schedule=self.schedule,
            notes=tuple(self.notes),
        )

    def _require_solver(self) -> None:
        """Raise InputError without OR-Tools, with what is known without it."""
        try:
            cp_model()
        except InputError as error:
            known = "at most" if self.objective.goodput else "at least"
            raise InputError(
                f"{error}; {self.objective} is {known} {self.objective.shown(self.formula):.6g}"
            ) from error

    def _left(self) -> float:
        return max(self.began + self.seconds - time.monotonic(), 0.0)

    def _allowed(self, schedule: Schedule) -> bool:
        if not keeps(self.problem, schedule, self.forbidden):
            return False
        return all(self._outcome(schedule).value(aim) <= value * (1 + 1e-9) for aim, value in self.most)

    def _worth(self, schedule: Schedule) -> float:
        """The value of a schedule."""
        return self._outcome(schedule).value(self.objective)

    def _outcome(self, schedule: Schedule) -> Outcome:
        """What a schedule does; that of the last one is kept, since it takes seconds of very many requests."""
        if self.last is None or self.last[0] is not schedule:
            self.last = schedule, check(self.problem, schedule)
        return self.last[1]

    def _simulated(self) -> tuple[str, Schedule, float]:
        """The best simulated schedule. Raises InputError without one, with what is known."""
        until, end = (self.began + part * self.seconds if self.seconds else math.inf for part in (SIMULATED, 1.0))
        policies = {
            name: policy
            for name, policy in infermax_grid().items()
            if not (policy.chunked_prefill and "chunks" in self.forbidden)
        }
        simulate = partial(best_simulated, self.problem, self.objective, policies, self._allowed)
        found = simulate(until=until, end=end)
        known = self.known if self.known is not None and self._allowed(self.known) else None
        if known is not None and (found is None or self._worth(known) < self._worth(found[1])):
            found = "the objectives before", known
        if found is None and (begun := search(self.problem, self.cost, self.objective, 0.0)) and self._allowed(begun):
            found = "search", begun
        if found is None and time.monotonic() > end:
            found = simulate(until=end)
        if found is None:
            kind = f" without {', '.join(sorted(self.forbidden))}" if self.forbidden else ""
            least = f"{self.objective.shown(self.formula):.6g}{'' if self.objective.goodput else ' s'}"
            raise InputError(
                f"no simulated scheduler serves all requests{kind} within the limits: give more memory or tokens of a "
                f"batch; no schedule is better than {least}"
            )
        return *found, self._worth(found[1])

    def _take(self, schedule: Schedule | None, by: str) -> None:
        """Keep a schedule that is better than the best so far."""
        if schedule is None or not self._allowed(schedule):
            return
        value = self._worth(schedule)
        if value < self.value:
            self.found_by, self.schedule, self.value = by, schedule, value
            if self.progress:
                shown = self.objective.shown
                self.progress(time.monotonic() - self.began, shown(value), shown(self.bound))

    def _search(self) -> None:
        if self.seconds:
            share = SEARCHED_ALONE if self.program == "none" else SEARCHED
            limit = min(share * self.seconds, SEARCH_EACH * len(self.problem), self._left())
            watch = self._watch_search() if self.progress and isinstance(self.problem.times, Cost) else None
            found = search(self.problem, self.cost, self.objective, limit, known=self.schedule, watch=watch)
            self._take(found, "search")

    def _relax(self) -> None:
        """The linear programs over slots and over completions, where the objective has them."""
        if not (self.seconds and self.objective.mean_e2el):
            return
        others = bounds(self.problem)
        limit = (1.0 if self.program == "none" else RELAXED) * self._left()
        try:
            end = time.monotonic() + limit
            by_slots = mean_e2el_by_slots(self.problem, SLOTTED * limit)
            e2el = max(by_slots, mean_e2el_bound(self.problem, max(end - time.monotonic(), 0.0)))
        except InputError as error:
            if self.program != "none":
                raise
            self.notes.append(f"no relaxation: {error}")
            return
        bound = replace(others, mean_e2el=max(e2el, others.mean_e2el)).of(self.objective)
        if bound > self.bound:
            self.bound, self.proof = bound, "relaxation"
            if self.progress:
                self.progress(time.monotonic() - self.began, self.value, bound)

    def _solve(self) -> None:
        """The constraint program."""
        if self.program == "none":
            return
        if self.cost.base <= 0:
            raise InputError("coefficients: the first, of every batch, must be > 0 for a program: use --program none")
        ending = self._that_ends()
        if ending is None:
            self.notes.append("no program: nothing says when the last request ends; add makespan or mean-e2el")
            return
        horizon = most_batches(self.problem, self.cost, *ending)
        if self.objective.first_tokens_only and not ends_early(self.objective, self.forbidden):
            horizon += batches_after_first_tokens(self.problem, self.forbidden)
        if _states(self.problem, self.objective, self.program) * horizon > MOST_STATES:
            self.notes.append(f"too many requests, tokens and batches for the program: the bound is the {self.proof}'s")
            return
        released = float((self.problem.arrival - self.problem.arrival.min()).sum())
        longest = self._outcome(self.schedule).value(MAKESPAN) * len(self.problem)
        units = Units.of(self.cost, (longest + released) * self._scale())
        built = self._program(self.problem.with_times(self.cost), units, horizon)
        value = Total(self.problem, self.objective, units).value
        watch = self._watch() if self.progress else None
        answer = solve(built.model, built.batches, value, self._left(), self.workers, watch)
        if answer.ended == "early":
            self.notes.append("the program ended before it had a proof: by the time limit or Ctrl-C")
        if answer.ended == "infeasible":
            self.notes.append("the program found no schedule")
        if answer.bound > self.bound:
            self.bound, self.proof, self.kind = answer.bound, "program", self._kind()
        if answer.batches is not None:
            found = as_early_as_possible(self.problem, to_the_end(self.problem, answer.batches))
            if not self._allowed(found):
                self.notes.append("the program's schedule breaks a rule once all is served: it is not taken")
            self._take(found, f"program {self.program}")

    def _that_ends(self) -> tuple[Objective, float] | None:
        """An objective that says by when all is over, with the value that it has at most."""
        aims = ((self.objective, self.value), *self.most)
        if not self.objective.mean_tpot:
            return aims[0]
        return next((each for each in aims if each[0].makespan or each[0].mean_e2el), None)

    def _scale(self) -> int:
        """What the largest sum of a program is multiplied by."""
        aims = [self.objective, *(aim for aim, _ in self.most)]
        weights = [1]
        for aim in (each for each in aims if each.goodput is None):
            times, gaps = aim.token_weights(self.problem.output_tokens)
            weights.append(sum(aim.whole()[:3]) * times + max(gaps))
        return max(weights)

    def _program(self, linear: Problem, units: Units, horizon: int) -> Flow | LiteralProgram:
        words = (linear, units, self.objective, horizon, self.forbidden, self.most)
        if self.program == "literal":
            return LiteralProgram(*words)
        built = (StartIndex if self.program == "start" else Flow)(*words)
        if keeps(self.problem, self.schedule, self.forbidden):
            built.hint(self.schedule)
        return built

    def _watch_search(self) -> Callable[[float], None]:
        """Says what the search has found, once a second at most."""
        last = time.monotonic()

        def watch(value: float) -> None:
            nonlocal last
            if self.progress and value < self.value and time.monotonic() > last + 1:
                last = time.monotonic()
                self.progress(last - self.began, value, self.bound)

        return watch

    def _watch(self) -> Callable[[float, float, float], None]:
        shown, progress, before = self.objective.shown, self.progress, time.monotonic() - self.began
        assert progress is not None
        return lambda seconds, value, bound: progress(before + seconds, shown(value), shown(bound))

    def _kind(self) -> str:
        """The schedules that the program's bound is for."""
        parts = [f"without {', '.join(sorted(self.forbidden))}"] if self.forbidden else []
        parts += [f"with {aim} at {aim.shown(value):.6g} or better" for aim, value in self.most]
        return f"schedules {' and '.join(parts)}" if parts else ANY


def certify_in_order(
    problem: Problem, objectives: Collection[Objective], slack: float = 0.0, **how: Any
) -> list[Certificate]:
    """Certificates for one objective after the other, each at the best found values of those before.

    ``slack``: share by which those may be worse. The other words are those of ``certify``.
    """
    found: list[Certificate] = []
    most: list[tuple[Objective, float]] = []
    for objective in objectives:
        known = found[-1].schedule if found else None
        found.append(certify(problem, objective, most=tuple(most), known=known, **how))
        value = check(problem, found[-1].schedule).value(objective)
        most.append((objective, value * (1 + slack)))
    return found


def prices(problem: Problem, objective: Objective, rules: Collection[str], **how: Any) -> dict[str, Certificate]:
    """The certificate without more rules than ``how`` forbids, as "", and with each of these in turn.

    What a rule costs is the difference: of the optima where both are proven, otherwise from its bound less the free
    value to its value less the free bound.
    """
    forbidden = how.pop("forbid", ())
    words = {"": (), **{rule: (rule,) for rule in sorted(check_rules(rules))}}
    return {word: certify(problem, objective, forbid=(*forbidden, *more), **how) for word, more in words.items()}


def to_the_end(problem: Problem, batches: Iterable[Batch]) -> list[Batch]:
    """The batches, and more of them for the requests that these leave without their last token, one after the other."""
    found = list(batches)
    held: dict[int, int] = {}
    known = problem.prompt_tokens.tolist()
    total = (problem.prompt_tokens + problem.output_tokens).tolist()
    for batch in found:
        for i in batch.evicted:
            del held[i]
        for i, tokens in batch.tokens.items():
            held[i] = held.get(i, 0) + tokens
            known[i] += held[i] == known[i]
            if known[i] == total[i]:
                del held[i]
    for i in (i for i in range(len(problem)) if known[i] < total[i]):
        evicted, cached = tuple(other for other in held if other != i), held.get(i, 0)
        held = {}
        while known[i] < total[i]:
            tokens = min(known[i] - cached, problem.prefill_tokens)
            found.append(Batch(0.0, {i: tokens}, evicted))
            cached, evicted = cached + tokens, ()
            known[i] += cached == known[i]
    return found
