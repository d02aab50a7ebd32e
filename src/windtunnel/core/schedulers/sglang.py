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
from windtunnel.core.log import write_step
from windtunnel.core.pipeline import PIPE_OF_LANE, pipes
from windtunnel.core.queues import put_last
from windtunnel.core.records import IDLE, NONE, PREFILL, QUEUED, ROWS, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.schedulers import sglang_turns
from windtunnel.core.schedulers.sglang_admission import (
    BEYOND,
    ORDERS,
    UNLIMITED,
    admit,
    allocate,
    close_up,
    drop_ended,
    give_back,
    join_prefilled,
    keep,
    make_room,
    places,
)
from windtunnel.core.schedulers.sglang_apart import count_new, join, let_go, may_stage, occupied, resume, stage
from windtunnel.core.schedulers.sglang_radix import LEFT, TREE_OF_LANE, evict, radix_tree, with_more_nodes
from windtunnel.core.schedulers.sglang_radix import clear as clear_tree
from windtunnel.core.schedulers.sglang_retraction import NO_SPACE_FOR_ONE, retract
from windtunnel.core.schedulers.sglang_turns import TURNS_OF_LANE, MicroBatches, clear_turns, decay, micro_batches, rest
from windtunnel.core.seats import ENDS, NEVER, PHASES, WHO, end_decodes, ends_at
from windtunnel.core.step import begin_boundary, depart, emit_first, nothing
from windtunnel.errors import InputError

__all__ = ["join", "let_go", "may_stage", "occupied", "stage"]

SEATS_OF_STAGES = True
"""Each stage of a pipeline has a table of seats."""
PROMPTS, ENDING = range(2)
"""Rows of ``Own.flying``."""


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
        "stages",
        "micro_batch",  # requests that run in one stage of a pipeline, but for those whose prompt ends in it
    ),
]

