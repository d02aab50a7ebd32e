"""Engines that sleep under a server's clients, as vLLM's do."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from serve.endpoint import app, ask, client, deployment, live, on_a_socket, real_time, tables
from windtunnel.cli.live.serve import Behaviour
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.policy.scaling import Faults
from windtunnel.serve.kv.publisher import KVEventsConfig, Publisher
from windtunnel.simulate.live import live as ready

ASKED = {"prompt": "word " * 200, "max_tokens": 100}
SOON = {"prompt": "word " * 200, "max_tokens": 2}


def sleepy(**settings: Any) -> Starlette:
    return app(enable_sleep_mode=True, **settings)


async def sleeps(found: httpx.AsyncClient) -> bool:
    return bool((await found.get("/is_sleeping")).json()["is_sleeping"])


async def states(found: httpx.AsyncClient) -> dict[str, str]:
    lines = (await found.get("/metrics")).text.splitlines()
    mine = [line.split() for line in lines if line.startswith("vllm:engine_sleep_state{")]
    return {text.partition('sleep_state="')[2].partition('"')[0]: value for text, value in mine}


def total(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("level", "state", "hits"),
    [("", "weights_offloaded", 0), ("?level=0", "", 240), ("?level=1", "weights_offloaded", 0),
     ("?level=2&mode=wait", "discard_all", 0)],
)  # fmt: skip
def test_levels(level: str, state: str, hits: int) -> None:
    async def night() -> None:
        async with client(sleepy()) as found:
            assert cached(await found.post("/v1/completions", json=SOON)) == 0
            assert not await sleeps(found) and (await states(found))["awake"] == "1.0"
            answer = await found.post(f"/sleep{level}")
            depth = int((level.partition("level=")[2] or "1")[0])
            assert answer.status_code == 200 and answer.json() == {"status": "sleeping", "level": depth}
            assert await sleeps(found) and (await found.get("/health")).status_code == 200
            assert {name for name, value in (await states(found)).items() if value != "0.0"} == {state} - {""}
            assert (await found.post("/wake_up")).json() == {"status": "awake", "tags": None}
            assert not await sleeps(found) and (await states(found))["awake"] == "1.0"
            assert cached(await found.post("/v1/completions", json=SOON)) == hits
            assert cached(await found.post("/v1/completions", json=SOON)) == 240

    asyncio.run(night())


def test_requests_wait_until_all_is_awake() -> None:
    async def night() -> None:
        async with client(sleepy(wake_up_seconds=3.0)) as found:
            await found.post("/sleep")
            waiting = asyncio.create_task(found.post("/v1/completions", json=SOON))
            for tags in ("tags=scheduling", "tags=weights"):
                answer = (await found.post(f"/wake_up?{tags}")).json()
                assert answer == {"status": "sleeping", "tags": [tags.removeprefix("tags=")]}
                await asyncio.sleep(0.01)
                assert await sleeps(found) and not waiting.done()
            assert (await states(found))["awake"] == "0.0"
            await found.post("/wake_up?tags=kv_cache")
            answer = await waiting
            assert float(answer.headers["x-windtunnel-queue-seconds"]) == 3.0
            assert float(answer.headers["x-windtunnel-arrival-seconds"]) == 3.0
            text = (await found.get("/metrics")).text
            (waited,) = [line for line in text.splitlines() if line.startswith("vllm:request_queue_time_seconds_sum")]
            assert float(waited.split()[-1]) == 3.0
            await found.post("/sleep?level=0")
            assert (await found.post("/wake_up?tags=weights&tags=kv_cache")).status_code == 200
            assert not await sleeps(found)  # nothing but the scheduler slept

    asyncio.run(night())


async def until_run(found: httpx.AsyncClient, count: int, waiting: int = 0) -> None:
    """Wait until so many requests run, and others wait for a seat."""
    while True:
        text = (await found.get("/metrics")).text
        if total(text, "num_requests_running") >= count and total(text, "num_requests_waiting") >= waiting:
            return
        await asyncio.sleep(0)


async def interrupted(
    served: Starlette, how: str, body: dict[str, Any], count: int, running: int
) -> list[httpx.Response]:
    """Answers that are under way when the engines are sent to sleep, so many of which run."""
    async with client(served) as found:
        under_way = [asyncio.create_task(found.post("/v1/completions", json=body)) for _ in range(count)]
        await until_run(found, running, count - running)
        await found.post(f"/sleep?{how}")
        assert await sleeps(found)
        return await asyncio.gather(*under_way)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_under_way_are_aborted(stream: bool) -> None:
    served = sleepy(served=live(deployment(max_num_seqs=2)))
    answers = asyncio.run(interrupted(served, "mode=abort", ASKED | {"stream": stream}, 3, 2))
    counts = []
    for answer in answers:
        assert answer.status_code == 200
        found = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in found] if stream else [answer.json()["choices"][0]]
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["abort"]
        counts.append(len("".join(one["text"] for one in choices).split()))
        assert not stream or answer.text.endswith("data: [DONE]\n\n")
    assert 0 < counts[0] < 100 and counts[2] == 0  # the last one waited for a seat


@pytest.mark.parametrize("count", [1, 3])
def test_requests_under_way_may_end(count: int) -> None:
    answers = asyncio.run(interrupted(sleepy(), "mode=wait", ASKED, count, count))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * count
    assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"length"}


async def undisturbed() -> float:
    """Latencies of three requests that take turns."""
    async with client(sleepy(served=live(deployment(max_num_seqs=2)))) as found:
        await asyncio.gather(*(found.post("/v1/completions", json=ASKED) for _ in range(3)))
        return total((await found.get("/metrics")).text, "e2e_request_latency_seconds_sum")


@pytest.mark.parametrize(("level", "again", "stream"), [(0, 0, False), (1, 1, False), (2, 1, True)])
def test_requests_under_way_are_kept(level: int, again: int, stream: bool) -> None:
    """As after vLLM's pause of mode keep: frozen, and above level 0 preempted, since their KV is gone."""

    async def night() -> float:
        async with client(sleepy(served=live(deployment(max_num_seqs=2)), wake_up_seconds=5.0)) as found:
            body = ASKED | {"stream": stream, "stream_options": {"include_usage": True}} if stream else ASKED
            under_way = [asyncio.create_task(found.post("/v1/completions", json=body)) for _ in range(3)]
            while "vllm:generation_tokens_total" not in (text := (await found.get("/metrics")).text) or (
                total(text, "generation_tokens_total") < 20
            ):
                await asyncio.sleep(0)
            assert (await found.post(f"/sleep?level={level}&mode=keep")).status_code == 200
            before = total((await found.get("/metrics")).text, "generation_tokens_total")
            await asyncio.sleep(0.02)
            text = (await found.get("/metrics")).text
            assert total(text, "generation_tokens_total") == before and not any(one.done() for one in under_way)
            assert (total(text, "kv_cache_usage_perc") == 0.0) == (level > 0)
            await found.post("/wake_up")
            answers = await asyncio.gather(*under_way)
            for answer in answers:
                usage = json.loads(answer.text.splitlines()[-4][6:])["usage"] if stream else answer.json()["usage"]
                assert usage["completion_tokens"] == 100
            text = (await found.get("/metrics")).text
            assert total(text, "num_preemptions_total") == 2 * again
            return total(text, "e2e_request_latency_seconds_sum")

    latencies, plain = asyncio.run(night()), asyncio.run(undisturbed())
    if level == 0:  # no simulated second passed
        assert latencies == pytest.approx(plain, rel=1e-9)
    else:  # weights wake up in 5 s, and the KV of two requests is computed again
        assert 15.0 < latencies - plain < 15.1


