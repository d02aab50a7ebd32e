"""Requests that decode with drafts and need nothing else: a step goes through five numbers of each.

Which drafts are right is known here when they are scheduled, so all that a request is after a step follows from the
tokens of its answer after the latest three. While it is steady these stand in a dense table of its lane, and the loops
over it are ones that LLVM turns into vector instructions; its own fields, and its part of the step in flight, are
written when it is steady no longer. It has a seat all the while, marked STEADY.
"""

from typing import Any

import numpy as np

from windtunnel.core.batch_time import group_time
from windtunnel.core.compiled import compiled, entry, part
from windtunnel.core.log import log_has_room, write_step
from windtunnel.core.records import (
    AT_ONCE,
    GAINED,
    GONE,
    JUMPS,
    NONE,
    ROWS,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    Request,
    State,
)
from windtunnel.core.schedulers.vllm_passes import most_tokens
from windtunnel.core.schedulers.vllm_v1.speculation import AT_LEAST, MASK, blocks_ahead, mixed
from windtunnel.core.seats import ENDS, LOOSE, NEVER, NOW, STEADY, WHO, find_loose
from windtunnel.core.step import begin_boundary

LANE_FIELDS: Fields = [
    ("told_at", np.float64),  # when the latest output arrived
    ("told_before", np.float64),  # when the one before did
    ("loose", np.int64),  # seats in LOOSE
    ("steady", np.int64),  # requests in its table
    ("steady_prompts", np.int64),  # the tokens of their prompts
    ("ring", np.int64),  # which of PLACES is the latest
    # their next step
    ("steady_kv", np.int64),
    ("steady_due", np.int64),  # new blocks
    ("steady_ends", np.int64),  # those of them who get their last token
]

OF, SEED, ROOM, OUTPUT, DRAWN, PLACES = range(6)
"""Rows of the table: the request; what its drafts are drawn for; the known tokens of its answer for which its blocks
suffice in a step; the tokens of its whole answer; what was drawn; and three in turn: tokens of its answer after the
latest step that was launched, the one before, and the one before that."""
NUM_ROWS = PLACES + 3
REQUEST, COMPUTED, YIELDED, WRONG, CONTINUED = range(5)
"""Entries of a part of a step in flight: its request and tokens; the tokens that it yields; drafts that are wrong;
whether it had computed before all that was known when it was admitted."""


