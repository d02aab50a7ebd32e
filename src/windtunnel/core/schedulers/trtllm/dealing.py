"""How ranks of attention data parallelism get new requests (pyexecutor/scheduler/adp_router.py, ``DefaultADPRouter``;
executor_request_queue.py, ``_fetch_new_requests_attention_dp``).

All wait together, in the queue of the first rank, until a step is decided and any rank has a place for them.
"""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import pop_first
from windtunnel.core.records import NONE, Array, Group, Lane, Pool, State
from windtunnel.core.seats import EMPTY, ENDS, WHO, sit
from windtunnel.core.step import uncount


@part
def door_of(state: State, pool: Pool, lane: Lane) -> Lane:
    """The lane in whose queue a request waits that was sent to this one."""
    return state.lanes[state.groups[lane.group].first_lane] if pool.deals else lane


@part
def take_place(lane: Lane, seats: Array, r: int) -> None:
    """A request becomes active; it has not begun."""
    lane.waiting += 1
    sit(lane, seats, r)
    lane.running -= 1
    lane.active += 1


@part
def may_deal(pool: Pool, group: Group, lanes: Array) -> bool:
    """Whether anybody waits, and any rank has a place."""
    found = False
    if pool.deals and group.num_lanes > 1 and lanes[group.first_lane].head != NONE:
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            found |= lanes[i].active < pool.max_num_seqs
    return found


@part
def change_lanes(lanes: Array, requests: Array, r: int, i: int) -> None:
    """A request is lane ``i``'s from now on."""
    request = requests[r]
    if request.lane != i:
        uncount(lanes[request.lane], requests, r)
        lanes[i].outstanding += 1
        lanes[i].in_flight[request.server] += 1
        request.lane = i


@part
def fetch(requests: Array, door: Lane, places: int, dealt: Array) -> int:
    """Take those who come first out of the queue, the longest prompts first, of equals in their order; how many."""
    count = 0
    while count < places and door.head != NONE:
        r, at = pop_first(door, requests), count
        while at > 0 and requests[dealt[at - 1]].prompt < requests[r].prompt:
            dealt[at] = dealt[at - 1]
            at -= 1
        dealt[at] = r
        count += 1
    return count


@compiled
def deal(pool: Pool, group: Group, lanes: Array, requests: Array, tables: Array, dealt: Array) -> None:
    """Each request goes to the rank whose active prompts have the fewest tokens, of equals the one with fewer requests;
    no rank gets more than its share of all."""
    first, last, places, total, most = group.first_lane, group.first_lane + group.num_lanes, 0, 0, 0
    for i in range(first, last):
        lane, seats = lanes[i], tables[i]
        lane.load = 0
        for k in range(lane.top):
            lane.load += requests[seats[WHO, k]].prompt if seats[ENDS, k] != EMPTY else 0
        places += max(pool.max_num_seqs - lane.active, 0)
        total += lane.active
        most = max(most, lane.active)
    count = fetch(requests, lanes[first], places, dealt)
    share = min(max(-(-(total + count) // group.num_lanes), most), pool.max_num_seqs)
    for k in range(count):
        best = NONE
        for i in range(first, last):
            if lanes[i].active < share and (
                best == NONE
                or lanes[i].load < lanes[best].load
                or (lanes[i].load == lanes[best].load and lanes[i].active < lanes[best].active)
            ):
                best = i
        change_lanes(lanes, requests, dealt[k], best)
        lanes[best].load += requests[dealt[k]].prompt
        take_place(lanes[best], tables[best], dealt[k])
