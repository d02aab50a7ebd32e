"""What OpenAI clients ask, and what they get."""

import asyncio
import json
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from serve.endpoint import app, ask, client, deployment, live
from windtunnel.serve.tokens import BytesRule, FileTokenizer
from windtunnel.version import __version__

CHAT = {"messages": [{"role": "user", "content": "Say something"}], "max_tokens": 5}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_completion() -> None:
    (answer,) = ask(app(), ("POST", "/v1/chat/completions", CHAT))
    assert answer.status_code == 200
    document = answer.json()
    assert document["object"] == "chat.completion" and document["model"] == "small"
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["content"].split()) == 5
    prompt = len("<|im_start|>user\nSay something<|im_end|>\n<|im_start|>assistant\n")
    assert document["usage"]["prompt_tokens"] == -(-prompt // 4)
    assert document["usage"]["completion_tokens"] == 5
    parts = [float(answer.headers[f"x-windtunnel-{part}-seconds"]) for part in ("queue", "prefill", "decode")]
    assert parts[0] == 0.0 and parts[1] > 0 and parts[2] > 0


def test_a_stream_says_what_the_whole_answer_says() -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    whole, streamed = ask(app(), ("POST", "/v1/chat/completions", CHAT), ("POST", "/v1/chat/completions", body))
    found = events(streamed.text)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in found[:-1])
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]].count("length") == 1
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 5
    assert streamed.headers["content-type"].startswith("text/event-stream")


def test_several_prompts_and_choices() -> None:
    (answer,) = ask(app(), ("POST", "/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 3}))
    document = answer.json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in document["choices"]}) == 4
    assert document["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_the_same_prompt_and_seed_give_the_same_words() -> None:
    body = {"prompt": "hello", "max_tokens": 20}
    first, again, other, of_server = (
        ask(served, ("POST", "/v1/completions", asked))[0].json()["choices"][0]["text"]
        for served, asked in ((app(), body), (app(), body), (app(), body | {"seed": 7}), (app(seed=7), body))
    )
    assert first == again != other == of_server


def test_an_echo_repeats_the_prompt() -> None:
    (answer,) = ask(app(echo=True), ("POST", "/v1/completions", {"prompt": "to be or", "max_tokens": 5}))
    assert answer.json()["choices"][0]["text"] == "to be orto be"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "to b"), (True, "to be o")])
def test_a_stop_ends_the_answer_within_a_token(stream: bool, include: bool, text: str) -> None:
    body = {"prompt": "to be or not", "max_tokens": 50, "stop": ["e o"], "include_stop_str_in_output": include}
    body |= {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    (answer,) = ask(app(echo=True), ("POST", "/v1/completions", body))
    found = events(answer.text) if stream else [answer.json()]
    assert "".join(event["choices"][0]["text"] for event in found if event["choices"]) == text
    assert found[-1]["usage"]["completion_tokens"] == 3


def test_answers_of_a_mean_length_unless_eos_is_ignored() -> None:
    served = app(answer_tokens=10)
    calls = [("POST", "/v1/completions", {"prompt": f"number {i}", "max_tokens": 1000}) for i in range(300)]
    counts = [answer.json() for answer in ask(served, *calls)]
    lengths = [one["usage"]["completion_tokens"] for one in counts]
    assert 8 < sum(lengths) / len(lengths) < 12 and len(set(lengths)) > 10
    assert {one["choices"][0]["finish_reason"] for one in counts} == {"stop"}
    (whole,) = ask(
        app(answer_tokens=10), ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 99, "ignore_eos": True})
    )
    assert whole.json()["usage"]["completion_tokens"] == 99


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": 5}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_model_len"),
        ("/v1/completions", {"prompt": "a", "logprobs": 3}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "other"),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400, "stream"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "n": 1000}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
        ("/v1/completions", [1], 400, "object"),
        ("/v1/completions", {"prompt": "a", "temperature": -5}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_k": -2}, 400, "top_k"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 99}, 400, "presence_penalty"),
        ("/v1/completions", {"prompt": "a", "logit_bias": [1]}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * 5}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", ""]}, 400, "stop"),
        ("/v1/completions", {"prompt": ["a"] * 2000, "n": 3}, 400, "at most 4096"),
        ("/v1/completions", {"prompt": "a", "guided_json": {"type": "object"}}, 400, "guided_json"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": ["hi"]}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, 400, "logprobs"),
        ("/v1/embeddings", {"input": "a"}, 400, "not simulated"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path: str, body: Any, status: int, word: str) -> None:
    (answer,) = ask(app(), ("POST", path, body))
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"model": "\\uD800"}'),
        *(b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a", "user": "\\udfff"}', '{"prompt": "a"}'.encode("utf-16")),
    ],
)
def test_a_body_that_is_no_request(content: bytes) -> None:
    async def sent() -> httpx.Response:
        async with client(app()) as found:
            return await found.post("/v1/completions", content=content)

    answer = asyncio.run(sent())
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_whole_surrogate_pair_is_text() -> None:
    async def sent() -> httpx.Response:
        async with client(app()) as found:
            return await found.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')

    assert asyncio.run(sent()).status_code == 200


