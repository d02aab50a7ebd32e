"""Look-ahead admission (LightLLM): the peak of memory if every request goes on to its declared end."""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE, State


@kernel
def left_of(rules: Any, declared: int, generated: int) -> int:
    """Tokens that a request may still generate, with the margin."""
    return max(declared - generated - 1, 0) + rules.margin_tokens


@kernel
def next_prefill(state: State, rules: Any, queue: Any, candidate: int, above: int) -> int:
    """Of the requests that prefill, and the candidate, the one with the most left to generate: left · 2³² + request.

    Only those below ``above``, an earlier result; -1 if there is none.
    """
    best = -1
    r = queue.part_way
    last = False
    while not last:
        last = r == NONE
        i = candidate if last else r
        request = state.requests[i]
        found = (left_of(rules, state.own.more[i].declared, request.generated) << 32) | i
        if best < found < above:
            best = found
        if not last:
            r = state.own.more[r].next_part_way
    return best


@called_kernel
def peak_fits(state: State, pool: Any, rules: Any, lane: Any, queue: Any, candidate: int) -> bool:
    """Whether the candidate can join: when the i-th longest request ends, all longer ones are still there."""
    room = pool.num_blocks * pool.block_size
    held, count = 0, 0
    at, last = queue.ends, queue.ends + queue.ends_size
    prefill = next_prefill(state, rules, queue, candidate, 1 << 62)
    while at < last or prefill != -1:
        left = -1
        if at < last:
            r = state.own.ends[at] & 0xFFFFFFFF
            context = state.requests[r].offset + lane.clock
            generated = context - state.requests[r].prompt + 1
            left = left_of(rules, state.own.more[r].declared, generated)
        if prefill != -1 and (prefill >> 32) >= left:
            left = prefill >> 32
            request = state.requests[prefill & 0xFFFFFFFF]
            held += request.prompt + request.generated + 1
            prefill = next_prefill(state, rules, queue, candidate, prefill)
        else:
            held += context + 2
            at += 1
        count += 1
        if left * count + held >= room:
            return False
    return True
