"""A proxy in front of a real server: passes everything on, and writes down when streamed answers came.

What it writes is a measured run, as ``windtunnel validate`` and ``calibrate`` read it. Of prompts it keeps the number
of their tokens, which the server tells, and a name for each block of text, made with a secret that is thrown away.
"""

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from windtunnel.errors import InputError
from windtunnel.files import write_whole
from windtunnel.serve.connection import came
from windtunnel.serve.requests import Asked, RefusedError, read_chat, read_completion, read_object
from windtunnel.serve.tokens import Tokenizer, block_names, chat_text

ANSWERS = ("/v1/completions", "/v1/chat/completions")
OF_THE_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade", "host"),
        *("transfer-encoding", "content-length", "accept-encoding"),
    )
)
"""Headers that are of one connection, and not passed on."""
CLIENT, ENGINE = "client: windtunnel proxy", "engine"
"""Whose clock the latencies have: a real server's path to the client counts; a simulated one's are the engine's."""


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
        if (folder / "requests.jsonl").exists():
            raise InputError(f"output {str(folder)!r}: holds a run already: choose another folder")
        self._write_head(ENGINE)
        self._file = (folder / "requests.jsonl").open("w", encoding="utf-8")

    def _write_head(self, clock: str) -> None:
        self._clock = clock
        document = self._head | {"clock": clock}
        if self.left_out:
            document["left_out"] = self.left_out
        write_whole(self._path / "run.json", [json.dumps(document, indent=1) + "\n"])

    def add(self, measured: Measured, clock: str) -> None:
        """An answer has ended."""
        assert self.start is not None
        row = measured.row(self.start, int(self._head.get("hash_block_size", 0)))
        if row is None:
            self.left_out += 1
            return
        self.recorded += 1
        self._clock = clock
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write how the run ended."""
        self._file.close()
        self._write_head(self._clock)


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

    async def close(self) -> None:
        """The end."""
        await self._client.aclose()
        self._folder.close()

    async def passed_on(self, request: Request) -> Response:
        """Any request. One whose streamed answer can be measured is."""
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        arrived = came(request.scope) or time.monotonic()
        asked = self._read(request.url.path, body) if request.method == "POST" else None
        measured = None
        if asked is not None:
            if self._folder.start is None:
                self._folder.start = arrived
            if asked.stream and asked.n == len(asked.prompts) == 1:
                measured = Measured(arrived, self._names(asked))
                body = _with_usage(body)
            else:
                self._folder.left_out += 1
        headers = [(k, v) for k, v in request.headers.items() if k not in OF_THE_CONNECTION]
        url = f"{self._url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        sent = self._client.build_request(
            request.method,
            url,
            headers=[*headers, ("accept-encoding", "identity")],
            content=body,
            extensions={} if measured is None else {"trace": measured.trace},
        )
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"{self._url}: {error or type(error).__name__}"}}, 502)
        kept = {k: v for k, v in answer.headers.items() if k not in OF_THE_CONNECTION}
        if measured is None or asked is None or answer.status_code != 200:
            if measured is not None:
                self._folder.left_out += 1
            return StreamingResponse(_whole(answer), answer.status_code, kept)
        return StreamingResponse(self._measured(answer, measured, asked.include_usage), 200, kept)

    def _read(self, path: str, body: bytes) -> Asked | None:
        """What an answer's request asks for; None for any other, and for one that the server will refuse."""
        if path not in ANSWERS:
            return None
        try:
            document = read_object(body) | {"logprobs": None, "top_logprobs": None}
            return read_completion(document) if path == ANSWERS[0] else read_chat(document, chat_text)
        except RefusedError:
            return None

    def _names(self, asked: Asked) -> tuple[int, ...]:
        if not self._block_size:
            return ()
        prompt = asked.prompts[0]
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return block_names(tokens, self._block_size, self._secret)

    async def _measured(self, answer: httpx.Response, measured: Measured, wants_usage: bool) -> AsyncIterator[bytes]:
        """Pass events on as they come, and note when; what the client does not read to its end is left out."""
        rest, ended = b"", False
        try:
            async for part in answer.aiter_raw():
                now = time.monotonic()
                *events, rest = (rest + part).split(b"\n\n")
                passed = [event for event in events if self._note(event, measured, now) or wants_usage]
                if passed:
                    yield b"".join(event + b"\n\n" for event in passed)
            if rest:
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
        if b'"usage":' in event and b'"usage":null' not in event and b'"usage": null' not in event:
            with suppress(ValueError):
                document = json.loads(event.removeprefix(b"data:"))
                measured.usage = document.get("usage") or measured.usage
                if not document.get("choices"):
                    return False
        spaced = event.replace(b'": ', b'":')
        if b'"content":""' not in spaced and (b'"content":"' in spaced or b'"text":"' in spaced):
            measured.events.append(now)
        return True


def _with_usage(body: bytes) -> bytes:
    """The body of a streamed request, that asks for the count of tokens too."""
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
        yield
        await proxy.close()

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", proxy.passed_on, methods=methods)], lifespan=lifespan)
