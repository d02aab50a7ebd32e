"""SGLang's scheduler, 0.4.6.post5 and 0.5.23 (managers/scheduler.py, schedule_policy.py, schedule_batch.py):
``policy.Sglang``. ``pool.newer`` stands for the rules of the latter.

A round prefills waiting requests alone, or decodes all running ones; with mixed chunks both share it. Memory is counted
in tokens: the core's blocks are tokens. With the overlap schedule a round is decided before the outcome of the one in
flight is known; 0.5 foresees an end by length, 0.4.6 none (event_loop_overlap, scheduler_output_processor_mixin.py).

Running requests have the first seats of a lane, in the order of the engine's running batch. Whoever has ended, so that
its end is not after the clock, stays among them until the next decode round (0.5: any round). Behind them sit the
prompts of the latest prefill round. The clock counts the decode rounds that have run; what is in flight counts in
``lane.kv_tokens`` alone.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_step
from windtunnel.core.pipelines.stages import pipes
from windtunnel.core.records import IDLE, IGNORED, NONE, QUEUED, ROWS, STEPPED, Array, Group, Lane, Pool, State
from windtunnel.core.schedulers.sglang import turns as by_turns
from windtunnel.core.schedulers.sglang.admission import admit, open_round
from windtunnel.core.schedulers.sglang.delayer import (
    WINDOW,
    is_held_off,
    may_prefill,
    negotiate,
    note_usage,
    observe,
    spread_interval,
)
from windtunnel.core.schedulers.sglang.disaggregation import (
    count_new,
    join,
    let_go,
    may_stage,
    occupied,
    resume,
    stage,
    unstage,
)
from windtunnel.core.schedulers.sglang.drafts import drafts_of_pools, look_for_ends, set_context, settle, sit_down
from windtunnel.core.schedulers.sglang.memory import (
    allocate_decodes,
    allocate_prompts,
    check,
    close_up,
    drop_ended,
    due,
    fill_up,
    give_back,
    join_prefilled,
    keep,
    leave_out_the_last,
    left_of,
    make_room,
    queue_if_room,
    retract,
    take_pages,
    tell_refused,
)
from windtunnel.core.schedulers.sglang.tree.loads import room, set_host, waits
from windtunnel.core.schedulers.sglang.tree.radix import EVICTION, radix_tree, with_more_nodes
from windtunnel.core.schedulers.sglang.tree.radix import clear as clear_tree
from windtunnel.core.schedulers.sglang.turns import (
    LANE_FIELDS,
    POOL_FIELDS,
    REQUEST_FIELDS,
    clear_turns,
    decay,
    given_tokens,
    latest_end,
    micro_batches,
    rest,
    set_pool,
)
from windtunnel.core.seats import PHASES, WHO
from windtunnel.core.step import begin_boundary, count_released, depart, emit_first
from windtunnel.core.texts.owners import begins

__all__ = [
    "LANE_FIELDS",
    "POOL_FIELDS",
    "REQUEST_FIELDS",
    "check",
    "given_tokens",
    "join",
    "latest_end",
    "let_go",
    "may_stage",
    "occupied",
    "room",
    "stage",
    "unstage",
]

SEATS_OF_STAGES = True
"""Each stage of a pipeline has a table of seats."""
PROMPTS, ENDING = range(2)
"""Rows of ``Extra.flying``."""


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    tree: Any
    """tree.radix.Tree, or None where no pool has a radix cache."""
    flying: Array
    """[tables of seats, 2, max_num_seqs] requests whose prompt the round in flight completes, and those whose last
    decode is in it, in the order of the batch: a retraction may sort the seats before that is known."""
    scratch: Array
    """[3, longest list] room for sorting."""
    keys: Array
    """[2, longest list] by which the queue is sorted."""
    fault: Array
    """[3] what made the engine die, and two numbers for the message."""
    recent: Array
    """[lanes, 16] sizes of the latest rounds with prompts; see ``delayer``."""
    drafts: Any
    """Which drafts are right (vllm_v1.speculation.Drafts), or None where there are none."""
    turns: Any
    """MicroBatches of the stages of pipelines, or None where there are none."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run."""
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        set_pool(pool, limits, policy)
    pool_of_lane = np.repeat(np.arange(len(pools)), fleet.num_lanes)
    lanes["chunked"], lanes["preempted"], lanes["turned_away"], lanes["idle"] = NONE, NONE, NONE, 1
    lanes["ratio"], lanes["free"] = pools["init_ratio"][pool_of_lane], pools["num_blocks"][pool_of_lane]
    lanes["page"] = pools["page"][pool_of_lane]
    set_host(fleet, lanes, pool_of_lane)
    lanes["evicts"] = np.array([EVICTION[policy.radix_eviction_policy] for policy in fleet.policies])[pool_of_lane]
    requests["declared"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    requests["node"], requests["name"], requests["id"] = NONE, np.arange(len(requests)), np.arange(len(requests))
    pools["seed"] = fleet.seed
    if demand.priority is not None:
        requests["priority"] = demand.priority
    if demand.sessions is not None:
        requests["routing_key"] = np.resize(demand.sessions, len(requests)) + 1  # pools have a row for each side
    seats = int(pools["max_num_seqs"].max())
    lanes["table"] = np.arange(len(lanes))
    staged = any(policy.pipeline_parallel_size > 1 for policy in fleet.policies)
    return Extra(
        tree=radix_tree(demand, lanes) if pools["radix_cache"].any() else None,
        flying=np.zeros((len(lanes) * int(pools["stages"].max()), 2, seats), dtype=np.int64),
        scratch=np.zeros((3, max(len(requests), 2 * seats) + 2), dtype=np.int64),
        keys=np.zeros((2, len(requests) + 2)),
        fault=np.zeros(3, dtype=np.int64),
        recent=np.zeros((len(lanes), WINDOW), dtype=np.int64),
        drafts=drafts_of_pools(fleet, demand, pools, lanes, pool_of_lane),
        turns=micro_batches(pipes(fleet, lanes), lanes) if staged else None,
    )


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing."""
    extra, lane = state.extra, state.lanes[i : i + 1]
    if extra.tree is not None:
        clear_tree(extra.tree, int(lane["root"][0]))
    if extra.turns is not None:
        stages = int(state.pools["stages"][state.groups["pool"][lane["group"][0]]])
        clear_turns(state, extra.turns, lane, i, stages)


def stand_in(state: State, i: int, r: int, row: int) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i`` has ``row`` of the requests in place of ``r``."""
    extra = state.extra
    extra.flying[extra.flying == r] = row
    if extra.tree is not None:
        begins(extra.tree.texts, r, row, int(state.requests["prompt"][r]))
    if extra.turns is not None:
        extra.turns.batches["part_way"][extra.turns.batches["part_way"] == r] = row


def with_more_room(extra: Extra) -> Extra:
    """Twice as many nodes in the trees, if there are any."""
    return extra if extra.tree is None else extra._replace(tree=with_more_nodes(extra.tree))


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request at the end of the queue, if it has room."""
    queue_if_room(pool, lane, state.requests, r)


@part
def seated(state: State, pool: Pool, lane: Lane) -> int:  # noqa: ARG001 - as in every scheduler
    """Those that run, and behind them the prompts of the latest prefill round."""
    return lane.top + lane.batch


# A prefill round.


@part
def prefill(state: State, extra: Extra, pool: Pool, lane: Lane, seats: Array, start: float) -> bool:
    """Choose a batch of prompts, if any may be admitted; with mixed chunks the running requests share it."""
    if not lane.opened:
        return False
    admit(extra.tree, extra, pool, lane, state.requests, seats, state.rows, start)
    lane.part_way = lane.chunked
    if lane.batch == 0 or not allocate_prompts(extra.tree, extra.fault, pool, lane, seats):
        return False
    lane.processed += lane.chunk_tokens
    return not pool.mixed or mix(extra, pool, lane, state.requests, seats)


@part
def mix(extra: Extra, pool: Pool, lane: Lane, requests: Array, seats: Array) -> bool:
    """Let the running requests share the round; from 0.5 on they sit it out if memory is short. False: it died."""
    if pool.newer:
        if leave_out_the_last(pool, lane, requests, seats) > 0:
            lane.full = 0
        if lane.top == 0 or not make_room(extra.tree, pool, lane, due(pool, lane, requests, seats, lane.top)):
            return True
        if pool.preempts:
            for i in range(lane.top):
                request = requests[seats[WHO, i]]
                request.looked = request.prompt + request.declared - left_of(lane, seats, i)
    else:
        drop_ended(lane, seats)
    lane.mixed = 1
    lane.step_decodes = lane.top
    return lane.top == 0 or allocate_decodes(extra.tree, extra.fault, pool, lane, requests, seats)


# A decode round.


@part
def decode(state: State, extra: Extra, pool: Pool, lane: Lane, seats: Array) -> bool:
    """One token for every running request; some are retracted if memory is short. From 0.5 on the round is skipped
    if those whose last token is in flight make room."""
    before, requests = lane.top, state.requests
    drop_ended(lane, seats)
    left_out = leave_out_the_last(pool, lane, requests, seats)
    if lane.top > 0:
        if make_room(extra.tree, pool, lane, due(pool, lane, requests, seats, lane.top)):
            lane.ratio = max(lane.ratio - pool.decay, pool.min_ratio)
        elif left_out > 0:
            lane.full = 0
            return False
        else:
            retract(extra.tree, pool, lane, requests, seats, state.rows, extra.scratch, extra.fault)
        if extra.fault[0]:
            return False
        if lane.top > 0 and not allocate_decodes(extra.tree, extra.fault, pool, lane, requests, seats):
            return False
    if lane.top < before:
        lane.full = 0
    lane.step_decodes = lane.top
    return lane.top > 0


@part
def look_for_prompts(state: State, pool: Pool, i: int, start: float) -> None:
    """Begin the next round of lane ``i``, up to the first prompt that may be admitted."""
    extra, lane, requests = state.extra, state.lanes[i], state.requests
    seats = state.seats[lane.table]
    if lane.chunked != NONE:
        keep(extra.tree, pool, lane, requests[lane.chunked], lane.chunked)
    if lane.batch > 0:
        join_prefilled(lane, requests, seats, extra.scratch)
    if pool.newer:
        before = lane.top
        drop_ended(lane, seats)
        if lane.top < before:
            lane.full = 0
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.loading = 0, 0, 0, 0
    note_usage(pool, lane)
    lane.held_off = is_held_off(pool, lane)
    lane.opened = not lane.held_off and may_prefill(extra, pool, lane)
    if lane.opened:
        open_round(extra.tree, extra, pool, lane, requests, seats, state.rows, start)


@part
def fill_with_prompts(state: State, pool: Pool, i: int, start: float) -> bool:
    """Let prompts enter the round that was begun; whether there are any."""
    extra, lane = state.extra, state.lanes[i]
    found = prefill(state, extra, pool, lane, state.seats[lane.table], start)
    if pool.delays:
        observe(pool, lane, extra.recent[i], found)
    if found:
        lane.interval_left = pool.interval
    return found


@part
def end_round(state: State, pool: Pool, i: int, found: bool, decodes: bool) -> bool:
    """Decide what prompts have left open, if decodes may run; False if the round is idle."""
    extra, lane = state.extra, state.lanes[i]
    seats = state.seats[lane.table]
    if decodes and not found and not extra.fault[0]:
        found = decode(state, extra, pool, lane, seats)
    set_context(extra.drafts, lane, state.requests, seats)
    tell_refused(lane, state.requests)
    lane.idle = not found and not lane.flying
    lane.step_kv = lane.kv_tokens if lane.step_decodes > 0 else 0
    lane.running = lane.outstanding - lane.waiting - lane.coming
    return found


@part
def decide_round(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next round of lane ``i``, which starts at ``start``; False if it is idle."""
    look_for_prompts(state, pool, i, start)
    return end_round(state, pool, i, fill_with_prompts(state, pool, i, start), True)


# What a round gives. With the overlap schedule it counts as computed when it takes off; the clock, tokens, ends and the
# tree go on when it has landed.


@part
def log_round(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the round that was decided."""
    lane = state.lanes[i]
    lane.row = state.counters[ROWS]
    seats, late = state.seats[lane.table], waits(state, pool, i, start)
    write_step(state, pool, state.groups[lane.group], lane, seats, start, count_new(lane, state.requests, seats), late)
    report_blocks(state, pool, lane.row, state.counters[ROWS])


@part
def note_end(state: State, pool: Pool, i: int, seat: int, end: float) -> None:  # noqa: ARG001 - see core.seats
    """The round in flight is the last one of a decode."""
    lane = state.lanes[i]
    state.extra.flying[lane.table, ENDING, lane.flying_ends] = state.seats[lane.table, WHO, seat]
    lane.flying_ends += 1


@part
def take_off(state: State, pool: Pool, i: int, end: float) -> None:
    """The round that was decided is in flight from now on; the one before it has landed."""
    lane = state.lanes[i]
    seats, flying = state.seats[lane.table], state.extra.flying[lane.table]
    lane.flying, lane.flying_row = lane.chunks + lane.step_decodes > 0, lane.row
    lane.flying_prompts, lane.flying_ends, lane.flying_decodes = 0, 0, lane.step_decodes
    for seat in range(lane.top, lane.top + lane.chunks):
        if seats[WHO, seat] != lane.chunked:
            flying[PROMPTS, lane.flying_prompts] = seats[WHO, seat]
            lane.flying_prompts += 1
    lane.kv_tokens += lane.step_decodes
    if lane.step_decodes > 0:
        resume(state, lane, seats, end)
        look_for_ends(state, pool, i, end, state.extra.drafts, flying[ENDING], note_end)


@compiled
def end_request(tree: Any, pool: Pool, lane: Lane, requests: Array, r: int, end: float, late: int) -> None:
    """The last token of a request has come: it is done and gone. ``late``: it is part of the round in flight, and what
    that writes is kept as well (0.4.6 frees it when the round has run)."""
    request = requests[r]
    request.generated, request.finish, request.left_out = request.output, end, 0
    if request.holds == 0:
        give_back(tree, pool, lane, request, r, late if pool.newer else 0)
    depart(lane, requests, r)


@part
def was_dropped(requests: Array, r: int) -> bool:
    """Whether a request of the round in flight was sent back or aborted since."""
    return requests[r].state == QUEUED or requests[r].state == IGNORED


@part
def land(state: State, pool: Pool, i: int, end: float) -> None:
    """Lane ``i``'s round in flight has run at ``end``; with the overlap schedule the next one, if any, was decided and
    logged before. Who ends now takes part in that one if it decodes; the place of its token there is free when it has
    run."""
    lane, requests, tree = state.lanes[i], state.requests, state.extra.tree
    seats, flying = state.seats[lane.table], state.extra.flying[lane.table]
    lane.free += lane.late
    late = 1 if pool.async_scheduling and lane.step_decodes > 0 else 0
    ended = 0
    if lane.flying_decodes > 0:
        lane.clock += 1
        lane.last_decode = end
    for k in range(lane.flying_prompts):
        r = flying[PROMPTS, k]
        request = requests[r]
        if was_dropped(requests, r):
            continue
        emit_first(state, r, end)
        request.ends = lane.clock + request.output - request.generated
        if request.generated < request.output:
            keep(tree, pool, lane, request, r)
            continue
        goes_on = late if request.left_out == 0 else 0
        if pool.async_scheduling and request.left_out == 0:  # it was among the running ones already
            lane.kv_tokens -= request.filled + late
            ended += 1
        end_request(tree, pool, lane, requests, r, end, goes_on)
    if lane.flying_prompts > 0:
        sit_down(pool, lane, requests, seats)
    for k in range(lane.flying_ends):
        r = flying[ENDING, k]
        if not was_dropped(requests, r):
            goes_on = late if requests[r].left_out == 0 else 0
            if requests[r].left_out == 0:
                lane.kv_tokens -= requests[r].prompt + requests[r].output - 1 + late
                ended += 1
            end_request(tree, pool, lane, requests, r, end, goes_on)
    if pool.reserve > 0 and lane.flying_decodes > 0:
        settle(lane, requests, seats, end)
    if lane.flying_ends > 0:
        close_up(lane, seats, lane.top, lane.top)
    lane.ended += ended
    if late * ended > 0:
        state.rows[lane.row].discarded += late * ended
    lane.late = 0 if pool.newer else late * ended
    lane.flying, lane.flying_prompts, lane.flying_decodes, lane.flying_ends = 0, 0, 0, 0
    lane.running = lane.outstanding - lane.waiting - lane.coming


# A step of a group.


@part
def look(state: State, pool: Pool, group: Group, start: float) -> bool:
    """Decide the next round of every lane, where they agree when prompts enter; whether there is any."""
    found = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        look_for_prompts(state, pool, i, start)
    if pool.delays and not state.lanes[group.first_lane].held_off:  # such rounds do not ask, on any rank
        negotiate(state, pool, group)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        found |= fill_with_prompts(state, pool, i, start)
    decodes = not found or pool.reserve == 0  # with drafts prompts of one rank let the others wait
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        found |= end_round(state, pool, i, state.lanes[i].batch > 0, decodes)
    return found


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next round of every lane, looking again where all are idle: (whether there is any, False)."""
    start, found, fault = max(group.now, group.end), False, state.extra.fault
    begin_boundary(group, state.lanes)
    for _ in range(1 if group.end > group.now else pool.looks):
        if fault[0]:
            return False, False
        found, waits = look(state, pool, group, start), False
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            waits |= state.lanes[i].head != NONE
        if not found:
            rest(state, pool, group)
        if found or not waits:
            break
    if pool.interval > 0 and group.num_lanes > 1:
        spread_interval(state, pool, group)
    return found and not fault[0], False


@part
def report_blocks(state: State, pool: Pool, first: int, last: int) -> None:
    """The log counts memory in blocks, where the rules count tokens."""
    if pool.reported_block > 1:
        for k in range(first, last):
            state.rows[k].used_blocks = -(-state.rows[k].used_blocks // pool.reported_block)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The round that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, log_round, take_off, land)


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision."""
    if arrives:
        land(state, pool, i, state.groups[state.lanes[i].group].end)


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """Nothing is scheduled: the round in flight lands, if there is one; those who were refused leave."""
    done = IDLE if state.extra.fault[0] else steps.pass_over(state, pool, group, preempted, skip)
    count_released(group, state.lanes)
    return STEPPED if group.released > 0 else done


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one round; IDLE if there is nothing to do until something arrives, or the engine has died."""
    return step_through(state, pool, group, state.extra.turns)


@part
def step_through(state: State, pool: Pool, group: Group, turns: Any) -> int:
    """A round of one stage, or the turn of a micro-batch."""
    if turns is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, waits)
    return by_turns.step(state, pool, group, turns, decide_round, log_round, take_off, land)


# Many rounds at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """Decode rounds in which no request ends, is retracted or can be admitted; see ``core.jump``. An idle rank that
    runs along with others stays so."""
    lane, ahead = state.lanes[i], 1 if pool.async_scheduling else 0
    busy = lane.batch > 0 or lane.chunked != NONE or lane.ended > 0 or lane.interval_left > 0
    busy |= lane.joined > 0 or lane.asking_head != NONE
    if lane.top == 0:
        in_flight = lane.flying_prompts + lane.flying_decodes + lane.flying_ends + lane.late
        alone = state.groups[lane.group].num_lanes == 1
        if busy or alone or not lane.idle or lane.head != NONE or in_flight > 0:
            return 0, 0, False
        lane.decodes = state.seats[i, PHASES, 0] = 0
        return FOREVER, 0, True
    if pool.reserve > 0:
        return 0, 0, False
    if ahead:
        busy |= lane.flying_prompts > 0 or lane.flying_decodes == 0 or lane.late > 0 or lane.flying_ends > 0
    if busy or (lane.head != NONE and (not lane.full or pool.preempts)):
        return 0, 0, False
    lane.decodes = state.seats[i, PHASES, 0] = lane.top
    rounds = lane.free // lane.top
    if pool.page > 1:  # in this many rounds each request begins one page; nothing is evicted before
        rounds = pool.page * ((lane.free - lane.evictable) // (lane.top * pool.page) - 1)
    return min(lane.next_end - lane.clock - 1, rounds) - ahead, 0, not lane.full


@part
def jumped(state: State, pool: Pool, i: int, rounds: int) -> None:
    """What this many equal rounds leave behind."""
    lane, group = state.lanes[i], state.groups[state.lanes[i].group]
    row = state.counters[ROWS] - group.num_lanes + i - group.first_lane
    if lane.top == 0:
        lane.clock -= rounds
    else:
        if pool.page > 1:
            take_pages(state, pool, lane, row, rounds)
        else:
            fill_up(state.extra.tree, pool, lane, rounds)
        decay(pool, lane, rounds)
        lane.last_decode = group.now
        lane.flying_row = row
    report_blocks(state, pool, row, row + 1)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal rounds as possible; see ``core.jump`` and ``core.pipelines``."""
    return jump_through(state, pool, group, until, state.extra.turns)


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, turns: Any) -> int:
    """Equal rounds of one stage, or of all micro-batches in turn."""
    if turns is None:
        return equal_steps(state, pool, group, until, steady, jumped)
    return by_turns.jump(state, pool, group, until, turns, report_blocks)


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """A lane that only decodes cannot end any request before its next end; a step of slack for rounding."""
    update_bound_through(state, pool, group, state.extra.turns)


@part
def update_bound_through(state: State, pool: Pool, group: Group, turns: Any) -> None:
    """Of one stage, or of a pipeline."""
    if turns is not None:
        by_turns.update_bound(state, pool, group, turns)
        return
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        settled = lane.idle or not pool.async_scheduling  # the ratio starts anew when nothing is in flight
        if lane.outstanding == 0 and lane.ended == 0 and lane.batch == 0 and settled:
            continue
        decodes = lane.top - lane.ended if pool.reserve == 0 else 0
        asked = lane.asking_head != NONE  # what it may give grows with every token of the running ones
        waits = lane.head == NONE or (lane.full and lane.ended == 0 and not pool.preempts)
        waits &= lane.flying_ends == 0 or not pool.newer  # its seat is empty already
        if lane.batch > 0 or lane.chunked != NONE or lane.flying_prompts > 0 or not waits or asked or decodes == 0:
            group.bound = group.now
            return
        shortest = state.floats[pool.shortest_step + decodes]
        group.bound = min(group.bound, group.now + float(lane.next_end - lane.clock - 1) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a round of those alone that had ended is in flight
