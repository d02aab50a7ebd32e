"""BatchTimes: how long any batch takes, as tables that the engines only look up and interpolate.

StageTimes: how long it takes in each stage of a pipeline, and on the way from one stage to the next.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

CONTEXT_STEP = 16
"""Context knots are multiples of this many tokens, so that a knot is found by one division and one look-up."""


@dataclass(frozen=True, eq=False)
class BatchTimes:
    """Tables of one data-parallel rank; all times in seconds.

    Let a batch hold ``D`` decodes with together ``S`` tokens in the cache, and prefill chunks of ``n`` tokens at
    context ``c`` (tokens already in the cache; neither S nor c counts the tokens of this step). Let T = D + Σn, with
    chunks decode_width · D + Σn, N = D + number of chunks, and let i be linear interpolation. The GPU time of the rank
    is, added in this order,

        tokens[T] + i(attention[D], S/D) + Σ i(prefill_attention, n, c) + prefill_base + sequences[N]

    where ``tokens`` and ``attention`` are ``decode_tokens`` and ``decode_attention`` without chunks, ``mixed_tokens``
    and ``mixed_attention`` with chunks, and prefill_base is charged once if there are chunks. Ranks in lockstep take
    the maximum over ranks plus ``expert_tokens`` of the tokens of all ranks: an idle rank runs one dummy token; if the
    largest rank fits a captured graph, each rank counts ``padded[its maximum]``, otherwise its own tokens. The step
    then takes max(GPU, host_overlapped[N]) + host_serial[N], N the largest of the ranks.
    """

    decode_tokens: Floats
    """[T + 1] token-level operators and collectives of a batch of decodes only, padding of captured graphs included."""
    mixed_tokens: Floats
    """[T + 1] the same for a batch with prefill chunks."""
    sequences: Floats
    """[N + 1] output head and sampling, by requests in the batch."""
    host_overlapped: Floats
    """[N + 1] host work that runs beside the GPU (asynchronous scheduling)."""
    host_serial: Floats
    """[N + 1] host work during which the GPU waits."""
    context_knots: Integers
    """[K] contexts of the attention tables: increasing multiples of CONTEXT_STEP from 0 to at least max_model_len."""
    decode_attention: Floats
    """[N + 1, K] decode attention by (decodes, mean context); row 0 is zero."""
    chunk_knots: Integers
    """[C] chunk sizes of the prefill table, increasing from 0 to at least max_num_batched_tokens."""
    prefill_attention: Floats
    """[C, K] prefill attention of one chunk by (chunk, context); row 0 is zero."""
    prefill_base: float
    """Fixed time of the prefill attention kernels of a batch, whatever the number of chunks."""
    expert_tokens: Floats
    """[M + 1] experts and their communication by tokens of all ranks; length 1 when ranks do not run in lockstep."""
    padded: Integers
    """[T + 1] tokens after padding to the captured graph, or the tokens themselves where no graph is captured."""
    graph_tokens: int
    """Largest batch of a rank to which ranks in lockstep are padded: the largest captured graph in tokens, 0 without
    graphs; every batch in old releases of vLLM."""
    mixed_attention: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """[N + 1, K] decode attention in a batch with prefill chunks; ``decode_attention`` unless given."""
    decode_width: int = 1
    """Tokens that each decode brings to a batch with prefill chunks: 1 + its drafts where steps verify them, whose time
    ``decode_tokens`` and ``decode_attention`` hold anyway."""

    def __post_init__(self) -> None:
        if not self.mixed_attention.size:
            object.__setattr__(self, "mixed_attention", self.decode_attention)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                array = np.ascontiguousarray(value, dtype=np.int64 if value.dtype.kind == "i" else np.float64)
                if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array >= 0).all()):
                    raise InputError(
                        f"batch times: {entry.name} holds a negative or non-finite time: rebuild the table"
                    )
                array.flags.writeable = False
                object.__setattr__(self, entry.name, array)
        _check_knots("context_knots", self.context_knots, CONTEXT_STEP)
        _check_knots("chunk_knots", self.chunk_knots, 1)
        shapes = {
            "mixed_tokens": (self.mixed_tokens.shape, self.decode_tokens.shape),
            "padded": (self.padded.shape, self.decode_tokens.shape),
            "host_overlapped": (self.host_overlapped.shape, self.sequences.shape),
            "host_serial": (self.host_serial.shape, self.sequences.shape),
            "decode_attention": (self.decode_attention.shape, (len(self.sequences), len(self.context_knots))),
            "mixed_attention": (self.mixed_attention.shape, self.decode_attention.shape),
            "prefill_attention": (self.prefill_attention.shape, (len(self.chunk_knots), len(self.context_knots))),
        }
        for name, (shape, wanted) in shapes.items():
            if shape != wanted:
                raise InputError(f"batch times: {name} has shape {shape}: must be {wanted}")

    @property
    def max_num_batched_tokens(self) -> int:
        """Largest number of tokens in a batch that the tables cover."""
        return len(self.decode_tokens) - 1

    @property
    def max_num_seqs(self) -> int:
        """Largest number of requests in a batch that the tables cover."""
        return len(self.sequences) - 1

    def scaled(self, factor: float) -> "BatchTimes":
        """Every time multiplied by a factor, host work too."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value * factor for name, value in values.items() if _holds_seconds(value)})

    def of_steps(self, drafts: int, accepted: float, ranks: int, share: float) -> "BatchTimes":
        """Of tables that hold the time of a step with drafts over the ``accepted`` tokens that it yields, the time of
        the step; ``ranks``: that step together; ``share``: of the drafter in the layers.

        Those of batches with prefill chunks hold no drafter: its first pass goes over all tokens, further ones over
        those of the requests, for which it reads its weights.
        """
        names = ("decode_tokens", "sequences", "host_overlapped", "host_serial", "decode_attention", "mixed_attention")
        experts, small = self.expert_tokens, np.arange(len(self.expert_tokens)) <= ranks * self.graph_tokens
        return replace(
            self,
            **{name: getattr(self, name) * accepted for name in names},
            mixed_tokens=self.mixed_tokens * (1.0 + share) + (drafts - 1) * share * self.mixed_tokens[1],
            prefill_attention=self.prefill_attention * (1.0 + share),
            prefill_base=self.prefill_base * (1.0 + share),
            expert_tokens=np.where(small, experts * accepted, experts * (1.0 + share)),
            decode_width=1 + drafts,
        )

    @property
    def takes_no_time(self) -> bool:
        """Whether all times are zero."""
        values = (getattr(self, field.name) for field in fields(self))
        return not any(np.any(value) for value in values if _holds_seconds(value))

    def decode(self, decodes: int, kv_tokens: int, mixed: bool = False) -> float:
        """Decode attention of ``decodes`` requests with ``kv_tokens`` tokens in the cache together, in seconds;
        ``mixed``: beside prefill chunks."""
        if decodes == 0:
            return 0.0
        knots, row = self._contexts, self._attention(decodes, mixed)
        j = bisect_right(self._below[0], kv_tokens // decodes) - 1
        low = row[j]
        slope = (row[j + 1] - low) / float(decodes * (knots[j + 1] - knots[j]))
        return low + slope * float(kv_tokens - decodes * knots[j])

    def prefill(self, tokens: int, context: int) -> float:
        """Prefill attention of one chunk of ``tokens`` at ``context``, in seconds."""
        sizes, knots = self._sizes, self._contexts
        i, j = bisect_right(self._below[1], tokens) - 1, bisect_right(self._below[0], context) - 1
        u = float(tokens - sizes[i]) / float(sizes[i + 1] - sizes[i])
        v = float(context - knots[j]) / float(knots[j + 1] - knots[j])
        smaller, larger = self._prefill[i : i + 2]
        low = smaller[j] + (smaller[j + 1] - smaller[j]) * v
        high = larger[j] + (larger[j + 1] - larger[j]) * v
        return low + (high - low) * u

    def rank(self, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> float:
        """GPU seconds of one rank's batch; ``chunks`` are (tokens, context) in batch order."""
        if not chunks:
            return self._lists.decode_tokens[decodes] + self.decode(decodes, kv_tokens) + self._lists.sequences[decodes]
        tokens = min(decodes * self.decode_width + sum([n for n, _ in chunks]), self.max_num_batched_tokens)
        time = self._lists.mixed_tokens[tokens] + self.decode(decodes, kv_tokens, True)
        for n, context in chunks:
            time = time + self.prefill(n, context)
        return time + self.prefill_base + self._lists.sequences[decodes + len(chunks)]

    def step(self, gpu: float, sequences: int) -> float:
        """Seconds of a whole step from its GPU seconds and the number of requests in it."""
        return max(gpu, self._lists.host_overlapped[sequences]) + self._lists.host_serial[sequences]

    def batch(self, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> float:
        """Seconds of a step of a single rank."""
        return self.step(self.rank(decodes, kv_tokens, chunks), decodes + len(chunks))

    def decode_steps(self, decodes: int, kv_tokens: int) -> Iterator[float]:
        """Seconds of step after step of the same decodes; ``batch`` of each, with the same additions."""
        knots, row = self._contexts, self._attention(decodes, False)
        tokens, sequences = self._lists.decode_tokens[decodes], self._lists.sequences[decodes]
        overlapped, serial = self._lists.host_overlapped[decodes], self._lists.host_serial[decodes]
        above = low = slope = 0.0
        base = 0
        while True:
            if kv_tokens >= above:
                j = bisect_right(self._below[0], kv_tokens // decodes) - 1
                base = decodes * knots[j]
                above = decodes * knots[j + 1] if j < len(knots) - 2 else inf
                low = row[j]
                slope = (row[j + 1] - low) / float(decodes * (knots[j + 1] - knots[j]))
            gpu = tokens + (low + slope * float(kv_tokens - base)) + sequences
            yield max(gpu, overlapped) + serial
            kv_tokens += decodes

    def lockstep(self, ranks: list[tuple[int, int, list[tuple[int, int]]]]) -> float:
        """Seconds of a step of ranks in lockstep, each (decodes, kv_tokens, chunks); an idle rank is (0, 0, [])."""
        gpu, tokens, sequences = 0.0, [], 1
        width = self.decode_width if any(chunks for _, _, chunks in ranks) else 1
        for decodes, kv_tokens, chunks in ranks:
            idle = decodes == 0 and not chunks
            gpu = max(gpu, self.rank(1, 0, []) if idle else self.rank(decodes, kv_tokens, chunks))
            each = decodes * width + sum(n for n, _ in chunks)
            tokens.append(1 if idle else min(each, self.max_num_batched_tokens))
            sequences = max(sequences, decodes + len(chunks))
        largest = max(tokens)
        total = len(ranks) * int(self.padded[largest]) if largest <= self.graph_tokens else sum(tokens)
        return self.step(gpu + float(self.expert_tokens[total]), sequences)

    def _attention(self, decodes: int, mixed: bool) -> list[float]:
        """A row of the attention table."""
        row = self._rows[mixed].get(decodes)
        if row is None:
            row = self._rows[mixed][decodes] = (self.mixed_attention if mixed else self.decode_attention)[
                decodes
            ].tolist()
        return row

    @cached_property
    def _below(self) -> tuple[list[int], list[int]]:
        """The contexts and the chunk sizes at which an interval of the tables begins."""
        return self._contexts[:-1], self._sizes[:-1]

    @cached_property
    def _rows(self) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        """Rows of ``decode_attention`` and of ``mixed_attention`` that were asked for, as lists."""
        return {}, {}

    @cached_property
    def _lists(self) -> "_Lists":
        return _Lists(*(getattr(self, name).tolist() for name in _Lists._fields))

    @cached_property
    def _prefill(self) -> list[list[float]]:
        return cast(list[list[float]], self.prefill_attention.tolist())

    @cached_property
    def _sizes(self) -> list[int]:
        return cast(list[int], self.chunk_knots.tolist())

    @cached_property
    def _contexts(self) -> list[int]:
        return cast(list[int], self.context_knots.tolist())


class _Lists(NamedTuple):
    """Tables with one index, whose numbers Python reads from lists several times as fast as from arrays."""

    decode_tokens: list[float]
    mixed_tokens: list[float]
    sequences: list[float]
    host_overlapped: list[float]
    host_serial: list[float]


def _holds_seconds(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")


def _check_knots(name: str, knots: Integers, step: int) -> None:
    if len(knots) < 2 or knots[0] != 0 or (np.diff(knots) <= 0).any() or (knots % step).any():
        raise InputError(f"batch times: {name} must be at least two increasing multiples of {step} from 0")


def linear(
    base: float,
    per_token: float,
    per_kv_token: float,
    per_pair: float,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    ranks: int = 1,
    per_expert_token: float = 0.0,
) -> BatchTimes:
    """Tables of a linear cost: base + per_token·T + per_kv_token·(S + D) + per_pair·Σ n(2c + n) seconds.

    The cost of InferMax (arXiv 2411.07447) and of the source documents' cost model; the pair term is interpolated
    between knots. ``ranks`` > 1 adds per_expert_token seconds for each token of all ranks in lockstep.
    """
    contexts = np.unique(
        np.append(np.arange(0, max_model_len, 512), [0, -(-(max_model_len + 1) // CONTEXT_STEP) * CONTEXT_STEP])
    )
    chunks = np.unique(np.append(np.arange(0, max_num_batched_tokens, 64), [0, max_num_batched_tokens]))
    seqs = np.arange(max_num_seqs + 1, dtype=np.float64)
    tokens = base + per_token * np.arange(max_num_batched_tokens + 1, dtype=np.float64)
    zeros = np.zeros(max_num_seqs + 1)
    return BatchTimes(
        decode_tokens=tokens,
        mixed_tokens=tokens,
        sequences=zeros,
        host_overlapped=zeros,
        host_serial=zeros,
        context_knots=contexts,
        decode_attention=per_kv_token * seqs[:, None] * (contexts[None, :] + 1.0) * (seqs[:, None] > 0),
        chunk_knots=chunks,
        prefill_attention=per_pair * chunks[:, None] * (2.0 * contexts[None, :] + chunks[:, None]),
        prefill_base=0.0,
        expert_tokens=per_expert_token * np.arange(ranks * max_num_batched_tokens + 1.0) if ranks > 1 else np.zeros(1),
        padded=np.arange(max_num_batched_tokens + 1),
        graph_tokens=0,
    )


class Passage(NamedTuple):
    """What a batch takes in a pipeline (s)."""

    stages: list[float]
    """In each stage."""
    sends: list[float]
    """From each stage but the last to the next."""


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Tables of the stages of a pipeline.

    A batch passes through them as through a tandem of queues: stage s begins when the batch has been sent from stage
    s − 1 and stage s has done the batch before. A stage that has sent nothing yet goes on with its next batch.
    """

    stages: tuple[BatchTimes, ...]
    """Of one rank in each stage; the host work of a step is divided among them."""
    sends: Floats
    """[stages − 1, T + 1] seconds in which the activations of T tokens get from a stage to the next."""
    end: Callable[..., float] | None = None
    """The user's function that says when a stage has done a step, ``stage_end`` of ``core.hooks``; None: see above."""

    def __post_init__(self) -> None:
        sends = np.ascontiguousarray(self.sends, dtype=np.float64)
        if len(self.stages) < 2:
            raise InputError(f"stage times of {len(self.stages)} stages: a pipeline has at least 2; use BatchTimes")
        wanted = (len(self.stages) - 1, self.stages[0].max_num_batched_tokens + 1)
        if sends.shape != wanted:
            raise InputError(f"stage times: sends has shape {sends.shape}: must be {wanted}")
        if not (np.isfinite(sends).all() and (sends >= 0).all()):
            raise InputError("stage times: sends holds a negative or non-finite time: rebuild the table")
        sizes = {(table.max_num_batched_tokens, table.max_num_seqs) for table in self.stages}
        if len(sizes) > 1:
            raise InputError(f"stage times: tables of {len(sizes)} sizes: all stages see the same batches")
        sends.flags.writeable = False
        object.__setattr__(self, "sends", sends)

    @property
    def together(self) -> BatchTimes:
        """A batch in all stages one after the other, without sends."""
        return added(self.stages)

    def scaled(self, factor: float) -> "StageTimes":
        """Every time multiplied by a factor, host work and sends too."""
        return StageTimes(tuple(table.scaled(factor) for table in self.stages), self.sends * factor, self.end)

    def passage(self, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> Passage:
        """Seconds of a batch in every stage and on every way between two; see BatchTimes.batch."""
        tokens = decodes + sum(n for n, _ in chunks)
        stages = [table.batch(decodes, kv_tokens, chunks) for table in self.stages]
        return Passage(stages, [float(row[tokens]) for row in self.sends])


def added(stages: Sequence[BatchTimes]) -> BatchTimes:
    """The sum of tables of equal form; host work beside the GPU is that of the slowest."""

    def total(name: str) -> Any:
        return sum(getattr(table, name) for table in stages)

    tokens = ("decode_tokens", "mixed_tokens", "sequences", "host_serial", "prefill_base", "expert_tokens")
    attention = ("decode_attention", "mixed_attention", "prefill_attention")
    overlapped = np.max([table.host_overlapped for table in stages], axis=0)
    return replace(stages[0], **{name: total(name) for name in (*tokens, *attention)}, host_overlapped=overlapped)


Times = BatchTimes | StageTimes
"""Of one rank: without a pipeline, or with one."""


def whole(times: Times) -> BatchTimes:
    """The tables themselves, or those of all stages together."""
    return times.together if isinstance(times, StageTimes) else times
