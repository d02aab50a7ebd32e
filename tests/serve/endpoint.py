"""A small served deployment for tests: in this process, by a virtual clock, or on a socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.serve.clock import Clock, RealClock, VirtualClock
from windtunnel.serve.front import Manners
from windtunnel.serve.kv.publisher import KVEventsConfig
from windtunnel.serve.log import Log
from windtunnel.serve.place import Place
from windtunnel.serve.server import config, serving
from windtunnel.simulate.live import LiveDeployment
from windtunnel.simulate.live import live as ready
from windtunnel.simulate.simulate import batch_times

MODEL = "Qwen/Qwen3-0.6B"


@cache
def deployment(replicas: int = 1, **settings: Any) -> Deployment:
    pool = Pool(load_model(MODEL), device("h100"), Engine(**settings), replicas)
    return Deployment((pool,))


@cache
def tables(served: Deployment) -> tuple[Tabulated, ...]:
    return tuple(batch_times(served, "roofline"))


def live(served: Deployment | None = None) -> LiveDeployment:
    served = served or deployment()
    return ready(served, tables=tables(served))


def app(
    served: LiveDeployment | None = None,
    clock: Clock | None = None,
    record: Path | None = None,
    log: StringIO | None = None,
    kv_events: KVEventsConfig = KVEventsConfig(),  # noqa: B008 - frozen
    **manners: Any,
) -> Starlette:
    return serving(
        served or live(), clock or VirtualClock(), Manners(**{"model": "small", **manners}), Log(log), record, kv_events
    )


@asynccontextmanager
async def client(served: Starlette, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=served, raise_app_exceptions=False)
    async with (
        served.router.lifespan_context(served),
        httpx.AsyncClient(transport=transport, base_url="http://test", **settings) as found,
    ):
        yield found


def ask(served: Starlette, *calls: tuple[str, str, Any], **settings: Any) -> list[httpx.Response]:
    """The answers to (method, path, JSON body) sent one after the other."""

    async def sent() -> list[httpx.Response]:
        async with client(served, **settings) as found:
            return [await found.request(method, path, json=body) for method, path, body in calls]

    return asyncio.run(sent())


@cache
def compiled() -> None:
    """Nobody waits for the compiler, as nobody does for a server that has said that it answers."""
    live().warm_up()


@contextmanager
def on_a_socket(served: Starlette) -> Iterator[str]:
    """The address of a server in a thread."""
    compiled()
    place = Place(port=0).bind()
    place.listen()
    server = uvicorn.Server(config(served))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        place.close()


def real_time(speed: float = 1.0) -> RealClock:
    return RealClock(speed)