def table(lanes: int, width: int) -> Array:
    """Empty tables."""
    return np.zeros((lanes, NUM_ROWS, -(-width // 32) * 32), dtype=np.int32)


@part
def reach(pool: Pool) -> int:
    """Tokens beyond the known ones that a decode has blocks for: its drafts, asynchronously those in flight as well,
    and what its drafter writes."""
    drafts = pool.num_speculative_tokens
    return int((2 * drafts + 1 if pool.async_scheduling else drafts) + pool.lookahead)


# Into the table, and out of it.


@part
def is_steady(pool: Pool, lane: Lane, request: Request, at: Array) -> bool:
    """Whether a request, which has had this part in the latest step, is as the table will have it."""
    drafts, ahead = pool.num_speculative_tokens, pool.async_scheduling != 0
    flying, given = (1 + drafts if ahead else 0), (at[YIELDED] if ahead else 0)
    known = request.prompt + request.generated
    steady = request.seated and request.state != GONE and request.stale == 0 and request.blocks > 0
    steady = steady and at[CONTINUED] != 0 and at[COMPUTED] == 1 + drafts and at[YIELDED] > 0
    steady = steady and request.unknown == flying and request.in_flight == flying and request.drafts == drafts
    steady = steady and request.context == known + (drafts if ahead else -1) and request.certain == known - 1
    steady = steady and request.promised == given and request.generated + given < request.output
    steady = steady and request.last_token == lane.told_at
    steady = steady and (request.token_before == lane.told_before or request.given_before == 0)
    steady = steady and request.latest == lane.decoded
    steady = steady and known + reach(pool) <= (request.blocks + 1) * pool.block_size
    return bool(steady and request.prompt + request.output + reach(pool) + drafts + 2 <= pool.max_model_len)


@part
def names_more(cache: Any, r: int) -> bool:
    """Whether others will look for blocks that a request has not filled yet."""
    if cache is None:
        return False
    return bool(cache.holdings[r].kept < cache.holdings[r].shared)


@part
def fold(state: State, pool: Pool, i: int, number: int) -> None:
    """Those with a part in the latest step who are steady join the table; asynchronously it is in flight, and their
    parts are taken out of it."""
    lane, extra = state.lanes[i], state.extra
    may = state.counters[JUMPS] != 0 and extra.encoder is None and 1 + pool.num_speculative_tokens <= pool.block_size
    if not may or len(extra.drafts.hits) > 0:
        return
    flight, kept = extra.flights[i, number], 0
    for k in range(extra.counts[i, number]):
        r = flight[k, REQUEST]
        if is_steady(pool, lane, state.requests[r], flight[k]) and not names_more(extra.cache, r):
            enter(state, pool, lane, extra.steady[i], extra.drafts, r)
            seat = seat_of(lane, state.seats[i], state.requests[r], r, NEVER)
            state.seats[i, ENDS, seat], state.seats[i, NOW, seat] = STEADY, 0
            continue
        if kept < k:
            for entry in range(CONTINUED + 1):
                flight[kept, entry] = flight[k, entry]
        kept += 1
    extra.counts[i, number] = kept


@part
def enter(state: State, pool: Pool, lane: Lane, rows: Array, drafts: Any, r: int) -> None:
    """A request joins the table."""
    request, f = state.requests[r], lane.steady
    seed = mixed((drafts.seed[0] + request.id) & MASK)
    rows[OF, f], rows[SEED, f] = r, seed - (MASK + 1 if seed > MASK >> 1 else 0)
    rows[ROOM, f] = request.blocks * pool.block_size - request.prompt - reach(pool)
    rows[OUTPUT, f] = request.output
    place = request.generated + request.promised
    rows[PLACES + lane.ring, f] = place
    if pool.async_scheduling:
        rows[PLACES + (lane.ring + 2) % 3, f], rows[PLACES + (lane.ring + 1) % 3, f] = (
            request.generated,
            request.given_before,
        )
    else:
        rows[PLACES + (lane.ring + 2) % 3, f] = request.given_before
    lane.steady += 1
    lane.steady_prompts += request.prompt


@part
def seat_of(lane: Lane, seats: Array, request: Request, r: int, ends: int) -> int:
    """The seat of a request, which is marked so. It has not moved up since ``seat`` was written."""
    seat = min(request.seat, lane.top - 1)
    while seats[WHO, seat] != r or seats[ENDS, seat] != ends:
        seat -= 1
    request.seat = seat
    return seat


@part
def bring_out(state: State, pool: Pool, i: int, f: int) -> int:
    """The ``f``-th of the table leaves it: its fields, its seat, which is returned, and its part of the step in flight
    are written."""
    lane, rows, extra = state.lanes[i], state.extra.steady[i], state.extra
    r, drafts = rows[OF, f], pool.num_speculative_tokens
    request = state.requests[r]
    place, known = rows[PLACES + lane.ring, f], rows[PLACES + (lane.ring + 2) % 3, f]
    request.given_before = rows[PLACES + (lane.ring + 1) % 3, f] if pool.async_scheduling else known
    request.generated = known if pool.async_scheduling else place
    request.promised = place - request.generated
    request.blocks = (rows[ROOM, f] + request.prompt + reach(pool)) // pool.block_size
    request.last_token, request.latest = lane.told_at, lane.decoded
    if request.given_before > 0:  # else it is as it was before the first token
        request.token_before = lane.told_before
    request.certain = request.prompt + request.generated - 1
    request.context = request.certain
    if pool.async_scheduling:
        request.context += 1 + drafts
        request.unknown = request.in_flight = 1 + drafts
        number = 1 - lane.flight
        at = extra.flights[i, number, extra.counts[i, number]]
        extra.counts[i, number] += 1
        at[REQUEST], at[COMPUTED], at[CONTINUED] = r, 1 + drafts, 1
        at[YIELDED], at[WRONG] = request.promised, 1 + drafts - request.promised
    seat = seat_of(lane, state.seats[i], request, r, STEADY)
    state.seats[i, ENDS, seat] = NEVER
    lane.steady -= 1
    lane.steady_prompts -= request.prompt
    for row in range(NUM_ROWS):
        rows[row, f] = rows[row, lane.steady]
    return seat


@compiled
def bring_out_all(state: State, pool: Pool, i: int) -> None:
    """Nobody of lane ``i`` is steady any more."""
    while state.lanes[i].steady > 0:
        bring_out(state, pool, i, state.lanes[i].steady - 1)


@entry
def show(state: State) -> None:
    """Nobody is steady any more."""
    for g in range(len(state.groups)):
        group = state.groups[g]
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            bring_out_all(state, state.pools[group.pool], i)


@part
def launch_all(state: State, pool: Pool, i: int) -> None:
    """The step is on its way. Those who get their last token are steady no longer, and are launched as all others."""
    lane = state.lanes[i]
    if lane.steady_ends > 0:
        bring_out_ending(state, pool, i)
    lane.ring = (lane.ring + 1) % 3


@compiled
def bring_out_ending(state: State, pool: Pool, i: int) -> None:
    """Those leave the table who get their last token in the step that was decided."""
    lane, rows = state.lanes[i], state.extra.steady[i]
    after = rows[PLACES + (lane.ring + 1) % 3]
    for f in range(lane.steady - 1, -1, -1):
        if after[f] >= rows[OUTPUT, f]:
            seat = bring_out(state, pool, i, f)
            state.seats[i, NOW, seat] = 1 + pool.num_speculative_tokens
    find_loose(lane, state.seats[i])


# A step.


@part
def look_ahead(pool: Pool, lane: Lane, rows: Array, drafts: Any) -> None:
    """What the next step of those in the table needs, and yields as ``speculation.num_accepted`` says: set in the lane.

    New blocks are one of a request at most, because it yields no more tokens than a block has.
    """
    places, after, drawn, seed = rows[PLACES + lane.ring], rows[PLACES + (lane.ring + 1) % 3], rows[DRAWN], rows[SEED]
    known, room, output = (
        rows[PLACES + ((lane.ring + 2) % 3 if pool.async_scheduling else lane.ring)],
        rows[ROOM],
        rows[OUTPUT],
    )
    marks = drafts.marks[pool.first_mark : pool.first_mark + max(pool.num_speculative_tokens, AT_LEAST)]
    first, second, third, fourth = marks[0], marks[1], marks[2], marks[3]
    due, kv, ends = 0, 0, 0
    for f in range(lane.steady):
        place = int(places[f])
        draw = mixed((int(seed[f]) & MASK) ^ mixed(place + 1))
        after[f] = place + 1 + (draw < first) + (draw < second) + (draw < third) + (draw < fourth)
        drawn[f] = draw - (1 << 31)
        due += known[f] > room[f]
        ends += after[f] >= output[f]
        kv += place
    for k in range(AT_LEAST, pool.num_speculative_tokens):
        mark, ends = marks[k] - (1 << 31), 0
        for f in range(lane.steady):
            after[f] += drawn[f] < mark
            ends += after[f] >= output[f]
    lane.steady_due, lane.steady_ends = due, ends
    lane.steady_kv = kv + lane.steady_prompts - lane.steady


@part
def serve_all(pool: Pool, lane: Lane, rows: Array) -> None:
    """They are in the next step."""
    lane.step_decodes, lane.step_kv = lane.steady, lane.steady_kv
    if lane.steady_due > 0:
        take_blocks(pool, lane, rows)


@part
def take_blocks(pool: Pool, lane: Lane, rows: Array) -> None:
    """Those who need a block get it."""
    known, room = rows[PLACES + ((lane.ring + 2) % 3 if pool.async_scheduling else lane.ring)], rows[ROOM]
    lane.free -= lane.steady_due
    for f in range(lane.steady):
        room[f] += pool.block_size if known[f] > room[f] else 0


@part
def fit_together(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, most: int, wants: Any) -> bool:
    """Whether tokens and blocks suffice for all that a step in the engine's order gives to those in the table, whoever
    stands before or behind them. ``wants``: as in ``visit_in_turn``."""
    drafts = pool.num_speculative_tokens
    left, free = (
        pool.max_num_batched_tokens - lane.steady * (1 + drafts + pool.draft_slots),
        lane.free - lane.steady_due,
    )
    last = lane.top - 1 if lane.loose > 0 else NONE
    while last >= 0 and seats[ENDS, last] != STEADY:
        last -= 1
    for k in range(lane.loose):
        i = seats[LOOSE, k]
        request = requests[seats[WHO, i]]
        tokens = min(wants(pool, lane, extra.pipe, request, NEVER), most)
        if tokens > 0:
            asked = min(tokens, pool.max_num_batched_tokens)
            free -= max(blocks_ahead(pool, request.context + asked) - request.blocks, 0)
            left -= tokens + pool.draft_slots if i < last else 0
    return bool(left >= 0 and free >= 0 and most > drafts)


# Many steps at once.


@part
def all_steady(state: State, pool: Pool, group: Group) -> bool:
    """Whether the next steps have nobody but those in the table of the group's one lane, and tokens for all."""
    lane, counts = state.lanes[group.first_lane], state.extra.counts[group.first_lane]
    alone = group.num_lanes == 1 and lane.running == lane.steady and lane.waiting == 0 and lane.head == NONE
    if not alone or lane.steady == 0 or counts[0] + counts[1] > 0 or lane.idle_holds or state.counters[JUMPS] == 0:
        return False
    tokens = lane.steady * (1 + pool.num_speculative_tokens + pool.draft_slots)
    suffice = tokens <= pool.max_num_batched_tokens and most_tokens(pool, lane) > pool.num_speculative_tokens
    return bool(suffice and pool.prefill_schedule_interval <= 1)


@part
def go_on(state: State, pool: Pool, group: Group, until: float) -> int:
    """Steps of those in the table alone, as ``drafts.step`` makes them one by one, while ``now`` < ``until``, blocks
    suffice and nobody ends; how many. They are a row of the log where there is room for gains."""
    i, done, most, counters = group.first_lane, 0, state.counters[AT_ONCE], state.counters
    lane, rows, gains = state.lanes[i], state.extra.steady[i], state.extra.gains
    row, at, grows = counters[ROWS], counters[GAINED], len(gains) > 0
    if grows:
        most = min(most, len(gains) - at)
    lane.chunks, lane.chunk_tokens, lane.prefills, lane.holds_prompts, lane.deferred, lane.pads = 0, 0, 0, 0, 0, 1
    while done < most and group.now < until and ((grows and done > 0) or log_has_room(state, pool, group)):
        look_ahead(pool, lane, rows, state.extra.drafts)
        if lane.steady_due > lane.free or lane.steady_ends > 0:
            break
        serve_all(pool, lane, rows)
        start = max(group.now, group.end)
        lane.end = start + group_time(state, pool, group)
        if done == 0 or not grows:
            write_step(state, pool, group, lane, state.seats[i], start, 0, 0.0)
        if grows:
            gains[at + done, 0] = lane.step_kv - state.rows[row].kv_tokens
            gains[at + done, 1] = pool.num_blocks - lane.free - state.rows[row].used_blocks
        arrives = group.end if pool.async_scheduling else lane.end
        lane.told_before, lane.told_at = lane.told_at, arrives
        group.now, group.end, lane.decoded = arrives, lane.end, lane.end
        lane.ring, lane.flight = (lane.ring + 1) % 3, 1 - lane.flight
        done += 1
    if grows and done > 1:
        state.rows[row].steps, state.rows[row].gains = done, 1 + at
        counters[GAINED] += done
    if done > 0:
        begin_boundary(group, state.lanes)
        lane.clock += done
        lane.executed += done
        lane.silent = 0
    return done
