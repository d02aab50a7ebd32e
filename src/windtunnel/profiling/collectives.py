"""Collectives: all-reduce among several processes of this machine, and sending between two (gloo on a CPU, NCCL on
GPUs)."""

import tempfile
from pathlib import Path
from typing import Any

from windtunnel.profiling.clock import Clock, Reading


def collective(
    torch: Any, name: str, processes: int, elements: list[int], device: str, repeats: int
) -> dict[int, Reading]:
    """Seconds of ``all_reduce``, the sum of this many 16-bit numbers, or of ``send_recv``, from the first process to
    the second, by their count, as the slowest process has it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.multiprocessing.spawn(
            _member, args=(name, processes, elements, device, repeats, str(place)), nprocs=processes, join=True
        )
        of_ranks = [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(processes)]
    return {n: max((Reading(*rows[n]) for rows in of_ranks), key=lambda one: one.median) for n in elements}


def _member(rank: int, name: str, processes: int, elements: list[int], device: str, repeats: int, place: str) -> None:
    """One process of the group."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{place}/meet", rank=rank, world_size=processes
    )
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
                else:
                    torch.distributed.recv(x, 0)

        torch.distributed.barrier()
        several()
        readings = [clock._seconds(several, 1) / inner for _ in range(repeats)]
        found[count] = _plain(readings)
    torch.save(found, f"{place}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _plain(seconds: list[float]) -> tuple[float, ...]:
    from windtunnel.profiling.clock import reading

    one = reading(seconds)
    return one.min, one.max, one.mean, one.median, one.std
