"""What is known of the texts that were served, and the memory that it takes."""

import asyncio
import tracemalloc
from typing import Any

import pytest

from serve.endpoint import app, client
from windtunnel.serve.kv import texts as module
from windtunnel.serve.kv.texts import Names, Served, Texts
from windtunnel.serve.openai.answers import Text, Wording, text_of
from windtunnel.serve.openai.requests import read_completion
from windtunnel.serve.openai.shapes import Shape
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import BytesRule, EchoedWords, SeededWords

SIZE = 16


async def answered(texts: Texts, prompt: str, tokens: int, shape: Shape | None = None, echo: bool = False) -> Text:
    """A prompt comes, and gets an answer of so many tokens."""
    asked, pace = read_completion({"prompt": prompt, "max_tokens": tokens}), Pace()
    names = await rest(texts, prompt)
    words = EchoedWords(prompt) if echo else SeededWords(1, prompt.encode())
    text = await text_of(words, tokens, tokens, asked, shape)
    said = Wording(asked, "cmpl-1", "m", 1, shape.tool if shape else None).in_prompts(0, text.whole)
    await texts.learn(prompt, Served(texts.answered(names, tokens), said, text.held), pace)
    return text


async def rest(texts: Texts, prompt: str) -> Names:
    """The names of all of a prompt."""
    names, begun = await texts.read(prompt, (), Pace())
    return await names.add(BytesRule().encode(prompt[begun:]), Pace())


@pytest.mark.parametrize("answer", ["words", "echo", "document"])
@pytest.mark.parametrize("words", [2, 500])
def test_texts_take_no_more_memory_than_is_counted(words: int, answer: str) -> None:
    """The prompts themselves are not among what is kept, but where an answer repeats them."""
    shape = Shape('{"a":"' + "b" * 1000, '"}', "tool") if answer == "document" else None

    async def many(texts: Texts, first: int, count: int) -> None:
        for k in range(first, first + count):
            await answered(texts, f"{k} " + "word " * words, 40, shape, answer == "echo")

    async def measure() -> tuple[int, int]:
        texts = Texts(SIZE, b"secret")
        await many(texts, 0, 20)
        before = texts.bytes
        tracemalloc.start()
        try:
            await many(texts, 20, 200)
            return tracemalloc.get_traced_memory()[0], texts.bytes - before
        finally:
            tracemalloc.stop()

    taken, counted = asyncio.run(measure())
    assert counted / 2 < taken < 1.1 * counted


