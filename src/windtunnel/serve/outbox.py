"""Tokens on their way out: what each client is sent of a step, written by compiled code, one right after the other.

A token is a call of the system and a client that is woken. With Python's work of an event between two of them the
memory caches hold neither, and each costs three times as much.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numba import config, types
from numpy.typing import NDArray

from windtunnel.core.compiled import Settled, entry, part
from windtunnel.serve.openai.answers import Text, Wording
from windtunnel.serve.tokens import BY_NUMBER

Integers = NDArray[np.int64]

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    write: Any = ctypes.CDLL(None).write
    write.argtypes, write.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_ssize_t
else:
    write = types.ExternalFunction("write", types.intp(types.intc, types.intp, types.intp))

REFUSED, AT_ITS_END, ASKED = -3, -2, -1
"""In place of a file: the connection took less than an event; whoever waits for the request is told when it ends; or is
told of each token, and sends it."""
AHEAD = 256
"""Words that are drawn ahead, at most."""
ROOM = 512
"""Bytes of an event before its words; one with more, as by a long name of the model, is made in Python."""
AFTER_ROOM, WORD_ROOM = 64, 16
CHUNK = ROOM + AFTER_ROOM + AHEAD * WORD_ROOM + 16


class Lines(NamedTuple):
    """What is written for the request in each slot."""

    tokens: Integers
    """That it has, of as many as it will have."""
    wanted: Integers
    sent: Integers
    """Those that its client has been sent."""
    file: Integers
    """Descriptor of the connection."""
    until: Integers
    """Tokens up to which its words are here."""
    words: NDArray[np.uint8]
    before: NDArray[np.uint8]
    before_length: Integers
    after: NDArray[np.uint8]
    after_length: Integers
    cut: Integers
    """Bytes of the next event that the connection has taken already."""


class Words(NamedTuple):
    """The texts of all words, and the room in which an event is made."""

    texts: NDArray[np.uint8]
    lengths: Integers
    chunk: NDArray[np.uint8]
    address: int


@part
def put(chunk: NDArray[np.uint8], at: int, text: NDArray[np.uint8], length: int) -> int:
    """Copy this many bytes of a text to a place: the place after them."""
    for j in range(length):
        chunk[at + j] = text[j]
    return at + length


@part
def put_length(chunk: NDArray[np.uint8], length: int) -> int:
    """Begin a chunk of HTTP of this many bytes, below 16⁴: the place after that."""
    at = 0
    for shift in (12, 8, 4, 0):
        digit = (length >> shift) & 15
        if at > 0 or digit > 0:
            chunk[at] = digit + (48 if digit < 10 else 87)
            at += 1
    return end_line(chunk, at)


@part
def end_line(chunk: NDArray[np.uint8], at: int) -> int:
    """End a line of HTTP at a place: the place after that."""
    chunk[at], chunk[at + 1] = 13, 10
    return at + 2


@entry
def send_out(lines: Lines, words: Words, slots: Integers, left: Integers) -> int:
    """Send the clients of these slots the tokens that they have not got: how many are ``left`` to Python."""
    count = 0
    for r in slots:
        new, ends = lines.tokens[r] - lines.sent[r], lines.tokens[r] >= lines.wanted[r]
        if new <= 0 or (lines.file[r] == AT_ITS_END and not ends):
            continue
        if lines.file[r] >= 0 and not ends and lines.tokens[r] <= lines.until[r]:
            length = lines.before_length[r] + lines.after_length[r]
            first = AHEAD - (lines.until[r] - lines.sent[r])
            for k in range(first, first + new):
                length += words.lengths[lines.words[r, k]]
            at = put_length(words.chunk, length)
            at = put(words.chunk, at, lines.before[r], lines.before_length[r])
            for k in range(first, first + new):
                word = lines.words[r, k]
                at = put(words.chunk, at, words.texts[word], words.lengths[word])
            at = put(words.chunk, at, lines.after[r], lines.after_length[r])
            at = end_line(words.chunk, at)
            done = write(lines.file[r], words.address, at)
            if done == at:
                lines.sent[r] += new
                continue
            lines.file[r], lines.cut[r] = REFUSED, max(done, 0)
        elif lines.file[r] == ASKED:
            lines.sent[r] = lines.tokens[r]
        left[count] = r
        count += 1
    return count


class Outbox:
    """Sends tokens of all requests that have clients on their own connections; the others are told."""

    def __init__(self) -> None:
        self.lines = _lines(1024)
        texts = [word.encode() for word in BY_NUMBER]
        self._words = Words(*_table(texts, WORD_ROOM), np.zeros(CHUNK, dtype=np.uint8), 0)
        self._words = self._words._replace(address=self._words.chunk.ctypes.data)
        self._left = np.zeros(1024, dtype=np.int64)
        self._send_out = Settled(send_out)
        self._added: list[int] = []
        self.send(np.zeros(0, dtype=np.int64))  # compiled before anyone waits for it

    def begin(self, slot: int, wanted: int, eager: bool) -> None:
        """A request takes a slot; ``eager``: its client wants each token when it comes."""
        while slot >= len(self.lines.tokens):
            more = _lines(len(self.lines.tokens))
            both: list[Any] = list(zip(self.lines, more, strict=True))
            self.lines = Lines(*map(np.concatenate, both))
            self._left = np.zeros(len(self.lines.tokens), dtype=np.int64)
        lines = self.lines
        lines.tokens[slot] = lines.sent[slot] = lines.until[slot] = lines.cut[slot] = 0
        lines.wanted[slot], lines.file[slot] = wanted, ASKED if eager else AT_ITS_END

    def send(self, slots: Integers) -> list[int]:
        """Send what can be sent from here: those who are to be told."""
        count = self._send_out(self.lines, self._words, slots, self._left)
        found: list[int] = self._left[:count].tolist()
        return found

    def send_added(self) -> list[int]:
        """The same for those who have been added since the last call."""
        if not self._added:
            return []
        added, self._added = self._added, []
        return self.send(np.array(added))

    def add(self, slot: int, file: int, wording: Wording, text: Text) -> bool:
        """From now on, tokens of a request are sent from here, as long as all of them go out at once, to a connection
        with nothing unsent; False where its events cannot be made here."""
        before, after = wording.around
        lines = self.lines
        if text.drawn is None or len(before) > ROOM or len(after) > AFTER_ROOM:
            return False
        if lines.tokens[slot] - text.taken > AHEAD:
            return False
        ahead = max(min(AHEAD, int(lines.wanted[slot]) - text.taken), 0)
        lines.words[slot, AHEAD - ahead :] = np.frombuffer(text.drawn.numbers(text.taken, ahead), dtype=np.uint8)
        lines.until[slot], lines.sent[slot], lines.file[slot] = text.taken + ahead, text.taken, file
        lines.before[slot, : len(before)] = np.frombuffer(before, dtype=np.uint8)
        lines.after[slot, : len(after)] = np.frombuffer(after, dtype=np.uint8)
        lines.before_length[slot], lines.after_length[slot] = len(before), len(after)
        self._added.append(slot)
        return True

    def take_back(self, slot: int) -> tuple[int, bool, int]:
        """Send nothing more from here: tokens that were sent, whether the connection took less than the event that
        comes next, and how many bytes of it."""
        lines = self.lines
        refused, cut = bool(lines.file[slot] == REFUSED), int(lines.cut[slot])
        lines.file[slot], lines.cut[slot] = ASKED, 0
        return int(lines.sent[slot]), refused, cut


def _lines(slots: int) -> Lines:
    """Those of this many slots."""
    widths = {"words": AHEAD, "before": ROOM, "after": AFTER_ROOM}
    columns: list[Any] = [
        np.zeros((slots, widths[name]), dtype=np.uint8) if name in widths else np.zeros(slots, dtype=np.int64)
        for name in Lines._fields
    ]
    return Lines(*columns)


def _table(texts: list[bytes], room: int) -> tuple[NDArray[np.uint8], Integers]:
    """Texts as rows, and their lengths."""
    found = np.zeros((len(texts), room), dtype=np.uint8)
    for row, text in zip(found, texts, strict=True):
        row[: len(text)] = list(text)
    return found, np.array(list(map(len, texts)))
