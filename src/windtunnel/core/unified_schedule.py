"""Decide one step of a lane by the unified rules; see reference.unified, which says the same in plain objects."""

from typing import Any

from windtunnel.core.hooks import call_token_budget
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import add_chunk
from windtunnel.core.records import NONE, PREFILLING, State
from windtunnel.core.unified_lane import admit_one, blocks_with, bring_back, evict, held
from windtunnel.core.unified_peak import peak_fits
from windtunnel.core.unified_queue import is_open, put_back, take_head
from windtunnel.core.unified_records import LOOK_AHEAD


@kernel
def schedule(state: State, pool: Any, rules: Any, lane: Any, queue: Any, now: float) -> None:
    """The step that starts at ``now``: which decodes, which chunks, who is admitted, who has to go."""
    lane.chunks, lane.chunk_tokens = 0, 0
    queue.decoding, queue.evicted, queue.asked = 0, 0, 0
    if lane.running == 0:
        queue.forming = 1
    if queue.swapped != NONE:
        bring_back(state, pool, rules, lane, queue)
    budget = rules.tokens
    if rules.token_budget != 0:
        waiting = lane.waiting - queue.on_host
        budget = call_token_budget(rules.token_budget, lane.decodes, lane.kv_tokens, lane.free, waiting, rules.tokens)
    for turn in range(2):
        prefills = rules.mixed or (rules.prefill_first > 0) == (turn == 0)
        decodes = rules.mixed or not prefills
        schedule_groups(state, pool, rules, lane, queue, budget, decodes, prefills, now)
        if rules.mixed or queue.decoding or lane.chunks > 0:
            return


@kernel
def schedule_groups(
    state: State, pool: Any, rules: Any, lane: Any, queue: Any, budget: int, decodes: bool, prefills: bool, now: float
) -> None:
    """Decodes, prefills, or both: what running requests compute, and who is admitted beside it."""
    make_room(state, pool, rules, lane, queue, budget, decodes, prefills)
    lane.free -= queue.chunk_need
    kept = queue.decode_need + queue.asked
    if not rules.prefill_first:
        lane.free -= queue.decode_need
        budget -= lane.decodes if queue.decoding else 0
        kept = 0
    if prefills:
        admit(state, pool, rules, lane, queue, budget - lane.chunk_tokens, kept, now)
    if rules.prefill_first:
        if lane.decodes > budget - lane.chunk_tokens:
            queue.decoding = 0
        if queue.decoding:
            lane.free -= queue.decode_need


@kernel
def make_room(
    state: State, pool: Any, rules: Any, lane: Any, queue: Any, budget: int, decodes: bool, prefills: bool
) -> None:
    """What running requests compute in this step; others are evicted until there are blocks for it."""
    while True:
        first = lane.decodes if decodes and not rules.prefill_first else 0
        lane.chunks, lane.chunk_tokens, queue.chunk_need = 0, 0, 0
        if prefills and queue.part_way != NONE:
            plan_chunks(state, pool, rules, lane, queue, budget - first)
        taking_part = decodes and lane.decodes > 0 and lane.decodes <= budget - lane.chunk_tokens
        queue.decoding = 1 if taking_part else 0
        queue.decode_need, queue.asked = 0, 0
        if taking_part:
            queue.decode_need = state.phases[lane.phase + lane.clock % pool.block_size]
            queue.asked = asked_block(state, pool, rules, lane)
        if queue.decode_need + queue.asked + queue.chunk_need <= lane.free:
            return
        evict(state, pool, rules, lane, queue)


@kernel
def asked_block(state: State, pool: Any, rules: Any, lane: Any) -> int:
    """1 if the last decode asks for a block although its last one has room."""
    if not rules.decodes_ask or lane.running <= 1:
        return 0
    r = lane.tail
    while state.requests[r].state == PREFILLING:
        r = state.requests[r].previous
    return 1 if (state.requests[r].offset + lane.clock) % pool.block_size else 0


