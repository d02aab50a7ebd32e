"""The blocks of a request in vLLM's v0 engine: counted, or, with prefix caching, one by one in its table."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.records import State
from windtunnel.core.vllm_v0_records import NOT_ACCESSED, UNKNOWN, has_tables
from windtunnel.core.vllm_v0_tables import (
    DEVICE,
    HOST,
    append_in_order,
    append_to_table,
    crosses,
    look_up,
    missing,
    put_on,
    slots,
    take_off,
)

Array = Any


@kernel
def touched(pool: Any, request: Any, mine: Any) -> int:
    """Free blocks that its next step asks for, needed or not: one for a decode, none for full blocks to prefill."""
    if mine.prefilling and (request.prompt + request.generated) % pool.block_size == 0:
        return 0
    return 1


@kernel
def allocate(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Blocks for all known tokens of a request that is admitted."""
    request, mine = state.requests[r], state.own.requests[r]
    if has_tables(state):
        put_on(pool, state.own, lane, extra, request, mine, r, DEVICE)
    else:
        lane.free -= blocks_of(slots(request, mine), pool.block_size)


@kernel
def free(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Take all blocks from a request that ends or has to be computed again."""
    request, mine = state.requests[r], state.own.requests[r]
    if has_tables(state):
        take_off(pool, state.own, lane, extra, request, mine, r, DEVICE, mine.accessed)
        mine.hit = UNKNOWN
    else:
        lane.free += blocks_of(slots(request, mine), pool.block_size)


@kernel
def move(state: State, pool: Any, lane: Any, extra: Any, r: int, target: int) -> int:
    """Copy a request's blocks to the host or back; returns how many."""
    request, mine = state.requests[r], state.own.requests[r]
    blocks = blocks_of(slots(request, mine), pool.block_size)
    if has_tables(state):
        take_off(pool, state.own, lane, extra, request, mine, r, 1 - target, NOT_ACCESSED)
        put_on(pool, state.own, lane, extra, request, mine, r, target)
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
    if has_tables(state):
        full = missing(pool, state.own, request, mine, r, side)
    else:
        full = slots(request, mine) // pool.block_size
    return touched(pool, request, mine) + full


@kernel
def append_block(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """A block for the next token of a decode, if it begins one."""
    request = state.requests[r]
    if not crosses(pool, lane, request):
        return
    if has_tables(state):
        append_to_table(pool, state.own, lane, extra, request, state.own.requests[r])
    else:
        lane.free -= 1


@kernel
def append_blocks(state: State, pool: Any, lane: Any, extra: Any) -> None:
    """The same for all decodes."""
    need = state.phases[lane.phase + lane.clock % pool.block_size]
    if not has_tables(state):
        lane.free -= need
    elif need > 0:
        append_in_order(pool, state.own, lane, extra, state.requests, need)


@kernel
def cached_tokens(state: State, pool: Any, r: int) -> int:
    """Tokens of a waiting request that need not be computed: looked up once, kept until its blocks are freed.

    A prompt that is wholly cached has its last token computed again.
    """
    if not has_tables(state):
        return 0
    request, mine = state.requests[r], state.own.requests[r]
    look_up(pool, state.own, request, mine, r)
    return min(mine.hit, request.prompt + request.generated - 1)
