"""Whether a run's ranges, which closed loops decided, hold under open loads and for percentiles:
``python -m benchmarks.accuracy.open_ranges POINTS RUN…``.

POINTS is a folder as of ``open_loads``, of means; each RUN a folder that ``windtunnel validate`` takes, with every
request's latencies. Measured values are held against the 90 % range around the simulated one.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.accuracy.open_loads import points_of
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics.bands import Bands, bands
from windtunnel.validation.comparison import PLAIN
from windtunnel.validation.measured_run import read_measured_run

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft", "tpot", "e2el")


def inside(found: Bands, latency: str, statistic: str, measured: float) -> bool:
    """Whether a measured value lies in the range around the simulated one."""
    ends = found.around(latency, statistic)
    return ends is not None and ends[0] <= measured <= ends[1]


def of_points(folder: Path) -> dict[str, Counter[bool]]:
    """Means of open loads by latency: how many lie inside."""
    held = {name: Counter[bool]() for name in ("ttft", "tpot")}
    for point in points_of(folder):
        try:
            found = bands(PLAIN.run(Deployment((point.pool(),)), point.workload, point.client))
        except InputError:
            continue
        for name, count in held.items():
            count[inside(found, name, "mean", point.measured[name])] += 1
    return held


def of_run(folder: Path) -> dict[tuple[str, str], tuple[float, bool]]:
    """Of one run by latency and statistic: (measured by simulated, whether it lies inside)."""
    measured = read_measured_run(folder)
    of = measured.measurement
    found = bands(PLAIN.run(Deployment((measured.pool(),)), of.workload, of.client))
    answer = {}
    for name in LATENCIES:
        assert of.requests is not None
        values = of.requests.latencies[name]
        for statistic in STATISTICS:
            real = float(np.mean(values) if statistic == "mean" else np.nanpercentile(values, int(statistic[1:])))
            answer[name, statistic] = real / found.said[name][statistic], inside(found, name, statistic, real)
    return answer


def main() -> None:
    """Print how many lie inside, and a line for every run and latency."""
    for name, count in of_points(Path(sys.argv[1])).items():
        print(f"open loads, mean {name}: {count[True]} of {count.total()} inside the 90 % range")
    held = Counter[bool]()
    for folder in map(Path, sys.argv[2:]):
        found = of_run(folder)
        held.update(one for _, one in found.values())
        for name in LATENCIES:
            cells = (found[name, statistic] for statistic in STATISTICS)
            words = (f"{ratio:.2f}{'' if there else ' outside'}" for ratio, there in cells)
            print(f"{folder.name} {name}: measured / simulated at {', '.join(STATISTICS)}: {', '.join(words)}")
    print(f"{held[True]} of {held.total()} means and percentiles of the runs inside")


if __name__ == "__main__":
    main()
