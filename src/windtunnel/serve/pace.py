"""Turns for others: what one request asks is done in slices, between which the event loop goes round."""

import asyncio

SLICE = 1 << 13
"""Units of work in a slice, each about what Python does in a quarter of a microsecond: some 2 ms."""


class Pace:
    """Counts the work of one request."""

    def __init__(self) -> None:
        self._left = SLICE

    async def spend(self, work: int) -> None:
        """So many units are about to be done: first let others have their turns, if it is time."""
        self._left -= work
        if self._left < 0:
            self._left = SLICE - work
            await asyncio.sleep(0)
