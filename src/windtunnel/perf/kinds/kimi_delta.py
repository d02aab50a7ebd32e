"""Kimi delta attention: shape, least cost, and the kernels of a layer added up, a curve over requests (decode) or
tokens (prefill).

Engines have several kernels for one job, some of which do the work of two: each way through them is a chain, and the
fastest is taken. The preview of vLLM that was measured waited 0.8 ms for the host in front of every convolution of a
prompt; another engine's convolution stands in for it.
"""

from typing import ClassVar

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend, octaves
from windtunnel.perf.between.planes import BEYOND_CACHE
from windtunnel.perf.database import Columns, Measured, Table, medians
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes
from windtunnel.perf.kinds.recurrence import PHASES, Recurrence, of_phase


@dataclass(frozen=True)
class KimiDelta(Recurrence):
    """A recurrence whose key channels each decay at a rate of their own."""

    error_family: ClassVar[str] = "kimi_delta"

    @property
    def decays(self) -> int:
        """One for each key channel."""
        return self.key_heads * self.key_dim

    @property
    def efficiency_family(self) -> str:
        """Families differ by phase."""
        return f"kimi_delta_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of Kimi delta attention."""
        return known.table(KimiDeltaTable).times(self, a)


CONVOLUTION = "causal_conv1d_fn_qkv3"
CHAINS: dict[str, tuple[tuple[str, ...], ...]] = {
    "decode": (
        ("causal_conv1d_update", "fused_recurrent_kda_packed_decode"),
        ("fused_kda_decode",),
        ("kda_fused_decode",),
    ),
    "prefill": ((CONVOLUTION, "flashkda_fwd"), (CONVOLUTION, "chunk_kda"), (CONVOLUTION, "chunk_kda_with_fused_gate")),
}
"""Phase -> ways through the kernels of a layer, by their names in the tables of vLLM and SGLang. What a kernel fuses:
``ops.fused_kda_decode`` in vllm/models/kimi_k3/nvidia/kda.py."""

ENGINES = ("vllm", "sglang")
"""Where an engine lacks the table, another's answers."""

HEAD_DIM, CONV_KERNEL = 128, 4
"""Of the layers in the tables (Kimi-K3's config.json); the number of heads is the local one."""

HOST_BOUND = 10.0
"""A convolution of few tokens that takes this many times another engine's waited for the host."""

Points = dict[int, float]
"""Requests or tokens -> seconds."""


