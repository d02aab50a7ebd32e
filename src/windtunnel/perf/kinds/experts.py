"""Mixtures of experts: shape, least cost, and a curve over tokens per measured layer shape and kernel; other shapes by
the nearest one's efficiency."""

from dataclasses import field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend, held_below
from windtunnel.perf.between.ensemble import EnsembleCurve, by_logs, by_touched, straight
from windtunnel.perf.database import Columns, Database, Measured, Table, medians, one_per_key
from windtunnel.perf.kernel import LAUNCH_GRAPH, RATES, STORED_BYTES, Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, OTHER_SHAPE, KernelTimes
from windtunnel.perf.kinds.elementwise import BANDWIDTH
from windtunnel.perf.kinds.gemm import Gemm

BLOCK = 128
"""Rows of a block of DeepGEMM's contiguous layout."""
LAYING_OUT = 8
"""Kernels that lay rows out for two grouped products: the cast of tokens, the count of each expert's, two that clear
and fill indices, the copy, the activation, its cast, and the sum of a token's rows."""


@dataclass(frozen=True)
class Experts(Kernel):
    """Routed experts of one layer for ``a`` tokens of all ranks: sizes of the whole layer, shared by tp·ep GPUs."""

    hidden: int
    inter: int
    top_k: int
    num_experts: int
    tp: int = 1
    ep: int = 1
    gated: bool = True
    dtype: str = "bfloat16"
    weight_only: bool = False
    layout: str = ""
    """How DeepEP hands tokens over: ``masked`` (low latency, room for every expert), ``contiguous`` (high throughput),
    or ``auto``: the first for batches of decodes. Empty: every rank sees the tokens of all."""
    backend: str = ""
    """Whose kernel, one of BACKENDS; empty: the fastest."""
    slots: int = 0
    """Places for experts and copies on all GPUs where a load balancer keeps the GPUs' loads even; 0: none does."""
    padded: bool = False
    """Every choice of a token has a row on every GPU, an expert's rows begin a new block of BLOCK, and the blocks that
    the most uneven choice would fill are all multiplied."""

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """A product and a sum for each weight of the experts that a token chooses."""
        return 2.0 * self.weights * self.rows(a)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Weights of the experts touched, tokens in and out of both products."""
        moved = 2.0 * (2.0 * self.hidden + 2.0 * self.inter / self.tp) * self.rows(a)
        return self.touched(a) * self.weights * STORED_BYTES[self.dtype] + moved

    def rows(self, a: Floats) -> Floats:
        """Rows that one GPU multiplies with an expert each."""
        if not self.padded:
            return a * self.top_k / self.ep
        room = self.num_experts / self.ep * (BLOCK - 1)
        return BLOCK * np.ceil((a * self.top_k + room) / BLOCK)

    @property
    def weights(self) -> float:
        """Of one GPU's slice of one expert."""
        return (3.0 if self.gated else 2.0) * self.hidden * self.inter / self.tp

    def touched(self, a: Floats) -> Floats:
        """Expected number of one GPU's experts that get a token when each token draws its experts at random."""
        return self.num_experts / self.ep * (1.0 - (1.0 - self.top_k / self.num_experts) ** a)

    @property
    def rate(self) -> str:
        """That of its weights' format, unless they are widened."""
        return "bfloat16" if self.weight_only else RATES.get(self.dtype, "bfloat16")

    @property
    def launched(self) -> int:
        """One, unless rows are laid out for it."""
        return 2 + LAYING_OUT if self.padded else 1

    def describe(self) -> str:
        """Sizes, sharding and format."""
        sizes = f"{self.num_experts}×({self.hidden}×{self.inter}) top {self.top_k}"
        return f"{sizes} tp={self.tp} ep={self.ep} {self.dtype}"

    @property
    def error_family(self) -> str:
        """Families differ by weight format."""
        return f"experts_{'bfloat16' if self.dtype == 'float16' else self.dtype}"

    @property
    def efficiency_family(self) -> str:
        """Families differ by the rate at which they multiply."""
        return f"experts_{self.rate}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of experts behind DeepEP's exchange, or of experts that see the tokens of all ranks."""
        uneven = replace(self, slots=0)
        found = known.table(WideExpertTable).times(uneven, a) if self.layout else None
        found = known.table(ExpertTable).times(replace(uneven, layout=""), a) if found is None else found
        return known.table(EvenLoads).times(self, a, found) if self.slots and found is not None else found

    def resolved(self, with_prompts: bool) -> Self:
        """With the layout of ``auto`` for a batch."""
        if self.layout != "auto":
            return self
        return replace(self, layout="contiguous" if with_prompts else "masked")


SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")

NEIGHBOURS = 3
DISTANCE = (0.7, 3.0, 0.25, 2.0, 2.0, 0.15, 0.01)
"""What an octave counts in: local slice, hidden size, local experts, experts, choices of a token, ep, tp. Of five tried
on shapes left out of the tables of H100 (vLLM) and B200 (SGLang), the best in most formats and never far from it."""
LEAST_DISTANCE = 0.1

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
    _parts: dict[tuple[str, str], tuple[Columns, NDArray[np.int64]] | None] = field(default_factory=dict)

    def curve(self, kernel: Experts, lane: str, distribution: str) -> Curve | None:
        """Efficiency over tokens of this very shape, or None."""
        part = self._part(lane, distribution)
        if part is None:
            return None
        columns, sizes = part
        shape = (kernel.hidden, kernel.inter, kernel.top_k, kernel.num_experts, kernel.tp, kernel.ep)
        rows = columns.take(np.flatnonzero((sizes == np.array(shape)).all(axis=1)))
        if kernel.backend:
            rows = rows.take(rows.of_kernel(*BACKENDS[kernel.backend]))
        if not len(rows):
            return None
        codes = rows.texts["kernel_source"][0]
        if self.fastest:
            rows = rows.take(codes == _fastest(rows, codes))
            codes = rows.texts["kernel_source"][0]
        rows = rows.take(one_per_key([rows["num_tokens"]], rows["latency"], codes))
        if self.fastest:  # more tokens never need less work: what is slower than one of them ran an untuned kernel
            rows = rows.take(rows["latency"] <= np.minimum.accumulate(rows["latency"][::-1])[::-1])
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
            texts = ("moe_dtype", "distribution", "kernel_source")
            table = self.database.read("moe", "moe_perf", texts, self.backend)
            part = table.where(moe_dtype=lane, distribution=distribution) if table else None
            sized = (part, np.stack([part[name] for name in SIZES], axis=1)) if part else None
            self._parts[lane, distribution] = sized
        return self._parts[lane, distribution]


def experts_curve(kernel: Experts, device: Device, tokens: Floats, seconds: Floats) -> EnsembleCurve:
    """A layer's times over tokens: they grow with a power of tokens, with experts that are touched, or in steps."""
    least = kernel.least(device)
    ways = (by_logs, straight, by_touched(kernel.num_experts / kernel.top_k))
    return EnsembleCurve(tokens, least(tokens) / seconds, least, ways, steady=True)


def _octaves(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 7] log2 of what DISTANCE weighs, from [..., 6] SIZES."""
    hidden, inter, top_k, num_experts, tp, ep = np.moveaxis(sizes, -1, 0)
    return np.asarray(np.log2(np.stack([inter / tp, hidden, num_experts / ep, num_experts, top_k, ep, tp], axis=-1)))


BACKENDS = {
    "triton": ("triton", "vllm_fused_moe"),
    "cutlass": ("cutlass",),
    "flashinfer_cutlass": ("flashinfer_cutlass",),
    "flashinfer_trtllm": ("flashinfer_trtllm",),
    "marlin": ("marlin",),
    "deep_gemm": ("deepgemm",),
}
"""vLLM's names of kernels → what ``kernel_source`` says of them."""


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
"""LANES where activations keep 16 bits."""

ENGINES = ("vllm", "sglang", "trtllm")

FASTER = 1.25
"""Another engine's measurement of the same format counts where it is this many times faster in the median: engines
ship the same libraries (Triton, CUTLASS, trtllm-gen, DeepGEMM, Marlin), and users keep the fastest that they have."""

