"""Ranks that decide at the same time and tell each other what they have, in one process: a thread each, of which one
runs at a time."""

from collections.abc import Callable
from contextvars import copy_context
from threading import Barrier, BrokenBarrierError, Lock, Thread, current_thread
from typing import Any


class _Round:
    """What is told in one decision of all ranks."""

    def __init__(self, size: int) -> None:
        self.barrier, self.lock = Barrier(size), Lock()
        self.told: list[list[Any]] = [[] for _ in range(size)]
        self.errors: list[Exception] = []

    def run(self, call: Callable[[], None]) -> None:
        """What one rank does."""
        with self.lock:
            try:
                call()
            except BrokenBarrierError:
                pass
            except Exception as error:
                self.errors.append(error)
                self.barrier.abort()

    def tell(self, number: int, value: Any) -> list[Any]:
        """What all ranks told at this place, in order."""
        place = len(self.told[number])
        self.told[number].append(value)
        self.lock.release()
        try:
            self.barrier.wait()
        finally:
            self.lock.acquire()
        return [told[place] for told in self.told]


_ROUND: list[_Round] = []
"""The one that is decided, if there are several ranks."""


def number() -> int:
    """Which rank decides."""
    return int(current_thread().name) if _ROUND else 0


def tell(value: Any) -> list[Any]:
    """Tell the other ranks this; returns what each told, in order."""
    if not _ROUND:
        return [value]
    return _ROUND[-1].tell(number(), value)


def decide(calls: list[Callable[[], None]]) -> None:
    """Let every rank decide. Raises what one of them raises."""
    if len(calls) == 1:
        calls[0]()
        return
    found = _Round(len(calls))
    _ROUND.append(found)
    threads = [
        Thread(target=copy_context().run, args=(found.run, call), name=str(number)) for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _ROUND.clear()
    if found.errors:
        raise found.errors[0]
