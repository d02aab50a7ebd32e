"""How long a vision encoder takes for images: its kernels, and what the database knows of its attention."""

from collections.abc import Iterator

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.model.vision import Vision
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend
from windtunnel.perf.database import Columns, Measured, Table, one_per_key
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import KernelTimes, blended
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.predictor import Predictor


@dataclass(frozen=True)
class EncoderAttention(Kernel):
    """Attention of ``a`` images or windows of ``b`` patches each: a patch attends to all patches of the same one."""

    heads: int
    head_dim: int

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Scores and values of every pair."""
        return 4.0 * self.heads * self.head_dim * a * b * b

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Queries, keys and values in, values out, in 16 bits."""
        return 8.0 * self.heads * self.head_dim * a * b

    def describe(self) -> str:
        """Heads."""
        return f"heads={self.heads}×{self.head_dim}"

    @property
    def error_family(self) -> str:
        """None were derived."""
        return "encoder_attention"

    @property
    def efficiency_family(self) -> str:
        """As prompts."""
        return "attention_prefill"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the table of encoders."""
        return known.table(EncoderTable).times(self, a, b)


@dataclass(eq=False)
class EncoderTable(Table):
    """Attention of encoders, by heads, their size, images and patches."""

    def times(self, kernel: EncoderAttention, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds, or None without a table. Between images of other sizes and between numbers of images the efficiency
        is a power of them; other heads have that of those nearest to them, by their number times their size."""
        found = self.database.read("encoder_attention", "encoder_attention_perf", ())
        if found is None or not len(found):
            return None
        shapes = np.unique(np.stack([found["num_heads"], found["head_dim"]], axis=1), axis=0)
        wanted = kernel.heads, kernel.head_dim
        away = np.abs(np.log2(shapes.prod(axis=1) / np.prod(wanted))) + 2 * np.abs(np.log2(shapes[:, 1] / wanted[1]))
        heads, size = (int(value) for value in shapes[np.argmin(away)])
        rows = self.once(self._rows, heads, size, found)
        parts = [self._point(kernel, rows, heads, size, float(x), float(y)) for x, y in zip(a, b, strict=True)]
        seconds, sources, distance = (np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS)
        times = KernelTimes(seconds, sources, distance)
        return times if (heads, size) == wanted else times.modelled()

    @staticmethod
    def _rows(heads: int, size: int, found: Columns) -> Columns:
        mine = found.where(num_heads=heads, head_dim=size)
        keys = [mine["batch_size"], mine["isl"]]
        return mine.take(one_per_key(keys, mine["latency"], np.zeros(len(mine), dtype=np.int64)))

    def _point(self, kernel: EncoderAttention, rows: Columns, heads: int, size: int, a: float, b: float) -> KernelTimes:
        """Between the numbers of images, along the curves over patches."""
        batches = np.unique(rows["batch_size"]).astype(float)
        parts = []
        for k, weight in blend(batches, a):
            mine = rows.where(batch_size=int(batches[k]))
            order, count = np.argsort(mine["isl"]), np.full(len(mine), batches[k])
            patches = mine["isl"][order].astype(float)
            other = EncoderAttention(heads, size).bound(self.device, count, patches)
            curve = Curve(patches, other / (mine["latency"][order] * 1e-3))
            at, number = np.array([b]), np.array([a])
            parts.append((curve.times(at, kernel.bound(self.device, number, at)), weight))
        return blended(parts, 0.0)


FIELDS = ("seconds", "sources", "distance")


def kernels(vision: Vision, ranks: int, images: Floats, patches: int) -> Iterator[tuple[int, Kernel, Floats, Floats]]:
    """(How often, kernel, and its two sizes) of an encoder that computes ``images`` of ``patches`` each at once.

    ``ranks`` GPUs share its layers as vLLM shards them (``mm_encoder_tp_mode`` weights)."""
    hidden, mlp, each = vision.hidden_size, vision.mlp_size // ranks, vision.merge**2
    heads, rows = max(vision.heads // ranks, 1), images * patches
    attention = EncoderAttention(heads, hidden // vision.heads)
    whole, none = np.full_like(images, patches), np.zeros_like(images)
    yield 1, Gemm(hidden, vision.patch_values), rows, none
    yield vision.full_layers, attention, images, whole
    if vision.full_layers < vision.layers:
        windows = images * -(-patches // vision.window)
        yield vision.layers - vision.full_layers, attention, windows, np.minimum(whole, vision.window)
    for n, k in (
        (3 * hidden // ranks, hidden),
        (hidden, hidden // ranks),
        (mlp * (1 + vision.gated), hidden),
        (hidden, mlp),
    ):
        yield vision.layers, Gemm(n, k), rows, none
    moved = 2.0 * (4 * hidden + 4 * hidden // ranks + (2 + vision.gated) * mlp)  # two norms, rotation, activation
    yield vision.layers, Elementwise(moved, launches=4, graph=False), rows, none
    if ranks > 1:
        yield 2 * vision.layers, Collective("all_reduce", ranks, hidden, graph=False), rows, none
    yield 1, Gemm(hidden * each // ranks, hidden * each), rows / each, none
    yield 1, Gemm(vision.out_size, hidden * each // ranks), rows / each, none


def encoder_seconds(pool: Pool, times: Predictor, embeddings: int, most: int) -> Floats:
    """[most + 1] seconds that the encoder takes in a step for 0, 1, 2, … images of ``embeddings`` each, computed
    together. The host's launches are not counted. Raises ValueError without the sizes of an encoder."""
    vision = pool.model.vision
    if vision is None:
        raise ValueError(f"{pool.model.name} has no sizes of an encoder")
    images, seconds = np.arange(most + 1, dtype=float), np.zeros(most + 1)
    for count, kernel, a, b in kernels(vision, pool.engine.tensor_parallel_size, images, vision.patches(embeddings)):
        seconds += count * times.times(kernel, a, b).seconds
    return seconds
