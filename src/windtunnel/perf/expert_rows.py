"""One engine's table of measured experts: which shapes it holds, and a curve over tokens for each."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.competing_curve import CompetingCurve, by_logs, by_touched, straight
from windtunnel.perf.curves import Curve
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import Experts
from windtunnel.perf.roofline import least_seconds

SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")

NEIGHBOURS = 3
DISTANCE = (0.7, 3.0, 0.25, 2.0, 2.0, 0.15, 0.01)
"""What an octave counts in: local slice, hidden size, local experts, experts, choices of a token, ep, tp. Of five tried
on shapes left out of the tables of H100 (vLLM) and B200 (SGLang), the best in most formats and never far from it."""
LEAST_DISTANCE = 0.1

OUTLIER = 1.15
"""More tokens never need less work: a point this many times slower than one with more tokens is dropped (balanced
choice of 128 experts by vLLM on RTX PRO 6000 takes 27 % longer for 16 and 32 tokens than for 48)."""

Shape = tuple[int, int, int, int, int, int]


@dataclass(eq=False)
class ExpertRows:
    """The MoE table of one engine on the device of a database."""

    database: Database
    device: Device
    backend: str | None
    """Another engine than the database's own."""
    fastest: bool
    """Of several kernels for one shape take the fastest, not the one with most rows, and no outliers."""
    _columns: Columns | None = None
    _read: bool = False
    _parts: dict[tuple[str, str], tuple[Columns, NDArray[np.int64]] | None] = field(default_factory=dict)

    def curve(self, kernel: Experts, lane: str, distribution: str) -> Curve | None:
        """Efficiency over tokens of this very shape, or None."""
        part = self._part(lane, distribution)
        if part is None:
            return None
        columns, sizes = part
        shape = (kernel.hidden, kernel.inter, kernel.top_k, kernel.num_experts, kernel.tp, kernel.ep)
        rows = columns.take(np.flatnonzero((sizes == np.array(shape)).all(axis=1)))
        if not len(rows):
            return None
        codes = rows.texts["kernel_source"][0]
        if self.fastest:
            rows = rows.take(codes == _fastest(rows, codes))
            codes = rows.texts["kernel_source"][0]
        rows = rows.take(one_per_key([rows["num_tokens"]], rows["latency"], codes))
        if self.fastest:
            least_later = np.minimum.accumulate(rows["latency"][::-1])[::-1]
            rows = rows.take(rows["latency"] <= OUTLIER * least_later)
        return experts_curve(kernel, self.device, rows["num_tokens"].astype(float), rows["latency"] * 1e-3)

    def nearest(self, kernel: Experts, lane: str, distribution: str) -> list[tuple[Shape, float]]:
        """The NEIGHBOURS measured shapes most like a layer, with their weights, 1 together: DISTANCE weighs the octaves
        between their sizes, and a shape counts by its distance to minus the second power."""
        part = self._part(lane, distribution)
        if part is None:
            return []
        shapes = np.unique(part[1], axis=0)
        wanted = np.array((kernel.hidden, kernel.inter, kernel.top_k, kernel.num_experts, kernel.tp, kernel.ep))
        distance = np.abs(_octaves(shapes.astype(float)) - _octaves(wanted.astype(float))) @ np.array(DISTANCE)
        chosen = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        weights = (distance[chosen] + LEAST_DISTANCE) ** -2
        found = zip(shapes[chosen].tolist(), (weights / weights.sum()).tolist(), strict=True)
        return [(tuple(shape), weight) for shape, weight in found]

    def launch(self, lane: str, distribution: str) -> float:
        """Seconds that a layer takes however little it has to do: the least of the table."""
        part = self._part(lane, distribution)
        return 0.0 if part is None else float(part[0]["latency"].min()) * 1e-3

    def _part(self, lane: str, distribution: str) -> tuple[Columns, NDArray[np.int64]] | None:
        """Rows of a format and a distribution with their sizes."""
        if (lane, distribution) not in self._parts:
            table = self._table()
            part = None if table is None else table.where(moe_dtype=lane, distribution=distribution)
            empty = part is None or not len(part)
            self._parts[lane, distribution] = (
                None if part is None or empty else (part, np.stack([part[name] for name in SIZES], axis=1))
            )
        return self._parts[lane, distribution]

    def _table(self) -> Columns | None:
        if not self._read:
            texts = ("moe_dtype", "distribution", "kernel_source")
            self._columns, self._read = self.database.read("moe", "moe_perf", texts, self.backend), True
        return self._columns


def experts_curve(kernel: Experts, device: Device, tokens: Floats, seconds: Floats) -> CompetingCurve:
    """A layer's times over tokens, read as they grow with tokens, with experts that are touched, or in steps."""
    least = least_seconds(kernel, device)
    readings = (by_logs, straight, by_touched(kernel.num_experts / kernel.top_k))
    return CompetingCurve(tokens, least(tokens) / seconds, least, readings)


def _octaves(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 7] log2 of what DISTANCE weighs, from [..., 6] SIZES."""
    hidden, inter, top_k, num_experts, tp, ep = np.moveaxis(sizes, -1, 0)
    return np.asarray(np.log2(np.stack([inter / tp, hidden, num_experts / ep, num_experts, top_k, ep, tp], axis=-1)))


def _fastest(rows: Columns, codes: NDArray[np.int64]) -> int:
    """The kernel with the least time over the token counts that every kernel with half of them or more has."""
    kernels = np.unique(codes)
    tokens = [np.unique(rows["num_tokens"][codes == code]) for code in kernels]
    most = max(map(len, tokens))
    whole = [code for code, own in zip(kernels, tokens, strict=True) if 2 * len(own) >= most]
    common = np.array(sorted(set.intersection(*(set(tokens[i]) for i, code in enumerate(kernels) if code in whole))))

    def spent(code: int) -> float:
        mine = (codes == code) & np.isin(rows["num_tokens"], common)
        return float(np.mean(np.log(rows["latency"][mine]))) if mine.any() else float("inf")

    return int(min(whole, key=spent))
