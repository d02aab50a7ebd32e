"""StageTimes: how long a batch takes in each stage of a pipeline, and on the way from one stage to the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes, Floats


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
        return StageTimes(tuple(table.scaled(factor) for table in self.stages), self.sends * factor)

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
