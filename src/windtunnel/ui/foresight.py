"""Foresight: a process that makes the batch-time tables of neighbouring settings before a slider gets there."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from windtunnel.errors import InputError
from windtunnel.ui.choices import neighbours


class Foresight:
    """Fills the cache on disk in its own process, at the lowest priority, for what was asked for last. It ends
    with this one, however that ends."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=work, args=(theirs,), daemon=True).start()
        theirs.close()  # so that nobody but this process holds the line open

    def look(self, words: Mapping[str, Any]) -> None:
        """Prepare the neighbours of these words, instead of those of the words before."""
        with suppress(OSError):  # without that process, sliders wait for their tables
            self._connection.send(neighbours(words))

    def close(self) -> None:
        """The end."""
        self._connection.close()


def work(connection: Connection) -> None:
    """Prepare what comes over the line until it is closed; Ctrl-C is for the other end."""
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting: list[dict[str, Any]] = []
    with suppress(EOFError, OSError):
        while True:
            while not waiting or connection.poll():
                waiting = connection.recv()
            prepare(waiting.pop(0))


def prepare(words: Mapping[str, Any]) -> None:
    """Put the tables of these words into the cache, unless they are there or the deployment cannot run."""
    from windtunnel.simulate.simulate import batch_times
    from windtunnel.ui.asked import scenario_of

    with suppress(InputError):
        scenario = scenario_of(words, words)
        batch_times(scenario.deployment(), scenario.server.perf)
