"""A proxy in front of a real server: passes everything on, and writes down when streamed answers came.

What it writes is a measured run, as ``windtunnel validate`` and ``calibrate`` read it. Of prompts it keeps the number
of their tokens, which the server tells, and a name for each block of text, made with a secret that is thrown away.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.files import write_whole
from windtunnel.serve.connection import came
from windtunnel.serve.events import Splitter, data_of, says_something
from windtunnel.serve.kv.texts import Names
from windtunnel.serve.openai.documents import read_object
from windtunnel.serve.openai.requests import Asked, RefusedError, checked, read_chat, read_completion
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import Tokenizer, tokens_of

ANSWERS = ("/v1/completions", "/v1/chat/completions")
OF_THE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade"),
        *(b"host", b"transfer-encoding"),
    )
)
"""Headers that are of one connection, and not passed on."""
CLIENT, ENGINE = "client: windtunnel proxy", "engine"
"""Whose clock the latencies have: a real server's path to the client counts; a simulated one's are the engine's."""
LARGEST_MEASURED = 16 << 20
"""Bytes of a request that is read to be measured. A larger one is passed on in pieces, and left out."""
BODY_SECONDS = 30.0
"""In which the next piece of a request must come."""
ON_DISK_SECONDS = 0.5
"""After which what has been counted stands in run.json."""


