"""State space layers (Mamba-2): the convolution in front of a scan, and the scan.

The kernel database times convolutions: rates over requests (decode) or tokens (prefill) for several numbers of
channels. It times no scan.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend, octaves
from windtunnel.perf.database import Columns, Measured, Table, medians
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes
from windtunnel.perf.kinds.recurrence import of_phase

SCANS = {
    "decode": Efficiency(compute=1.0, memory=0.83, latency=2.2e-6),
    "prefill": Efficiency(compute=1.0, memory=0.43, latency=2e-5),
}
"""What Mamba-2's scans attain, on every device.

Decode: vLLM's Triton kernel with tuned launches on an H100, heads of 64 × 128 16-bit numbers, takes 2.2 µs for 8 heads
of all requests, 104.5 µs for 8,192 and 145.6 µs for 12,288 (pull request 43083 of vLLM): 0.78 to 0.84 of the bandwidth.
The gated delta rule's update, the same work on a state, attains 0.85 to 0.9 there in the database.
Prefill: vLLM's Triton kernels on an H100, 128 heads of 64 × 128, one group, pieces of 256 (pull request 27299 of vLLM):
12.6 million tokens/s for 8,192 tokens, 12.9 for 16,384, 11.8 for 32,768. Five launches, as many as the gated delta
rule's chunks, which take 19 to 23 µs for a single token."""


@dataclass(frozen=True)
class Convolution(Kernel):
    """Causal convolution in front of a scan, each channel by itself, on one GPU; ``phase``, ``a`` as for Recurrence."""

    error_family: ClassVar[str] = "convolution"

    phase: str
    channels: int
    width: int
    """Tokens that it sees."""

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """A product and a sum for each token seen."""
        return 2.0 * self.channels * self.width * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Tokens in and out; a request's last ones in and out."""
        return 4.0 * self.channels * (a + (self.width - 1) * (a if self.phase == "decode" else 1.0))

    def describe(self) -> str:
        """Channels and width."""
        return f"{self.channels} channels, {self.width} tokens"

    @property
    def efficiency_family(self) -> str:
        """Families differ by phase."""
        return f"convolution_{self.phase}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the rows of convolutions."""
        return known.table(ConvolutionTable).times(self, a)


@dataclass(frozen=True)
class Scan(Kernel):
    """Mamba-2's state space scan of one layer on one GPU, without convolution and projections.

    ``decode``: ``a`` requests with one token each update their states. ``prefill``: one chunk of ``a`` tokens of a
    request, in pieces of ``piece`` tokens between which the state is passed on; the context does not count.
    """

    error_family: ClassVar[str] = "scan"

    phase: str
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    piece: int
    state_bytes_per_element: int

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Decode: decay, input, sum and read of a state of ``head_dim`` × ``state_dim`` per head. Prefill: the state
        written and read once per piece by products, and the products of all earlier tokens of the piece (Mamba-2,
        arXiv 2405.21060, section 6)."""
        numbers = self.heads * self.head_dim * self.state_dim
        if self.phase == "decode":
            return 5.0 * numbers * a
        within = self.piece * (self.groups * self.state_dim + self.heads * self.head_dim)
        return (4.0 * numbers + within) * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Tokens (heads in and out, B, C, a time step for each head) and states. Decode: the state in and out, for
        every request. Prefill: the tokens once more for the states, and the 32-bit states of all pieces four times,
        written and read before and after they are passed on (ssd_chunk_state.py, ssd_state_passing.py and
        ssd_chunk_scan.py in vllm/model_executor/layers/mamba/ops)."""
        wide, numbers = self.heads * self.head_dim, self.heads * self.head_dim * self.state_dim
        shared = 2 * self.groups * self.state_dim
        state = 2.0 * numbers * self.state_bytes_per_element
        if self.phase == "decode":
            return a * (2.0 * (2 * wide + shared + self.heads) + state)
        pieces = np.ceil(a / self.piece)
        return a * 2.0 * (3 * wide + 2 * shared + self.heads) + pieces * 4.0 * 4.0 * numbers + state

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """By SCANS."""
        return super().attained(device, {**efficiencies, self.efficiency_family: SCANS[self.phase]}, a, b)

    def describe(self) -> str:
        """Heads, state and groups."""
        return f"heads={self.heads}×{self.head_dim}×{self.state_dim} groups={self.groups}"

    @property
    def efficiency_family(self) -> str:
        """Families differ by phase."""
        return f"scan_{self.phase}"