def test_a_search_for_stops_lets_others_have_their_turns() -> None:
    body = {"prompt": "a", "stop": ["zq"], "max_tokens": 30_000, "n": 8}

    async def longest_wait() -> float:
        async with client(app()) as found:
            asked = asyncio.create_task(found.post("/v1/completions", json=body))
            turns = 0
            while not asked.done():
                await asyncio.sleep(0)
                turns += 1
            assert asked.result().status_code == 200
            return turns

    assert asyncio.run(longest_wait()) > 8 * 30_000 // 64 // 16


def test_keys() -> None:
    served = app(api_keys=("secret",))
    call = ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert ask(served, call)[0].status_code == 401
    assert ask(app(api_keys=("secret",)), call, headers={"authorization": "Bearer wrong"})[0].status_code == 401
    assert ask(app(api_keys=("secret",)), call, headers={"authorization": "Bearer secret"})[0].status_code == 200
    assert ask(app(api_keys=("secret",)), ("GET", "/health", None))[0].status_code == 200


def test_a_body_that_is_too_large() -> None:
    (answer,) = ask(app(max_body_bytes=100), ("POST", "/v1/completions", {"prompt": "a" * 200}))
    assert answer.status_code == 413


def test_a_body_that_comes_too_slowly() -> None:
    async def dripping() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async def sent() -> httpx.Response:
        async with client(app(body_seconds=0.01)) as found:
            return await found.post("/v1/completions", content=dripping())

    assert asyncio.run(sent()).status_code == 408


def test_too_many_requests_are_turned_away() -> None:
    async def sent() -> list[httpx.Response]:
        async with client(app(max_in_flight=3)) as found:
            body = {"prompt": "a", "max_tokens": 50}
            return list(await asyncio.gather(*(found.post("/v1/completions", json=body) for _ in range(8))))

    answers = asyncio.run(sent())
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 429} == {"1"}


def test_a_prompt_that_came_before_is_cached() -> None:
    body = {"prompt": "word " * 200, "max_tokens": 2}
    first, second = ask(app(), ("POST", "/v1/completions", body), ("POST", "/v1/completions", body))
    details = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert details == [0, 240]  # 250 tokens: 15 full blocks of 16


def test_the_better_priority_is_first() -> None:
    served = live(deployment(max_num_seqs=1, scheduling_policy="priority"))

    async def sent() -> list[float]:
        async with client(app(served)) as found:

            async def one(priority: int) -> float:
                body = {"prompt": f"{priority}", "max_tokens": 20, "priority": priority}
                answer = await found.post("/v1/completions", json=body)
                return float(answer.headers["x-windtunnel-queue-seconds"])

            return list(await asyncio.gather(*map(one, (0, 3, 1, 2))))

    queues = asyncio.run(sent())
    assert queues[0] < queues[2] < queues[3] < queues[1]


