"""Servers under open loads, by device and number of GPUs: ``python -m benchmarks.accuracy.open_loads FOLDER``.

FOLDER holds ``points.jsonl`` in the form of ``windtunnel validate FILE.jsonl``, with a ``rate``: points above 16
requests per second (whole bursts) are left out. Prompts and answers were ShareGPT's, of which the points know the means
alone: lengths are drawn (``point_replay``).
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from windtunnel.validation.measured_points import MeasuredPoint, read_measured_points
from windtunnel.validation.point_replay import Replayed, replay

FASTEST = 16.0
"""Requests per second of the fastest points."""
CALM, SATURATED = 1.0, 3.0
"""a calm server gives first tokens within a second in the mean; it is predicted saturated where the simulated
mean is beyond that, and so many times the measured one."""


def points_of(folder: Path) -> list[MeasuredPoint]:
    """The points of a folder, without the fastest."""
    lines = (folder / "points.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [json.loads(line) for line in lines if json.loads(line)["rate"] <= FASTEST]
    for point in kept:
        point["requests"] = str((folder / point["requests"]).resolve())
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "points.jsonl"
        file.write_text("".join(json.dumps(point) + "\n" for point in kept), encoding="utf-8")
        return read_measured_points(file)


def replayed(folder: Path) -> list[Replayed]:
    """The points of a folder with their simulations."""
    return [replay(point) for point in points_of(folder)]


def falsely_saturated(result: Replayed) -> bool:
    """Whether a calm server is predicted to be saturated."""
    measured, simulated = result.point.measured["ttft"], result.simulated["ttft"]
    return measured < CALM < simulated and simulated > SATURATED * measured


def main() -> None:
    """Print a line for every device and number of GPUs, and the points that are predicted saturated."""
    found: dict[str, list[Replayed]] = defaultdict(list)
    for result in replayed(Path(sys.argv[1])):
        point = result.point
        if result.reason:
            print(f"{point.id}: {result.reason}")
            continue
        found[f"{point.device} × {point.settings.get('tensor_parallel_size', 1)}"].append(result)
        if falsely_saturated(result):
            print(
                f"{point.id}: first tokens after {point.measured['ttft']:.2g} s, here {result.simulated['ttft']:.2g} s"
            )
    for name, results in sorted(found.items()):
        errors = [result.error("tpot") for result in results]
        first = median(abs(result.error("ttft")) for result in results)
        print(
            f"{name}: {len(results)} points, TPOT median {median(map(abs, errors)):.1%}, bias {median(errors):+.1%}; "
            f"TTFT median {first:.1%}; {sum(map(falsely_saturated, results))} calm ones predicted saturated"
        )


if __name__ == "__main__":
    main()
