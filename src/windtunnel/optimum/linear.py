"""Linear programs for bounds: rows as written down, SciPy's solver, and a bound that needs no trust in it."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Floats = NDArray[np.float64]
CONSTANT = -1
"""Key of the constant in a row."""
OPTIMAL, INFEASIBLE = 0, 2
"""SciPy's words for it."""
Row = Mapping[int, float]
"""Σ coefficient · variable, by the variable's number, and a constant."""


@dataclass
class LinearProgram:
    """Minimise a sum over variables from 0 to their ends, each row ≥ 0."""

    ends: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    costs: dict[int, float] = field(default_factory=dict)

    def variable(self, end: float) -> int:
        """A variable's number."""
        self.ends.append(end)
        return len(self.ends) - 1

    def at_least_zero(self, *terms: tuple[float, int]) -> None:
        """Add a row: pairs of a coefficient and a variable, or ``CONSTANT``."""
        row: dict[int, float] = {}
        for coefficient, variable in terms:
            row[variable] = row.get(variable, 0.0) + coefficient
        self.rows.append(row)

    def bound(self, seconds: float) -> float:
        """What the minimum is not below.

        Any row weights ≥ 0 give one (weak duality): the weighted rows are taken from the sum, and each variable whose
        coefficient is then negative stands at its end. The solver only says which weights are good ones, after at most
        this many seconds. Raises InputError without SciPy.
        """
        weights = self._weights(seconds)
        reduced = np.zeros(len(self.ends))
        for variable, cost in self.costs.items():
            reduced[variable] += cost
        constant = 0.0
        for weight, row in zip(weights.tolist(), self.rows, strict=True):
            if weight > 0:
                for variable, coefficient in row.items():
                    if variable == CONSTANT:
                        constant -= weight * coefficient
                    else:
                        reduced[variable] -= weight * coefficient
        return constant + float(np.minimum(reduced, 0.0) @ np.array(self.ends))

    def _weights(self, seconds: float) -> Floats:
        """The solver's dual values; 0 where it has none."""
        solve, matrix = _solver()
        entries = [
            (number, variable, -coefficient)
            for number, row in enumerate(self.rows)
            for variable, coefficient in row.items()
            if variable != CONSTANT
        ]
        numbers, variables, values = zip(*entries, strict=True) if entries else ((), (), ())
        costs = np.zeros(len(self.ends))
        costs[list(self.costs)] = list(self.costs.values())
        of_rows = matrix((values, (numbers, variables)), shape=(len(self.rows), len(self.ends)))
        constants = [row.get(CONSTANT, 0.0) for row in self.rows]
        for presolve in (True, False):  # which has called programs infeasible that have a solution
            options = {"time_limit": seconds, "presolve": presolve}
            found = solve(costs, of_rows, constants, method="highs-ipm", options=options)
            if found.status == OPTIMAL:
                weights: Floats = np.maximum(-found.ineqlin.marginals, 0.0)
                return weights
            if found.status != INFEASIBLE:
                break
        return np.zeros(len(self.rows))


def _solver() -> tuple[Any, Any]:
    """SciPy's ``linprog`` and a matrix for it. Raises InputError where it is not installed."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise InputError("SciPy is not installed: pip install 'windtunnel[optimum]'") from error
    return linprog, csr_array
