"""A client that sends a workload to an OpenAI-compatible server, and measures what comes back.

Prompts are lists of tokens, so that their lengths are exact whatever tokenizer the server has. Tokens are drawn by the
seed, and equal blocks of prompts get equal ones, so that prefix caches find what they would find.
"""

import asyncio
import json
import os
import time
from dataclasses import field
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.metrics import Distribution, RequestMetrics, Window, clean, good_requests, trimmed_window
from windtunnel.workload import Workload

TOKENS = (1000, 20_000)
"""Tokens are drawn from these numbers: words in every vocabulary, and special tokens in none that is common."""
KEY = "OPENAI_API_KEY"
"""Environment variable whose value is sent as the key, as OpenAI's own clients send it."""
TALK = httpx.Timeout(None, connect=10.0)


@dataclass
class Answer:
    """What the client saw of one request, seconds of the client's clock."""

    sent: float
    events: list[float] = field(default_factory=list)
    """When text came."""
    output_tokens: int = 0
    failure: str = ""


class Prompts:
    """The prompts of a workload, as tokens."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed

    def tokens(self, row: int) -> list[int]:
        """The prompt of a request: what it shares with others, and its own. Answers of others are drawn: what the
        server answers is not known as tokens."""
        load, found = self._workload, list[int]()
        if load.hash_ids is not None:
            offsets, values = load.hash_ids
            for name in values[offsets[row] : offsets[row + 1]].tolist():
                found += self._drawn(load.hash_block_size, 1, name)
        path = [row]
        while load.begins is not None and load.begins[0][path[-1]] >= 0:
            path.append(int(load.begins[0][path[-1]]))
        for this, following in pairwise([*reversed(path), -1]):
            count = int(load.prompt_tokens[this])
            found = (found + self._drawn(max(count - len(found), 0), 0, this))[:count]
            if following >= 0 and load.begins is not None:
                answer = self._drawn(int(load.output_tokens[this]), 2, this)
                found = (found + answer)[: int(load.begins[1][following])]
        return found

    def _drawn(self, count: int, kind: int, number: int) -> list[int]:
        rng = np.random.default_rng([self._seed, kind, number & 0xFFFFFFFFFFFFFFFF])
        tokens: list[int] = rng.integers(*TOKENS, size=count).tolist()
        return tokens


class Client:
    """Sends a workload in real time: each request when it is due, in a closed loop when there is a place."""

    def __init__(self, url: str, model: str, workload: Workload, seed: int) -> None:
        self._url, self._model, self._workload = f"{url}/v1/completions", model, workload
        self._prompts = Prompts(workload, seed)
        self.answers: dict[int, Answer] = {}

    async def send_all(self) -> None:
        """Send every request, and wait for every answer. Raises InputError for lanes, which are not kept."""
        load = self._workload
        if load.lanes:
            raise InputError(f"lanes={load.lanes}: are not kept when a load is sent: use max_concurrency")
        offsets, parents = (part.tolist() for part in load.waits)
        self._left = [last - first for first, last in pairwise(offsets)]
        self._children: list[list[int]] = [[] for _ in range(len(load))]
        for row, (first, last) in enumerate(pairwise(offsets)):
            for parent in parents[first:last]:
                self._children[parent].append(row)
        room = asyncio.Semaphore(load.max_concurrency or len(load))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(timeout=TALK, limits=limits, headers=headers()) as http,
            asyncio.TaskGroup() as all_,
        ):
            begun = time.monotonic()
            for row in np.flatnonzero(~np.isnan(load.arrival)).tolist():
                body = self._body(row)
                await asyncio.sleep(max(begun + float(load.arrival[row]) - time.monotonic(), 0.0))
                await room.acquire()
                all_.create_task(self._go_on(http, row, body, room, all_))

    async def _go_on(
        self, http: httpx.AsyncClient, row: int, body: bytes, room: asyncio.Semaphore, all_: asyncio.TaskGroup
    ) -> None:
        """A request, and those that it is the last one to be waited for of."""
        try:
            await self._ask(http, row, body)
        finally:
            room.release()
        for child in self._children[row]:
            self._left[child] -= 1
            if self._left[child] == 0:
                all_.create_task(self._follow(http, child, room, all_))

    async def _follow(
        self, http: httpx.AsyncClient, row: int, room: asyncio.Semaphore, all_: asyncio.TaskGroup
    ) -> None:
        """A request that waited for others, after its think time."""
        body = self._body(row)
        await asyncio.sleep(float(self._workload.think_time[row]))
        await room.acquire()
        await self._go_on(http, row, body, room, all_)

    def _body(self, row: int) -> bytes:
        output = int(self._workload.output_tokens[row])
        body = {
            "model": self._model,
            "prompt": self._prompts.tokens(row),
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._workload.priority[row]:
            body["priority"] = int(self._workload.priority[row])
        return json.dumps(body).encode()

    async def _ask(self, http: httpx.AsyncClient, row: int, body: bytes) -> None:
        answer = self.answers[row] = Answer(time.monotonic())
        content = {"content-type": "application/json"}
        try:
            async with http.stream("POST", self._url, content=body, headers=content) as response:
                if response.status_code != 200:
                    answer.failure = f"{response.status_code} {(await response.aread()).decode(errors='replace')[:300]}"
                    return
                async for line in response.aiter_lines():
                    _note(answer, line)
        except httpx.HTTPError as error:
            answer.failure = str(error) or type(error).__name__
        if not answer.failure and not answer.events:
            answer.failure = "no text"


def _note(answer: Answer, line: str) -> None:
    """What a line of the stream tells."""
    now = time.monotonic()
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    event = json.loads(line[5:])
    if usage := event.get("usage"):
        answer.output_tokens = int(usage.get("completion_tokens") or 0)
    if "error" in event:
        answer.failure = str(event["error"])[:300]
    if any(choice.get("text") for choice in event.get("choices", ())):
        answer.events.append(now)


def headers() -> dict[str, str]:
    """The key, where there is one."""
    key = os.environ.get(KEY)
    return {"authorization": f"Bearer {key}"} if key else {}


def served_model(url: str, wanted: str | None = None) -> str:
    """The name that a server serves this model under, or the first of its list.

    Raises InputError where no server answers, or it has no such model.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(), timeout=10.0)
        answer.raise_for_status()
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise InputError(f"endpoint {url!r}: no OpenAI-compatible server answers ({error})") from error
    if not names or (wanted is not None and wanted not in names):
        raise InputError(f"endpoint {url!r}: serves {', '.join(names) or 'nothing'}, not {wanted or 'a model'}")
    return wanted or names[0]


