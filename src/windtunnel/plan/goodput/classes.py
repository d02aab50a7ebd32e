"""Classes: settings that never bound anything are one class, so one run stands for all of them."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.deployment import Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.goodput.closed import FEWER, LIMITS, SAME
from windtunnel.simulate.run import Iterations

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
BY_SEQUENCES = ("sequences", "host_overlapped", "host_serial", "decode_attention", "mixed_attention")
ROUNDED = 1e-6
"""Seconds by which rounding may move an instant."""
OF_GRAPHS = ("decode_tokens", "mixed_tokens", "expert_tokens", "padded", "graph_tokens")
"""Tables that differ with the captured graphs."""
OF_PROMPTS = ("mixed_tokens", "mixed_attention", "chunk_knots", "prefill_attention", "prefill_base")
"""Tables that steps without prompts do not read."""


def most_at_once(begin: Floats, end: Floats, server: NDArray[np.int64]) -> int:
    """Most requests that one server has between their begin and end at once; those that end when others begin count."""
    known = np.isfinite(begin) & np.isfinite(end)
    begin, end, server = begin[known], end[known], server[known]
    most = 0
    for one in np.unique(server):
        mine = server == one
        times = np.concatenate((begin[mine], end[mine]))
        change = np.repeat((1, -1), mine.sum())
        order = np.lexsort((-change, times))
        most = max(most, int(np.cumsum(change[order]).max()))
    return most


def seat_ends(ended: Floats, server: Integers, starts: Floats, of: Integers, times: Times) -> Floats:
    """When requests have given their seats back that were ``ended`` by a server: an engine that schedules
    asynchronously learns it when it has begun its next step. Each step that ``starts`` is ``of`` a server."""
    ends = ended + longest_step(times)
    for one in np.unique(server):
        mine, own = server == one, np.sort(starts[of == one])
        place = np.searchsorted(own, ended[mine] - ROUNDED)
        following = np.append(own, np.inf)[place]
        ends[mine] = np.minimum(ends[mine], following + ROUNDED)
    return ends


def most_prompts(rows: Iterations, replicas: NDArray[np.int64]) -> int:
    """Most requests that a rank of these replicas had in two steps that follow each other: where each step takes up all
    prompts that have a seat, no more had one at once, those of the step in flight included."""
    lanes = int(rows.lane.max(initial=0)) + 1
    count = (int(max(rows.replica.max(initial=0), replicas.max(initial=0))) + 1) * lanes
    theirs = np.zeros(count, dtype=np.int64)
    theirs.reshape(-1, lanes)[replicas] = 1
    now, before = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    return int(
        _most_of_two(rows.replica * lanes + rows.lane, rows.steps, rows.decodes, rows.chunk_tokens, theirs, now, before)
    )


@entry
def _most_of_two(
    rank: Integers, steps: Integers, decodes: Integers, chunks: Integers, theirs: Integers, now: Integers,
    before: Integers,
) -> int:  # fmt: skip
    """Most requests of two steps that follow each other, of ranks that are ``theirs``; ``now`` and ``before`` are room
    for those of each rank's last two."""
    most = 0
    for i in range(len(rank)):
        one = rank[i]
        if theirs[one] == 0:
            continue
        if steps[i] > 0:
            before[one] = now[one]
            now[one] = decodes[i]
        if chunks[i] > 0:
            now[one] += 1
        most = max(most, before[one] + now[one])
    return most


def longest_step(times: Times) -> float:
    """Seconds that no step exceeds: an engine that schedules asynchronously keeps a request so much longer."""
    if not isinstance(times, BatchTimes):
        return sum(longest_step(table) for table in times.stages)
    return float(
        max(times.mixed_tokens.max(), times.decode_tokens.max())
        + max(times.mixed_attention.max(), times.decode_attention.max())
        + 2 * times.prefill_attention.max()
        + times.prefill_base
        + times.sequences.max()
        + times.expert_tokens.max()
        + times.host_serial.max()
        + times.host_overlapped.max()
    )


