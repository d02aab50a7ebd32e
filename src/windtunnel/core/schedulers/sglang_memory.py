"""Memory of SGLang's scheduler, with or without the radix tree (0.4.6.post5: mem_cache/radix_cache.py, chunk_cache.py,
and the allocations of schedule_batch.py; 0.5.23: mem_cache/allocation.py, allocator/base.py, unified_radix_cache.py).

It is counted in tokens and handed out in pages: ``lane.free`` is a multiple of the page. A request holds the pages that
its tokens have begun, less the whole pages that are in the tree.
"""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane, Pool, Request
from windtunnel.core.schedulers.sglang_radix import (
    LRU,
    Tree,
    credit,
    descend,
    evict,
    insert,
    lock,
    offer,
    part_at,
    renew,
    unlock,
)
from windtunnel.core.schedulers.sglang_seats import held_by
from windtunnel.core.seats import CONTEXT, ENDS, TOKENS, WHO

OUT_OF_MEMORY = 1
"""A fault: what makes the engine die."""


@part
def paged(pool: Pool, tokens: int) -> int:
    """Tokens of the pages that so many tokens begin."""
    return -(-tokens // pool.page) * pool.page


@part
def make_room(tree: Any, pool: Pool, lane: Lane, tokens: int) -> bool:
    """Whether ``tokens`` places are free, if need be after evicting those that are short (0.4.6: that many)."""
    short = tokens - (lane.free - lane.evictable)
    if tree is not None and pool.radix_cache and short > 0:
        evict(tree, lane, short if pool.newer else tokens)
    return lane.free >= tokens


@part
def allocate(tree: Any, fault: Array, pool: Pool, lane: Lane, tokens: int, spare: int) -> bool:
    """Take places, after making room for ``spare`` more; False if the engine dies because there are not enough."""
    make_room(tree, pool, lane, tokens + spare)
    if lane.free - lane.evictable < tokens:
        fault[0], fault[1], fault[2] = OUT_OF_MEMORY, tokens, lane.free - lane.evictable
        return False
    lane.free -= tokens
    return True


@part
def allocate_prompts(tree: Any, fault: Array, pool: Pool, lane: Lane, seats: Array) -> bool:
    """Take the pages of the round's prompts, after making room for one more of each."""
    if pool.page == 1:
        return allocate(tree, fault, pool, lane, lane.chunk_tokens, 0)
    wanted = 0
    for k in range(lane.chunks):
        context = seats[CONTEXT, k]
        wanted += paged(pool, context + seats[TOKENS, k]) - paged(pool, context)
    spare = lane.chunk_tokens + lane.chunks * pool.page - wanted
    return allocate(tree, fault, pool, lane, wanted, spare)


@part
def due(pool: Pool, lane: Lane, requests: Array, seats: Array, decodes: int) -> int:
    """Tokens of the pages that the decodes of the first seats begin in their next round."""
    if pool.page == 1:
        return decodes
    wanted = 0
    for i in range(decodes):
        if held_by(lane, requests[seats[WHO, i]], seats[ENDS, i]) % pool.page == 0:
            wanted += pool.page
    return wanted


@part
def allocate_decodes(tree: Any, fault: Array, pool: Pool, lane: Lane, requests: Array, seats: Array) -> bool:
    """Take what the next round of all running requests needs, after making room for a page of each."""
    wanted = due(pool, lane, requests, seats, lane.top)
    return allocate(tree, fault, pool, lane, wanted, lane.top * pool.page - wanted)


@compiled
def look_up(tree: Tree, pool: Pool, lane: Lane, request: Request, r: int, tokens: int) -> None:
    """What is in memory of a waiting request's first ``tokens``; its last known token is always computed."""
    request.context, request.node = descend(tree, lane, r, lane.root, 0, tokens)
    if pool.newer:
        renew(tree, lane, request.node)


@part
def enter(tree: Tree, pool: Pool, lane: Lane, request: Request, r: int, tokens: int) -> int:
    """Put its whole pages into the tree for others to find; returns where they end. From 0.5 on a node ends where the
    prompt does, so that outputs can be evicted before prompts."""
    node = insert(tree, lane, request, r, tokens)
    if pool.newer:
        depth, prompt = tokens - tokens % pool.page, request.prompt - request.prompt % pool.page
        if lane.evicts != LRU:
            credit(tree, lane, node, depth, request.entered, request.priority)
            request.entered = max(request.entered, depth)
        if 0 < prompt < depth:
            upper = part_at(tree, lane, node, depth, prompt)
            if lane.evicts != LRU:
                credit(tree, lane, upper, prompt, prompt, request.priority + 1)
        renew(tree, lane, node)
    return node


@part
def keep(tree: Any, pool: Pool, lane: Lane, request: Request, r: int) -> None:
    """What was computed of its prompt is in memory from now on, and in the tree for others to find."""
    if tree is not None and pool.radix_cache:
        node = enter(tree, pool, lane, request, r, request.filled)
        if not pool.newer:
            renew(tree, lane, node)
        lock(tree, lane, node, request.node)
        request.node = node
    request.context = request.filled


@part
def give_back(tree: Any, pool: Pool, lane: Lane, request: Request, r: int, late: int) -> None:
    """A request has finished; its last token has a place only if it was computed on, ``late``."""
    tokens = request.prompt + request.output - 1 + late
    if tree is not None and pool.radix_cache:
        if not pool.newer:
            renew(tree, lane, request.node)
        lane.free += paged(pool, tokens) - (tokens - tokens % pool.page)
        offer(tree, lane, enter(tree, pool, lane, request, r, tokens))
        unlock(tree, lane, request.node)
    else:
        lane.free += paged(pool, tokens)


@part
def take_back(tree: Any, pool: Pool, lane: Lane, request: Request, held: int, wanted: int) -> None:
    """Take the ``held`` tokens of a running request; evict from the tree what is then still short of ``wanted``."""
    lane.free += paged(pool, held)
    if tree is not None and pool.radix_cache:
        lane.free -= request.context - request.context % pool.page
        unlock(tree, lane, request.node)
        evict(tree, lane, wanted - (lane.free - lane.evictable))
    request.context, request.node, request.entered = 0, NONE, 0
