"""A process that serves: the routes, the task that simulates, what is recorded, and the end of it all."""

import asyncio
import ctypes
import gc
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from windtunnel.serve.clock import Clock
from windtunnel.serve.connection import Connection, Turn
from windtunnel.serve.engine import Engine
from windtunnel.serve.front import Front, Manners, application
from windtunnel.serve.kv.events import Ledger, Watch
from windtunnel.serve.kv.publisher import KVEventsConfig, Publisher
from windtunnel.serve.log import Log
from windtunnel.serve.meters import Meters
from windtunnel.serve.record import Recorder
from windtunnel.simulate.live import LiveDeployment

DRAIN_SECONDS = 30
"""Answers under way get so long to end when the server is told to stop."""

RARELY = 10_000, 100, 100
"""How often Python looks for circles of objects. With 1,000 streams a full look takes 40 ms, in which no token goes
out, and the others stand in the way of 1,000 requests that come at once. Answers and connections leave no circles."""


def serving(
    deployment: LiveDeployment,
    clock: Clock,
    manners: Manners,
    log: Log,
    record: Path | None = None,
    kv_events: KVEventsConfig = KVEventsConfig(),  # noqa: B008 - frozen
) -> Starlette:
    """The application of a deployment, which simulates while it runs. Raises InputError where it cannot publish."""
    engine = Engine(deployment, clock)
    publisher, ledger = None, None
    if kv_events.on(deployment.engine_version.startswith("sglang")):
        ledger = Ledger()
        watch = Watch(deployment, ledger)
        publisher = Publisher(kv_events, watch.ranks)
        engine.stepped.append(partial(watch.look, publisher.publish))
    recorder = Recorder(record, engine) if record else None
    meters = Meters(engine, manners.model)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.run())]
        if recorder:
            tasks.append(asyncio.create_task(recorder.keep_on_disk()))
        if publisher:
            tasks.append(asyncio.create_task(publisher.replay()))
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if recorder:
            recorder.close()
        if publisher:
            publisher.close()

    return application(Front(engine, manners, meters, log, ledger), lifespan)


ANY_SITE = ("access-control-allow-origin", "*")
"""Pages of every site may read the answers, as vLLM's server lets them by default."""


def listen(app: Any, place: socket.socket, line: str, headers: Sequence[tuple[str, str]] = ()) -> None:
    """Serve until told to stop; then let the answers under way end. ``line``: on standard output, once it serves.
    ``headers``: of every answer."""
    gc.collect()
    gc.freeze()  # what is there stays: else each full collection walks through the compiler's and the tables' objects
    gc.set_threshold(*RARELY)
    give_memory_back()
    with suppress(KeyboardInterrupt):  # the way to stop a server
        Announced(config(app, headers), line).run(sockets=[place])


M_MMAP_THRESHOLD, APART_BYTES = -3, 1 << 17
"""Of glibc's malloc.h and its documented beginning."""


def give_memory_back() -> None:
    """Let large blocks of memory go back to the system as soon as they are free, where the C library is glibc: it
    otherwise keeps bodies of up to 32 MB, once it has seen one, in a heap that never shrinks below what lives on."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, APART_BYTES)


class Announced(uvicorn.Server):
    """A server that says so when it answers: who reads the line and connects at once does not wait for its start."""

    def __init__(self, config: uvicorn.Config, line: str) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        sys.stdout.write(f"{self._line}\n")
        sys.stdout.flush()


def config(app: Any, headers: Sequence[tuple[str, str]] = ()) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, turn=Turn())),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=[("server", "windtunnel"), *headers],
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )


def log_to(name: str) -> Log:
    """A log on standard error, or none."""
    return Log(sys.stderr if name == "requests" else None)
