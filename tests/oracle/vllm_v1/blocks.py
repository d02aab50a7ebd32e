"""KV blocks of one scheduler: counted, or with a prefix cache (vllm/v1/core/block_pool.py, kv_cache_manager.py)."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from oracle.vllm_v1.request import Request


@dataclass(eq=False)
class Block:
    """One block of the cache."""

    references: int = 0
    """Requests that hold it."""
    key: int | None = None
    """What is in it and before it, once it is full; None: not reusable."""


class Blocks(Protocol):
    """What a scheduler asks of its memory."""

    @property
    def free(self) -> int:
        """Blocks that can be handed out, those that keep a reusable prefix but have no owner included."""

    def find(self, request: Request) -> list[Block]:
        """The longest cached beginning of a request that holds no blocks, without its last known token."""

    def idle(self, hits: list[Block]) -> int:
        """How many of these count as free."""

    def take(self, request: Request, hits: list[Block], count: int) -> None:
        """Give a request these cached blocks, if any, and ``count`` new ones."""

    def offer(self, request: Request, tokens: int) -> None:
        """The first ``tokens`` of a request are known and computed: others can find the full blocks among them."""

    def release(self, request: Request) -> None:
        """Take back all blocks of a request."""


class CountedBlocks:
    """Without a prefix cache one block is like the other."""

    def __init__(self, count: int) -> None:
        self.free = count

    def find(self, _: Request) -> list[Block]:
        """Finds no block."""
        return []

    def idle(self, _: list[Block]) -> int:
        """Nothing is found, so none is free."""
        return 0

    def take(self, request: Request, _: list[Block], count: int) -> None:
        """Count the blocks to the request."""
        self.free -= count
        request.num_blocks += count

    def offer(self, request: Request, tokens: int) -> None:
        """Blocks cannot be found, so there is nothing to offer."""

    def release(self, request: Request) -> None:
        """Count the blocks back."""
        self.free += request.num_blocks
        request.num_blocks = 0


class CachedBlocks:
    """Full blocks are found by their key; those that no request holds keep it until they are handed out again.

    Two blocks may have the same key, because requests that compute the same tokens in the same step have copies of
    their own. A search finds the one that got the key first.
    """

    def __init__(self, count: int, block_size: int, plain_blocks_first: bool) -> None:
        self.block_size = block_size
        self.plain_blocks_first = plain_blocks_first
        self.queue: OrderedDict[Block, None] = OrderedDict.fromkeys(Block() for _ in range(count))
        self.by_key: dict[int, dict[Block, None]] = {}
        self.held: dict[Request, list[Block]] = {}
        self.offered: dict[Request, int] = {}
        self.keys = Keys(block_size)

    @property
    def free(self) -> int:
        """Blocks in the free queue, whose front is handed out first."""
        return len(self.queue)

    def find(self, request: Request) -> list[Block]:
        """See Blocks: a prompt that is cached to its end computes its last block again, to have a token to sample."""
        hits: list[Block] = []
        for i in range((request.num_tokens - 1) // self.block_size):
            same = self.by_key.get(self.keys.key(request, i))
            if not same:
                break
            hits.append(next(iter(same)))
        return hits

    def idle(self, hits: list[Block]) -> int:
        """See Blocks: those that no request holds stand in the free queue."""
        return sum(block.references == 0 for block in hits)

    def take(self, request: Request, hits: list[Block], count: int) -> None:
        """See Blocks: a new block loses its key."""
        for block in hits:
            self.queue.pop(block, None)
        fresh = [self.queue.popitem(last=False)[0] for _ in range(count)]
        for block in fresh:
            self._forget(block)
        for block in hits + fresh:
            block.references += 1
        self.held.setdefault(request, []).extend(hits + fresh)
        self.offered.setdefault(request, len(hits))
        request.num_blocks += len(hits) + count

    def offer(self, request: Request, tokens: int) -> None:
        """See Blocks: each full block gets its key."""
        full = tokens // self.block_size
        for i in range(self.offered[request], full):
            block = self.held[request][i]
            block.key = self.keys.key(request, i)
            self.by_key.setdefault(block.key, {})[block] = None
        self.offered[request] = max(full, self.offered[request])

    def release(self, request: Request) -> None:
        """See Blocks: from the last block to the first, so that the end of a prefix is reused before its beginning.

        Plain blocks go to the front of the queue where the policy says so, all others to its end.
        """
        self.offered.pop(request, None)
        for block in reversed(self.held.pop(request, [])):
            block.references -= 1
            if block.references == 0:
                self.queue[block] = None
                if self.plain_blocks_first and block.key is None:
                    self.queue.move_to_end(block, last=False)
        self.keys.forget(request)
        request.num_blocks = 0

    def implant(self, request: Request, tokens: tuple[int, int]) -> None:
        """Free blocks take the KV of these tokens of a request, which others have computed, as if just given back."""
        first, last = (token // self.block_size for token in tokens)
        places = range(first, min(last, first + self.free))
        blocks = [self.queue.popitem(last=False)[0] for _ in places]
        for block in blocks:
            self._forget(block)
        for block, i in zip(reversed(blocks), reversed(places), strict=True):
            block.key = self.keys.key(request, i)
            self.by_key.setdefault(block.key, {})[block] = None
            self.queue[block] = None

    def _forget(self, block: Block) -> None:
        if block.key is None:
            return
        same = self.by_key[block.key]
        del same[block]
        if not same:
            del self.by_key[block.key]
        block.key = None


class Keys:
    """Numbers for blocks: equal numbers are equal tokens in the block and in all before it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.numbers: dict[tuple[int, tuple[int, ...], int], int] = {}
        self.of_request: dict[Request, list[int]] = {}

    def key(self, request: Request, index: int) -> int:
        """The key of a full block of known tokens."""
        keys = self.of_request.setdefault(request, [])
        while len(keys) <= index:
            parent = keys[-1] if keys else -1
            contents = request.tokens[len(keys) * self.block_size : (len(keys) + 1) * self.block_size]
            owner = -1 if len(contents) == self.block_size else request.id  # a token of its own is like no other
            keys.append(self.numbers.setdefault((parent, contents, owner), len(self.numbers)))
        return keys[index]

    def forget(self, request: Request) -> None:
        """Keep no list for a request; its blocks would get the same numbers again."""
        self.of_request.pop(request, None)


def has_room(blocks: Callable[[int], int], request: Request, reserved: int, others: int, free: int) -> bool:
    """Whether a request fits into so many free blocks, besides ``reserved`` tokens for itself and for each other."""
    return blocks(request.num_tokens) + blocks(reserved) * (others + 1) <= free