MAMBA, GATED_DELTA = "mamba2_perf", "gdn_perf"
PLACES = ((MAMBA, None), (GATED_DELTA, None), (MAMBA, "trtllm"))
"""Where rows are looked for, first to last: the engine's own of Mamba-2; its own of gated delta rules, whose
convolution is the same kernel; TensorRT-LLM's of Mamba-2."""


class ConvolutionTable(Table):
    """The convolutions of one database."""

    def times(self, kernel: Convolution, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` requests or tokens, or None without a table.

        The rate, in numbers per second, is interpolated in log-log: over rows, and between two numbers of channels.
        Beyond either, and for another width than the measured one, that of the nearest holds (modelled).
        """
        table = self._table
        if table is None:
            return None
        width = int(table["d_conv"][np.argmin(np.abs(table["d_conv"] - kernel.width))])
        found = _between(*self.once(self._rates, kernel.phase, width), kernel.channels, a)
        return found if width == kernel.width else found.modelled()

    def _rates(self, phase: str, width: int) -> tuple[Floats, list[Curve]]:
        """Numbers of channels, ascending, with the rates of each."""
        assert self._table is not None
        rows, axis = of_phase(self._table, phase, d_conv=width)
        channels = _channels(rows)
        kinds, curves = np.unique(channels), []
        for n in kinds:
            points = medians(axis[channels == n], rows["latency"][channels == n])
            x, seconds = (np.array(list(each), dtype=float) for each in (points, points.values()))
            curves.append(Curve(x, int(n) * x / (seconds * 1e-3)))
        return kinds.astype(float), curves

    @cached_property
    def _table(self) -> Columns | None:
        for table, backend in PLACES:
            found = self.database.read("linear_attention", table, ("kernel_source", "phase"), backend)
            if found is not None:
                if backend is not None:
                    self.note(f"convolutions of state space layers: {backend}'s, as measured")
                return _convolutions(found)
        return None


def _convolutions(table: Columns) -> Columns:
    """The rows of convolutions: a table has one row for each kernel of a layer."""
    codes, names = table.texts["kernel_source"]
    return table.take(np.array([name.startswith("causal_conv1d") for name in names])[codes])


def _channels(rows: Columns) -> NDArray[np.int64]:
    """Channels of each row, by the sizes of Mamba-2 or of a gated delta rule."""
    if "nheads" in rows.numbers:
        wide, shared = rows["nheads"] * rows["head_dim"], rows["n_groups"] * rows["d_state"]
    else:
        wide, shared = rows["num_v_heads"] * rows["head_v_dim"], rows["num_k_heads"] * rows["head_k_dim"]
    return np.asarray(wide + 2 * shared, dtype=np.int64)


def _between(channels: Floats, curves: list[Curve], wanted: int, a: Floats) -> KernelTimes:
    """An answer from the rates of the neighbouring numbers of channels."""
    parts = blend(channels, float(wanted))
    logs = np.asarray(sum(weight * np.log(curves[i].at(a)) for i, weight in parts))
    nearest = curves[max(parts, key=lambda part: part[1])[0]]
    away = float(octaves(channels, np.array([wanted]))[0])
    found = KernelTimes(wanted * a / np.exp(logs), nearest.sources(a), np.hypot(octaves(nearest.knots, a), away))
    if wanted in channels:
        return found
    if not channels[0] < wanted < channels[-1]:
        return found.modelled()
    return replace(found, sources=np.maximum(found.sources, INTERPOLATED))
