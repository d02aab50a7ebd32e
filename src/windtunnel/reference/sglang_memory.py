"""TokenPool: SGLang's memory, counted in tokens, with or without the radix cache.

Sources, at 0.4.6.post5: mem_cache/memory_pool.py, radix_cache.py, chunk_cache.py, and the allocations of
managers/schedule_batch.py.
"""

from windtunnel.errors import InputError
from windtunnel.reference.radix import RadixCache
from windtunnel.reference.sglang_request import Request


class TokenPool:
    """Free places; with a tree, finished and retracted requests leave their tokens in it until room is needed."""

    def __init__(self, max_total_tokens: int, tree: RadixCache | None) -> None:
        self.max_total_tokens = max_total_tokens
        self.available = max_total_tokens
        self.tree = tree

    @property
    def evictable(self) -> int:
        """Cached tokens that could be evicted."""
        return self.tree.evictable if self.tree else 0

    def match(self, request: Request) -> None:
        """Look up what is in memory of a waiting request's tokens."""
        if self.tree:
            request.prefix, request.node = self.tree.match(request.cacheable)

    def lock(self, request: Request) -> None:
        """Keep the request's prefix in memory."""
        if self.tree and request.node:
            self.tree.lock(request.node)

    def unlock(self, request: Request) -> None:
        """Let the request's prefix be evicted, unless another one holds it."""
        if self.tree and request.node:
            self.tree.unlock(request.node)

    def make_room(self, tokens: int) -> bool:
        """Whether ``tokens`` places are free, if need be after evicting that many (not only those that are short)."""
        if self.available < tokens and self.tree:
            self.available += self.tree.evict(tokens)
        return self.available >= tokens

    def allocate(self, tokens: int) -> None:
        """Take places.

        Raises:
            InputError: there are not enough; the engine itself dies then. Later chunks of a prompt, and the decodes
                of a mixed batch, get their memory without having been checked.
        """
        if not self.make_room(tokens):
            raise InputError(
                f"max_total_tokens={self.max_total_tokens}: SGLang runs out of memory ({tokens} tokens wanted, "
                f"{self.available} free) and stops: give it more, or a larger schedule_conservativeness"
            )
        self.available -= tokens

    def keep(self, request: Request) -> None:
        """What was computed of its prompt is in memory from now on, and in the tree for others to find."""
        if self.tree:
            filled = request.tokens[: request.fill]
            present = self.tree.insert(filled)
            self.available += max(present - request.prefix, 0)  # computed although another had put it there meanwhile
            old = request.node
            _, request.node = self.tree.match(filled)
            if old:
                self.tree.unlock(old)
            self.tree.lock(request.node)
        request.prefix = request.fill

    def release(self, request: Request) -> None:
        """The request has finished; its last token never had a place."""
        if self.tree:
            present = self.tree.insert(request.cacheable)
            self.available += max(present - request.prefix, 0)
            self.unlock(request)
        else:
            self.available += request.num_tokens - 1

    def retract(self, request: Request, wanted: int) -> None:
        """Take the memory of a running request; evict from the tree what is then still short of ``wanted``."""
        self.available += request.held
        if self.tree:
            self.available -= request.prefix
            self.unlock(request)
            self.available += self.tree.evict(max(wanted - self.available, 0))
        request.prefix, request.node = 0, None
        request.in_flight, request.retracted = 0, True
