"""Times of decode attention between measured (requests, keys): whether the cached keys fit the second-level cache, and
how they are split, depends on how many there are in all.

Two readings compete: the bilinear one of ``Plane``, which long contexts follow, and one along equal numbers of cached
tokens (requests × keys), which keeps to one side of the cache's edge. Each plane weighs them by how well they foretell
its own columns, every second left out in turn, near the number of tokens that is asked.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.answer import Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Plane
from windtunnel.perf.readings import left_out, nearby, shares

FOLDS = 2
PER_OCTAVE = 4
"""Points at which the weights are computed; linear between them."""


@dataclass(frozen=True, eq=False)
class DecodePlane(Plane):
    """A plane whose axes are requests and keys of each, both > 0."""

    def times(self, a: Floats, b: Floats) -> Answer:
        """Seconds at points inside the axes; callers clip and scale those outside."""
        found = super().times(a, b)
        equal, answers = self._along_equal_tokens(a, b)
        if not answers.any():
            return found
        x, weights = self._weights
        weight = np.where(answers, np.interp(np.log(a * b), x, weights), 0.0)
        seconds = np.exp(weight * np.log(equal) + (1.0 - weight) * np.log(found.seconds))
        return replace(found, seconds=np.asarray(seconds))

    def _along_equal_tokens(self, a: Floats, b: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds between the two neighbouring columns where each holds as many cached tokens, and where both are
        measured."""
        j = np.clip(np.searchsorted(self.columns, b, side="right") - 1, 0, len(self.columns) - 2)
        place = np.log(b / self.columns[j]) / np.log(self.columns[j + 1] / self.columns[j])
        logs, answers = np.zeros(np.shape(a)), np.ones(np.shape(a), dtype=bool)
        for column, share in ((j, 1.0 - place), (j + 1, place)):
            seconds, known = self._in_column(a * b / self.columns[column], column)
            logs += share * np.log(seconds)
            answers &= known
        return np.exp(logs), answers

    def _in_column(self, a: Floats, column: NDArray[np.intp]) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds at ``a`` requests in one column for each, log-log, and where they are between measured ones."""
        inside = (a >= self.rows[0] * (1 - 1e-12)) & (a <= self.rows[-1] * (1 + 1e-12))
        a = np.clip(a, self.rows[0], self.rows[-1])
        i = np.clip(np.searchsorted(self.rows, a, side="right") - 1, 0, len(self.rows) - 2)
        place = np.log(a / self.rows[i]) / np.log(self.rows[i + 1] / self.rows[i])
        known = np.where(place < 1.0, self.known[i, column], 1.0) * np.where(
            place > 0.0, self.known[i + 1, column], 1.0
        )
        logs = (1.0 - place) * np.log(self.seconds[i, column]) + place * np.log(self.seconds[i + 1, column])
        return np.exp(logs), inside & (known > 1.0 - 1e-9)

    @cached_property
    def _weights(self) -> tuple[Floats, Floats]:
        """Logs of numbers of cached tokens, and the weight of the reading along equal ones there."""
        tokens, errors = self._errors()
        octaves = np.log2(self.rows[-1] * self.columns[-1] / (self.rows[0] * self.columns[0]))
        x = np.linspace(
            np.log(self.rows[0] * self.columns[0]),
            np.log(self.rows[-1] * self.columns[-1]),
            2 + PER_OCTAVE * int(np.ceil(octaves)),
        )
        return x, shares(nearby(errors, tokens, np.exp(x)))[1]

    def _errors(self) -> tuple[Floats, Floats]:
        """[E] cached tokens and [2, E] |error| of the log seconds of both readings at cells that are foretold from the
        other columns, where both answer."""
        tokens, errors = [np.zeros(0)], [np.zeros((2, 0))]
        for out in left_out(len(self.columns), FOLDS):
            rest = DecodePlane(self.rows, self.columns[~out], self.seconds[:, ~out], self.known[:, ~out])
            a, b = (axis.ravel() for axis in np.meshgrid(self.rows, self.columns[out], indexing="ij"))
            equal, answers = rest._along_equal_tokens(a, b)
            use = answers & (self.known[:, out].ravel() > 0)
            truth = self.seconds[:, out].ravel()[use]
            bilinear = Plane.times(rest, a[use], b[use]).seconds
            tokens.append(a[use] * b[use])
            errors.append(np.abs(np.log(np.stack([bilinear, equal[use]]) / truth)))
        return np.concatenate(tokens), np.concatenate(errors, axis=1)