def test_what_stands_beside() -> None:
    models, health, version, tokens, load, info, printed, yaml, text, document = ask(
        app(),
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
        ("GET", "/version", None),
        ("POST", "/tokenize", {"prompt": "12345678"}),
        ("GET", "/load", None),
        ("GET", "/server_info?config_format=json", None),
        ("GET", "/server_info", None),
        ("GET", "/server_info?config_format=yaml", None),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/openapi.json", None),
    )
    assert [card["id"] for card in models.json()["data"]] == ["small"]
    assert health.status_code == 200
    assert version.json() == {"version": deployment().pools[0].engine.preset[5:], "windtunnel": __version__}
    assert load.json() == {"server_load": 0}
    assert int(info.json()["vllm_config"]["cache_config"][0]["num_gpu_blocks"]) > 1000
    assert printed.json()["vllm_config"] == str(info.json()["vllm_config"]) and yaml.status_code == 400
    assert text.status_code == 400 and "--tokenizer" in text.json()["error"]["message"]
    assert tokens.json()["count"] == 2
    assert "/v1/chat/completions" in document.json()["paths"]


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_document_names_every_route(sleeps: bool) -> None:
    served = app(enable_sleep_mode=sleeps)
    paths = ask(served, ("GET", "/openapi.json", None))[0].json()["paths"]
    routes = [route for route in served.routes if isinstance(route, Route)]
    assert {route.path: {*(route.methods or ())} - {"HEAD"} for route in routes} == {
        path: {method.upper() for method in methods} for path, methods in paths.items()
    }
    assert ("/sleep" in paths) == sleeps
    for methods in paths.values():
        for operation in methods.values():
            assert isinstance(operation["summary"], str)
            assert all(isinstance(each["description"], str) for each in operation["responses"].values())
            assert all("/" in kind for kind in operation["responses"]["200"].get("content", ()))
            if body := operation.get("requestBody"):
                schema = body["content"]["application/json"]["schema"]
                assert schema["type"] == "object" and {*schema.get("required", ())} <= {*schema.get("properties", ())}
                assert "400" in operation["responses"]
    if sleeps:
        levels, modes = (each["schema"]["enum"] for each in paths["/sleep"]["post"]["parameters"])
        calls = [(f"/sleep?level={level}&mode={mode}", "/wake_up") for level in levels for mode in modes]
        answers = ask(app(enable_sleep_mode=True), *(("POST", path, None) for pair in calls for path in pair))
        assert len(answers) == 18 and {answer.status_code for answer in answers} == {200}


DEFAULT_METRICS = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "engine_sleep_state"),
    *("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries"),
    *("external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "num_preemptions", "prompt_tokens"),
    *("prompt_tokens_by_source", "prompt_tokens_cached", "prompt_tokens_cached_by_source", "generation_tokens"),
    *("request_success", "admission_rejections", "request_prompt_tokens", "request_generation_tokens"),
    *("iteration_tokens_total", "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions"),
    *("request_prefill_kv_computed_tokens", "cache_config_info"),
)
"""What vLLM 0.33 exports without further options (vllm/v1/metrics/loggers.py)."""


def test_every_metric_of_vllm_is_there() -> None:
    *_, scraped = ask(app(), ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}), ("GET", "/metrics", None))
    names = {family.name for family in text_string_to_metric_families(scraped.text)}
    assert {f"vllm:{name}" for name in DEFAULT_METRICS} <= names
    web = {"http_requests", "http_request_size_bytes", "http_response_size_bytes", "http_request_duration_seconds"}
    assert web | {"http_request_duration_highr_seconds", "process_cpu_seconds", "python_info"} <= names