MOST_TOUCHED = 0.98
"""Share of the experts beyond which a batch counts as touching all."""

SUSPECT = 1.2
"""A quantised curve that takes longer than this times its bfloat16 sibling, in the median, is a slow kernel that no
user keeps (fp8 on H100 and H200 in vLLM 0.24.0: 2.2 to 2.5 times); where no engine measured a faster one, it is
replaced by the sibling, TYPICAL of what exceeds its launch."""

TYPICAL = 0.55
"""8-bit over bfloat16 experts beyond the launch, in the stacks of the database whose kernels are tuned: 0.53 to 0.56 in
the median from 8 to 1,024 tokens (TensorRT-LLM 1.3 on H100 and H200, vLLM 0.19 on H200, vLLM 0.24 on B200)."""


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


class ExpertTable(Table):
    """The MoE tables of one database, and those of other engines on the same device."""

    def times(self, kernel: Experts, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` tokens of all ranks, or None without a table."""
        if kernel.padded:
            self.note(f"experts {_text(kernel)}: DeepGEMM's, with all their room; without it moe_backend=triton")
            return self._grouped(kernel, a)
        lanes = LANES.get(kernel.dtype, ())
        lanes = WIDENED.get(kernel.dtype, lanes) if kernel.weight_only else lanes
        for lane in lanes:
            found = self._from_lane(kernel, lane, a)
            if found is not None:
                return found if lane == lanes[0] else found.modelled()
        found = self._from_lane(kernel, "bfloat16", a)
        return found.modelled() if found is not None else None

    def _grouped(self, kernel: Experts, a: Floats) -> KernelTimes | None:
        """Both products of all rows, as long as DeepGEMM's of as many rows with one matrix, or as the weights take to
        read; and what lays rows out: a copy for each choice in 8 bits, the activation, its cast, and the sum."""
        rows, inner, bandwidth = kernel.rows(a), kernel.inter // kernel.tp, BANDWIDTH * self.device.memory_bandwidth
        shapes = ((2 * inner if kernel.gated else inner, kernel.hidden), (kernel.hidden, inner))
        found = [Gemm(*shape, dtype=kernel.dtype).measured(self.known, rows, np.zeros_like(rows)) for shape in shapes]
        if found[0] is None or found[1] is None:
            return None
        weights = kernel.touched(a) * kernel.weights * STORED_BYTES[kernel.dtype] / bandwidth
        moved = 9.0 * inner * rows + 4.0 * kernel.hidden * a * kernel.top_k
        products = np.maximum(found[0].seconds + found[1].seconds, weights)
        return replace(found[0], seconds=products + moved / bandwidth + LAYING_OUT * LAUNCH_GRAPH).modelled()

    def _from_lane(self, kernel: Experts, lane: str, a: Floats) -> KernelTimes | None:
        chosen = self.once(self._best, kernel, lane)
        if chosen is None:
            return self._from_nearest(kernel, lane, a)
        curve, engine = chosen
        found = curve.times(a, kernel.bound(self.device, a, np.zeros_like(a)))
        found = self._touching(kernel, lane, engine, a, found)
        if lane != "bfloat16" and not kernel.backend and self._suspect(kernel, curve):
            return self._typical(kernel, lane, a, found)
        if engine == self.backend:
            return found
        self.note(f"{lane} experts {_text(kernel)}: kernels as measured by {engine} on {self.database.system}")
        return replace(found, sources=np.maximum(found.sources, INTERPOLATED))

    def _touching(self, kernel: Experts, lane: str, engine: str, a: Floats, found: KernelTimes) -> KernelTimes:
        """With a balancing bias, at least the time of as many experts as independent tokens touch: the measured power
        law reads fewer weights in small batches, and even choice, which never meets twice, more. Without, favourites
        are met again (gpt-oss and Qwen3-235B decode 10 to 20 % faster than with independent tokens)."""
        independent = self.known.corrections.expert_imbalance and balanced(kernel.num_experts)
        even = self._of(engine).curve(kernel, lane, "balanced") if independent else None
        if even is None:
            return found
        touched = kernel.touched(a) * kernel.ep / kernel.top_k
        same = np.clip(np.minimum(touched, a), even.knots[0], even.knots[-1])
        small = touched * kernel.top_k < MOST_TOUCHED * kernel.num_experts
        least = even.times(same, kernel.bound(self.device, same, np.zeros_like(same))).seconds
        longer = small & (least > found.seconds)
        sources = np.where(longer, np.maximum(found.sources, INTERPOLATED), found.sources).astype(np.int8)
        return replace(found, seconds=np.where(longer, least, found.seconds), sources=sources)

    def _best(self, kernel: Experts, lane: str) -> tuple[Curve, str] | None:
        """The curve of this very shape and its engine: its own, unless another's is FASTER; None where no engine
        has it."""
        best: tuple[Curve, str] | None = None
        for engine in self._asked():
            curve = self._of(engine).curve(kernel, lane, self._distribution(kernel))
            if curve is not None and (best is None or (not kernel.backend and self._ratio(best[0], curve) > FASTER)):
                best = curve, engine
        if best is None and kernel.backend:
            self.note(f"{lane} experts {_text(kernel)}: no kernel of {kernel.backend} was measured: the fastest")
            return self.once(self._best, replace(kernel, backend=""), lane)
        return best

    def _asked(self) -> tuple[str, ...]:
        return self.engines(*ENGINES) if self.known.corrections.kernel_choice else (self.backend,)

    def _of(self, engine: str) -> ExpertRows:
        return self.once(self._rows, engine)

    def _rows(self, engine: str) -> ExpertRows:
        other = None if engine == self.backend else engine
        return ExpertRows(self.database, self.device, other, self.known.corrections.kernel_choice)

    def _distribution(self, kernel: Experts) -> str:
        return routing(kernel.num_experts) if self.known.corrections.expert_imbalance else "balanced"

    def _from_nearest(self, kernel: Experts, lane: str, a: Floats) -> KernelTimes | None:
        """The times of the nearest shapes at equal tokens per expert: what exceeds the launch grows with the least
        times."""
        shapes: list[tuple[Shape, float]] = []
        launch = 0.0
        for engine in self._asked():
            if not shapes:
                shapes = self._of(engine).nearest(kernel, lane, self._distribution(kernel))
                launch = self._of(engine).launch(lane, self._distribution(kernel))
        if not shapes:
            return None
        named = ", ".join("×".join(map(str, shape)) for shape, _ in shapes)
        self.note(f"experts {_text(kernel)}: from those of {named}")
        logs = [
            weight * np.log(self._as_if(kernel, shaped(kernel, shape), lane, a, launch)) for shape, weight in shapes
        ]
        return KernelTimes(np.exp(sum(logs)), np.full(a.shape, 2, dtype=np.int8), np.full(a.shape, OTHER_SHAPE))

    def _as_if(self, kernel: Experts, other: Experts, lane: str, a: Floats, launch: float) -> Floats:
        """Seconds as another shape would have them, where its experts get as many tokens."""
        best = self.once(self._best, other, lane)
        assert best is not None
        load = kernel.top_k / kernel.num_experts / (other.top_k / other.num_experts)
        x = np.clip(a * load, best[0].knots[0], best[0].knots[-1])
        found = self._from_lane(other, lane, x)
        assert found is not None
        least, zero = np.minimum(launch, found.seconds), np.zeros_like(x)
        ratio = kernel.bound(self.device, a, zero) / other.bound(self.device, x, zero)
        return np.asarray(least + (found.seconds - least) * ratio)

    def _suspect(self, kernel: Experts, curve: Curve) -> bool:
        if not self.known.corrections.host_bound_tables:
            return False
        plain = self._of(self.backend).curve(plainly(kernel), "bfloat16", self._distribution(kernel))
        return plain is not None and self._ratio(curve, plain, kernel, plainly(kernel)) > SUSPECT

    def _typical(self, kernel: Experts, lane: str, a: Floats, found: KernelTimes) -> KernelTimes:
        sibling = self._from_lane(plainly(kernel), "bfloat16", a)
        if sibling is None:
            return found
        self.note(
            f"{lane} experts {_text(kernel)}: their measured times are slower than bfloat16's, which points to a wrong "
            f"measurement: {TYPICAL} × bfloat16's are used, as usual for {lane}"
        )
        alone = self._of(self.backend).launch("bfloat16", self._distribution(kernel))
        launch = np.minimum(alone, sibling.seconds)
        return replace(sibling.modelled(), seconds=launch + TYPICAL * (sibling.seconds - launch))

    def _ratio(self, one: Curve, other: Curve, first: Experts | None = None, second: Experts | None = None) -> float:
        """Median time of one curve over another at the tokens of both; 0 without common ones."""
        x = np.intersect1d(one.knots, other.knots)
        if not len(x):
            return 0.0
        least, zero = np.ones_like(x), np.zeros_like(x)
        if first is not None and second is not None:
            ratio = first.bound(self.device, x, zero) / second.bound(self.device, x, zero)
        else:
            ratio = least
        return float(np.median(ratio * other.at(x) / one.at(x)))


def plainly(kernel: Experts) -> Experts:
    """The layer with 16-bit weights."""
    return replace(kernel, dtype="bfloat16", weight_only=False)


def shaped(kernel: Experts, shape: Shape) -> Experts:
    """A layer of the kind with other sizes, gated as its model is."""
    hidden, inter, top_k, num_experts, tp, ep = shape
    gated = (hidden, inter) not in UNGATED
    return replace(kernel, hidden=hidden, inter=inter, top_k=top_k, num_experts=num_experts, tp=tp, ep=ep, gated=gated)


def _text(kernel: Experts) -> str:
    return f"{kernel.num_experts}×{kernel.hidden}×{kernel.inter}"


WIDE_TABLES = {"masked": "wideep_generation_moe_perf", "contiguous": "wideep_context_moe_perf"}
WIDE_SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")


class WideExpertTable(Table):
    """The tables of one device; SGLang measured them, vLLM calls the same kernels (its DeepGEMM experts)."""

    def times(self, kernel: Experts, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` tokens of all ranks, or None where experts of this shape were not measured so.

        Between measured numbers of GPUs the time of equal tokens for each GPU is a power of the number; beyond them the
        efficiency of the last one holds.
        """
        curves = self._of(kernel)
        if not curves:
            self.note(f"experts {kernel.describe()}: not measured behind DeepEP, so priced as without it")
            return None
        if kernel.ep not in curves:
            self.note(
                f"experts {kernel.describe()}: measured behind DeepEP on {', '.join(map(str, sorted(curves)))} GPUs",
            )
        gpus = sorted(curves)
        parts = [
            (weight, self._at(kernel, gpus[i], curves[gpus[i]], a))
            for i, weight in blend(np.array(gpus, dtype=float), float(kernel.ep))
        ]
        _, found = max(parts, key=lambda part: part[0])
        if kernel.ep in curves:
            own = self.backend == "sglang"
            return found if own else replace(found, sources=np.maximum(found.sources, INTERPOLATED))
        log_seconds = sum(weight * np.log(part.seconds) for weight, part in parts)
        return replace(found, seconds=np.exp(log_seconds)).modelled()

    def _at(self, kernel: Experts, gpus: int, curve: EnsembleCurve, a: Floats) -> KernelTimes:
        """Experts on a measured number of GPUs with as many tokens each; the efficiency of that number where ``kernel``
        has more or fewer GPUs than any that was measured."""
        x = a * gpus / kernel.ep
        found = held_below(curve, x, curve.least)
        ends = kernel.ep < min(self._of(kernel)) or kernel.ep > max(self._of(kernel))
        if not ends:
            return found
        zero = np.zeros_like(x)
        least = kernel.bound(self.device, x * kernel.ep / gpus, zero)
        return replace(found, seconds=found.seconds * least / curve.least(x))

    def _of(self, kernel: Experts) -> dict[int, EnsembleCurve]:
        """GPUs → curve over the tokens of all of them; the newest version that has a number of GPUs answers."""
        return self.once(self._read, replace(kernel, ep=1))

    def _read(self, kernel: Experts) -> dict[int, EnsembleCurve]:
        found: dict[int, EnsembleCurve] = {}
        sizes = (kernel.hidden, kernel.inter, kernel.top_k, kernel.num_experts, kernel.tp)
        wanted = dict(zip(WIDE_SIZES, sizes, strict=True))
        spread = routing(kernel.num_experts) if self.known.corrections.expert_imbalance else "uniform"
        backend = None if self.backend == "sglang" else "sglang"
        for table in self.database.versions("moe", WIDE_TABLES[kernel.layout], ("moe_dtype", "distribution"), backend):
            rows = table.where(moe_dtype=kernel.dtype, distribution=spread, **wanted)
            for gpus in np.unique(rows["moe_ep_size"]).tolist():
                part = rows.where(moe_ep_size=gpus)
                tokens, which = np.unique(part["num_tokens"], return_inverse=True)
                seconds = np.full(len(tokens), np.inf)
                np.minimum.at(seconds, which, part["latency"] * 1e-3)
                x = tokens.astype(float)
                found.setdefault(gpus, experts_curve(replace(kernel, ep=gpus), self.device, x, seconds))
        return found


EVEN_TABLE = "wideep_moe_perf"
EVEN_SIZES = ("hidden_size", "inter_size", "num_experts", "moe_ep_size")


class EvenLoads(Table):
    """What a load balancer of experts saves: TensorRT-LLM measured layers with it and without, on 2 to 256 GPUs.

    Of layers that were not measured the nearest one tells how many times as long the busiest GPU takes. Other engines
    have other kernels: served points of SGLang with copies of experts fit worse with these shares.
    """

    def times(self, kernel: Experts, a: Floats, uneven: KernelTimes) -> KernelTimes:
        """Seconds for ``a`` tokens of all ranks, given those without a load balancer."""
        if not self.known.corrections.expert_imbalance or kernel.ep == 1:
            return uneven
        found = self.once(self._share, kernel) if self.backend == "trtllm" else None
        if found is None:
            self.note(f"experts {kernel.describe()}: what a load balancer saves was not measured: nothing is assumed")
            return uneven
        log_tokens, log_share = found
        share = np.exp(np.interp(np.log(np.maximum(a, 1.0)), log_tokens, log_share))
        return replace(uneven, seconds=uneven.seconds * share).modelled()

    def _share(self, kernel: Experts) -> tuple[Floats, Floats] | None:
        """The time with a load balancer over that without, in the nearest layer, over tokens: both as logarithms."""
        spread = routing(kernel.num_experts)
        for table in self.database.versions("moe", EVEN_TABLE, ("moe_dtype", "distribution")):
            even, uneven = (table.where(distribution=name) for name in (f"{spread}_eplb", spread))
            if not len(even) or not len(uneven):
                continue
            wanted = (kernel.hidden, kernel.inter, kernel.num_experts, kernel.ep)
            shape = dict(zip(EVEN_SIZES, _nearest(uneven, EVEN_SIZES, wanted), strict=True))
            even, uneven = even.where(**shape), uneven.where(**shape)
            (slots,) = _nearest(even, ("num_slots",), (kernel.slots * shape["num_experts"] // kernel.num_experts,))
            with_it, without = (
                medians(rows["num_tokens"], rows["latency"]) for rows in (even.where(num_slots=slots), uneven)
            )
            tokens = np.array([at for at in with_it if at in without], dtype=np.float64)
            if len(tokens):
                return np.log(tokens), np.log([with_it[int(at)] / without[int(at)] for at in tokens])
        return None


def _nearest(rows: Columns, names: tuple[str, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes among the rows that are the fewest octaves away."""
    sizes = np.unique(np.stack([rows[name] for name in names], axis=1), axis=0)
    octaves = np.abs(np.log2(sizes / np.array(wanted))).sum(axis=1)
    return tuple(int(size) for size in sizes[np.argmin(octaves)])
