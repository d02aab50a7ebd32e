"""SGLang's scheduler, 0.4.6.post5 (managers/scheduler.py, schedule_policy.py, schedule_batch.py): ``policy.Sglang``.

A round prefills waiting requests alone, or decodes all running ones; with mixed chunks both share it. Memory is counted
in tokens: the core's blocks are tokens. With the overlap schedule a round is decided before the outcome of the one in
flight is known, and no end is foreseen, not even one by length (event_loop_overlap,
scheduler_output_processor_mixin.py).

Running requests have the first seats of a lane, in the order of the engine's running batch. Whoever has ended, so that
its end is not after the clock, stays among them until the next decode round. Behind them sit the prompts of the latest
prefill round. The clock counts the decode rounds that have run; what is in flight counts in ``lane.kv_tokens`` alone.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import equal_steps
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.queues import pop_first, put_last
from windtunnel.core.radix import (
    LEFT,
    TREE_OF_LANE,
    Tree,
    common,
    descend,
    evict,
    insert,
    lock,
    offer,
    radix_tree,
    renew,
    unlock,
    with_more_nodes,
)
from windtunnel.core.records import (
    IDLE,
    NONE,
    PREFILLING,
    QUEUED,
    ROWS,
    STEPPED,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    Request,
    State,
)
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, PHASES, SOONEST, WHO, add_chunk, ends_at, soonest_of
from windtunnel.core.step import begin_boundary, count_released, depart
from windtunnel.errors import InputError

FCFS, LPM, DFS_WEIGHT, LOF = range(4)
ORDERS = {"fcfs": FCFS, "lpm": LPM, "dfs-weight": DFS_WEIGHT, "lof": LOF}

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm sorts; a longer one stays as it is."""
IN_BATCH_CHECK = 32
"""A request with at most so many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From so many tokens in common on, it waits for the earlier one to put them into the cache."""
MAX_ESTIMATED_NEW_TOKENS = 4096
"""No request reserves more for its output."""
RETRACT_DECODE_STEPS = 20
"""A retraction leaves room for so many tokens of every request that stays (sglang/global_config.py)."""
UNLIMITED = 1 << 60

CONTINUE, NO_MEMORY, STOP = range(3)
"""What becomes of the queue after one request was looked at."""
OUT_OF_MEMORY, NO_SPACE_FOR_ONE = 1, 2
"""Faults: what makes the engine die."""

BEYOND = NOW
"""Row of a seat: tokens that its request has declared beyond those that it will generate; of one whose prompt is not
done, beyond those that it has generated."""
PROMPTS, ENDING = range(2)
"""Rows of ``Own.flying``."""
QUEUE, KEYS, OTHERS = range(3)
"""Rows of ``Own.scratch``."""


def _integers(*names: str) -> Fields:
    return [(name, np.int64) for name in names]


POOL_FIELDS: Fields = [
    *((name, np.float64) for name in ("init_ratio", "min_ratio", "decay")),
    *_integers(
        "reported_block",  # in which memory is reported
        "chunk_limit",  # prompt tokens of a round
        "max_prefill_tokens",
        "order",
        "radix_cache",
        "mixed",
        "exact_release",
        "looks",  # at an idle lane in which requests wait: an idle round says nothing about the next one
    ),
]

LANE_FIELDS: Fields = [
    *((name, np.float64) for name in ("ratio", "last_decode")),  # the latter: when the last decode round ended
    *_integers(
        "ended",  # running requests that have ended
        "batch",  # seats of the latest prefill round
        "mixed",  # it held the running requests, too
        "full",  # batch_is_full
        "chunked",  # the request whose prompt is part-way
        "idle",  # the latest decision found nothing, and nothing was in flight
        "late",  # decodes of the round in flight whose requests had ended before
        "row",  # in the log, the first of the round that was decided
        # the round in flight
        "flying",  # whether there is one
        "flying_prompts",  # requests whose prompt it completes
        "flying_decodes",
        "flying_ends",  # requests whose last decode it is
        "flying_row",
        # the round that is being filled
        "computed",  # tokens
        "ends",  # entries in the list of ends, NONE before it is made
        "before",  # the clock before equal rounds
    ),
    ("reserved", np.float64),
    *TREE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    (name, np.int32)
    for name in (
        "declared",  # tokens; the scheduler knows only this number
        "filled",  # tokens in the cache after the round that computes its prompt
        "node",  # where those before it end in the tree; locked from admission on
        "ends",  # the clock at its last token; NONE until its prompt has run
    )
]


