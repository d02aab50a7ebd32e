"""A router that listens to the events knows what the caches hold."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python

from serve.endpoint import app, ask, client, deployment, live, real_time
from windtunnel.errors import InputError
from windtunnel.serve.kv.events import keys_in_tree, keys_of
from windtunnel.serve.kv.publisher import KVEventsConfig, Publisher, at_rank

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class Router:
    """Follows the events of a replica."""

    def __init__(self, groups: bool = True) -> None:
        self.groups = groups
        """Whether events have the fields that only vLLM's have."""
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
                assert set(event) == {"type", "block_hashes", "medium"} | ({"group_idx"} if self.groups else set())
                for name in event["block_hashes"]:
                    del self.blocks[name]
            else:
                self.blocks.clear()

    def _store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"]) and event["medium"] == "GPU"
        assert event["lora_id"] is None
        if self.groups:
            assert event["group_idx"] == 0 and event["kv_cache_spec_kind"] == "full_attention"
            assert event["lora_name"] is None and event["extra_keys"] == [None] * len(event["block_hashes"])
        else:
            assert len(event) == 7
        for k, name in enumerate(event["block_hashes"]):
            self.blocks[name] = parent, tuple(event["token_ids"][k * size : (k + 1) * size])
            parent = name

    def tokens(self, name: int | None) -> tuple[int, ...]:
        """All tokens up to the end of a block."""
        parent, own = self.blocks[name] if name is not None else (None, ())
        return self.tokens(parent) + own if name is not None else ()

    def known(self, text: str, size: int = 16) -> int:
        """Tokens at the beginning of a prompt whose blocks are cached."""
        data = text.encode()
        tokens = [int.from_bytes(data[at : at + 4]) for at in range(0, len(data) - 3, 4)]
        found = {whole: name for name, whole in self.blocks.items()}
        parent, matched = None, 0
        while (name := found.get((parent, tuple(tokens[matched : matched + size])))) is not None:
            parent, matched = name, matched + size
        return matched


async def conversation(found: Any, number: int) -> None:
    messages = [{"role": "user", "content": "All begin with these words and go on otherwise: " + f"{number} " * 200}]
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 40 + turn}
        message = (await found.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "And?"}]


SGLANG = [pytest.param(blocks, "sglang-0.5", marks=IN_PLAIN_PYTHON) for blocks in (None, 60)]


@pytest.mark.parametrize(("blocks", "preset"), [(None, "vllm-0.33"), (60, "vllm-0.33"), *SGLANG])
def test_a_subscriber_knows_the_cache(blocks: int | None, preset: str, tmp_path: Path) -> None:
    served = live(deployment(preset=preset, **({} if blocks is None else {"num_gpu_blocks_override": blocks})))
    vllm = preset.startswith("vllm")
    events, again = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/again"
    config = KVEventsConfig(vllm, "zmq", endpoint=events, replay_endpoint=again, topic="kv", buffer_steps=10_000)
    context, router, late = zmq.Context(), Router(vllm), Router(vllm)
    application = app(served, kv_events=config)
    subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.REQ)
    subscriber.connect(events)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    subscriber.setsockopt(zmq.RCVTIMEO, 500)

    def listen() -> None:
        while subscriber.poll(200):
            router.take(*subscriber.recv_multipart())

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
            prompt = "something new, and long enough for some blocks: " + "word " * 60
            for text in (prompt, prompt + "and more " * 30, prompt[:150] + "otherwise " * 30):
                listen()
                answer = await found.post("/v1/completions", json={"prompt": text, "max_tokens": 3})
                hits.append((answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], router.known(text)))

    hits = list[tuple[int, int]]()
    try:
        asyncio.run(talk())
        listen()
    finally:
        context.destroy(linger=0)
    assert [hit for hit, _ in hits] == [known for _, known in hits] and hits[0][0] < hits[2][0] < hits[1][0]
    state = served.engine.state
    keys = keys_of(state.extra.cache, state.lanes[0]) if vllm else keys_in_tree(state.extra.tree, state.lanes[0])
    assert sorted(router.blocks) == np.unique(keys[keys >= 0] // 16).tolist() and len(router.blocks) > 30
    assert router.kinds == ({"BlockStored"} if blocks is None else {"BlockStored", "BlockRemoved"})
    assert late.next == 1 and late.blocks
    if blocks is None:
        data = b"<|im_start|>user\nAll begin with these words"
        assert any(b"".join(one.to_bytes(4) for one in router.tokens(name)[:8]) == data[:32] for name in router.blocks)


@WITH_THE_COMPILER
def test_sglang_in_plain_python() -> None:
    in_plain_python(1, __file__, some="sglang-0.5")


@pytest.mark.parametrize(
    ("asynchronous", "batches"), [(True, [64, 32, 4, 1, 1, 1, 1, 1]), (False, [32, 32, 32, 4, 1, 1, 1, 1, 1])]
)
def test_a_batch_of_events_for_each_step(
    asynchronous: bool, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100 blocks in chunks of 32, and an answer of 5, by a server that is late. An asynchronous scheduler
    has decided the second step when it looks at the events of the first."""
    told = list[int]()
    monkeypatch.setattr(
        Publisher, "publish", lambda *args: told.append(sum(len(one["block_hashes"]) for one in args[2]))
    )
    served = live(deployment(max_num_batched_tokens=512, max_num_seqs=64, async_scheduling=asynchronous))
    events = KVEventsConfig(True, endpoint="inproc://steps")
    (answer,) = ask(
        app(served, real_time(1e9), kv_events=events),
        ("POST", "/v1/completions", {"prompt": "abc " * 1600, "max_tokens": 81}),
    )
    assert answer.json()["usage"]["prompt_tokens"] == 1600
    assert told == batches


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
        ('{"publisher": "kafka"}', "publisher='kafka': must be zmq or null"),
        ('{"format": "dynamite"}', "format='dynamite': must be default or dynamo"),
        ('{"bind": 1}', "bind"),
        ('{"buffer_steps": true}', "buffer_steps"),
    ],
)
def test_a_configuration_that_is_none(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        KVEventsConfig.read(text)


def test_only_what_is_switched_on_publishes() -> None:
    for vllm in ("{}", '{"publisher": "zmq"}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert not KVEventsConfig.read(vllm).on(sglang=False)
    assert KVEventsConfig.read('{"enable_kv_cache_events": true, "topic": "kv-events", "replay_endpoint": null}').on(
        sglang=False
    )
    assert KVEventsConfig.read('{"publisher": "zmq", "format": "dynamo", "bind": true}').on(sglang=True)
    assert not KVEventsConfig.read('{"enable_kv_cache_events": true}').on(sglang=True)
    with pytest.raises(InputError, match="prefix caching"):
        app(live(deployment(enable_prefix_caching=False)), kv_events=KVEventsConfig(True, endpoint="inproc://none"))
    with pytest.raises(InputError, match="others publish no events"):
        app(live(deployment(preset="trtllm-1.0")), kv_events=KVEventsConfig(True, endpoint="inproc://none"))


def test_an_endpoint_binds_or_connects(tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}/here"
    first = Publisher(KVEventsConfig(endpoint=place), 1)
    second = Publisher(KVEventsConfig(endpoint=place, bind=False), 1)  # else the address would be taken
    first.close()
    second.close()
    with pytest.raises(InputError, match="choose another endpoint"):
        Publisher(KVEventsConfig(endpoint="tcp://256.0.0.1:5557", bind=True), 1)
