"""The roofline: what the hardware allows, and what kernels of a similar device attain of it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_times import MODELLED, KernelTimes, from_source

CALIBRATION = Path(__file__).parents[1] / "data" / "efficiency.toml"


@dataclass(frozen=True)
class Roofline:
    """Answers for any kernel on any device: max(FLOPs / attained rate, bytes / attained bandwidth) + latency, all
    modelled."""

    device: Device
    efficiencies: Mapping[str, Efficiency]
    calibrated_on: str

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """Seconds at each point; zero where ``a`` is zero."""
        seconds = kernel.attained(self.device, self.efficiencies, a, b)
        return from_source(np.where(a > 0, seconds, 0.0), MODELLED)


@dataclass(frozen=True)
class Perfect:
    """The theoretical bound: peak arithmetic or full bandwidth, whichever takes longer, and no time to launch."""

    device: Device
    efficiencies: Mapping[str, Efficiency] = field(default_factory=lambda: {"gather": Efficiency(1.0, 1.0, 0.0)})
    calibrated_on: str = "nothing: peak rates"

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """Least seconds at each point; zero where ``a`` is zero."""
        return from_source(np.where(a > 0, kernel.bound(self.device, a, b), 0.0), MODELLED)


def roofline(device: Device) -> Roofline:
    """The roofline of a device with the efficiencies measured on the most similar one: same link kind, then nearest
    architecture.

    ``data/efficiency.toml`` holds them; ``python -m benchmarks.efficiency`` derives that file from the kernel
    database.
    """
    devices = _calibration()

    def distance(name: str) -> tuple[bool, int, float]:
        entry = devices[name]
        generation = abs(entry["sm_version"] - (device.sm_version or 90))
        bandwidth = abs(float(np.log(device.memory_bandwidth / entry["memory_bandwidth"])))
        return name != device.name, int(generation), bandwidth

    nearest = min(devices, key=distance)
    linked = min(devices, key=lambda name: ((devices[name]["link"] != device.link), *distance(name)))
    table = {key: Efficiency(**value) for key, value in devices[nearest]["families"].items()}
    for key in ("all_reduce", "gather"):
        table[key] = Efficiency(**devices[linked]["families"][key])
    return Roofline(device, table, nearest)


@cache
def _calibration() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = tomllib.loads(CALIBRATION.read_text(encoding="utf-8"))
    return loaded
