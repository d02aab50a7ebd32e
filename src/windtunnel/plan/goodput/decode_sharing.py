"""Decode sharing: output tokens of good requests that decode replicas make at most, where all that has come is decoded.

A run of a prefill side alone says when each request joins which replica. Let f(N, S) lie under the time of a step with
N decodes and S tokens of their prompts in the cache, and fall nowhere. Here all requests that have come and not ended,
U of them, advance by 1 / min(f(U, S), w) steps per second; w is the least time of a step while some wait.

Claim: nobody has more left than in the real run. Let that be so until t: then who has not ended here has not ended
there, so all of U here are there. If nobody waits there, all of U there take part in its step, which is no shorter. If
some wait there, it is no shorter either. All of U advance here, so nobody advances faster there. So it stays so.

A good request ends by arrival + ttft + tpot · (tokens − 1): who does not even here, is lost. Assumed, as of prefill
sides, which do no better where they must wait: while requests wait for seats or memory of a rank, at least 1 − SLACK of
those are in use by its decodes, and each of the other ranks has at least EVEN of its decodes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.goodput.decode_bound import SLOPES, hull_lines
from windtunnel.plan.goodput.prefill_queue import EVEN

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SLACK = 1 / 8
COLUMNS = 128
"""Numbers of cached tokens for which a step time is kept; those between count as the one below."""


@dataclass(frozen=True, eq=False)
class Sharing:
    """Least times of a step of one replica."""

    grid: Floats
    """[N + 1, COLUMNS] seconds with N decodes and at least 0, 1, … times ``width`` cached tokens; the last row stands
    for all that are more."""
    width: float


def sharing_of(servers: Sequence[tuple[BatchTimes, Pool]], reserved: int, longest: int) -> Sharing | None:
    """Of decode pools that have as many seats, whose ranks keep ``reserved`` tokens free for each request of at most
    ``longest`` tokens: what lies under the steps of all of them. None where ranks do not step together, so that it
    matters who is where."""
    (times, pool), *others = servers
    ranks = pool.engine.data_parallel_size
    if ranks > 1 and len(times.expert_tokens) == 1:
        return None
    most = min(times.max_num_seqs, times.max_num_batched_tokens)
    width = max(ranks * kv_blocks(pool).num_blocks * kv_blocks(pool).block_size / COLUMNS, 1.0)
    grid = _grid(times, pool, most, width, reserved, longest)
    for other, another in others:
        most = min(most, other.max_num_seqs, other.max_num_batched_tokens)
        grid = np.minimum(grid[: ranks * most + 1], _grid(other, another, most, width, reserved, longest))
    return Sharing(grid, width)


def _grid(times: BatchTimes, pool: Pool, most: int, width: float, reserved: int, longest: int) -> Floats:
    """Least seconds of a step by decodes and cached tokens, of a replica whose ranks take up to ``most`` requests."""
    ranks, budget = pool.engine.data_parallel_size, kv_blocks(pool)
    memory = max(budget.num_blocks * budget.block_size - budget.block_size - times.context_knots[-1], 0) * (1 - SLACK)
    n, n_all, cached = np.arange(1, most + 1), np.arange(most * ranks + 1), np.arange(COLUMNS) * width
    held = np.maximum(memory - n * (reserved + budget.block_size), 0.0)
    experts, full = _experts(times, len(n_all)), max(int(most * (1 - SLACK)), 1)
    least, where_full, at_seats = np.zeros((len(n_all), COLUMNS)), np.zeros(most), 0.0
    for slope, fixed in _fixed(times, most):
        rising = _never_falls(fixed)
        if ranks == 1 or slope == 0.0:
            of_rank = np.concatenate(([0.0], rising))[-(-n_all // ranks)]
        else:
            lines = [(0.0, 0.0), *hull_lines(n, fixed)]
            of_rank = np.max([base + each * n_all / ranks for base, each in lines], axis=0)
        np.maximum(least, of_rank[:, None] + slope / ranks * cached[None, :], out=least)
        np.maximum(where_full, rising + slope * held, out=where_full)
        at_seats = max(at_seats, float(rising[full - 1]))
    fill = n * longest >= held  # fewer requests than that do not fill the memory
    of_all = (n * (1 + (ranks - 1) * EVEN)).astype(np.int64)
    for_memory = (where_full + experts[of_all])[fill].min(initial=np.inf)
    waiting = min(at_seats + float(experts[of_all[full - 1]]), float(for_memory))
    return np.asarray(np.minimum(least + experts[:, None], waiting))


def _fixed(times: BatchTimes, most: int) -> list[tuple[float, Floats]]:
    """Pairs of seconds per cached token, and the least that steps of 1 … ``most`` decodes take without those."""
    n = np.arange(1, most + 1)
    fixed = np.minimum(times.decode_tokens[n], times.mixed_tokens[n]) + times.sequences[n] + times.host_serial[n]
    attention = np.minimum(times.decode_attention[n], times.mixed_attention[n])
    knots = times.context_knots.astype(np.float64)
    rises = (attention[:, -1] - attention[:, 0]) / (n * knots[-1])
    slopes = (0.0, *np.geomspace(max(rises.min() / 2, 1e-15), max(rises.max(), 1e-15), SLOPES))
    return [(slope, (fixed[:, None] + attention - slope * n[:, None] * knots[None, :]).min(axis=1)) for slope in slopes]


def _never_falls(values: Floats) -> Floats:
    """The largest values below these that never fall."""
    return np.asarray(np.minimum.accumulate(values[::-1])[::-1])


def _experts(times: BatchTimes, count: int) -> Floats:
    """Seconds of the experts by tokens of all ranks, from 0 up to ``count`` of them."""
    known = _never_falls(times.expert_tokens)
    return np.concatenate((known, np.full(max(count - len(known), 0), known[-1])))[:count]


@dataclass(frozen=True, eq=False)
class Come:
    """Requests that come to decode replicas."""

    replica: Integers
    join: Floats
    """When their KV is there; NaN of those that never come."""
    prompt: Floats
    steps: Floats
    end_by: Floats
    """When a good request has ended."""
    tokens: Floats
    """What each is worth."""


def shared_tokens(come: Come, sharing: Sharing) -> float:
    """Tokens of requests that may be good."""
    found = 0.0
    joins = np.isfinite(come.join) & (come.steps > 0)
    for replica in np.unique(come.replica[joins]):
        mine = np.flatnonzero(joins & (come.replica == replica))
        mine = mine[np.argsort(come.join[mine], kind="stable")]
        columns = come.join[mine], come.prompt[mine], come.steps[mine], come.end_by[mine], come.tokens[mine]
        ends, who = np.empty(len(mine)), np.empty(len(mine), dtype=np.int64)
        found += _share(*columns, sharing.grid, sharing.width, ends, who)
    return found + float(come.tokens[~joins].sum())


@entry
def _share(
    join: Floats, prompt: Floats, steps: Floats, end_by: Floats, tokens: Floats, grid: Floats, width: float,
    ends: Floats, who: Integers,
) -> float:  # fmt: skip
    """Tokens of one replica's requests, in the order in which they come, that end in time. Those that run are a heap of
    the numbers of steps at which they end, and of who does: ``ends`` and ``who`` are room for it."""
    n, rows, columns = len(join), len(grid) - 1, len(grid[0]) - 1
    running, come = 0, 0
    now, done, cached, good = 0.0, 0.0, 0.0, 0.0
    while come < n or running > 0:
        step = grid[min(running, rows), min(int(cached / width), columns)]
        ended = now + (ends[0] - done) * step if running > 0 else np.inf
        if come < n and join[come] <= ended:
            if running > 0 and step > 0.0:
                done += (join[come] - now) / step
            now, place, last = join[come], running, done + steps[come]
            while place > 0 and ends[(place - 1) // 2] > last:
                ends[place], who[place] = ends[(place - 1) // 2], who[(place - 1) // 2]
                place = (place - 1) // 2
            ends[place], who[place] = last, come
            cached += prompt[come]
            running += 1
            come += 1
        else:
            now, done = ended, ends[0]
            one = who[0]
            cached -= prompt[one]
            good += tokens[one] if now <= end_by[one] else 0.0
            running -= 1
            last, moved, place = ends[running], who[running], 0
            while 2 * place + 1 < running:
                below = 2 * place + 1
                if below + 1 < running and ends[below + 1] < ends[below]:
                    below += 1
                if ends[below] >= last:
                    break
                ends[place], who[place], place = ends[below], who[below], below
            ends[place], who[place] = last, moved
    return good