class Own(NamedTuple):
    """What only this scheduler reads and writes."""

    tree: Any
    """core.radix.Tree, or None where no pool has a radix cache."""
    flying: Array
    """[lanes, 2, max_num_seqs] requests whose prompt the round in flight completes, and those whose last decode is in
    it, in the order of the batch: a retraction may sort the seats before that is known."""
    scratch: Array
    """[3, longest list] room for sorting."""
    fault: Array
    """[3] what made the engine die, and two numbers for the message."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Own:
    """Write the settings into the pools, and make the arrays of a run."""
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        pool["reported_block"], pool["block_size"] = limits.block_size, 1
        pool["num_blocks"] = limits.num_blocks * limits.block_size
        pool["init_ratio"], pool["min_ratio"] = policy.init_new_token_ratio, policy.min_new_token_ratio
        pool["decay"] = policy.new_token_ratio_decay
        pool["chunk_limit"] = limits.max_num_batched_tokens if policy.chunked_prefill else UNLIMITED
        pool["order"] = ORDERS[policy.schedule_policy]
        pool["mixed"] = policy.enable_mixed_chunk and policy.chunked_prefill
        for name in ("async_scheduling", "max_prefill_tokens", "radix_cache", "exact_release"):
            pool[name] = getattr(policy, name)
    pools["looks"] = 2
    pool_of_lane = np.repeat(np.arange(len(pools)), np.multiply(fleet.replicas, fleet.lanes))
    lanes["chunked"], lanes["idle"] = NONE, 1
    lanes["ratio"], lanes["free"] = pools["init_ratio"][pool_of_lane], pools["num_blocks"][pool_of_lane]
    requests["declared"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    requests["node"] = NONE
    seats = int(pools["max_num_seqs"].max())
    return Own(
        tree=radix_tree(demand, lanes) if pools["radix_cache"].any() else None,
        flying=np.zeros((len(lanes), 2, seats), dtype=np.int32),
        scratch=np.zeros((3, max(len(requests), 2 * seats) + 2), dtype=np.int64),
        fault=np.zeros(3, dtype=np.int64),
    )


def with_more_room(own: Own) -> Own:
    """Twice as many nodes in the trees, if there are any."""
    return own if own.tree is None else own._replace(tree=with_more_nodes(own.tree))


def check(state: State) -> None:
    """Raise InputError if the engine died on the way."""
    fault = state.own.fault
    if fault[0] == NO_SPACE_FOR_ONE:
        raise InputError(f"max_total_tokens={fault[1]}: no space left for only one request: SGLang stops, give more")
    if fault[0]:
        totals = " or ".join(map(str, sorted(set(state.pools["num_blocks"].tolist()))))
        raise InputError(
            f"max_total_tokens={totals}: SGLang runs out of memory ({fault[1]} tokens wanted, "
            f"{fault[2]} free) and stops: give it more, or a larger schedule_conservativeness"
        )


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Put an arriving request at the end of the queue."""
    put_last(lane, state.requests, r)


@part
def has_nodes(tree: Any, wanted: int) -> bool:
    """Whether so many nodes are free."""
    if tree is None:
        return True
    return tree.room[LEFT] >= wanted


@part
def room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the trees can take what one step may add: a leaf and two splits for each request that is looked at."""
    wanted = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        wanted += 6 * pool.max_num_seqs + state.lanes[i].waiting + 8
    return has_nodes(state.own.tree, wanted)


# Seats.


@part
def left_of(lane: Lane, seats: Array, i: int) -> int:
    """Tokens that the request of a seat has declared and not generated."""
    ends = seats[ENDS, i]
    return seats[BEYOND, i] + (0 if ends == NEVER else max(ends - lane.clock, 0))


@part
def move(seats: Array, i: int, to: int) -> None:
    """Give a seat's request another seat."""
    seats[WHO, to], seats[ENDS, to], seats[BEYOND, to] = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]


