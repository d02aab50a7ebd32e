"""What the prompts of a live fleet begin with, written where its schedulers look for it when a request arrives."""

from typing import Any

import numpy as np

from windtunnel.core.dispatch import kinds_of, several
from windtunnel.core.engine import Fleet
from windtunnel.core.records import NONE, State
from windtunnel.core.stores import chunks
from windtunnel.core.texts.owners import Texts


class Rooms:
    """Stretches of a long array, one for each slot; one that has become too short is left for one twice as long."""

    def __init__(self) -> None:
        self.end = 0
        """Entries that all of them take."""
        self._of: dict[int, tuple[int, int]] = {}

    def first(self, r: int, wanted: int) -> int:
        """The first entry of slot ``r``, which has at least this number of entries."""
        first, length = self._of.get(r, (0, 0))
        if wanted > length:
            first, length = self.end, 1 << wanted.bit_length()
            self._of[r], self.end = (first, length), first + length
        return first

    def leave(self, r: int) -> None:
        """The stretch of slot ``r`` is another one's."""
        self._of.pop(r, None)


class Contents:
    """Room for the names of prompts' blocks, and for the cached blocks that requests hold.

    A slot keeps its room for the requests that follow in it.
    """

    def __init__(self, state: State, fleet: Fleet, hash_block_size: int) -> None:
        """``hash_block_size``: tokens that a name stands for."""
        self.size = hash_block_size
        kept = state.extra if several(state.extra) else (state.extra,)
        _, kinds = kinds_of(fleet.policies)
        self._block_sizes = [fleet.limits[int(np.argmax(kinds == k))].block_size for k in range(len(kept))]
        self._blank = [extra.cache.holdings[0].item() if _has_holdings(extra) else None for extra in kept]
        self._names, self._tables, self._routed = Rooms(), Rooms(), Rooms()
        self._smallest = min(limits.block_size for limits in fleet.limits)
        known = state.routing
        if known is not None and known.cache is not None:
            self._blank_routed = known.cache.holdings[0].item()

    def write(self, state: State, r: int, prompt: int, output: int, names: tuple[int, ...]) -> State:
        """Slot ``r`` has a text whose full blocks have these names; the state, with more room if it was needed."""
        first = self._names.first(r, len(names))
        table = self._tables.first(r, (prompt + output) // self._smallest + 1)
        known = state.routing
        if known is not None and known.cache is not None:
            size = int(known.pools["block_size"][0])
            held = self._routed.first(r, (prompt + output) // size + 1)
            cache = self._held(known.cache, r, names, first, (held, self._routed.end), self._blank_routed, size)
            if cache is not known.cache:
                state = state._replace(routing=known._replace(cache=cache))
        if not several(state.extra):
            extra = self._write(state, state.extra, 0, r, names, first, table)
            return state if extra is state.extra else state._replace(extra=extra)
        owned = [self._write(state, extra, k, r, names, first, table) for k, extra in enumerate(state.extra)]
        same = all(new is old for new, old in zip(owned, state.extra, strict=True))
        return state if same else state._replace(extra=tuple(owned))

    def moved(self, state: State, r: int, tokens: int) -> State:
        """What slot ``r`` held, another row has from now on: room for as many ``tokens`` again."""
        self._tables.leave(r)
        table = self._tables.first(r, tokens // self._smallest + 1)
        extras = []
        for extra in state.extra if several(state.extra) else (state.extra,):
            if _has_holdings(extra):
                cache = _roomy(extra.cache, tables=self._tables.end)
                cache.holdings["table"][r] = table
                extras.append(extra if cache is extra.cache else extra._replace(cache=cache))
            else:
                extras.append(extra)
        return state._replace(extra=tuple(extras) if several(state.extra) else extras[0])

    def _write(self, state: State, extra: Any, k: int, r: int, names: tuple[int, ...], first: int, table: int) -> Any:
        """The same room serves all schedulers, each of which has arrays of its own."""
        if getattr(extra, "tree", None) is not None:
            texts = self._named(extra.tree.texts, r, names, first)
            return extra if texts is extra.tree.texts else extra._replace(tree=extra.tree._replace(texts=texts))
        if getattr(extra, "cache", None) is None:
            return extra
        if _has_holdings(extra):
            room = table, self._tables.end
            cache = self._held(extra.cache, r, names, first, room, self._blank[k], self._block_sizes[k])
        else:
            cache = self._with_names(_roomy(extra.cache, tables=self._tables.end), r, names, first)
            state.requests[r]["table"] = table
        if getattr(extra, "stores", None) is not None:
            chunks.renew(extra.stores, r, len(names) * self.size)
        return extra if cache is extra.cache else extra._replace(cache=cache)

    def _held(
        self, cache: Any, r: int, names: tuple[int, ...], first: int, room: tuple[int, int], blank: Any, size: int
    ) -> Any:
        """A cache that has nothing of the request yet; ``room``: (where its table begins, the end of all)."""
        cache = self._with_names(_roomy(cache, tables=room[1]), r, names, first)
        cache.holdings[r] = blank
        row = cache.holdings[r]
        parts = 0 if cache.followers is None else size - 1
        row["table"], row["room"], row["shared"] = room[0], NONE, (len(names) * self.size + parts) // size
        return cache

    def _with_names(self, cache: Any, r: int, names: tuple[int, ...], first: int) -> Any:
        texts = self._named(cache.texts, r, names, first)
        return cache if texts is cache.texts else cache._replace(texts=texts)

    def _named(self, texts: Texts, r: int, names: tuple[int, ...], first: int) -> Texts:
        texts = _roomy(texts, names=self._names.end)
        texts.names[first : first + len(names)] = names
        texts.rows[r]["named"], texts.rows[r]["names"] = len(names) * self.size, first
        return texts


def _has_holdings(extra: Any) -> bool:
    """Whether what a request holds stands apart from its record."""
    return hasattr(getattr(extra, "cache", None), "holdings")


def _roomy(extra: Any, **wanted: int) -> Any:
    """The named tuple, with copies twice as long as is wanted of the arrays that are shorter."""
    for name, size in wanted.items():
        if size > len(getattr(extra, name)):
            extra = extra._replace(**{name: _longer(getattr(extra, name), size)})
    return extra


def _longer(array: Any, wanted: int) -> Any:
    """A copy twice as long as is wanted."""
    longer = np.zeros(2 * wanted, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
