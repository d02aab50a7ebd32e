"""Clock: how long a call takes: warm-up, repeats, medians; events on a GPU, else a thread's CPU seconds or the wall."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, pstdev
from time import perf_counter, thread_time
from typing import Any

from windtunnel.dataclass import dataclass

LEAST = 2e-4
"""Seconds of one reading at least: shorter calls are made several times for it."""


@dataclass(frozen=True)
class Reading:
    """Seconds of one call, over the repeats."""

    min: float
    max: float
    mean: float
    median: float
    std: float
    waited: float = 0.0
    """Seconds that threads waited for a CPU, for each second of it: where many do, all times are too long alike."""


def reading(seconds: list[float]) -> Reading:
    """What the repeats come to."""
    return Reading(min(seconds), max(seconds), fmean(seconds), median(seconds), pstdev(seconds))


def waited(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that this process's threads have waited for a CPU so far, by Linux's schedstat; 0 on other systems."""
    found = 0
    for thread in tasks.glob("*/schedstat"):
        with suppress(OSError):  # it has ended meanwhile
            found += int(thread.read_text(encoding="ascii").split()[1])
    return found / 1e9


@dataclass(frozen=True)
class Clock:
    """A device's clock."""

    torch: Any
    device: str
    repeats: int
    threads: int = 0
    """Of torch on a CPU; 0: unknown."""

    def now(self) -> float:
        """Seconds that only differences of mean something. One thread computes alone: its CPU seconds are the wall's on
        an idle machine, and nobody who takes the CPU meanwhile is in them."""
        return thread_time() if self.threads == 1 else perf_counter()

    def time(self, call: Callable[[], Any]) -> Reading:
        """Time a call; the first two warm up, and say how many fit a reading."""
        call()
        once = self._seconds(call, 1)
        inner = max(1, min(int(LEAST / max(once, 1e-9)), 200))
        before, start = waited(), perf_counter()
        found = reading([self._seconds(call, inner) for _ in range(self.repeats)])
        if self.threads == 1:
            return found
        return replace(found, waited=max(waited() - before, 0.0) / (perf_counter() - start))

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        if self.device == "cuda":
            return self._on_gpu(call, count)
        start = self.now()
        for _ in range(count):
            call()
        return (self.now() - start) / count

    def _on_gpu(self, call: Callable[[], Any], count: int) -> float:
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        self.torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000.0 / count