class KimiDeltaTable(Table):
    """The tables of Kimi delta attention of one database."""

    def times(self, kernel: KimiDelta, a: Floats) -> KernelTimes | None:
        """Seconds of convolution and recurrence for ``a`` requests or tokens, or None without a table.

        Between two measured numbers of heads times are interpolated in log-log. Beyond them equal numbers of states
        take equal time in decodes, and fewer heads the time of the fewest in prompts, where they run side by side
        (modelled); so are other sizes of heads, by their least times.
        """
        engine = next((name for name in self.engines(*ENGINES) if self._table(name) is not None), None)
        if engine is None:
            return None
        if engine != self.backend:
            self.note(f"Kimi delta attention of {self.backend} is taken from {engine}'s measurements")
        known = np.unique(self._rows(engine).where(phase=PHASES[kernel.phase])["num_v_heads"]).astype(float)
        parts = [(int(known[i]), weight) for i, weight in blend(known, float(kernel.value_heads))]
        answers = [self._of_heads(kernel, a, heads, engine) for heads, _ in parts]
        logs = sum(weight * np.log(found.seconds) for (_, weight), found in zip(parts, answers, strict=True))
        nearest = answers[int(np.argmax([weight for _, weight in parts]))]
        away = float(octaves(known, np.array([float(kernel.value_heads)]))[0])
        between = INTERPOLATED * (len(parts) > 1)
        found = KernelTimes(
            np.exp(logs) * self._other_sizes(kernel, a),
            np.maximum(nearest.sources, between).astype(np.int8),
            np.hypot(nearest.distance, away),
        )
        inside = known[0] <= kernel.value_heads <= known[-1]
        return found if inside and _measured(kernel.phase, kernel.value_heads) == kernel else found.modelled()

    def _of_heads(self, kernel: KimiDelta, a: Floats, heads: int, engine: str) -> KernelTimes:
        """The kernel as if it had a measured number of heads."""
        curve, borrowed = self.once(self._curve, kernel.phase, heads, engine)
        measured, x = _measured(kernel.phase, heads), a
        if kernel.phase == "decode":
            x = np.maximum(a * (kernel.value_heads / heads), 1.0)
        found = curve.times(x, measured.bound(self.device, x, np.zeros_like(x)))
        sources = np.maximum(found.sources, INTERPOLATED * borrowed).astype(np.int8)
        return KernelTimes(self._cold(measured, curve, x, found.seconds), sources, found.distance)

    def _cold(self, measured: KimiDelta, curve: Curve, x: Floats, seconds: Floats) -> Floats:
        """No faster than the best rate of states that no cache holds: those of all layers do not stay in one."""
        moved = measured.bytes_moved(curve.knots, np.zeros_like(curve.knots))
        large = moved > BEYOND_CACHE
        if measured.phase == "prefill" or not self.known.corrections.cold_cache or not large.any():
            return seconds
        taken = measured.bound(self.device, curve.knots, np.zeros_like(curve.knots)) / curve.efficiency
        rate = float((moved[large] / taken[large]).max())
        return np.maximum(seconds, measured.bytes_moved(x, np.zeros_like(x)) / rate)

    def _other_sizes(self, kernel: KimiDelta, a: Floats) -> Floats:
        """Least times of the kernel over those of one with heads as measured."""
        zero = np.zeros_like(a)
        same = _measured(kernel.phase, kernel.value_heads)
        return np.asarray(kernel.bound(self.device, a, zero) / same.bound(self.device, a, zero))

    def _curve(self, phase: str, heads: int, engine: str) -> tuple[Curve, bool]:
        """The fastest chain at each point, and whether another engine's kernel is in it."""
        kernels = self._kernels(phase, heads, engine)
        other = self._believed_convolution(heads, engine, kernels)
        if other:
            kernels[CONVOLUTION] = other
        fastest: Points = {}
        for chain in CHAINS[phase]:
            parts = [kernels.get(name, {}) for name in chain]
            for point in set.intersection(*(set(part) for part in parts)):
                fastest[point] = min(fastest.get(point, np.inf), sum(part[point] for part in parts))
        x = np.array(sorted(fastest), dtype=float)
        seconds = np.array([fastest[int(point)] for point in x])
        least = _measured(phase, heads).bound(self.device, x, np.zeros_like(x))
        return Curve(x, least / seconds), bool(other) or engine != self.backend

    def _believed_convolution(self, heads: int, engine: str, kernels: dict[str, Points]) -> Points | None:
        """Another engine's convolution of prompts where this one's waited for the host."""
        own = kernels.get(CONVOLUTION)
        if not own or not self.known.corrections.host_bound_tables:
            return None
        for name in ENGINES:
            if name == engine or self._table(name) is None:
                continue
            other = self._kernels("prefill", heads, name).get(CONVOLUTION)
            if other and min(own.values()) > HOST_BOUND * min(other.values()):
                self.note(f"convolutions of Kimi delta attention of {engine} are taken from {name}'s measurements")
                return other
        return None

    def _kernels(self, phase: str, heads: int, engine: str) -> dict[str, Points]:
        """The median of each kernel at each point."""
        rows, axis = of_phase(self._rows(engine), phase, num_v_heads=heads)
        codes, names = rows.texts["kernel_source"]
        found = {names[code]: medians(axis[codes == code], rows["latency"][codes == code]) for code in np.unique(codes)}
        return {name: {x: ms * 1e-3 for x, ms in points.items()} for name, points in found.items()}

    def _rows(self, engine: str) -> Columns:
        columns = self._table(engine)
        assert columns is not None
        return columns

    def _table(self, engine: str) -> Columns | None:
        return self.database.read_of(engine, "kda", "kda_perf", ("kernel_source", "phase"))


def _measured(phase: str, heads: int) -> KimiDelta:
    return KimiDelta(phase, heads, heads, HEAD_DIM, HEAD_DIM, CONV_KERNEL)