def test_pages_of_every_site_may_ask() -> None:
    (answer,) = ask(app(), ("OPTIONS", "/v1/chat/completions", None))
    assert answer.status_code == 200 and answer.headers["access-control-allow-headers"] == "*"


def test_metrics_are_of_the_answers() -> None:
    body = {"prompt": "word " * 200, "max_tokens": 10}
    *_, scraped = ask(app(), *[("POST", "/v1/completions", body)] * 3, ("GET", "/metrics", None))
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
        if sample.labels.get("le") in (None, "+Inf") and sample.labels.get("finished_reason") in (None, "length")
    }
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:prompt_tokens_total"] == 750 and found["vllm:generation_tokens_total"] == 30
    assert found["vllm:prefix_cache_queries_total"] == 750 and found["vllm:prefix_cache_hits_total"] == 480
    assert found["vllm:request_success_total"] == 3
    assert found["vllm:prompt_tokens_cached_total"] == 480
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 270
    assert found["vllm:iteration_tokens_total_sum"] == 750 + 30 and found["http_requests_total"] == 3
    assert found["vllm:inter_token_latency_seconds_bucket"] == 27
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    whole = found["vllm:request_queue_time_seconds_sum"] + found["vllm:request_inference_time_seconds_sum"]
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(whole)


def test_a_line_of_the_log_for_each_answer() -> None:
    log = StringIO()
    ask(app(log=log), ("POST", "/v1/completions", {"prompt": "abcd", "max_tokens": 2}), ("POST", "/v1/completions", {}))
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert (line["event"], line["prompt_tokens"], line["output_tokens"], line["aborted"]) == ("answer", 1, 2, False)
    assert "abcd" not in log.getvalue()


class NeverAsked(BytesRule):
    def encode(self, text: str) -> list[int]:
        raise AssertionError(text[:10])


def test_a_text_that_cannot_fit_is_refused_before_it_is_read_as_tokens() -> None:
    asked = ("POST", "/v1/completions", {"prompt": "a" * 200_000, "max_tokens": 2})
    (answer,) = ask(app(tokenizer=NeverAsked()), asked)
    assert answer.status_code == 400 and "max_model_len" in answer.text


def names(answers: Sequence[httpx.Response]) -> list[str]:
    return [answer.json()["id"] for answer in answers]


def test_answers_are_numbered_and_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1234.9)
    body = {"prompt": "a", "max_tokens": 1}
    *answers, models = ask(
        app(), ("POST", "/v1/completions", body), ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", body), ("GET", "/v1/models", None),
    )  # fmt: skip
    assert names(answers) == ["cmpl-00000000", "chatcmpl-00000001", "cmpl-00000002"]
    assert [answer.json()["created"] for answer in answers] == [1234] * 3
    card = {"id": "small", "object": "model", "created": 1234, "owned_by": "windtunnel", "root": "small"}
    assert models.json() == {"object": "list", "data": [card | {"max_model_len": LONGEST}]}


LONGEST = 40_960
"""Of the model, Qwen3-0.6B."""


def test_a_request_may_ask_for_as_many_answers_as_have_room() -> None:
    served = app(max_in_flight=4)
    asked: list[Any] = [{"prompt": ["a", "b"], "n": 2}, {"prompt": "a", "n": 5}, {"prompt": ["a", "b", "c"], "n": 2}]
    whole, five, six = ask(served, *(("POST", "/v1/completions", body | {"max_tokens": 1}) for body in asked))
    assert whole.status_code == 200 and len(whole.json()["choices"]) == 4
    for answer, count in ((five, 5), (six, 6)):
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        assert answer.json()["error"]["message"] == f"{count} answers in one request: must be at most 4"


@pytest.mark.parametrize(("second", "status"), [(1, 200), (2, 200), (3, 429)])
def test_a_request_comes_in_where_there_is_room_for_all_of_it(second: int, status: int) -> None:
    async def running(found: httpx.AsyncClient, count: int) -> None:
        while f'vllm:num_requests_running{{engine="0",model_name="small"}} {count}.0' not in (await metrics(found)):
            await asyncio.sleep(0)

    async def metrics(found: httpx.AsyncClient) -> str:
        return str((await found.get("/metrics")).text)

    async def talk() -> tuple[int, float]:
        async with client(app(max_in_flight=3)) as found:
            first = asyncio.create_task(found.post("/v1/completions", json={"prompt": "a", "max_tokens": 30_000}))
            await running(found, 1)
            assert (await found.get("/load")).json() == {"server_load": 1}
            body = {"prompt": "b", "max_tokens": 1, "n": second}
            answer = await found.post("/v1/completions", json=body)
            if status == 429:
                error = {"message": "3 requests are in flight: try again", "type": "RateLimitError", "param": None}
                assert answer.json()["error"] == error | {"code": 429}
            text = await metrics(found)
            first.cancel()
            codes = [(await found.post("/v1/completions", json=body | {"n": 3})).status_code for _ in range(100)]
            assert codes[-1] == 200  # all of the room is free again, soon
            return answer.status_code, float(text.partition("\nwindtunnel:requests_turned_away_total ")[2].split()[0])

    assert asyncio.run(talk()) == (status, float(status == 429))


@pytest.mark.parametrize(
    ("tokens", "more", "settings", "count"),
    [
        *((30, {}, {}, 256), (LONGEST - 256, {}, {}, 256), (LONGEST - 255, {}, {}, 255), (LONGEST - 1, {}, {}, 1)),
        *((LONGEST, {}, {}, None), (LONGEST - 3, {"max_tokens": 3}, {}, 3), (LONGEST - 3, {"max_tokens": 4}, {}, None)),
        (LONGEST - 300, {"ignore_eos": True}, {"answer_tokens": 5}, 300),
    ],
)
def test_how_long_an_answer_may_be(tokens: int, more: Any, settings: Any, count: int | None) -> None:
    """A chat has no limit but 256 tokens, or what the model has room for where lengths are drawn."""
    text = "x" * (4 * tokens - len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    body = {"messages": [{"role": "user", "content": text}]} | more
    (answer,) = ask(app(**settings), ("POST", "/v1/chat/completions", body))
    if count is None:
        assert answer.status_code == 400 and "max_model_len" in answer.json()["error"]["message"]
    else:
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, count)


def test_lengths_depend_on_seed_prompt_and_choice() -> None:
    """Prompts of one length, one that differs at its end, another seed of the request or of the server."""

    def lengths(settings: Any, *bodies: Any) -> list[int]:
        calls = [("POST", "/v1/completions", {"max_tokens": 5000, "n": 4} | body) for body in bodies]
        documents = [answer.json() for answer in ask(app(answer_tokens=500, **settings), *calls)]
        assert all(choice["finish_reason"] == "stop" for one in documents for choice in one["choices"])
        return [len(choice["text"].split()) for one in documents for choice in one["choices"]]

    long = "word " * 60
    first = lengths(
        {},
        {"prompt": "ab"},
        {"prompt": "ac"},
        {"prompt": "ab", "seed": 1},
        {"prompt": long + "a"},
        {"prompt": long + "b"},
    )
    assert len(set(first)) > 16 and first == lengths(
        {},
        {"prompt": "ab"},
        {"prompt": "ac"},
        {"prompt": "ab", "seed": 1},
        {"prompt": long + "a"},
        {"prompt": long + "b"},
    )
    assert lengths({"seed": 1}, {"prompt": "ab"}) == lengths({}, {"prompt": "ab", "seed": 1}) == first[8:12]


