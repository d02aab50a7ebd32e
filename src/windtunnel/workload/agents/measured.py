"""What of a run counts: a window that opens when the warm-up has drained, and lasts for a given time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Integers = npt.NDArray[np.int64]
LIMITS = ("idle_gap", "tree_gap", "grace")


@dataclass(frozen=True, eq=False)
class Measured:
    """The window of a load, and who is before it. Raises InputError for times that cannot be."""

    warm_up: Integers
    """Rows that come before it: it opens when the last of them has ended."""
    opening: Integers
    """Rows that wait for that, and for those that ``after`` names: they come a think time later."""
    seconds: float
    """What would come later than so long after the opening never comes; what is in flight then goes on."""
    idle_gap: float = math.inf
    """Longest seconds without anything in flight: all that will come comes as much earlier as it takes."""
    tree_gap: float = math.inf
    """Longest seconds without anything of a session in flight: all that will come of it comes as much earlier."""
    grace: float = math.inf
    """Seconds after the window, when what is still in flight is cancelled."""

    def __post_init__(self) -> None:
        """Check the times."""
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"benchmark_duration={self.seconds:g}: must be finite seconds > 0")
        for name in LIMITS:
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}={getattr(self, name):g}: must be seconds ≥ 0; inf: no limit")

    def taken(self, rows: Integers) -> Measured:
        """The same of these rows, numbered by their order."""
        before, opening = (np.flatnonzero(np.isin(rows, who)) for who in (self.warm_up, self.opening))
        return replace(self, warm_up=before, opening=opening)

    def spec(self) -> dict[str, Any]:
        """A JSON-able summary for a run's manifest."""
        limits = {name: getattr(self, name) for name in LIMITS}
        return {
            "seconds": self.seconds,
            "warm_up": len(self.warm_up),
            **{name: value for name, value in limits.items() if math.isfinite(value)},
        }
