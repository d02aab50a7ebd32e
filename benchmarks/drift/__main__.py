"""Run random workloads through an engine's real schedulers and through our presets, and show where they differ.

``python -m benchmarks.drift ENGINE WHEEL…``, e.g. ``vllm wheels/*.whl`` or ``sglang sglang-0.5.23-….whl``: each WHEEL
is one (``pip download --no-deps``), or the folder in which it is unpacked. Every release is held to the scheduler of
the preset that stands for its version in a run, or to ``--preset``. A real scheduler runs in an interpreter of its own
that has what the engine imports (``--python``; for vLLM this project's will do). ``--inputs`` runs the inputs of
recordings instead. Of a release's cases that differ the one with the fewest requests is made smaller, as long as some
step stays unequal; it is kept in ``--keep``, and both decisions of its first unequal step are printed. Exits with 1
then.

Small workloads are sooner done in plain Python: ``NUMBA_DISABLE_JIT=1``. With ``--record FOLDER`` what is equal is also
kept there, as a recording: the input, and the real scheduler's steps.

An engine is two files: ``ENGINE.py`` says which settings and workloads there are, ``real_ENGINE.py`` answers each input
of a recording, a line of JSON on standard input, with its records and whether the engine died.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.cli.replay import SCHEDULERS
from windtunnel.deployment.presets import PRESETS
from windtunnel.deployment.versions import nearest_preset, version_key
from windtunnel.errors import InputError
from windtunnel.replay.recording import read_recording

HERE = Path(__file__).parent
ENGINES = sorted(path.stem.removeprefix("real_") for path in HERE.glob("real_*.py"))
TIMES = ("t_sched", "t_start", "t_end")
TO_100_NS = 7

Json = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Where the records of one workload differ first."""

    step: int
    field: str
    real: list[Json]
    ours: list[Json]


class Real:
    """The engine's own scheduler, in a process."""

    def __init__(self, engine: str, python: str, folder: Path) -> None:
        command = (python, "-W", "ignore", str(HERE / f"real_{engine}.py"), str(folder))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def steps(self, document: Json) -> tuple[list[Json], str]:
        """What it decides in each step, and what it died of. Raises InputError when the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(document) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise InputError(f"{self.process.args!r}: ended with {self.process.wait()}; see what it printed above")
        found = json.loads(answer)
        return found["steps"], found["died"]


def our_steps(document: Json, preset: str) -> tuple[list[Json], str]:
    """The same of the preset."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.in.json"
        path.write_text(json.dumps(document))
        recording = read_recording(path)
    steps: list[Json] = []
    try:
        for record in import_module(SCHEDULERS[preset]).replay(recording, preset):
            if record["type"] == "stuck":
                return steps, "goes on for ever"
            steps.extend([record] if record["type"] == "step" else [])
    except InputError as error:
        return steps, str(error)
    return steps, ""


def same(field: str, real: Any, ours: Any) -> bool:
    """Whether two values of a field are equal, in the same order; times to 100 ns."""
    if field in TIMES:
        return bool(round(real, TO_100_NS) == round(ours, TO_100_NS))
    if isinstance(real, dict) and isinstance(ours, dict):
        real, ours = list(real.items()), list(ours.items())
    return bool(real == ours)


def compare(document: Json, real: Real, preset: str) -> Difference | None:
    """Where a workload is decided otherwise, if anywhere."""
    return differing(document, *real.steps(document), preset)


def differing(document: Json, theirs: list[Json], died: str, preset: str) -> Difference | None:
    """Where the preset decides otherwise than the engine did, if anywhere."""
    ours, ours_died = our_steps(document, preset)
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        for field, value in one.items():
            if field not in other or not same(field, value, other[field]):
                return Difference(number, field, theirs, ours)
    both = min(len(theirs), len(ours))
    if bool(died) != bool(ours_died):
        return Difference(both, f"real: {died or 'goes on'}; ours: {ours_died or 'goes on'}", theirs, ours)
    if len(theirs) != len(ours) and not died:  # who dies may leave no steps
        return Difference(both, "number of steps", theirs, ours)
    return None


def keep(document: Json, steps: list[Json], path: Path) -> None:
    """Write a recording: ``path``, and beside it the steps, compressed."""
    path.write_text(json.dumps(document))
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    trace = path.with_name(path.name.replace(".in.json", ".trace.jsonl.gz"))
    trace.write_bytes(gzip.compress(lines.encode(), mtime=0))


def standing(rows: list[Json]) -> list[Json]:
    """Those of the rows that name only others of them."""
    names = set[str]()
    for row in rows:
        if names.issuperset((*row.get("after", ()), *row.get("begins", ())[:1])):
            names.add(row["id"])
    return [row for row in rows if row["id"] in names]


