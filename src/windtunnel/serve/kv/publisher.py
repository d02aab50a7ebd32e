"""Events of KV caches over ZeroMQ, as vLLM's ZmqEventPublisher sends them: topic, number, and a batch in msgpack."""

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from windtunnel.errors import InputError, unknown
from windtunnel.serve.kv.events import Event

END = (-1).to_bytes(8, signed=True)
"""In place of a sequence number, where a replay ends."""
REPLAY_SECONDS = 0.05
"""Between two looks for who asks for a replay."""


@dataclass(frozen=True)
class KVEventsConfig:
    """vLLM's ``--kv-events-config`` (config/kv_events.py)."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
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

    @classmethod
    def read(cls, text: str) -> "KVEventsConfig":
        """From JSON. Raises InputError for what is none, and for keys and values that vLLM does not know."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InputError(f"kv_events_config={text!r}: is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise InputError(f"kv_events_config={text!r}: must be a JSON object")
        kinds = {
            field.name: (str, type(None)) if field.default is None else type(field.default) for field in fields(cls)
        }
        for name, value in given.items():
            if name not in kinds:
                raise unknown("key of kv_events_config", name, list(kinds))
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is int):
                raise InputError(f"kv_events_config: {name}={value!r}: has the wrong type")
        found = cls(**given)
        if found.publisher not in ("zmq", "null"):
            raise InputError(f"kv_events_config: publisher={found.publisher!r}: must be zmq or null")
        return found

    @property
    def on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


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
        try:
            (socket.bind if binds or kind == self._zmq.ROUTER else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
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
