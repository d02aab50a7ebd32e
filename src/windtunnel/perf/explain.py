"""Explain: where the time of one batch goes, operator by operator, from the very knots that the tables hold."""

import re
from dataclasses import replace
from functools import cache as remember
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool, stage_pools
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats, Integers
from windtunnel.perf.kernel_errors import HOST, family_errors
from windtunnel.perf.kernel_times import MODELLED, NEVER_MEASURED, SOURCES, KernelTimes
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.grid import (
    all_tokens_times,
    decode_times,
    least_of_all,
    operator_times,
    prefill_base,
    prefill_times,
    token_times,
)
from windtunnel.perf.tabulate.host import cached_block, dispatch, host_tables
from windtunnel.perf.tabulate.micro_batches import Overlap, overlap
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import asked_of, operators
from windtunnel.perf.tabulate.tables import Axes, axes, sends

ITEM = re.compile(r"(?P<kind>\w+)=(?P<count>\d+)(?:x(?P<tokens>\d+))?(?:@(?P<context>\d+))?")
KINDS = ("decode", "prefill")
GRAMMAR = "write decode=REQUESTS@CONTEXT and prefill=CHUNKSxTOKENS@CONTEXT, e.g. decode=32@4096,prefill=2x1024@8192"

LATENCY_BOUND = 0.2
"""Below this share of the roofline a kernel waits for launches and latencies more than for memory or arithmetic."""


@dataclass(frozen=True)
class Batch:
    """One step of one rank: decodes with their tokens in the cache, and prefill chunks."""

    decodes: int = 0
    kv_tokens: int = 0
    """Tokens in the cache of all decodes together."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens, context) of each prefill chunk, in order."""

    def __post_init__(self) -> None:
        if self.decodes < 0 or self.kv_tokens < 0 or (self.kv_tokens and not self.decodes):
            raise InputError(f"batch of {self.decodes} decodes over {self.kv_tokens} tokens: counts must be ≥ 0")
        if any(tokens < 1 or context < 0 for tokens, context in self.chunks):
            raise InputError("batch: a prefill chunk has at least 1 token, at a context ≥ 0")
        if not self.decodes and not self.chunks:
            raise InputError(f"batch is empty: {GRAMMAR}")

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""
        return self.decodes + sum(tokens for tokens, _ in self.chunks)

    @property
    def sequences(self) -> int:
        """Requests in the step."""
        return self.decodes + len(self.chunks)

    def __str__(self) -> str:
        parts = [f"decode={self.decodes}@{self.kv_tokens // self.decodes}"] if self.decodes else []
        return ",".join(parts + [f"prefill=1x{tokens}@{context}" for tokens, context in self.chunks])


def parse_batch(text: str) -> Batch:
    """A batch from text: items separated by commas, added up.

    ``decode=N@C``: N decodes with C tokens in the cache each. ``prefill=KxN@C``: K chunks of N tokens at context C;
    ``prefill=N``: one. A context that is left out is 0. Raises InputError with the grammar.
    """
    decodes = kv_tokens = 0
    chunks: list[tuple[int, int]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind = item.partition("=")[0].strip()
        if kind not in KINDS:
            raise InputError(f"batch {item!r}: {unknown('part', kind, KINDS)}: {GRAMMAR}")
        match = ITEM.fullmatch(item)
        if not match:
            raise InputError(f"batch {item!r} is not understood: {GRAMMAR}")
        count, context = int(match["count"]), int(match["context"] or 0)
        if match["kind"] == "decode":
            if match["tokens"]:
                raise InputError(f"batch {item!r}: a decode has one token: {GRAMMAR}")
            decodes, kv_tokens = decodes + count, kv_tokens + count * context
        else:
            copies, tokens = (count, int(match["tokens"])) if match["tokens"] else (1, count)
            chunks += [(tokens, context)] * copies
    return Batch(decodes, kv_tokens, tuple(chunks))


def usual_batch(engine: Engine) -> Batch:
    """32 decodes with 4096 tokens in the cache each, and a chunk of 2048; less where a resolved engine takes less."""
    length, tokens = engine.resolved("max_model_len"), engine.resolved("max_num_batched_tokens")
    decodes = max(0, min(32, engine.resolved("max_num_seqs") - 1, tokens - 1))
    return Batch(decodes, decodes * min(4096, length - 1), ((min(2048, tokens - decodes, length), 0),))


@dataclass(frozen=True)
class Row:
    """One operator of the batch; FLOPs, bytes and seconds are those of all its launches on one GPU."""

    name: str
    group: str
    shape: str
    at: str
    """The point in words: tokens, requests, or (requests, keys)."""
    count: int
    seconds: float
    share: float
    """Of the whole step."""
    flops: float
    bytes: float
    """Bytes of memory, or of the link for a collective."""
    compute_share: float
    """Attained share of peak FLOP/s in the kernel's dtype."""
    bandwidth_share: float
    """Attained share of memory (or link) bandwidth."""
    bound: str
    """``compute``, ``memory``, ``latency``, ``communication`` or ``host``."""
    source: str
    """``measured``, ``interpolated`` or ``modelled``."""
    distance: float
    """Octaves to the nearest data, infinite without any, NaN where no device has any; see ``KernelTimes``."""
    error: float
    """Relative error of the seconds, as the standard deviation of their log."""
    hidden: float = 0.0
    """Seconds beside the other micro-batch, which the step does not take."""
    stage: int = 0
    """Of a pipeline, from 1 on; what is sent to the next stage belongs to the sender. 0 without one."""

    @property
    def busy(self) -> float:
        """Seconds of the kernels, hidden or not."""
        return self.seconds + self.hidden


@dataclass(frozen=True)
class Explanation:
    """The operator table of one step; the seconds of the rows add up to the batch time of the tables."""

    rows: tuple[Row, ...]
    total_seconds: float
    gpu_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the step, as if all operators erred the same way."""
        return sum(row.seconds * row.error for row in self.rows) / self.total_seconds

    @property
    def hidden_seconds(self) -> float:
        """What two micro-batches do at the same time."""
        return sum(row.hidden for row in self.rows)


class _Mark(NamedTuple):
    """The least certain of the answers of an operator."""

    source: int
    distance: float
    error: float


def explain(pool: Pool, batch: Batch, source: str = "auto") -> Explanation:
    """The operators of one step, in a pipeline those of its stages one after the other. Ranks in lockstep are all given
    the same batch.

    Raises InputError for a batch beyond the engine's limits.
    """
    if pool.engine.num_speculative_tokens:
        raise InputError("num_speculative_tokens: a batch is explained without speculation; leave it out")
    ax, times = axes(pool), predictor_from(pool, source)
    _check(pool, batch, ax)
    stages = stage_pools(pool)
    rows = [row for n, stage in enumerate(stages, 1) for row in _rows(stage, batch, ax, times, n * (len(stages) > 1))]
    if len(stages) > 1:
        passing = sends(pool, ax, times)[:, batch.tokens].tolist()
        rows += [_sent(n, seconds, batch) for n, seconds in enumerate(passing, 1)]
        rows.sort(key=lambda row: row.stage)
    total = sum(row.seconds for row in rows)
    shared = tuple(replace(row, share=row.seconds / total) for row in rows)
    return Explanation(
        shared, total, sum(row.seconds for row in rows if row.bound != "host" or row.name == "launch_wait")
    )


def _rows(pool: Pool, batch: Batch, ax: Axes, times: Predictor, stage: int) -> list[Row]:
    """The operators of a whole model or of one stage, and what it waits for the host."""
    halves = overlap(pool, ax, remember(partial(operator_times, ax=ax, predictor=times)))
    parts = [(op, _spent(op, batch, ax, times, halves)) for op in asked_of(times, operators(pool))]
    parts = [(op, spent) for op, spent in parts if spent.seconds + spent.hidden > 0]
    rows = [
        _row(pool.device, op, spent, batch, *_points(op, batch, ax, _runs(op, batch, halves))) for op, spent in parts
    ]
    launched = sum(spent.seconds for op, spent in parts if op.phase == "tokens")
    if ax.ranks > 1:
        launched += _of_experts(pool, batch, parts, ax, times)
    waits = 0.0 if times.perfect or times.launches else _waits(pool, batch, ax, launched, halves)
    if waits:
        rows.append(_host("launch_wait", "layers that the host launches", waits))
    gpu = sum(row.seconds for row in rows)
    overlapped, serial = host_tables(times, pool, ax.max_num_seqs)
    if overlapped[batch.sequences] > gpu:
        wait = float(overlapped[batch.sequences]) - gpu
        rows.append(_host("host_wait", "scheduling, input preparation, output", wait))
    blocks = 0.0 if times.perfect else batch.kv_tokens / pool.engine.resolved("block_size") * cached_block(pool)
    alone = float(serial[batch.sequences]) if pool.model.embeds else 0.0  # all stages but the first are told early
    if stage < 2 or alone + blocks > 0:
        rows.append(_host("host_serial", f"{batch.sequences} requests", alone + blocks))
    return [replace(row, stage=stage) for row in rows]


def _sent(stage: int, seconds: float, batch: Batch) -> Row:
    """What a stage sends to the next one."""
    row = _host("send", f"{batch.tokens} tokens to stage {stage + 1}", seconds)
    return replace(row, group="communication", bound="communication", stage=stage)


def _check(pool: Pool, batch: Batch, ax: Axes) -> None:
    longest = max([batch.kv_tokens // batch.decodes + 1 if batch.decodes else 0, *(n + c for n, c in batch.chunks)])
    for what, value, limit in (
        ("max_num_batched_tokens", batch.tokens, ax.max_num_batched_tokens),
        ("max_num_seqs", batch.sequences, ax.max_num_seqs),
        ("max_model_len", longest, pool.engine.resolved("max_model_len")),
    ):
        if value > limit:
            raise InputError(f"batch {batch} needs {what} ≥ {value}: the engine has {limit}; give a larger {what}")


class _Spent(NamedTuple):
    """What all launches of an operator take, and how certain that is."""

    seconds: float
    hidden: float
    """Seconds beside the other micro-batch."""
    mark: _Mark


def _spent(op: Operator, batch: Batch, ax: Axes, times: Predictor, halves: Overlap | None) -> _Spent:
    """All launches of an operator in the batch, interpolated as BatchTimes does."""
    one = np.ones(1)
    match op.phase:
        case "tokens":
            chosen = replace(op, kernel=op.kernel.resolved(bool(batch.chunks)))
            padded, graph = ax.padded[[batch.tokens]], _captured(batch, ax)
            found = token_times(chosen, np.array([batch.tokens]), padded, graph, times)
            table = "mixed_tokens" if batch.chunks else "decode_tokens"
            return _weighed(op, found, one, halves, (table, (slice(batch.tokens, batch.tokens + 1),)))
        case "all_tokens":
            total = _all_tokens(batch, ax)
            spent = _weighed(op, all_tokens_times(op, np.array([total]), ax, times), one)
            more = halves.added[op]["mixed_tokens" if batch.chunks else "decode_tokens"] if halves else None
            extra = op.count * float(more.seconds[batch.tokens]) if more else 0.0
            return spent._replace(seconds=spent.seconds + extra)
        case "sequences":
            return _weighed(op, times.times(op.kernel, np.array([float(batch.sequences)]), np.zeros(1)), one)
        case "decode" if batch.decodes:
            j = _cell(ax.context_knots, batch.kv_tokens // batch.decodes)
            knots = ax.context_knots[j : j + 2]
            beside = replace(op, kernel=op.kernel.beside_prefill()) if ax.one_call and batch.chunks else op
            found = decode_times(beside, np.full(2, batch.decodes), knots, times)
            v = (batch.kv_tokens / batch.decodes - knots[0]) / (knots[1] - knots[0])
            table = "mixed_attention" if batch.chunks else "decode_attention"
            return _weighed(op, found, np.array([1.0 - v, v]), halves, (table, (batch.decodes, slice(j, j + 2))))
        case "prefill" if batch.chunks:
            base = op.count * float(prefill_base(op, times).seconds[0])
            chunks = [_chunk(op, tokens, context, ax, times, halves) for tokens, context in batch.chunks]
            mark = max((chunk.mark for chunk in chunks), key=lambda mark: (mark.error, mark.source))
            return _Spent(base + sum(chunk.seconds for chunk in chunks), sum(chunk.hidden for chunk in chunks), mark)
        case _:
            return _Spent(0.0, 0.0, _Mark(MODELLED, NEVER_MEASURED, 0.0))


def _weighed(
    op: Operator, found: KernelTimes, weights: Floats, halves: Overlap | None = None, at: tuple[str, Any] = ("", ())
) -> _Spent:
    """The weighted sum of answers that stand at a place ``at`` of a table, as two micro-batches leave them."""
    seconds, (table, index) = op.count * found.seconds * weights, at
    if halves is None or (op, table) not in halves.factors:
        return _Spent(float(seconds.sum()), 0.0, _worst(found, weights))
    factors, hidden = halves.factors[op, table][index], halves.hidden[op, table][index]
    return _Spent(float((seconds * factors).sum()), float((seconds * hidden).sum()), _worst(found, weights))


def _chunk(op: Operator, tokens: int, context: int, ax: Axes, times: Predictor, halves: Overlap | None) -> _Spent:
    """One chunk, bilinear between the four knots around it."""
    i, j = _cell(ax.chunk_knots, tokens), _cell(ax.context_knots, context)
    sizes, contexts = ax.chunk_knots[i : i + 2], ax.context_knots[j : j + 2]
    a, b = np.meshgrid(sizes, contexts, indexing="ij")
    found = prefill_times(op, a, b, times)
    u = (tokens - sizes[0]) / (sizes[1] - sizes[0])
    v = (context - contexts[0]) / (contexts[1] - contexts[0])
    weights = np.outer([1.0 - u, u], [1.0 - v, v])
    return _weighed(op, found, weights, halves, ("prefill_attention", (slice(i, i + 2), slice(j, j + 2))))


def _worst(found: KernelTimes, weights: Floats) -> _Mark:
    """The least certain of the knots that count."""
    use = np.flatnonzero((weights > 0).ravel())
    marks = zip(found.sources.ravel()[use], found.distance.ravel()[use], found.error.ravel()[use], strict=True)
    return max((_Mark(int(a), float(b), float(c)) for a, b, c in marks), key=lambda mark: (mark.source, mark.error))


def _cell(knots: Integers, x: int) -> int:
    return min(int(np.searchsorted(knots, x, side="right")) - 1, len(knots) - 2)


def _captured(batch: Batch, ax: Axes) -> int:
    """Largest batch of this kind that runs from a graph, at its size."""
    return ax.padded_with_prompts if batch.chunks else ax.graph_tokens


def _all_tokens(batch: Batch, ax: Axes) -> int:
    tokens = batch.tokens
    return ax.ranks * (int(ax.padded[tokens]) if tokens <= ax.graph_tokens else tokens)


def _of_experts(pool: Pool, batch: Batch, parts: list[tuple[Operator, _Spent]], ax: Axes, times: Predictor) -> float:
    """Seconds of experts beside which the host launches; see ``tabulate.grid``."""
    least = least_of_all(pool, ax, np.array([batch.tokens]))
    if int(least[0]) == _all_tokens(batch, ax):
        return sum(spent.seconds for op, spent in parts if op.phase == "all_tokens")
    of_all = [op for op, _ in parts if op.phase == "all_tokens"]
    return sum(op.count * float(all_tokens_times(op, least, ax, times).seconds[0]) for op in of_all)


def _waits(pool: Pool, batch: Batch, ax: Axes, token_seconds: float, halves: Overlap | None) -> float:
    gpu = np.full(len(ax.padded), token_seconds)
    twice = None if halves is None else halves.prompts_split if batch.chunks else halves.decodes_split
    return float(dispatch(pool, ax, gpu, bool(batch.chunks), twice=twice)[batch.tokens])


def _runs(op: Operator, batch: Batch, halves: Overlap | None) -> int:
    """How often an operator runs in each of its layers: once for each micro-batch; chunks of prompts are not told
    apart."""
    if halves is None or not halves.shares[op] or op.phase == "prefill" or (op.phase == "decode" and batch.chunks):
        return 1
    return 2 if (halves.prompts_split if batch.chunks else halves.decodes_split)[batch.tokens] else 1


def _points(op: Operator, batch: Batch, ax: Axes, runs: int) -> tuple[list[tuple[float, float]], str]:
    """The points (a, b) of an operator in the batch, and the same in words."""
    twice = "2 × " if runs == 2 else ""
    match op.phase:
        case "tokens":
            tokens = int(ax.padded[batch.tokens]) if batch.tokens <= _captured(batch, ax) else batch.tokens
            padding = f" ({tokens - batch.tokens} padding)" if tokens > batch.tokens else ""
            each = -(-tokens // runs)
            return [(each, 0.0)] * runs, f"{twice}{each} tokens{padding}"
        case "all_tokens":
            each = -(-_all_tokens(batch, ax) // runs)
            return [(each, 0.0)] * runs, f"{twice}{each} tokens of {ax.ranks} ranks"
        case "sequences":
            return [(batch.sequences, 0.0)], f"{batch.sequences} requests"
        case "decode":
            mean = batch.kv_tokens / batch.decodes + 1.0
            each = -(-batch.decodes // runs)
            return [(each, mean)] * runs, f"{twice}{each} × {mean:.0f} keys"
        case _:
            text = ", ".join(f"{n} at {c}" for n, c in batch.chunks[:3]) + (" …" if len(batch.chunks) > 3 else "")
            return [(float(n), float(c)) for n, c in batch.chunks], text


def _row(
    device: Device, op: Operator, spent: _Spent, batch: Batch, points: list[tuple[float, float]], text: str
) -> Row:
    a, b = np.array(points, dtype=float).T
    kernel, mark, busy = op.kernel.resolved(bool(batch.chunks)), spent.mark, spent.seconds + spent.hidden
    work = op.count * float(kernel.flops(a, b).sum())
    moved = op.count * float(kernel.bytes_moved(a, b).sum())
    least = op.count * float(kernel.bound(device, a, b).sum())
    compute_share = work / busy / device.peak_flops(kernel.rate)
    bandwidth_share = moved / busy / kernel.bandwidth(device)
    limit = "compute" if compute_share > bandwidth_share else "memory"
    if least < LATENCY_BOUND * busy and not kernel.communicates:
        limit = "latency"
    return Row(
        name=op.name,
        group=op.group,
        shape=kernel.describe(),
        at=text,
        count=op.count,
        seconds=spent.seconds,
        share=0.0,
        flops=work,
        bytes=moved,
        compute_share=compute_share,
        bandwidth_share=bandwidth_share,
        bound="communication" if kernel.communicates else limit,
        source=SOURCES[mark.source],
        distance=mark.distance,
        error=mark.error,
        hidden=spent.hidden,
    )


def _host(name: str, text: str, seconds: float) -> Row:
    empty: dict[str, Any] = {"flops": 0.0, "bytes": 0.0, "compute_share": 0.0, "bandwidth_share": 0.0, "share": 0.0}
    marks: dict[str, Any] = {"source": "modelled", "distance": NEVER_MEASURED, "error": family_errors(HOST).modelled}
    return Row(name, "host", "", text, 1, seconds, bound="host", **marks, **empty)
