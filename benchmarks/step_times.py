"""Decode steps of recorded runs beside the simulated ones: ``python -m benchmarks.step_times [FOLDER] [--bin S]``.

A request that decodes from its first to its last token passes output_tokens − 1 steps, so the steps per second of each
bin of time follow from all requests together by least squares. Bins in which no request got its first token, and all
that ran had been running, are pure decode: their mean batch is asked of ``windtunnel.perf.explain`` (ranks in lockstep
share the requests evenly, which a real balancer does not quite).
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.truth import Recording, find_recordings, read_recording
from windtunnel.errors import InputError
from windtunnel.perf.batch import Batch
from windtunnel.perf.explain import explain

SMOOTH = 0.02
"""Weight of equal rates in neighbouring bins, as a share of the requests' own; keeps empty bins defined."""

FEWEST = 4
"""Fewer running requests say too little about their bin."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """A stretch of pure decode: where, how many requests with how many cached tokens, and seconds per step."""

    at: float
    running: int
    cached_tokens: int
    measured: float


def step_rates(recording: Recording, edges: Floats) -> Floats:
    """Steps per second in each bin."""
    first, last = recording.arrival + recording.ttft, recording.arrival + recording.e2el
    overlap = np.clip(np.minimum(last[:, None], edges[1:]) - np.maximum(first[:, None], edges[:-1]), 0.0, None)
    weight = SMOOTH * float(np.sqrt(overlap.sum(axis=0).max()))
    smooth = weight * np.diff(np.eye(len(edges) - 1), axis=0)
    wanted = np.concatenate([recording.output_tokens - 1, np.zeros(len(smooth))])
    rates: Floats = np.linalg.lstsq(np.vstack([overlap, smooth]), wanted, rcond=None)[0]
    return rates


def decode_bins(recording: Recording, width: float) -> Iterator[Bin]:
    """The bins of a recording in which nothing but decode happens."""
    first, last = recording.arrival + recording.ttft, recording.arrival + recording.e2el
    edges = np.arange(0.0, last.max() + width, width)
    for low, high, rate in zip(edges[:-1], edges[1:], step_rates(recording, edges), strict=True):
        middle = 0.5 * (low + high)
        on = (first <= middle) & (last > middle)
        if ((first >= low) & (first < high)).any() or on.sum() < FEWEST or rate <= 0:
            continue
        done = (middle - first[on]) / (last[on] - first[on])
        cached = recording.prompt_tokens[on] + done * recording.output_tokens[on]
        yield Bin(middle, int(on.sum()), int(cached.sum()), 1.0 / float(rate))


def show(recording: Recording, width: float) -> None:
    """Print a table of one recording."""
    pool = recording.pool()
    ranks = pool.engine.data_parallel_size
    print(f"### {recording.name}\n")
    print("| at, s | running | cached tokens | measured step, ms | simulated | difference, ms | error |")
    print("|" + "---:|" * 7)
    for one in decode_bins(recording, width):
        decodes = min(-(-one.running // ranks), pool.engine.seqs)
        simulated = explain(pool, Batch(decodes=decodes, kv_tokens=one.cached_tokens // ranks)).total_seconds
        batch = f"| {one.at:.0f} | {one.running} | {one.cached_tokens:,} | {one.measured * 1e3:.1f} | "
        off = f" | {(simulated - one.measured) * 1e3:+.1f} | {(simulated / one.measured - 1) * 100:+.0f} % |"
        print(f"{batch}{simulated * 1e3:.1f}{off}")
    print()


def main(arguments: list[str]) -> int:
    """The command; returns 2 after a wrong input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_times", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/truth"))
    parser.add_argument("--bin", type=float, default=2.0, help="seconds (2)")
    chosen = parser.parse_args(arguments)
    try:
        if not chosen.bin > 0:
            raise InputError(f"--bin {chosen.bin}: must be > 0")
        for path in find_recordings(chosen.folder):
            show(read_recording(path), chosen.bin)
    except InputError as wrong:
        print(f"benchmarks.step_times: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
