"""Tabulated: batch-time tables with their shares by source and by kind of operator."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from windtunnel.perf.answer import SOURCES
from windtunnel.perf.axes import Axes
from windtunnel.perf.batch_times import BatchTimes, Floats
from windtunnel.perf.stage_times import StageTimes, added

PARTS = (
    *("decode_tokens", "mixed_tokens", "sequences"),
    *("decode_attention", "mixed_attention", "prefill_attention", "expert_tokens"),
)
"""The tables of BatchTimes that hold GPU seconds, and so the tables that are split by source and by group."""


@dataclass(frozen=True, eq=False)
class Tabulated:
    """Tables of a pool and where they come from."""

    times: BatchTimes
    """Of a pipeline: a batch in all its stages one after the other."""
    sources: dict[str, BatchTimes]
    """``measured``, ``interpolated``, ``modelled``: tables of the same shape with the seconds from each source; their
    sum is ``times``. They hold no host work: ``sources[name].rank(…)`` is the GPU time of a batch from that source."""
    groups: dict[str, BatchTimes]
    """The same split by ``gemm``, ``attention``, ``experts``, ``communication``, ``other``."""
    provenance: tuple[dict[str, Any], ...]
    """One row per operator: name, group, phase, count, kernel, kind of source, table file."""
    notes: tuple[str, ...] = ()
    """What a reader of results should know about the kernel times."""
    pipeline: StageTimes | None = None
    """The stages, where there are several."""
    doubts: dict[str, BatchTimes] = field(default_factory=dict)
    """``error``: seconds times their relative error, those of all kernels added up. ``beyond``: seconds of kernels that
    were asked beyond the data, or on a device that has none. Neither holds host work.
    Empty where nobody knows."""

    def scaled(self, factor: float) -> "Tabulated":
        """The same with all times multiplied by a factor; their shares stay as they are."""
        pipeline = self.pipeline.scaled(factor) if self.pipeline else None
        return replace(self, times=self.times.scaled(factor), pipeline=pipeline)


@dataclass(eq=False)
class Sums:
    """Running sums of one split of the tables."""

    axes: Axes
    tables: dict[str, Floats] = field(default_factory=dict)
    base: float = 0.0

    def add(self, part: str, seconds: Floats) -> None:
        """Add seconds to a table."""
        if part in self.tables:
            self.tables[part] += seconds
        else:
            self.tables[part] = np.array(seconds, dtype=float)

    def times(self, overlapped: Floats | None = None, serial: Floats | None = None) -> BatchTimes:
        """The sums as tables; without host work they are a share of a batch."""
        ax = self.axes
        none = np.zeros(ax.max_num_seqs + 1)
        shapes = part_shapes(ax)
        return BatchTimes(
            **{part: self.tables.get(part, np.zeros(shapes[part])) for part in PARTS},
            host_overlapped=none if overlapped is None else overlapped,
            host_serial=none if serial is None else serial,
            context_knots=ax.context_knots,
            chunk_knots=ax.chunk_knots,
            prefill_base=self.base,
            padded=ax.padded,
            graph_tokens=ax.graph_tokens,
        )


def in_a_pipeline(stages: list[Tabulated], sends: Floats) -> Tabulated:
    """The tables of all stages as one."""
    first = stages[0]
    staged = StageTimes(tuple(stage.times for stage in stages), sends)
    rows = tuple(
        row if "operator" not in row else {"stage": i, **row}
        for i, stage in enumerate(stages)
        for row in stage.provenance
        if i == 0 or "operator" in row
    )
    return Tabulated(
        times=staged.together,
        sources={name: added([stage.sources[name] for stage in stages]) for name in first.sources},
        groups={name: added([stage.groups[name] for stage in stages]) for name in first.groups},
        provenance=rows,
        notes=tuple(dict.fromkeys(note for stage in stages for note in stage.notes)),
        pipeline=staged,
        doubts={name: added([stage.doubts[name] for stage in stages]) for name in first.doubts},
    )


DOUBTS = ("error", "beyond")


def part_shapes(ax: Axes) -> dict[str, tuple[int, ...]]:
    """Shapes of the tables in PARTS."""
    tokens, sequences, contexts = len(ax.padded), ax.max_num_seqs + 1, len(ax.context_knots)
    return {
        "decode_tokens": (tokens,),
        "mixed_tokens": (tokens,),
        "sequences": (sequences,),
        "decode_attention": (sequences, contexts),
        "mixed_attention": (sequences, contexts),
        "prefill_attention": (len(ax.chunk_knots), contexts),
        "expert_tokens": (ax.ranks * ax.max_num_batched_tokens + 1 if ax.ranks > 1 else 1,),
    }


def total(sources: dict[str, Sums]) -> Sums:
    """The tables of all sources together, added in the order of SOURCES, so that equal shares give equal bits."""
    ax = sources[SOURCES[0]].axes
    found = Sums(ax, {part: np.zeros(shape) for part, shape in part_shapes(ax).items()})
    for name in SOURCES:
        for part, seconds in sources[name].tables.items():
            found.add(part, seconds)
        found.base += sources[name].base
    return found