def measured(
    url: str, model: str, workload: Workload, seed: int, slo: SLO, *, exclude_warmup: bool = False
) -> dict[str, Any]:
    """Send a workload to a server, and say what its answers took, with the keys of ``windtunnel run --json``.

    Raises InputError if no request was answered.
    """
    client = Client(url, model, workload, seed)
    asyncio.run(client.send_all())
    answers = [client.answers[row] for row in sorted(client.answers)]
    if all(answer.failure for answer in answers):
        raise InputError(f"endpoint {url!r}: no request was answered: {answers[0].failure}")
    return _document(answers, slo, exclude_warmup)


def _document(answers: list[Answer], slo: SLO, exclude_warmup: bool) -> dict[str, Any]:
    """Statistics of what the client saw; windows and definitions are those of simulated runs."""
    start = min(answer.sent for answer in answers)
    good = [answer for answer in answers if not answer.failure]
    sent, first, last = (
        np.array(times) - start
        for times in zip(*((one.sent, one.events[0], one.events[-1]) for one in good), strict=True)
    )
    tokens = np.array([answer.output_tokens or len(answer.events) for answer in good])
    trimmed = trimmed_window(np.array([answer.sent - start for answer in answers])) if exclude_warmup else None
    window = trimmed or Window(0.0, float(last.max()), False)
    gaps = [(b - start, b - a) for answer in good for a, b in pairwise(answer.events)]
    ends, lengths = np.array(gaps).reshape(-1, 2).T
    metrics = _metrics(sent, first, last, tokens)
    kept, ended = window.holds(sent), window.holds(last)
    found = {name: Distribution(getattr(metrics, name)[kept]) for name in ("ttft", "tpot", "e2el")}
    found["itl"] = Distribution(lengths[window.holds(ends)])
    fine = good_requests(metrics, np.ones(len(good), dtype=np.bool_), slo)
    arrived = sum(bool(window.holds(np.array([answer.sent - start]))[0]) for answer in answers)
    emitted = int(window.holds(ends).sum() + window.holds(first).sum()) if window.trimmed else int(tokens.sum())
    document: dict[str, Any] = clean(
        {
            "requests": {"total": arrived, "finished": int(kept.sum()), "failed": arrived - int(kept.sum())},
            **{name: values.statistics() for name, values in found.items()},
            "request_throughput": _rate(int(ended.sum()), window),
            "output_throughput": _rate(emitted, window),
            "goodput": np.nan if fine is None else _rate(int((fine & ended).sum()), window),
            "attainment": np.nan if fine is None or not arrived else int((fine & kept).sum()) / arrived,
            "warnings": list(dict.fromkeys(answer.failure for answer in answers if answer.failure))[:5],
        }
    )
    return document


def _metrics(
    sent: NDArray[np.float64], first: NDArray[np.float64], last: NDArray[np.float64], tokens: NDArray[np.int64]
) -> RequestMetrics:
    """As ``request_metrics``; what happens inside the server is not seen."""
    unseen = np.full(len(sent), np.nan)
    between = np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan)
    whole = last - sent
    return RequestMetrics(unseen, unseen, first - sent, between, whole, whole / np.maximum(tokens, 1))


def _rate(amount: int, window: Window) -> float:
    return amount / window.seconds if window.seconds > 0 else float("nan")
