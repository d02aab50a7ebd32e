"""profile: measure the operators of a model on this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT
from windtunnel.profiling.collectives import ALONE, Hosts
from windtunnel.profiling.sizes import Extent

if TYPE_CHECKING:
    from windtunnel.hardware import Device
    from windtunnel.model import Model
    from windtunnel.perf.profile.folder import Profile


def profile(
    model: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("profile"),
    device_kind: Literal["auto", "cuda", "cpu"] = "auto",
    name: str = "",
    tensor_parallel_size: tuple[int, ...] = (1,),
    points: Annotated[Extent, Parameter(name="*")] = Extent(),  # noqa: B008 - frozen
    threads: int = 0,
    dry_run: bool = False,
    hosts: Annotated[Hosts, Parameter(name="*")] = ALONE,
    against: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
) -> None:
    """Measure the operators of a model's shards on this machine, with torch.

    Writes Vidur's CSV files, profile.json and device.toml, which run reads with --perf profile:FOLDER --device NAME
    --devices-file FOLDER/device.toml. Started again with the same settings it goes on where it was stopped.

    Parameters
    ----------
    model
        A name of windtunnel list models, or a config.json or its folder: attention and networks.
    output
        Folder of the profile.
    device_kind
        cuda, cpu, or auto: a GPU if torch sees one.
    name
        What the device is called in the profile; without one torch's name of it.
    tensor_parallel_size
        Degrees whose shards are measured, all on one device; all-reduces of this many processes.
    threads
        Of torch on a CPU; 0: as many as it takes by itself.
    dry_run
        Measure nothing: print operators, shapes, points and about how many minutes they take. Needs no torch where
        --name is a device of windtunnel list devices.
    against
        Another profile folder: print how far this one is from it, by operator.
    """
    from windtunnel.model import load_model
    from windtunnel.perf.profile.folder import read_profile
    from windtunnel.profiling.machine import find_machine
    from windtunnel.profiling.profile import help_measuring
    from windtunnel.profiling.profile import profile as measure

    shards = tuple(sorted(set(tensor_parallel_size)))
    known = load_model(model)
    if dry_run:
        _preview(known, shards, points, name, device_kind, threads)
        return
    machine = find_machine(device_kind, name, threads)
    if hosts.node_rank:
        help_measuring(machine, known, shards, points, hosts, _say)
        return
    measured = measure(machine, known, shards, points, output, _say, hosts)
    _show(measured)
    if against is not None:
        _show_difference(measured, read_profile(against, (machine.name,), measured.shape))
    place = f"--device {machine.name} --devices-file {output / 'device.toml'}"
    sys.stdout.write(f"\nuse it: windtunnel run --model {model} {place} --perf profile:{output}\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def _preview(model: "Model", shards: tuple[int, ...], points: Extent, name: str, kind: str, threads: int) -> None:
    from windtunnel.cli.terminal import remarks, show, table
    from windtunnel.profiling.preview import preview
    from windtunnel.profiling.profile import divided

    device = _device(name, kind, threads)
    asked = preview(divided(model, shards), shards, points, device)
    rows = [
        [
            f"{one.operator} TP {one.shards}",
            one.describe,
            str(one.points),
            f"{one.largest[0]:,}" + (f" × {one.largest[1]:,}" if one.largest[1] else ""),
            "–" if one.seconds is None else f"{one.seconds / 60:.2f}",
        ]
        for one in asked
    ]
    total = sum(one.seconds or 0.0 for one in asked) / 60
    what = f"{sum(one.points for one in asked)} points at most"
    title = f"{model.name}: {what}" + (f", about {total:.1f} minutes on {device.name}" if device else "")
    said = (
        [] if device else ["for minutes install torch, or name a device of windtunnel list devices, e.g. --name h100"]
    )
    show(table(["operator", "a shard computes", "points", "largest", "minutes"], rows, title), *remarks(said))


def _device(name: str, kind: str, threads: int) -> "Device | None":
    """A device of this name, or else the machine here if torch is there to measure its peaks."""
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    from windtunnel.hardware import device, load_devices
    from windtunnel.profiling.machine import device_toml, find_machine, peaks

    known = {alias for one in load_devices().values() for alias in (one.name, *one.aliases)}
    if name.lower().replace("-", "_") in known:
        return device(name)
    if not find_spec("torch"):
        return None
    machine = find_machine(kind, name, threads)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "device.toml"
        path.write_text(device_toml(machine, peaks(machine, 3), 1), encoding="utf-8")
        return device(machine.name, [path])


def _show(measured: "Profile") -> None:
    from windtunnel.cli.terminal import remarks, show, table
    from windtunnel.errors import InputError
    from windtunnel.perf.estimators.kinds import DEFAULT, grid
    from windtunnel.perf.estimators.selection import errors, held_out
    from windtunnel.perf.profile.folder import unsteady

    repeats, rows = measured.about["repeats_differ"], []
    for (operator, tp), points in measured.points.items():
        try:
            apart = f"{100 * errors(held_out(grid(DEFAULT)[0], points)).median:.1f}"
        except InputError:
            apart = "–"
        again = f"{100 * repeats[operator]:.1f}" if operator in repeats else "–"
        times = [f"{1e6 * points.seconds[i]:.1f}" for i in (points.seconds.argmin(), points.seconds.argmax())]
        rows.append([f"{operator} TP {tp}", str(len(points)), *times, apart, again])
    names = ["operator", "points", "least µs", "most µs", "held out %", "again %"]
    title = f"{measured.device}: median error of a fifth of the points from the others; of points measured again"
    said = []
    if skewed := sorted(row["times"] for row in measured.about.get("skew", [])):
        middle, most = skewed[len(skewed) // 2], skewed[-1]
        said = [
            f"where one request has half of all keys, decode attention takes {middle:.2f} times as long (median, at "
            f"most {most:.2f}), in two calls: runs know the keys of a step together"
        ]
    trouble = unsteady(measured.about)
    show(table(names, rows, title), *remarks([*said, *([trouble] if trouble else [])]))


def _show_difference(one: "Profile", other: "Profile") -> None:
    from windtunnel.cli.terminal import show, table
    from windtunnel.profiling.profile import differences

    rows = [
        [row.operator, str(row.points), f"{100 * row.median:.1f}", f"{100 * row.p90:.1f}"]
        for row in differences(one, other)
    ]
    show(table(["operator", "points in both", "median %", "p90 %"], rows, "difference of the two profiles"))
