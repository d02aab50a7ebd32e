"""How fast prefill and decode pools are simulated: ``python -m benchmarks.disaggregation.speed [--quick] [--million]``.

Prints a Markdown table of requests per second as a share of those of the same engines together: the same requests, on
as many replicas. Both are timed in turn in one process, and each ratio is the median of those of single turns.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from benchmarks.speed import LEAST_OUTSTANDING, LOADS, Load, demand, fleet
from windtunnel.core.disaggregation.handover import Crossing
from windtunnel.core.disaggregation.handover import run as run_disaggregated
from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.deployment import HANDOVERS, find_link

KV_BYTES = 131_072
"""Of a token: Llama-3.1-8B."""
IN_FLIGHT = 48
"""Requests of a closed loop, for each replica."""


@dataclass(frozen=True)
class Kind:
    """What is between the pools, and how the requests come."""

    name: str
    handover: str = "ideal"
    closed: bool = False

    def crossing(self, asked: Demand) -> Crossing:
        """The link, with its work."""
        rules = HANDOVERS[self.handover]
        if rules.transfer == "none":
            return Crossing(rules=rules)
        link, sizes = find_link("vllm-mooncake-8x400g"), (asked.prompt_tokens * KV_BYTES).astype(np.float64)
        return Crossing(link, rules, sizes, link.work(sizes))


KINDS = (
    Kind("a free link, open loop"),
    Kind("a link, open loop", "vllm-0.32-nixl-pull"),
    Kind("a free link, closed loop", closed=True),
    Kind("a link, closed loop", "vllm-0.32-nixl-pull", closed=True),
)


def apart(together: Fleet, pairs: int) -> Fleet:
    """The same engine twice: ``pairs`` replicas for prompts, and as many that decode."""
    names = ("limits", "policies", "times", "lanes", "lockstep")
    columns = {name: getattr(together, name) * 2 for name in names}
    return Fleet(**columns, replicas=(pairs, pairs), roles=("prefill", "decode"))


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds."""
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(kind: Kind, load: Load, pairs: int, requests: int, repeats: int) -> tuple[float, float]:
    """(CPU seconds of a request apart, its requests/s as a share of those together)."""
    asked, served = demand(load, requests, 2 * pairs), fleet(load, 2 * pairs, True)
    if kind.closed:
        asked = replace(asked, max_concurrency=2 * pairs * IN_FLIGHT, turnaround=np.zeros(requests))
    split, crossing, numbers = apart(served, pairs), kind.crossing(asked), np.zeros((2, requests))
    routers = (LEAST_OUTSTANDING, LEAST_OUTSTANDING)
    times = [
        (
            seconds(lambda: run(served, asked, LEAST_OUTSTANDING, numbers[0])),
            seconds(lambda: run_disaggregated(split, asked, routers, numbers, crossing)),
        )
        for _ in range(repeats)
    ]
    return median(one[1] for one in times) / requests, median(one[0] / one[1] for one in times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and requests")
    parser.add_argument("--million", action="store_true", help="64 + 64 replicas with a million requests, too")
    options = parser.parse_args()
    requests, repeats = (20_000, 3) if options.quick else (100_000, 7)
    for kind in KINDS:
        compare(kind, LOADS[0], 1, 100, 1)
    names = " | ".join(load.name for load in LOADS)
    print(f"| apart : together, ns per request | replicas | {names} |\n|---|---:|---:|---:|---:|")
    for kind in KINDS:
        for pairs in (1, 4, 64):
            found = [compare(kind, load, pairs, requests, repeats) for load in LOADS]
            cells = " | ".join(f"{ratio:.2f}, {one * 1e9:,.0f}" for one, ratio in found)
            print(f"| {kind.name} | {pairs} + {pairs} | {cells} |", flush=True)
    if options.million:
        for kind in KINDS[:2]:
            one, ratio = compare(kind, LOADS[1], 64, 1_000_000, 1)
            print(f"\nA million requests, medium load, 64 + 64 replicas, {kind.name}: {one * 1e6:.1f} s, {ratio:.2f}")


if __name__ == "__main__":
    main()
