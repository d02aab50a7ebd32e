"""Hyper-connections (DeepSeek-V4): shape, least cost, and a curve over tokens for each side and hidden size."""

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, held_below
from windtunnel.perf.database import Columns, Measured, Table, medians
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes


@dataclass(frozen=True)
class HyperConnection(Kernel):
    """One side of a hyper-connection for ``a`` tokens: mixtures read from ``streams`` residuals, or written to them."""

    error_family: ClassVar[str] = "hyper_connection"

    side: str
    """``pre``: what attention or network reads, and how to write; ``post``: what they return, and the streams mixed."""
    hidden: int
    streams: int

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """``pre``: the product for all mixtures and the mixture read; ``post``: what is written and the streams
        mixed."""
        if self.side == "pre":
            return 2.0 * (self._mixtures + 1) * self.streams * self.hidden * a
        return 2.0 * (self.streams + 1) * self.streams * self.hidden * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """16-bit streams in and one row out with 32-bit weights, or streams and a row in and streams out."""
        row = 2.0 * self.hidden
        if self.side == "pre":
            return (self.streams + 1) * row * a + 4.0 * self._mixtures * self.streams * self.hidden
        return (2 * self.streams + 1) * row * a

    @property
    def _mixtures(self) -> int:
        return (2 + self.streams) * self.streams

    def describe(self) -> str:
        """Streams and hidden size."""
        return f"{self.streams} × {self.hidden}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the table of hyper-connections."""
        return known.table(HyperConnectionTable).times(self, a)


ENGINES = ("vllm", "sglang", "trtllm")
"""vLLM and SGLang have the same TileLang kernels: where one lacks the table, or few tokens, the other answers."""

Points = dict[int, float]
"""Tokens -> seconds of one hyper-connection."""


class HyperConnectionTable(Table):
    """The table of manifold-constrained hyper-connections of one database."""

    def times(self, kernel: HyperConnection, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` tokens, or None without a table; other sizes take the efficiency of the nearest."""
        if not self._tables:
            return None
        measured = self._nearest(kernel)
        curve, own = self.once(self._curve, measured)
        found = held_below(curve, a, kernel.least(self.device))
        if measured != kernel:
            return found.modelled()
        borrowed = ~np.isin(a, np.array(list(own), dtype=float))
        sources = np.where(borrowed, np.maximum(found.sources, INTERPOLATED), found.sources).astype(np.int8)
        return replace(found, sources=sources)

    def _nearest(self, kernel: HyperConnection) -> HyperConnection:
        """What was measured that is most alike."""
        tables = self._tables.values()
        sizes = {(int(h), int(s)) for t in tables for h, s in zip(t["hidden_size"], t["hc_mult"], strict=True)}
        hidden, streams = min(sizes, key=lambda each: (abs(np.log(each[0] / kernel.hidden)), each))
        return replace(kernel, hidden=hidden, streams=streams)

    def _curve(self, kernel: HyperConnection) -> tuple[Curve, Points]:
        """Over the engine's own points, which come too, and another's of fewer tokens than it measured: medians of one
        of the ``num_sites`` that a row adds up, around attention and around the network."""
        points: Points = {}
        own: Points = {}
        for engine, table in self._tables.items():
            rows = table.where(op_name=kernel.side, hidden_size=kernel.hidden, hc_mult=kernel.streams)
            found = medians(rows["num_tokens"], rows["latency"] * 1e-3 / rows["num_sites"])
            points = {x: t for x, t in found.items() if not points or x < min(points)} | points
            own = points if engine == self.backend else own
        x = np.array(sorted(points), dtype=float)
        seconds = np.array([points[int(each)] for each in x])
        return Curve(x, kernel.least(self.device)(x) / seconds), own

    @cached_property
    def _tables(self) -> dict[str, Columns]:
        texts = ("op_name", "kernel_source")
        read = {each: self.database.read_of(each, "mhc", "mhc_module_perf", texts) for each in self.engines(*ENGINES)}
        return {engine: table for engine, table in read.items() if table is not None}
