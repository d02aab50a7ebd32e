"""How close: certified gaps of the best schedules found, by number of requests.

``python -m benchmarks.infermax.gaps`` prints them; words pick rows: ``lognormal 50``, ``six`` those of six kinds of
load, as of docs/optimum.md; ``--seconds`` is the time limit of each. All requests come at once.
"""

import argparse
import os
import sys
import time

import numpy as np

from benchmarks.page import table
from windtunnel.optimum.bounds import bounds
from windtunnel.optimum.certificate import certify, gap
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.heuristics import MOST_REQUESTS
from windtunnel.optimum.objective import MAKESPAN, MEAN_E2EL, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import check
from windtunnel.optimum.search import search
from windtunnel.policy import Limits
from windtunnel.workload import builtin

OPT_13B = Cost(0.0181, 1.019e-4, 6.27e-7, 7.12e-9, 3.85e-5)
"""DistServe's fit of OPT-13B on an A100 (released simulator), as one linear cost."""
SMALL = Cost(200.0, 4.0, 1.0)
"""Of InferMax's form, for requests of a few tokens."""
MEMORY, SPREAD = 60_000, 0.8
ROWS: tuple[tuple[str, int, Objective, float], ...] = (
    ("equal", 50, MEAN_E2EL, 60.0),
    ("lognormal", 50, MEAN_E2EL, 900.0),
    ("short", 50, MEAN_E2EL, 900.0),
    ("equal", 1_000, MEAN_E2EL, 60.0),
    ("lognormal", 1_000, MEAN_E2EL, 60.0),
    ("short", 1_000, MEAN_E2EL, 60.0),
    ("equal", 1_000, MAKESPAN, 60.0),
    ("lognormal", 1_000, MAKESPAN, 60.0),
    ("equal", 10_000, MAKESPAN, 120.0),
    ("lognormal", 10_000, MAKESPAN, 120.0),
)
"""Kind, requests, objective, time limit (s)."""
SIX = ("azure-conv", "azure-code", "lognormal", "bimodal", "long", "agents")
"""Kinds of load: two public traces, and four of drawn lengths; ``long`` and ``agents``: outputs, and prompts."""
OF_SIX = tuple((kind, 1_000, objective, 120.0) for objective in (MAKESPAN, MEAN_E2EL) for kind in SIX)
DRAWN = {
    "lognormal": ((300, 2000), (150, 800)),
    "long": ((200, 1000), (1500, 6000)),
    "agents": ((6000, 20_000), (300, 1500)),
}
"""Means of prompts and outputs, and the longest ones, of lognormal lengths."""


def problem(kind: str, requests: int) -> Problem:
    """``equal``: 1000 + 200 tokens; ``short``: 4 to 12 and 1 to 6 in memory for 45 % of 50 of them; ``bimodal``:
    100 + 50 or, three of ten, 3000 + 400; others: DRAWN and SIX."""
    rng = np.random.default_rng(0)
    if kind == "short":
        prompt, output = rng.integers(4, 13, requests), rng.integers(1, 7, requests)
        blocks = int(0.45 * (prompt + output - 1).sum() * min(50 / requests, 1))
        return Problem.of(prompt, output, Limits(min(requests, 96), 96, 64, blocks, 1), SMALL)
    prompt, output = np.full(requests, 1000), np.full(requests, 200)
    if kind in DRAWN:
        prompt, output = (
            np.clip(rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, requests), 1, longest).astype(np.int64)
            for mean, longest in DRAWN[kind]
        )
    elif kind == "bimodal":
        large = rng.random(requests) < 0.3
        prompt, output = np.where(large, 3000, 100), np.where(large, 400, 50)
    elif kind in SIX:
        load = builtin(kind, num_requests=requests)
        prompt, output = load.prompt_tokens, load.output_tokens
    return Problem.of(prompt, output, Limits(256, 8192, 4000, MEMORY // 16, 16), OPT_13B)


def certified(served: Problem, objective: Objective, seconds: float) -> tuple[float, str, str]:
    """(Gap, what the bound is by, what the schedule is by).

    Of very many requests only searched schedules are looked at.
    """
    if len(served) <= MOST_REQUESTS:
        found = certify(served, objective, program="none", seconds=seconds)
        return found.gap, found.proof, found.found_by
    assert isinstance(served.times, Cost)
    schedule = search(served, served.times, objective, seconds)
    assert schedule is not None
    return gap(check(served, schedule).value(objective), bounds(served).of(objective)), "formula", "search"


def main(argv: list[str]) -> None:
    """Print the rows in which all the words are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args(argv)
    rows = []
    for kind, requests, objective, seconds in OF_SIX if "six" in given.words else ROWS:
        if not set(given.words) - {"six"} <= {kind, str(requests), str(objective)}:
            continue
        began, before = time.monotonic(), time.process_time()
        share, *makers = certified(problem(kind, requests), objective, given.seconds or seconds)
        taken = f"{time.monotonic() - began:.0f} ({time.process_time() - before:.0f})"
        rows.append((f"{requests:,} {kind}", str(objective), f"{share:.1%}", *makers, taken))
        sys.stderr.write(f"{rows[-1]}\n")
    heads = ("requests", "objective", "gap", "bound by", "schedule by", "s (of CPU)")
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    sys.stdout.write(f"{table(heads, rows)}\n\n{load}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
