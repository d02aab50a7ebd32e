"""Texts as tokens and named blocks. A prompt that goes on from an answer of this server has that answer's own tokens.

What clients send is text, and the words of an answer are other tokens when they are read again by a rule of bytes. So a
prompt is looked up among the texts that were served, prompt and answer, and only what follows is read anew.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from struct import pack, unpack
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.serve.kv.events import Ledger
from windtunnel.serve.pace import Pace

NAME_BITS = 52
"""Of a block's name: numbers up to 2⁵³ keep their value in every reader of JSON."""
NAMED_AT_ONCE = 256
"""Blocks between two turns of others."""
MOST_BYTES = 1 << 26
"""Of all texts that are known, names of 8 bytes and what they are found by; those that were not gone on from for
longest are forgotten."""
TEXT_BYTES = 2560
"""Of one, but for its names: a little more than CPython's objects take."""
HEAD, HEADS, LENGTHS = 16, 1 << 12, 64
"""Characters that tell prompts from each other, how many such beginnings are known, and how many lengths of each."""
ANSWERS = 64
"""Of the same prompt that are known."""


class Names:
    """The tokens of a text by number, and a name for each full block of them: equal for equal text up to its end, and
    of no use without the secret."""

    __slots__ = "_chain", "_ledger", "_rest", "names", "size", "tokens"

    def __init__(self, size: int, secret: bytes, ledger: Ledger | None = None) -> None:
        """``size``: tokens of a block; 0: they are only counted. ``ledger``: is told of their tokens."""
        self.size, self.tokens, self.names = size, 0, array("q")
        self._rest: tuple[int, ...] = ()
        self._chain, self._ledger = blake2b(key=secret, digest_size=8), ledger

    def copy(self) -> "Names":
        """One that goes on by itself."""
        found: Names = object.__new__(Names)
        found.size, found.tokens, found.names = self.size, self.tokens, self.names[:]
        found._rest, found._chain, found._ledger = self._rest, self._chain.copy(), self._ledger
        return found

    async def add(self, tokens: Sequence[int], pace: Pace) -> "Names":
        """More of the text."""
        self.tokens += len(tokens)
        if not self.size:
            return self
        tokens = (*self._rest, *tokens)
        blocks, size = len(tokens) // self.size, 8 * self.size
        for first in range(0, blocks, NAMED_AT_ONCE):
            count = min(NAMED_AT_ONCE, blocks - first)
            await pace.spend(4 * count)
            data = pack(f">{count * self.size}Q", *tokens[first * self.size : (first + count) * self.size])
            digests = []
            for begin in range(0, count * size, size):
                self._chain.update(data[begin : begin + size])
                digests.append(self._chain.copy().digest())
            names = [name >> (64 - NAME_BITS) for name in unpack(f">{count}Q", b"".join(digests))]
            self._note(names, tokens[first * self.size :])
            self.names.extend(names)
        self._rest = tokens[blocks * self.size :]
        return self

    def answer(self, number: int, tokens: int, said: Sequence[int] = ()) -> None:
        """An answer goes on from the text, whose blocks are numbered from a number that is nobody else's.

        ``said``: its tokens, where a ledger is to know them.
        """
        self.tokens += tokens
        if self.size:
            blocks, rest = divmod(len(self._rest) + tokens, self.size)
            names = range(number, number + blocks)
            self._note(names, (*self._rest, *said))
            self.names.extend(names)
            self._chain.update(pack(">2Q", number, tokens))
            self._rest = tuple(said[-rest:]) if said and 0 < rest <= len(said) else (0,) * rest

    def _note(self, names: Sequence[int], tokens: Sequence[int]) -> None:
        if self._ledger is not None:
            self._ledger.note(self.names[-1] if self.names else None, names, tokens, self.size)


@dataclass(frozen=True, eq=False, slots=True)
class Served:
    """A prompt and its answer."""

    names: Names
    said: Callable[[], str]
    """The answer as it stands in a prompt that goes on from it."""
    held: int = 0
    """Bytes that it holds on to for that, beyond a few."""

    @property
    def bytes(self) -> int:
        """What it takes, about."""
        return TEXT_BYTES + 8 * len(self.names.names) + self.held


class Texts:
    """The texts that were served."""

    def __init__(self, size: int, secret: bytes, ledger: Ledger | None = None) -> None:
        self._size, self._secret, self.ledger = size, secret, ledger
        self._random = Random(secret)
        self._known: OrderedDict[bytes, list[Served]] = OrderedDict()
        """By what their prompt says, the longest unused first."""
        self._lengths: OrderedDict[str, dict[int, None]] = OrderedDict()
        """Characters of the prompts with a beginning."""
        self.bytes = 0

    async def read(self, prompt: str, places: Sequence[int], pace: Pace) -> tuple[Names, int]:
        """The longest text that was served with which a prompt begins, and its characters.

        ``places``: where answers may begin in it, if that is known.
        """
        found, last, text = list[tuple[int, bytes]](), 0, self._digest()
        for place in sorted(places or self._lengths.get(prompt[:HEAD], ())):
            if place >= len(prompt):
                break
            await pace.spend(8 + (place - last >> 7))
            text.update(prompt[last:place].encode("utf-8", "surrogatepass"))
            last = place
            found.append((place, text.copy().digest()))
        for place, digest in reversed(found):
            latest_first = reversed(self._known.get(digest, ()))
            for served in sorted(latest_first, key=lambda one: one.names.tokens, reverse=True):
                await pace.spend(8 + (served.names.tokens >> 1))
                said = served.said()
                if said and prompt.startswith(said, place):
                    self._known.move_to_end(digest)
                    return served.names.copy(), place + len(said)
        return self.nothing(), 0

    def nothing(self) -> Names:
        """Of which nothing is known."""
        return Names(self._size, self._secret, self.ledger)

    def answered(self, prompt: Names, tokens: int, said: Sequence[int] = ()) -> Names:
        """The names of a prompt and an answer of this many tokens, which is nobody else's."""
        names = prompt.copy()
        names.answer(self._random.getrandbits(NAME_BITS - 1), tokens, said)
        return names

    async def learn(self, prompt: str, served: Served, pace: Pace) -> None:
        """A prompt is answered."""
        await pace.spend(8 + (len(prompt) >> 7))
        text = self._digest()
        text.update(prompt.encode("utf-8", "surrogatepass"))
        known = self._known.setdefault(text.digest(), [])
        self._known.move_to_end(text.digest())
        known.append(served)
        self.bytes += served.bytes
        if len(known) > ANSWERS:
            self.bytes -= known.pop(0).bytes
        lengths = self._lengths.setdefault(prompt[:HEAD], {})
        self._lengths.move_to_end(prompt[:HEAD])
        lengths.pop(len(prompt), None)
        lengths[len(prompt)] = None
        if len(lengths) > LENGTHS:
            del lengths[next(iter(lengths))]
        if len(self._lengths) > HEADS:
            self._lengths.popitem(last=False)
        while self.bytes > MOST_BYTES:
            self.bytes -= sum(one.bytes for one in self._known.popitem(last=False)[1])

    def _digest(self) -> Any:
        return blake2b(key=self._secret, digest_size=16)