@compiled
def close_up(lane: Lane, seats: Array, top: int, end: int) -> None:
    """``top`` seats run now; those from there to ``end`` are empty, unless prompts have them. Find the next end."""
    lane.top = top
    for i in range(top + lane.batch, end):
        seats[ENDS, i] = EMPTY
    lane.next_end = NEVER
    for block in range((top + lane.batch + 31) // 32):
        seats[SOONEST, block] = soonest_of(seats, block, lane.clock)
        lane.next_end = min(lane.next_end, seats[SOONEST, block])


@compiled
def drop_ended(lane: Lane, seats: Array) -> None:
    """Take those that have ended out of the running batch."""
    if lane.ended == 0:
        return
    kept, end = 0, lane.top + lane.batch
    for i in range(end):
        if i >= lane.top or seats[ENDS, i] > lane.clock:
            if kept < i:
                move(seats, i, kept)
            kept += 1
    lane.ended = 0
    close_up(lane, seats, kept - lane.batch, end)


@compiled
def join_prefilled(lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """The latest round's prompts decode from now on, before those that decoded beside them. Where that round is still
    in flight, they count as decodes before their first token is known."""
    end, kept = lane.top + lane.batch, lane.top
    for i in range(lane.top, end):
        r = seats[WHO, i]
        if r != lane.chunked and seats[ENDS, i] > lane.clock:
            lane.kv_tokens += requests[r].filled
            move(seats, i, kept)
            kept += 1
    joining, old, mixed = kept - lane.top, lane.top, lane.mixed
    shrunk = joining < lane.batch
    if shrunk or mixed or old == 0:
        lane.full = 0
    lane.batch = lane.mixed = 0
    if mixed:
        for row in range(WHO, BEYOND + 1):
            for i in range(old):
                scratch[row, i] = seats[row, i]
            for i in range(joining):
                seats[row, i] = seats[row, old + i]
            for i in range(old):
                seats[row, joining + i] = scratch[row, i]
    if shrunk or mixed:
        close_up(lane, seats, kept, end)
    else:
        lane.top = kept
    if mixed:
        drop_ended(lane, seats)


# Memory, with or without the radix tree (mem_cache/radix_cache.py, chunk_cache.py, and the allocations of
# schedule_batch.py).


@part
def make_room(tree: Any, pool: Pool, lane: Lane, tokens: int) -> bool:
    """Whether ``tokens`` places are free, if need be after evicting that many (not only those that are short)."""
    if tree is not None and pool.radix_cache and lane.free - lane.evictable < tokens:
        evict(tree, lane, tokens)
    return lane.free >= tokens


@part
def allocate(tree: Any, fault: Array, pool: Pool, lane: Lane, tokens: int) -> bool:
    """Take places; False if the engine dies because there are not enough."""
    if not make_room(tree, pool, lane, tokens):
        fault[0], fault[1], fault[2] = OUT_OF_MEMORY, tokens, lane.free - lane.evictable
        return False
    lane.free -= tokens
    return True


@compiled
def look_up(tree: Tree, lane: Lane, request: Request, r: int) -> None:
    """What is in memory of a waiting request; its last known token is always computed."""
    request.context, request.node = descend(tree, lane, r, lane.root, 0, request.prompt + request.generated - 1)


@part
def keep(tree: Any, pool: Pool, lane: Lane, request: Request, r: int) -> None:
    """What was computed of its prompt is in memory from now on, and in the tree for others to find."""
    if tree is not None and pool.radix_cache:
        node = insert(tree, lane, r, int(request.node), int(request.context), int(request.filled))
        renew(tree, lane, node)
        lock(tree, lane, node, int(request.node))
        request.node = node
    request.context = request.filled


@part
def give_back(tree: Any, pool: Pool, lane: Lane, request: Request, r: int) -> None:
    """A request has finished; its last token never had a place."""
    tokens = request.prompt + request.output - 1
    if tree is not None and pool.radix_cache:
        node = int(request.node)
        renew(tree, lane, node)
        offer(tree, lane, insert(tree, lane, r, node, int(request.context), tokens))
        unlock(tree, lane, node)
    else:
        lane.free += tokens


@part
def take_back(tree: Any, pool: Pool, lane: Lane, request: Request, held: int, wanted: int) -> None:
    """Take the ``held`` tokens of a running request; evict from the tree what is then still short of ``wanted``."""
    lane.free += held
    if tree is not None and pool.radix_cache:
        lane.free -= request.context
        unlock(tree, lane, int(request.node))
        evict(tree, lane, wanted - (lane.free - lane.evictable))
    request.context, request.node = 0, NONE


# The order of the queue (managers/schedule_policy.py, SchedulePolicy). It sorts for good: a queue keeps the order that
# one round gave it.


@compiled
def sort_queue(tree: Any, pool: Pool, lane: Lane, requests: Array, scratch: Array) -> bool:
    """Sort the queue, equals in their order; whether every request was looked up in the tree on the way."""
    count, r = 0, lane.head
    while r != NONE:
        scratch[QUEUE, count], scratch[KEYS, count] = r, -requests[r].declared
        count += 1
        r = requests[r].next
    if tree is not None and pool.order != LOF:
        match_queue(tree, lane, requests, scratch, count)
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, 1)
    for i in range(1, count):
        r, key, at = scratch[QUEUE, i], scratch[KEYS, i], i
        while at > 0:
            other = scratch[QUEUE, at - 1]
            if tree is not None and pool.order == DFS_WEIGHT:
                sooner = is_visited_before(tree, int(requests[r].node), int(requests[other].node))
            else:
                sooner = key < scratch[KEYS, at - 1]
            if not sooner:
                break
            scratch[QUEUE, at], scratch[KEYS, at] = other, scratch[KEYS, at - 1]
            at -= 1
        scratch[QUEUE, at], scratch[KEYS, at] = r, key
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, -1)
    lane.head, lane.tail = NONE, NONE
    for i in range(count - 1, -1, -1):
        r = scratch[QUEUE, i]
        requests[r].next = lane.head
        if lane.head == NONE:
            lane.tail = r
        lane.head = r
    return pool.order != LOF