@dataclass
class Measured:
    """An answer on its way."""

    arrival: float
    """At the server: when the request had been passed on. What the proxy takes until then, above all with many that
    come at once, is no time of the server's."""
    names: tuple[int, ...]
    events: list[float] = field(default_factory=list)
    """When text came."""
    usage: Mapping[str, Any] | None = None

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """What httpx tells of its doings."""
        if event == "http11.send_request_body.complete":
            self.arrival = time.monotonic()

    def row(self, start: float, block_size: int) -> dict[str, Any] | None:
        """A line of requests.jsonl; None where the server did not tell the tokens, or sent no text."""
        if not self.usage or not self.events:
            return None
        prompt, output = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        if not prompt or not output:
            return None
        events = [at - self.arrival for at in self.events]
        found = {
            "arrival_s": self.arrival - start,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "ttft_s": events[0],
            "e2el_s": events[-1],
            "itl_s": [round(after - before, 6) for before, after in pairwise(events)],
        }
        return found | ({"hash_ids": list(self.names[: prompt // block_size])} if block_size else {})


class RunFolder:
    """A measured run that grows with every answer that ends."""

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        """Raises InputError if the folder cannot be written, or holds a run already."""
        self._path, self._head = folder, dict(head)
        self.start: float | None = None
        self.recorded, self.left_out = 0, 0
        self._clock = CLIENT
        self._written: tuple[str, int] | None = None
        if (folder / "requests.jsonl").exists():
            raise InputError(f"output {str(folder)!r}: holds a run already: choose another folder")
        self.write_head()
        self._file = (folder / "requests.jsonl").open("w", encoding="utf-8")

    def write_head(self) -> None:
        """Write run.json, if what it says has changed: a proxy may be killed at any time."""
        if self._written == (self._clock, self.left_out):
            return
        self._written = self._clock, self.left_out
        document = self._head | {"clock": self._clock} | ({"left_out": self.left_out} if self.left_out else {})
        write_whole(self._path / "run.json", [json.dumps(document, indent=1) + "\n"])

    def add(self, measured: Measured, clock: str) -> None:
        """An answer has ended."""
        assert self.start is not None
        row = measured.row(self.start, int(self._head.get("hash_block_size", 0)))
        if row is None:
            self.left_out += 1
            return
        if not self.recorded and clock != self._clock:
            self._clock = clock
            self.write_head()
        self.recorded += 1
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write how the run ended."""
        self._file.close()
        self.write_head()


def address(url: str) -> str:
    """A server's URL without the path of its API. Raises InputError for a URL that is none."""
    if not re.match(r"https?://[^/?#:]", url):
        raise InputError(f"{url!r}: must be the URL of a server, as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


class Proxy:
    """Passes requests on to a server at ``url``, and writes down what it answers."""

    def __init__(self, url: str, folder: RunFolder, tokenizer: Tokenizer, block_size: int) -> None:
        self._url, self._folder = url, folder
        self._tokenizer, self._block_size = tokenizer, block_size
        self._secret = secrets.token_bytes(16)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), limits=limits)
        for name in ("accept", "accept-encoding", "user-agent"):
            del self._client.headers[name]

    async def close(self) -> None:
        """The end."""
        await self._client.aclose()
        self._folder.close()

    async def keep_on_disk(self) -> None:
        """Write what has been counted, again and again, until cancelled."""
        while True:
            await asyncio.sleep(ON_DISK_SECONDS)
            self._folder.write_head()

    async def passed_on(self, request: Request) -> Response:
        """Any request. One whose streamed answer can be measured is."""
        measured, asked = None, None
        pieces = _pieces(request)
        try:
            if request.method == "POST" and request.url.path in ANSWERS:
                body = await _read_up_to(pieces, LARGEST_MEASURED)
                arrived = came(request.scope) or time.monotonic()
                asked = None if len(body) > LARGEST_MEASURED else await self._read(request.url.path, body)
                measured = await self._begin(arrived, asked)
                content: bytes | AsyncIterator[bytes] = body if asked else _after(body, pieces)
                if measured is not None:
                    content = _with_usage(body)
            else:
                content = pieces
            return await self._answer(self._request(request, content, measured), measured, asked)
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return JSONResponse({"error": {"message": "the body did not come in time"}}, 408)

    async def _begin(self, arrived: float, asked: Asked | None) -> Measured | None:
        if asked is None:
            return None
        if self._folder.start is None:
            self._folder.start = arrived
        if asked.stream and asked.n == len(asked.prompts) == 1:
            return Measured(arrived, await self._names(asked))
        return None

    def _request(self, request: Request, content: Any, measured: Measured | None) -> httpx.Request:
        """What is sent to the server: the client's path and headers, byte by byte."""
        stops = OF_THE_CONNECTION | ({b"accept-encoding", b"content-length"} if measured is not None else set())
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in stops]
        if measured is not None:
            headers.append((b"accept-encoding", b"identity"))
        elif not isinstance(content, bytes) and not _has_body(request):
            content = b""
        extensions = {} if measured is None else {"trace": measured.trace}
        return self._client.build_request(
            request.method,
            _target(self._url, request.scope),
            headers=headers,
            content=content or None,
            extensions=extensions,
        )

    async def _answer(self, sent: httpx.Request, measured: Measured | None, asked: Asked | None) -> Response:
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            if measured is not None:
                self._folder.left_out += 1
            return JSONResponse({"error": {"message": f"{self._url}: {error or type(error).__name__}"}}, 502)
        parts = _whole(answer)
        stops = OF_THE_CONNECTION
        if measured is not None and asked is not None and answer.status_code == 200:
            parts, stops = self._measured(answer, measured, asked.include_usage), stops | {b"content-length"}
        elif measured is not None or (answer.status_code == 200 and sent.url.path.endswith(ANSWERS)):
            self._folder.left_out += 1
        found = StreamingResponse(parts, answer.status_code)
        found.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in stops]
        return found

    async def _read(self, path: str, body: bytes) -> Asked | None:
        """What an answer's request asks for; None where it cannot be measured."""
        try:
            document = await read_object(body)
            if path != ANSWERS[0]:
                return await read_chat(document, Pace())
            asked = read_completion(document)
            await checked(asked.prompts[0], asked.prompts[0], LARGEST_MEASURED, Pace())
            return asked
        except RefusedError:
            return None

    async def _names(self, asked: Asked) -> tuple[int, ...]:
        if not self._block_size:
            return ()
        tokens = await tokens_of(asked.prompts[0], self._tokenizer)
        return tuple((await Names(self._block_size, self._secret).add(tokens, Pace())).names)

    async def _measured(self, answer: httpx.Response, measured: Measured, wants_usage: bool) -> AsyncIterator[bytes]:
        """Pass events on as they come, and note when; what the client does not read to its end is left out."""
        splitter, ended = Splitter(), False
        try:
            async for part in answer.aiter_raw():
                now = time.monotonic()
                events = splitter.events(part)
                kept = [event for event in events if self._note(event, measured, now) or wants_usage]
                if wants_usage:
                    yield part
                elif kept:
                    yield b"".join(kept)
            if not wants_usage and (rest := splitter.rest()):
                yield rest
            ended = True
        finally:
            await answer.aclose()
            if ended:
                simulated = answer.headers.get("server") == "windtunnel"
                self._folder.add(measured, ENGINE if simulated else CLIENT)
            else:
                self._folder.left_out += 1

    def _note(self, event: bytes, measured: Measured, now: float) -> bool:
        """Note what an event tells; False for one that only counts tokens, which not every client has asked for."""
        document = data_of(event)
        if document is None:
            return True
        if document.get("usage"):
            measured.usage = document["usage"]
            if not document.get("choices"):
                return False
        if says_something(document):
            measured.events.append(now)
        return True


def _target(url: str, scope: Scope) -> httpx.URL:
    """The server's address with the path and query that the client wrote, as they are."""
    base, query = httpx.URL(url), scope["query_string"]
    path = base.raw_path.rstrip(b"/") + scope["raw_path"]
    return base.copy_with(raw_path=path + (b"?" + query if query else b""))


def _has_body(request: Request) -> bool:
    return "content-length" in request.headers or "transfer-encoding" in request.headers


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body of a request as it comes. Raises TimeoutError where nothing comes, ClientDisconnect for who leaves."""
    stream = aiter(request.stream())
    while True:
        async with asyncio.timeout(BODY_SECONDS):
            piece = await anext(stream, None)
        if piece is None:
            return
        if piece:
            yield piece


async def _read_up_to(pieces: AsyncIterator[bytes], most: int) -> bytes:
    """The whole of a body, or a beginning of more than ``most`` bytes."""
    found, size = [], 0
    async for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > most:
            break
    return b"".join(found)


async def _after(begun: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    async for piece in pieces:
        yield piece


def _with_usage(body: bytes) -> bytes:
    """The body of a streamed request, that also asks for the count of tokens."""
    if b"stream_options" not in body and b"\\u" not in body:
        return body.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'
    document = json.loads(body)
    options = document.get("stream_options") or {}
    return json.dumps(document | {"stream_options": options | {"include_usage": True}}).encode()


async def _whole(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The parts of an answer that is not measured."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def proxying(proxy: Proxy) -> Starlette:
    """The application."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        writing = asyncio.create_task(proxy.keep_on_disk())
        yield
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        await proxy.close()

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", proxy.passed_on, methods=methods)], lifespan=lifespan)
