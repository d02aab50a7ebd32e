"""Runs of equal steps under vLLM's v0 rules: decodes only, or beside the chunks of one long prompt."""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.lookup import step_time
from windtunnel.core.records import NONE, PREFILLING, ROWS, State
from windtunnel.core.steady import NEVER, rank_duration, run_decodes, steady_row
from windtunnel.core.vllm_v0_blocks import append_blocks, wanted
from windtunnel.core.vllm_v0_lane import failed
from windtunnel.core.vllm_v0_passes import ask_gate, never_fits, oldest_arrival
from windtunnel.core.vllm_v0_queue import worse
from windtunnel.core.vllm_v0_records import UNKNOWN, has_tables
from windtunnel.core.vllm_v0_tables import DEVICE

Array = Any

GATE_MARGIN = 1e-9
"""A run stops so long (s, and relative) before the delay gate opens; single steps decide the rest to the bit."""


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Run as many equal steps as possible while ``now`` < ``until`` (which counts only if an arrival could join)."""
    lane, extra = state.lanes[group.first_lane], state.own.lanes[group.first_lane]
    rules = state.own.rules[group.pool]
    if extra.disordered or lane.running == 0 or failed(state, group):
        return 0
    tokens = steady_chunk(state, pool, rules, lane)
    steps = steps_possible(state, lane, tokens)
    if steps <= 1 or not host_blocked(state, pool, lane, extra):
        return 0
    limit = join_time(state, pool, rules, lane, extra, tokens, group.now, until)
    if limit <= group.now:
        return 0
    first_row = state.counters[ROWS]
    lane.partial = lane.tail if tokens > 0 else NONE
    steady_row(state, pool, group, lane, tokens)
    row = state.rows[first_row]
    # The step in which somebody leaves or a prompt ends is made singly.
    if has_tables(state):
        done = run_with_tables(state, pool, group, lane, extra, row, steps - 1, limit)
    elif tokens == 0:
        done = run_decodes(state, pool, group, lane, row, steps - 1, limit, 1)
    else:
        done = run_mixed(state, pool, group, lane, row, steps - 1, tokens)
    if done == 0:
        state.counters[ROWS] = first_row
        return 0
    row.steps = done
    lane.released = 0
    group.released = 0
    if lane.decodes > 0:
        extra.decoded = group.now
    return done


@kernel
def steady_chunk(state: State, pool: Any, rules: Any, lane: Any) -> int:
    """Tokens of the one part-way prompt in each step; 0 if there is none, −1 if the next step has to be made singly."""
    prefills = lane.running - lane.decodes
    if prefills == 0:
        reaches_all = pool.max_num_batched_tokens - lane.decodes + 1 >= pool.block_size
        return 0 if reaches_all or not (rules.chunked_prefill and has_tables(state)) else -1
    if (
        prefills > 1
        or has_tables(state)
        or rules.max_num_partial_prefills > 1
        or state.requests[lane.tail].state != PREFILLING
    ):
        return -1
    request = state.requests[lane.tail]
    tokens = pool.max_num_batched_tokens - lane.decodes
    left = request.prompt + request.generated - request.context
    return tokens if 0 < tokens < left else -1


@kernel
def steps_possible(state: State, lane: Any, tokens: int) -> int:
    """Steps until somebody leaves or the prompt ends."""
    if tokens < 0:
        return 0
    steps = NEVER
    if lane.decodes > 0:
        steps = next_finish(state.heap, lane) - lane.clock
    if tokens > 0:
        request = state.requests[lane.tail]
        steps = min(steps, (request.prompt + request.generated - request.context - 1) // tokens)
    return steps


@kernel
def host_blocked(state: State, pool: Any, lane: Any, extra: Any) -> bool:
    """Whether nobody can come back from the host; who lacks blocks still lacks them in the next steps."""
    if extra.swapped_head == NONE:
        return True
    blocks = wanted(state, pool, extra.swapped_head, DEVICE)
    return blocks <= pool.num_blocks and lane.free - blocks < pool.watermark_blocks


@kernel
def join_time(
    state: State, pool: Any, rules: Any, lane: Any, extra: Any, tokens: int, now: float, until: float
) -> float:
    """Until when nobody can be admitted, given that the next arrival comes at ``until``; ``now`` if somebody can."""
    head = lane.queue_head
    several = rules.max_num_partial_prefills > 1  # then an arrival may pass others, or make everybody's share smaller
    budget = pool.max_num_batched_tokens - lane.decodes - tokens if rules.chunked_prefill else NEVER
    tried = budget != 0 if rules.chunked_prefill else extra.swapped_head == NONE
    if tried:
        ask_gate(extra, now)
    if head == NONE and (tried or several):
        return until
    if several:
        return now
    if not tried:
        return priority_time(state, rules, lane, extra, now, until, np.inf)
    if not rules.chunked_prefill and rules.delay_factor > 0.0:
        opens = oldest_arrival(state.requests, head) + rules.delay_factor * extra.last_prompt_latency
        opens -= GATE_MARGIN * (1.0 + abs(opens))
        if opens > now:
            return priority_time(state, rules, lane, extra, now, until, opens)
    unknown = has_tables(state) and state.own.requests[head].hit == UNKNOWN
    if unknown or not head_blocked(state, pool, rules, lane, state.requests[head], budget):
        return now
    return priority_time(state, rules, lane, extra, now, until, np.inf)


@kernel
def head_blocked(state: State, pool: Any, rules: Any, lane: Any, request: Any, budget: int) -> bool:
    """Whether the head of the queue has to wait for blocks or a place, and is not to be ignored."""
    known = request.prompt + request.generated
    blocks = blocks_of(known, pool.block_size)
    tokens = known if has_tables(state) else min(known, budget)
    if tokens > rules.prompt_limit or never_fits(pool, blocks):
        return False
    return lane.free - blocks < pool.watermark_blocks or lane.running >= pool.max_num_seqs


@kernel
def priority_time(state: State, rules: Any, lane: Any, extra: Any, now: float, until: float, otherwise: float) -> float:
    """``otherwise``, unless priorities may change something: ``now`` if they may at once, ``until`` with an arrival."""
    if not rules.by_priority:
        return otherwise
    if extra.unsorted_running or extra.unsorted_queue:
        return now
    if lane.queue_head != NONE and worse(state.requests, state.own.requests, lane.tail, lane.queue_head):
        return now
    return min(until, otherwise)


@kernel
def run_with_tables(
    state: State, pool: Any, group: Any, lane: Any, extra: Any, row: Any, steps: int, until: float
) -> int:
    """Up to ``steps`` steps of decodes that note which block each of them gets, while ``now`` < ``until``."""
    done = 0
    while done < steps and group.now < until:
        if state.phases[lane.phase + lane.clock % pool.block_size] + 1 > lane.free:
            break
        append_blocks(state, pool, lane, extra)
        if done == 0:
            row.used_blocks = pool.num_blocks - lane.free
        gpu = rank_duration(pool, lane, state.requests, state.floats, state.integers, 0)
        extra.decoding = group.now
        group.now = group.now + step_time(pool, state.floats, gpu, lane.decodes)
        lane.clock += 1
        lane.kv_tokens += lane.decodes
        done += 1
    group.end = group.now
    return done


@kernel
def run_mixed(state: State, pool: Any, group: Any, lane: Any, row: Any, steps: int, tokens: int) -> int:
    """Up to ``steps`` steps of decodes, if any, beside a chunk that uses up the budget; returns how many were run."""
    request = state.requests[lane.partial]
    sequences = lane.decodes + 1
    done = 0
    while done < steps:
        need = state.phases[lane.phase + lane.clock % pool.block_size]
        if need + 1 > lane.free:
            break
        lane.free -= need
        if done == 0:
            row.used_blocks = pool.num_blocks - lane.free
        gpu = rank_duration(pool, lane, state.requests, state.floats, state.integers, tokens)
        group.now = group.now + step_time(pool, state.floats, gpu, sequences)
        request.context += tokens
        if lane.decodes > 0:
            lane.clock += 1
            lane.kv_tokens += lane.decodes
        done += 1
    group.end = group.now
    lane.partial = NONE
    return done
