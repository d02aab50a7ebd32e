"""SGLang's pipelines: micro-batches that take turns (event_loop_pp of managers/scheduler.py, 0.4.6.post5).

There are as many micro-batches as stages, each with a running batch of its own; queue, memory, the ratio and the prompt
that is part-way are of all. In each turn the next one decides a round and sends it through the stages, and then the
outcome of the one after it is looked at, which is to decide next. So all of them are in flight together.

In its turn the fields of a micro-batch stand in the lane, between its turns in ``MicroBatches.batches``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import part
from windtunnel.core.jump import FOREVER
from windtunnel.core.pipelines.stages import PIPE_OF_LANE, Pipe, clear_pipe, pass_stages
from windtunnel.core.pipelines.turns import equal_rounds, phases_of
from windtunnel.core.records import (
    IDLE,
    NONE,
    ROWS,
    STEPPED,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    State,
    attributes,
    records,
)
from windtunnel.core.schedulers.sglang.admission import ORDERS
from windtunnel.core.schedulers.sglang.delayer import DELAYER_OF_LANE, DELAYER_OF_POOL, UNLIMITED
from windtunnel.core.schedulers.sglang.tree.eviction import evict
from windtunnel.core.schedulers.sglang.tree.radix import TREE_OF_LANE
from windtunnel.core.schedulers.vllm_v1.speculation import POOL_FIELDS as DRAFTS_OF_POOL
from windtunnel.core.seats import EMPTY, ENDS, NEVER, SOONEST, WHO
from windtunnel.core.step import begin_boundary, count_released

TURNS_OF_LANE: Fields = [
    ("turn", np.int64),  # turns so far
    ("table", np.int64),  # of seats of the micro-batch whose turn it is
]

BATCH: Fields = [
    ("last_decode", np.float64),
    *((name, np.int64) for name in ("clock", "kv_tokens", "top", "next_end", "ended", "batch", "full", "part_way")),
    *((name, np.int64) for name in ("flying", "flying_prompts", "flying_decodes", "flying_ends")),
]
"""Fields of a lane that each micro-batch has for itself."""


class MicroBatches(NamedTuple):
    """What only pipelines read and write."""

    pipe: Pipe
    batches: Array
    """BATCH records, one for each stage of each lane."""


def micro_batches(pipe: Pipe, lanes: NDArray[Any]) -> MicroBatches:
    """Empty ones; sets the lanes' fields."""
    batches = records(len(pipe.slots), BATCH)
    batches["next_end"], batches["part_way"] = NEVER, NONE
    lanes["part_way"] = NONE
    return MicroBatches(pipe, attributes(batches))


def clear_turns(state: State, turns: MicroBatches, lane: NDArray[Any], i: int, stages: int) -> None:
    """No micro-batch of lane ``i`` has anything."""
    first = int(lane["first_slot"][0])
    batches: Any = turns.batches[first : first + stages]
    batches[:] = np.zeros(1, dtype=batches.dtype)
    batches["next_end"], batches["part_way"] = NEVER, NONE
    clear_pipe(state, turns.pipe, i)
    behind = len(state.lanes) + first - i
    tables = state.seats[behind : behind + stages - 1]
    tables[:] = 0
    tables[:, ENDS], tables[:, SOONEST] = EMPTY, NEVER


@part
def put(here: Any, there: Any) -> None:
    """Copy what is known of a micro-batch: into the lane in its turn, into its own record between its turns."""
    here.last_decode = there.last_decode
    here.clock, here.kv_tokens, here.top, here.next_end = there.clock, there.kv_tokens, there.top, there.next_end
    here.ended, here.batch, here.full, here.part_way = there.ended, there.batch, there.full, there.part_way
    here.flying, here.flying_prompts = there.flying, there.flying_prompts
    here.flying_decodes, here.flying_ends = there.flying_decodes, there.flying_ends


@part
def send(state: State, pool: Pool, i: int, turns: MicroBatches, start: float, log: Any, take_off: Any) -> None:
    """The round that was decided passes through the stages from ``start`` on."""
    lane, pipe, number = state.lanes[i], turns.pipe, state.lanes[i].turn % pool.stages
    end = pass_stages(pool, lane, state.seats[lane.table], pipe, start, 0.0)
    pipe.ends[lane.first_flight + number] = pipe.slots[lane.first_slot + number].last_end = end
    log(state, pool, i, start)
    for k in range(lane.row, state.counters[ROWS]):
        state.rows[k].lane = lane.rank * pool.stages + number
    take_off(state, pool, i, end)


@part
def batch_of(pool: Pool, lane: Lane) -> int:
    """The micro-batch whose turn it is."""
    return lane.first_slot + lane.turn % pool.stages


