"""One device's KV blocks in vLLM's v0 engine, shared by content and evicted in its order.

Sources: vllm/core/block/naive_block.py, prefix_caching_block.py and vllm/core/evictor.py of vLLM 0.8.5. Without
prefix caching no block has a key, and only the counting remains.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

NOT_ACCESSED = -1.0
"""Last access of a block whose owner was never charged with one: it was swapped out instead of freed."""


class BlockPool:
    """Blocks 0 … n − 1, each plain and free, in use (with a count of its owners), or evictable.

    A full block has a key, which names its content and all content before it. It can be shared, and when nobody
    holds it, it stays findable until it is evicted. Evictable blocks count as free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.plain = list(range(num_blocks - 1, -1, -1))
        """Free blocks without content; the next to be taken is the last."""
        self.owners = [0] * num_blocks
        self.keys: list[int | None] = [None] * num_blocks
        self.depths = [0] * num_blocks
        """A block with a key is its sequence's n-th."""
        self.last_access = [NOT_ACCESSED] * num_blocks
        self.by_key: dict[int, int] = {}
        self.computed: set[int] = set()
        """Blocks in use whose content was there when the step began: only these are hits."""
        self.touched: list[int] = []
        """Blocks that got their key in this step."""
        self.evictable: dict[int, tuple[float, int, int]] = {}
        self.queue: list[tuple[float, int, int]] = []
        """Heap of the entries of ``evictable``, with entries that no longer hold."""

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self.plain) + len(self.evictable)

    def take(self) -> int:
        """A block for new content: the plain one freed last, else the first in the order of eviction."""
        block = self.plain.pop() if self.plain else self._evict()
        self._use(block)
        return block

    def hold(self, key: int | None, depth: int) -> int:
        """The block of a full block's content: the shared one if it exists, computed or not, else a new one."""
        block = None if key is None else self.by_key.get(key)
        if block is None:
            block = self.take()
            self.publish(block, key, depth)
        elif self.owners[block] == 0:
            del self.evictable[block]
            self._use(block)
            self.computed.add(block)
        else:
            self.owners[block] += 1
        return block

    def publish(self, block: int, key: int | None, depth: int) -> None:
        """Full now: others may share it; they hit it from the next step on."""
        if key is not None:
            self.by_key[key] = block
            self.keys[block], self.depths[block] = key, depth
            self.touched.append(block)

    def release(self, block: int) -> None:
        """One owner less; without any it is plain again, or evictable by (last access, deepest first, number)."""
        self.owners[block] -= 1
        if self.owners[block]:
            return
        if self.keys[block] is None:
            self.plain.append(block)
        else:
            entry = (self.last_access[block], -self.depths[block], block)
            self.evictable[block] = entry
            heappush(self.queue, entry)

    def mark_accessed(self, blocks: Iterable[int], time: float) -> None:
        """Their owner was last scheduled at ``time``."""
        for block in blocks:
            self.last_access[block] = time

    def mark_computed(self) -> None:
        """The step is on its way: what got a key in it counts as computed when the next one is decided."""
        self.computed.update(self.touched)
        self.touched.clear()

    def num_hits(self, keys: Sequence[int]) -> int:
        """Leading blocks that are computed, by bisection.

        As in vLLM, which assumes that a block's predecessors are there when it is. They need not be, if a shared
        block was accessed last by an owner that was not in the latest steps; then the answer is what bisection finds.
        """
        return bisect_left(keys, True, key=lambda key: not self._is_hit(key))

    def num_wanted(self, keys: Iterable[int | None]) -> int:
        """Blocks that holding these keys would take from the free ones."""
        return sum(key is None or key not in self.by_key or self.by_key[key] in self.evictable for key in keys)

    def _is_hit(self, key: int) -> bool:
        block = self.by_key.get(key)
        return block is not None and (block in self.evictable or block in self.computed)

    def _use(self, block: int) -> None:
        self.owners[block] = 1
        self.last_access[block] = NOT_ACCESSED
        self.computed.discard(block)

    def _evict(self) -> int:
        while True:
            entry = heappop(self.queue)
            block = entry[2]
            if self.evictable.get(block) == entry:
                break
        del self.evictable[block]
        key = self.keys[block]
        if key is not None:
            del self.by_key[key]
        self.keys[block] = None
        return block
