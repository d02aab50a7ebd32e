"""What a load of any length costs: ``python -m benchmarks.unchanged.streams 1000000 3000000 [--whole] [--workers 2]``.

Prints a Markdown table: lengths of the Azure conversation trace, Poisson arrivals at 500 a second, 64 replicas of
Qwen3-32B on two H100s each, in pieces. ``--whole`` simulates the first of them at once, too, and says how far its
figures are from those of the pieces. Seconds are of the whole process and its workers, user + system.
"""

import argparse
import resource
import time
from typing import Any

from windtunnel.metrics import summary, summary_json
from windtunnel.plan.workers import processes
from windtunnel.scenario import Scenario
from windtunnel.scenario.scenario import vary
from windtunnel.scenario.streamed import stream
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import Gamma, generate
from windtunnel.workload.builtin import fit_of, lengths_of
from windtunnel.workload.synthetic import Drawn

ARRIVALS, LENGTHS = Gamma(500.0, exact_duration=True), lengths_of(fit_of("azure-conv"))
SLO = {"ttft": 1.0, "tpot": 0.05}


def used() -> float:
    """CPU seconds so far, of this process and those that it has waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def furthest(found: Any, exact: Any) -> float:
    """The largest relative difference of two documents, in what the first has."""
    if isinstance(found, dict):
        return max(
            (furthest(found[name], exact.get(name)) for name in found if name != "percentile_error"), default=0.0
        )
    if not isinstance(found, float) or not exact:
        return 0.0
    return abs(found / float(exact) - 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=int, nargs="+", help="requests")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    words = {"tensor_parallel_size": 2, "replicas": 64}
    deployment = vary(Scenario(), words).deployment()
    tables = batch_times(deployment)
    executor = processes(options.workers).make() if options.workers > 1 else None
    print(
        "| requests | CPU s | seconds | MB of the largest process | finished | ttft p99, s |\n|--:|--:|--:|--:|--:|--:|"
    )
    for place, count in enumerate(options.counts):
        before, clock = used(), time.perf_counter()
        load = Drawn(ARRIVALS, LENGTHS, count)
        found = stream(deployment, load, SLO, tables=tables, executor=executor, workers=options.workers).to_json()
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cells = f"{used() - before:.1f} | {time.perf_counter() - clock:.0f} | {peak / 1024:.0f}"
        print(f"| {count:,} | {cells} | {found['requests']['finished']:,} | {found['ttft']['p99']:.4g} |", flush=True)
        if options.whole and place == 0:
            whole = generate(ARRIVALS, LENGTHS, count)
            exact = summary_json(summary(simulate(deployment, whole, tables=tables), SLO))
            print(f"\nAt once: no figure further than {furthest(found, exact):.2g}.\n", flush=True)


if __name__ == "__main__":
    main()