@part
def table_of(state: State, pool: Pool, i: int) -> int:
    """Its table of seats: the first one of a lane has the lane's, others have theirs behind those of all lanes."""
    lane = state.lanes[i]
    number = lane.turn % pool.stages
    return i if number == 0 else len(state.lanes) + lane.first_slot - i + number - 1


@part
def change_turns(state: State, pool: Pool, i: int, turns: MicroBatches) -> None:
    """The micro-batch whose turn it was makes way for the next one."""
    lane = state.lanes[i]
    put(turns.batches[batch_of(pool, lane)], lane)
    lane.turn += 1
    lane.table = table_of(state, pool, i)
    put(lane, turns.batches[batch_of(pool, lane)])


@part
def step(
    state: State, pool: Pool, group: Group, turns: MicroBatches, decide: Any, log: Any, take_off: Any, land: Any
) -> int:
    """The turn of one micro-batch, up to the outcome of the next one.

    IDLE if nothing was found in two whole rounds of turns: the ratio starts anew after the first.
    """
    i, fault = group.first_lane, state.extra.fault
    lane = state.lanes[i]
    begin_boundary(group, state.lanes)
    if fault[0]:
        return IDLE
    start = max(group.now, turns.pipe.slots[lane.first_slot].stage_free)
    found = decide(state, pool, i, start)
    if fault[0]:
        return IDLE
    lane.empty = 0 if found else lane.empty + 1
    turns.pipe.ends[lane.first_flight + lane.turn % pool.stages] = 0.0
    if found:
        send(state, pool, i, turns, start, log, take_off)
    change_turns(state, pool, i, turns)
    if lane.flying:
        group.now = max(group.now, turns.pipe.ends[lane.first_flight + lane.turn % pool.stages])
        land(state, pool, i, group.now)
        count_released(group, state.lanes)
    if lane.turn % pool.stages == 0 and lane.empty >= pool.stages:
        lane.ratio = pool.init_ratio
        if lane.empty >= 2 * pool.stages and lane.interval_left == 0:
            lane.empty = 0
            return IDLE
    return STEPPED


