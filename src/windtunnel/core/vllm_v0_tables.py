"""The blocks of a request one by one: put on a shelf, taken off it, one more, and those that are there already.

Compiled apart from the loops that call them, which would otherwise hold a copy of a prefix cache at each call.
"""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.records import DECODING, NONE
from windtunnel.core.vllm_v0_cache import fill, give_back, num_hits, num_wanted, take
from windtunnel.core.vllm_v0_records import UNKNOWN

Array = Any

DEVICE, HOST = 0, 1
"""The two shelves of a lane."""


@kernel
def slots(request: Any, mine: Any) -> int:
    """Tokens that have a place in the request's blocks, when its clock has been read."""
    return request.prompt + request.generated if mine.prefilling else request.context


@kernel
def crosses(pool: Any, lane: Any, request: Any) -> bool:
    """Whether the next token of a decode begins a block."""
    context = request.offset + lane.clock if request.state == DECODING else request.context
    return context % pool.block_size == 0


@kernel
def count_free(own: Any, lane: Any, extra: Any, i: int) -> None:
    """Free blocks of the lane as its shelves have them."""
    lane.free = own.shelves[2 * i + DEVICE].plain + own.shelves[2 * i + DEVICE].evictable
    extra.cpu_free = own.shelves[2 * i + HOST].plain + own.shelves[2 * i + HOST].evictable


@called_kernel
def put_on(pool: Any, own: Any, lane: Any, extra: Any, request: Any, mine: Any, r: int, side: int) -> None:
    """Give a request blocks for its slots, shared where their content is there."""
    shelf = own.shelves[2 * request.lane + side]
    tokens = slots(request, mine)
    full = tokens // pool.block_size
    fill(pool, own, shelf, mine, r, own.tables[mine.table : mine.table + full])
    if tokens % pool.block_size:
        own.tables[mine.table + full] = take(own.cells, own.slots, own.stacks, own.heaps, shelf)
    if side == HOST:
        shelf.touched = 0  # nobody looks for hits there
    count_free(own, lane, extra, request.lane)


@called_kernel
def take_off(
    pool: Any, own: Any, lane: Any, extra: Any, request: Any, mine: Any, r: int, side: int, accessed: float
) -> None:
    """Take the blocks of a request's slots back."""
    tokens = slots(request, mine)
    table = own.tables[mine.table : mine.table + blocks_of(tokens, pool.block_size)]
    shelf = own.shelves[2 * request.lane + side]
    give_back(pool, own, shelf, mine, r, table, tokens // pool.block_size, accessed)
    count_free(own, lane, extra, request.lane)


@called_kernel
def append_to_table(pool: Any, own: Any, lane: Any, extra: Any, request: Any, mine: Any) -> None:
    """One more block, for the next token of a decode."""
    context = request.offset + lane.clock if request.state == DECODING else request.context
    shelf = own.shelves[2 * request.lane + DEVICE]
    own.tables[mine.table + context // pool.block_size] = take(own.cells, own.slots, own.stacks, own.heaps, shelf)
    count_free(own, lane, extra, request.lane)


@called_kernel
def append_in_order(pool: Any, own: Any, lane: Any, extra: Any, requests: Array, need: int) -> None:
    """The same for the ``need`` decodes that begin a block, in the order of the running list."""
    r = lane.head
    while need > 0 and r != NONE:
        if requests[r].state == DECODING and crosses(pool, lane, requests[r]):
            append_to_table(pool, own, lane, extra, requests[r], own.requests[r])
            need -= 1
        r = requests[r].next


@called_kernel
def missing(pool: Any, own: Any, request: Any, mine: Any, r: int, side: int) -> int:
    """How many of a request's full blocks would have to be taken from the free ones of a shelf."""
    full = slots(request, mine) // pool.block_size
    count: int = num_wanted(pool, own, own.shelves[2 * request.lane + side], mine, r, full)
    return count


@called_kernel
def look_up(pool: Any, own: Any, request: Any, mine: Any, r: int) -> None:
    """Find the cached tokens of a request that is looked at for the first time."""
    if mine.hit == UNKNOWN:
        count = (request.prompt + request.generated) // pool.block_size
        shelf = own.shelves[2 * request.lane + DEVICE]
        mine.hit = num_hits(pool, own, shelf, mine, r, count) * pool.block_size
