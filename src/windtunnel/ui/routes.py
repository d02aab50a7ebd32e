"""Routes: the page's files, and what it asks. Every mistake is one line; only this machine's page is answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from windtunnel.errors import InputError
from windtunnel.files import parse_json
from windtunnel.scenario.sweep import sweep
from windtunnel.ui.asked import Words, file_words, read_words
from windtunnel.ui.bench import Bench
from windtunnel.ui.choices import choices
from windtunnel.ui.closeup import closeup
from windtunnel.ui.exported import exported
from windtunnel.ui.foresight import Foresight
from windtunnel.ui.studies import listed, points
from windtunnel.version import __version__

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": CSP, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
MOST_BODY = 64 << 10
"""Bytes of a request's body."""
LOCAL = ("localhost", "127.0.0.1", "::1")
Answer = TypeVar("Answer")


class RefusedError(Exception):
    """A request that is not answered, with its status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Room:
    """Answers the page; simulations run one after the other in their own thread."""

    def __init__(
        self, start: Words, studies: Sequence[Path], hosts: Sequence[str], foresight: Foresight | None
    ) -> None:
        self.start, self.studies, self.hosts = dict(start), tuple(studies), (*LOCAL, *hosts)
        self.foresight, self.bench = foresight, Bench(start)
        self._thread, self._turn = ThreadPoolExecutor(1), asyncio.Lock()

    async def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function in the thread of simulations."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    def close(self) -> None:
        """The end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.foresight:
            self.foresight.close()

    def check(self, request: Request) -> None:
        """Refuse what another site's page sends, or one that calls this machine by its own name."""
        named = _host_of(request.headers.get("host", ""))
        if named not in self.hosts and not _is_address(named):
            raise RefusedError(403, f"host {named!r}: this page answers to {', '.join(self.hosts)}")
        origin = request.headers.get("origin")
        if origin and urlsplit(origin).netloc != request.headers.get("host"):
            raise RefusedError(403, "origin: only the page itself is answered")

    async def body(self, request: Request) -> Any:
        """The JSON of a request."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "content-type: must be application/json")
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > MOST_BODY:
                raise RefusedError(413, f"the body has more than {MOST_BODY:,} bytes")
        try:
            return parse_json(bytes(parts))
        except RecursionError as error:
            raise InputError("the body is nested too deeply") from error

    # What the page asks.

    async def choices(self, _: Request) -> Response:
        """Names, stops, the words of the command line, and the stored studies."""
        found = await self.run(choices)
        return JSONResponse(found | {"start": self.start, "version": __version__, "studies": listed(self.studies)})

    async def figures(self, request: Request) -> Response:
        """A line of JSON for each stage; later stages are not simulated for a page that has gone on."""
        words = read_words(await self.body(request))
        stages = self.bench.stages(words)
        first = await self._stage(request, stages)  # what cannot be simulated is said with a status

        async def lines() -> AsyncIterator[str]:
            found = first
            while found is not None:
                yield json.dumps(found, allow_nan=False, separators=(",", ":")) + "\n"
                try:
                    found = await self._stage(request, stages)
                except ClientDisconnect:
                    return
                except (InputError, MemoryError, OSError) as error:
                    yield json.dumps({"error": _said(error)}) + "\n"
                    return
            if self.foresight:
                self.foresight.look(words)

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _stage(self, request: Request, stages: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        """The next stage when it is this page's turn; raises ClientDisconnect if it has gone on by then."""
        async with self._turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await self.run(next, stages, None)

    async def closeup(self, request: Request) -> Response:
        """A stretch of the run's time."""
        document = await self.body(request)
        words = read_words(document)
        times = [_seconds(document, name) for name in ("start", "end")]
        return JSONResponse(await self.run(lambda: closeup(self.bench.flight(words).steps, *times)))

    async def sweep(self, request: Request) -> Response:
        """The deployment at nine rates, and the knee."""
        words = read_words(await self.body(request))
        return JSONResponse(await self.run(self._sweep, words))

    def _sweep(self, words: Words) -> dict[str, Any]:
        from windtunnel.metrics.comparison import knee

        free = {name: value for name, value in words.items() if name != "request_rate" and not name.startswith("ramp")}
        found = sweep(self.bench.scenario(free))
        at = knee(found)
        return {"knee": None if at is None else at.rate, "points": [point.to_json() for point in found]}

    async def export(self, request: Request) -> Response:
        """Command line, file and server lines."""
        words = read_words(await self.body(request))
        return JSONResponse(await self.run(lambda: exported(self.bench.scenario(words))))

    async def report(self, request: Request) -> Response:
        """The page of ``windtunnel run --report``."""
        text = await self.run(self.bench.report, read_words(await self.body(request)))
        return HTMLResponse(text, headers={"content-disposition": 'attachment; filename="windtunnel-report.html"'})

    async def study(self, request: Request) -> Response:
        """The points of a stored study."""
        name = request.query_params.get("name", "")
        found = await self.run(points, self.studies, name)
        for point in found.get("points", ()):
            self.bench.stored |= set(file_words(point.get("words") or {}))
        return JSONResponse(found)

    async def file(self, request: Request) -> Response:
        """The page, its scripts and its style."""
        name = request.path_params.get("name", "index.html")
        path = FOLDER / name
        if path.parent != FOLDER or path.suffix not in TYPES or not path.is_file():
            raise RefusedError(404, f"{request.url.path}: there is no such page")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    """Whether a host is an IP address: no other site's name can stand for one."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _seconds(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15:
        raise InputError(f"{name}={str(value)[:80]!r}: must be seconds")
    return float(value)


def application(
    start: Words, studies: Sequence[Path] = (), hosts: Sequence[str] = (), foresight: Foresight | None = None
) -> Starlette:
    """The page and what it asks, as an ASGI application.

    Args:
        start: words that the page begins with; files of Python among them may be run.
        studies: files and folders with stored studies.
        hosts: names by which the page is called, besides ``localhost`` and addresses.
        foresight: what prepares tables.
    """
    room = Room(start, studies, hosts, foresight)

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                room.check(request)
                response = await endpoint(request)
            except RefusedError as error:
                response = _error(str(error), error.status)
            except (InputError, MemoryError, OSError) as error:
                response = _error(_said(error), 400)
            except ClientDisconnect:
                response = Response(status_code=400)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answered

    async def plain(request: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        return _error(f"{request.url.path}: {exception.detail.lower()}", exception.status_code)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        room.close()

    asked = ("figures", "closeup", "sweep", "export", "report")
    routes = [
        Route("/api/choices", guarded(room.choices)),
        Route("/api/study", guarded(room.study)),
        *(Route(f"/api/{name}", guarded(getattr(room, name)), methods=["POST"]) for name in asked),
        Route("/", guarded(room.file)),
        Route("/{name}", guarded(room.file)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: plain}, lifespan=lifespan)


def _said(error: Exception) -> str:
    """What is wrong, for the user who can mend it."""
    if isinstance(error, MemoryError):
        return "this load needs more memory than there is: fewer requests"
    if isinstance(error, OSError):
        return f"{str(error.filename or 'a file')[:200]}: {error.strerror or error}"
    return str(error)


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": " ".join(message.split())}, status)
