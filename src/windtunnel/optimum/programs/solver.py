"""What the constraint programs share: OR-Tools' CP-SAT, whole numbers for seconds, the answer with its proof."""

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple
from types import ModuleType
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch

FINENESS = 10**9
"""Units of the longest schedule."""
LONGEST = 10**12
"""More units than any schedule has."""
Progress = Callable[[float, float, float], None]
"""(seconds, best value so far, bound) at every better schedule; values as of ``Answer.bound``."""


@dataclass(frozen=True)
class Units:
    """Seconds as whole numbers of a unit, rounded down: what is optimal in them is a lower bound."""

    cost: Cost
    seconds: float
    """In a unit."""

    @classmethod
    def of(cls, cost: Cost, longest: float) -> "Units":
        """Seconds where the cost is whole in them, and otherwise a fine division of the longest schedule."""
        whole = all(value.is_integer() for value in map(float, astuple(cost)))
        return cls(cost, 1.0 if whole and longest < FINENESS else longest / FINENESS)

    def whole(self, seconds: float) -> int:
        """Whole units in a time."""
        return math.floor(seconds / self.seconds * (1 + 1e-12))

    def whole_limit(self, seconds: float) -> int:
        """Whole units that a limit allows: times are rounded down, so what keeps it keeps this one."""
        return math.floor(seconds / self.seconds * (1 + 1e-9))


@dataclass(frozen=True)
class Total:
    """An objective as the whole number that a program makes small.

    Weighted seconds: the sum over requests of weighted makespan, finish and first token, each since the first arrival,
    and of the time between the last two, by its share of the mean time per token.
    Goodput: requests that miss a limit.
    """

    problem: Problem
    objective: Objective
    units: Units

    def value(self, total: float) -> float:
        """What the number stands for: seconds, or the share of requests."""
        if self.objective.goodput is not None:
            return total / len(self.problem)
        weights, times = self.objective.whole(), self._times
        later = (weights.mean_e2el + weights.mean_ttft) * self._released * times
        return (total * self.units.seconds - later) / (len(self.problem) * weights.scale * times)

    def of(self, value: float) -> int:
        """The number that no schedule of a value is above."""
        number = len(self.problem)
        if self.objective.goodput is not None:
            return math.floor(value * number + 1e-9)
        weights, times = self.objective.whole(), self._times
        later = (weights.mean_e2el + weights.mean_ttft) * self._released * times
        return self.units.whole_limit(value * number * weights.scale * times + later)

    @property
    def _times(self) -> int:
        return self.objective.token_weights(self.problem.output_tokens)[0]

    @property
    def _released(self) -> float:
        """Arrivals since the first, summed up (s)."""
        return float((self.problem.arrival - self.problem.arrival.min()).sum())


@dataclass(frozen=True)
class Answer:
    """What a program has found when it ended."""

    batches: tuple[Batch, ...] | None
    """Without starts, see ``as_early_as_possible``; None: no schedule was found."""
    bound: float
    """No schedule of the program's kind has an objective below it."""
    ended: str
    """``optimal``, ``early`` (at the time limit or by Ctrl-C) or ``infeasible``."""
    seconds: float


def cp_model() -> ModuleType:
    """OR-Tools' module. Raises InputError where it is not installed."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError as error:
        raise InputError(
            "OR-Tools is not installed: pip install 'windtunnel[optimum]', or ask for the bound alone: --program none"
        ) from error
    found: ModuleType = module
    return found


def solve(
    model: Any,
    read: Callable[[Callable[[Any], int]], Iterable[Batch]],
    value: Callable[[float], float],
    seconds: float,
    workers: int,
    progress: Progress | None = None,
) -> Answer:
    """Solve a minimisation for at most this many seconds; Ctrl-C ends it with what is proven by then.

    ``value`` says what the number that it makes small stands for.
    """
    cp = cp_model()
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(model, _watch(cp, progress, value) if progress else None)
    if status == cp.MODEL_INVALID:
        raise InputError(f"the program is too large for whole numbers: {model.validate()}")
    ended = {cp.OPTIMAL: "optimal", cp.INFEASIBLE: "infeasible"}.get(status, "early")
    bound = math.inf if status == cp.INFEASIBLE else value(max(math.ceil(solver.best_objective_bound - 1e-6), 0))
    found = status in (cp.OPTIMAL, cp.FEASIBLE)
    batches = tuple(batch for batch in read(solver.value) if batch.tokens) if found else None
    return Answer(batches, bound, ended, solver.wall_time)


def _watch(cp: ModuleType, progress: Progress, value: Callable[[float], float]) -> Any:
    """Say every better schedule."""

    class Watch(cp.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            progress(self.wall_time, value(self.objective_value), value(self.best_objective_bound))

    return Watch()
