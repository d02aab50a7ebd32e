"""Requests that decode together, step after step, while a decision is held.

Each of them computes one token in every step, so a step is counted, whatever their number; what the steps made of the
requests is written into them when something happens.
"""

import sys

from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.request import Request


class Held:
    """The decodes of a held decision, from the step after it on."""

    def __init__(self, parts: list[Scheduled], later: int, block_size: int, turns: int) -> None:
        """``parts``: the decodes as they were ``later`` steps ago; ``turns``: steps in flight that are of just these.

        ``ends_with``: the number of the step with whose end the first of them has all its tokens; ``leaves_with``: of
        the last one that the first of them may ask for.
        """
        self.parts, self.later, self.size, self.turns = parts, later, block_size, turns
        self.requests = [part.request for part in parts]
        self.decoding = len(parts), sum([part.start for part in parts])
        self.decided, self.ended = 0, -turns
        """Steps of these decodes since they are held; those before are to end first."""
        self._written = self.ended
        self.last_token = 0.0
        """When the latest of those that have ended did (s)."""
        self._lacking = [0] * block_size
        """How many lack a block in a step, by its number modulo the block size."""
        self.ends_with = self.leaves_with = sys.maxsize
        for request in self.requests:
            self._lacking[-request.num_computed_tokens % block_size] += 1
            known = request.generated + request.num_output_placeholders
            self.ends_with = min(self.ends_with, request.output_tokens - known)
            self.leaves_with = min(self.leaves_with, request.max_tokens - known)

    def batch(self) -> Batch:
        """The next step."""
        return Batch(scheduled=self.parts, later=self.later + self.decided, decoding=self.decoding)

    def blocks(self, steps: int) -> int:
        """New blocks for so many more steps."""
        rounds, rest = divmod(steps, self.size)
        first = self.decided % self.size
        turned = self._lacking[first : first + rest] + self._lacking[: max(first + rest - self.size, 0)]
        return rounds * len(self.parts) + sum(turned)

    def leaving(self) -> list[Request]:
        """Those that may ask for no step after the latest one."""
        known = [request.generated + request.num_output_placeholders + self.decided for request in self.requests]
        return [request for request, n in zip(self.requests, known, strict=True) if n == request.max_tokens]

    def settle(self) -> None:
        """Write into the requests what the steps made of them; no more steps are counted then."""
        decided, ended = self.decided, self.ended - self._written
        flying = decided - ended
        if not (decided or ended):
            return
        for request in self.requests:
            request.num_computed_tokens += decided
            request.num_blocks = -(-request.num_computed_tokens // self.size)
            request.num_in_flight_tokens += flying
            request.num_output_placeholders += flying
            request.generated += ended
            if ended:
                request.last_token = self.last_token
        self.later += decided
        self.decided, self._written = 0, self.ended
