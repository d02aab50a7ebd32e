"""Collectives: all-reduce among several processes of one host or of several, and sending between two (gloo on a CPU,
NCCL on GPUs)."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.profiling.clock import Clock, Reading

MEET = timedelta(minutes=5)
"""That hosts wait for each other."""


@dataclass(frozen=True)
class Hosts:
    """Machines that measure collectives together; each runs the same command with its own rank."""

    nnodes: int = 1
    """Hosts that run this command together, each with its node_rank, so that sums and sends cross the network: the
    degrees of tensor parallelism are spread over them. All but the first measure nothing else."""
    node_rank: int = 0
    """Of this host; 0 is the first, which writes the profile."""
    master_addr: str = ""
    """Where the others reach the first host."""
    master_port: int = 29500
    """The first of the ports there that are used, one for each collective."""

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise InputError(f"nnodes={self.nnodes}: must be ≥ 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise InputError(
                f"node_rank={self.node_rank}: must be from 0 to {self.nnodes - 1} with nnodes={self.nnodes}"
            )
        if self.nnodes > 1 and not self.master_addr:
            raise InputError(f"nnodes={self.nnodes}: add --master-addr, where the others reach the first host")

    def require_whole(self, shards: tuple[int, ...]) -> None:
        """Raise InputError for degrees that are not spread evenly over the hosts."""
        for tp in shards:
            if tp > 1 and tp % self.nnodes:
                raise InputError(f"tensor_parallel_size={tp}: must be a multiple of nnodes={self.nnodes}, or 1")

    def meeting(self, call: int, place: str) -> str:
        """Where the processes of one collective meet."""
        return f"file://{place}/meet" if self.nnodes == 1 else f"tcp://{self.master_addr}:{self.master_port + call}"


ALONE = Hosts()


def collective(
    torch: Any, name: str, processes: int, elements: list[int], device: str, repeats: int, hosts: Hosts, call: int
) -> dict[int, Reading]:
    """Seconds of ``all_reduce``, the sum of this many 16-bit numbers, or of ``send_recv``, from the first process to
    the second, by their count, as the slowest process of this host has it. ``call``: which collective it is."""
    here = processes // hosts.nnodes
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        words = (name, processes, elements, device, repeats, str(place), hosts, call)
        torch.multiprocessing.spawn(_member, args=words, nprocs=here, join=True)
        of_ranks = [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(here)]
    return {n: max((Reading(*rows[n]) for rows in of_ranks), key=lambda one: one.median) for n in elements}


def _member(
    number: int,
    name: str,
    processes: int,
    elements: list[int],
    device: str,
    repeats: int,
    place: str,
    hosts: Hosts,
    call: int,
) -> None:
    """One process of the group, the ``number``-th of this host."""
    import torch

    rank = hosts.node_rank * (processes // hosts.nnodes) + number
    if device == "cuda":
        torch.cuda.set_device(number)
    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": rank, "world_size": processes, "timeout": MEET}
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=hosts.meeting(call, place), **how)
    clock, found = Clock(torch, device, repeats), {}
    for count in elements:
        x = torch.zeros(count, dtype=torch.bfloat16, device=device)
        inner = 20 if count < 2**20 else 4

        def several(x: Any = x, inner: int = inner) -> None:
            for _ in range(inner):
                if name == "all_reduce":
                    torch.distributed.all_reduce(x)
                elif rank == 0:
                    torch.distributed.send(x, 1)
                elif rank == 1:
                    torch.distributed.recv(x, 0)

        torch.distributed.barrier()
        several()
        readings = [clock._seconds(several, 1) / inner for _ in range(repeats)]
        found[count] = _plain(readings)
    torch.save(found, f"{place}/{number}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _plain(seconds: list[float]) -> tuple[float, ...]:
    from windtunnel.profiling.clock import reading

    one = reading(seconds)
    return one.min, one.max, one.mean, one.median, one.std