@kernel
def plan_chunks(state: State, pool: Any, rules: Any, lane: Any, queue: Any, budget: int) -> None:
    """The next chunk of each part-way prompt, in order of admission."""
    left = min(budget, rules.prefill_tokens)
    r = queue.part_way
    while r != NONE:
        request, declared = state.requests[r], state.own.more[r].declared
        known = request.prompt + request.generated
        tokens = max(min(known - request.context, rules.threshold, left), 0)
        request.chunk = tokens
        if tokens > 0:
            add_chunk(lane, state.requests, r, tokens)
            left -= tokens
            after = blocks_with(pool, rules, request, declared, request.context + tokens)
            queue.chunk_need += after - held(pool, rules, request, declared, request.context)
        r = state.own.more[r].next_part_way


@kernel
def count_part_way(state: State, rules: Any, queue: Any) -> None:
    """Prompts that are part-way after the step as planned, and long ones among them."""
    queue.part_ways, queue.long_part_ways = 0, 0
    r = queue.part_way
    while r != NONE:
        request = state.requests[r]
        known = request.prompt + request.generated
        if request.context + request.chunk < known:
            queue.part_ways += 1
            queue.long_part_ways += 1 if known > rules.threshold else 0
        r = state.own.more[r].next_part_way


@kernel
def is_one_too_many(rules: Any, queue: Any, known: int, tokens: int) -> bool:
    """Whether a prompt that is part-way after its first ``tokens`` would be one too many of those."""
    if tokens == known:
        return False
    too_many_long = known > rules.threshold and queue.long_part_ways >= rules.most_long_part_way
    return too_many_long or queue.part_ways >= rules.most_part_way


@kernel
def count_admitted(rules: Any, queue: Any, known: int, tokens: int) -> None:
    """One more prompt may be part-way after the step."""
    if tokens < known:
        queue.part_ways += 1
        queue.long_part_ways += 1 if known > rules.threshold else 0


@kernel
def first_tokens(rules: Any, known: int, left: int) -> int:
    """Tokens of an admission's first step."""
    tokens = min(known, rules.threshold)
    return min(tokens, left) if rules.chunked else tokens


@kernel
def fits(state: State, pool: Any, rules: Any, lane: Any, queue: Any, r: int, tokens: int, left: int, kept: int) -> bool:
    """Whether there are tokens and memory to admit request ``r``."""
    if tokens > left:
        return False
    margin = rules.watermark_blocks if lane.running > 0 else 0
    declared = state.own.more[r].declared
    if blocks_with(pool, rules, state.requests[r], declared, tokens) + kept + margin > lane.free:
        return False
    if rules.allocation != LOOK_AHEAD or lane.running == 0:
        return True
    return peak_fits(state, pool, rules, lane, queue, r)


@kernel
def admit(state: State, pool: Any, rules: Any, lane: Any, queue: Any, budget: int, kept: int, now: float) -> None:
    """Admit from the queue while it fits beside ``kept`` blocks, unless somebody was evicted or is on the host."""
    if lane.queue_head == NONE or queue.evicted or queue.swapped != NONE:
        return
    left = min(budget, rules.prefill_tokens - lane.chunk_tokens)
    if left <= 0 or not is_open(state, rules, lane, queue, now):
        return
    if rules.chunked:
        count_part_way(state, rules, queue)
    aside, admitted = NONE, 0
    while lane.queue_head != NONE and left > 0 and lane.running < rules.places:
        if rules.together > 0 and admitted == rules.together:
            break
        r = lane.queue_head
        known = state.requests[r].prompt + state.requests[r].generated
        tokens = first_tokens(rules, known, left)
        overtaken = is_one_too_many(rules, queue, known, tokens)
        if not overtaken and fits(state, pool, rules, lane, queue, r, tokens, left, kept):
            take_head(state, rules, lane)
            admit_one(state, pool, rules, lane, queue, r, tokens, now)
            admitted += 1
            left -= tokens
            count_admitted(rules, queue, known, tokens)
        elif overtaken or rules.pass_over:
            take_head(state, rules, lane)
            state.own.more[r].aside = aside
            aside = r
        else:
            break
    if aside != NONE:
        put_back(state, rules, lane, aside)