LANE_FIELDS: Fields = [
    *((name, np.float64) for name in ("ratio", "last_decode")),  # the latter: when the last decode round ended
    *_integers(
        "ended",  # running requests that have ended
        "batch",  # seats of the latest prefill round
        "mixed",  # it held the running requests, too
        "full",  # batch_is_full
        "joined",  # requests that have come from other lanes and not taken part in a round yet
        "chunked",  # the request whose prompt is part-way
        "part_way",  # the one whose prompt was so after the latest prefill round
        "idle",  # the latest decision found nothing, and nothing was in flight
        "late",  # decodes of the round in flight whose requests had ended before
        "row",  # in the log, the first of the round that was decided
        # the round in flight; flying says whether there is one
        "flying_prompts",  # requests whose prompt it completes
        "flying_decodes",
        "flying_ends",  # requests whose last decode it is
        "flying_row",
        # the round that is being filled
        "computed",  # tokens
        "ends",  # entries in the list of ends, NONE before it is made
    ),
    ("reserved", np.float64),
    *TREE_OF_LANE,
    *TURNS_OF_LANE,
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = _integers(
    "declared",  # tokens; the scheduler knows only this number
    "filled",  # tokens in the cache after the round that computes its prompt
    "node",  # where those before it end in the tree; locked from admission on
    "ends",  # the clock at its last token; NONE until its prompt has run
    "came",  # from another lane, and has not taken part in a round since
)


class Own(NamedTuple):
    """What only this scheduler reads and writes."""

    tree: Any
    """core.radix.Tree, or None where no pool has a radix cache."""
    flying: Array
    """[tables of seats, 2, max_num_seqs] requests whose prompt the round in flight completes, and those whose last
    decode is in it, in the order of the batch: a retraction may sort the seats before that is known."""
    scratch: Array
    """[3, longest list] room for sorting."""
    fault: Array
    """[3] what made the engine die, and two numbers for the message."""
    turns: Any
    """MicroBatches of the stages of pipelines, or None where there are none."""


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
        pool["stages"], pool["micro_batch"] = policy.pipeline_parallel_size, policy.micro_batch(limits)
        for name in ("async_scheduling", "max_prefill_tokens", "radix_cache", "exact_release"):
            pool[name] = getattr(policy, name)
    pools["looks"] = 2
    pool_of_lane = np.repeat(np.arange(len(pools)), np.multiply(fleet.replicas, fleet.lanes))
    lanes["chunked"], lanes["idle"] = NONE, 1
    lanes["ratio"], lanes["free"] = pools["init_ratio"][pool_of_lane], pools["num_blocks"][pool_of_lane]
    requests["declared"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    requests["node"] = NONE
    seats = int(pools["max_num_seqs"].max())
    turns: MicroBatches | None = None
    lanes["table"] = np.arange(len(lanes))
    if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies):
        turns = micro_batches(pipes(fleet, lanes), lanes)
    return Own(
        tree=radix_tree(demand, lanes) if pools["radix_cache"].any() else None,
        flying=np.zeros((len(lanes) * int(pools["stages"].max()), 2, seats), dtype=np.int64),
        scratch=np.zeros((3, max(len(requests), 2 * seats) + 2), dtype=np.int64),
        fault=np.zeros(3, dtype=np.int64),
        turns=turns,
    )


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing."""
    own, lane = state.own, state.lanes[i : i + 1]
    if own.tree is not None:
        clear_tree(own.tree, int(lane["root"][0]))
    if own.turns is not None:
        stages = int(state.pools["stages"][state.groups["pool"][lane["group"][0]]])
        clear_turns(state, own.turns, lane, i, stages)


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


@part
def seated(state: State, pool: Pool, lane: Lane) -> int:  # noqa: ARG001 - as in every scheduler
    """Those that run, and behind them the prompts of the latest prefill round."""
    return lane.top + lane.batch


# A prefill round.


@part
def prefill(own: Own, pool: Pool, lane: Lane, requests: Array, seats: Array, start: float) -> bool:
    """Choose a batch of prompts, if any may be admitted; with mixed chunks the running requests share it."""
    if pool.role == PREFILL:  # nothing decodes that would look again (srt/disaggregation/prefill.py)
        lane.full = 0
    if lane.chunked == NONE:
        if lane.full or lane.head == NONE:
            return False
        if places(pool, lane, own.turns) <= 0:
            lane.full = 1
            return False
    admit(own.tree, pool, lane, requests, seats, own.turns, own.scratch, start)
    lane.part_way = lane.chunked
    if lane.batch == 0 or not allocate(own.tree, own.fault, pool, lane, lane.chunk_tokens):
        return False
    if pool.mixed:
        lane.mixed = 1
        drop_ended(lane, seats)
        lane.step_decodes = lane.top
        return lane.top == 0 or allocate(own.tree, own.fault, pool, lane, lane.top)
    return True


# A decode round.


@part
def decode(state: State, own: Own, pool: Pool, lane: Lane, seats: Array) -> bool:
    """One token for every running request; some are retracted if memory is short."""
    before = lane.top
    drop_ended(lane, seats)
    if lane.top > 0:
        if make_room(own.tree, pool, lane, lane.top):
            lane.ratio = max(lane.ratio - pool.decay, pool.min_ratio)
        else:
            retract(own.tree, pool, lane, state.requests, seats, state.rows, own.scratch, own.fault)
        if own.fault[0] or not allocate(own.tree, own.fault, pool, lane, lane.top):
            return False
    if lane.top < before:
        lane.full = 0
    lane.step_decodes = lane.top
    return lane.top > 0


@part
def decide_round(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next round of lane ``i``, which starts at ``start``; False if it is idle."""
    own, lane, requests = state.own, state.lanes[i], state.requests
    seats = state.seats[lane.table]
    if lane.chunked != NONE:
        keep(own.tree, pool, lane, requests[lane.chunked], lane.chunked)
    if lane.batch > 0:
        join_prefilled(lane, requests, seats, own.scratch)
    lane.chunks, lane.chunk_tokens, lane.step_decodes = 0, 0, 0
    found = prefill(own, pool, lane, requests, seats, start)
    if not found and not own.fault[0]:
        found = decode(state, own, pool, lane, seats)
    rest(pool, lane, own.turns, found)
    lane.step_kv = lane.kv_tokens if lane.step_decodes > 0 else 0
    lane.running = lane.outstanding - lane.waiting - lane.coming
    return found


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next round of lane ``i``, looking once more at an idle one; False: no request was preempted."""
    lane = state.lanes[i]
    group = state.groups[lane.group]
    for _ in range(1 if group.end > group.now else pool.looks):
        if decide_round(state, pool, i, start) or lane.head == NONE or state.own.fault[0]:
            break
    return False


# What a round gives. With the overlap schedule it counts as computed when it takes off; the clock, tokens, ends and the
# tree go on when it has landed.


@part
def log_round(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the round that was decided."""
    lane = state.lanes[i]
    lane.row = state.counters[ROWS]
    new = count_new(lane, state.requests, state.seats[lane.table])
    write_step(state, pool, state.groups[lane.group], lane, state.seats[lane.table], start, new, 0.0)
    report_blocks(state, pool, lane.row, state.counters[ROWS])


@part
def note_end(state: State, pool: Pool, i: int, seat: int, end: float) -> None:  # noqa: ARG001 - see core.seats
    """The round in flight is the last one of a decode."""
    lane = state.lanes[i]
    state.own.flying[lane.table, ENDING, lane.flying_ends] = state.seats[lane.table, WHO, seat]
    lane.flying_ends += 1


@part
def take_off(state: State, pool: Pool, i: int, end: float) -> None:
    """The round that was decided is in flight from now on; the one before it has landed."""
    lane = state.lanes[i]
    seats, flying = state.seats[lane.table], state.own.flying[lane.table]
    lane.flying, lane.flying_row = lane.chunks + lane.step_decodes > 0, lane.row
    lane.flying_prompts, lane.flying_ends, lane.flying_decodes = 0, 0, lane.step_decodes
    for seat in range(lane.top, lane.top + lane.chunks):
        if seats[WHO, seat] != lane.chunked:
            flying[PROMPTS, lane.flying_prompts] = seats[WHO, seat]
            lane.flying_prompts += 1
    lane.kv_tokens += lane.step_decodes
    if lane.step_decodes > 0:
        resume(state, lane, seats, end)
        end_decodes(state, pool, i, seats, lane.clock + 1, end, note_end)


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
    if request.holds == 0:
        give_back(tree, pool, lane, request, r)
    depart(lane, requests, r)


@part
def land(state: State, pool: Pool, i: int, end: float) -> None:
    """Lane ``i``'s round in flight has run at ``end``; with the overlap schedule the next one, if any, was decided and
    logged before. Who ends now takes part in that one if it decodes; the place of its token there is free when it has
    run."""
    lane, requests, tree = state.lanes[i], state.requests, state.own.tree
    seats, flying = state.seats[lane.table], state.own.flying[lane.table]
    lane.free += lane.late
    late = 1 if pool.async_scheduling and lane.step_decodes > 0 else 0
    ended = 0
    if lane.flying_decodes > 0:
        lane.clock += 1
        lane.last_decode = end
    for k in range(lane.flying_prompts):
        r = flying[PROMPTS, k]
        request = requests[r]
        if request.state == QUEUED:  # it was retracted
            continue
        emit_first(state, r, end)
        request.ends = lane.clock + request.output - request.generated
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
        r = flying[ENDING, k]
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
    lane.running = lane.outstanding - lane.waiting - lane.coming


# A step of a group.


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next round of every lane; returns whether there is any, and False."""
    fault = state.own.fault
    if fault[0]:
        begin_boundary(group, state.lanes)
        return False, False
    found, _ = steps.decide(state, pool, group, schedule)
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
    """Nothing is scheduled: the round in flight lands, if there is one."""
    return IDLE if state.own.fault[0] else steps.pass_over(state, pool, group, preempted, skip)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one round; IDLE if there is nothing to do until something arrives, or the engine has died."""
    return step_through(state, pool, group, state.own.turns)


@part
def step_through(state: State, pool: Pool, group: Group, turns: Any) -> int:
    """A round of one stage, or the turn of a micro-batch."""
    if turns is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, nothing)
    return sglang_turns.step(state, pool, group, turns, decide_round, log_round, take_off, land)


