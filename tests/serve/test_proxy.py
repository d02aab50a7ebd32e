"""A proxy before a server: clients see no difference, and the run that it writes is that of the server."""

import asyncio
import itertools
import json
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.endpoint import app, live, on_a_socket, real_time
from windtunnel.errors import InputError
from windtunnel.serve import proxy
from windtunnel.serve.events import Splitter
from windtunnel.serve.proxy import CLIENT, ENGINE, Measured, Proxy, RunFolder, address, proxying
from windtunnel.serve.tokens import BytesRule
from windtunnel.validation.measured_run import read_measured_run
from windtunnel.workload import load_trace

HEAD = {
    "id": "run", "model": "Qwen/Qwen3-0.6B", "device": "h100", "engine": {"name": "vllm", "version": "0.32.0"},
    "hash_block_size": 16,
}  # fmt: skip


def before(url: str, folder: Path) -> Any:
    return proxying(Proxy(url, RunFolder(folder, HEAD), BytesRule(), 16))


def test_a_run_as_the_server_records_it(tmp_path: Path) -> None:
    record, folder = tmp_path / "load.jsonl", tmp_path / "run"
    bodies = [{"prompt": "begins alike " * 30 + f"and ends {i}", "max_tokens": 5 + i, "stream": True} for i in range(6)]
    served = live()
    served.warm_up()
    slow = app(served, record=record, clock=real_time(0.1))
    with on_a_socket(slow) as url, on_a_socket(before(url, folder)) as passed, httpx.Client(timeout=30) as client:
        answers = [client.post(f"{passed}/v1/completions", json=body).text for body in bodies]
        direct = client.post(f"{url}/v1/completions", json=bodies[0]).text
        assert client.get(f"{passed}/v1/models").json() == client.get(f"{url}/v1/models").json()
        wrong = client.post(f"{passed}/v1/completions", json={"prompt": 5, "stream": True})
        whole = client.post(f"{passed}/v1/completions", json=bodies[0] | {"stream": False})
    assert wrong.status_code == 400 and whole.json()["usage"]["completion_tokens"] == 5
    assert words(answers[0]) == words(direct)
    assert all('"usage"' not in answer for answer in answers)
    found, load = read_measured_run(folder), load_trace(record)
    measured = found.measurement
    assert found.version == "0.32.0" and measured.client == ""  # a simulated engine's own clock
    assert measured.workload.output_tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert measured.workload.prompt_tokens.tolist() == load.prompt_tokens[:6].tolist()
    assert measured.requests is not None
    assert (measured.requests.e2el >= measured.requests.ttft).all() and (np.diff(measured.requests.arrival) > 0).all()
    assert load.begins is not None
    assert alike(measured.workload)[1:] == (load.begins[1][1:6] // 16).tolist()
    assert json.loads((folder / "run.json").read_text())["left_out"] == 1
    assert "alike" not in "".join(path.read_text() for path in folder.iterdir())


class SlowTokenizer:
    """As long prompts are, and many that come at once."""

    def encode(self, text: str) -> list[int]:
        time.sleep(0.5)
        return [1] * len(text)

    def least(self, text: str) -> int:
        return len(text)


def test_what_the_proxy_takes_is_no_time_of_the_server(tmp_path: Path) -> None:
    proxy = Proxy("", RunFolder(tmp_path / "run", HEAD), SlowTokenizer(), 16)
    with on_a_socket(app(clock=real_time())) as url:
        proxy._url = url
        with on_a_socket(proxying(proxy)) as passed, httpx.Client(timeout=30) as client:
            client.post(f"{passed}/v1/completions", json={"prompt": "a" * 100, "max_tokens": 3, "stream": True})
    measured = read_measured_run(tmp_path / "run").measurement
    assert measured.requests is not None and (measured.requests.e2el < 0.4).all()


def words(text: str) -> str:
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def alike(load: Any) -> list[int]:
    """How many blocks of each prompt are those of the first one."""
    offsets, values = load.hash_ids
    rows = [values[first:last].tolist() for first, last in itertools.pairwise(offsets)]
    return [sum(a == b for a, b in zip(rows[0], row, strict=False)) for row in rows]


def test_a_client_that_asks_for_usage_gets_it(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    with (
        on_a_socket(app(clock=real_time())) as url,
        on_a_socket(before(url, tmp_path / "run")) as passed,
        httpx.Client(timeout=30) as client,
    ):
        path, option = f"{passed}/v1/chat/completions", {"stream_options": {"include_usage": True}}
        plain, asked = (client.post(path, json=one).text for one in (body, body | option))
    assert '"completion_tokens":' not in plain.replace(" ", "") and '"completion_tokens":3' in asked.replace(" ", "")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with on_a_socket(before("http://127.0.0.1:9", tmp_path / "run")) as passed, httpx.Client() as client:
        answer = client.post(f"{passed}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 502 and "127.0.0.1:9" in answer.json()["error"]["message"]


def test_what_cannot_be_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="URL"):
        address("localhost")
    assert address("http://localhost:8000/v1/") == "http://localhost:8000"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "requests.jsonl").write_text("")
    with pytest.raises(InputError, match="already"):
        RunFolder(tmp_path / "b", HEAD)


async def upstream(scope: Any, receive: Any, send: Any) -> None:
    """A server of another make: reasoning before text, the line ends and part sizes that its path names."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    seen.append((scope["raw_path"], scope["query_string"], dict(scope["headers"]), len(body)))
    cookies = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"server", b"other")]
    await send({"type": "http.response.start", "status": 200, "headers": cookies})
    if scope["path"].startswith("/v1/chat"):
        end, size = json.loads(body)["messages"][0]["content"].split("|")
        data = stream_of(end)
        for first in range(0, len(data), int(size)):
            await send({"type": "http.response.body", "body": data[first : first + int(size)], "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


seen: list[Any] = []


def stream_of(end: str) -> bytes:
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": " hm"}] * 3 + [{"reasoning": " so"}] * 2 + [{"content": " yes"}] * 2
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 7}})
    lines = [f"data: {json.dumps(event)}{end}{end}" for event in events]
    return "".join([*lines, f"data: [DONE]{end}{end}"]).encode()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"], ids=repr)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_reasoning_counts_and_bytes_are_passed_on_as_they_are(end: str, size: int, tmp_path: Path) -> None:
    content = f"{end}|{size}"
    body: Any = {"messages": [{"role": "user", "content": content}], "max_tokens": 9, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    with (
        on_a_socket(upstream) as url,
        on_a_socket(before(url, tmp_path / "run")) as passed,
        httpx.Client(timeout=30) as client,
    ):
        path = f"{passed}/v1/chat/completions"
        plain, asked = (client.post(path, json=one).content for one in (body, body | usage))
        rows = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
        clock = json.loads((tmp_path / "run" / "run.json").read_text())["clock"]
    whole = stream_of(end)
    assert asked == whole
    assert plain == b"".join(part for part in splitted(whole) if b"usage" not in part)
    assert [(row["output_tokens"], len(row["itl_s"])) for row in rows] == [(7, 6)] * 2
    assert clock == "client: windtunnel proxy"  # while the proxy still runs


CHARACTERS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
DELTAS = st.dictionaries(
    st.sampled_from(["content", "reasoning", "refusal", "role"]), CHARACTERS | st.none(), max_size=2
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[bytes], int, list[bytes]]:
    """Events of a stream with one kind of line end, how many of them hold text, and the stream in pieces."""
    end = draw(st.sampled_from(["\n", "\r", "\r\n"]))
    events, texts = list[str](), 0
    for delta in draw(st.lists(DELTAS, max_size=5)):
        texts += any(text for name, text in delta.items() if name != "role")
        lines = json.dumps({"choices": [{"delta": delta}]}, indent=draw(st.sampled_from([None, 1]))).split("\n")
        events.append("".join(f"data: {line}{end}" for line in lines) + end)
        events += [f": ping{end}{end}"] * draw(st.booleans())
    counted = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}
    events += [f"data: {json.dumps(counted)}{end}{end}", f"data: [DONE]{end}{end}"]
    whole = [event.encode() for event in events]
    data = b"".join(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return whole, texts, [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]


@cache
def one_proxy(folder: str) -> Proxy:
    """One for all streams: what it costs is its client's certificates."""
    with TemporaryDirectory(dir=folder) as here:
        run = RunFolder(Path(here) / "run", HEAD)
        run.close()
        return Proxy("http://a", run, BytesRule(), 16)


def passed_in_pieces(answer: tuple[list[bytes], int, list[bytes]], wants_usage: bool, folder: Path) -> None:
    """Every byte reaches the client but those of an event that it has not asked for, and all text is counted."""
    events, texts, parts = answer
    run = RunFolder(folder, HEAD)
    run.start = 0.0

    class Answer:
        """A response of httpx, as far as it is read."""

        headers: ClassVar[dict[str, str]] = {}
        closed = False

        async def aiter_raw(self) -> Any:
            for part in parts:
                yield part

        async def aclose(self) -> None:
            self.closed = True

    async def talk() -> bytes:
        given, seen, passing = Answer(), Measured(0.0, ()), one_proxy(str(folder.parent.parent))
        passing._folder = run
        passed = passing._measured(cast(Any, given), seen, wants_usage)
        found = b"".join([part async for part in passed])
        run.close()
        assert len(seen.events) == texts and given.closed
        return found

    wanted = [event for event in events if wants_usage or b"usage" not in event]
    assert asyncio.run(talk()) == b"".join(wanted)
    assert (run.recorded, run.left_out) == (int(texts > 0), int(texts == 0))


@given(answers(), st.booleans())
@settings(max_examples=30)
def test_a_stream_is_passed_on_in_whatever_pieces_it_comes(answer: Any, wants_usage: bool) -> None:
    with TemporaryDirectory() as folder:
        passed_in_pieces(answer, wants_usage, Path(folder) / "run")


@pytest.mark.long
@given(answers(), st.booleans())
@settings(max_examples=10_000)
def test_ten_thousand_streams_in_pieces(answer: Any, wants_usage: bool) -> None:
    with TemporaryDirectory() as folder:
        passed_in_pieces(answer, wants_usage, Path(folder) / "run")


def splitted(data: bytes) -> list[bytes]:
    return Splitter().events(data)


def test_paths_headers_and_large_bodies_are_passed_on_as_they_are(tmp_path: Path) -> None:
    seen.clear()
    with (
        on_a_socket(upstream) as url,
        on_a_socket(before(url, tmp_path / "run")) as passed,
        httpx.Client(timeout=30) as client,
    ):
        answer = client.get(f"{passed}/a%2Fb?c=%2F", headers={"x-own": "1"})
        client.post(f"{passed}/v1/files", content=b"x" * 1_000_000)
        client.post(f"{passed}/v1/completions", content=b'{"prompt": "' + b"x" * (17 << 20) + b'", "stream": true}')
        time.sleep(0.8)
        left_out = json.loads((tmp_path / "run" / "run.json").read_text())["left_out"]
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    (path, query, headers, _), (_, _, sized, size), (*_, large) = seen
    assert (path, query) == (b"/a%2Fb", b"c=%2F") and headers[b"x-own"] == b"1" and b"content-length" not in headers
    assert size == 1_000_000 and sized[b"content-length"] == b"1000000" and large > 17 << 20
    assert left_out == 1  # on disk while the proxy runs


def test_limits_of_a_proxy() -> None:
    assert (proxy.LARGEST_MEASURED, proxy.BODY_SECONDS, proxy.ON_DISK_SECONDS) == (16_777_216, 30.0, 0.5)


def measured(usage: Any, events: list[float]) -> Measured:
    return Measured(10.0, (7, 8, 9), events, usage)


def test_a_line_of_a_measured_run() -> None:
    """Of 40 tokens in blocks of 16 two names are of full blocks."""
    seen = measured({"prompt_tokens": 40, "completion_tokens": 3}, [10.5, 10.75, 12.0000004])
    row = {"arrival_s": 3.0, "prompt_tokens": 40, "output_tokens": 3, "ttft_s": 0.5, "itl_s": [0.25, 1.25]}
    row |= {"e2el_s": pytest.approx(2.0)}
    assert seen.row(7.0, 16) == row | {"hash_ids": [7, 8]} and seen.row(7.0, 0) == row
    assert measured(seen.usage, [10.5]).row(7.0, 0) == row | {"e2el_s": 0.5, "itl_s": []}
    for usage in (
        None,
        {},
        {"prompt_tokens": 40},
        {"completion_tokens": 3},
        {"prompt_tokens": 0, "completion_tokens": 3},
    ):
        assert measured(usage, [10.5]).row(7.0, 16) is None
    assert measured(seen.usage, []).row(7.0, 16) is None


def test_the_arrival_is_when_the_request_was_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measured(None, [])
    monkeypatch.setattr(time, "monotonic", lambda: 11.0)
    asyncio.run(seen.trace("http11.send_request_headers.complete", {}))
    assert seen.arrival == 10.0
    asyncio.run(seen.trace("http11.send_request_body.complete", {}))
    assert seen.arrival == 11.0


def test_what_a_folder_says_at_any_time(tmp_path: Path) -> None:
    folder, usage = RunFolder(tmp_path / "run", HEAD), {"prompt_tokens": 40, "completion_tokens": 1}
    folder.start = 10.0

    def says() -> tuple[Any, Any]:
        head = json.loads((tmp_path / "run" / "run.json").read_text())
        assert head.items() >= HEAD.items()
        return head["clock"], head.get("left_out")

    def lines() -> int:
        return len((tmp_path / "run" / "requests.jsonl").read_text().splitlines())

    assert says() == (CLIENT, None) and (CLIENT, ENGINE) == ("client: windtunnel proxy", "engine")
    folder.add(measured(None, []), ENGINE)
    assert (folder.recorded, folder.left_out, says(), lines()) == (0, 1, (CLIENT, None), 0)
    folder.write_head()
    assert says() == (CLIENT, 1)
    folder.add(measured(usage, [10.5]), ENGINE)  # the first that is written says whose clock it is
    assert (folder.recorded, says(), lines()) == (1, (ENGINE, 1), 1)
    folder.add(measured(usage, [10.5]), CLIENT)
    assert (folder.recorded, says(), lines()) == (2, (ENGINE, 1), 2)
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    folder.write_head()  # nothing has changed
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == before
    folder.left_out += 1
    folder.close()
    assert says() == (ENGINE, 2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert [row["hash_ids"] for row in rows] == [[7, 8]] * 2


@pytest.mark.parametrize(
    "body",
    [
        *(
            b'{"prompt": "a", "stream": true}',
            b'{"prompt": "a", "stream": true} \n',
            b'{"prompt": "\\u0061", "stream": true}',
        ),
        *(b'{"prompt": "stream_options", "stream": true}', b'{"prompt": "a", "stream": true, "stream_options": null}'),
        b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": false, "continuous_usage_stats": true}}',
    ],
)
def test_a_streamed_request_also_asks_for_its_tokens(body: bytes) -> None:
    asked, before = json.loads(proxy._with_usage(body)), json.loads(body)
    options = (before.pop("stream_options", None) or {}) | {"include_usage": True}
    assert asked == before | {"stream_options": options}


async def pieces(*parts: bytes) -> Any:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("most", "read"), [(3, b"abcd"), (4, b"abcdef"), (5, b"abcdef"), (6, b"abcdefg"), (7, b"abcdefg")]
)
def test_a_body_is_read_until_it_is_too_large(most: int, read: bytes) -> None:
    async def whole() -> tuple[bytes, bytes]:
        rest = pieces(b"ab", b"cd", b"ef", b"g")
        begun = await proxy._read_up_to(rest, most)
        return begun, b"".join([part async for part in proxy._after(begun, rest)])

    assert asyncio.run(whole()) == (read, b"abcdefg")


def test_the_url_of_a_server() -> None:
    for url, found in (
        *(("http://a:1/v1", "http://a:1"), ("https://a/v1/", "https://a"), ("http://a/x/", "http://a/x")),
        ("http://a/v1/x", "http://a/v1/x"),
    ):
        assert address(url) == found
    for wrong in ("a:8000", "http://", "http://:80", "ftp://a"):
        with pytest.raises(InputError, match="must be the URL of a server"):
            address(wrong)
    scope = {"query_string": b"c=%2F", "raw_path": b"/v1/b%20"}
    assert proxy._target("http://a:1", scope).raw_path == b"/v1/b%20?c=%2F"
    assert proxy._target("http://a/x/", scope | {"query_string": b""}).raw_path == b"/x/v1/b%20"


def test_which_requests_are_left_out(tmp_path: Path) -> None:
    """Passed on all the same: what is not streamed, has several choices or prompts, or cannot be read."""
    bodies: list[Any] = [
        *({"prompt": "a", "max_tokens": 2}, {"prompt": "a", "max_tokens": 2, "stream": True, "n": 2}),
        *({"prompt": ["a", "b"], "max_tokens": 2, "stream": True}, {"prompt": "a", "max_tokens": 2, "stream": True}),
    ]
    with (
        on_a_socket(app(clock=real_time(5.0))) as url,
        on_a_socket(before(url, tmp_path / "run")) as passed,
        httpx.Client(timeout=30) as client,
    ):
        answers = [client.post(f"{passed}/v1/completions", json=body) for body in bodies]
        wrong = client.post(f"{passed}/v1/completions", content=b"{")
        models = client.get(f"{passed}/v1/models")
        assert client.head(f"{passed}/health").status_code in (200, 405)
    assert [answer.status_code for answer in (*answers, wrong, models)] == [200] * 4 + [400, 200]
    assert answers[1].text.count("[DONE]") == 1 and models.json()["data"]
    assert answers[0].headers["content-length"] == str(len(answers[0].content))
    assert "content-length" not in answers[3].headers and answers[3].headers["content-type"].startswith(
        "text/event-stream"
    )
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert (head["left_out"], head["clock"], len(rows)) == (3, "engine", 1)
    assert rows[0]["arrival_s"] >= 0 and rows[0]["prompt_tokens"] == 1 and rows[0]["hash_ids"] == []


def test_bodies_that_stop_coming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "BODY_SECONDS", 0.2)

    def drips() -> Any:
        yield b"{"
        time.sleep(1.0)
        yield b"}"

    with on_a_socket(before("http://127.0.0.1:9", tmp_path / "run")) as passed, httpx.Client() as client:
        answer = client.post(f"{passed}/v1/completions", content=drips())
    assert answer.status_code == 408 and answer.json()["error"]["message"] == "the body did not come in time"
