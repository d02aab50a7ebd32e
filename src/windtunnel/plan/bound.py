"""Bound: a rate that a deployment cannot exceed and latencies that it cannot beat, without a simulation.

Let a rank take at least base + b·T + e·S + s·N for a step (see ``StepBound``). In the long run, per request: W tokens
are computed, N requests take part in steps, S cached tokens are read. The number of steps J per request is at least

    N / max_num_seqs,  W / max_num_batched_tokens,  (cached tokens summed over steps) / (tokens that the cache holds),

and, where a share q of the requests keeps a limit L on the mean time per output token,
J ≥ (decode steps of the q of requests with the fewest) · b / (L − base): the steps that D good requests share last
≥ base + b·D each, so their token-weighted mean batch is ≤ (L − base)/b. A limit on the q-quantile of the gaps between
tokens gives the same with q of all decode steps. Then time per request ≥ base·J + b·W + e·S + s·N, the largest over
the lines, and a replica serves at most ranks · stages / time. This is the bound of docs/plan.md.

With separate pools, a prefill pool computes prompts and nothing else and a decode pool everything else, so
the rate is at most what either side can do, and the time to first token is at least the prefill's.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.metrics import trimmed_window
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.outcome import at_share
from windtunnel.plan.question import Question
from windtunnel.plan.trial import Tables
from windtunnel.workload import Workload

Floats = NDArray[np.float64]
FEWER = 0.9
"""Share of the points that one look at all of them may leave, for another to pay."""


@dataclass(frozen=True, eq=False)
class StepBound:
    """For every line i and every batch of D decodes with S cached tokens and T tokens in all, over N ≤ D + chunks
    requests: step ≥ base[i] + per_token[i]·T + per_kv_token·S + per_sequence·N, per rank, in seconds."""

    base: Floats
    per_token: Floats
    per_kv_token: float
    per_sequence: float
    max_num_batched_tokens: int
    max_num_seqs: int


def step_bound(times: BatchTimes) -> StepBound:
    """The lines under a rank's tables: the edges of the lower convex hull of the token-level times that start at or
    above zero, the flat one and the one from the origin. Prefill attention counts as nothing."""
    tokens = np.minimum(times.decode_tokens, times.mixed_tokens)[1:]
    sizes = np.arange(1, len(tokens) + 1, dtype=np.float64)
    corner = lower_hull(sizes, tokens)
    slope = np.diff(tokens[corner]) / np.diff(sizes[corner])
    start = tokens[corner][:-1] - slope * sizes[corner][:-1]
    kept = (slope >= 0) & (start >= 0)
    base = np.concatenate((start[kept], [tokens.min(), 0.0]))
    per_token = np.concatenate((slope[kept], [0.0, float((tokens / sizes).min())]))
    experts = times.expert_tokens[1:]
    shared = float((experts / np.arange(1, len(experts) + 1)).min()) if len(experts) else 0.0
    return StepBound(
        base=base + float(times.host_serial[1:].min()),
        per_token=per_token + shared,
        per_kv_token=_per_kv_token(times),
        per_sequence=float((times.sequences[1:] / np.arange(1, len(times.sequences))).min()),
        max_num_batched_tokens=times.max_num_batched_tokens,
        max_num_seqs=times.max_num_seqs,
    )


def _per_kv_token(times: BatchTimes) -> float:
    """The least decode attention per request and cached token; between knots the table is linear, so it holds there."""
    contexts = times.context_knots[1:].astype(np.float64)
    decodes = np.arange(1, len(times.decode_attention), dtype=np.float64)
    return float((times.decode_attention[1:, 1:] / (decodes[:, None] * contexts[None, :])).min())


def lower_hull(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Corners of the lower convex hull of points whose x grows (Andrew's monotone chain).

    What is not below the line between its neighbours is no corner, so all such points are taken out first, together,
    for as long as many are.
    """
    left, before = np.arange(len(x)), math.inf
    while FEWER * before > len(left) > 2:
        before, at, value = len(left), x[left], y[left]
        rise, run = np.diff(value), np.diff(at)
        below = rise[:-1] * (run[:-1] + run[1:]) < (value[2:] - value[:-2]) * run[:-1]
        left = left[np.concatenate(([True], below, [True]))]
    return left[_chain(x[left], y[left])]