# Many rounds at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """Decode rounds in which no request ends, is retracted or can be admitted; see ``core.jump``."""
    lane, ahead = state.lanes[i], 1 if pool.async_scheduling else 0
    busy = lane.batch > 0 or lane.chunked != NONE or lane.ended > 0 or lane.top == 0
    busy |= state.groups[lane.group].num_lanes > 1 or lane.joined > 0 or lane.asking_head != NONE
    if ahead:
        busy |= lane.flying_prompts > 0 or lane.flying_decodes == 0 or lane.late > 0
    if busy or (lane.head != NONE and not lane.full):
        return 0, 0, False
    lane.decodes = state.seats[i, PHASES, 0] = lane.top
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
def jumped(state: State, pool: Pool, i: int, rounds: int) -> None:
    """What so many equal rounds leave behind."""
    lane = state.lanes[i]
    fill_up(state.own.tree, pool, lane, rounds)
    decay(pool, lane, rounds)
    lane.last_decode = state.groups[lane.group].now
    lane.flying_row = state.counters[ROWS] - 1
    report_blocks(state, pool, lane.flying_row, lane.flying_row + 1)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal rounds as possible; see ``core.jump`` and ``core.pipeline``."""
    return jump_through(state, pool, group, until, state.own.turns)


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, turns: Any) -> int:
    """Equal rounds of one stage, or of all micro-batches in turn."""
    if turns is None:
        return equal_steps(state, pool, group, until, steady, jumped)
    return sglang_turns.jump(state, pool, group, until, turns, report_blocks)


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """A lane that only decodes cannot end any request before its next end; a step of slack for rounding."""
    update_bound_through(state, pool, group, state.own.turns)


@part
def update_bound_through(state: State, pool: Pool, group: Group, turns: Any) -> None:
    """Of one stage, or of a pipeline."""
    if turns is not None:
        sglang_turns.update_bound(state, pool, group, turns)
        return
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        settled = lane.idle or not pool.async_scheduling  # the ratio starts anew when nothing is in flight
        if lane.outstanding == 0 and lane.ended == 0 and lane.batch == 0 and settled:
            continue
        decodes = lane.top - lane.ended
        asked = lane.asking_head != NONE  # what it may give grows with every token of the running ones
        waits = lane.head == NONE or (lane.full and lane.ended == 0)
        if lane.batch > 0 or lane.chunked != NONE or lane.flying_prompts > 0 or not waits or asked or decodes == 0:
            group.bound = group.now
            return
        shortest = state.floats[pool.shortest_step + decodes]
        group.bound = min(group.bound, group.now + float(lane.next_end - lane.clock - 1) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a round of those alone that had ended is in flight
