"""Start index: the program of schedules without chunks, evictions and pauses. One count, how many of a class begin in
which batch, says all, since they compute in every batch from then on."""

from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.optimum.programs.flow import ADMIT, DECODE, Flow, Kind
from windtunnel.optimum.rules import AS_BEGUN
from windtunnel.optimum.schedule import Schedule


@dataclass
class StartIndex(Flow):
    """State flow with a decode for each beginning, and no other arcs."""

    def __post_init__(self) -> None:
        if not self.forbidden >= AS_BEGUN:
            raise InputError(f"--program start: is for schedules without {', '.join(sorted(AS_BEGUN))}: forbid them")
        super().__post_init__()

    def _class(self, c: int, kind: Kind) -> None:
        number = len(kind.members)
        waiting: Any = number
        ended: Any = 0
        unbegun, unfinished, begins = [], [], []
        for j in range(self.horizon):
            unbegun.append(waiting)
            unfinished.append(number - ended)
            begins.append(self._arc(c, j, ADMIT, 0))
            waiting = waiting - begins[j]
            for g in range(1, min(j, kind.output - 1) + 1):
                self.arcs[c, j, DECODE, g] = begins[j - g]
            if j >= kind.output - 1:
                ended = ended + begins[j - kind.output + 1]
        self.model.add(waiting >= 0)
        self._end(unbegun, unfinished, waiting, number - ended)

    def hint(self, schedule: Schedule) -> None:
        """Begin the search with a schedule of the kind."""
        counts = self._counts(schedule)
        for arc, variable in self.arcs.items():
            if arc[2] == ADMIT:
                self.model.add_hint(variable, counts.get(arc, 0))