def _chain(x: Floats, y: Floats) -> NDArray[np.int64]:
    """The corners of few points, one after the other."""
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners)


@dataclass(frozen=True)
class Bound:
    """What a deployment can do at best."""

    rate: float
    """Requests per second of all replicas; 0 where a limit cannot hold at any rate."""
    stretch: float
    """The factor by which limits must be loosened before a request alone can keep them; ≤ 1 where it may."""
    replicas: int
    """How many times the smallest deployment of this kind ``rate`` counts: its replicas, or of several pools the
    largest number that divides those of each."""

    @property
    def per_replica(self) -> float:
        """Requests per second of one of them."""
        return self.rate / self.replicas


@dataclass(frozen=True, eq=False)
class Work:
    """What each request that fits costs at least."""

    prompt: Floats
    """Prompt tokens that are computed."""
    steps: Floats
    """Decode steps: output_tokens − 1."""
    context: Floats
    """Tokens in the cache before the first of them."""
    refused: NDArray[np.bool_]
    """Requests that do not fit and are refused: they do no work, and miss every limit per request."""

    @property
    def read(self) -> Floats:
        """Cached tokens that the decode steps read together."""
        return self.steps * self.context + self.steps * (self.steps - 1) / 2


def rate_bound(deployment: Deployment, question: Question, tables: Tables) -> Bound:
    """The bound of a deployment: the sum over its pools, each serving what suits it, or over those of either side."""
    return rate_bounds(deployment, (question,), tables)[0]


def rate_bounds(deployment: Deployment, questions: Sequence[Question], tables: Tables) -> tuple[Bound, ...]:
    """The bound under each question; they share their batch times, so the lines under the tables are found once."""
    overheads = questions[0].overheads
    lines = [step_bound(overheads.applied(table.times)) for table in tables]
    return tuple(_bound(deployment, question, lines) for question in questions)


def _bound(deployment: Deployment, question: Question, lines_of_pools: Sequence[StepBound]) -> Bound:
    rates: dict[str, float] = {}
    floors: dict[str, list[dict[str, Floats]]] = {}
    stretches, refused = [], np.zeros(len(question.workload), dtype=np.bool_)
    for pool, lines in zip(deployment.pools, lines_of_pools, strict=True):
        work = _work(pool, question.workload)
        rates[pool.role] = rates.get(pool.role, 0.0) + pool.replicas * _replica_rate(pool, lines, work, question)
        found = _floors(lines, work)
        floors.setdefault(pool.role, []).append(found)
        stretches.append(_least_stretch(found, work.refused, question))
        refused |= work.refused
    stretch = min(stretches)
    if deployment.disaggregated:
        stretch = _least_stretch(_of_both_sides(floors), refused, question)
    times = math.gcd(*(pool.replicas for pool in deployment.pools))
    return Bound(0.0 if stretch > 1 else min(rates.values()), stretch, times)


def _of_both_sides(floors: dict[str, list[dict[str, Floats]]]) -> dict[str, Floats]:
    """The floors of requests that pass both sides, each by the pool that suits it: what a side does not do takes 0."""
    names = floors["prefill"][0]
    sides = [{name: np.min([each[name] for each in pools], axis=0) for name in names} for pools in floors.values()]
    return {name: np.asarray(sum(side[name] for side in sides)) for name in names}


def _work(pool: Pool, workload: Workload) -> Work:
    """The least work of every request: none for one that may not fit, and one token of a prompt whose beginning may be
    cached. A prefill pool does one output token of each, a decode pool all but the prompt and that one."""
    room = pool.engine.resolved("max_model_len") - workload.prompt_tokens
    output = np.minimum(
        np.minimum(workload.output_tokens, 1) if pool.role == "prefill" else workload.output_tokens, room
    )
    fits = (output >= 1) & (workload.prompt_tokens + output - 1 <= _cache_tokens(pool))
    if not fits.any():
        longest, room_in_cache = pool.engine.max_model_len, _cache_tokens(pool)
        raise InputError(f"no request fits max_model_len={longest} and the {room_in_cache:,} tokens of KV cache")
    prompt = np.ones(len(workload)) if shares_blocks(pool, workload) else workload.prompt_tokens.astype(np.float64)
    if pool.role == "decode":
        prompt = np.zeros(len(workload))
    return Work(
        prompt=np.where(fits, prompt, 0.0),
        steps=np.where(fits, output - 1, 0).astype(np.float64),
        context=np.where(fits, workload.prompt_tokens, 0).astype(np.float64),
        refused=~fits,
    )


