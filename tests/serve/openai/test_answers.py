"""What an answer says, token by token, and the objects that it is sent in, against what is worked out by hand."""

import asyncio
import json
import sys
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.serve.openai.answers import DONE, Text, Wording, text_of, usage_of
from windtunnel.serve.openai.requests import read_chat, read_completion
from windtunnel.serve.openai.shapes import Shape
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import EchoedWords, SeededWords

WORDS = ["ab", "cd", "ef", "gh"]
SHAPE = Shape('{"a":"', '"}')


def answer(words: Any, drawn: int, limit: int, shape: Shape | None = None, **more: Any) -> Text:
    asked = read_completion({"prompt": "a", "max_tokens": limit} | more)
    return asyncio.run(text_of(words, drawn, limit, asked, shape))


@pytest.mark.parametrize(
    ("drawn", "more", "tokens", "reason"),
    [
        *((5, {}, 5, "stop"), (9, {}, 9, "stop"), (10, {}, 10, "length"), (12, {}, 10, "length"), (0, {}, 1, "stop")),
        *((5, {"min_tokens": 7}, 7, "stop"), (5, {"min_tokens": 5}, 5, "stop"), (5, {"min_tokens": 10}, 10, "length")),
        *((5, {"ignore_eos": True}, 10, "length"), (5, {"ignore_eos": True, "min_tokens": 7}, 10, "length")),
    ],
)
def test_how_long_an_answer_is(drawn: int, more: dict[str, Any], tokens: int, reason: str) -> None:
    found = answer(WORDS * 9, drawn, 10, **more)
    assert (found.output_tokens, found.finish_reason, found.last, found.taken) == (tokens, reason, None, 0)
    assert found.take(tokens) == "".join((WORDS * 3)[:tokens]) == found.whole()


def test_why_a_document_ends() -> None:
    tool = Shape("{", "}", "f")
    assert answer(WORDS * 9, 5, 10, tool).finish_reason == "tool_calls"
    assert answer(WORDS * 9, 10, 10, tool).finish_reason == "length"
    assert answer(WORDS * 9, 5, 10, SHAPE).finish_reason == "stop"
    found = answer(WORDS * 9, 5, 10, SHAPE)
    assert [found.take(k) for k in range(1, 6)] == ['{"a":"', "ab", "cd", "ef", '"}']
    assert found.whole() == '{"a":"abcdef"}' and found.drawn is None


@pytest.mark.parametrize(
    ("stop", "include", "said"),
    [
        *((["de"], False, ["ab", "c", ""]), (["de"], True, ["ab", "cd", "e"]), (["ef"], False, ["ab", "cd", ""])),
        *((["a"], False, [""]), (["a"], True, ["a"]), (["bcde"], False, ["a", "", ""]), (["b", "ab"], False, [""])),
        *((["fg", "e"], True, ["ab", "cd", "e"]), (["ha"], False, ["ab", "cd", "ef", "g", ""])),
        (["gh", "fgh"], True, ["ab", "cd", "ef", "gh"]),
    ],
)
def test_a_stop_cuts_the_answer(stop: list[str], include: bool, said: list[str]) -> None:
    found = answer(WORDS * 9, 30, 30, stop=stop, include_stop_str_in_output=include)
    assert (found.output_tokens, found.finish_reason) == (len(said), "stop")
    assert found.whole() == "".join(said) and found.held == sys.getsizeof("".join(said))
    assert [found.take(k) for k in range(1, len(said) + 1)] == said
    several = answer(WORDS * 9, 30, 30, stop=stop, include_stop_str_in_output=include)
    assert several.take(1) + several.take(len(said)) == "".join(said)


@pytest.mark.parametrize(
    ("least", "tokens", "said"), [(1, 2, "ab"), (2, 6, "abcdefghab"), (5, 6, "abcdefghab"), (6, 10, "")]
)
def test_no_stop_counts_before_the_least_tokens(least: int, tokens: int, said: str) -> None:
    found = answer(WORDS * 9, 30, 30, stop=["cd"], min_tokens=least)
    assert found.output_tokens == tokens and found.whole().startswith(said)
    assert answer(WORDS * 9, 30, 30, stop=["zz"], min_tokens=least).output_tokens == 30


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=130, max_size=200),
    st.lists(st.text("abc", min_size=3, max_size=12), min_size=1, max_size=4),
    st.integers(0, 129),
)
def test_a_stop_is_found_wherever_it_is(pieces: list[str], stops: list[str], least: int) -> None:
    """The first token beyond the least in which a stop ends, and of the stops that end there the one that begins
    first."""
    found = answer(pieces, 130, 130, stop=stops, min_tokens=least)
    for count in range(least + 1, 131):
        said, before = "".join(pieces[:count]), len("".join(pieces[: count - 1]))
        ends = [
            (at, one)
            for one in stops
            for at in range(len(said))
            if said[at:].startswith(one) and at + len(one) > before
        ]
        if ends:
            assert (found.output_tokens, found.whole()) == (count, said[: min(ends)[0]])
            return
    assert (found.output_tokens, found.finish_reason) == (130, "length")


