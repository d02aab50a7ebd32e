"""What a body says, field by field, and both sides of every bound."""

import asyncio
from typing import Any

import pytest

from windtunnel.serve.openai.requests import (
    Asked,
    RefusedError,
    are_tokens,
    check_model,
    checked,
    is_token,
    read_completion,
)
from windtunnel.serve.openai.requests import read_chat as reader
from windtunnel.serve.openai.sampling import MOST_BIASED, NOT_SIMULATED, check_sampling
from windtunnel.serve.pace import Pace

NAN, INF = float("nan"), float("inf")
HELLO = [{"role": "user", "content": "Hello"}]


def read_chat(body: dict[str, Any]) -> Asked:
    return asyncio.run(reader(body, Pace()))


def test_what_nobody_says() -> None:
    given = {"chat": False, "prompts": ["a"], "max_tokens": 16, "n": 1, "stream": False, "include_usage": False}
    given |= {"continuous_usage": False, "stop": (), "include_stop": False, "ignore_eos": False, "min_tokens": 0}
    given |= {"priority": 0, "seed": None, "session": "", "places": ()}
    assert vars(read_completion({"prompt": "a"})) == given
    chat = {"chat": True, "max_tokens": None, "prompts": ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"]}
    assert vars(read_chat({"messages": HELLO})) == given | chat


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"prompt": "a", "max_tokens": 1}, "max_tokens", 1),
        ({"prompt": "a", "n": 128}, "n", 128),
        ({"prompt": "a", "n": 1}, "n", 1),
        ({"prompt": "a", "stream": True}, "stream", True),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
        ({"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage", True),
        ({"prompt": "a", "stream_options": {}}, "include_usage", False),
        ({"prompt": "a", "stop": "x"}, "stop", ("x",)),
        ({"prompt": "a", "stop": ["a", "b", "c", "d"]}, "stop", ("a", "b", "c", "d")),
        ({"prompt": "a", "include_stop_str_in_output": True}, "include_stop", True),
        ({"prompt": "a", "ignore_eos": True}, "ignore_eos", True),
        ({"prompt": "a", "min_tokens": 16}, "min_tokens", 16),
        ({"prompt": "a", "priority": -(2**31)}, "priority", -(2**31)),
        ({"prompt": "a", "priority": 2**31 - 1}, "priority", 2**31 - 1),
        ({"prompt": "a", "seed": -(2**63)}, "seed", -(2**63)),
        ({"prompt": "a", "seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"prompt": "a", "user": "me"}, "session", "me"),
        ({"prompt": "a", "user": "me", "prompt_cache_key": "key"}, "session", "key"),
        ({"prompt": [0, 2**31 - 1]}, "prompts", [[0, 2**31 - 1]]),
        ({"prompt": ["a", "b"]}, "prompts", ["a", "b"]),
        ({"prompt": [[1], [2]]}, "prompts", [[1], [2]]),
    ],
)
def test_what_a_body_says(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read_completion(body), field) == value


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: must be a whole number from 1 to 2147483647"),
        ({"max_tokens": 2**31}, "max_tokens: must be"),
        ({"max_tokens": True}, "max_tokens: must be"),
        ({"n": 0}, "n: must be a whole number from 1 to 128"),
        ({"n": 129}, "n: must be"),
        ({"min_tokens": -1}, "min_tokens: must be a whole number from 0"),
        ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"priority": 2**31}, "priority: must be a whole number from -2147483648 to 2147483647"),
        ({"priority": -(2**31) - 1}, "priority: must be"),
        ({"seed": 2**63}, "seed: must be"),
        ({"seed": -(2**63) - 1}, "seed: must be"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop: 5 texts: must be at most 4"),
        ({"stop": [""]}, "cannot contain an empty string"),
        ({"stop": 5}, "stop: must be text"),
        ({"stop": [5]}, "stop: must be text"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"stream_options": []}, "stream_options: must be an object"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"user": 5}, "user: must be text"),
        ({"prompt": None}, "prompt: must be text"),
        ({"prompt": []}, "prompt: must be text"),
        ({"prompt": [[]]}, "prompt: must be text"),
        ({"prompt": [-1]}, "prompt: must be text"),
        ({"prompt": [2**31]}, "prompt: must be text"),
        ({"prompt": [True]}, "prompt: must be text"),
        ({"prompt": {"a": 1}}, "prompt: must be text"),
    ],
)
def test_what_a_body_must_not_say(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError) as error:
        read_completion({"prompt": "a"} | more)
    assert words in str(error.value) and error.value.status == 400 and error.value.kind == "BadRequestError"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "at least one message"),
        ([], "at least one message"),
        (["a"], "an object with a role and content"),
        ([{"content": "a"}], "an object with a role and content"),
        ([{"role": "user", "content": 5}], "content: must be text, or a list of parts"),
        ([{"role": "user", "content": [{"image_url": "x"}]}], "only parts with text"),
        ([{"role": "user", "content": ["a"]}], "only parts with text"),
    ],
)
def test_messages_that_are_none(messages: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        read_chat({"messages": messages})


def test_where_answers_stand_in_a_chat() -> None:
    said = [("user", "A"), ("assistant", "first"), ("user", "B"), ("assistant", ""), ("assistant", "third")]
    found = read_chat({"messages": [{"role": role, "content": content} for role, content in said]})
    (text,) = found.prompts
    assert [text[place:].partition("<|im_end|>\n")[0] for place in found.places] == ["first", "", "third"]
    assert text.endswith("third<|im_end|>\n<|im_start|>assistant\n") and len(found.places) == 3
    parts = [{"type": "text", "text": "fi"}, {"type": "text", "text": "rst"}]
    assert read_chat({"messages": [*HELLO, {"role": "assistant", "content": parts}]}).prompts == (
        read_chat({"messages": [*HELLO, {"role": "assistant", "content": "first"}]}).prompts
    )
    call = [{"id": "1", "function": {"name": "f"}}]
    (text,) = read_chat({"messages": [{"role": "assistant", "content": None, "tool_calls": call}]}).prompts
    assert '[{"function": {"name": "f"}, "id": "1"}]' in text


def test_either_limit_of_a_chat() -> None:
    assert read_chat({"messages": HELLO, "max_tokens": 5}).max_tokens == 5
    assert read_chat({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 1}).max_tokens == 1


def test_models_and_tokens() -> None:
    check_model({}, "m")
    check_model({"model": "m"}, "m")
    with pytest.raises(RefusedError) as error:
        check_model({"model": "x"}, "m")
    assert (error.value.status, error.value.kind) == (404, "NotFoundError")
    assert is_token(0) and not is_token(-1) and not is_token(2**31) and not is_token(False) and not is_token(1.0)
    assert asyncio.run(are_tokens([1] * 3000, Pace())) and not asyncio.run(are_tokens([1] * 1500 + [-1], Pace()))
    assert asyncio.run(checked([1, 2], [0], 2, Pace())) == [1, 2] and asyncio.run(checked("a", "b", 0, Pace())) == "a"
    for prompt, first, longest in (([1, 2], [0], 1), ("a", [0], 9), ([1], "a", 9), ([1, -1], [0], 9), ([], [0], 9)):
        with pytest.raises(RefusedError):
            asyncio.run(checked(prompt, first, longest, Pace()))


BOUNDS: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 0.5, 1e9], [-0.01]),
    "top_p": ([0.01, 1], [0, 1.01]),
    "min_p": ([0, 1], [-0.01, 1.01]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 9], [0, -1]),
    "length_penalty": ([-9, 9], []),
    "top_k": ([-1, 0, 5], [-2]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_both_sides_of_what_sampling_may_be(name: str) -> None:
    """vLLM 0.33, SamplingParams._verify_args."""
    right, wrong = BOUNDS[name]
    for value in right:
        check_sampling({name: value})
    check_sampling({name: None})
    for value in (*wrong, *(("hot", True) if name == "top_k" else ("hot", True, NAN, INF, [1]))):
        with pytest.raises(RefusedError, match=name):
            check_sampling({name: value})


@pytest.mark.parametrize("name", NOT_SIMULATED)
def test_what_would_change_an_answer_is_refused(name: str) -> None:
    nothings: tuple[Any, ...] = (None, False, 0, "", [], {}, "none")
    for nothing in nothings:
        check_sampling({name: nothing})
    for something in (True, 1, "x", [1], {"a": 1}):
        with pytest.raises(RefusedError, match=f"{name}: not simulated"):
            check_sampling({name: something})


def test_biases_and_best_of() -> None:
    check_sampling({"logit_bias": {str(k): 1.0 for k in range(MOST_BIASED)}, "n": 2, "best_of": 2})
    check_sampling({"logit_bias": {}, "best_of": 1})
    for body in (
        *({"logit_bias": [1]}, {"logit_bias": {"1": "a"}}, {"logit_bias": {"1": NAN}}, {"best_of": 2}),
        *({"n": 2, "best_of": 1}, {"logit_bias": {str(k): 1.0 for k in range(MOST_BIASED + 1)}}),
    ):
        with pytest.raises(RefusedError):
            check_sampling(body)
    assert MOST_BIASED == 4096