def shares_blocks(pool: Pool, workload: Workload) -> bool:
    """Whether requests may share cached blocks: then the cache gives no bound, and a prompt only one token."""
    caches = pool.engine.enable_prefix_caching is not False or bool(pool.stores)
    return caches and workload.texts is not None


def _cache_tokens(pool: Pool) -> int:
    budget = kv_blocks(pool)
    return (budget.num_blocks - 1) * budget.block_size


def _replica_rate(pool: Pool, lines: StepBound, work: Work, question: Question) -> float:
    """Requests per second of one replica."""
    tokens = float((work.prompt + work.steps).mean())
    parts = float((work.steps + (work.prompt > 0)).mean())
    read = float(work.read.mean())
    cached = 0.0 if shares_blocks(pool, question.workload) else read + float(work.prompt.mean())
    counts = [
        parts / lines.max_num_seqs,
        tokens / lines.max_num_batched_tokens,
        cached / _cache_tokens(pool),
        *_steps_within_limits(lines, work, question),
    ]
    if math.isinf(max(counts)):
        return 0.0  # also where a line begins at 0
    fixed = lines.per_kv_token * read + lines.per_sequence * parts
    seconds = float((lines.base * max(counts) + lines.per_token * tokens).max()) + fixed
    together = pool.engine.data_parallel_size * pool.engine.pipeline_parallel_size
    return together / seconds if seconds > 0 else math.inf


def _steps_within_limits(lines: StepBound, work: Work, question: Question) -> list[float]:
    """Steps per request that limits on the time per token enforce; infinite where no step is short enough."""
    found = []
    limit = question.slo.limits.get("tpot")
    limits = [] if limit is None else [("tpot", question.attainment, limit)]
    limits += [(name, level / 100, seconds) for name, level, seconds in question.slo.percentiles]
    count = len(work.steps)
    for name, share, seconds in limits:
        if name == "tpot":
            good = float(np.sort(work.steps)[: math.floor(share * count)].sum()) / count
        elif name == "itl":
            good = share * float(work.steps.mean())
        else:
            continue
        room = seconds - lines.base
        with np.errstate(divide="ignore", invalid="ignore"):
            decodes = room / lines.per_token
        kept = np.where(np.isnan(decodes), np.inf, decodes)  # a flat line exactly at the limit rules nothing out
        most = np.where(room < 0, 0.0, kept).min()
        found.append(good / most if most > 0 else (math.inf if good > 0 else 0.0))
    return found


def _least_stretch(floors: dict[str, Floats], refused: NDArray[np.bool_], question: Question) -> float:
    """How far the limits must be stretched for requests that have the engine to themselves."""
    window = trimmed_window(question.workload.arrival)
    measured: slice | NDArray[np.bool_] = slice(None)
    open_loop = not question.workload.released_by_ends
    if window is not None and open_loop:
        measured = window.holds(question.workload.arrival)
    elif not open_loop:
        return 0.0
    found = [0.0]
    for name, level, seconds in question.slo.percentiles:
        if name in floors:
            found.append(float(np.percentile(floors[name][measured], level)) / seconds)
    limits = question.slo.limits
    if limits:
        worst = np.max([floors[name] / limit for name, limit in limits.items()], axis=0)
        worst[refused] = math.inf
        found.append(at_share(worst[measured], question.attainment))
    return max(found)


def _floors(lines: StepBound, work: Work) -> dict[str, Floats]:
    """The least ttft, tpot and e2el of every request; 0 where nothing is known."""
    chunks = np.ceil(work.prompt / lines.max_num_batched_tokens)
    one = lines.base + lines.per_token
    gap = float(one.max())
    ttft = np.max([b * chunks + t * work.prompt for b, t in zip(lines.base, lines.per_token, strict=True)], axis=0)
    decode = work.steps * gap + lines.per_kv_token * work.read
    return {
        "ttft": ttft,
        "tpot": decode / np.maximum(work.steps, 1),
        "e2el": ttft + decode,
    }
