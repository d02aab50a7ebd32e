"""Tokens: how many a prompt has, which of its blocks are alike, and what an answer says."""

import asyncio
import re
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Protocol

from windtunnel.errors import InputError

WORDS = re.findall(
    r"\S+",
    "the of and to in is was for on as with by he at from his it an were are which this be had also or has first one "
    "their its new after but who they have her she two been other when there all during into school time may years "
    "more most only over city some world would where later up such used many can state about national out known "
    "university united then made game team",
)
"""What answers are made of: each word, with a space before it, stands for a token."""
BY_NUMBER = [f" {WORDS[number % len(WORDS)]}" for number in range(256)]


class Tokenizer(Protocol):
    """Text to tokens."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""
        ...

    def least(self, text: str) -> int:
        """Tokens that a text has at least, known without a look at it."""
        ...


class BytesRule:
    """Every ``bytes_per_token`` bytes of UTF-8 are a token: for servers whose tokenizer is not at hand."""

    def __init__(self, bytes_per_token: int = 4) -> None:
        """Raises InputError for less than a byte."""
        if bytes_per_token < 1:
            raise InputError(f"bytes_per_token={bytes_per_token}: must be ≥ 1")
        self.bytes_per_token = bytes_per_token

    def encode(self, text: str) -> Sequence[int]:
        """Pieces of the text, as numbers that are equal for equal pieces."""
        data, size = text.encode("utf-8", "surrogatepass"), self.bytes_per_token
        if size > 6:
            pieces = (data[i : i + size] for i in range(0, len(data), size))
            return [int.from_bytes(blake2b(piece, digest_size=6).digest()) for piece in pieces]
        if size == 4:  # at once: what is asked of every request that a server gets
            whole = len(data) // 4
            found = struct.unpack_from(f">{whole}I", data)
            return (*found, int.from_bytes(data[4 * whole :])) if len(data) % 4 else found
        return [int.from_bytes(data[i : i + size]) for i in range(0, len(data), size)]

    def least(self, text: str) -> int:
        """A character has at least a byte."""
        return -(-len(text) // self.bytes_per_token)


class FileTokenizer:
    """A ``tokenizer.json``, as Hugging Face's models have it."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a file that is none, and where the package that reads it is missing."""
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError as error:
            raise InputError("tokenizer: needs the package tokenizers: pip install 'windtunnel[serve]'") from error
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError(f"tokenizer {str(path)!r}: no such file: give a tokenizer.json, or its folder")
        try:
            self._reader: Any = Reader.from_file(str(file))
        except Exception as error:  # the package raises plain exceptions
            raise InputError(f"tokenizer {str(path)!r}: {error}") from error

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text; what a template adds around it is not among them. Other threads go on meanwhile."""
        (found,) = self._reader.encode_batch([text], add_special_tokens=False)
        tokens: Sequence[int] = found.ids
        return tokens

    def least(self, text: str) -> int:
        """Nobody knows before it is read."""
        return min(len(text), 1)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._reader.decode(list(tokens), skip_special_tokens=False))


READ_AT_ONCE = 1 << 18
"""Characters; longer texts are read by another thread."""


async def tokens_of(prompt: str | Sequence[int], tokenizer: Tokenizer) -> Sequence[int]:
    """The tokens of a prompt."""
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) > READ_AT_ONCE:
        return await asyncio.to_thread(tokenizer.encode, prompt)
    return tokenizer.encode(prompt)


TURN_ENDS = "<|im_end|>\n"


def chat_text(messages: Sequence[tuple[str, str]]) -> str:
    """Turns of a conversation in the words of ChatML, or what an answer follows where there are none.

    No file says how a simulated model's template goes.
    """
    if not messages:
        return "<|im_start|>assistant\n"
    return "".join(f"<|im_start|>{role}\n{content}{TURN_ENDS}" for role, content in messages)


class SeededWords:
    """Words that depend on the seed and the prompt alone, one a token."""

    def __init__(self, seed: int, prompt: bytes) -> None:
        self._key = blake2b(prompt, salt=seed.to_bytes(16, signed=True)).digest()

    def numbers(self, first: int, wanted: int) -> bytes:
        """Those of this many words, from a token on."""
        part, skipped = divmod(first, 64)
        parts = (blake2b(here.to_bytes(8), key=self._key).digest() for here in count(part))
        return b"".join(islice(parts, -(-(skipped + wanted) // 64)))[skipped : skipped + wanted]

    def after(self, taken: int) -> Iterator[str]:
        """The words after this many."""
        for first in count(taken, 64):
            for number in self.numbers(first, 64):
                yield BY_NUMBER[number]

    def __iter__(self) -> Iterator[str]:
        return self.after(0)


class EchoedWords:
    """The words of a text again and again, one a token."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[str]:
        return cycle(re.findall(r"\s*\S+", self.text) or [" "])
