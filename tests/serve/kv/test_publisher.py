"""What is published where, on sockets that only remember; and which tokens events have, block by block."""

import time
from collections import deque
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.serve.kv import events
from windtunnel.serve.kv.events import Ledger
from windtunnel.serve.kv.publisher import KVEventsConfig, Publisher, at_rank

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class Socket:
    """Remembers what is asked of it."""

    def __init__(self, kind: int) -> None:
        self.kind, self.options, self.place, self.sent = kind, dict[int, int](), ("", ""), list[Any]()

    def setsockopt(self, option: int, value: int) -> None:
        self.options[option] = value

    def bind(self, endpoint: str) -> None:
        self.place = "bind", endpoint

    def connect(self, endpoint: str) -> None:
        self.place = "connect", endpoint

    def send_multipart(self, parts: Any) -> None:
        self.sent.append(parts)


class Context:
    def __init__(self) -> None:
        self.sockets, self.linger = list[Socket](), -1

    def socket(self, kind: int) -> Socket:
        self.sockets.append(Socket(kind))
        return self.sockets[-1]

    def destroy(self, linger: int) -> None:
        self.linger = linger


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    found = Context()
    monkeypatch.setattr(zmq, "Context", lambda: found)
    return found


def test_what_nobody_says_is_as_the_engines_have_it() -> None:
    """vLLM 0.33, config/kv_events.py; the last two are SGLang's."""
    assert vars(KVEventsConfig.read("{}")) == {
        "enable_kv_cache_events": False, "publisher": None, "endpoint": "tcp://*:5557", "replay_endpoint": None,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "", "bind": None,
        "format": "default",
    }  # fmt: skip
    for wrong in (
        '{"hwm": true}',
        '{"hwm": "1"}',
        '{"enable_kv_cache_events": 1}',
        '{"topic": null}',
        '{"bind": "yes"}',
    ):
        with pytest.raises(InputError, match="has the wrong type"):
            KVEventsConfig.read(wrong)
    assert KVEventsConfig.read('{"hwm": 5, "bind": false, "publisher": null}') == KVEventsConfig(hwm=5, bind=False)


def test_addresses_of_ranks() -> None:
    for endpoint, rank, place in (
        *(("tcp://*:5557", 0, "tcp://*:5557"), ("tcp://a:9", 3, "tcp://a:12"), ("tcp://*:0", 2, "tcp://*:0")),
        *(("ipc:///a", 0, "ipc:///a"), ("ipc:///a:7", 2, "ipc:///a:7_dp2"), ("tcp://a:x", 1, "tcp://a:x_dp1")),
    ):
        assert at_rank(endpoint, rank) == place


@pytest.mark.parametrize(
    ("endpoint", "bind", "how"),
    [
        *(("tcp://*:5557", None, "bind"), ("tcp://[::]:5557", None, "bind"), ("ipc://here", None, "bind")),
        *(("inproc://here", None, "bind"), ("tcp://host:5557", None, "connect"), ("tcp://*:5557", False, "connect")),
        ("tcp://host:5557", True, "bind"),
    ],
)
def test_who_binds(endpoint: str, bind: bool | None, how: str, context: Context) -> None:
    replay = "tcp://host:6000"  # who is asked for what was missed always binds
    Publisher(KVEventsConfig(endpoint=endpoint, bind=bind, hwm=7, replay_endpoint=replay, buffer_steps=9), 2).close()
    first, second, *replays = context.sockets
    assert [(one.kind, *one.place) for one in context.sockets] == [
        *((zmq.PUB, how, endpoint), (zmq.PUB, how, at_rank(endpoint, 1))),
        *((zmq.ROUTER, "bind", "tcp://host:6000"), (zmq.ROUTER, "bind", "tcp://host:6001")),
    ]
    assert first.options == second.options == {zmq.LINGER: 0, zmq.SNDHWM: 7} and context.linger == 0
    assert replays[0].options == {zmq.LINGER: 0, zmq.SNDHWM: 20}  # each batch and the end of two replays
    Publisher(KVEventsConfig(endpoint=endpoint), 1)
    assert len(context.sockets) == 5  # and no replay where none was asked for


