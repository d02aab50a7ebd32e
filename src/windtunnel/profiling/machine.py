"""Machine: the torch device, its free memory, and what it can do at most, as a device of windtunnel."""

import os
import platform
import re
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.profiling.clock import Clock

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What is measured on."""

    torch: Any
    kind: str
    """``cuda`` or ``cpu``."""
    name: str
    """In file names."""
    threads: int

    def clock(self, repeats: int) -> Clock:
        """What times calls on it."""
        return Clock(self.torch, self.kind, repeats, self.threads if self.kind == "cpu" else 0)

    @property
    def gpus(self) -> int:
        """How many there are; 0 where a CPU is measured."""
        return int(self.torch.cuda.device_count()) if self.kind == "cuda" else 0

    def free_bytes(self) -> int:
        """Memory that can still be had."""
        if self.kind == "cuda":
            return int(self.torch.cuda.mem_get_info()[0])
        try:
            text = Path("/proc/meminfo").read_text(encoding="ascii")
            found = re.search(r"MemAvailable:\s+(\d+) kB", text)
            return int(found[1]) * 1024 if found else 8 * GIB
        except OSError:
            return 8 * GIB

    def total_bytes(self) -> int:
        """All of its memory."""
        if self.kind == "cuda":
            return int(self.torch.cuda.mem_get_info()[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def find_machine(kind: str, name: str, threads: int) -> Machine:
    """The device to measure on; ``auto``: a GPU if there is one.

    Raises:
        InputError: torch is not installed, or has no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError("profile needs torch: pip install 'windtunnel[profile]'") from error
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("device_kind='cuda': torch sees no GPU here; use cpu")
    if threads:
        torch.set_num_threads(threads)
    if not name:
        name = torch.cuda.get_device_name() if kind == "cuda" else f"cpu {platform.machine()}"
    return Machine(torch, kind, re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"), torch.get_num_threads())


@dataclass(frozen=True)
class Peaks:
    """The best that was seen: FLOP/s of 16-bit products, bytes/s of memory, and of copies between host and device."""

    flops: float
    memory: float
    copy: float


def peaks(machine: Machine, repeats: int) -> Peaks:
    """Measure a large product and large copies."""
    torch, clock = machine.torch, machine.clock(repeats)
    n = 4096 if machine.kind == "cuda" else 1024
    x = torch.randn(n, n, dtype=torch.bfloat16, device=machine.kind)
    size = 256 * 2**20 if machine.kind == "cuda" else 64 * 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=machine.kind)
    target, host = torch.empty_like(source), torch.zeros(size, dtype=torch.uint8)
    product, within, across = (
        clock.time(call).min for call in (lambda: x @ x, lambda: target.copy_(source), lambda: target.copy_(host))
    )
    return Peaks(2.0 * n**3 / product, 2.0 * size / within, size / across)


def host_seconds(machine: Machine, repeats: int) -> tuple[float, float]:
    """Seconds of a step's host work that any engine has, and of each request in it: lists become tensors of tokens,
    positions and block tables, and sampled tokens become a list."""
    torch, now = machine.torch, machine.clock(repeats).now

    def step(requests: int) -> float:
        rows = [[i] * 32 for i in range(requests)]
        best = []
        for _ in range(max(repeats, 5)):
            start = now()
            tokens = torch.tensor([row[0] for row in rows], device=machine.kind)
            torch.tensor(rows, device=machine.kind)
            torch.tensor([len(row) for row in rows], device=machine.kind)
            tokens.tolist()
            best.append(now() - start)
        return sorted(best)[len(best) // 2]

    few, many = step(1), step(257)
    return few, max((many - few) / 256, 0.0)


def device_toml(machine: Machine, found: Peaks, processes: int) -> str:
    """The machine as a device for --devices-file; its link is memory, through which its processes talk."""
    link = found.memory / 4 if machine.kind == "cpu" else found.copy
    lines = {
        "memory_gib": round(machine.total_bytes() / GIB, 3),
        "memory_bandwidth": round(found.memory / 1e9, 3),
        "flops": f"{{ bfloat16 = {found.flops / 1e12:.6f} }}",
        "power_w": 0.0,
        "idle_power_w": 0.0,
        "gpus_per_node": max(processes, 1),
        "link": '"pcie"',
        "link_bandwidth": round(link / 1e9, 3),
        "pcie_bandwidth": round(found.copy / 1e9, 3),
        "network_bandwidth": round(min(link, found.copy) / 1e9, 3),
        "source": '"windtunnel profile: the best that was seen"',
    }
    return f"[{machine.name}]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items())
