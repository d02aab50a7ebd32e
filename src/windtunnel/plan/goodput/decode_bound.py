"""Decode bound: output tokens that decode pools can compute of good requests at most, whatever the scheduler does.

Let a step of a replica with N decodes of good requests, S tokens in their caches together, take at least
base + b·N + a·S seconds (a line under the tables), and let request i cost c_i = b + a·prompt_i in each. Its k_i tokens
take L each on average, L the limit on tpot. Over all steps, Λ the sum of c_i of a step's good requests:

    Σ (base + Λ) Λ ≤ Σ step · Λ ≤ L Σ_i c_i k_i = L Σ Λ,   so   ΣΛ ≤ steps · (L − base)   (Cauchy and Schwarz)

and time ≥ base · steps + ΣΛ ≥ Σ_i k_i c_i L / (L − base); with at most C decodes a step also ≥ Σ_i k_i (c_i + base/C).
So each good request needs that many seconds of a replica between its first token and its deadline,
arrival + ttft + tpot · k_i. What fits at most is a flow: the earliest deadline first. Where requests differ in tokens
per second of work, the best are taken first (what fits is a polymatroid, on which greed is optimal).
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.bound import lower_hull

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SLOPES = 16
"""Lines that are tried for the cost of a cached token."""
CLASSES = 4
"""Kinds of requests by tokens per second of work."""


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines under the time of a step of one replica's ranks in lockstep, or of one rank where they are not: for each,
    seconds ≥ base + per_decode · decodes + per_kv_token · cached tokens."""

    base: Floats
    per_decode: Floats
    per_kv_token: Floats
    most: int
    """Decodes of a step at most."""
    at_once: int
    """How many such groups a replica has."""

    @property
    def content(self) -> bytes:
        """Equal for equal lines."""
        parts = (self.base, self.per_decode, self.per_kv_token, np.array((self.most, self.at_once)))
        return b" ".join(part.tobytes() for part in parts)

    def seconds(self, steps: Floats, prompt: Floats, limit: float) -> Floats:
        """Least seconds of a group for the decode steps of each request, by the line that gives most in all."""
        if (self.base >= limit).any():
            return np.full(len(steps), np.inf)
        read = float((steps * prompt).sum())
        cost = self.per_decode * float(steps.sum()) + self.per_kv_token * read
        by_limit = cost * (limit / (limit - self.base)) if np.isfinite(limit) else cost
        by_most = cost + self.base / self.most * float(steps.sum())
        line = int(np.argmax(np.maximum(by_limit, by_most)))
        each = steps * (self.per_decode[line] + self.per_kv_token[line] * prompt)
        if by_limit[line] >= by_most[line]:
            each = each * (limit / (limit - self.base[line])) if np.isfinite(limit) else each
        else:
            each = each + steps * (self.base[line] / self.most)
        return np.asarray(each / self.at_once)


def lines_under(times: BatchTimes, ranks: int) -> Lines:
    """The lines under the tables of a decode pool's rank; ``ranks`` of them make a replica."""
    most = min(times.max_num_seqs, times.max_num_batched_tokens)
    n = np.arange(1, most + 1)
    fixed = np.minimum(times.decode_tokens[n], times.mixed_tokens[n]) + times.sequences[n] + times.host_serial[n]
    attention = np.minimum(times.decode_attention[n], times.mixed_attention[n])
    knots = times.context_knots.astype(np.float64)
    slopes = (attention[:, -1] - attention[:, 0]) / (n * knots[-1])
    lockstep = len(times.expert_tokens) > 1
    # a step takes as long as its slowest rank, at least the mean of all, and then the experts of all tokens
    experts = hull_lines(np.arange(1, len(times.expert_tokens)), times.expert_tokens[1:]) if lockstep else [(0.0, 0.0)]
    group = ranks if lockstep else 1
    found = []
    for slope in (0.0, *np.geomspace(max(slopes.min() / 2, 1e-15), max(slopes.max(), 1e-15), SLOPES)):
        least = (fixed[:, None] + attention - slope * n[:, None] * knots[None, :]).min(axis=1)
        found += [
            (base + more_base, per_decode / group + more, slope / group)
            for base, per_decode in hull_lines(n, least)
            for more_base, more in experts
        ]
    base, per_decode, per_kv_token = (np.array(column) for column in zip(*found, strict=True))
    return Lines(base, per_decode, per_kv_token, most * group, ranks // group)


def hull_lines(x: Integers, y: Floats) -> list[tuple[float, float]]:
    """(start, slope) of the lines under points: edges of their lower convex hull, and the flat one, as far as they
    start and rise at or above zero."""
    found = [(float(y.min()), 0.0)] if y.min() >= 0 else []
    for a, b in pairwise(lower_hull(x.astype(np.float64), y).tolist()):
        slope = float((y[b] - y[a]) / (x[b] - x[a]))
        start = float(y[a] - slope * x[a])
        if slope >= 0 and start >= 0:
            found.append((start, slope))
    return found


def most_tokens(
    begin: Floats, end: Floats, work: Floats, tokens: Floats, groups: float, classes: int = CLASSES
) -> float:
    """Tokens at most, where each request has ``work`` seconds between its ``begin`` and ``end``, and ``groups`` of such
    seconds pass in each; fractions of requests count. With more ``classes`` of requests it is more exact."""
    doable = np.isfinite(work) & (work > 0)
    free = float(tokens[work <= 0].sum())
    if not doable.any():
        return free
    begin, end, work, tokens = (column[doable] for column in (begin, end, work, tokens))
    worth = tokens / work
    edges = np.quantile(worth, np.linspace(1.0, 0.0, classes + 1))[:-1]
    first, last = np.floor(begin).astype(np.int64), np.ceil(end).astype(np.int64)
    last = np.maximum(last, first + 1)
    order = np.argsort(first, kind="stable")
    first, last, work, worth = first[order], last[order], work[order], worth[order]
    found = 0.0
    for place, edge in enumerate(edges):  # worth ≤ edge from here on: counts as the edge
        below = edges[place + 1] if place + 1 < classes else 0.0
        kept = worth > below
        if kept.any():
            start = int(first[kept][0])
            left = np.zeros(int(last[kept].max()) - start + 1)
            fits = _served(first[kept] - start, last[kept] - start, work[kept], float(groups), left)
            found += float(edge - below) * fits
    return free + min(found, float(tokens.sum()))


@entry
def _served(first: Integers, last: Integers, work: Floats, groups: float, left: Floats) -> float:
    """Work that fits, the earliest deadline first; begin and end in whole seconds from 0, ordered by begin; ``left`` is
    zero at every second up to the last end."""
    done, i, latest = 0.0, 0, 0
    for second in range(len(left) - 1):
        while i < len(first) and first[i] <= second:
            left[last[i]] += work[i]
            latest = max(latest, last[i])
            i += 1
        room = groups
        at = second + 1
        while room > 0.0 and at <= latest:
            taken = min(room, left[at])
            left[at] -= taken
            room -= taken
            done += taken
            at += 1
    return done
