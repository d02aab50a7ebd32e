"""Tokens of prompts, and the names of their blocks."""

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.serve.kv.texts import NAME_BITS, Names
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import (
    BY_NUMBER,
    READ_AT_ONCE,
    BytesRule,
    EchoedWords,
    FileTokenizer,
    SeededWords,
    chat_text,
    tokens_of,
)

SECRET = b"secret"


def block_names(tokens: Sequence[int], size: int, secret: bytes) -> tuple[int, ...]:
    return tuple(asyncio.run(Names(size, secret).add(tokens, Pace())).names)


@pytest.mark.parametrize("text", ["", "a", "abc", "abcd", "abcdefghij", "ä€𝄞" * 7])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_a_token_for_every_few_bytes(text: str, size: int) -> None:
    data = text.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert list(BytesRule(size).encode(text)) == [int.from_bytes(piece) for piece in pieces]


@pytest.mark.parametrize("size", [7, 8, 16])
def test_long_pieces_are_told_apart(size: int) -> None:
    text = "".join(chr(97 + k % 26) + str(k) for k in range(40))
    tokens = list(BytesRule(size).encode(text))
    assert len(tokens) == len(set(tokens)) == BytesRule(size).least(text) == -(-len(text) // size)
    assert tokens[:2] == list(BytesRule(size).encode(text[: 2 * size])) and max(tokens) < 1 << 48
    assert list(BytesRule(size).encode(text[:size] * 2)) == [tokens[0]] * 2
    assert BytesRule().bytes_per_token == 4 and BytesRule(1).least("abc") == 3
    with pytest.raises(InputError, match="bytes_per_token=0: must be ≥ 1"):
        BytesRule(0)


def test_a_file_of_a_tokenizer(tmp_path: Path) -> None:
    """What a template adds is not among the tokens, and what a token says is kept."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {"[CLS]": 0, "[UNK]": 1, "a": 2, "b": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 0)])
    made.add_special_tokens(["[CLS]"])
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        found = FileTokenizer(path)
        assert list(found.encode("a b c")) == [2, 3, 1] and found.decode([0, 2, 3]) == "[CLS] a b"
        assert (found.least(""), found.least("abc")) == (0, 1)
    for text, words in (("x", "no such file"), ("", "tokenizer")):
        (tmp_path / "wrong.json").write_text("{")
        with pytest.raises(InputError, match=words):
            FileTokenizer(tmp_path / f"{text or 'wrong'}.json")


def test_prompts_of_all_lengths_are_read() -> None:
    for prompt in ("abcd" * 3, "abcd" * (READ_AT_ONCE // 4), "abcd" * (READ_AT_ONCE // 4 + 1)):
        assert len(asyncio.run(tokens_of(prompt, BytesRule()))) == len(prompt) // 4
    assert asyncio.run(tokens_of([7, 8], BytesRule())) == [7, 8]


def test_words_from_anywhere() -> None:
    words = SeededWords(7, b"prompt")
    whole = words.numbers(0, 300)
    for first, wanted in ((0, 1), (63, 2), (64, 64), (100, 150), (128, 0), (1, 299)):
        assert words.numbers(first, wanted) == whole[first : first + wanted]
    told = list(islice(words, 300))
    assert told == [BY_NUMBER[number] for number in whole] and list(islice(words.after(64), 100)) == told[64:164]
    assert list(islice(EchoedWords("a b\n c"), 5)) == ["a", " b", "\n c", "a", " b"]
    assert list(islice(EchoedWords(""), 2)) == [" ", " "]


def test_a_chat_is_chatml() -> None:
    assert chat_text([]) == "<|im_start|>assistant\n"
    assert chat_text([("user", "a"), ("tool", "b")]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n"
    )


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
