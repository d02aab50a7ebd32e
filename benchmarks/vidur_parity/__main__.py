"""Parity with Vidur: ``python -m benchmarks.vidur_parity FOLDER... [--perf profile:FOLDER]``.

A folder holds a run of Vidur: config.json, requests.csv, batches.csv and tables.npz, as ../shared/vidur/reference does.
It runs again on the oracle, with a ``Policy`` for its scheduler and batch times from its own tables: every
batch time must agree within 1e-9 of itself, and every request's first token and end within 1e-6 s. With ``--perf`` the
times come from estimators trained on that folder of Vidur's profile instead, and the mean end-to-end latency must agree
within 2 %. The exit code is 1 if anything does not.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.vidur_parity.given import Given, read
from benchmarks.vidur_parity.serve import Floats, Served, serve
from benchmarks.vidur_parity.times import StageSeconds, from_tables
from windtunnel.errors import InputError

BATCH, SECONDS, MEAN = 1e-9, 1e-6, 0.02


def report(given: Given, served: Served) -> bool:
    """Print how far the run is from Vidur's; whether it is the same."""
    counts = {
        "batch_num_tokens": served.column(lambda one: sum(part.tokens for part in one.batch.scheduled)),
        "batch_num_prefill_tokens": served.column(lambda one: sum(tokens for tokens, _ in one.batch.chunks)),
        "batch_size": served.column(lambda one: len(one.batch.scheduled)),
    }
    theirs = given.batches["batch_execution_time"]
    print(f"{given.folder.name}: {len(served.requests)} requests, {len(theirs)} batches")
    if len(served.batches) != len(theirs) or any(not np.array_equal(counts[key], given.batches[key]) for key in counts):
        print(f"  batches differ: {len(served.batches)} against {len(theirs)}, the first is {_first(given, counts)}")
        same = False
    else:
        ours = served.column(lambda one: one.end - one.at)
        error = float(np.max(np.abs(ours / theirs - 1.0)))
        print(f"  batches: equal in tokens and size, times within {error:.1e} of themselves (allowed {BATCH:.0e})")
        same = error <= BATCH
    for name, column in (("first_token", "prefill_completed_at"), ("finish", "completed_at")):
        mine = np.array([getattr(request, name) for request in served.requests])
        apart = float(np.max(np.abs(mine - given.requests[column])))
        print(f"  {name}: within {apart:.1e} s (allowed {SECONDS:.0e})")
        same &= apart <= SECONDS
    evictions = sum(request.preemptions for request in served.requests)
    restarts = int(given.requests["num_restarts"].sum())
    print(f"  restarts: {evictions} against {restarts}")
    return same and evictions == restarts


def _first(given: Given, counts: dict[str, Floats]) -> str:
    """The first batch that differs."""
    shorter = min(len(given.batches["batch_size"]), len(counts["batch_size"]))
    for i in range(shorter):
        mine, theirs = ([int(table[key][i]) for key in counts] for table in (counts, given.batches))
        if mine != theirs:
            return f"number {i}: {mine} against {theirs} ({', '.join(counts)})"
    return f"number {shorter}"


def report_profile(given: Given, served: Served) -> bool:
    """Print how far the latencies are from Vidur's; whether the mean end to end is near enough."""
    arrival = given.requests["arrived_at"]
    near = False
    for name, attribute, column in (
        ("ttft", "first_token", "prefill_completed_at"),
        ("e2el", "finish", "completed_at"),
    ):
        mine = np.array([getattr(request, attribute) for request in served.requests]) - arrival
        error = float(mine.mean() / (given.requests[column] - arrival).mean() - 1.0)
        print(f"  mean {name}: {100 * error:+.2f} %")
        near = abs(error) <= MEAN
    print(f"  allowed for e2el: {100 * MEAN:.0f} %")
    return near


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the folders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vidur_parity", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--perf", metavar="profile:FOLDER", help="times by our estimators of a folder of Vidur's profile"
    )
    options = parser.parse_args(argv)
    same = True
    try:
        for folder in options.folders:
            given = read(folder)
            if options.perf is None:
                same &= report(given, serve(given, StageSeconds(given, from_tables(folder / "tables.npz"))))
            else:
                from benchmarks.vidur_parity.estimated import estimated

                print(f"{folder.name}, times by {options.perf}")
                profile = Path(options.perf.removeprefix("profile:"))
                same &= report_profile(given, serve(given, StageSeconds(given, estimated(given, profile))))
    except InputError as error:
        print(f"vidur_parity: {error}", file=sys.stderr)
        return 2
    print("same" if same else "NOT the same")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
