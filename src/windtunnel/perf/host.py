"""Host work of a step: scheduling, input preparation, launching, reading back what was sampled.

None of this is in the kernel database. The constants are for one modern server core at 3-4 GHz, and every table that
holds them calls itself modelled; ``host_overlapped`` and ``host_serial`` are separate tables so that measured runs can
calibrate them.
"""

from dataclasses import dataclass, replace

import numpy as np

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes


@dataclass(frozen=True)
class HostCost:
    """Seconds of host work per step: fixed, and for each request in the batch."""

    overlapped: float
    overlapped_per_sequence: float
    serial: float
    serial_per_sequence: float

    def tables(self, max_num_seqs: int) -> tuple[Floats, Floats]:
        """(host_overlapped, host_serial), [max_num_seqs + 1] each; a step without requests costs nothing."""
        n = np.arange(max_num_seqs + 1, dtype=float)
        overlapped = self.overlapped + self.overlapped_per_sequence * n
        serial = self.serial + self.serial_per_sequence * n
        return np.where(n > 0, overlapped, 0.0), np.where(n > 0, serial, 0.0)


ASYNCHRONOUS = HostCost(1.5e-3, 12e-6, 0.2e-3, 0.5e-6)
"""The next step is prepared while this one runs; what stays serial is the launch and the copy of sampled tokens: vLLM's
own estimate for asynchronous scheduling is a gap of 200-300 µs between decodes (its issue 10634). The overlapped part
bounds steps of small models: a step cannot be shorter than the host work of one."""

SYNCHRONOUS = HostCost(0.0, 0.0, 0.9e-3, 8e-6)
"""Schedule, prepare, launch and process output one after the other with vLLM's v1 engine core (before v1 the same issue
and its RFC 6854 saw 5-13 ms): about 1 ms for a few requests, 3 ms for 256."""

ON_DEVICE = HostCost(1.5e-3, 12e-6, 0.05e-3, 0.0)
"""The same in SGLang and TensorRT-LLM, whose next step takes the sampled tokens on the device: its graph is launched
before this step has ended (SGLang's overlap schedule, TensorRT-LLM's overlap scheduler), and only their hand-over is
left."""

NO_HOST = HostCost(0.0, 0.0, 0.0, 0.0)
"""What the theoretical bound has."""

DISPATCH_KERNEL = 6e-6
"""Seconds of host time to launch one kernel of a compiled graph piece that is not captured: a CUDA launch takes 3-4 µs
of one core, the generated Python around it as much again."""

DISPATCH_KERNEL_EAGER = 9e-6
"""The same without compilation (``enforce_eager``): every launch passes through PyTorch's dispatcher."""

DISPATCH_ATTENTION = 5e-5
"""Seconds of host time per layer of a piecewise graph: attention is called from Python between two captured pieces."""


DISPATCH_MODULE_EAGER = 5e-4
"""Seconds of host time per call of a module that runs dozens of PyTorch operators where nothing is compiled: experts
(choice, alignment, quantisation, two products, sum), and attention other than plain (latent, sparse, linear). The
kernel database's own eager timings of such modules are 0.2 to 1.4 ms long, whatever the tokens."""


def dispatch_floor(
    layers: int, kernels_per_layer: float, captured: bool, compiled: bool, modules_per_layer: float = 0.0
) -> float:
    """Least seconds of a step whose attention is launched by the host; the GPU waits where its own work is shorter.

    ``captured``: the pieces between attention calls are CUDA graphs. ``compiled``: they are at least compiled code.
    ``modules_per_layer``: calls of larger modules, which cost more where nothing is compiled.
    """
    if captured:
        return layers * DISPATCH_ATTENTION
    kernel = DISPATCH_KERNEL if compiled else DISPATCH_KERNEL_EAGER
    modules = 0.0 if compiled else modules_per_layer * DISPATCH_MODULE_EAGER
    return layers * (DISPATCH_ATTENTION + kernels_per_layer * kernel + modules)


AGREEMENT = 1e-3
"""Seconds that ranks in lockstep take to agree on a step: an all-reduce of token counts between processes on the host
(gloo), and the wait for the slower one's preparation (vLLM's dp_utils.py, coordinate_batch_across_dp)."""


def host_cost(async_scheduling: bool, lockstep: bool = False, causes: Causes = ALL, backend: str = "vllm") -> HostCost:
    """The host work of an engine that schedules asynchronously, or not, with ranks in lockstep, or not."""
    if not causes.host_overhead:
        return HostCost(0.0, 0.0, 0.0, 0.0)
    ahead = ASYNCHRONOUS if backend == "vllm" else ON_DEVICE
    chosen = ahead if async_scheduling else SYNCHRONOUS
    return replace(chosen, serial=chosen.serial + AGREEMENT) if lockstep and causes.rank_synchronisation else chosen