@pytest.mark.parametrize("count", [1, 63, 64, 65, 70, 128, 129])
def test_a_stop_just_before_and_just_after_the_end(count: int) -> None:
    words = [*["x"] * (count - 1), "y", "z", *["x"] * 200]
    last, beyond = (answer(words, count, 300, stop=[stop]) for stop in ("y", "z"))
    assert (last.output_tokens, last.whole()) == (count, "x" * (count - 1))
    assert (beyond.output_tokens, beyond.whole()) == (count, "x" * (count - 1) + "y")
    crossing = answer(words, 300, 300, stop=["xyz" if count > 1 else "yz"])
    assert (crossing.output_tokens, crossing.whole()) == (count + 1, "x" * max(count - 2, 0))


def test_what_an_answer_holds_on_to() -> None:
    drawn, echoed = SeededWords(1, b"a"), EchoedWords("to be or")
    words = answer(drawn, 9, 9)
    assert words.drawn is drawn and words.held == 0
    words.take(2)
    words.go_on_from(70)
    assert words.take(72) == "".join(w for w, k in zip(drawn.after(70), range(2), strict=False)) and words.taken == 72
    assert answer(echoed, 9, 9).held == sys.getsizeof("to be or") and answer(echoed, 9, 9).drawn is None
    shaped = answer(echoed, 9, 9, SHAPE)
    assert shaped.held == sum(map(sys.getsizeof, ("to be or", '{"a":"', '"}')))
    assert answer(drawn, 9, 9, SHAPE).drawn is None
    assert answer(drawn, 9, 9, stop=["zz"]).drawn is drawn


COMPLETION = read_completion({"prompt": "a"})
CHAT = asyncio.run(read_chat({"messages": [{"role": "user", "content": "a"}]}, Pace()))
HEAD = {"id": "x-1", "created": 7, "model": "m"}
END = {"logprobs": None, "finish_reason": None}


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    return json.loads(data[6:])


def test_the_objects_of_a_completion() -> None:
    wording, head = Wording(COMPLETION, "x-1", "m", 7), HEAD | {"object": "text_completion"}
    whole = json.loads(wording.head + wording.choice(3, 'a"', "stop") + "]}")
    assert whole == head | {
        "choices": [{"index": 3, "text": 'a"', "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    }
    assert event(wording.piece(2, 'b"ä', None, None)) == head | {"choices": [{"index": 2, "text": 'b"ä', **END}]}
    ended = {"index": 2, "text": "b", "logprobs": None, "finish_reason": "length"}
    assert event(wording.piece(2, "b", "length", None)) == head | {"choices": [ended]}
    assert event(wording.piece(2, "b", "length", {"k": 1})) == head | {"choices": [ended], "usage": {"k": 1}}
    assert event(wording.piece(2, "b", None, {"k": 1})) == head | {
        "choices": [{"index": 2, "text": "b", **END}],
        "usage": {"k": 1},
    }
    assert event(wording.usage({"k": 1})) == head | {"choices": [], "usage": {"k": 1}}
    before, after = wording.around
    assert before + b"word" + after == wording.piece(0, "word", None, None)
    assert wording.in_prompts(1, str)() == "" and DONE == b"data: [DONE]\n\n"


def test_the_objects_of_a_chat() -> None:
    wording, head = Wording(CHAT, "x-1", "m", 7), HEAD | {"object": "chat.completion.chunk"}
    whole = json.loads(wording.head + wording.choice(3, "a", "stop") + "]}")
    said = {"index": 3, "message": {"role": "assistant", "content": "a"}, "logprobs": None}
    assert whole == HEAD | {
        "object": "chat.completion",
        "choices": [said | {"finish_reason": "stop", "stop_reason": None}],
    }
    begun = {"index": 1, "delta": {"role": "assistant", "content": ""}, **END}
    assert event(wording.first(1)) == head | {"choices": [begun]}
    assert event(wording.piece(1, "b", None, None)) == head | {
        "choices": [{"index": 1, "delta": {"content": "b"}, **END}]
    }
    before, after = wording.around
    assert before + b"word" + after == wording.piece(0, "word", None, None)


def test_the_objects_of_a_call() -> None:
    wording, head = Wording(CHAT, "x-1", "m", 7, "f"), HEAD | {"object": "chat.completion.chunk"}

    def call(index: int, text: str) -> dict[str, Any]:
        return {"id": f"call_x-1-{index}", "type": "function", "function": {"name": "f", "arguments": text}}

    (choice,) = json.loads(wording.head + wording.choice(2, "{}", "stop") + "]}")["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [call(2, "{}")]}
    delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **call(1, "")}]}
    assert event(wording.first(1)) == head | {"choices": [{"index": 1, "delta": delta, **END}]}
    piece = {"tool_calls": [{"index": 0, "function": {"arguments": "b"}}]}
    assert event(wording.piece(1, "b", None, None)) == head | {"choices": [{"index": 1, "delta": piece, **END}]}
    assert json.loads(wording.in_prompts(1, lambda: "{}")()) == [call(1, "{}")]


def test_pieces_that_are_taken_together() -> None:
    text = Text(cycle("abc"), 7, "length")
    assert [text.take(k) for k in (1, 3, 3, 7)] == ["a", "bc", "", "abca"] and text.taken == 7
    cut = Text(iter("abc"), 3, "stop", last="!")
    assert [cut.take(k) for k in (1, 1, 3)] == ["a", "", "b!"]
    cut = Text(iter("abc"), 3, "stop", last="!")
    assert [cut.take(k) for k in (2, 3)] == ["ab", "!"] and cut.whole() == "" and cut.held == 0


def test_usage() -> None:
    assert usage_of(5, 3, 7) == {
        "prompt_tokens": 5, "total_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip
