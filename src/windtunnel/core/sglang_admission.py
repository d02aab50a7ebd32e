"""Which requests prefill in a round (SGLang 0.4.6.post5: managers/schedule_policy.py, ``PrefillAdder``).

Running requests reserve their remaining declared tokens × ratio, a candidate all it declares. Decodes in the same
batch take a token of all budgets each.
"""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import DECODING, NONE
from windtunnel.core.sglang_memory import hold, let_go, look_up
from windtunnel.core.sglang_order import matched_by_order
from windtunnel.core.sglang_records import Arrays

Array = Any

MAX_ESTIMATED_NEW_TOKENS = 4096
CONTINUE, NO_MEMORY, STOP = range(3)
UNLIMITED = 1 << 60


@kernel
def generated_of(lane: Any, request: Any) -> int:
    """Tokens that a request has generated, from the clock while it decodes."""
    if request.state == DECODING:
        return request.offset + lane.clock - request.prompt + 1
    return request.generated


@kernel
def reserve_of(own: Arrays, r: int) -> int:
    """Tokens that a candidate reserves for its output."""
    return min(own.entries[r].declared, MAX_ESTIMATED_NEW_TOKENS)


@kernel
def running_reserve(own: Arrays, rank: Any, lane: Any, requests: Array) -> float:
    """Plain additions in the order of the running batch, whose rounding decides ties."""
    reserve = 0.0
    for i in range(rank.seats, rank.seats + rank.running):
        r = own.running[i]
        left = own.entries[r].declared - generated_of(lane, requests[r])
        reserve += float(min(left, MAX_ESTIMATED_NEW_TOKENS)) * rank.ratio
    return reserve


@kernel
def add(own: Arrays, rank: Any, request: Any, r: int, tokens: int, reserve: int) -> None:
    """Put a candidate into the round with so many tokens of its prompt, and so many reserved for its output."""
    entry = own.entries[r]
    entry.filled = entry.prefix + tokens
    request.chunk = tokens
    request.context = entry.prefix
    own.batch[rank.seats + rank.batch] = r
    rank.batch += 1
    rank.reserved += float(tokens + reserve)
    rank.computed += tokens
    rank.input_left -= tokens
    rank.chunk_left -= tokens


@called_kernel
def first_ends(own: Arrays, rank: Any, lane: Any, requests: Array, r: int) -> int:
    """Ends of the candidate, the running and the admitted ones in ``scratch``, soonest first; returns how many."""
    count = 0
    for i in range(-1, rank.running + rank.batch):
        if i < 0:
            other = r
        elif i < rank.running:
            other = own.running[rank.seats + i]
        else:
            other = own.batch[rank.seats + i - rank.running]
        generated = generated_of(lane, requests[other])
        steps = own.entries[other].declared - generated
        if steps > 0:
            at = count
            while at > 0 and own.scratch[0, at - 1] > steps:
                own.scratch[0, at], own.scratch[1, at] = own.scratch[0, at - 1], own.scratch[1, at - 1]
                at -= 1
            own.scratch[0, at], own.scratch[1, at] = steps, requests[other].prompt + generated
            count += 1
    return count


@kernel
def add_end(own: Arrays, requests: Array, r: int, count: int) -> int:
    """The same with one more candidate: before the first with as many steps left, or before the last of all."""
    steps = own.entries[r].declared - requests[r].generated
    if steps <= 0:
        return count
    place = max(count - 1, 0)
    for i in range(count):
        if steps <= own.scratch[0, i]:
            place = i
            break
    for i in range(count, place, -1):
        own.scratch[0, i], own.scratch[1, i] = own.scratch[0, i - 1], own.scratch[1, i - 1]
    own.scratch[0, place], own.scratch[1, place] = steps, requests[r].prompt + requests[r].generated
    return count + 1


@kernel
def memory_lasts(own: Arrays, count: int, left: int) -> bool:
    """Whether memory never runs out if everybody ends when it says."""
    for i in range(count):
        following = own.scratch[0, i + 1] if i + 1 < count else own.scratch[0, i]
        if left - following * (count - i) <= 0:
            return False
        left += own.scratch[1, i]
    return True