def smaller(document: Json, found: Difference, real: Real, preset: str) -> tuple[Json, Difference]:
    """The case without later arrivals, then without halves, quarters … and single requests, while it stays unequal."""

    def tried(rows: list[Json]) -> Difference | None:
        return compare({**document, "requests": rows}, real, preset) if rows else None

    if found.step < len(found.real):
        start = found.real[found.step]["t_start"]
        rows = standing([row for row in document["requests"] if row.get("arrival", 0) <= start])
        if (less := tried(rows)) is not None:
            document, found = {**document, "requests": rows}, less
    size = max(len(document["requests"]) // 2, 1)
    while size > 0:
        first = 0
        while first < len(document["requests"]):
            rows = standing(document["requests"][:first] + document["requests"][first + size :])
            if (less := tried(rows)) is None:
                first += size
            else:
                document, found = {**document, "requests": rows}, less
        size //= 2
    return document, found


def show(document: Json, found: Difference) -> None:
    """Print a case, and what both decided in the step that differs and the one before it."""
    print(f"smallest: {len(document['requests'])} requests, step {found.step}, {found.field}")
    print(json.dumps(document))
    for who, steps in (("real", found.real), ("ours", found.ours)):
        for number in (found.step - 1, found.step):
            if 0 <= number < len(steps):
                print(f"{who} {number}: {json.dumps(steps[number])}")


@contextmanager
def unpacked(wheel: Path) -> Iterator[Path]:
    """The folder of an unpacked wheel; a file is unpacked for as long as it is used, without compiled parts."""
    if wheel.is_dir():
        yield wheel
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
        yield Path(folder)


def release(wheel: Path) -> str:
    """The version of a wheel, from its name or that of its folder of metadata, else from the folder's own name."""
    if not wheel.is_dir():
        return wheel.name.split("-")[1]
    found = next(wheel.glob("*.dist-info"), wheel).name.removesuffix(".dist-info")
    return found.rpartition("-")[2]


@dataclass
class Held:
    """Workloads, and what is known of them: releases that decide alike are compared with a preset once."""

    documents: list[Json]
    known: dict[tuple[str, int, int], Difference | None]

    def hold(self, real: Real, preset: str, engine: str, record: Path | None) -> list[tuple[Json, Difference]]:
        """Those that the preset decides otherwise; the others are recorded, if there is a folder for them."""
        unequal: list[tuple[Json, Difference]] = []
        for number, document in enumerate(self.documents):
            steps, died = real.steps(document)
            key = preset, number, hash((json.dumps(steps), died))
            if key not in self.known:
                self.known[key] = differing(document, steps, died, preset)
            if (found := self.known[key]) is not None:
                unequal.append((document, found))
                print(f"workload {number}: step {found.step}, {found.field}", flush=True)
            elif record is not None:
                record.mkdir(parents=True, exist_ok=True)
                keep(document, steps, record / f"{engine}_{number:03}.in.json")
        return unequal


def main() -> int:
    """See the module."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=main.__doc__)
    arguments.add_argument("engine", choices=ENGINES)
    arguments.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    arguments.add_argument("--preset", help="a scheduler of `windtunnel replay`; default: that of the version's preset")
    arguments.add_argument("--python", default=os.environ.get("WINDTUNNEL_DRIFT_PYTHON", sys.executable))
    arguments.add_argument("--number", type=int, default=200, help="of workloads")
    arguments.add_argument("--inputs", type=Path, metavar="FOLDER", help="of *.in.json, instead of random workloads")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--record", type=Path, metavar="FOLDER")
    arguments.add_argument("--keep", type=Path, default=Path("drift.in.json"))
    given = arguments.parse_args()
    engine, draw = import_module(f"benchmarks.drift.{given.engine}"), random.Random(given.seed)
    inputs = sorted(given.inputs.glob("*.in.json")) if given.inputs else []
    documents = [json.loads(path.read_text()) for path in inputs]
    if given.inputs is None:
        documents = [engine.workload(draw) for _ in range(given.number)]
    held, ends = Held(documents, {}), 0
    for wheel in sorted(given.wheels, key=lambda wheel: version_key(release(wheel))):
        with unpacked(wheel) as folder:
            real = Real(given.engine, given.python, folder)
            ends |= held_to(real, release(wheel), held, given)
            real.process.kill()
            real.process.wait()
    return ends


def held_to(real: Real, version: str, held: Held, given: argparse.Namespace) -> int:
    """Print how many workloads of a release the preset decides alike, and its smallest that it does not; 1 if any."""
    stands_for_it = nearest_preset(given.engine, version)
    preset = given.preset or PRESETS[stands_for_it].rules
    words = f"{version}: scheduler {preset}, preset {stands_for_it}"
    try:
        unequal = held.hold(real, preset, given.engine, given.record)
    except InputError as error:  # a release whose parts have other names
        print(f"{words}: not run, {error}", flush=True)
        return 1
    print(f"{words}: {len(held.documents) - len(unequal)} of {len(held.documents)} equal", flush=True)
    if not unequal:
        return 0
    case = min(unequal, key=lambda one: (len(one[0]["requests"]), one[1].step))
    document, found = smaller(*case, real, preset)
    given.keep.write_text(json.dumps(document, indent=1))
    show(document, found)
    return 1


if __name__ == "__main__":
    sys.exit(main())