@part
def match_queue(tree: Tree, lane: Lane, requests: Array, scratch: Array, count: int) -> None:
    """Keys by which the longest match is first; who shares a beginning with an earlier one that is not in the tree yet
    goes last."""
    others = 0
    for i in range(count):
        r = scratch[QUEUE, i]
        request = requests[r]
        look_up(tree, lane, request, r)
        scratch[KEYS, i] = -request.context
        if request.context > IN_BATCH_CHECK:
            continue
        shared = 0
        for j in range(others):
            other = scratch[OTHERS, j]
            known = min(request.prompt + request.generated, requests[other].prompt + requests[other].generated)
            shared = max(shared, common(tree, other, r, 0, known - 1))
        if shared >= IN_BATCH_SHARED:
            scratch[KEYS, i] = 1
        else:
            scratch[OTHERS, others] = r
            others += 1


@compiled
def weigh(tree: Tree, requests: Array, scratch: Array, count: int, by: int) -> None:
    """Add ``by`` to the weight of every node above or at the match of each request."""
    for i in range(count):
        node = requests[scratch[QUEUE, i]].node
        while node != NONE:
            tree.nodes[node].weight += by
            node = tree.nodes[node].parent


@compiled
def is_visited_before(tree: Tree, a: int, b: int) -> bool:
    """Depth first: subtrees with more waiting requests first, of equals the older one, and what is below a node before
    its own requests."""
    nodes = tree.nodes
    below_a, below_b = NONE, NONE
    while a != b:
        if nodes[b].parent == NONE or (nodes[a].parent != NONE and nodes[a].start >= nodes[b].start):
            below_a, a = a, nodes[a].parent
        else:
            below_b, b = b, nodes[b].parent
    if below_a == NONE:
        return False
    if below_b == NONE:
        return True
    if nodes[below_a].weight != nodes[below_b].weight:
        return nodes[below_a].weight > nodes[below_b].weight
    return nodes[below_a].born < nodes[below_b].born


# Which requests prefill in a round (managers/schedule_policy.py, PrefillAdder). Running requests reserve their
# remaining declared tokens × ratio, a candidate all that it declares. Decodes in the same batch take a token of all
# budgets each.


@part
def reserve_of_running(lane: Lane, seats: Array) -> float:
    """Plain additions in the order of the running batch, whose rounding decides ties."""
    reserve = 0.0
    for i in range(lane.top):
        reserve += float(min(left_of(lane, seats, i), MAX_ESTIMATED_NEW_TOKENS)) * lane.ratio
    return reserve


@compiled
def add(pool: Pool, lane: Lane, request: Request, seats: Array, r: int, start: float) -> int:
    """Admit a candidate, or go on with it, as a chunk if the round's budget is shorter than its prompt; what becomes of
    the queue. For a prompt that goes on memory is not checked."""
    tokens, reserve = request.prompt + request.generated - request.context, request.declared
    chunk_left = pool.chunk_limit - lane.computed
    if tokens > chunk_left:
        lane.chunked, tokens, reserve = r, chunk_left, 0
    elif lane.chunked == r:
        lane.chunked = NONE
    if np.isnan(request.scheduled):
        request.scheduled, request.cached_tokens = start, request.context
    request.filled, request.ends, request.state = request.context + tokens, NONE, PREFILLING
    i = lane.top + lane.batch
    seats[WHO, i], seats[ENDS, i], seats[BEYOND, i] = r, NEVER, request.declared - request.generated
    lane.batch += 1
    add_chunk(lane, seats, tokens, request.context, 0)
    lane.computed += tokens
    lane.reserved += float(tokens + min(reserve, MAX_ESTIMATED_NEW_TOKENS))
    if unreserved(lane) <= 0.0 or lane.free - lane.computed <= 0:
        return NO_MEMORY
    return STOP if lane.computed >= pool.max_prefill_tokens or lane.computed >= pool.chunk_limit else CONTINUE


