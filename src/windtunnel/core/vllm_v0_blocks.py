"""The blocks of a request in vLLM's v0 engine: counted, or, with prefix caching, one by one in its table."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.prefix_cache import key_of
from windtunnel.core.records import DECODING, NONE, State
from windtunnel.core.vllm_v0_cache import fill, give_back, num_hits, num_wanted, take
from windtunnel.core.vllm_v0_records import NOT_ACCESSED, UNKNOWN, has_tables

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
def touched(pool: Any, request: Any, mine: Any) -> int:
    """Free blocks that its next step asks for, needed or not: one for a decode, none for full blocks to prefill."""
    if mine.prefilling and (request.prompt + request.generated) % pool.block_size == 0:
        return 0
    return 1


@kernel
def keys_of(state: State, pool: Any, r: int, count: int) -> Array:
    """The keys of a request's first ``count`` blocks, valid until the next call."""
    own = state.own
    mine = own.requests[r]
    for j in range(count):
        own.keys[j] = key_of(pool, mine, own.ids, r, j)
    return own.keys[:count]


@kernel
def count_free(state: State, lane: Any, extra: Any, i: int) -> None:
    """Free blocks of the lane as its shelves have them."""
    shelves = state.own.shelves
    lane.free = shelves[2 * i + DEVICE].plain + shelves[2 * i + DEVICE].evictable
    extra.cpu_free = shelves[2 * i + HOST].plain + shelves[2 * i + HOST].evictable


@kernel
def put_on(state: State, pool: Any, r: int, side: int) -> None:
    """Give a request blocks for its slots, shared where their content is there."""
    own = state.own
    request, mine = state.requests[r], own.requests[r]
    shelf = own.shelves[2 * request.lane + side]
    tokens = slots(request, mine)
    full = tokens // pool.block_size
    table = own.tables[mine.table : mine.table + full + 1]
    fill(own.cells, own.slots, own.stacks, own.heaps, own.touched, shelf, keys_of(state, pool, r, full), table)
    if tokens % pool.block_size:
        table[full] = take(own.cells, own.slots, own.stacks, own.heaps, shelf)


@kernel
def take_off(state: State, pool: Any, r: int, side: int, accessed: float) -> None:
    """Take the blocks of a request's slots back."""
    own = state.own
    request, mine = state.requests[r], own.requests[r]
    tokens = slots(request, mine)
    count = blocks_of(tokens, pool.block_size)
    keys = keys_of(state, pool, r, tokens // pool.block_size)
    table = own.tables[mine.table : mine.table + count]
    shelf = own.shelves[2 * request.lane + side]
    give_back(own.cells, own.slots, own.stacks, own.heaps, shelf, keys, table, accessed)


@kernel
def allocate(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Blocks for all known tokens of a request that is admitted."""
    if not has_tables(state):
        lane.free -= blocks_of(slots(state.requests[r], state.own.requests[r]), pool.block_size)
        return
    put_on(state, pool, r, DEVICE)
    count_free(state, lane, extra, state.requests[r].lane)


@kernel
def free(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Take all blocks from a request that ends or has to be computed again."""
    request, mine = state.requests[r], state.own.requests[r]
    if not has_tables(state):
        lane.free += blocks_of(slots(request, mine), pool.block_size)
        return
    take_off(state, pool, r, DEVICE, mine.accessed)
    mine.hit = UNKNOWN
    count_free(state, lane, extra, request.lane)


@kernel
def move(state: State, pool: Any, lane: Any, extra: Any, r: int, target: int) -> int:
    """Copy a request's blocks to the host or back; returns how many."""
    request, mine = state.requests[r], state.own.requests[r]
    blocks = blocks_of(slots(request, mine), pool.block_size)
    if has_tables(state):
        take_off(state, pool, r, 1 - target, NOT_ACCESSED)
        put_on(state, pool, r, target)
        count_free(state, lane, extra, request.lane)
    elif target == HOST:
        lane.free += blocks
        extra.cpu_free -= blocks
    else:
        lane.free -= blocks
        extra.cpu_free += blocks
    return blocks


@kernel
def wanted(state: State, pool: Any, r: int, side: int) -> int:
    """Blocks that a request asks of the other device: its full ones that are not there, and those it touches next."""
    request, mine = state.requests[r], state.own.requests[r]
    full = slots(request, mine) // pool.block_size
    if has_tables(state):
        shelf = state.own.shelves[2 * request.lane + side]
        full = num_wanted(state.own.cells, state.own.slots, shelf, keys_of(state, pool, r, full))
    return touched(pool, request, mine) + full


@kernel
def append_block(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """A block for the next token of a decode, if it begins one."""
    request, mine = state.requests[r], state.own.requests[r]
    if not crosses(pool, lane, request):
        return
    if not has_tables(state):
        lane.free -= 1
        return
    own = state.own
    context = request.offset + lane.clock if request.state == DECODING else request.context
    shelf = own.shelves[2 * request.lane + DEVICE]
    own.tables[mine.table + context // pool.block_size] = take(own.cells, own.slots, own.stacks, own.heaps, shelf)
    count_free(state, lane, extra, request.lane)


@kernel
def append_blocks(state: State, pool: Any, lane: Any, extra: Any) -> None:
    """The same for all decodes, in the order of the running list."""
    need = state.phases[lane.phase + lane.clock % pool.block_size]
    if not has_tables(state):
        lane.free -= need
        return
    r = lane.head
    while need > 0 and r != NONE:
        if state.requests[r].state == DECODING and crosses(pool, lane, state.requests[r]):
            append_block(state, pool, lane, extra, r)
            need -= 1
        r = state.requests[r].next


@kernel
def cached_tokens(state: State, pool: Any, r: int) -> int:
    """Tokens of a waiting request that need not be computed: looked up once, kept until its blocks are freed.

    A prompt that is wholly cached has its last token computed again.
    """
    if not has_tables(state):
        return 0
    own = state.own
    request, mine = state.requests[r], own.requests[r]
    known = request.prompt + request.generated
    if mine.hit == UNKNOWN:
        shelf = own.shelves[2 * request.lane + DEVICE]
        keys = keys_of(state, pool, r, known // pool.block_size)
        mine.hit = num_hits(own.cells, own.slots, shelf, keys) * pool.block_size
    return min(mine.hit, known - 1)