@part
def rest(state: State, pool: Pool, group: Group) -> None:
    """Nothing was found, on no rank: where nothing is in flight the ratio starts anew, from 0.5 on only where nothing
    waits or is held either (``on_idle``)."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.lanes[i].flying:
            return
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if not pool.newer or (lane.top == 0 and lane.chunked == NONE and lane.head == NONE):
            lane.ratio = pool.init_ratio


# What a client is told.


@part
def given_tokens(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:  # noqa: ARG001 - as in every scheduler
    """The request in a seat, and its tokens: those of rounds that have landed."""
    lane, seats = state.lanes[i], state.seats[state.lanes[i].table]
    r, ends = int(seats[WHO, seat]), seats[ENDS, seat]
    return r, (0 if ends >= EMPTY else int(state.requests[r].output - max(ends - lane.clock, 0)))


@part
def latest_end(state: State, pool: Pool, group: Group) -> float:
    """When the round ends that was decided last."""
    return end_of_round(pool, group, state.lanes[group.first_lane], state.extra.turns)


@part
def end_of_round(pool: Pool, group: Group, lane: Lane, turns: Any) -> float:
    """That of one stage, or of the micro-batch whose turn it was before."""
    if turns is None:
        return group.end
    return turns.pipe.slots[lane.first_slot + (lane.turn - 1) % pool.stages].last_end


# Many rounds at once.


@part
def decay(pool: Pool, lane: Lane, rounds: int) -> None:
    """What this many decode rounds without a retraction take from the ratio."""
    for _ in range(rounds):
        if lane.ratio == pool.min_ratio:
            break
        lane.ratio = max(lane.ratio - pool.decay, pool.min_ratio)


@part
def steady_rounds(state: State, pool: Pool, i: int) -> tuple[int, bool]:
    """What the next rounds of all micro-batches have in common; see ``core.pipelines.turns.equal_rounds``."""
    lane, turns = state.lanes[i], state.extra.turns
    if lane.chunked != NONE or lane.interval_left > 0 or pool.page > 1:
        return 0, False
    rounds, joins, present = FOREVER, False, lane.turn % pool.stages
    for k in range(pool.stages):
        batch, slot = turns.batches[lane.first_slot + k], turns.pipe.slots[lane.first_slot + k]
        closed = batch.full and batch.top > 0 and not pool.preempts
        if batch.batch > 0 or batch.ended > 0 or (lane.head != NONE and not closed):
            return 0, False
        joins |= batch.full == 0 or batch.top == 0
        slot.decodes, slot.kv_tokens = batch.top, batch.kv_tokens
        state.seats[i, phases_of(k), 0] = batch.top
        if batch.top > 0:
            if k != present and (batch.flying == 0 or batch.flying_ends > 0):
                return 0, False
            rounds = min(rounds, batch.next_end - batch.clock - 1 - batch.flying)
    return (0 if rounds == FOREVER else rounds), joins


@part
def jump(state: State, pool: Pool, group: Group, until: float, turns: MicroBatches, report: Any) -> int:
    """Make as many equal rounds as possible; returns how many."""
    i = group.first_lane
    lane, first_row, clock, flying = state.lanes[i], state.counters[ROWS], state.lanes[i].clock, state.lanes[i].flying
    if flying or state.extra.fault[0]:
        return 0
    present = batch_of(pool, lane)
    put(turns.batches[present], lane)
    lane.clock, lane.decodes, lane.flying = lane.turn, lane.top, pool.stages  # as ``equal_rounds`` counts
    done = equal_rounds(state, pool, group, turns.pipe, until, steady_rounds)
    lane.turn, lane.clock, lane.flying = lane.clock, clock, flying
    if done == 0:
        return 0
    for k in range(lane.first_slot, lane.first_slot + pool.stages):
        batch = turns.batches[k]
        if batch.top > 0:
            batch.clock += done
            batch.kv_tokens += done * batch.top
            decay(pool, lane, done)
    fill_up(state.extra.tree, pool, lane, turns, done)
    turns.batches[present].last_decode = turns.pipe.slots[present].last_end
    put(lane, turns.batches[present])
    report(state, pool, first_row, state.counters[ROWS])
    return done


@part
def fill_up(tree: Any, pool: Pool, lane: Lane, turns: MicroBatches, rounds: int) -> None:
    """Evict what this many equal rounds have evicted."""
    if tree is not None and pool.radix_cache and lane.free < lane.evictable:
        free = lane.free
        for k in range(lane.first_slot, lane.first_slot + pool.stages):
            free += rounds * turns.batches[k].top
        for turn in range(lane.turn - rounds * pool.stages, lane.turn):
            decodes = turns.batches[lane.first_slot + turn % pool.stages].top
            short = decodes - (free - lane.evictable)
            if short > 0:
                evict(tree, lane, short if pool.newer else decodes)
            free -= decodes


@part
def update_bound(state: State, pool: Pool, group: Group, turns: MicroBatches) -> None:
    """No request ends before the next end of a micro-batch; each of its rounds passes through all stages. One round of
    slack covers rounding."""
    lane = state.lanes[group.first_lane]
    group.bound = group.now
    if lane.head != NONE or lane.flying or lane.outstanding == 0:
        return
    put(turns.batches[batch_of(pool, lane)], lane)
    rounds, _ = steady_rounds(state, pool, group.first_lane)
    shortest, most = 0.0, min(lane.outstanding, pool.max_num_seqs)
    for s in range(lane.first_stage, lane.first_stage + pool.stages):
        shortest += turns.pipe.floats[turns.pipe.stages[s].shortest_step + most]
    group.bound = group.now + float(max(rounds, 0)) * shortest


# The records of pools, lanes and requests, and how settings get there.


def _integers(*names: str) -> Fields:
    return [(name, np.int64) for name in names]


POOL_FIELDS: Fields = [
    *((name, np.float64) for name in ("init_ratio", "min_ratio", "decay")),
    *_integers(
        "reported_block",  # in which memory is reported
        "newer",  # the rules of 0.5.23
        "page",  # tokens that are handed out at once
        "cuts",  # a prompt may be computed in several rounds
        "chunk_limit",  # prompt tokens of a round
        "max_prefill_tokens",
        "order",
        "radix_cache",
        "mixed",
        "exact_release",
        "ignore_eos",
        *("by_priority", "low_first", "preempts", "preemption_threshold", "retracts_by_priority"),
        "most_prompts",  # requests of a prefill round
        "most_queued",  # requests that wait; 0: any number
        *(
            "interval",
            "interval_from",
        ),  # rounds without prompts after one with them, from this many running requests on
        "slots_at_once",  # seats that have to be free before new prompts run beside others
        "looks",  # at an idle lane in which requests wait: an idle round says nothing about the next one
        "stages",
        "micro_batch",  # requests that run in one stage of a pipeline, but for those whose prompt ends in it
        "seed",  # of a queue that is shuffled
        "reserve",  # tokens that a request with drafts holds beyond those that are known
    ),
    *DELAYER_OF_POOL,
    *DRAFTS_OF_POOL,
]

LANE_FIELDS: Fields = [
    *((name, np.float64) for name in ("ratio", "last_decode")),  # the latter: when the last decode round ended
    *_integers(
        "ended",  # running requests that have ended
        "batch",  # seats of the latest prefill round
        "mixed",  # it also held the running requests
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
        "computed",  # tokens, in whole pages
        "taken",  # those, and what each request needs beyond them
        "preempted",  # the first of those that make way in this round, linked by next
        "turned_away",  # the first of those that are refused, linked by next
        "interval_left",  # rounds without prompts
        *("joinings", "processed"),  # so far: requests that queued, prompt tokens
        *("refreshes", "shuffles"),  # so far: looks at a queue that is not sorted, sorts of one that is
        "ends",  # entries in the list of ends, NONE before it is made
    ),
    *((name, np.float64) for name in ("reserved", "load_s")),  # the latter: seconds that a token takes from the host
    *DELAYER_OF_LANE,
    *TREE_OF_LANE,
    *TURNS_OF_LANE,
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    ("id", np.int64),  # what its drafts are drawn for
    ("promised", np.int32),  # what the round in flight yields
    *_integers(
        "declared",  # tokens; the scheduler knows only this number
        "filled",  # tokens in the cache after the round that computes its prompt
        "node",  # where those before it end in the tree; locked from admission on
        *("host_node", "on_host"),  # where what only the host has behind them ends, and its tokens
        "ends",  # the clock at its last token; NONE until its prompt has run
        "came",  # from another lane, and has not taken part in a round since
        "made_way",  # when it was last sent back, it was for a more urgent one
        "refused",  # the queue was full; 2: when a more urgent one came
        "left_out",  # its last token is in flight, and it is not among the running ones any more
        "entered",  # tokens of it that were put into the tree
        "priority",
        "joined",  # when it joined the queue, by the number of those before it
        "processed",  # prompt tokens that had been computed then
        "looked",  # known tokens when it was last looked at
        "found",  # those that the order of the queue found in the tree
        "name",  # what breaks ties of the response ratio
        "routing_key",  # by which requests are routed; 0: none
        "in_tree",  # tokens of it in the tree that it keeps from eviction
        "held",  # tokens in memory of one with drafts
        "overshot",  # its last round yielded more than it was asked for
    ),
]


def set_pool(pool: Any, limits: Any, policy: Any) -> None:
    """Write one pool's settings."""
    pool["newer"], pool["page"] = policy.version != "0.4.6", policy.page_size
    pool["reported_block"], pool["block_size"] = limits.block_size, 1
    pool["num_blocks"] = limits.num_blocks * limits.block_size // policy.page_size * policy.page_size
    pool["init_ratio"], pool["min_ratio"] = policy.init_new_token_ratio, policy.min_new_token_ratio
    pool["decay"] = policy.new_token_ratio_decay
    pool["cuts"] = policy.chunked_prefill
    pool["chunk_limit"] = limits.max_num_batched_tokens if policy.chunked_prefill else UNLIMITED
    pool["order"] = ORDERS[policy.schedule_policy]
    pool["mixed"] = policy.enable_mixed_chunk and policy.chunked_prefill
    pool["stages"], pool["micro_batch"] = policy.pipeline_parallel_size, policy.micro_batch(limits)
    for name in ("async_scheduling", "max_prefill_tokens", "radix_cache", "exact_release", "ignore_eos"):
        pool[name] = getattr(policy, name)
    pool["by_priority"], pool["low_first"] = (
        policy.enable_priority_scheduling,
        policy.schedule_low_priority_values_first,
    )
    pool["preempts"] = policy.enable_priority_scheduling and not policy.disable_priority_preemption
    pool["preemption_threshold"] = policy.priority_scheduling_preemption_threshold
    pool["retracts_by_priority"] = policy.retraction_policy == "priority"
    pool["most_prompts"] = policy.prefill_max_requests or UNLIMITED
    pool["most_queued"] = policy.max_queued_requests
    pool["interval"], pool["interval_from"] = policy.prefill_decode_interval, policy.prefill_decode_interval_min_bs
    at_once = min(policy.min_free_slots_delay, limits.max_num_seqs)
    pool["slots_at_once"] = at_once if at_once > 1 else 0
    pool["delays"], pool["delay_passes"] = policy.enable_prefill_delayer, policy.prefill_delayer_max_delay_passes
    pool["delay_watermark"] = policy.prefill_delayer_token_usage_low_watermark
    pool["delay_queue_ratio"] = policy.prefill_delayer_queue_min_ratio
    pool["delay_most"] = policy.prefill_delayer_max_delay_ms / 1000
    pool["reserve"] = policy.tokens_ahead
    pool["looks"] = 2 + policy.prefill_decode_interval
    if policy.enable_prefill_delayer:
        pool["looks"] += policy.prefill_delayer_max_delay_passes