@part
def unreserved(lane: Lane) -> float:
    """Memory that no request has or reserves."""
    return float(lane.free) - lane.reserved


@compiled
def ends_fit(lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> bool:
    """Whether memory lasts with one more candidate, if every request ends when it says.

    ``scratch`` holds (tokens left, tokens then held) of the candidate, the running and the admitted ones, soonest
    first. A further candidate goes before the first with as many left, or before the last of all.
    """
    first = lane.ends == NONE
    lane.ends = 0 if first else lane.ends
    for i in range(-1, lane.top + lane.batch if first else 0):
        request = requests[r if i < 0 else seats[WHO, i]]
        left = request.declared - request.generated if i < 0 else left_of(lane, seats, i)
        if left <= 0:
            continue
        at = 0
        while at < lane.ends and (scratch[0, at] <= left if first else scratch[0, at] < left):
            at += 1
        if not first and at == lane.ends:
            at = max(at - 1, 0)
        for j in range(lane.ends, at, -1):
            scratch[0, j], scratch[1, j] = scratch[0, j - 1], scratch[1, j - 1]
        scratch[0, at], scratch[1, at] = left, request.prompt + request.declared - left
        lane.ends += 1
    free = lane.free - lane.computed - requests[r].prompt
    for i in range(lane.ends):
        following = scratch[0, i + 1] if i + 1 < lane.ends else scratch[0, i]
        if free - following * (lane.ends - i) <= 0:
            return False
        free += scratch[1, i]
    return True


@part
def judge(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> int:
    """What speaks against a candidate that was looked up just before. One that may be admitted is held in memory."""
    if pool.exact_release:
        if not ends_fit(lane, requests, seats, scratch, r):
            return NO_MEMORY
        return STOP if lane.computed >= pool.chunk_limit else CONTINUE
    request = requests[r]
    rest = request.prompt + request.generated - request.context
    wanted = float(rest + min(request.declared, MAX_ESTIMATED_NEW_TOKENS))
    if wanted >= unreserved(lane):
        return NO_MEMORY
    if rest > pool.max_prefill_tokens - lane.computed and lane.batch > 0:
        return STOP
    verdict = CONTINUE
    if tree is not None and pool.radix_cache:
        lock(tree, lane, int(request.node), lane.root)  # what it hits is no longer evictable
    if wanted > unreserved(lane):
        verdict = NO_MEMORY
    elif lane.computed >= pool.chunk_limit:
        verdict = STOP
    if tree is not None and pool.radix_cache and verdict != CONTINUE:
        unlock(tree, lane, int(request.node))
    return verdict


@part
def admit(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, start: float) -> None:
    """Fill the round from the prompt that is part-way and the head of the queue; sets full and chunked."""
    lane.computed, lane.ends = lane.top if pool.mixed else 0, NONE
    lane.reserved = float(lane.computed) + reserve_of_running(lane, seats)
    matched = False
    by_tree = pool.order == DFS_WEIGHT or (pool.order == LPM and lane.waiting <= MAX_MATCHED_QUEUE)
    if pool.order == LOF or (by_tree and pool.radix_cache):
        matched = sort_queue(tree, pool, lane, requests, scratch)
    if lane.chunked != NONE:
        add(pool, lane, requests[lane.chunked], seats, lane.chunked, start)
    verdict = CONTINUE
    while lane.head != NONE and verdict == CONTINUE:
        if lane.batch >= pool.max_num_seqs - lane.top:
            verdict = NO_MEMORY
            break
        r = lane.head
        if tree is not None and pool.radix_cache and not matched:
            look_up(tree, lane, requests[r], r)
        verdict = judge(tree, pool, lane, requests, seats, scratch, r)
        if verdict == CONTINUE:
            pop_first(lane, requests)
            verdict = add(pool, lane, requests[r], seats, r, start)
    if verdict == NO_MEMORY:
        lane.full = 1


@part
def prefill(tree: Any, own: Own, pool: Pool, lane: Lane, requests: Array, seats: Array, start: float) -> bool:
    """Choose a batch of prompts, if any may be admitted; with mixed chunks the running requests share it."""
    if lane.chunked == NONE:
        if lane.full or lane.head == NONE:
            return False
        if lane.top >= pool.max_num_seqs:
            lane.full = 1
            return False
    admit(tree, pool, lane, requests, seats, own.scratch, start)
    if lane.batch == 0 or not allocate(tree, own.fault, pool, lane, lane.chunk_tokens):
        return False
    if pool.mixed:
        lane.mixed = 1
        drop_ended(lane, seats)
        lane.step_decodes = lane.top
        return lane.top == 0 or allocate(tree, own.fault, pool, lane, lane.top)
    return True


# A decode round.


@part
def decode(tree: Any, state: State, own: Own, pool: Pool, lane: Lane, seats: Array) -> bool:
    """One token for every running request; some are retracted if memory is short."""
    before = lane.top
    drop_ended(lane, seats)
    if lane.top > 0:
        if make_room(tree, pool, lane, lane.top):
            lane.ratio = max(lane.ratio - pool.decay, pool.min_ratio)
        else:
            retract(tree, pool, lane, state.requests, seats, state.rows, own.scratch, own.fault)
        if own.fault[0] or not allocate(tree, own.fault, pool, lane, lane.top):
            return False
    if lane.top < before:
        lane.full = 0
    lane.step_decodes = lane.top
    return lane.top > 0


@compiled
def retract(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, fault: Array
) -> None:
    """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts.

    The others stay in order of what they have generated, and set a new ratio: the share of what they declared that
    they will have generated after the steps that were made room for.
    """
    sort_seats(lane, requests, seats, scratch)
    left, end = lane.top, lane.top
    while left > 1 and (left == end or lane.free - lane.evictable < RETRACT_DECODE_STEPS * left):
        left -= 1
        send_back(tree, pool, lane, requests, seats, rows, left)
    if lane.free == lane.evictable:
        fault[0], fault[1] = NO_SPACE_FOR_ONE, pool.num_blocks
        return
    close_up(lane, seats, left, end)
    generated, declared = RETRACT_DECODE_STEPS * left, 0
    for i in range(left):
        request = requests[seats[WHO, i]]
        generated += request.declared - left_of(lane, seats, i)
        declared += request.declared
    lane.ratio = min(1.0, float(generated) / float(declared))


@part
def sort_seats(lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """Most generated first, of equals the shorter prompt, of equals as they were."""
    for i in range(lane.top):
        r, ends, beyond = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]
        key = (int(requests[r].declared - left_of(lane, seats, i)) << 32) - int(requests[r].prompt)
        at = i
        while at > 0 and scratch[0, at - 1] < key:
            scratch[0, at] = scratch[0, at - 1]
            move(seats, at - 1, at)
            at -= 1
        scratch[0, at] = key
        seats[WHO, at], seats[ENDS, at], seats[BEYOND, at] = r, ends, beyond


@part
def send_back(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, i: int) -> None:
    """Retract the request of the last seat; evict until each of the ``i`` others can go on for a while."""
    r = int(seats[WHO, i])
    request = requests[r]
    if seats[ENDS, i] == NEVER:  # its first token is in flight
        held = request.filled
        lane.kv_tokens -= held
    else:
        held = request.prompt + request.output - 1 - seats[ENDS, i] + lane.clock
        request.generated = held - request.prompt + 1
        request.last_token = max(request.last_token, lane.last_decode)
        if lane.flying_decodes > 0:  # its token in flight is lost
            held += 1
            rows[lane.flying_row].discarded += 1
        lane.kv_tokens -= held
    take_back(tree, pool, lane, request, held, RETRACT_DECODE_STEPS * i)
    request.preemptions += 1
    request.state = QUEUED
    put_last(lane, requests, r)


@part
def schedule(tree: Any, state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next round of lane ``i``, which starts at ``start``; False if it is idle."""
    own, lane, requests, seats = state.own, state.lanes[i], state.requests, state.seats[i]
    if lane.chunked != NONE:
        keep(tree, pool, lane, requests[lane.chunked], lane.chunked)
    if lane.batch > 0:
        join_prefilled(lane, requests, seats, own.scratch)
    lane.chunks, lane.chunk_tokens, lane.step_decodes = 0, 0, 0
    found = prefill(tree, own, pool, lane, requests, seats, start)
    if not found and not own.fault[0]:
        found = decode(tree, state, own, pool, lane, seats)
    lane.idle = not found and not lane.flying
    if lane.idle:
        lane.ratio = pool.init_ratio
    lane.step_kv = lane.kv_tokens if lane.step_decodes > 0 else 0
    lane.running = lane.outstanding - lane.waiting
    return found


# What a round gives. With the overlap schedule it counts as computed when it is launched; the clock, tokens, ends and
# the tree go on when it has run.


@part
def launch(lane: Lane, seats: Array, flying: Array) -> None:
    """The round that was decided is in flight from now on; the one before it has run."""
    lane.flying, lane.flying_row = lane.chunks + lane.step_decodes > 0, lane.row
    lane.flying_prompts, lane.flying_ends, lane.flying_decodes = 0, 0, lane.step_decodes
    for i in range(lane.top, lane.top + lane.chunks):
        if seats[WHO, i] != lane.chunked:
            flying[PROMPTS, lane.flying_prompts] = seats[WHO, i]
            lane.flying_prompts += 1
    lane.kv_tokens += lane.step_decodes
    if lane.step_decodes == 0 or lane.next_end > lane.clock + 1:
        return
    for block in range((lane.top + 31) // 32):
        if seats[SOONEST, block] <= lane.clock + 1:
            for i in range(block * 32, min(block * 32 + 32, lane.top)):
                if seats[ENDS, i] == lane.clock + 1:
                    flying[ENDING, lane.flying_ends] = seats[WHO, i]
                    lane.flying_ends += 1


@part
def emit_first(state: State, lane: Lane, request: Request, r: int, end: float) -> None:
    """A prompt is done: its request gets a token."""
    request.generated += 1
    if request.generated == 1:
        request.first_token = end
    else:
        write_stall(state, r, request.last_token, end)
    request.last_token = end
    request.ends = lane.clock + request.output - request.generated


@part
def sit_down(lane: Lane, requests: Array, seats: Array) -> None:
    """Write down when those end whose prompts are done."""
    for i in range(lane.top + lane.batch):
        if seats[ENDS, i] == NEVER:
            request = requests[seats[WHO, i]]
            if request.ends != NONE:
                seats[ENDS, i], seats[BEYOND, i] = request.ends, request.declared - request.output
                if request.ends > lane.clock:
                    ends_at(lane, seats, i, request.ends)


@compiled
def end_request(tree: Any, pool: Pool, lane: Lane, requests: Array, r: int, end: float) -> None:
    """The last token of a request has come: it is done and gone."""
    request = requests[r]
    request.generated, request.finish = request.output, end
    give_back(tree, pool, lane, request, r)
    depart(lane, requests, r)


@part
def land(tree: Any, state: State, pool: Pool, i: int, end: float) -> None:
    """Lane ``i``'s round in flight has run at ``end``; with the overlap schedule the next one, if any, was decided and
    logged before. Who ends now takes part in that one if it decodes; the place of its token there is free when it has
    run."""
    lane, requests, seats, flying = state.lanes[i], state.requests, state.seats[i], state.own.flying[i]
    lane.free += lane.late
    late = 1 if pool.async_scheduling and lane.step_decodes > 0 else 0
    ended = 0
    if lane.flying_decodes > 0:
        lane.clock += 1
        lane.last_decode = end
    for k in range(lane.flying_prompts):
        r = int(flying[PROMPTS, k])
        request = requests[r]
        if request.state == QUEUED:  # it was retracted
            continue
        emit_first(state, lane, request, r, end)
        if request.generated < request.output:
            keep(tree, pool, lane, request, r)
            continue
        end_request(tree, pool, lane, requests, r, end)
        if pool.async_scheduling:  # it was among the running ones already
            lane.kv_tokens -= request.filled + late
            ended += 1
    if lane.flying_prompts > 0:
        sit_down(lane, requests, seats)
    for k in range(lane.flying_ends):
        r = int(flying[ENDING, k])
        if requests[r].state != QUEUED:
            lane.kv_tokens -= requests[r].prompt + requests[r].output - 1 + late
            end_request(tree, pool, lane, requests, r, end)
            ended += 1
    if lane.flying_ends > 0:
        close_up(lane, seats, lane.top, lane.top)
    lane.ended += ended
    lane.late = late * ended
    if lane.late > 0:
        state.rows[lane.row].discarded += lane.late
    lane.flying, lane.flying_prompts, lane.flying_decodes, lane.flying_ends = 0, 0, 0, 0
    lane.running = lane.outstanding - lane.waiting


# A step of a group.


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next round of every lane; returns whether there is any, and False."""
    begin_boundary(group, state.lanes)
    fault, found, mine = state.own.fault, False, False
    if fault[0]:
        return False, False
    start = max(group.now, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        for _ in range(1 if group.end > group.now else pool.looks):
            mine = schedule(state.own.tree, state, pool, i, start)
            if mine or lane.head == NONE or fault[0]:
                break
        found |= mine
    return found and not fault[0], False


@part
def land_group(state: State, pool: Pool, group: Group, end: float) -> None:
    """The round in flight of every lane has run."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        land(state.own.tree, state, pool, i, end)
    group.now = end
    count_released(group, state.lanes)


@part
def report_blocks(state: State, pool: Pool, first: int, last: int) -> None:
    """The log counts memory in blocks, where the rules count tokens."""
    if pool.reported_block > 1:
        for k in range(first, last):
            state.rows[k].used_blocks = -(-state.rows[k].used_blocks // pool.reported_block)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The round that was decided ends at ``end``: log it, let its results take effect, or with the overlap schedule
    those of the round in flight, and move the clock."""
    start = max(group.now, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].row = state.counters[ROWS]
        write_step(state, pool, group, state.lanes[i], state.seats[i], start, 0, 0.0)
        report_blocks(state, pool, state.lanes[i].row, state.counters[ROWS])
    if pool.async_scheduling and group.end > group.now:
        land_group(state, pool, group, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        launch(state.lanes[i], state.seats[i], state.own.flying[i])
    if not pool.async_scheduling:
        land_group(state, pool, group, end)
    group.end = end
    return STEPPED


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:  # noqa: ARG001 - as in every scheduler
    """Nothing is scheduled: the round in flight ends, if there is one."""
    if group.end <= group.now or state.own.fault[0]:
        return IDLE
    land_group(state, pool, group, group.end)
    return STEPPED


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one round; IDLE if there is nothing to do until something arrives, or the engine has died."""
    return steps.step(state, pool, group, decide, conclude, pass_over)


# Many rounds at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """Decode rounds in which no request ends, is retracted or can be admitted; see ``core.jump``."""
    lane, ahead = state.lanes[i], 1 if pool.async_scheduling else 0
    busy = lane.batch > 0 or lane.chunked != NONE or lane.ended > 0 or lane.top == 0
    busy |= state.groups[lane.group].num_lanes > 1
    if ahead:
        busy |= lane.flying_prompts > 0 or lane.flying_decodes == 0 or lane.late > 0
    if busy or (lane.head != NONE and not lane.full):
        return 0, 0, False
    lane.decodes = state.seats[i, PHASES, 0] = lane.top
    lane.before = lane.clock
    return min(lane.next_end - lane.clock - 1, lane.free // lane.top) - ahead, 0, not lane.full


@part
def fill_up(tree: Any, pool: Pool, lane: Lane, rounds: int) -> None:
    """Evict what so many equal rounds have evicted."""
    if tree is not None and pool.radix_cache:
        free = lane.free + rounds * lane.top - lane.evictable
        while rounds > 0:
            spared = min(rounds, free // lane.top)
            rounds -= spared
            free -= spared * lane.top
            if rounds > 0:
                free += lane.evictable
                evict(tree, lane, lane.top)
                free -= lane.evictable


@part
def jumped(state: State, pool: Pool, i: int, tokens: int) -> None:  # noqa: ARG001 - as in every scheduler
    """What so many equal rounds leave behind."""
    lane = state.lanes[i]
    group, rounds = state.groups[lane.group], lane.clock - lane.before
    fill_up(state.own.tree, pool, lane, rounds)
    for _ in range(rounds):
        if lane.ratio == pool.min_ratio:
            break
        lane.ratio = max(lane.ratio - pool.decay, pool.min_ratio)
    lane.last_decode = group.now
    lane.flying_row = state.counters[ROWS] - 1
    report_blocks(state, pool, lane.flying_row, lane.flying_row + 1)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal rounds as possible; see ``core.jump``."""
    return equal_steps(state, pool, group, until, steady, jumped)


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """A lane that only decodes cannot end any request before its next end; a step of slack for rounding."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        settled = lane.idle or not pool.async_scheduling  # the ratio starts anew when nothing is in flight
        if lane.outstanding == 0 and lane.ended == 0 and lane.batch == 0 and settled:
            continue
        decodes = lane.top - lane.ended
        waits = lane.head == NONE or (lane.full and lane.ended == 0)
        if lane.batch > 0 or lane.chunked != NONE or lane.flying_prompts > 0 or not waits or decodes == 0:
            group.bound = group.now
            return
        shortest = state.floats[pool.shortest_step + decodes]
        group.bound = min(group.bound, group.now + float(lane.next_end - lane.clock - 1) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a round of those alone that had ended is in flight
