"""The queue of the unified scheduler: a list, or a pairing heap by key; and when it is open."""

from typing import Any

from windtunnel.core.hooks import call_admission_key
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import enqueue_front, enqueue_last
from windtunnel.core.records import NONE, State
from windtunnel.core.unified_records import (
    CONTINUOUS,
    DYNAMIC,
    LONGEST_JOB,
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    PRIORITY,
    SHORTEST_JOB,
    SHORTEST_OUTPUT,
    SHORTEST_PROMPT,
)


@kernel
def key_of(rules: Any, request: Any, more: Any) -> float:
    """The request's place in the order of admission; the smallest key comes first."""
    if rules.admission_key != 0:
        return call_admission_key(
            rules.admission_key, request.prompt, more.declared, more.priority, request.generated, request.arrival
        )
    key = 0
    if rules.order == PRIORITY:
        key = more.priority
    elif rules.order == SHORTEST_PROMPT:
        key = request.prompt
    elif rules.order == LONGEST_PROMPT:
        key = -request.prompt
    elif rules.order == SHORTEST_OUTPUT:
        key = more.declared
    elif rules.order == LONGEST_OUTPUT:
        key = -more.declared
    elif rules.order == SHORTEST_JOB:
        key = request.prompt + more.declared
    elif rules.order == LONGEST_JOB:
        key = -request.prompt - more.declared
    return float(key)


@kernel
def precedes(state: State, a: int, b: int) -> bool:
    """Whether request ``a`` is admitted before ``b``."""
    first, second = state.own.more[a].key, state.own.more[b].key
    if first != second:
        return first < second
    first, second = state.requests[a].arrival, state.requests[b].arrival
    return first < second or (first == second and a < b)


@kernel
def merged(state: State, a: int, b: int) -> int:
    """The heap of two heaps."""
    more = state.own.more
    if precedes(state, b, a):
        a, b = b, a
    more[b].sibling = more[a].child
    more[a].child = b
    return a


@kernel
def insert(state: State, lane: Any, r: int) -> None:
    """Put a request whose key is known into the heap."""
    state.own.more[r].child = NONE
    state.own.more[r].sibling = NONE
    lane.queue_head = r if lane.queue_head == NONE else merged(state, lane.queue_head, r)
    lane.waiting += 1


@kernel
def put(state: State, rules: Any, lane: Any, r: int, evicted: bool) -> None:
    """A request arrives, or comes back evicted."""
    if rules.keyed:
        state.own.more[r].key = key_of(rules, state.requests[r], state.own.more[r])
        insert(state, lane, r)
    elif evicted:
        enqueue_front(lane, state.requests, r)
    else:
        enqueue_last(lane, state.requests, r)


@kernel
def take_head(state: State, rules: Any, lane: Any) -> int:
    """Take the head out of the queue."""
    r = lane.queue_head
    lane.waiting -= 1
    if not rules.keyed:
        lane.queue_head = state.requests[r].next
        return r
    more = state.own.more
    pairs = NONE
    child = more[r].child
    while child != NONE:
        pair, other = child, more[child].sibling
        child = NONE
        if other != NONE:
            child = more[other].sibling
            pair = merged(state, pair, other)
        more[pair].sibling = pairs
        pairs = pair
    heap = NONE
    while pairs != NONE:
        following = more[pairs].sibling
        heap = pairs if heap == NONE else merged(state, heap, pairs)
        pairs = following
    lane.queue_head = heap
    return r


@called_kernel
def put_back(state: State, rules: Any, lane: Any, aside: int) -> None:
    """Those who were passed over, the last one first, take their old places."""
    while aside != NONE:
        following = state.own.more[aside].aside
        if rules.keyed:
            insert(state, lane, aside)
        else:
            enqueue_front(lane, state.requests, aside)
        aside = following


@kernel
def opens(state: State, rules: Any, lane: Any, queue: Any) -> float:
    """When a queue that is not empty opens while nobody runs."""
    if rules.batching == DYNAMIC and lane.waiting - queue.on_host < rules.places:
        return state.requests[lane.queue_head].arrival + rules.max_queue_delay
    return 0.0


@kernel
def is_open(state: State, rules: Any, lane: Any, queue: Any, now: float) -> bool:
    """Whether anybody may be admitted in the step that starts at ``now``; see reference.unified_queue.Door."""
    waiting = lane.waiting - queue.on_host
    if queue.held or waiting == 0 or rules.places - lane.running < min(rules.together, waiting):
        return False
    if rules.batching != CONTINUOUS and not queue.forming:
        return False
    if lane.running == 0:
        return now >= opens(state, rules, lane, queue)
    if rules.delay_factor > 0.0:
        waited = now - state.requests[lane.queue_head].arrival
        if not waited > rules.delay_factor * queue.last_prefill_time:
            return False
    return lane.decodes == 0 or is_due(rules, lane, queue, waiting)


@kernel
def is_long_enough(rules: Any, lane: Any, waiting: int) -> bool:
    """Whether the ratio, where there is such a rule, asks for a look at the queue."""
    return rules.queue_ratio > 0.0 and float(waiting) > rules.queue_ratio * float(lane.running)


@kernel
def is_due(rules: Any, lane: Any, queue: Any, waiting: int) -> bool:
    """Whether the interval or the ratio, where there are such rules, ask for a look beside decodes."""
    if rules.interval == 1 and rules.queue_ratio == 0.0:
        return True
    return is_long_enough(rules, lane, waiting) or (rules.interval > 1 and lane.clock >= queue.opens_at_clock)
