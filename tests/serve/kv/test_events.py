"""A router that listens to the events knows what the caches hold."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, client, deployment, live
from windtunnel.errors import InputError
from windtunnel.serve.kv.events import keys_of
from windtunnel.serve.kv.publisher import KVEventsConfig, at_rank

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class Router:
    """Follows the events of a replica."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next, self.kinds = 0, set[str]()

    def take(self, topic: bytes, number: bytes, batch: bytes) -> None:
        assert topic == b"kv" and int.from_bytes(number) == self.next
        self.next += 1
        time, events, rank = msgspec.msgpack.decode(batch)
        assert time > 1e9 and rank == 0
        for event in events:
            self.kinds.add(event["type"])
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                assert set(event) == {"type", "block_hashes", "medium", "group_idx"}
                for name in event["block_hashes"]:
                    del self.blocks[name]
            else:
                self.blocks.clear()

    def _store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"]) and event["medium"] == "GPU"
        assert event["lora_id"] is None and event["group_idx"] == 0 and event["kv_cache_spec_kind"] == "full_attention"
        for k, name in enumerate(event["block_hashes"]):
            self.blocks[name] = parent, tuple(event["token_ids"][k * size : (k + 1) * size])
            parent = name

    def tokens(self, name: int | None) -> tuple[int, ...]:
        """All tokens up to the end of a block."""
        parent, own = self.blocks[name] if name is not None else (None, ())
        return self.tokens(parent) + own if name is not None else ()


async def conversation(found: Any, number: int) -> None:
    messages = [{"role": "user", "content": "All begin with these words and go on otherwise: " + f"{number} " * 200}]
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 40 + turn}
        message = (await found.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("blocks", [None, 60])
def test_a_subscriber_knows_the_cache(blocks: int | None, tmp_path: Path) -> None:
    served = live(deployment(**({} if blocks is None else {"num_gpu_blocks_override": blocks})))
    events, again = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/again"
    config = KVEventsConfig(True, endpoint=events, replay_endpoint=again, topic="kv", buffer_steps=10_000)
    context, router, late = zmq.Context(), Router(), Router()
    application = app(served, kv_events=config)
    subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.REQ)
    subscriber.connect(events)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    subscriber.setsockopt(zmq.RCVTIMEO, 500)

    async def talk() -> None:
        async with client(application) as found:
            await asyncio.sleep(0.3)  # subscribed
            await asyncio.gather(*(conversation(found, number) for number in range(4)))
            replay.connect(again)
            replay.send((0).to_bytes(8))
            while not replay.poll(0):
                await asyncio.sleep(0.01)
            topic, number, batch = replay.recv_multipart()
            late.take(topic, number, batch)

    asyncio.run(talk())
    try:
        while True:
            router.take(*subscriber.recv_multipart())
    except zmq.Again:
        pass
    finally:
        context.destroy(linger=0)
    state = served.engine.state
    keys = keys_of(state.extra.cache, state.lanes[0])
    assert sorted(router.blocks) == np.unique(keys[keys >= 0] // 16).tolist() and len(router.blocks) > 30
    assert router.kinds == ({"BlockStored"} if blocks is None else {"BlockStored", "BlockRemoved"})
    assert late.next == 1 and late.blocks
    if blocks is None:
        data = b"<|im_start|>user\nAll begin with these words"
        assert any(b"".join(one.to_bytes(4) for one in router.tokens(name)[:8]) == data[:32] for name in router.blocks)


def test_replicas_have_ports_of_their_own() -> None:
    assert at_rank("tcp://*:5557", 0) == "tcp://*:5557" and at_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert at_rank("inproc://a", 1) == "inproc://a_dp1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"endpiont": "x"}', "endpoint"),
        ('{"topic": 5}', "topic"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": true}', "buffer_steps"),
    ],
)
def test_a_configuration_that_is_none(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        KVEventsConfig.read(text)


def test_only_what_is_switched_on_publishes() -> None:
    assert not KVEventsConfig.read("{}").on
    assert KVEventsConfig.read('{"enable_kv_cache_events": true, "topic": "kv-events", "replay_endpoint": null}').on
    assert not KVEventsConfig.read('{"enable_kv_cache_events": true, "publisher": "null"}').on
    with pytest.raises(InputError, match="prefix caching"):
        app(live(deployment(enable_prefix_caching=False)), kv_events=KVEventsConfig(True, endpoint="inproc://none"))
