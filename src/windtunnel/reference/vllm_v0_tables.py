"""Which request holds which blocks in vLLM's v0 engine (vllm/core/block_manager.py, block/block_table.py, 0.8.5)."""

from enum import Enum, auto

from windtunnel.policy.vllm_v0 import no_room_on_host
from windtunnel.reference.vllm_v0_blocks import BlockPool
from windtunnel.reference.vllm_v0_request import Request
from windtunnel.reference.vllm_v0_settings import Settings


class Fit(Enum):
    """Whether a request's blocks are there (vllm/core/interfaces.py, AllocStatus)."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


class BlockTables:
    """The block tables of all requests, over the blocks of the GPU and those of the host."""

    def __init__(self, settings: Settings) -> None:
        self.gpu = BlockPool(settings.num_gpu_blocks)
        self.cpu = BlockPool(settings.num_cpu_blocks)
        self.block_size = settings.block_size
        self.watermark_blocks = settings.watermark_blocks
        self.caching = settings.enable_prefix_caching
        self.contents: dict[tuple[int, tuple[object, ...]], int] = {}
        """Keys of full blocks: by the key of the block before and the tokens."""

    def can_allocate(self, request: Request) -> Fit:
        """Whether the whole prompt fits above the watermark; shared blocks get no credit."""
        needed = -(-request.num_tokens // self.block_size)
        if self.gpu.num_blocks - needed < self.watermark_blocks:
            return Fit.NEVER
        return Fit.NOW if self.gpu.num_free - needed >= self.watermark_blocks else Fit.LATER

    def allocate(self, request: Request) -> None:
        """Blocks for all known tokens."""
        request.slots = request.num_tokens
        request.last_scheduled = None
        self._fill(request, self.gpu)

    def can_append(self, request: Request) -> bool:
        """Whether as many blocks are free as the tokens without a slot touch, new or not."""
        return self._touched(request) <= self.gpu.num_free

    def append(self, request: Request) -> None:
        """Slots for the known tokens without one."""
        while request.slots < request.num_tokens:
            if request.slots % self.block_size == 0:
                request.blocks.append(self.gpu.take())
            request.slots += 1
            if request.slots % self.block_size == 0:
                depth = len(request.blocks)
                self.gpu.publish(request.blocks[-1], self._full_keys(request)[-1], depth)

    def can_swap_in(self, request: Request) -> Fit:
        """Whether its full blocks, and those it touches next, fit above the watermark."""
        return self._can_move(request, self.gpu, self.watermark_blocks)

    def swap_in(self, request: Request) -> int:
        """Move it to the GPU; returns the blocks copied."""
        return self._move(request, self.cpu, self.gpu)

    def swap_out(self, request: Request) -> int:
        """Move it to the host; returns the blocks copied.

        Raises:
            InputError: the host has no room, which ends the real engine.
        """
        if self._can_move(request, self.cpu, 0) is not Fit.NOW:
            raise no_room_on_host(self.cpu.num_blocks, request.id)
        return self._move(request, self.gpu, self.cpu)

    def free(self, request: Request) -> None:
        """Give its blocks back, first to last; they count as accessed when it was last scheduled."""
        if request.last_scheduled is not None:
            self.gpu.mark_accessed(request.blocks, request.last_scheduled)
        self._release(request, self.gpu)
        request.slots = 0
        request.keys.clear()
        request.hit_tokens = None

    def hit_tokens(self, request: Request) -> int:
        """Cached tokens at the front of a prompt: looked up once, then kept until its blocks are freed."""
        if not self.caching:
            return 0
        if request.hit_tokens is None:
            full = request.num_tokens // self.block_size
            request.hit_tokens = self.gpu.num_hits(self._keys(request, full)) * self.block_size
        return request.hit_tokens

    def _touched(self, request: Request) -> int:
        unseen = request.num_tokens - request.slots
        room = self.block_size - request.slots % self.block_size
        return 1 - (room - unseen) // self.block_size

    def _can_move(self, request: Request, pool: BlockPool, watermark_blocks: int) -> Fit:
        touched = self._touched(request) + pool.num_wanted(self._full_keys(request))
        if pool.num_blocks < touched:
            return Fit.NEVER
        return Fit.NOW if pool.num_free - touched >= watermark_blocks else Fit.LATER

    def _move(self, request: Request, source: BlockPool, target: BlockPool) -> int:
        self._release(request, source)
        self._fill(request, target)
        return len(request.blocks)

    def _release(self, request: Request, pool: BlockPool) -> None:
        for block in request.blocks:
            pool.release(block)
        request.blocks = []

    def _fill(self, request: Request, pool: BlockPool) -> None:
        keys = self._full_keys(request)
        request.blocks = [pool.hold(key, depth) for depth, key in enumerate(keys, 1)]
        if request.slots % self.block_size:
            request.blocks.append(pool.take())

    def _full_keys(self, request: Request) -> list[int] | list[None]:
        full = request.slots // self.block_size
        return self._keys(request, full) if self.caching else [None] * full

    def _keys(self, request: Request, full: int) -> list[int]:
        keys = request.keys
        while len(keys) < full:
            start = len(keys) * self.block_size
            content = (keys[-1] if keys else -1, request.tokens(start, start + self.block_size))
            keys.append(self.contents.setdefault(content, len(self.contents)))
        return keys[:full]
