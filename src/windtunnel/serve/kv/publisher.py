"""Events of KV caches over ZeroMQ, as vLLM and SGLang send them (ZmqEventPublisher): topic, number, msgpack."""

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import fields
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.serve.kv.events import Event

END = (-1).to_bytes(8, signed=True)
"""In place of a sequence number, where a replay ends."""
REPLAY_SECONDS = 0.05
"""Between two looks for who asks for a replay."""


@dataclass(frozen=True)
class KVEventsConfig:
    """``--kv-events-config`` of vLLM (config/kv_events.py) and of SGLang (srt/disaggregation/kv_events.py)."""

    enable_kv_cache_events: bool = False
    """vLLM's switch; SGLang publishes where ``publisher`` is zmq."""
    publisher: str | None = None
    """zmq, or null."""
    endpoint: str = "tcp://*:5557"
    """Where events are published; each further replica has the next port."""
    replay_endpoint: str | None = None
    """Where batches that were missed can be asked for, by the number of the first."""
    buffer_steps: int = 10_000
    """Batches that can be asked for."""
    hwm: int = 100_000
    """Batches that wait for a slow subscriber."""
    max_queue_size: int = 100_000
    """Of vLLM's queue; here batches are sent at once."""
    topic: str = ""
    bind: bool | None = None
    """SGLang's: whether to bind the endpoint, in place of what its address says."""
    format: str = "default"
    """SGLang's: default, or dynamo, which differ for adapters and salts alone."""

    @classmethod
    def read(cls, text: str) -> "KVEventsConfig":
        """From JSON. Raises InputError for what is none, and for keys and values that the engines do not know."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InputError(f"kv_events_config={text!r}: is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise InputError(f"kv_events_config={text!r}: must be a JSON object")
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        kinds |= {"publisher": (str, type(None)), "replay_endpoint": (str, type(None)), "bind": (bool, type(None))}
        for name, value in given.items():
            if name not in kinds:
                raise unknown("key of kv_events_config", name, list(kinds))
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is int):
                raise InputError(f"kv_events_config: {name}={value!r}: has the wrong type")
        found = cls(**given)
        for name, words in (("publisher", ("zmq", "null", None)), ("format", ("default", "dynamo"))):
            if getattr(found, name) not in words:
                raise InputError(f"kv_events_config: {name}={given[name]!r}: must be {words[0]} or {words[1]}")
        return found

    def on(self, sglang: bool) -> bool:
        """Whether anything is published, by SGLang or by another engine."""
        if sglang:
            return self.publisher == "zmq"
        return self.enable_kv_cache_events and self.publisher != "null"


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: a port per rank for tcp, a suffix otherwise."""
    before, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp") and port.isdigit():
        return f"{before}{colon}{int(port) + rank if int(port) else 0}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


class Publisher:
    """Sends batches of events, a socket for each rank."""

    def __init__(self, config: KVEventsConfig, ranks: int) -> None:
        """Raises InputError where an address cannot be had, or the packages are missing."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise InputError("kv_events_config: needs the extra: pip install 'windtunnel[kv-events]'") from error
        self._zmq: Any = zmq
        self._pack = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._context: Any = self._zmq.Context()
        self._sent = [0] * ranks
        self._kept = [deque[tuple[int, bytes]](maxlen=config.buffer_steps) for _ in range(ranks)]
        self._bind = config.bind
        self._sockets = [self._open(self._zmq.PUB, at_rank(config.endpoint, rank), config.hwm) for rank in range(ranks)]
        asked = config.replay_endpoint
        most = 2 * (config.buffer_steps + 1)
        self._replays = (
            [self._open(self._zmq.ROUTER, at_rank(asked, rank), most) for rank in range(ranks)] if asked else []
        )

    def _open(self, kind: int, endpoint: str, most: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.SNDHWM, most)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        binds = kind == self._zmq.ROUTER or (binds if self._bind is None else self._bind)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self.close()
            raise InputError(f"kv_events_config: {endpoint}: {error}: choose another endpoint") from error
        return socket

    def publish(self, rank: int, events: list[Event]) -> None:
        """A batch of a rank, at once; where a subscriber is too slow, ZeroMQ drops it."""
        batch = self._pack([time.time(), events, rank])
        number = self._sent[rank]
        self._sent[rank] += 1
        self._kept[rank].append((number, batch))
        self._sockets[rank].send_multipart((self._topic, number.to_bytes(8), batch))

    async def replay(self) -> None:
        """Send again what is asked for, until cancelled."""
        while self._replays:
            await asyncio.sleep(REPLAY_SECONDS)
            for socket, kept in zip(self._replays, self._kept, strict=True):
                with suppress(self._zmq.Again):
                    while True:
                        self._answer(socket, socket.recv_multipart(self._zmq.NOBLOCK), kept)

    def _answer(self, socket: Any, asked: list[bytes], kept: deque[tuple[int, bytes]]) -> None:
        if len(asked) != 3:
            return
        who, _, first = asked
        for number, batch in kept:
            if number >= int.from_bytes(first):
                socket.send_multipart((who, b"", self._topic, number.to_bytes(8), batch))
        socket.send_multipart((who, b"", b"", END, b""))

    def close(self) -> None:
        """The end."""
        self._context.destroy(linger=0)