def test_the_texts_that_were_not_gone_on_from_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def known(most: int) -> list[bool]:
        texts, said = Texts(SIZE, b"secret"), {}
        monkeypatch.setattr(module, "MOST_BYTES", most)
        for k in range(3):
            prompt = f"{k} " + "word " * 100
            said[prompt] = (await answered(texts, prompt, 64)).whole()
            if k == 1:
                first = next(iter(said))
                await texts.read(first + said[first] + "!", (), Pace())
        found = [await texts.read(prompt + answer + "!", (), Pace()) for prompt, answer in said.items()]
        assert texts.bytes <= most
        return [begun > 0 for _, begun in found]

    one = Served(asyncio.run(rest(Texts(SIZE, b""), "0 " + "word " * 100 + "word" * 64)), str).bytes
    assert asyncio.run(known(3 * one)) == [True, True, True]
    assert asyncio.run(known(5 * one // 2)) == [True, False, True]
    assert asyncio.run(known(one // 2)) == [False, False, False]


def test_of_one_prompt_few_answers_are_known() -> None:
    async def measure() -> list[int]:
        texts, found = Texts(SIZE, b"secret"), []
        for _ in range(module.ANSWERS + 5):
            await answered(texts, "word " * 40, 20)
            found.append(texts.bytes)
        return found

    sizes = asyncio.run(measure())
    assert sizes[module.ANSWERS - 2] < sizes[module.ANSWERS - 1] == sizes[-1] == module.ANSWERS * sizes[0]


@pytest.mark.parametrize("echo", [False, True])
def test_a_conversation_has_its_own_answers_in_the_cache(echo: bool) -> None:
    """A tool's call, too: its arguments come back in the words of the prompt."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "word " * 50}]
    body = {"max_tokens": 200, "tools": [tool], "tool_choice": "required"}

    async def talk() -> list[int]:
        cached = []
        async with client(app(echo=echo)) as server:
            for _ in range(2):
                reply = (await server.post("/v1/chat/completions", json={**body, "messages": messages})).json()
                cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
                result = {"role": "tool", "content": "done " * 20, "tool_call_id": "x"}
                messages.extend([reply["choices"][0]["message"], result])
        return cached

    first, second = asyncio.run(talk())
    assert first == 0 and second >= 200


async def known(texts: Texts, prompt: str, places: tuple[int, ...] = ()) -> int:
    """Characters of a prompt that were served before."""
    return (await texts.read(prompt, places, Pace()))[1]


def test_which_texts_are_found_and_which_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one prompt the last answers, of one beginning the last lengths, of beginnings the last."""
    monkeypatch.setattr(module, "ANSWERS", 2)
    monkeypatch.setattr(module, "LENGTHS", 2)
    monkeypatch.setattr(module, "HEADS", 2)

    async def talk() -> None:
        texts, nothing = Texts(SIZE, b"secret"), Texts(SIZE, b"").nothing()

        async def learn(prompt: str, said: str) -> None:
            await texts.learn(prompt, Served(nothing, lambda: said), Pace())

        first = "prompt" * 3  # longer than what is looked at first
        for said in ("one", "two", "three"):
            await learn(first, said)
        assert [await known(texts, f"{first}{said}!") for said in ("one", "two", "three")] == [0, 21, 23]
        assert [await known(texts, first + said) for said in ("", "tw", "TWO!")] == [0, 0, 0]
        assert await known(texts, first + "two!", (18,)) == 21 and await known(texts, first + "two!", (17, 19)) == 0
        head = "x" * module.HEAD
        for length in (1, 2, 3):
            await learn(head + "y" * length, "said")
        assert [await known(texts, head + "y" * n + "said!") for n in (1, 2, 3)] == [0, 22, 23]
        await learn(head + "y" * 2, "said")  # used again: the third is now the oldest
        await learn(head + "y" * 4, "said")
        assert [await known(texts, head + "y" * n + "said!") for n in (2, 3, 4)] == [22, 0, 24]
        await learn("other" * 4, "said")
        assert [await known(texts, prompt) for prompt in (first + "two!", head + "yysaid!", "other" * 4 + "said!")] == [
            0,
            22,
            24,
        ]

    asyncio.run(talk())


def test_of_answers_that_begin_alike_the_longest_is_gone_on_from() -> None:
    """Equal prompts get equal words, and so one answer may be the beginning of another that came before it."""

    async def talk() -> list[tuple[int, list[int]]]:
        texts, prompt = Texts(SIZE, b"secret"), "word " * 30
        long = (await answered(texts, prompt, 64)).whole()
        short = (await answered(texts, prompt, 20)).whole()
        assert long.startswith(short)
        found = [await texts.read(prompt + said, (), Pace()) for said in (long + "!", short + "!", long[:-9] + "!")]
        return [(begun, names.names.tolist()) for names, begun in found]

    (whole, of_long), (part, of_short), (cut, of_cut) = asyncio.run(talk())
    assert whole > part == cut and len(of_long) == (38 + 64) // SIZE
    assert len(of_short) == (38 + 20) // SIZE and of_short == of_cut and of_short[:2] == of_long[:2] != of_short[1:3]
    assert of_short[2] != of_long[2]  # two answers, though their words are equal so far


def test_blocks_of_an_answer_are_numbered_from_a_number_of_its_own() -> None:
    """Blocks of 4: a prompt of 6 tokens leaves 2 for the first block of its answer; 9 tokens are 15 in all."""
    names = asyncio.run(Names(4, b"secret").add([1, 2, 3, 4, 5, 6], Pace()))
    (first,) = names.names
    copied = names.copy()
    names.answer(100, 9)
    assert (names.tokens, names.names.tolist(), names._rest) == (15, [first, 100, 101], (0, 0, 0))
    names.answer(200, 1)
    assert (names.tokens, names.names.tolist()[3:], names._rest) == (16, [200], ())
    copied.answer(100, 9, (11, 12, 13, 14, 15, 16, 17, 18, 19))
    assert copied._rest == (17, 18, 19) and copied.names.tolist() == [first, 100, 101]
    counted = asyncio.run(Names(0, b"").add([1] * 5, Pace()))
    counted.answer(100, 9)
    assert counted.tokens == 14 and not counted.names
    taken = Served(copied, str, 7)
    assert taken.bytes == module.TEXT_BYTES + 8 * 3 + 7 and Served(copied, str).held == 0


def test_many_blocks_are_named_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*parts: list[int]) -> list[int]:
        names = Names(4, b"secret")
        for part in parts:
            asyncio.run(names.add(part, Pace()))
        return names.names.tolist()

    tokens = [*range(1000, 1103)]
    whole = named(tokens)
    assert len(whole) == 25 and named(tokens[:7], tokens[7:8], tokens[8:]) == whole
    monkeypatch.setattr(module, "NAMED_AT_ONCE", 3)
    assert named(tokens) == whole and named(tokens[:99], tokens[99:]) == whole
