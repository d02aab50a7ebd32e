"""The page's server: its files, who may ask, and what is no request."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve.endpoint import on_a_socket

from ui.words import SMALL, ask
from windtunnel.ui.asked import Words
from windtunnel.ui.bench import Bench
from windtunnel.ui.routes import FOLDER, MOST_BODY, application

WORDS = {"words": SMALL}


def test_the_page_is_all_there_and_light() -> None:
    names = sorted(path.name for path in FOLDER.iterdir())
    answers = ask(("GET", "/", None), *(("GET", f"/{name}", None) for name in names))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert answers[0].text.startswith("<!doctype html>")
    assert "default-src 'none'" in answers[0].headers["content-security-policy"]
    assert sum(len(answer.content) for answer in answers) < 2_000_000
    for answer in answers:
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text


def test_choices_hold_what_flags_accept() -> None:
    (answer,) = ask(("GET", "/api/choices", None), start={"model": "Qwen/Qwen3-0.6B"})
    found = answer.json()
    assert "Qwen/Qwen3-32B" in found["model"]
    assert "h100_sxm" in [each["name"] for each in found["device"]]
    assert "azure-conv" in [each["name"] for each in found["trace"]]
    assert found["start"] == {"model": "Qwen/Qwen3-0.6B"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing.js", None, 404),
        ("GET", "/..%2Froutes.py", None, 404),
        ("GET", "/api/nothing", None, 404),
        ("GET", "/api/figures", None, 405),
        ("GET", "/api/study?name=x", None, 400),
        ("POST", "/api/figures", b"", 400),
        ("POST", "/api/figures", b"{", 400),
        ("POST", "/api/figures", b"\xff\xfe", 400),
        ("POST", "/api/figures", b"[" * 5000, 400),
        ("POST", "/api/figures", b" " * (MOST_BODY + 1), 413),
        ("POST", "/api/closeup", {**WORDS, "start": 5, "end": 1}, 400),
        ("POST", "/api/closeup", {**WORDS, "start": "a"}, 400),
        ("POST", "/api/closeup", {**WORDS, "start": 1e300}, 400),
        ("POST", "/api/sweep", {"words": {"model": "nobody/nothing"}}, 400),
        ("POST", "/api/export", {"words": {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 3}}, 400),
        ("POST", "/api/report", {"words": {"tensor_parallel_size": "two"}}, 400),
    ],
)
def test_mistakes_are_a_line_with_a_status(method: str, path: str, body: object, status: int) -> None:
    (answer,) = ask((method, path, body))
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]
    assert message
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"content-type": "text/plain"}],
    ids=("another name of this machine", "another site", "no site", "a form"),
)
def test_other_sites_are_not_answered(headers: dict[str, str]) -> None:
    (answer,) = ask(("POST", "/api/figures", WORDS), headers=headers)
    assert answer.status_code in (403, 415)
    assert json.loads(answer.text)["error"]


def test_the_page_itself_is_answered() -> None:
    (answer,) = ask(
        ("POST", "/api/export", WORDS), headers={"host": "localhost:8000", "origin": "http://localhost:8000"}
    )
    assert answer.status_code == 200


def test_the_knee_is_that_of_sweep() -> None:
    words = SMALL | {"num_prompts": 100, "goodput": "ttft:300"}
    (answer,) = ask(("POST", "/api/sweep", {"words": words}))
    found = answer.json()
    rates = [point["request_rate"] for point in found["points"]]
    assert rates == sorted(rates)
    assert len(rates) == 9
    assert found["knee"] is None or found["knee"] in rates


def test_pages_that_have_gone_on_cost_no_more_than_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slider that is dragged: each request is given up for the next one."""
    begun: list[str] = []
    whole = Bench.stages

    def counted(bench: Bench, words: Words) -> Iterator[dict[str, Any]]:
        for stage in whole(bench, words):
            begun.append(stage["stage"])
            yield stage

    monkeypatch.setattr(Bench, "stages", counted)
    with on_a_socket(application(SMALL)) as url:
        for rate in range(40, 52):
            body = json.dumps({"words": SMALL | {"num_prompts": 2000, "request_rate": rate}}).encode()
            head = "POST /api/figures HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as client:
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        last = httpx.post(f"{url}/api/figures", json={"words": SMALL | {"num_prompts": 2000}}, timeout=60)
    assert [json.loads(line)["stage"] for line in last.text.splitlines()] == ["small", "whole", "ends"]
    assert begun.count("ends") < 4
