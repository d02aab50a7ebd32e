"""Selective scans (Mamba-1): shape and least cost. The kernel database times none."""

from collections.abc import Mapping
from typing import ClassVar

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kinds.state_space import SCANS

VECTOR = 1 / 16
"""Peak rate of the vector units, which scan, over that of the tensor cores in 16 bits, which do not (A100: 19.5 of 312
TFLOPS, H100: 67 of 989, by NVIDIA's data sheets)."""


@dataclass(frozen=True)
class SelectiveScanKernel(Kernel):
    """Mamba-1's scan of one layer on one GPU, without convolution and projections.

    ``decode``: ``a`` requests with one token each update their states. ``prefill``: one chunk of ``a`` tokens of a
    request, one after the other in registers; the context does not count.
    """

    error_family: ClassVar[str] = "scan"

    phase: str
    channels: int
    state_dim: int
    state_bytes_per_element: int

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Nine for each number of the state and token: step times decay and its exponential, step times B times input,
        decay times state and sum, C times state and sum (arXiv 2312.00752, algorithm 2)."""
        return 9.0 * self.channels * self.state_dim * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Tokens (input, time step and gate in, result out, for each channel; B and C), the 32-bit decays, and states
        in and out: decode those of every request, prefill one."""
        tokens = a * 2.0 * (4 * self.channels + 2 * self.state_dim)
        state = 2.0 * self.channels * self.state_dim * self.state_bytes_per_element
        decays = 4.0 * self.channels * self.state_dim
        return tokens + decays + state * (a if self.phase == "decode" else 1.0)

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """By ATTAINED; a single launch."""
        return super().attained(device, {**efficiencies, self.efficiency_family: ATTAINED[self.phase]}, a, b)

    def describe(self) -> str:
        """Channels and state."""
        return f"channels={self.channels}×{self.state_dim}"

    @property
    def efficiency_family(self) -> str:
        """Families differ by phase."""
        return f"selective_scan_{self.phase}"


ATTAINED = {phase: Efficiency(VECTOR, found.memory, SCANS["decode"].latency) for phase, found in SCANS.items()}
"""What it attains, assumed: all of the vector units, and the bandwidth that Mamba-2's scans attain."""
