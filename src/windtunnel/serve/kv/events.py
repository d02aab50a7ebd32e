"""What enters and leaves the prefix caches of replicas, as events of vLLM 0.33 (distributed/kv_events.py), or of SGLang
0.5.23 (srt/disaggregation/kv_events.py), which are maps with the same names."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import Cache
from windtunnel.core.records import NONE
from windtunnel.core.schedulers.sglang.tree.radix import Tree, roots, standing
from windtunnel.core.seats import EMPTY, ENDS, WHO
from windtunnel.core.texts.owners import Texts
from windtunnel.errors import InputError
from windtunnel.simulate.live import LiveDeployment

Event = dict[str, Any]
MEDIUM = "GPU"
GROUP: Event = {"group_idx": 0}
KIND: Event = {"kv_cache_spec_kind": "full_attention"}
KNOWN = 1 << 20
"""Blocks whose tokens are known, the longest unused forgotten first."""


class Ledger:
    """The tokens of named blocks, and which block each goes on from."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, tuple[int | None, tuple[int, ...]]] = OrderedDict()

    def note(self, parent: int | None, names: Sequence[int], tokens: Sequence[int], size: int) -> None:
        """Blocks of ``size`` tokens that go on from each other, the first from ``parent``."""
        for k, name in enumerate(names):
            self._blocks[name] = parent, tuple(tokens[k * size : (k + 1) * size])
            self._blocks.move_to_end(name)
            parent = name
        while len(self._blocks) > KNOWN:
            self._blocks.popitem(last=False)

    def stored(self, names: set[int], size: int, groups: bool) -> Iterator[Event]:
        """Blocks that have entered a cache, those that go on from each other in one event; ``groups``: with the fields
        that only vLLM has."""
        below: dict[int | None, list[int]] = {}
        for name in sorted(names):
            parent, _ = self._blocks.get(name, (None, ()))
            below.setdefault(parent, []).append(name)
        for parent in [one for one in below if one not in names]:
            ahead = [(parent, first) for first in below[parent]]
            while ahead:
                before, name = ahead.pop()
                run, tokens = [name], [*self._blocks.get(name, (None, ()))[1]]
                while len(children := below.get(run[-1], [])) == 1:
                    run.append(children[0])
                    tokens += self._blocks[children[0]][1]
                ahead += [(run[-1], child) for child in below.get(run[-1], [])]
                found = {"block_hashes": run, "parent_block_hash": before, "token_ids": tokens, "block_size": size}
                more = {"lora_name": None, "extra_keys": [None] * len(run), **GROUP, **KIND} if groups else {}
                yield {"type": "BlockStored", **found, "lora_id": None, "medium": MEDIUM, **more}


class Watch:
    """Looks into the caches after each step."""

    def __init__(self, deployment: LiveDeployment, ledger: Ledger) -> None:
        """Raises InputError where replicas have no prefix cache whose engine tells of its blocks."""
        self._deployment, self._ledger = deployment, ledger
        self._size = deployment.hash_block_size
        extra = deployment.engine.state.extra
        found = getattr(extra, "cache", None), getattr(extra, "tree", None)
        if not self._size or not (isinstance(found[0], Cache) or isinstance(found[1], Tree)):
            raise InputError(
                "kv_events_config: needs one of vLLM's engines since 0.8 or of SGLang's, with prefix caching: others "
                "publish no events over ZeroMQ"
            )
        self._radix = isinstance(found[1], Tree)
        self.ranks = len(deployment.engine.state.lanes)
        self._seen: list[Any] = [None] * self.ranks
        self._named, self._before = ([np.zeros(0, dtype=np.int64)] * self.ranks for _ in range(2))

    def look(self, tell: Callable[[int, list[Event]], None]) -> None:
        """Tell what the cache of each rank has got and lost since the last time: (rank, events)."""
        state = self._deployment.engine.state
        for rank, lane in enumerate(state.lanes):
            seen = (int(lane["uses"]), int(lane["evictable"])) if self._radix else int(lane["version"])
            if seen != self._seen[rank]:
                found = keys_in_tree(state.extra.tree, lane) if self._radix else keys_of(state.extra.cache, lane)
                self._seen[rank], self._named[rank] = seen, found
            before = self._before[rank]
            now = self._named[rank] if self._radix else np.union1d(self._named[rank], self._of_answers(rank))
            self._before[rank] = now
            if events := self._events(before, now):
                tell(rank, events)

    def _of_answers(self, rank: int) -> NDArray[np.int64]:
        """Keys of the blocks that requests have filled by decoding: vLLM names them at once, the core at the end of
        the request, before which nobody can ask for them."""
        state, fleet = self._deployment.engine.state, self._deployment.fleet
        lane, seats = state.lanes[rank], state.seats[rank]
        mine = seats[ENDS] < EMPTY
        rows: Any = state.requests[seats[WHO][mine]]
        turns = fleet.policies[int(state.groups["pool"][lane["group"]])].turns
        left = np.maximum(-((lane["clock"] - seats[ENDS][mine]) // turns), 0)
        texts = state.extra.cache.texts
        texts_of: Any = texts.rows[seats[WHO][mine]]
        first = rows["prompt"] // self._size
        ends = np.minimum(rows["prompt"] + rows["output"] - 1 - left, texts_of["named"]) // self._size
        return _names(texts, texts_of["names"], first, ends) * self._size + self._size - 1

    def _events(self, before: NDArray[np.int64], now: NDArray[np.int64]) -> list[Event]:
        if len(before) and not len(now):
            return [{"type": "AllBlocksCleared"}]
        gone, new = (np.setdiff1d(one, other, assume_unique=True) for one, other in ((before, now), (now, before)))
        removed = [
            {"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIUM, **({} if self._radix else GROUP)}
            for name in (gone[gone >= 0] // self._size).tolist()
        ]
        stored = set((new[new >= 0] // self._size).tolist())
        return [*removed, *self._ledger.stored(stored, self._size, not self._radix)]


def keys_of(cache: Cache, lane: Any) -> NDArray[np.int64]:
    """The keys of all blocks that can be found in a lane's cache, by their last tokens, which are numbered through all
    names; below 0 without a name."""
    first = int(lane["slots"])
    items = cache.slots[first : first + int(lane["mask"]) + 1]
    found: NDArray[np.int64] = np.sort(np.asarray(cache.items["key"])[items[items != NONE]])
    return found


def keys_in_tree(tree: Tree, lane: Any) -> NDArray[np.int64]:
    """The same of a lane's radix tree, where a block is there with its last token."""
    nodes: Any = tree.nodes
    _, entered = standing(tree)
    entered = entered[roots(tree, entered) == lane["root"]]
    if len(tree.copies) > 1:  # some are in host memory alone
        entered = entered[tree.copies["gone"][entered] == 0]
    start, size, texts_of = nodes["start"][entered], tree.texts.size, tree.texts.rows[nodes["request"][entered]]
    ends = np.minimum(start + nodes["length"][entered], texts_of["named"]) // size
    return np.unique(_names(tree.texts, texts_of["names"], start // size, ends)) * size + size - 1


def _names(texts: Texts, names: Any, first: Any, end: Any) -> NDArray[np.int64]:
    """The names of blocks ``first`` to before ``end`` of texts whose names begin here."""
    counts = np.maximum(end - first, 0)
    at = np.repeat(names + first - np.cumsum(counts) + counts, counts)
    found: NDArray[np.int64] = texts.names[at + np.arange(len(at))]
    return found
