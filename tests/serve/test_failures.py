"""Replicas that fail under a server's clients."""

import json
from dataclasses import replace

from serve.endpoint import app, ask, deployment, live, tables
from windtunnel.deployment import Deployment, Engine
from windtunnel.policy.scaling import Faults
from windtunnel.simulate.live import LiveDeployment
from windtunnel.simulate.live import live as ready

ASKED = {"prompt": "Tell me", "max_tokens": 400, "ignore_eos": True}


def failing(**fault: object) -> LiveDeployment:
    pool = replace(deployment().pools[0], replicas=2)
    served = Deployment((pool,), faults=(Faults(at=0.05, **fault),))  # type: ignore[arg-type]
    return ready(served, tables=tables(deployment()))


def test_clients_of_a_replica_that_fails_are_told() -> None:
    served = app(failing(on_failure="lost", down=1.0))
    first, other = ask(served, ("POST", "/v1/completions", ASKED), ("POST", "/v1/completions", ASKED))
    assert first.status_code == 502
    assert first.json()["error"]["message"] == "the replica that served it has failed"
    assert other.json()["usage"]["completion_tokens"] == 400


def test_a_stream_that_fails_ends_with_an_error() -> None:
    (found,) = ask(app(failing(on_failure="lost", down=1.0)), ("POST", "/v1/completions", ASKED | {"stream": True}))
    events = [line[6:] for line in found.text.splitlines() if line.startswith("data: ")]
    assert found.status_code == 200
    assert json.loads(events[-2])["error"]["code"] == 502
    assert events[-1] == "[DONE]"
    assert 2 < len(events) < 400


def test_requests_go_on_elsewhere_and_no_token_comes_twice() -> None:
    for how in ("retry", "migrate"):
        (found,) = ask(app(failing(on_failure=how)), ("POST", "/v1/completions", ASKED | {"stream": True}))
        (plain,) = ask(app(live()), ("POST", "/v1/completions", ASKED | {"stream": True}))
        assert text_of(found.text) == text_of(plain.text)


def test_a_full_queue_answers_503_as_sglang_does() -> None:
    engine = Engine(preset="sglang-0.5", max_num_seqs=1, scheduler="sglang-0.5.23:max_queued_requests=1")
    served = Deployment((replace(deployment().pools[0], engine=engine),))
    four = ASKED | {"n": 4}
    whole, stream = ask(
        app(ready(served)), ("POST", "/v1/completions", four), ("POST", "/v1/completions", four | {"stream": True})
    )
    assert whole.status_code == 503
    error = {"message": "The request queue is full.", "type": "503", "param": None, "code": 503}
    assert whole.json()["error"] == error
    assert stream.status_code == 200
    assert json.loads(stream.text.split("\n")[-5].removeprefix("data: "))["error"] == error


def text_of(stream: str) -> str:
    events = [line[6:] for line in stream.splitlines() if line.startswith('data: {"id')]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)
