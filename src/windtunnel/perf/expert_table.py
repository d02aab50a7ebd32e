"""Measured mixtures of experts: a curve over tokens per layer shape and kernel; other shapes by the nearest one's
efficiency."""

from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import INTERPOLATED, OTHER_SHAPE, Answer, note_once
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.costs import experts_touched
from windtunnel.perf.curves import Curve
from windtunnel.perf.database import Database
from windtunnel.perf.expert_rows import ExpertRows, Shape
from windtunnel.perf.kernels import Experts
from windtunnel.perf.roofline import bound

LANES = {
    "bfloat16": ("bfloat16",),
    "float16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "mxfp8": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "int4": ("int4_wo",),
}
"""Our weight formats as ``moe_dtype`` calls them, the first that was measured."""

WIDENED = {"mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")}
"""The same where activations keep 16 bits."""

ENGINES = ("vllm", "sglang", "trtllm")

FASTER = 1.25
"""Another engine's measurement of the same format counts where it is this many times faster in the median: engines
ship the same libraries (Triton, CUTLASS, trtllm-gen, DeepGEMM, Marlin), and users keep the fastest that they have."""

MOST_TOUCHED = 0.98
"""Share of the experts beyond which a batch counts as touching all."""

SUSPECT = 1.2
"""A quantised curve that takes longer than this times its bfloat16 sibling, in the median, is a slow kernel that no
user keeps (fp8 on H100 and H200 in vLLM 0.24.0: 2.2 to 2.5 times); where nobody measured a faster one, it is replaced
by TYPICAL times the sibling."""

TYPICAL = 0.7
"""8-bit over bfloat16 experts in the stacks of the database whose kernels are tuned: 0.57 to 0.80."""


UNGATED = {(2688, 1856), (1024, 2688), (4096, 2688), (2048, 5120), (8192, 5120)}
"""(hidden, intermediate) sizes of experts without a gate: Nemotron-3's (vLLM 0.24 and TensorRT-LLM measured them with
two matrices, 2.55 GB a layer of Nano in 0.86 ms on an H100; SGLang with three)."""


def routing(num_experts: int) -> str:
    """How uneven tokens choose experts, one of the measured distributions.

    A power law with exponent 1.2 for up to 128 experts, and the milder 1.01 for larger layers, whose routers are
    trained with a balancing bias (DeepSeek-V3). The kernel database's package chooses the same by model family.
    """
    return "power_law_1.01" if balanced(num_experts) else "power_law_1.2"


def balanced(num_experts: int) -> bool:
    """Whether the router of a layer is taken for trained with a balancing bias."""
    return num_experts > 128


