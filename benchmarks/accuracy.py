"""How close simulated latencies come to measured ones: ``python -m benchmarks.accuracy [FOLDER] [--json]``.

FOLDER holds recordings of real engines (``benchmarks.truth``), ``../shared/truth`` unless given. Each is replayed:
arrivals and lengths as recorded, engine settings as recorded, everything else as the preset nearest to the recorded
version has it. Nothing is fitted to the recordings.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.truth import Recording, find_recordings, read_recording
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import Distribution, clean, request_metrics, time_share, unroll
from windtunnel.simulate import simulate

METRICS = ("ttft", "tpot", "e2el")
PERCENTS = (50.0, 90.0, 99.0)
STATISTICS = ("mean", "p50", "p90", "p99")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: metric → statistic → seconds, and output tokens per second from the first arrival to
    the last token."""

    latencies: Mapping[str, Mapping[str, float]]
    output_throughput: float


@dataclass(frozen=True)
class Comparison:
    """A recording beside its simulation."""

    recording: Recording
    preset: str
    measured: Side
    simulated: Side
    finished: int
    preemptions: int
    kv_blocks: int
    """Blocks of one data-parallel rank."""
    time_share: Mapping[str, float]
    warnings: tuple[str, ...]


def compare(recording: Recording) -> Comparison:
    """Replay a recording. Raises InputError when it cannot be simulated."""
    pool = recording.pool()
    run = simulate(Deployment((pool,)), recording.workload())
    requests, metrics = run.requests, request_metrics(run.requests)
    simulated = {name: getattr(metrics, name) for name in METRICS}
    return Comparison(
        recording=recording,
        preset=pool.engine.preset,
        measured=side(measured_latencies(recording), recording.arrival, recording.output_tokens),
        simulated=side(simulated, requests.arrival, requests.output_tokens),
        finished=int(np.isfinite(metrics.e2el).sum()),
        preemptions=int(requests.preemptions.sum()),
        kv_blocks=int(run.manifest["pools"][0]["kv_blocks"]),
        time_share=time_share(unroll(run)),
        warnings=(*recording.notes(), *run.manifest["warnings"]),
    )


def measured_latencies(recording: Recording) -> dict[str, Floats]:
    """Per request: ttft, tpot (the mean gap, NaN for one token), e2el."""
    gaps = recording.output_tokens - 1
    tpot = np.where(gaps > 0, (recording.e2el - recording.ttft) / np.maximum(gaps, 1), np.nan)
    return {"ttft": recording.ttft, "tpot": tpot, "e2el": recording.e2el}


def side(latencies: Mapping[str, Floats], arrival: Floats, output_tokens: NDArray[np.int64]) -> Side:
    """Statistics of requests that arrived and took so long; those that never ended (NaN) do not count."""
    ended = np.isfinite(latencies["e2el"])
    seconds = float(np.max((arrival + latencies["e2el"])[ended], initial=-np.inf)) - float(arrival.min())
    return Side(
        latencies={name: Distribution(values[ended]).statistics(PERCENTS) for name, values in latencies.items()},
        output_throughput=float(output_tokens[ended].sum()) / seconds if seconds > 0 else float("nan"),
    )


def error(measured: float, simulated: float) -> float:
    """Relative error, NaN where nothing was measured."""
    return simulated / measured - 1.0 if measured > 0 else float("nan")


def document(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON, latencies in seconds."""
    pairs = {name: (found.measured.latencies[name], found.simulated.latencies[name]) for name in METRICS}
    rate = (found.measured.output_throughput, found.simulated.output_throughput)
    cleaned: dict[str, Any] = clean(
        {
            "run": found.recording.name,
            "preset": found.preset,
            "requests": len(found.recording.arrival),
            "finished": found.finished,
            **{
                name: {
                    "measured": dict(measured),
                    "simulated": dict(simulated),
                    "error": {key: error(measured[key], simulated[key]) for key in STATISTICS},
                }
                for name, (measured, simulated) in pairs.items()
            },
            "output_throughput": {"measured": rate[0], "simulated": rate[1], "error": error(*rate)},
            "preemptions": found.preemptions,
            "kv_blocks": found.kv_blocks,
            "time_share": dict(found.time_share),
            "warnings": list(found.warnings),
        }
    )
    return cleaned


def table(found: Comparison) -> str:
    """A comparison as Markdown."""
    recording = found.recording
    lines = [
        f"### {recording.name}",
        "",
        f"{recording.model} on {recording.device}, {recording.engine} {recording.version} as {found.preset}: "
        f"{found.finished:,} of {len(recording.arrival):,} requests",
        "",
        f"| ms | | {' | '.join(STATISTICS)} |",
        f"|---|---|{'---:|' * len(STATISTICS)}",
    ]
    for name in METRICS:
        measured, simulated = found.measured.latencies[name], found.simulated.latencies[name]
        for label, values in (("measured", measured), ("simulated", simulated)):
            lines.append(f"| {name} | {label} | {' | '.join(f'{values[key] * 1e3:,.1f}' for key in STATISTICS)} |")
        errors = " | ".join(f"{error(measured[key], simulated[key]) * 100:+.1f} %" for key in STATISTICS)
        lines.append(f"| | error | {errors} |")
    rate = (found.measured.output_throughput, found.simulated.output_throughput)
    shares = ", ".join(f"{found.time_share[name] * 100:.0f} % {name}" for name in found.time_share)
    return "\n".join(
        [
            *lines,
            "",
            f"Output tokens/s: {rate[0]:,.0f} measured, {rate[1]:,.0f} simulated ({error(*rate) * 100:+.1f} %). "
            f"{found.kv_blocks:,} KV blocks a rank, {found.preemptions} preemptions. Step time: {shares}.",
            *(f"\nNote: {warning}." for warning in found.warnings),
            "",
        ]
    )


def show(folder: Path, as_json: bool) -> None:
    """Compare every recording below a folder; what cannot be simulated is printed with its reason."""
    documents = []
    for recording in [read_recording(path) for path in find_recordings(folder)]:
        try:
            found = compare(recording)
        except InputError as reason:
            documents.append({"run": recording.name, "unsupported": str(reason)})
            if not as_json:
                print(f"### {recording.name}\n\nNot supported: {reason}\n")
            continue
        documents.append(document(found))
        if not as_json:
            print(table(found))
    if as_json:
        print(json.dumps(documents, indent=1, allow_nan=False))


def main(arguments: list[str]) -> int:
    """The command; returns 2 after a wrong input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/truth"))
    parser.add_argument("--json", action="store_true", help="print JSON, latencies in seconds")
    chosen = parser.parse_args(arguments)
    try:
        show(chosen.folder, chosen.json)
    except InputError as wrong:
        print(f"benchmarks.accuracy: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
