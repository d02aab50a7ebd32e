"""Batches in words: ``decode=32@4096,prefill=2x1024@8192``."""

import re
from dataclasses import dataclass

from windtunnel.errors import InputError

ITEM = re.compile(r"(?P<kind>\w+)=(?P<count>\d+)(?:x(?P<tokens>\d+))?(?:@(?P<context>\d+))?")
GRAMMAR = "write decode=REQUESTS@CONTEXT and prefill=CHUNKSxTOKENS@CONTEXT, e.g. decode=32@4096,prefill=2x1024@8192"


@dataclass(frozen=True)
class Batch:
    """One step of one rank: decodes with their tokens in the cache, and prefill chunks."""

    decodes: int = 0
    kv_tokens: int = 0
    """Tokens in the cache of all decodes together."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens, context) of each prefill chunk, in order."""

    def __post_init__(self) -> None:
        if self.decodes < 0 or self.kv_tokens < 0 or (self.kv_tokens and not self.decodes):
            raise InputError(f"batch of {self.decodes} decodes over {self.kv_tokens} tokens: counts must be ≥ 0")
        if any(tokens < 1 or context < 0 for tokens, context in self.chunks):
            raise InputError("batch: a prefill chunk has at least 1 token, at a context ≥ 0")
        if not self.decodes and not self.chunks:
            raise InputError(f"batch is empty: {GRAMMAR}")

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""
        return self.decodes + sum(tokens for tokens, _ in self.chunks)

    @property
    def sequences(self) -> int:
        """Requests in the step."""
        return self.decodes + len(self.chunks)

    def __str__(self) -> str:
        parts = [f"decode={self.decodes}@{self.kv_tokens // self.decodes}"] if self.decodes else []
        return ",".join(parts + [f"prefill=1x{tokens}@{context}" for tokens, context in self.chunks])


def parse_batch(text: str) -> Batch:
    """A batch from text: items separated by commas, added up.

    ``decode=N@C``: N decodes with C tokens in the cache each. ``prefill=KxN@C``: K chunks of N tokens at context C;
    ``prefill=N``: one. A context that is left out is 0. Raises InputError with the grammar.
    """
    decodes = kv_tokens = 0
    chunks: list[tuple[int, int]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = ITEM.fullmatch(item)
        if not match or match["kind"] not in ("decode", "prefill"):
            raise InputError(f"batch {item!r} is not understood: {GRAMMAR}")
        count, context = int(match["count"]), int(match["context"] or 0)
        if match["kind"] == "decode":
            if match["tokens"]:
                raise InputError(f"batch {item!r}: a decode has one token: {GRAMMAR}")
            decodes, kv_tokens = decodes + count, kv_tokens + count * context
        else:
            copies, tokens = (count, int(match["tokens"])) if match["tokens"] else (1, count)
            chunks += [(tokens, context)] * copies
    return Batch(decodes, kv_tokens, tuple(chunks))