@dataclass(eq=False)
class ExpertTable:
    """The MoE tables of one database, and those of other engines on the same device."""

    database: Database
    device: Device
    causes: Causes = ALL
    notes: list[str] = field(default_factory=list)
    """What was replaced or taken from another shape, for the provenance."""
    _rows: dict[str, ExpertRows] = field(default_factory=dict)
    _chosen: dict[tuple[Experts, str], tuple[Curve, str] | None] = field(default_factory=dict)

    def times(self, kernel: Experts, a: Floats) -> Answer | None:
        """Seconds for ``a`` tokens of all ranks, or None without a table."""
        lanes = LANES.get(kernel.dtype, ())
        lanes = WIDENED.get(kernel.dtype, lanes) if kernel.weight_only else lanes
        for lane in lanes:
            found = self._from_lane(kernel, lane, a)
            if found is not None:
                return found if lane == lanes[0] else found.modelled()
        found = self._from_lane(kernel, "bfloat16", a)
        return found.modelled() if found is not None else None

    def _from_lane(self, kernel: Experts, lane: str, a: Floats) -> Answer | None:
        chosen = self._best(kernel, lane)
        if chosen is None:
            return self._from_nearest(kernel, lane, a)
        curve, engine = chosen
        found = curve.times(a, bound(kernel, self.device, a, np.zeros_like(a)))
        found = self._touching(kernel, lane, engine, a, found)
        if lane != "bfloat16" and self._suspect(kernel, curve):
            return self._typical(kernel, lane, a, found)
        if engine == self.database.backend:
            return found
        note_once(
            self.notes, f"{lane} experts {_text(kernel)}: kernels as measured by {engine} on {self.database.system}"
        )
        return replace(found, sources=np.maximum(found.sources, INTERPOLATED))

    def _touching(self, kernel: Experts, lane: str, engine: str, a: Floats, found: Answer) -> Answer:
        """With a balancing bias, at least the time of as many experts as independent tokens touch: the measured power
        law reads fewer weights in small batches, and even choice, which never meets twice, more. Without, favourites
        are met again (gpt-oss and Qwen3-235B decode 10 to 20 % faster than with independent tokens)."""
        independent = self.causes.expert_imbalance and balanced(kernel.num_experts)
        even = self._of(engine).curve(kernel, lane, "balanced") if independent else None
        if even is None:
            return found
        touched = experts_touched(kernel, a) * kernel.ep / kernel.top_k
        same = np.clip(np.minimum(touched, a), even.knots[0], even.knots[-1])
        small = touched * kernel.top_k < MOST_TOUCHED * kernel.num_experts
        least = even.times(same, bound(kernel, self.device, same, np.zeros_like(same))).seconds
        longer = small & (least > found.seconds)
        sources = np.where(longer, np.maximum(found.sources, INTERPOLATED), found.sources).astype(np.int8)
        return replace(found, seconds=np.where(longer, least, found.seconds), sources=sources)

    def _best(self, kernel: Experts, lane: str) -> tuple[Curve, str] | None:
        """The curve of this very shape and its engine: the own, unless another's is FASTER; None where nobody has
        it."""
        if (kernel, lane) not in self._chosen:
            best: tuple[Curve, str] | None = None
            for engine in self._engines():
                curve = self._of(engine).curve(kernel, lane, self._distribution(kernel))
                if curve is not None and (best is None or self._ratio(best[0], curve) > FASTER):
                    best = curve, engine
            self._chosen[kernel, lane] = best
        return self._chosen[kernel, lane]

    def _engines(self) -> tuple[str, ...]:
        own = self.database.backend
        return (own, *(name for name in ENGINES if name != own)) if self.causes.kernel_choice else (own,)

    def _of(self, engine: str) -> ExpertRows:
        if engine not in self._rows:
            other = None if engine == self.database.backend else engine
            self._rows[engine] = ExpertRows(self.database, self.device, other, self.causes.kernel_choice)
        return self._rows[engine]

    def _distribution(self, kernel: Experts) -> str:
        return routing(kernel.num_experts) if self.causes.expert_imbalance else "balanced"

    def _from_nearest(self, kernel: Experts, lane: str, a: Floats) -> Answer | None:
        """The times of the nearest shapes at equal tokens per expert: what exceeds the launch grows with the least
        times."""
        shapes: list[tuple[Shape, float]] = []
        launch = 0.0
        for engine in self._engines():
            if not shapes:
                shapes = self._of(engine).nearest(kernel, lane, self._distribution(kernel))
                launch = self._of(engine).launch(lane, self._distribution(kernel))
        if not shapes:
            return None
        named = ", ".join("×".join(map(str, shape)) for shape, _ in shapes)
        note_once(self.notes, f"experts {_text(kernel)}: from those of {named}")
        logs = [
            weight * np.log(self._as_if(kernel, shaped(kernel, shape), lane, a, launch)) for shape, weight in shapes
        ]
        return Answer(np.exp(sum(logs)), np.full(a.shape, 2, dtype=np.int8), np.full(a.shape, OTHER_SHAPE))

    def _as_if(self, kernel: Experts, other: Experts, lane: str, a: Floats, launch: float) -> Floats:
        """Seconds as another shape would have them, where its experts get as many tokens."""
        best = self._best(other, lane)
        assert best is not None
        load = kernel.top_k / kernel.num_experts / (other.top_k / other.num_experts)
        x = np.clip(a * load, best[0].knots[0], best[0].knots[-1])
        found = self._from_lane(other, lane, x)
        assert found is not None
        least, zero = np.minimum(launch, found.seconds), np.zeros_like(x)
        ratio = bound(kernel, self.device, a, zero) / bound(other, self.device, x, zero)
        return np.asarray(least + (found.seconds - least) * ratio)

    def _suspect(self, kernel: Experts, curve: Curve) -> bool:
        if not self.causes.host_bound_tables:
            return False
        plain = self._of(self.database.backend).curve(plainly(kernel), "bfloat16", self._distribution(kernel))
        return plain is not None and self._ratio(curve, plain, kernel, plainly(kernel)) > SUSPECT

    def _typical(self, kernel: Experts, lane: str, a: Floats, found: Answer) -> Answer:
        sibling = self._from_lane(plainly(kernel), "bfloat16", a)
        if sibling is None:
            return found
        note_once(
            self.notes, f"{lane} experts {_text(kernel)} measured slower than bfloat16: replaced by {TYPICAL}× bfloat16"
        )
        return replace(sibling.modelled(), seconds=TYPICAL * sibling.seconds)

    def _ratio(self, one: Curve, other: Curve, first: Experts | None = None, second: Experts | None = None) -> float:
        """Median time of one curve over another at the tokens of both; 0 without common ones."""
        x = np.intersect1d(one.knots, other.knots)
        if not len(x):
            return 0.0
        least, zero = np.ones_like(x), np.zeros_like(x)
        if first is not None and second is not None:
            ratio = bound(first, self.device, x, zero) / bound(second, self.device, x, zero)
        else:
            ratio = least
        return float(np.median(ratio * other.at(x) / one.at(x)))


def plainly(kernel: Experts) -> Experts:
    """The same layer with 16-bit weights."""
    return replace(kernel, dtype="bfloat16", weight_only=False)


def shaped(kernel: Experts, shape: Shape) -> Experts:
    """The same kind of layer with other sizes, gated as its model is."""
    hidden, inter, top_k, num_experts, tp, ep = shape
    gated = (hidden, inter) not in UNGATED
    return replace(kernel, hidden=hidden, inter=inter, top_k=top_k, num_experts=num_experts, tp=tp, ep=ep, gated=gated)


def _text(kernel: Experts) -> str:
    return f"{kernel.num_experts}×{kernel.hidden}×{kernel.inter}"
