"""Measured mixtures of experts: a curve over tokens per layer shape; other shapes by the nearest one's efficiency."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.answer import Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Curve
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import Experts
from windtunnel.perf.roofline import bound

SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")

LANES = {
    "bfloat16": ("bfloat16",),
    "float16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
    "int4": ("int4_wo",),
}
"""Our weight formats as ``moe_dtype`` calls them, the first that was measured."""

SUSPECT = 1.2
"""A quantised curve that takes longer than this times its bfloat16 sibling, in the median, is a slow kernel that no
user keeps (fp8 on H100 and H200 in vLLM 0.24.0: 2.2 to 2.5 times); it is replaced by TYPICAL times the sibling."""

TYPICAL = 0.7
"""8-bit over bfloat16 experts in the stacks of the database whose kernels are tuned: 0.57 to 0.80."""

Shape = tuple[int, int, int, int, int, int]


def routing(num_experts: int) -> str:
    """How uneven tokens choose experts, one of the measured distributions.

    A power law with exponent 1.2 for up to 128 experts, and the milder 1.01 for larger layers, whose routers are
    trained with a balancing bias (DeepSeek-V3). The kernel database's package chooses the same by model family.
    """
    return "power_law_1.01" if num_experts > 128 else "power_law_1.2"


@dataclass(eq=False)
class ExpertTable:
    """The MoE tables of one database."""

    database: Database
    device: Device
    notes: list[str] = field(default_factory=list)
    """What was replaced or taken from another shape, for the provenance."""
    _columns: Columns | None = None
    _read: bool = False
    _shapes: dict[tuple[str, str], NDArray[np.int64]] = field(default_factory=dict)

    def times(self, kernel: Experts, a: Floats) -> Answer | None:
        """Seconds for ``a`` tokens of all ranks, or None without a table."""
        for lane in LANES.get(kernel.dtype, ()):
            found = self._from_lane(kernel, lane, a)
            if found is not None:
                return found if lane == LANES[kernel.dtype][0] else found.modelled()
        found = self._from_lane(kernel, "bfloat16", a)
        return found.modelled() if found is not None else None

    def _from_lane(self, kernel: Experts, lane: str, a: Floats) -> Answer | None:
        shapes = self._known(lane, routing(kernel.num_experts))
        if not len(shapes):
            return None
        shape = _nearest(kernel, shapes)
        other = _kernel(kernel, shape)
        curve = self._curve(other, lane, shape)
        if other == kernel:
            found = curve.times(a, bound(kernel, self.device, a, np.zeros_like(a)))
            return self._checked(kernel, lane, shape, a, found)
        # efficiency follows the tokens that each expert gets
        load = kernel.top_k / kernel.num_experts / (other.top_k / other.num_experts)
        x = np.clip(a * load, curve.knots[0], curve.knots[-1])
        note = f"experts {kernel.num_experts}×{kernel.hidden}×{kernel.inter}: efficiency of {'×'.join(map(str, shape))}"
        if note not in self.notes:
            self.notes.append(note)
        efficiency = (
            bound(other, self.device, x, np.zeros_like(x))
            / curve.times(x, bound(other, self.device, x, np.zeros_like(x))).seconds
        )
        found = Answer(bound(kernel, self.device, a, np.zeros_like(a)) / efficiency, np.full(a.shape, 2, dtype=np.int8))
        return self._checked(other, lane, shape, a, found, replace(kernel, dtype="bfloat16", weight_only=False))

    def _checked(
        self, measured: Experts, lane: str, shape: Shape, a: Floats, found: Answer, asked: Experts | None = None
    ) -> Answer:
        """The answer, or TYPICAL times bfloat16 where the quantised curve is not to be believed."""
        if lane == "bfloat16" or not self._suspect(measured, lane, shape):
            return found
        plain = asked or replace(measured, dtype="bfloat16", weight_only=False)
        sibling = self._from_lane(plain, "bfloat16", a)
        if sibling is None:
            return found
        note = (
            f"{lane} experts {'×'.join(map(str, shape))} measured slower than bfloat16: replaced by {TYPICAL}× bfloat16"
        )
        if note not in self.notes:
            self.notes.append(note)
        return Answer(TYPICAL * sibling.seconds, sibling.modelled().sources)

    def _suspect(self, measured: Experts, lane: str, shape: Shape) -> bool:
        plain = replace(measured, dtype="bfloat16", weight_only=False)
        if not (self._known("bfloat16", routing(measured.num_experts)) == np.array(shape)).all(axis=1).any():
            return False
        curve, sibling = self._curve(measured, lane, shape), self._curve(plain, "bfloat16", shape)
        x = np.intersect1d(curve.knots, sibling.knots)
        zero = np.zeros_like(x)
        ratio = (
            curve.times(x, bound(measured, self.device, x, zero)).seconds
            / sibling.times(x, bound(plain, self.device, x, zero)).seconds
        )
        return bool(len(ratio)) and float(np.median(ratio)) > SUSPECT

    def _curve(self, kernel: Experts, lane: str, shape: Shape) -> Curve:
        table = self._table()
        assert table is not None
        rows = table.where(moe_dtype=lane, distribution=routing(kernel.num_experts))
        rows = rows.where(**dict(zip(SIZES, shape, strict=True)))
        rows = rows.take(one_per_key([rows["num_tokens"]], rows["latency"], rows.texts["kernel_source"][0]))
        x = rows["num_tokens"].astype(float)
        return Curve(x, bound(kernel, self.device, x, np.zeros_like(x)) / (rows["latency"] * 1e-3))

    def _known(self, lane: str, distribution: str) -> NDArray[np.int64]:
        if (lane, distribution) not in self._shapes:
            table = self._table()
            if table is None:
                return np.zeros((0, len(SIZES)), dtype=np.int64)
            part = table.where(moe_dtype=lane, distribution=distribution)
            shapes = np.unique(np.stack([part[name] for name in SIZES], axis=1), axis=0)
            self._shapes[lane, distribution] = shapes
        return self._shapes[lane, distribution]

    def _table(self) -> Columns | None:
        if not self._read:
            texts = ("moe_dtype", "distribution", "kernel_source")
            self._columns, self._read = self.database.read("moe", "moe_perf", texts), True
        return self._columns


def _kernel(kernel: Experts, shape: Shape) -> Experts:
    hidden, inter, top_k, num_experts, tp, ep = shape
    return replace(kernel, hidden=hidden, inter=inter, top_k=top_k, num_experts=num_experts, tp=tp, ep=ep)


def _nearest(kernel: Experts, shapes: NDArray[np.int64]) -> Shape:
    """The measured shape closest in log distance of: local slice, hidden size, local experts, experts, choices, tp,
    ep."""
    hidden, inter, top_k, num_experts, tp, ep = shapes.T.astype(float)
    distance = (
        np.abs(np.log2(inter / tp * kernel.tp / kernel.inter))
        + np.abs(np.log2(hidden / kernel.hidden))
        + 0.5 * np.abs(np.log2(num_experts / ep * kernel.ep / kernel.num_experts))
        + 0.5 * np.abs(np.log2(num_experts / kernel.num_experts))
        + 0.5 * np.abs(np.log2(top_k / kernel.top_k))
        + 0.5 * np.abs(np.log2(ep / kernel.ep))
        + 0.01 * np.abs(np.log2(tp / kernel.tp))
    )
    return tuple(int(value) for value in shapes[int(np.argmin(distance))])  # type: ignore[return-value]
