"""Clocks: how simulated seconds pass."""

import asyncio
import time
from typing import Protocol

from windtunnel.errors import InputError


class Clock(Protocol):
    """Simulated seconds since the start."""

    slack: float
    """How late a decision may be made: nobody sees it before its tokens are due."""

    def now(self) -> float:
        """What time it is."""
        ...

    def at(self, seconds: float) -> float:
        """What time it was at that many seconds of the monotonic clock."""
        ...

    async def wait(self, until: float, wake: asyncio.Event) -> None:
        """Return at a time, which may be infinite, or when woken."""
        ...


SLACK = 0.001
"""Seconds. Timers are no finer, and what is decided when other tokens go out costs no turn of the event loop."""


class RealClock:
    """As many simulated seconds as seconds, or ``speed`` times as many."""

    def __init__(self, speed: float = 1.0) -> None:
        """Raises InputError for a speed that is no number > 0."""
        if not 0.0 < speed < float("inf"):
            raise InputError(f"speed={speed:g}: must be a number > 0; --virtual-time is as fast as it can")
        self.speed, self.slack = speed, SLACK * speed
        self._start = time.monotonic()

    def now(self) -> float:
        """Seconds since the start, times the speed."""
        return self.at(time.monotonic())

    def at(self, seconds: float) -> float:
        """The seconds between, times the speed."""
        return (seconds - self._start) * self.speed

    async def wait(self, until: float, wake: asyncio.Event) -> None:
        """Sleep until then, unless woken."""
        if until == float("inf"):
            await wake.wait()
            return
        left = (until - self.now()) / self.speed
        handle = asyncio.get_running_loop().call_later(max(left, 0.0), wake.set)
        await wake.wait()
        handle.cancel()


class VirtualClock:
    """Jumps to whatever comes next as soon as nothing else is to do: no second is waited for."""

    PATIENCE = 3
    """Turns that other tasks of this process get before the clock goes on, so that they can send what they have."""

    def __init__(self) -> None:
        self._now = self.slack = 0.0

    def now(self) -> float:
        """The time of the latest event."""
        return self._now

    def at(self, seconds: float) -> float:  # noqa: ARG002 - no second passes here
        """The time of the latest event."""
        return self._now

    async def wait(self, until: float, wake: asyncio.Event) -> None:
        """Let others have their turns; go on to that time if they had nothing."""
        if until == float("inf"):
            await wake.wait()
            return
        for _ in range(self.PATIENCE):
            await asyncio.sleep(0)
            if wake.is_set():
                return
        self._now = max(self._now, until)
