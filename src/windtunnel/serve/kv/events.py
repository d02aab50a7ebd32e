"""What enters and leaves the prefix caches of vLLM's replicas, as events of vLLM 0.33 (distributed/kv_events.py)."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import Cache
from windtunnel.core.records import NONE
from windtunnel.errors import InputError
from windtunnel.simulate.live import LiveDeployment

Event = dict[str, Any]
MEDIUM, KIND = "GPU", "full_attention"
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

    def stored(self, names: set[int], size: int) -> Iterator[Event]:
        """Blocks that have entered a cache, those that go on from each other in one event."""
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
                yield {
                    "type": "BlockStored",
                    **{"block_hashes": run, "parent_block_hash": before, "token_ids": tokens, "block_size": size},
                    **{"lora_id": None, "medium": MEDIUM, "lora_name": None, "extra_keys": [None] * len(run)},
                    **{"group_idx": 0, "kv_cache_spec_kind": KIND},
                }


class Watch:
    """Looks into the caches after each decision."""

    def __init__(self, deployment: LiveDeployment, ledger: Ledger) -> None:
        """Raises InputError where no replica has vLLM's prefix cache with blocks that have names."""
        self._deployment, self._ledger = deployment, ledger
        self._size = deployment.hash_block_size
        if not self._size or not isinstance(getattr(deployment.engine.state.extra, "cache", None), Cache):
            raise InputError("kv_events_config: needs one of vLLM's engines since 0.8, with prefix caching")
        self.ranks = len(deployment.engine.state.lanes)
        self._versions, self._before = [-1] * self.ranks, [np.zeros(0, dtype=np.int64)] * self.ranks

    def look(self, tell: Callable[[int, list[Event]], None]) -> None:
        """Tell what the cache of each rank has got and lost since the last time: (rank, events)."""
        state = self._deployment.engine.state
        for rank, lane in enumerate(state.lanes):
            if lane["version"] == self._versions[rank]:
                continue
            self._versions[rank] = int(lane["version"])
            before, now = self._before[rank], keys_of(state.extra.cache, lane)
            self._before[rank] = now
            if events := self._events(before, now):
                tell(rank, events)

    def _events(self, before: NDArray[np.int64], now: NDArray[np.int64]) -> list[Event]:
        if len(before) and not len(now):
            return [{"type": "AllBlocksCleared"}]
        gone, new = (np.setdiff1d(one, other, assume_unique=True) for one, other in ((before, now), (now, before)))
        removed = [
            {"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIUM, "group_idx": 0}
            for name in (gone[gone >= 0] // self._size).tolist()
        ]
        return [*removed, *self._ledger.stored(set((new[new >= 0] // self._size).tolist()), self._size)]


def keys_of(cache: Cache, lane: Any) -> NDArray[np.int64]:
    """The keys of all blocks that can be found in a lane's cache: names times their tokens, or below 0 without one."""
    first = int(lane["slots"])
    items = cache.slots[first : first + int(lane["mask"]) + 1]
    found: NDArray[np.int64] = np.sort(np.asarray(cache.items["key"])[items[items != NONE]])
    return found
