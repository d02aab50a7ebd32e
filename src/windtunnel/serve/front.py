"""The server's routes: OpenAI's completions and chat completions, and what vLLM has in addition."""

import asyncio
import hmac
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from windtunnel.dataclass import dataclass
from windtunnel.errors import unknown
from windtunnel.serve.choices import Choice
from windtunnel.serve.connection import Caller, Gate
from windtunnel.serve.engine import ABORT, KEEP, MEMORY, WAIT, Engine
from windtunnel.serve.kv.events import Ledger
from windtunnel.serve.kv.texts import Names, Served, Texts
from windtunnel.serve.log import Log
from windtunnel.serve.meters import Meters
from windtunnel.serve.openai.answers import Text, Wording, text_of
from windtunnel.serve.openai.documents import read_object
from windtunnel.serve.openai.openapi import document
from windtunnel.serve.openai.requests import (
    Asked,
    RefusedError,
    are_tokens,
    check_model,
    checked,
    read_chat,
    read_completion,
)
from windtunnel.serve.openai.sampling import check_sampling
from windtunnel.serve.openai.shapes import Shape, shape_of
from windtunnel.serve.pace import Pace
from windtunnel.serve.streaming import EventStream, WholeAnswer
from windtunnel.serve.tokens import (
    BY_NUMBER,
    BytesRule,
    EchoedWords,
    FileTokenizer,
    SeededWords,
    Tokenizer,
    tokens_of,
)
from windtunnel.simulate.live import Arrival
from windtunnel.version import __version__

Arrivals = list[tuple[Arrival, Text, int]]
"""What each choice of an answer asks of the engines and will say, and which prompt it continues."""
UNLIMITED_ANSWER = 256
"""Tokens of an answer that has no limit, where no mean length is given."""


@dataclass(frozen=True)
class Manners:
    """How the server behaves towards its clients."""

    model: str
    """The name that it serves the model under."""
    tokenizer: Tokenizer = field(default_factory=BytesRule)
    seed: int = 0
    """Of the answers' words and lengths, and of the names of prompts' blocks."""
    echo: bool = False
    """Answers repeat their prompts, instead of words that the seed draws."""
    answer_tokens: int | None = None
    """Mean of the answers' drawn lengths; None: every answer goes on to its limit."""
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_in_flight: int = 4096
    """Requests beyond these are turned away (429)."""
    body_seconds: float = 30.0
    """In which a request's body must have come."""
    enable_sleep_mode: bool = False
    """It has vLLM's /sleep, /wake_up, /is_sleeping and /release_kv_cache_memory."""
    wake_up_seconds: float = 0.0
    """Simulated ones in which weights wake up."""


