"""A distribution known by a short table of quantiles."""

from __future__ import annotations

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.workload.rules import Floats


@dataclass(frozen=True)
class Quantiles:
    """A positive quantity given at some quantile levels; between them its logarithm is linear in the level."""

    levels: tuple[float, ...]
    """Rising from 0 to 1."""
    values: tuple[float, ...]
    """The quantity at each level, > 0, not falling."""

    def __post_init__(self) -> None:
        """Refuse tables that are no distribution."""
        levels, values = np.array(self.levels), np.array(self.values)
        if len(levels) != len(values) or len(levels) < 2 or levels[0] != 0 or levels[-1] != 1:
            raise InputError(f"quantile levels={self.levels}: must rise from 0 to 1, one value each")
        if not ((np.diff(levels) > 0).all() and (np.diff(values) >= 0).all() and values[0] > 0):
            raise InputError(f"quantiles={self.values}: must be > 0 and not fall, at rising levels")

    def at(self, u: Floats) -> Floats:
        """The quantity at the levels u in [0, 1]."""
        value: Floats = np.exp(np.interp(u, self.levels, np.log(self.values)))
        return value

    @property
    def mean(self) -> float:
        """The exact mean: ∫ a·(b/a)^x dx = (b − a)/ln(b/a) over each segment from a to b."""
        low, high = np.array(self.values[:-1]), np.array(self.values[1:])
        growth = np.log(high / low)
        flat = growth < 1e-9
        segment = np.where(flat, low, (high - low) / np.where(flat, 1.0, growth))
        return float((segment * np.diff(self.levels)).sum())