@pytest.mark.parametrize("how", ["level=0", "level=1", "level=2", "released"])
def test_the_queue_outlasts_a_sleep_before_which_those_who_run_end(how: str) -> None:
    """As after vLLM's PAUSED_NEW: with two seats, the third request has no token before the engines wake up."""

    async def night() -> None:
        async with client(sleepy(served=live(deployment(max_num_seqs=2)), wake_up_seconds=5.0)) as found:
            lengths = (60, 100, 80, 2)
            requests = [SOON | {"max_tokens": length} for length in lengths]
            under_way = [asyncio.create_task(found.post("/v1/completions", json=body)) for body in requests]
            await until_run(found, 2, 2)
            level = "level=0" if how == "released" else how
            assert (await found.post(f"/sleep?mode=wait&{level}")).status_code == 200
            if how == "released":
                assert (await found.post("/release_kv_cache_memory")).status_code == 200
            await asyncio.sleep(0.02)
            assert [one.done() for one in under_way] == [True, True, False, False]
            text = (await found.get("/metrics")).text
            assert total(text, "num_requests_running") == 0 and total(text, "generation_tokens_total") == 160
            await found.post("/wake_up")
            answers = await asyncio.gather(*under_way)
            assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [*lengths]
            slept = 0.0 if level == "level=0" else 5.0
            queued = [float(answer.headers["x-windtunnel-queue-seconds"]) for answer in answers]
            assert queued[:2] == pytest.approx([0.0, 0.0], abs=0.1) and slept < queued[2] < slept + 2.0
            text = (await found.get("/metrics")).text
            assert total(text, "num_preemptions_total") == 0 and total(text, "request_success_total") == 4
            assert cached(answers[2]) == (240 if how == "level=0" else 0)
            assert (await found.post("/v1/completions", json=SOON)).status_code == 200

    asyncio.run(night())


