"""Tokens of prompts, and the names of their blocks."""

import asyncio
from collections.abc import Sequence

import pytest

from windtunnel.serve.kv.texts import NAME_BITS, Names
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import BytesRule, SeededWords

SECRET = b"secret"


def block_names(tokens: Sequence[int], size: int, secret: bytes) -> tuple[int, ...]:
    return tuple(asyncio.run(Names(size, secret).add(tokens, Pace())).names)


@pytest.mark.parametrize("text", ["", "a", "abc", "abcd", "abcdefghij", "ä€𝄞" * 7])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_a_token_for_every_few_bytes(text: str, size: int) -> None:
    data = text.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert list(BytesRule(size).encode(text)) == [int.from_bytes(piece) for piece in pieces]


def test_equal_beginnings_have_equal_names() -> None:
    tokens = list(range(100))
    names = block_names(tokens, 16, SECRET)
    assert len(names) == len(set(names)) == 6 and all(0 <= name < 1 << NAME_BITS for name in names)
    for change in (0, 17, 95):
        other = block_names([*tokens[:change], 7777, *tokens[change + 1 :]], 16, SECRET)
        assert [a == b for a, b in zip(names, other, strict=True)] == [16 * (k + 1) <= change for k in range(6)]
    assert block_names(tokens[:95], 16, SECRET) == names[:5]
    assert block_names(tokens[16:], 16, SECRET)[0] not in names
    assert not set(names) & set(block_names(tokens, 16, b"another"))
    assert block_names(tokens[:15], 16, SECRET) == ()


def test_words_are_drawn_by_seed_and_prompt() -> None:
    first, again, seed, prompt = (
        [word for word, _ in zip(SeededWords(*key), range(200), strict=False)]
        for key in ((1, b"a"), (1, b"a"), (2, b"a"), (1, b"b"))
    )
    assert first == again and first not in (seed, prompt)
    assert len(set(first)) > 40 and all(word.startswith(" ") for word in first)
