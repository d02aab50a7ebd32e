"""Hyper-connections (DeepSeek-V4): shape, least cost, and a curve over tokens for each side and hidden size."""

from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, held_below
from windtunnel.perf.database import Columns, Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes


@dataclass(frozen=True)
class HyperConnection(Kernel):
    """One side of a hyper-connection for ``a`` tokens: mixtures read from ``streams`` residuals, or written to them."""

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

    @property
    def error_family(self) -> str:
        """One for both sides."""
        return "hyper_connection"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the table of hyper-connections."""
        return known.table(HyperConnectionTable).times(self, a)


ENGINES = ("vllm", "sglang", "trtllm")
"""vLLM and SGLang have the same TileLang kernels: where one lacks the table, or few tokens, the other answers."""

Points = dict[int, float]
"""Tokens -> seconds of one hyper-connection."""


@dataclass(eq=False)
class HyperConnectionTable:
    """The table of manifold-constrained hyper-connections of one database."""

    known: Measured
    _columns: dict[str, Columns | None] = field(default_factory=dict)
    _curves: dict[HyperConnection, tuple[Curve, Points]] = field(default_factory=dict)

    def times(self, kernel: HyperConnection, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` tokens, or None without a table; other sizes take the efficiency of the nearest."""
        if self._table(self.known.database.backend) is None and not self._others():
            return None
        measured = self._nearest(kernel)
        if measured not in self._curves:
            self._curves[measured] = self._curve(measured)
        curve, own = self._curves[measured]
        found = held_below(curve, a, kernel.least(self.known.device))
        if measured != kernel:
            return found.modelled()
        borrowed = ~np.isin(a, np.array(list(own), dtype=float))
        sources = np.where(borrowed, np.maximum(found.sources, INTERPOLATED), found.sources).astype(np.int8)
        return replace(found, sources=sources)

    def _nearest(self, kernel: HyperConnection) -> HyperConnection:
        """What was measured that is most alike."""
        tables = [self._table(engine) for engine in (self.known.database.backend, *self._others())]
        sizes = {(int(h), int(s)) for t in tables if t for h, s in zip(t["hidden_size"], t["hc_mult"], strict=True)}
        hidden, streams = min(sizes, key=lambda each: (abs(np.log(each[0] / kernel.hidden)), each))
        return replace(kernel, hidden=hidden, streams=streams)

    def _curve(self, kernel: HyperConnection) -> tuple[Curve, Points]:
        """Over the engine's own points, and another's of fewer tokens than it measured."""
        own = self._points(kernel, self.known.database.backend)
        points = own
        for engine in self._others():
            points = {x: t for x, t in self._points(kernel, engine).items() if not points or x < min(points)} | points
        x = np.array(sorted(points), dtype=float)
        seconds = np.array([points[int(each)] for each in x])
        return Curve(x, kernel.least(self.known.device)(x) / seconds), own

    def _points(self, kernel: HyperConnection, engine: str) -> Points:
        """Medians of one of the ``num_sites`` that a row adds up: around attention, and around the network."""
        table = self._table(engine)
        if table is None:
            return {}
        rows = table.where(op_name=kernel.side, hidden_size=kernel.hidden, hc_mult=kernel.streams)
        tokens, each = rows["num_tokens"], rows["latency"] * 1e-3 / rows["num_sites"]
        return {int(x): float(np.median(each[tokens == x])) for x in np.unique(tokens)}

    def _others(self) -> list[str]:
        return [each for each in ENGINES if each != self.known.database.backend and self._table(each) is not None]

    def _table(self, engine: str) -> Columns | None:
        if engine not in self._columns:
            texts = ("op_name", "kernel_source")
            self._columns[engine] = self.known.database.read_of(engine, "mhc", "mhc_module_perf", texts)
        return self._columns[engine]
