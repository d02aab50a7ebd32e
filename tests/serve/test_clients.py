"""Unmodified clients; those that are not installed are not tried (pip install openai litellm)."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from serve.endpoint import app, live, on_a_socket

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
