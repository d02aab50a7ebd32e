"""Seats and memory of SGLang's scheduler, and who has to give them back (0.4.6.post5 and 0.5.23: schedule_batch.py;
mem_cache/radix_cache.py and chunk_cache.py, or allocation.py, allocator/base.py and unified_radix_cache.py;
schedule_policy.py, ``preempt_to_schedule``).

Memory is counted in tokens and handed out in pages: ``lane.free`` is a multiple of the page. A request holds the pages
that its tokens have begun, less the whole pages that are in the tree.
"""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import ask_again, put_last, take_out_behind
from windtunnel.core.records import DECODE, IGNORED, NONE, QUEUED, Array, Lane, Pool, Request, State
from windtunnel.core.schedulers.sglang.tree.eviction import evict
from windtunnel.core.schedulers.sglang.tree.host import adopt, copy_entered, part_on_host
from windtunnel.core.schedulers.sglang.tree.radix import (
    LRU,
    Tree,
    credit,
    descend,
    insert,
    lock,
    offer,
    part_at,
    renew,
    unlock,
    whole,
)
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, NEVER, NOW, TOKENS, WHO, find_next_end
from windtunnel.core.step import depart
from windtunnel.errors import InputError

# Seats of the running batch and, behind them, of the latest prefill round.


BEYOND = NOW
"""Row of a seat: tokens that its request has declared beyond those that it will generate; of one whose prompt is not
done, beyond those that it has generated."""
MAX_ESTIMATED_NEW_TOKENS = 4096
"""No request reserves more for its output."""


@part
def left_of(lane: Lane, seats: Array, i: int) -> int:
    """Tokens that the request of a seat has declared and not generated."""
    ends = seats[ENDS, i]
    return seats[BEYOND, i] + (0 if ends == NEVER else max(ends - lane.clock, 0))


@part
def urgency(pool: Pool, request: Request) -> int:
    """The larger the sooner."""
    return -request.priority if pool.low_first else request.priority


@part
def expected_rest(pool: Pool, lane: Lane, seats: Array, i: int) -> float:
    """Tokens that the request of a seat is expected to need still: what it has declared, times a ratio that falls while
    decoding goes well; all of it where every request declares its true length (0.5)."""
    ratio = 1.0 if pool.newer and pool.ignore_eos else lane.ratio
    return float(min(left_of(lane, seats, i), MAX_ESTIMATED_NEW_TOKENS)) * ratio


@part
def held_by(lane: Lane, request: Request, ends: int) -> int:
    """Tokens in memory of a running request whose seat says when it ends; what is in flight counts."""
    if ends == NEVER or request.came:  # its first token is in flight, or was another lane's
        return request.filled
    return request.prompt + request.output - 1 - ends + lane.clock + (lane.flying_decodes > 0)


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
    find_next_end(lane, seats, top + lane.batch)


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
        if r != lane.part_way and seats[ENDS, i] > lane.clock:
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


