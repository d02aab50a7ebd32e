"""Profile: a model measured on this machine into a folder, and two such profiles compared point by point."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.files import write_whole
from windtunnel.hardware import device
from windtunnel.model import Model
from windtunnel.perf.profile.folder import Profile, read_profile
from windtunnel.perf.profile.shapes import Shape, shape_of
from windtunnel.profiling.clock import waited
from windtunnel.profiling.collectives import ALONE, Hosts
from windtunnel.profiling.engine_kernels import vllm_experts
from windtunnel.profiling.journal import open_journal
from windtunnel.profiling.machine import Machine, device_toml, host_seconds, peaks
from windtunnel.profiling.measure import Session
from windtunnel.profiling.sizes import Extent
from windtunnel.profiling.tables import write_tables

Say = Callable[[str], None]


def help_measuring(
    machine: Machine, model: Model, shards: tuple[int, ...], extent: Extent, hosts: Hosts, say: Say
) -> None:
    """Take part in the collectives of several hosts, of which another one writes the profile. Raises InputError as
    ``profile``."""
    shape = divided(model, shards)
    hosts.require_whole(shards)
    with TemporaryDirectory() as folder:
        journal, clock = open_journal(Path(folder), {}), machine.clock(extent.repeats)
        Session(machine, shape, shards, extent, journal, clock, say, hosts).with_other_hosts()


def profile(
    machine: Machine,
    model: Model,
    shards: tuple[int, ...],
    extent: Extent,
    folder: Path,
    say: Say,
    hosts: Hosts = ALONE,
) -> Profile:
    """Measure what the folder lacks of a model, write its tables and ``device.toml``, and read them.

    Args:
        machine: what is measured on.
        model: layers of attention and networks or experts, as ``shape_of`` takes them.
        shards: degrees of tensor parallelism.
        extent: at which points.
        folder: of the profile; made if need be.
        say: told what has been done.
        hosts: machines that measure collectives together, of which this is the first.

    Raises:
        InputError: the model cannot be profiled or divided, or the folder was begun with other settings.
    """
    shape = divided(model, shards)
    settings = asdict(extent) | {"shards": list(shards), "shape": shape.spec()}
    settings |= {"device": machine.name, "threads": machine.threads}
    hosts.require_whole(shards)
    settings |= {"nnodes": hosts.nnodes} if hosts.nnodes > 1 else {}
    if shape.num_experts:
        by_vllm = [tp for tp in shards if vllm_experts(machine.torch, machine.kind, shape, tp)]
        settings |= {"experts_by_vllm": by_vllm} if by_vllm else {}
        how = "the kernel of the vLLM here" if by_vllm else "torch's grouped products, as no engine's kernel is here"
        say(f"experts: {how}")
    journal = open_journal(folder, settings | {"torch": machine.torch.__version__})
    if journal.readings:
        say(f"{len(journal.readings)} points are there from before")
    before, start = waited(), perf_counter()
    Session(machine, shape, shards, extent, journal, machine.clock(extent.repeats), say, hosts).all()
    late = max(waited() - before, 0.0) / (perf_counter() - start)
    step, request = host_seconds(machine, extent.repeats)
    label = model.name.replace("/", "--")
    write_tables(folder, label, machine.name, shape, journal, settings, {"step": step, "request": request}, late)
    in_node = max(shards) // hosts.nnodes
    write_whole(folder / "device.toml", [device_toml(machine, peaks(machine, extent.repeats), in_node)])
    for (operator, tp, a, b), why in journal.skipped.items():
        say(f"skipped: {operator} of TP {tp} at {a}, {b}: {why}")
    return read_profile(folder, (machine.name,), shape)


def divided(model: Model, shards: tuple[int, ...]) -> Shape:
    """The shape of a model that can be divided so. Raises InputError if it cannot be, or not be profiled."""
    shape = shape_of(Pool(model, device("h100"), Engine()))  # any device: it has no part in the shape
    for tp in shards:
        widths = [one for one in (shape.n_expanded_embd, shape.expert_inter, shape.shared_inter) if one]
        if tp < 1 or shape.n_head % tp or any(width % tp for width in widths):
            raise InputError(
                f"tensor_parallel_size={tp}: must divide {shape.n_head} heads and {', '.join(map(str, widths))}"
            )
    return shape


@dataclass(frozen=True)
class Difference:
    """How far one operator's points are apart in two profiles."""

    operator: str
    points: int
    """In both."""
    median: float
    """Of the absolute differences, as a share."""
    p90: float


def differences(one: Profile, other: Profile) -> list[Difference]:
    """By operator, over the points that both have."""
    names = dict.fromkeys(name for name, _ in one.points)
    rows = []
    for name in names:
        apart: list[float] = []
        for (operator, tp), points in one.points.items():
            if operator == name and (operator, tp) in other.points:
                there = other.points[operator, tp]
                known = dict(zip(zip(there.a, there.b, strict=True), there.seconds, strict=True))
                places = zip(points.a, points.b, points.seconds, strict=True)
                apart += [abs(known[a, b] / seconds - 1.0) for a, b, seconds in places if (a, b) in known]
        if apart:
            rows.append(Difference(name, len(apart), float(np.median(apart)), float(np.quantile(apart, 0.9))))
    return rows
