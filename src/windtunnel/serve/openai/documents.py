"""JSON of any size, read in slices: a body of megabytes holds nobody else up."""

import json
import re
from typing import Any

from windtunnel.serve.openai.requests import RefusedError
from windtunnel.serve.pace import Pace

AT_ONCE = 1 << 16
"""Characters that are read in one go."""
LONGEST_PARAMETER = 1 << 20
"""Characters of whatever is neither prompt nor messages nor tokens."""
CONTENTS = frozenset(("prompt", "messages", "tokens"))
MOST_VALUES = 1 << 17
"""Of a long document, but for the numbers of lists."""
LONGEST_LIST = 1 << 21
"""Numbers of a list: more than any model reads, and few enough to be forgotten in a moment."""
DEEPEST = 500
BLANK = re.compile(r"[ \t\n\r]*")
FLAT = re.compile(r'[^\[\]{}"]*,')
"""Numbers and words of a list, up to the last comma in the room."""
CLOSES = {"[": "]", "{": "}"}


async def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises RefusedError for anything else, and for text that is no Unicode."""
    try:
        text = body.decode()
        found = json.loads(text) if len(text) <= AT_ONCE else await _Reader(text).read()
        if len(text) <= AT_ONCE and has_halves(text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError("the body has half of a surrogate pair: it must be Unicode") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusedError("the body must be a JSON object")
    return found


def has_halves(text: str) -> bool:
    """Whether a document may have halves of surrogate pairs."""
    return "\\ud" in text or "\\uD" in text


class _Reader:
    """Reads a long document: lists and objects here, what is in them by the interpreter's own reader."""

    def __init__(self, text: str) -> None:
        self._text, self._decode, self._pace = text, json.JSONDecoder().raw_decode, Pace()
        self._halves = False
        self._open: list[tuple[Any, str]] = []
        """Containers that are not closed, and the key of what is read in each."""
        self._values, self._began = 0, 0
        """Where the value of the outermost object's key begins."""

    async def read(self) -> Any:
        """The document. Raises ValueError, RecursionError or UnicodeEncodeError for what is none."""
        for first in range(0, len(self._text), AT_ONCE):
            await self._pace.spend(AT_ONCE >> 4)
            self._halves = self._halves or has_halves(self._text[first : first + AT_ONCE + 2])
        at = self._skip(0)
        while True:
            value, at, opened = self._value(at)
            self._check_room(at)
            await self._pace.spend(20)
            if opened:
                continue
            while True:
                if not self._open:
                    if at != len(self._text):
                        raise ValueError(f"extra data at character {at}")
                    return value
                value, at, closed = await self._add(value, at)
                if not closed:
                    break

    def _check_room(self, at: int) -> None:
        """Raise RefusedError for what is too much before all of it is read, since forgetting it would take a while."""
        self._values += 1
        key = self._open[0][1] if self._open else ""
        if key not in CONTENTS and at - self._began > LONGEST_PARAMETER:
            raise RefusedError(f"{key[:40]}: more than {LONGEST_PARAMETER} characters")
        if self._values > MOST_VALUES:
            raise RefusedError(f"{key[:40]}: more than {MOST_VALUES} values")

    def _value(self, at: int) -> tuple[Any, int, bool]:
        """What begins here: (value, the place after it, whether it is a list or object that is still open)."""
        sign = self._text[at : at + 1]
        if sign not in CLOSES:
            value, after = self._decode(self._text, at)
            return self._checked(value), self._skip(after), False
        container: Any = [] if sign == "[" else {}
        at = self._skip(at + 1)
        if self._text[at : at + 1] == CLOSES[sign]:
            return container, self._skip(at + 1), False
        if len(self._open) == DEEPEST:
            raise RecursionError(f"more than {DEEPEST} levels")
        key = ""
        if sign == "{":
            key, at = self._key(at)
        self._open.append((container, key))
        if len(self._open) == 1:
            self._began = at
        return container, at, True

    async def _add(self, value: Any, at: int) -> tuple[Any, int, bool]:
        """Put a value into its container: (container, the place after it, True) if that ends it."""
        container, key = self._open[-1]
        is_list = isinstance(container, list)
        if is_list:
            container.append(value)
        else:
            container[key] = value
        sign = self._text[at : at + 1]
        if sign == CLOSES["[" if is_list else "{"]:
            self._open.pop()
            return container, self._skip(at + 1), True
        if sign != ",":
            raise ValueError(f"a comma is missing at character {at}")
        at = self._skip(at + 1)
        if is_list:
            at = await self._flat(container, at)
        else:
            key, at = self._key(at)
            self._open[-1] = container, key
            if len(self._open) == 1:
                self._began = at
        return container, at, False

    async def _flat(self, container: list[Any], at: int) -> int:
        """Numbers of a list, many at a time: the place of the next value."""
        while found := FLAT.match(self._text, at, min(at + AT_ONCE, len(self._text))):
            container += json.loads(f"[{self._text[at : found.end() - 1]}]")
            await self._pace.spend((found.end() - at) >> 3)
            at = self._skip(found.end())
            if len(container) > LONGEST_LIST:
                raise RefusedError(
                    f"a list of more than {LONGEST_LIST} numbers: send fewer, no model takes that many tokens"
                )
        return at

    def _key(self, at: int) -> tuple[str, int]:
        if self._text[at : at + 1] != '"':
            raise ValueError(f"a name is missing at character {at}")
        key, at = self._decode(self._text, at)
        at = self._skip(at)
        if self._text[at : at + 1] != ":":
            raise ValueError(f"a colon is missing at character {at}")
        return self._checked(key), self._skip(at + 1)

    def _checked(self, value: Any) -> Any:
        if self._halves and isinstance(value, str):
            value.encode()
        return value

    def _skip(self, at: int) -> int:
        return BLANK.match(self._text, at).end()  # type: ignore[union-attr]