@compiled
def leave_out_the_last(pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """Take those out of the running batch whose last token, by declared length, is in flight; returns how many (0.5,
    scheduler.py: ``_reqs_finishing_inflight``). 0.4.6 lets them decode once more."""
    by_decode = lane.flying_decodes > 0 and (pool.reserve > 0 or lane.next_end <= lane.clock + 1)
    if not (pool.newer and pool.async_scheduling and (by_decode or lane.flying_prompts > 0)):
        return 0
    kept, end = 0, lane.top + lane.batch
    for i in range(end):
        ends, request = seats[ENDS, i], requests[seats[WHO, i]]
        if ends == NEVER:
            last = seats[BEYOND, i] <= 1 and (request.ends == NONE or request.promised > 0)
            held = request.filled
        else:
            last, held = (
                by_decode and ends == lane.clock + 1 and seats[BEYOND, i] == 0,
                request.prompt + request.output - 1,
            )
        if i < lane.top and last:
            request.left_out = 1
            if ends != NEVER:
                request.generated, request.last_token = request.output - 1, max(request.last_token, lane.last_decode)
            lane.kv_tokens -= held
            continue
        if kept < i:
            move(seats, i, kept)
        kept += 1
    if kept < end:
        close_up(lane, seats, kept - lane.batch, end)
    return end - kept


# Memory, with or without the radix tree.


OUT_OF_MEMORY = 1
"""A fault: what makes the engine die."""


@part
def paged(pool: Pool, tokens: int) -> int:
    """Tokens of the pages that this many tokens begin."""
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


@compiled
def due(pool: Pool, lane: Lane, requests: Array, seats: Array, decodes: int) -> int:
    """Tokens of the pages that the decodes of the first seats begin in their next round."""
    wanted = 0
    if pool.reserve > 0:
        for i in range(decodes):
            request = requests[seats[WHO, i]]
            wanted += paged(pool, max(request.held, committed(request) + pool.reserve)) - paged(pool, request.held)
        return wanted
    if pool.page == 1:
        return decodes
    for i in range(decodes):
        if held_by(lane, requests[seats[WHO, i]], seats[ENDS, i]) % pool.page == 0:
            wanted += pool.page
    return wanted


@part
def allocate_decodes(tree: Any, fault: Array, pool: Pool, lane: Lane, requests: Array, seats: Array) -> bool:
    """Take what the next round of all running requests needs, after making room for a page of each."""
    if pool.reserve > 0:
        return allocate_ahead(tree, fault, pool, lane, requests, seats)
    wanted = due(pool, lane, requests, seats, lane.top)
    return allocate(tree, fault, pool, lane, wanted, lane.top * pool.page - wanted)


@part
def committed(request: Request) -> int:
    """Tokens in memory of a request with drafts as far as the scheduler knows."""
    return request.filled if request.ends == NONE else request.prompt + request.generated - 1


@compiled
def allocate_ahead(tree: Any, fault: Array, pool: Pool, lane: Lane, requests: Array, seats: Array) -> bool:
    """Let each running request hold ``pool.reserve`` tokens beyond those that are known: twice those of a step, because
    one may be in flight (0.5: eagle_utils.py, ``eagle_prepare_for_decode``)."""
    wanted, pages = 0, 0
    for i in range(lane.top):
        request = requests[seats[WHO, i]]
        after = max(request.held, paged(pool, committed(request) + pool.reserve))
        wanted += after - request.held
        pages += after - paged(pool, request.held) if after > request.held else 0
        request.held = after
    spare = wanted + lane.top * pool.page - pages if pool.page > 1 else 0
    return wanted == 0 or allocate(tree, fault, pool, lane, pages, spare)


@compiled
def look_up(tree: Tree, pool: Pool, lane: Lane, request: Request, r: int, tokens: int) -> None:
    """What is in memory of a waiting request's first ``tokens``, and on the host behind it; its last known token is
    always computed."""
    request.context, request.node = descend(tree, lane, r, lane.root, 0, whole(lane, tokens))
    if pool.newer:
        renew(tree, lane, request.node)
    if lane.host > 0:
        part_on_host(tree, request)
    request.in_tree = request.context


@compiled
def enter(tree: Tree, pool: Pool, lane: Lane, request: Request, r: int, tokens: int) -> int:
    """Put its whole pages into the tree for others to find; returns where they end. From 0.5 on a node ends where the
    prompt does, so that outputs can be evicted before prompts."""
    depth, prompt = whole(lane, tokens), whole(lane, request.prompt)
    node = insert(tree, lane, request, r, depth)
    if lane.host > 0:
        adopt(tree, lane, node, request.node)
    if pool.newer:
        if lane.evicts != LRU or lane.write_after > 0:
            credit(tree, lane, node, depth, request.entered, request.priority)
            request.entered = max(request.entered, depth)
        if lane.write_after > 0:
            copy_entered(tree, lane, node)
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
        request.node, request.in_tree = node, whole(lane, request.filled)
    request.context = request.filled


@part
def give_back(tree: Any, pool: Pool, lane: Lane, request: Request, r: int, late: int) -> None:
    """A request has finished; its last token has a place only if it was computed on, ``late``, or came with drafts
    behind it."""
    tokens = request.prompt + request.output - 1 + (late if pool.reserve == 0 else request.overshot)
    held = tokens if pool.reserve == 0 else request.held
    if tree is not None and pool.radix_cache:
        if not pool.newer:
            renew(tree, lane, request.node)
        lane.free += paged(pool, held) - whole(lane, tokens)
        offer(tree, lane, enter(tree, pool, lane, request, r, tokens))
        unlock(tree, lane, request.node)
    else:
        lane.free += paged(pool, held)


@part
def take_back(tree: Any, pool: Pool, lane: Lane, request: Request, held: int, wanted: int) -> None:
    """Take the ``held`` tokens of a running request; evict from the tree what is then still short of ``wanted``."""
    lane.free += paged(pool, held)
    if tree is not None and pool.radix_cache:
        lane.free -= request.in_tree
        unlock(tree, lane, request.node)
        evict(tree, lane, wanted - (lane.free - lane.evictable))
    request.context, request.node, request.entered, request.in_tree = 0, NONE, 0, 0


# Who is sent back when memory is short.


RETRACT_DECODE_STEPS = 20
"""What is sent back leaves cached tokens to be evicted until this many are free for every request that stays; 0.4.6
goes on sending back until then (sglang/global_config.py, environ.py)."""
NO_SPACE_FOR_ONE = 2
"""A fault beside OUT_OF_MEMORY."""
PREEMPTED = 1
"""Row of ``Extra.scratch``: seats of those that make way."""


@part
def queue_up(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of the queue, as the newest."""
    requests[r].joined, requests[r].processed = lane.joinings, lane.processed
    lane.joinings += 1
    put_last(lane, requests, r)


@compiled
def queue_if_room(pool: Pool, lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of the queue; if that is full, somebody is refused."""
    gone, before, previous, at = r, NONE, NONE, lane.head
    if pool.most_queued == 0 or lane.waiting < pool.most_queued:
        queue_up(lane, requests, r)
        return
    while at != NONE and pool.by_priority:
        urgent = urgency(pool, requests[at])
        if urgent < urgency(pool, requests[r]):
            least = urgency(pool, requests[gone])
            if gone == r or urgent < least or (urgent == least and requests[at].joined > requests[gone].joined):
                gone, before = at, previous
        previous, at = at, requests[at].next
    if gone == r:
        requests[r].joined = lane.joinings
        lane.joinings += 1
    else:
        take_out_behind(lane, requests, gone, before)
        queue_up(lane, requests, r)
    requests[gone].refused, requests[gone].state = (1 if gone == r else 2), IGNORED
    requests[gone].next = lane.turned_away
    lane.turned_away = gone


@part
def tell_refused(lane: Lane, requests: Array) -> None:
    """Those that were refused leave at this boundary."""
    while lane.turned_away != NONE:
        r = lane.turned_away
        lane.turned_away = requests[r].next
        depart(lane, requests, r)
        requests[r].state = IGNORED


@compiled
def retract(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, fault: Array
) -> None:
    """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts, until
    the next round fits; at least one. 0.4.6 keeps a margin, and dies where the last one does not fit, which 0.5 aborts.

    The others stay in order of what they have generated, and set a new ratio: the share of what they declared that
    they will have generated after a number of steps.
    """
    sort_seats(pool, lane, requests, seats, scratch)
    left, end = lane.top, lane.top
    while left > 1 and (left == end or not goes_on(tree, pool, lane, requests, seats, left)):
        left -= 1
        send_back(tree, pool, lane, requests, seats, rows, left, left)
        if pool.role == DECODE:
            ask_again(lane, requests, seats[WHO, left])
        else:
            queue_if_room(pool, lane, requests, seats[WHO, left])
    if pool.newer:
        if not goes_on(tree, pool, lane, requests, seats, left):
            left = 0
            abort(tree, pool, lane, requests, seats, rows)
    elif lane.free == lane.evictable:
        fault[0], fault[1] = NO_SPACE_FOR_ONE, pool.num_blocks
        return
    close_up(lane, seats, left, end)
    generated, declared = RETRACT_DECODE_STEPS * left, 1 if pool.newer else 0
    for i in range(left):
        request = requests[seats[WHO, i]]
        generated += request.declared - left_of(lane, seats, i)
        declared += request.declared
    lane.ratio = min(1.0, float(generated) / float(declared))


@part
def goes_on(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, left: int) -> bool:
    """Whether the first ``left`` seats have room for what they need."""
    if pool.newer:
        return make_room(tree, pool, lane, due(pool, lane, requests, seats, left))
    return lane.free - lane.evictable >= RETRACT_DECODE_STEPS * left


@part
def sort_seats(pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """The most urgent first, if that counts; of equals those that have generated most, then the shorter prompt, then as
    they were."""
    for i in range(lane.top):
        r, ends, beyond = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]
        first = urgency(pool, requests[r]) if pool.retracts_by_priority else 0
        key = (int(requests[r].declared - left_of(lane, seats, i)) << 32) - int(requests[r].prompt)
        at = i
        while at > 0 and (
            scratch[PREEMPTED, at - 1] < first or (scratch[PREEMPTED, at - 1] == first and scratch[0, at - 1] < key)
        ):
            scratch[0, at], scratch[PREEMPTED, at] = scratch[0, at - 1], scratch[PREEMPTED, at - 1]
            move(seats, at - 1, at)
            at -= 1
        scratch[0, at], scratch[PREEMPTED, at] = key, first
        seats[WHO, at], seats[ENDS, at], seats[BEYOND, at] = r, ends, beyond


@compiled
def send_back(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, i: int, others: int
) -> None:
    """Take the memory of a seat's request; evict until each of the ``others`` can go on for a while."""
    request = requests[seats[WHO, i]]
    held = held_by(lane, request, seats[ENDS, i]) if pool.reserve == 0 else request.held
    if request.promised > 0:  # what its drafts in flight yield is lost
        rows[lane.flying_row].discarded += 1
        request.promised = request.overshot = 0
    if seats[ENDS, i] == NEVER or request.came:
        lane.kv_tokens -= held
    else:
        ahead = int(lane.flying_decodes > 0)
        request.generated = held - ahead - request.prompt + 1
        request.last_token = max(request.last_token, lane.last_decode)
        if ahead:  # its token in flight is lost
            rows[lane.flying_row].discarded += 1
        lane.kv_tokens -= held
    take_back(tree, pool, lane, request, held, RETRACT_DECODE_STEPS * others)
    request.preemptions += 1
    request.made_way, request.state = 0, QUEUED


@part
def abort(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array) -> None:
    """The only request that runs does not fit: it ends without the rest of its output."""
    r = int(seats[WHO, 0])
    send_back(tree, pool, lane, requests, seats, rows, 0, 0)
    depart(lane, requests, r)
    requests[r].state = IGNORED


def check(state: State) -> None:
    """Raise InputError if the engine died on the way."""
    fault = state.extra.fault
    if fault[0] == NO_SPACE_FOR_ONE:
        raise InputError(f"max_total_tokens={fault[1]}: no space left for only one request: SGLang stops, give more")
    if fault[0]:
        totals = " or ".join(map(str, sorted(set(state.pools["num_blocks"].tolist()))))
        raise InputError(
            f"max_total_tokens={totals}: SGLang runs out of memory ({fault[1]} tokens wanted, "
            f"{fault[2]} free) and stops: give it more, or a larger schedule_conservativeness"
        )


# Priorities.


@compiled
def make_way(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, r: int
) -> bool:
    """Send back running requests that are less urgent than a candidate by more than a threshold, the least urgent
    first, of equals the newest, until what they would have needed covers it; False, and none, if that is not enough.

    They join the queue with ``requeue``, after the round: no candidate comes twice in one.
    """
    candidate, count = requests[r], 0
    short = float(candidate.looked - candidate.context + min(candidate.declared, MAX_ESTIMATED_NEW_TOKENS))
    short -= float(lane.free) - lane.reserved
    while count == 0 or short > 0.0:
        worst = -1
        for i in range(lane.top):
            chosen = False
            for k in range(count):
                chosen |= scratch[PREEMPTED, k] == i
            if not chosen and (worst < 0 or goes_before(pool, requests, seats, i, worst)):
                worst = i
        if (
            worst < 0
            or urgency(pool, candidate) - urgency(pool, requests[seats[WHO, worst]]) <= pool.preemption_threshold
        ):
            break
        scratch[PREEMPTED, count] = worst
        count += 1
        short -= expected_rest(pool, lane, seats, worst)
    if count == 0 or short > 0.0:
        return False
    left, kept, end = lane.top, 0, lane.top + lane.batch
    for i in range(end):
        goes = False
        for k in range(count):
            goes |= scratch[PREEMPTED, k] == i
        if goes:
            left -= 1
            lane.reserved -= expected_rest(pool, lane, seats, i)
            send_back(tree, pool, lane, requests, seats, rows, i, left)
            requests[seats[WHO, i]].next, requests[seats[WHO, i]].made_way = lane.preempted, 1
            lane.preempted = seats[WHO, i]
            continue
        if kept < i:
            move(seats, i, kept)
        kept += 1
    close_up(lane, seats, left, end)
    return True


@part
def goes_before(pool: Pool, requests: Array, seats: Array, i: int, other: int) -> bool:
    """Whether a seat's request makes way before another's."""
    a, b = requests[seats[WHO, i]], requests[seats[WHO, other]]
    first, second = urgency(pool, a), urgency(pool, b)
    return first < second or (first == second and a.joined > b.joined)


@part
def requeue(pool: Pool, lane: Lane, requests: Array) -> None:
    """Those that made way in this round join the end of the queue, in the order in which they went."""
    first = -1
    while lane.preempted >= 0:  # turn the list round
        r = lane.preempted
        lane.preempted = requests[r].next
        requests[r].next = first
        first = r
    while first >= 0:
        r = first
        first = requests[r].next
        queue_if_room(pool, lane, requests, r)


# Many rounds at once.


@part
def fill_up(tree: Any, pool: Pool, lane: Lane, rounds: int) -> None:
    """Evict what this number of equal rounds would have evicted."""
    if tree is not None and pool.radix_cache:
        free = lane.free + rounds * lane.top - lane.evictable
        while rounds > 0:
            spared = min(rounds, free // lane.top)
            rounds -= spared
            free -= spared * lane.top
            if rounds > 0:
                free += lane.evictable
                evict(tree, lane, lane.top - (free - lane.evictable) if pool.newer else lane.top)
                free -= lane.evictable


@part
def take_pages(state: State, pool: Pool, lane: Lane, row: int, rounds: int) -> None:
    """Take the pages that this number of equal rounds began, where a token a request was taken in each round. Their
    ``row`` of the log says what is used after the first round."""
    seats, first, all_of_them = state.seats[lane.table], 0, 0
    for i in range(lane.top):
        after = held_by(lane, state.requests[seats[WHO, i]], seats[ENDS, i])
        all_of_them += paged(pool, after) - paged(pool, after - rounds)
        first += paged(pool, after - rounds + 1) - paged(pool, after - rounds)
    lane.free += rounds * lane.top - all_of_them
    state.rows[row].used_blocks = pool.num_blocks - (lane.free + all_of_them - first)
