"""A proxy before a server: clients see no difference, and the run that it writes is that of the server."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serve.endpoint import app, live, on_a_socket, real_time
from windtunnel.errors import InputError
from windtunnel.serve.proxy import Proxy, RunFolder, address, proxying
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
    assert (measured.requests.e2el > measured.requests.ttft).all() and (np.diff(measured.requests.arrival) > 0).all()
    assert alike(measured.workload) == alike(load.take(np.arange(6)))
    assert json.loads((folder / "run.json").read_text())["left_out"] == 1
    assert "alike" not in "".join(path.read_text() for path in folder.iterdir())


class SlowTokenizer:
    """As long prompts are, and many that come at once."""

    def encode(self, text: str) -> list[int]:
        time.sleep(0.5)
        return [1] * len(text)


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