def test_tokens_and_back(tmp_path: Path) -> None:
    text = "12345678" + "é" * 3000
    data = text.encode()
    wanted = [int.from_bytes(data[at : at + 4]) for at in range(0, len(data), 4)]
    chat, longest, longer, several, numbers, plain = ask(
        app(),
        ("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/tokenize", {"prompt": "x" * 4 * LONGEST}),
        ("POST", "/tokenize", {"prompt": "x" * (4 * LONGEST + 1)}),
        ("POST", "/tokenize", {"prompt": ["a", "b"]}),
        ("POST", "/tokenize", {"prompt": [1, 2]}),
        ("POST", "/tokenize", {"prompt": text}),
    )
    assert plain.json() == {"count": len(wanted), "max_model_len": LONGEST, "tokens": wanted} and len(wanted) == 1502
    assert chat.json()["count"] == -(-len("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n") // 4)
    assert longest.json()["count"] == LONGEST and longer.status_code == 400
    assert longer.json()["error"]["message"] == f"prompt: {LONGEST + 1} tokens or more: must be at most max_model_len"
    assert [answer.json()["error"]["message"] for answer in (several, numbers)] == ["prompt: must be one text"] * 2
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    bodies: list[Any] = [[1, 0], [0] * LONGEST, [0] * (LONGEST + 1), [-1], "a", None]
    found = ask(
        app(tokenizer=FileTokenizer(tmp_path)), *(("POST", "/detokenize", {"tokens": one}) for one in bodies),
        ("POST", "/detokenize", {"tokens": [1], "model": "other"}),
    )  # fmt: skip
    assert [answer.status_code for answer in found] == [200, 200, 400, 400, 400, 400, 404]
    assert found[0].json() == {"prompt": "b a"} and "max_model_len" in found[2].text


def test_who_has_which_key() -> None:
    settings: Any = {"api_keys": ("one", "two")}
    call = ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
    for key, status in (("one", 200), ("two", 200), ("on", 401), ("", 401)):
        found = ask(app(**settings), call, ("GET", "/v1/models", None), headers={"authorization": f"Bearer {key}"})
        assert [answer.status_code for answer in found] == [status] * 2
    denied, models, tokens, refused = ask(
        app(**settings), call, ("GET", "/v1/models", None), ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/v1/embeddings", {}),
    )  # fmt: skip
    assert (denied.status_code, models.status_code, tokens.status_code, refused.status_code) == (401, 401, 200, 401)
    assert denied.json() == {"error": "Unauthorized"} and denied.headers["www-authenticate"] == "Bearer"


def test_errors_in_openais_shape() -> None:
    nothing, method, embeddings, yes = ask(
        app(),
        ("GET", "/nothing", None),
        ("GET", "/v1/completions", None),
        ("POST", "/v1/responses", {}),
        ("OPTIONS", "/x", None),
    )
    assert nothing.json() == {"error": {"message": "Not Found", "type": "HTTPException", "param": None, "code": 404}}
    assert method.status_code == 405 and method.headers["allow"] == "POST"
    assert embeddings.json()["error"] == {
        "message": "/v1/responses: not simulated: only completions and chat completions are",
        "type": "BadRequestError", "param": None, "code": 400,
    }  # fmt: skip
    assert {name: yes.headers[f"access-control-{name}"] for name in ("allow-methods", "allow-headers", "max-age")} == {
        "allow-methods": "*", "allow-headers": "*", "max-age": "600",
    }  # fmt: skip


def test_a_stream_counts_as_it_goes() -> None:
    body = {"prompt": "word" * 40, "max_tokens": 4, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    _, streamed = ask(app(), *[("POST", "/v1/completions", body)] * 2)
    found = events(streamed.text)
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert [one["usage"]["completion_tokens"] for one in found] == [1, 2, 3, 4]
    assert {
        (one["usage"]["prompt_tokens"], one["usage"]["total_tokens"] - one["usage"]["completion_tokens"])
        for one in found
    } == {(40, 40)}
    assert {one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found} == {32}
    assert streamed.headers["cache-control"] == "no-cache" and "content-length" not in streamed.headers
