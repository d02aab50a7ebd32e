"""The measuring client: what it sends is the workload, and what it says is what the server did. And unmodified clients;
those that are not installed are not tried (pip install openai litellm)."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, live, on_a_socket, real_time
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.serve import client as module
from windtunnel.serve.client import Answer, Client, Prompts, measured, served_model
from windtunnel.workload import Workload, load_trace

LOAD = Workload.from_columns(
    arrival=[0.0, 0.05, 0.1, 0.15],
    prompt_tokens=[40, 70, 40, 33],
    output_tokens=[5, 1, 8, 3],
    hash_ids=[[7, 8], [7, 8, 9, 10], [7, 8], [7, 11]],
    hash_block_size=16,
)


def test_prompts_share_what_their_blocks_share() -> None:
    prompts = Prompts(LOAD, 0)
    first, second, third, fourth = (prompts.tokens(row) for row in range(4))
    assert [len(first), len(second), len(third), len(fourth)] == [40, 70, 40, 33]
    assert first[:32] == second[:32] == third[:32]
    assert first[32:] != third[32:]
    assert fourth[:16] == first[:16]
    assert fourth[16:32] != first[16:32]
    assert Prompts(LOAD, 1).tokens(0) != first


def test_a_body_asks_for_as_many_tokens_as_the_workload_and_the_likeliest_ones() -> None:
    body = json.loads(Client("http://x", "small", LOAD, 0)._body(2))
    assert (body["max_tokens"], body["min_tokens"], body["temperature"]) == (8, 8, 0.0)
    assert body["ignore_eos"] and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 40 and "priority" not in body


def test_the_server_gets_the_workload(tmp_path: Path) -> None:
    with on_a_socket(app(clock=real_time(5.0), record=tmp_path / "load.jsonl")) as url:
        assert served_model(url) == "small"
        found = measured(url, "small", LOAD, 0, SLO())
    got = load_trace(tmp_path / "load.jsonl")
    assert sorted(got.prompt_tokens) == sorted(LOAD.prompt_tokens)
    assert sorted(got.output_tokens) == sorted(LOAD.output_tokens)
    assert got.begins is not None
    assert (LOAD.prompt_tokens // 16 - got.begins[1] // 16).sum() == 5  # five different full blocks
    assert found["requests"] == {"total": 4, "finished": 4, "failed": 0}
    assert found["warnings"] == []
    assert 0 < found["ttft"]["mean"] <= found["e2el"]["mean"]
    assert found["output_throughput"] == pytest.approx(
        17 / 4 * found["request_throughput"],
    )


def test_a_closed_loop_with_sessions(tmp_path: Path) -> None:
    load = Workload.from_columns(
        arrival=[0.0, 0.0, 0.0, 0.0],
        prompt_tokens=[20, 30, 40, 50],
        output_tokens=4,
        session=[0, 1, 0, 1],
        think_time=[0.0, 0.0, 0.02, 0.02],
        max_concurrency=1,
    )
    with on_a_socket(app(clock=real_time(), record=tmp_path / "load.jsonl")) as url:
        found = measured(url, "small", load, 0, SLO(e2el=10.0))
    got = load_trace(tmp_path / "load.jsonl")
    assert found["requests"]["finished"] == 4
    assert found["attainment"] == 1.0
    order = got.prompt_tokens.tolist()
    assert order.index(20) < order.index(40)
    assert order.index(30) < order.index(50)
    assert (np.diff(got.arrival) > 0).all()  # one after the other


def test_what_fails_is_counted() -> None:
    long = Workload.from_columns(arrival=[0.0, 0.0], prompt_tokens=[10, 100_000_0], output_tokens=2)
    with on_a_socket(app(clock=real_time())) as url:
        found = measured(url, "small", long, 0, SLO(e2el=10.0))
        assert found["requests"] == {"total": 2, "finished": 1, "failed": 1}
        assert found["attainment"] == 0.5
        assert "max_model_len" in found["warnings"][0]
        with pytest.raises(InputError, match="no request was answered: 404"):
            measured(url, "other", LOAD, 0, SLO())
        with pytest.raises(InputError, match="serves small, not large"):
            served_model(url, "large")
    with pytest.raises(InputError, match="no OpenAI-compatible server answers"):
        served_model(url)


def test_what_a_line_of_a_stream_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, clock = Answer(0.0), iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for line in (
        *(": comment", 'data:{"choices":[{"text":"a"}]}', 'data: {"choices":[{"text":""}]}', "data: [DONE]"),
        *('data: {"choices":[{"text":""},{"text":"b"}]}', 'data: {"choices":[],"usage":{"completion_tokens":7}}'),
    ):
        module._note(answer, line)
    assert (answer.events, answer.output_tokens, answer.failure) == ([2.0, 5.0], 7, "")
    module._note(answer, json.dumps({"error": "x" * 400}).join(("data: ", "")))
    assert answer.failure == "x" * 300 and answer.output_tokens == 7
    silent = Answer(0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    module._note(silent, 'data: {"usage":{"completion_tokens":null}}')
    assert (silent.output_tokens, silent.events) == (0, [])


ANSWERS = [
    Answer(10.0, [10.5, 10.75, 11.5], 3),
    Answer(11.0, [12.0], 1),
    Answer(12.0, failure="500 a"),
    Answer(18.0, [19.0, 20.0]),  # its tokens are not told: two events
    Answer(20.0, [20.25, 21.25], 5),
]


def test_statistics_of_what_a_client_saw() -> None:
    """Answers sent at 0, 1, 8 and 10 s whose first tokens come after 0.5, 1, 1 and 0.25 s; the last ends at 11.25 s."""
    found = module._document(ANSWERS, SLO(ttft=0.5, e2el=2.0), False)
    assert found["requests"] == {"total": 5, "finished": 4, "failed": 1}
    assert found["ttft"]["mean"] == pytest.approx((0.5 + 1.0 + 1.0 + 0.25) / 4)
    assert found["e2el"]["mean"] == pytest.approx((1.5 + 1.0 + 2.0 + 1.25) / 4)
    assert found["tpot"]["mean"] == pytest.approx((1.0 / 2 + 1.0 / 1 + 1.0 / 4) / 3)  # one token has none
    assert found["itl"]["mean"] == pytest.approx((0.25 + 0.75 + 1.0 + 1.0) / 4)
    assert found["request_throughput"] == pytest.approx(4 / 11.25)
    assert found["output_throughput"] == pytest.approx((3 + 1 + 2 + 5) / 11.25)
    assert found["goodput"] == pytest.approx(2 / 11.25) and found["attainment"] == 2 / 5  # ttft 0.5 meets 0.5
    assert found["warnings"] == ["500 a"]


def test_statistics_without_warm_up_and_drain() -> None:
    """Of 10 s of arrivals, the window is 1 to 10 s: it holds what was sent at 1, 2, 8 and 10 s."""
    found = module._document(ANSWERS, SLO(ttft=1.0), True)
    assert found["requests"] == {"total": 4, "finished": 3, "failed": 1}
    assert found["ttft"]["mean"] == pytest.approx((1.0 + 1.0 + 0.25) / 3)
    assert found["itl"]["mean"] == pytest.approx((0.75 + 1.0) / 2)  # gaps that end at 1.5 and 10 s
    assert found["request_throughput"] == pytest.approx(3 / 9)  # ends at 1.5, 2 and 10 s
    assert found["output_throughput"] == pytest.approx((2 + 2) / 9)  # tokens at 1.5, 2, 9 and 10 s
    assert found["goodput"] == pytest.approx(3 / 9) and found["attainment"] == 3 / 4
    assert module._document(ANSWERS[:1], SLO(), True)["request_throughput"] == pytest.approx(1 / 1.5)


def test_of_many_failures_some_are_told() -> None:
    failed = [Answer(0.0, failure=str(k)) for k in (1, 1, 2, 3, 4, 5, 6)]
    assert module._document([*ANSWERS[:1], *failed], SLO(), False)["warnings"] == ["1", "2", "3", "4", "5"]


def test_who_answers_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.KEY, raising=False)
    assert module.headers() == {}
    monkeypatch.setenv(module.KEY, "k")
    assert module.headers() == {"authorization": "Bearer k"}
    with on_a_socket(app(clock=real_time(5.0), api_keys=("k",))) as url:
        assert served_model(url) == served_model(url, "small") == "small"
        assert measured(url, "small", LOAD, 0, SLO())["requests"]["finished"] == 4
        monkeypatch.setenv(module.KEY, "wrong")
        with pytest.raises(InputError, match="no request was answered: 401"):
            measured(url, "small", LOAD, 0, SLO())


def test_a_prompt_goes_on_from_an_answer() -> None:
    """One request begins with the prompt and part of the answer of the first, another with part of its prompt."""
    load = Workload.from_columns(
        arrival=[0.0, 6.0, 0.0],
        prompt_tokens=[10, 12, 30],
        output_tokens=[8, 3, 2],
        begins=[None, (0, 7), (0, 15)],
        after=[[], [], [0]],
        session=[0, 1, 0],
        priority=[0, 0, 4],
    )
    prompts = Prompts(load, 0)
    first, third, second = (prompts.tokens(row) for row in range(3))
    assert [len(first), len(second), len(third)] == [10, 30, 12]
    assert second[:10] == first and third[:7] == first[:7] and third[7:10] != first[7:]
    assert second[10:15] == prompts._drawn(8, 2, 0)[:5] and set(second[15:20]).isdisjoint(second[10:15])
    assert {1000 <= token < 20_000 for token in (*first, *second, *third)} == {True}
    body = json.loads(Client("http://x", "small", load, 0)._body(2))
    assert body["priority"] == 4 and body["model"] == "small" and body["prompt"] == second


def test_a_session_goes_on_after_its_think_time() -> None:
    load = Workload.from_columns(
        arrival=[0.0, 0.0], prompt_tokens=[20, 20], output_tokens=2, session=[0, 0], think_time=[0.0, 0.3]
    )
    with on_a_socket(app(clock=real_time())) as url:
        client = Client(url, "small", load, 0)
        asyncio.run(client.send_all())
    first, second = client.answers[0], client.answers[1]
    assert first.events[-1] + 0.3 <= second.sent and not first.failure and not second.failure


MESSAGES: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": "small", "messages": MESSAGES, "max_tokens": 5}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    served = live()
    served.warm_up()
    with on_a_socket(app(served)) as found:
        yield found


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(url: str) -> None:
    command = ["curl", "-sN", f"{url}/v1/chat/completions", "-d", json.dumps(ASKED | {"stream": True})]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("data: {") and done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.long
def test_openai(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["small"]
    whole = client.chat.completions.create(**ASKED)
    stream = client.chat.completions.create(**ASKED, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert said == whole.choices[0].message.content and whole.usage.completion_tokens == 5
    assert client.completions.create(model="small", prompt="a", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="not simulated"):
        client.embeddings.create(model="small", input="a")


@pytest.mark.long
def test_openai_without_waiting(url: str) -> None:
    openai = pytest.importorskip("openai")

    async def last() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
            return [chunk async for chunk in chunks][-1]

    assert asyncio.run(last()).usage.completion_tokens == 5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = ASKED | {"model": "openai/small", "api_base": f"{url}/v1", "api_key": "none"}
    whole = litellm.completion(**asked)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert said == whole.choices[0].message.content