def test_batches_are_numbered_by_rank_and_the_last_ones_are_kept(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.5)
    publisher = Publisher(KVEventsConfig(topic="kv", buffer_steps=3, replay_endpoint="tcp://*:6000"), 2)
    for k in range(5):
        publisher.publish(0, [{"type": str(k)}])
    publisher.publish(1, [{"type": "one"}])
    first, second, asked, _ = context.sockets

    def batch(kind: str, rank: int) -> bytes:
        return bytes(msgspec.msgpack.encode([12.5, [{"type": kind}], rank]))

    def number(k: int) -> bytes:
        return bytes(7) + bytes([k])

    assert first.sent == [(b"kv", number(k), batch(str(k), 0)) for k in range(5)]
    assert second.sent == [(b"kv", number(0), batch("one", 1))]
    publisher._answer(asked, [b"who", b"", number(3)], publisher._kept[0])
    publisher._answer(asked, [b"who", number(3)], publisher._kept[0])  # no question
    end = (b"who", b"", b"", b"\xff" * 8, b"")
    assert asked.sent == [*((b"who", b"", b"kv", number(k), batch(str(k), 0)) for k in (3, 4)), end]
    asked.sent.clear()
    publisher._answer(asked, [b"who", b"", number(0)], publisher._kept[0])
    assert [parts[3] for parts in asked.sent] == [number(2), number(3), number(4), end[3]]
    publisher._answer(asked, [b"who", b"", number(0)], deque())
    assert asked.sent[4:] == [end]


def stored(parent: int | None, names: list[int], tokens: list[int], groups: bool = False) -> dict[str, Any]:
    found = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    found |= {"block_size": 2, "lora_id": None, "medium": "GPU"}
    more = {
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return found | (more if groups else {})


def test_blocks_that_go_on_from_each_other_are_one_event() -> None:
    """Blocks 1-2-3, from 2 also 4-5, and 9 of which nobody knows the tokens."""
    ledger = Ledger()
    ledger.note(None, [1, 2, 3], [10, 11, 20, 21, 30, 31], 2)
    ledger.note(2, [4, 5], [40, 41, 50, 51], 2)
    assert list(ledger.stored({1, 2, 3}, 2, False)) == [stored(None, [1, 2, 3], [10, 11, 20, 21, 30, 31])]
    assert list(ledger.stored({2, 3}, 2, True)) == [stored(1, [2, 3], [20, 21, 30, 31], True)]
    assert list(ledger.stored({1, 3}, 2, False)) == [stored(None, [1], [10, 11]), stored(2, [3], [30, 31])]
    found = list(ledger.stored({1, 2, 3, 4, 5}, 2, False))
    assert found[0] == stored(None, [1, 2], [10, 11, 20, 21])
    assert sorted(found[1:], key=lambda one: one["block_hashes"]) == [
        stored(2, [3], [30, 31]), stored(2, [4, 5], [40, 41, 50, 51]),
    ]  # fmt: skip
    assert list(ledger.stored({9}, 2, False)) == [stored(None, [9], [])]


def test_the_tokens_of_so_many_blocks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert events.KNOWN == 1_048_576
    monkeypatch.setattr(events, "KNOWN", 3)
    ledger = Ledger()
    ledger.note(None, [1, 2, 3], [1, 2, 3], 1)
    ledger.note(None, [1], [1], 1)  # used again: 2 is the longest unused
    ledger.note(1, [4], [4], 1)
    known = {name: next(iter(ledger.stored({name}, 1, False)))["token_ids"] for name in (1, 2, 3, 4)}
    assert known == {1: [1], 2: [], 3: [3], 4: [4]}
