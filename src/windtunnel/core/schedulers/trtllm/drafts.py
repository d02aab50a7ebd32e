"""Steps of TensorRT-LLM that verify drafts made in the same engine (MTP, EAGLE-3): ``policy.Trtllm`` with ``drafts``.

A generation computes one token and ``drafts`` more, and its end comes nearer by as many as are right: its seat says
when it ends if none is. With K drafts its blocks hold K − 1 tokens more than it has from its first chunk on
(get_num_extra_kv_tokens of speculative/utils.py), K + 1 more with each step (prepare_resources of
pyexecutor/resource_manager.py), and fewer by the wrong ones when the step's result is there (rewind_kv_cache). So with
overlap those of two steps are held. A generation costs K + 1 of the tokens of a step (py_executor.py,
``_prepare_and_schedule_batch``).

The engine's capacity scheduler counts a prompt without the K − 1 tokens, and a request to its declared end without
what is written beyond it: where that lacks a block, the engine stops. Here they are counted.
"""

from typing import Any

from numpy.typing import NDArray

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import Array, Lane, Pool, Request
from windtunnel.core.schedulers.vllm_v1.speculation import drafts_of, num_accepted
from windtunnel.core.seats import EMPTY, ENDS, NOW, WHO, blocks_due, context_of, ends_at


def drafts_of_pools(fleet: Any, demand: Any, pools: NDArray[Any]) -> Any:
    """Which drafts are right; None where no pool has any."""
    return drafts_of(fleet, demand, pools) if any(policy.drafts for policy in fleet.policies) else None


@part
def extra_tokens(pool: Pool) -> int:
    """Tokens that a request's blocks hold from its first chunk on, beyond those it has."""
    return int(max(pool.num_speculative_tokens - 1, 0))


@part
def beyond_the_end(pool: Pool) -> int:
    """Most tokens that are held beyond a request's declared end: of its last step, and of the one in flight before."""
    drafts = pool.num_speculative_tokens
    if drafts == 0:
        return 0
    return int(3 * drafts - 1 if pool.async_scheduling else 2 * drafts - 2)


@part
def tokens_of_step(pool: Pool) -> int:
    """Tokens that a generation computes."""
    return int(1 + pool.num_speculative_tokens)


@part
def begin_tokens(pool: Pool, request: Request, tokens: int) -> int:
    """Begin a prompt of this many tokens; returns how many tokens its blocks hold, places for drafts included."""
    request.held_tokens = tokens + extra_tokens(pool)
    request.rewind = request.gained = 0
    return int(request.held_tokens)


@part
def more_blocks(pool: Pool, request: Request) -> int:
    """Blocks that a generation's next step needs."""
    return blocks_of(pool, request.held_tokens + tokens_of_step(pool)) - blocks_of(pool, request.held_tokens)


@part
def takes_part(lane: Lane, seats: Array, i: int) -> bool:
    """Whether seat ``i`` has a generation that gets a token in the step that was decided."""
    return bool(lane.step_decodes > 0 and seats[ENDS, i] < EMPTY and (not lane.planned or seats[NOW, i] > 0))


@part
def due(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """Blocks that all generations need for their next step."""
    if drafts is None:
        return int(blocks_due(pool, lane, seats))
    return due_with_drafts(pool, lane, requests, seats)


@compiled
def due_with_drafts(pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """See ``due``."""
    blocks = 0
    for i in range(lane.top):
        if seats[ENDS, i] < EMPTY:
            blocks += more_blocks(pool, requests[seats[WHO, i]])
    return blocks


@part
def grow(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Generations in the step get its blocks."""
    if drafts is None:
        lane.free -= blocks_due(pool, lane, seats)
    else:
        grow_with_drafts(pool, lane, requests, seats)


@compiled
def grow_with_drafts(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """See ``grow``."""
    for i in range(lane.top):
        if takes_part(lane, seats, i):
            request = requests[seats[WHO, i]]
            lane.free -= more_blocks(pool, request)
            request.held_tokens += tokens_of_step(pool)


@part
def advance(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """The step is launched: the ends of those in it come nearer by the drafts that are right."""
    if drafts is not None:
        advance_with_drafts(drafts, pool, lane, requests, seats)


@compiled
def advance_with_drafts(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """See ``advance``."""
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if ends < lane.clock or not takes_part(lane, seats, i):
            continue
        r = seats[WHO, i]
        request = requests[r]
        known = context_of(lane, request, ends) - request.prompt
        right = num_accepted(pool, drafts, request, r, known, pool.num_speculative_tokens)
        request.rewind = pool.num_speculative_tokens - right
        request.gained = min(right, ends - lane.clock)
        if request.gained > 0:
            lane.kv_tokens += request.gained
            ends_at(lane, seats, i, ends - request.gained)


@part
def settle(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """The step in flight has ended: the slots of its wrong drafts are given back."""
    if drafts is not None:
        settle_with_drafts(pool, lane, requests, seats)


@compiled
def settle_with_drafts(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """See ``settle``."""
    for i in range(lane.top):
        if seats[ENDS, i] < EMPTY:
            request = requests[seats[WHO, i]]
            if request.rewind > 0:
                held = request.held_tokens - request.rewind
                lane.free += blocks_of(pool, request.held_tokens) - blocks_of(pool, held)
                request.held_tokens, request.rewind = held, 0
