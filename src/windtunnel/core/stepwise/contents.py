"""What the prompts of a live fleet begin with, written where its schedulers look for it when a request arrives."""

from typing import Any

import numpy as np

from windtunnel.core.dispatch import several
from windtunnel.core.records import NONE, State
from windtunnel.core.texts.owners import Texts


class Rooms:
    """Stretches of a long array, one for each slot; one that has become too short is left for one twice as long."""

    def __init__(self) -> None:
        self.end = 0
        """Entries that all of them take."""
        self._of: dict[int, tuple[int, int]] = {}

    def first(self, r: int, wanted: int) -> int:
        """The first entry of slot ``r``, which has at least so many."""
        first, length = self._of.get(r, (0, 0))
        if wanted > length:
            first, length = self.end, 1 << wanted.bit_length()
            self._of[r], self.end = (first, length), first + length
        return first


class Contents:
    """Room for the names of prompts' blocks, and for the cached blocks that requests hold.

    A slot keeps its room for the requests that follow in it.
    """

    def __init__(self, state: State, block_size: int, hash_block_size: int) -> None:
        """``hash_block_size``: tokens that a name stands for."""
        self.block_size, self.size = block_size, hash_block_size
        kept = state.own if several(state.own) else (state.own,)
        self._templates = [own.cache.holdings[0].item() if _has_holdings(own) else None for own in kept]
        self._names, self._tables = Rooms(), Rooms()

    def write(self, state: State, r: int, prompt: int, output: int, names: tuple[int, ...]) -> State:
        """Slot ``r`` has a prompt whose full blocks have these names; the state, with more room if it was needed."""
        first = self._names.first(r, len(names))
        table = self._tables.first(r, (prompt + output) // self.block_size + 1)
        if not several(state.own):
            own = self._write(state, state.own, 0, r, names, first, table)
            return state if own is state.own else state._replace(own=own)
        parts = (self._write(state, own, k, r, names, first, table) for k, own in enumerate(state.own))
        return state._replace(own=tuple(parts))

    def _write(self, state: State, own: Any, k: int, r: int, names: tuple[int, ...], first: int, table: int) -> Any:
        """The same room serves all schedulers, each of which has arrays of its own."""
        if getattr(own, "tree", None) is not None:
            texts = self._named(own.tree.texts, r, names, first)
            return own if texts is own.tree.texts else own._replace(tree=own.tree._replace(texts=texts))
        if getattr(own, "cache", None) is None:
            return own
        cache, texts = _roomy(own.cache, tables=self._tables.end), self._named(own.cache.texts, r, names, first)
        if texts is not cache.texts:
            cache = cache._replace(texts=texts)
        rows = cache.holdings if _has_holdings(own) else state.requests
        if _has_holdings(own):
            rows[r] = self._templates[k]
        row = rows[r]
        row["table"] = table
        if _has_holdings(own):
            row["room"] = NONE
            row["shared"] = len(names) * self.size // self.block_size
        return own if cache is own.cache else own._replace(cache=cache)

    def _named(self, texts: Texts, r: int, names: tuple[int, ...], first: int) -> Texts:
        texts = _roomy(texts, names=self._names.end)
        texts.names[first : first + len(names)] = names
        texts.rows[r]["named"], texts.rows[r]["names"] = len(names) * self.size, first
        return texts


def _has_holdings(own: Any) -> bool:
    """Whether what a request holds stands apart from its record."""
    return hasattr(getattr(own, "cache", None), "holdings")


def _roomy(own: Any, **wanted: int) -> Any:
    """The named tuple, with copies twice as long as is wanted of the arrays that are shorter."""
    for name, size in wanted.items():
        if size > len(getattr(own, name)):
            own = own._replace(**{name: _longer(getattr(own, name), size)})
    return own


def _longer(array: Any, wanted: int) -> Any:
    """A copy twice as long as is wanted."""
    longer = np.zeros(2 * wanted, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