class Front:
    """Answers requests with the tokens of an engine."""

    def __init__(
        self, engine: Engine, manners: Manners, meters: Meters, log: Log, ledger: Ledger | None = None
    ) -> None:
        self.engine, self.manners, self.meters, self.log = engine, manners, meters, log
        self._secret = manners.seed.to_bytes(16, signed=True)
        self._texts = Texts(engine.deployment.hash_block_size, self._secret, ledger)
        self._numbers = itertools.count()
        self._began = int(time.time())
        self.open = 0
        """Requests for answers that are being read or answered."""
        self._to_come = 0
        """Choices for which there is room, and which the engines do not have yet."""

    # Answers.

    async def completions(self, caller: Caller) -> None:
        """/v1/completions."""
        await self._answer(caller, False)

    async def chat(self, caller: Caller) -> None:
        """/v1/chat/completions."""
        await self._answer(caller, True)

    async def _answer(self, caller: Caller, chat: bool) -> None:
        text = await self._body(caller)
        await self.engine.gate.passed()
        body, pace = await read_object(text), Pace()
        check_model(body, self.manners.model)
        check_sampling(body)
        asked = await read_chat(body, pace) if chat else read_completion(body)
        shape = shape_of(body) if chat else None
        name = f"{'chatcmpl' if chat else 'cmpl'}-{next(self._numbers):08x}"
        wording = Wording(asked, name, self.manners.model, int(time.time()), shape.tool if shape else None)
        answer = (EventStream if asked.stream else WholeAnswer)(self.engine, wording, caller)
        self._check_room(asked)
        arrivals = await self._arrivals(asked, wording, shape, pace)
        choices = await self._submit(arrivals, answer.tell, caller.came, asked.stream)
        try:
            await answer.send(choices)
        finally:
            self.log.answer(name, caller, [choice.stream for choice in choices])

    def _check_room(self, asked: Asked) -> None:
        """Raise RefusedError for what has more choices than can ever be in flight."""
        wanted, most = len(asked.prompts) * asked.n, self.manners.max_in_flight
        if wanted > most:
            raise RefusedError(f"{wanted} answers in one request: must be at most {most}")

    async def _arrivals(self, asked: Asked, wording: Wording, shape: Shape | None, pace: Pace) -> Arrivals:
        found: Arrivals = []
        longest, texts = self.engine.deployment.longest, self._texts
        for number, one in enumerate(asked.prompts):
            prompt = await checked(one, asked.prompts[0], longest, pace)
            names, rest = await self._prompt(prompt, asked, pace)
            await names.add(await tokens_of(rest, self.manners.tokenizer), pace)
            count = max(names.tokens, 1)
            limit = self._limit(count, asked)
            said = prompt if isinstance(prompt, str) else await written(prompt, " ", pace)
            for k in range(asked.n):
                await pace.spend(64 + (len(said) >> 7))
                drawn = self._drawn(said, asked.seed, k, limit)
                text = await text_of(self._words(said, asked.seed, k), drawn, limit, asked, shape)
                told = texts.ledger and self._spoken(text)
                answer = texts.answered(names, text.output_tokens - (text.last is not None), told or ())
                if isinstance(prompt, str):
                    served = Served(answer, wording.in_prompts(len(found), text.whole), text.held)
                    await texts.learn(prompt, served, pace)
                lengths = count, text.output_tokens, limit
                arrival = Arrival(*lengths, asked.priority, tuple(answer.names), asked.session)
                found.append((arrival, text, number))
        return found

    async def _prompt(self, prompt: str | Sequence[int], asked: Asked, pace: Pace) -> tuple[Names, str | Sequence[int]]:
        """What of a prompt has been served before, and what follows. Raises RefusedError for too long a text."""
        if not isinstance(prompt, str):
            return self._texts.nothing(), prompt
        names, begun = await self._texts.read(prompt, asked.places, pace)
        rest = prompt[begun:]
        self._limit(max(names.tokens + self.manners.tokenizer.least(rest), 1), asked)
        await pace.spend(len(rest) >> 5)
        return names, rest

    def _spoken(self, text: Text) -> Sequence[int]:
        """The tokens of an answer: each word's first one."""
        if text.drawn is None:
            return (*islice(chain(self.manners.tokenizer.encode(text.whole()), repeat(0)), text.output_tokens),)
        return [self._spelled(number) for number in text.drawn.numbers(0, text.output_tokens)]

    @lru_cache(maxsize=256)  # noqa: B019 - the front lives as long as the process
    def _spelled(self, number: int) -> int:
        return int(self.manners.tokenizer.encode(BY_NUMBER[number])[0])

    def _limit(self, prompt_tokens: int, asked: Asked) -> int:
        """Tokens that the answer may have. Raises RefusedError where prompt and limit do not fit."""
        room = self.engine.deployment.longest - prompt_tokens
        limit = asked.max_tokens
        if limit is None:
            limit = min(max(room, 1), UNLIMITED_ANSWER if self.manners.answer_tokens is None else room)
        if reason := self.engine.deployment.refusal(prompt_tokens, limit):
            raise RefusedError(f"the request has {reason}")
        return limit

    def _key(self, prompt: str, seed: int | None, k: int) -> tuple[int, bytes]:
        """What the words of a choice depend on."""
        return self.manners.seed + (seed or 0), prompt.encode("utf-8", "surrogatepass") + bytes([k])

    def _words(self, prompt: str, seed: int | None, k: int) -> Iterable[str]:
        return EchoedWords(prompt) if self.manners.echo else SeededWords(*self._key(prompt, seed, k))

    def _drawn(self, prompt: str, seed: int | None, k: int, limit: int) -> int:
        """Tokens after which an answer ends by itself: geometric, so that it is never due."""
        if self.manners.answer_tokens is None:
            return limit
        own, text = self._key(prompt, seed, k)
        rng = np.random.default_rng([own & 0xFFFFFFFF, *text[-64:], len(text)])
        return int(rng.geometric(1.0 / self.manners.answer_tokens))

    async def _submit(
        self, arrivals: Arrivals, told: Callable[[], None], came: float | None, eager: bool
    ) -> list[Choice]:
        """All choices of an answer go to the engines, a few in each turn, or none where there is no room for all."""
        most, engine, choices, held = self.manners.max_in_flight, self.engine, list[Choice](), 0.0
        if self.engine.in_flight + self._to_come + len(arrivals) > most:
            self.meters.turned_away += 1
            raise RefusedError(f"{most} requests are in flight: try again", 429, "RateLimitError", retry_after=1)
        self._to_come += len(arrivals)
        try:
            for arrival, text, number in arrivals:
                if choices and len(choices) % Gate.FEW == 0:
                    await asyncio.sleep(0)
                if not engine.awake.is_set():
                    held, came = await self._held(came), None
                stream = engine.submit(arrival, told, came, text.finish_reason, eager, held)
                choices.append(Choice(text, stream, number, arrival.prompt_tokens))
                self._to_come -= 1
        except BaseException:
            for choice in choices:
                self.engine.leave(choice.stream)
            raise
        finally:
            self._to_come -= len(arrivals) - len(choices)
        return choices

    async def _held(self, came: float | None) -> float:
        """Wait until the engines are awake: simulated seconds since a request came."""
        engine = self.engine
        began = engine.clock.now() if came is None else engine.clock.at(came)
        while not engine.awake.is_set():
            await engine.awake.wait()
        return engine.clock.now() - began

    async def _body(self, caller: Caller) -> bytes:
        return await caller.body(self.manners.max_body_bytes, self.manners.body_seconds)

    # What else it has.

    async def models(self, _: Request) -> Response:
        """/v1/models."""
        card = {"id": self.manners.model, "object": "model", "created": self._began, "owned_by": "windtunnel"}
        longest = self.engine.deployment.longest
        return JSONResponse({"object": "list", "data": [card | {"root": card["id"], "max_model_len": longest}]})

    async def tokenize(self, caller: Caller) -> None:
        """/tokenize."""
        body = await read_object(await self._body(caller))
        check_model(body, self.manners.model)
        asked = await read_chat(body, Pace()) if "messages" in body else read_completion(body)
        if len(asked.prompts) > 1 or not isinstance(asked.prompts[0], str):
            raise RefusedError("prompt: must be one text")
        if (least := self.manners.tokenizer.least(asked.prompts[0])) > self.engine.deployment.longest:
            raise RefusedError(f"prompt: {least} tokens or more: must be at most max_model_len")
        tokens = await tokens_of(asked.prompts[0], self.manners.tokenizer)
        head = f'"count":{len(tokens)},"max_model_len":{self.engine.deployment.longest}'
        answer = f'{{{head},"tokens":[{await written(tokens, ",", Pace())}]}}'
        await Response(answer, media_type="application/json")(caller.scope, caller.receive, caller.send)

    async def detokenize(self, caller: Caller) -> None:
        """/detokenize. Raises RefusedError where the tokenizer only counts."""
        body = await read_object(await self._body(caller))
        check_model(body, self.manners.model)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not (await are_tokens(tokens, Pace())):
            raise RefusedError("tokens: must be a list of tokens")
        if len(tokens) > self.engine.deployment.longest:
            raise RefusedError(f"tokens: more than the {self.engine.deployment.longest} of max_model_len")
        if not isinstance(self.manners.tokenizer, FileTokenizer):
            raise RefusedError("/detokenize: needs a tokenizer: start the server with --tokenizer FILE")
        answer = JSONResponse({"prompt": self.manners.tokenizer.decode(tokens)})
        await answer(caller.scope, caller.receive, caller.send)

    async def refuse(self, request: Request) -> Response:
        """What vLLM has and a simulated model has not."""
        raise RefusedError(f"{request.url.path}: not simulated: only completions and chat completions are")

    async def health(self, _: Request) -> Response:
        """/health, /ping."""
        return Response(status_code=503 if self.engine.failure else 200)

    async def sleep(self, request: Request) -> Response:
        """/sleep. Raises RefusedError for what vLLM does not know."""
        asked = _parameters(request, {"level": ("0", "1", "2"), "mode": (ABORT, WAIT, KEEP)})
        level, mode = (asked.get(name, [default])[-1] for name, default in (("level", "1"), ("mode", ABORT)))
        await self.engine.sleep(int(level), mode)
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def release_kv_cache(self, request: Request) -> Response:
        """/release_kv_cache_memory. Raises RefusedError where the engines do."""
        _parameters(request, {})
        await self.engine.release_kv_cache()
        return JSONResponse({"status": "kv_cache_released"})

    async def wake_up(self, request: Request) -> Response:
        """/wake_up. Raises RefusedError for tags that vLLM does not have."""
        tags = _parameters(request, {"tags": (*MEMORY, "scheduling")}).get("tags")
        awake = await self.engine.wake_up(tags or MEMORY, self.manners.wake_up_seconds)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, _: Request) -> Response:
        """/is_sleeping."""
        return JSONResponse({"is_sleeping": not self.engine.awake.is_set()})

    async def version(self, _: Request) -> Response:
        """/version: of the engine that is simulated, and of windtunnel."""
        return JSONResponse(
            {"version": self.engine.deployment.engine_version.partition("-")[2], "windtunnel": __version__}
        )

    async def load(self, _: Request) -> Response:
        """/load."""
        return JSONResponse({"server_load": self.open})

    async def server_info(self, request: Request) -> Response:
        """/server_info: the settings as text or JSON, as vLLM's. Raises RefusedError for another format."""
        asked = _parameters(request, {"config_format": ("text", "json")})
        found = {"model": self.manners.model, "cache_config": self.engine.deployment.cache_config()}
        config: Any = found if asked.get("config_format", ["text"])[-1] == "json" else str(found)
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def metrics(self, _: Request) -> Response:
        """/metrics."""
        return Response(self.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        """/openapi.json."""
        return JSONResponse(document(self.manners.enable_sleep_mode))


def _parameters(request: Request, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """What stands after the path. Raises RefusedError for names and values that are not known."""
    found = dict[str, list[str]]()
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise RefusedError(str(unknown("parameter", name, list(known))))
        if value not in known[name]:
            raise RefusedError(f"{name}={value!r}: must be {', '.join(known[name][:-1])} or {known[name][-1]}")
        found.setdefault(name, []).append(value)
    return found


async def written(tokens: Sequence[int], between: str, pace: Pace) -> str:
    """Tokens as text."""
    parts = []
    for begin in range(0, len(tokens), 1024):
        await pace.spend(512)
        parts.append(between.join(map(str, tokens[begin : begin + 1024])))
    return between.join(parts)


def error(refused: RefusedError) -> Response:
    """An error as vLLM's server writes it."""
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after else {}
    detail = {"message": refused.message, "type": refused.kind, "param": None, "code": refused.status}
    return JSONResponse({"error": detail}, refused.status, headers=headers)


class Keys:
    """Of which clients must send one, if there are any, as vLLM guards what stands under /v1."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._wanted = [f"Bearer {key}".encode() for key in keys]

    def fit(self, scope: Scope) -> bool:
        """Whether a request may pass."""
        if not self._wanted:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return any(hmac.compare_digest(given, wanted) for wanted in self._wanted)

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers only those that may pass."""

        async def checked(request: Request) -> Response:
            return await endpoint(request) if self.fit(request.scope) else unauthorized()

        return checked


def unauthorized() -> Response:
    """To who sends no key."""
    return JSONResponse({"error": "Unauthorized"}, 401, headers={"www-authenticate": "Bearer"})


class Posted:
    """A path whose requests have bodies, as an ASGI application."""

    def __init__(self, answer: Callable[[Caller], Awaitable[None]], keys: Keys, front: Front) -> None:
        self._answer, self._keys, self._front = answer, keys, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one."""
        caller, began, status = Caller(scope, receive, send), time.monotonic(), 0
        self._front.open += 1
        try:
            if self._keys.fit(scope):
                await self._answer(caller)
            else:
                status = 401
                await unauthorized()(scope, receive, send)
        except RefusedError as refused:
            status = refused.status
            await error(refused)(scope, receive, send)
        except ClientDisconnect:
            status = 499
        finally:
            self._front.open -= 1
            seconds = time.monotonic() - began
            path, sizes = scope["path"], (caller.asked_bytes, caller.answered_bytes)
            self._front.meters.web(path, status or caller.status or 499, seconds, *sizes)


PREFLIGHT = {"access-control-allow-methods": "*", "access-control-allow-headers": "*", "access-control-max-age": "600"}
"""What browsers ask before a page of another site may call: vLLM lets every one."""


class Application(Starlette):
    """The server. Answers made of tokens go past Starlette's layers, which cost more than to simulate them."""

    def __init__(self, answers: Mapping[str, Posted], routes: list[Route], **settings: Any) -> None:
        own = [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]
        super().__init__(routes=[*own, *routes], **settings)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it."""
        if scope.get("method") == "OPTIONS":
            await Response(headers=PREFLIGHT)(scope, receive, send)
            return
        answer = self._answers.get(scope["path"]) if scope.get("method") == "POST" else None
        await (super().__call__ if answer is None else answer)(scope, receive, send)


def application(front: Front, lifespan: Any = None) -> Starlette:
    """The server as an ASGI application."""

    async def refused(_: Request, exception: Exception) -> Response:
        assert isinstance(exception, RefusedError)
        return error(exception)

    async def plain(_: Request, exception: Exception) -> Response:
        assert isinstance(exception, HTTPException)
        response = error(RefusedError(str(exception.detail), exception.status_code, "HTTPException"))
        response.headers.update(exception.headers or {})
        return response

    keys = Keys(front.manners.api_keys)
    answers = {
        "/v1/completions": Posted(front.completions, keys, front),
        "/v1/chat/completions": Posted(front.chat, keys, front),
        "/tokenize": Posted(front.tokenize, Keys(()), front),
        "/detokenize": Posted(front.detokenize, Keys(()), front),
    }
    routes = [
        Route("/v1/models", keys.guarded(front.models)),
        *(Route(path, keys.guarded(front.refuse), methods=["POST"]) for path in ("/v1/embeddings", "/v1/responses")),
        Route("/health", front.health),
        Route("/ping", front.health),
        Route("/load", front.load),
        Route("/version", front.version),
        Route("/server_info", front.server_info),
        Route("/metrics", front.metrics),
        Route("/openapi.json", front.openapi),
    ]
    if front.manners.enable_sleep_mode:
        routes += [
            Route("/sleep", front.sleep, methods=["POST"]),
            Route("/wake_up", front.wake_up, methods=["POST"]),
            Route("/is_sleeping", front.is_sleeping),
            Route("/release_kv_cache_memory", front.release_kv_cache, methods=["POST"]),
        ]
    handlers: dict[Any, Any] = {RefusedError: refused, HTTPException: plain}
    return Application(answers, routes, exception_handlers=handlers, lifespan=lifespan)