def no_better(run: tuple[Pool, Times], other: tuple[Pool, Times], most: int, decodes: bool = False) -> str:
    """The rule by which a pool with other limits does no better than one whose replicas never had more than ``most``
    requests at once: what differs was not reached, step times are equal up to there, and the other has as many KV
    blocks (SAME: it does the same) or fewer of them (FEWER); otherwise nothing. ``decodes``: no step computed prompts,
    so a request is a token of a step."""
    memory = _memory(run[0]), _memory(other[0])
    if memory[0][1:] != memory[1][1:] or memory[0][0] < memory[1][0] or not _same_steps(run, other, most, decodes):
        return ""
    return SAME if memory[0] == memory[1] else FEWER


def _same_steps(run: tuple[Pool, Times], other: tuple[Pool, Times], most: int, decodes: bool) -> bool:
    """Whether limits that differ were not reached, and steps take as long."""
    (pool, times), (another, others) = run, other
    for name in LIMITS:
        limits = pool.engine.resolved(name), another.engine.resolved(name)
        reached = min(limits) <= most if name == "max_num_seqs" or decodes else True
        if limits[0] != limits[1] and reached:
            return False
    if not (isinstance(times, BatchTimes) and isinstance(others, BatchTimes)):
        return False
    for column in fields(BatchTimes):
        one, two = getattr(times, column.name), getattr(others, column.name)
        if decodes and column.name in OF_PROMPTS:
            continue
        if decodes and column.name == "expert_tokens" and min(len(one), len(two)) > 1:
            largest = max(most + 1, int(times.padded[min(most + 1, len(times.padded) - 1)]))
            count = pool.engine.data_parallel_size * largest + 1
            one, two = one[:count], two[:count]
        elif column.name in BY_SEQUENCES:
            one, two = one[: most + 2], two[: most + 2]
        elif column.name in ("padded", "decode_tokens", "graph_tokens"):
            continue  # of decodes: as many tokens as requests
        if not np.array_equal(one, two):
            return False
    count = min(most + 2, len(times.decode_tokens), len(others.decode_tokens))
    graphs = min(times.graph_tokens, count) == min(others.graph_tokens, count)
    return graphs and all(
        np.array_equal(getattr(times, name)[:count], getattr(others, name)[:count])
        for name in ("padded", "decode_tokens")
    )


def fastest(one: tuple[Pool, Times], others: Sequence[tuple[Pool, Times]]) -> BatchTimes | None:
    """Step times of a pool that are nowhere longer than those of others with higher limits on sequences, for batches
    that it takes; None where the others have more KV blocks, or differ in more than captured graphs."""
    times, own = one[1], _memory(one[0])
    if not isinstance(times, BatchTimes):
        return None
    decodes, mixed, experts = times.decode_tokens, times.mixed_tokens, times.expert_tokens
    for other, table in others:
        memory = _memory(other)
        if not isinstance(table, BatchTimes) or memory[1:] != own[1:] or memory[0] > own[0]:
            return None
        for name in (column.name for column in fields(BatchTimes) if column.name not in OF_GRAPHS):
            a, b = getattr(times, name), getattr(table, name)
            if not np.array_equal(a, b[: len(a)] if name in BY_SEQUENCES else b):
                return None
        decodes, mixed = np.minimum(decodes, table.decode_tokens), np.minimum(mixed, table.mixed_tokens)
        experts = np.minimum(experts, table.expert_tokens)
    rising = np.minimum.accumulate(experts[::-1])[::-1]
    plain = np.arange(len(times.padded))
    return replace(times, decode_tokens=decodes, mixed_tokens=mixed, expert_tokens=rising, padded=plain, graph_tokens=0)


def _memory(pool: Pool) -> tuple[int, ...]:
    """Blocks of a rank, and what else a scheduler sees of its memory."""
    budget = kv_blocks(pool)
    return budget.num_blocks, budget.block_size, budget.window_bytes, budget.state_bytes