@kernel
def begin_round(own: Arrays, settings: Any, rank: Any, lane: Any, requests: Array) -> None:
    """The budgets of a round."""
    mixed = rank.running if settings.mixed else 0
    rank.input_left = settings.max_prefill_tokens - mixed
    rank.chunk_left = UNLIMITED if settings.chunk_tokens == NONE else settings.chunk_tokens - mixed
    rank.reserved = float(mixed) + running_reserve(own, rank, lane, requests)
    rank.computed = mixed
    rank.ends = NONE


@kernel
def resume(own: Arrays, rank: Any, requests: Array) -> None:
    """Go on with the prompt that is part-way. Memory is not checked."""
    r = rank.chunked
    rest = requests[r].prompt + requests[r].generated - own.entries[r].prefix
    tokens = min(rest, rank.chunk_left)
    if rest > tokens:
        add(own, rank, requests[r], r, tokens, 0)
    else:
        add(own, rank, requests[r], r, tokens, reserve_of(own, r))
        rank.chunked = NONE


@kernel
def unreserved(rank: Any) -> float:
    """Memory that nobody has or reserves."""
    return float(rank.available + rank.evictable) - rank.reserved


@kernel
def ends_fit(own: Arrays, rank: Any, lane: Any, requests: Array, r: int) -> bool:
    """Whether memory lasts with one more candidate, if everybody ends when it says."""
    if rank.ends == NONE:
        rank.ends = first_ends(own, rank, lane, requests, r)
    else:
        rank.ends = add_end(own, requests, r, rank.ends)
    return memory_lasts(own, rank.ends, rank.available - rank.computed - requests[r].prompt)


@kernel
def judge(own: Arrays, settings: Any, rank: Any, lane: Any, requests: Array, r: int) -> int:
    """What speaks against a candidate that was looked up just before. One that may be admitted is held in memory."""
    if settings.exact_release:
        if not ends_fit(own, rank, lane, requests, r):
            return NO_MEMORY
        return STOP if rank.chunk_left <= 0 else CONTINUE
    rest = requests[r].prompt + requests[r].generated - own.entries[r].prefix
    wanted = float(rest + reserve_of(own, r))
    if wanted >= unreserved(rank):
        return NO_MEMORY
    if rest > rank.input_left and rank.batch > 0:
        return STOP
    hold(own, rank, r)  # what it hits is no longer evictable
    if wanted <= unreserved(rank) and rank.chunk_left > 0:
        return CONTINUE
    verdict = NO_MEMORY if wanted > unreserved(rank) else STOP
    let_go(own, rank, r)
    return verdict


@kernel
def cut_and_add(own: Arrays, rank: Any, requests: Array, r: int) -> int:
    """Admit a candidate, as a chunk if the round's budget is shorter than its prompt; what becomes of the queue."""
    rest = requests[r].prompt + requests[r].generated - own.entries[r].prefix
    if rest > rank.chunk_left:
        rank.chunked = r
        add(own, rank, requests[r], r, rank.chunk_left, 0)
    else:
        add(own, rank, requests[r], r, rest, reserve_of(own, r))
    if unreserved(rank) <= 0.0 or rank.available + rank.evictable - rank.computed <= 0:
        return NO_MEMORY
    return STOP if rank.input_left <= 0 or rank.chunk_left <= 0 else CONTINUE


@kernel
def admit_round(own: Arrays, settings: Any, rank: Any, lane: Any, requests: Array, longest_batch: int) -> None:
    """Fill the round from the prompt that is part-way and the head of the queue; sets full and chunked."""
    begin_round(own, settings, rank, lane, requests)
    matched = matched_by_order(own, settings, rank, lane, requests)
    if rank.chunked != NONE:
        resume(own, rank, requests)
    verdict = CONTINUE
    while lane.queue_head != NONE and verdict == CONTINUE:
        if rank.batch >= longest_batch:
            rank.full = 1
            return
        r = lane.queue_head
        if own.tree.sizes[0] > 1 and not matched:
            look_up(own, rank, r, requests[r].prompt + requests[r].generated)
        verdict = judge(own, settings, rank, lane, requests, r)
        if verdict == CONTINUE:
            lane.queue_head = requests[r].next
            lane.waiting -= 1
            verdict = cut_and_add(own, rank, requests, r)
    if verdict == NO_MEMORY:
        rank.full = 1
