"""The measuring client: what it sends is the workload, and what it says is what the server did. And unmodified clients;
those that are not installed are not tried (pip install openai litellm)."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, live, on_a_socket, real_time
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.serve.client import Client, Prompts, measured, served_model
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