def test_only_the_kv_memory_is_released_while_nothing_runs() -> None:
    async def night() -> None:
        async with client(sleepy()) as found:
            assert cached(await found.post("/v1/completions", json=SOON)) == 0
            early = await found.post("/release_kv_cache_memory")
            assert early.status_code == 400 and "requires a completed pause first" in early.text
            await found.post("/sleep?level=0")
            assert (await found.post("/release_kv_cache_memory")).json() == {"status": "kv_cache_released"}
            late = await found.post("/release_kv_cache_memory")
            assert late.status_code == 400 and "to be resident" in late.text
            await found.post("/wake_up?tags=scheduling")
            assert await sleeps(found)
            await found.post("/wake_up?tags=kv_cache")
            assert not await sleeps(found) and cached(await found.post("/v1/completions", json=SOON)) == 0

    asyncio.run(night())


def test_who_was_kept_may_end_before_the_next_sleep() -> None:
    async def night() -> None:
        async with client(sleepy()) as found:
            under_way = asyncio.create_task(found.post("/v1/completions", json=ASKED))
            await until_run(found, 1)
            await found.post("/sleep?level=0&mode=keep")
            assert not under_way.done()
            await found.post("/sleep?level=1&mode=wait")
            await asyncio.sleep(0.01)
            assert under_way.done() and under_way.result().json()["usage"]["completion_tokens"] == 100

    asyncio.run(night())


def test_who_comes_while_others_end_waits() -> None:
    async def night() -> None:
        async with client(sleepy()) as found:
            first = asyncio.create_task(found.post("/v1/completions", json=ASKED))
            await until_run(found, 1)
            asleep = asyncio.create_task(found.post("/sleep?mode=wait"))
            while not await sleeps(found):
                await asyncio.sleep(0)
            second = asyncio.create_task(found.post("/v1/completions", json=ASKED))
            await asyncio.gather(first, asleep)
            await asyncio.sleep(0.01)
            assert not second.done()
            await found.post("/wake_up")
            assert (await second).json()["usage"]["completion_tokens"] == 100

    asyncio.run(night())


def test_who_waits_for_a_replica_that_is_down_keeps_nobody_awake() -> None:
    served = Deployment(deployment().pools, faults=(Faults(at=0.0, down=1e6),))

    async def night() -> httpx.Response:
        async with client(sleepy(served=ready(served, tables=tables(deployment())), clock=real_time())) as found:
            waiting = asyncio.create_task(found.post("/v1/completions", json=SOON))
            await asyncio.sleep(0.02)
            await found.post("/sleep")
            return await waiting

    (choice,) = asyncio.run(asyncio.wait_for(night(), 20)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")


def test_a_stream_on_a_socket_is_aborted() -> None:
    with on_a_socket(sleepy(clock=real_time())) as url, httpx.Client(base_url=url, timeout=20) as found:
        body = {"prompt": "a", "max_tokens": 30_000, "stream": True}
        with found.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            assert httpx.post(f"{url}/sleep").status_code == 200
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and len(events) < 29_000
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "abort"


def test_all_replicas_lose_what_they_have_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq")
    told = list[tuple[int, list[str]]]()
    monkeypatch.setattr(
        Publisher, "publish", lambda _, rank, events: told.append((rank, [event["type"] for event in events]))
    )
    events = KVEventsConfig(True, endpoint="inproc://asleep")
    served = sleepy(served=live(deployment(replicas=2)), kv_events=events)
    calls = [("POST", "/v1/completions", SOON)] * 2
    before = ask(served, *calls, ("POST", "/sleep", None), ("POST", "/sleep?level=2", None))
    assert [answer.status_code for answer in before] == [200] * 4
    assert [rank for rank, kinds in told if kinds == ["AllBlocksCleared"]] == [0, 1]
    assert {rank for rank, kinds in told if kinds == ["BlockStored"]} == {0, 1}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/sleep?level=3", "level='3': must be 0, 1 or 2"),
        ("/sleep?level=deep", "level='deep'"),
        ("/sleep?mode=keeps", "mode='keeps': must be abort, wait or keep"),
        ("/sleep?levle=1", "unknown parameter 'levle': did you mean 'level'?"),
        ("/wake_up?tags=weights&tags=kv", "tags='kv': must be weights, kv_cache or scheduling"),
    ],
)
def test_what_is_wrong_is_named(path: str, words: str) -> None:
    answer, asleep = ask(sleepy(), ("POST", path, None), ("GET", "/is_sleeping", None))
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert asleep.json() == {"is_sleeping": False}


def test_only_where_it_is_asked_for() -> None:
    calls = ("POST", "/sleep", None), ("POST", "/wake_up", None), ("GET", "/is_sleeping", None)
    assert [answer.status_code for answer in ask(app(), *calls)] == [404] * 3
    assert ask(sleepy(), ("GET", "/sleep", None))[0].status_code == 405
    with pytest.raises(InputError, match="needs --enable-sleep-mode"):
        Behaviour(wake_up_seconds=1.0)
    with pytest.raises(InputError, match="≥ 0"):
        Behaviour(wake_up_seconds=-1.0, enable_sleep_mode=True)
