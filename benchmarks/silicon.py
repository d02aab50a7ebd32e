"""Simulated against served points of many GPUs: ``python -m benchmarks.silicon [--rows N] [--backend vllm] [--all]``.

The points come with the kernel database (``silicon_sample.csv``): mean TTFT and TPOT as a client saw them. Aggregated
rows of one engine, a deterministic sample unless ``--all``. Each is a closed loop of N clients: 10·N requests (at most
MOST_REQUESTS), prompts and outputs uniform in 0.8 to 1.0 of the nominal lengths. A row that cannot be simulated counts
against the coverage. What the file says about a server, and how that is read, is in ``benchmarks.silicon_points``.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.silicon_points import Point, read_points
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import clean, request_metrics, time_share, unroll
from windtunnel.simulate import simulate
from windtunnel.workload.arrivals import AllAtOnce
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Both, Uniform
from windtunnel.workload.synthetic import generate

SHORTEST = 0.8
"""Share of the nominal length that the shortest prompts and outputs have."""

ROUNDS = 10
MOST_REQUESTS = 10_000
METRICS = ("ttft", "tpot")
BANDS = ((1, 8), (9, 32), (33, 128), (129, 1 << 30))


@dataclass(frozen=True)
class Result:
    """A served point beside its simulation; seconds."""

    point: Point
    ttft: float
    tpot: float
    modelled: float
    """Share of the step time that is modelled, not measured."""

    def error(self, metric: str) -> float:
        """Relative error of the mean."""
        return float(getattr(self, metric) / getattr(self.point, metric)) - 1.0


def workload(point: Point) -> Workload:
    """The closed loop of a point."""
    requests = min(ROUNDS * point.concurrency, MOST_REQUESTS)
    prompts, outputs = (Uniform(ceil(SHORTEST * tokens), tokens) for tokens in (point.isl, point.osl))
    return generate(AllAtOnce(), Both(prompts, outputs), requests, max_concurrency=point.concurrency, name=point.id)


def replay(point: Point) -> Result:
    """Simulate one point. Raises InputError when it cannot be."""
    run = simulate(Deployment((point.pool(),)), workload(point))
    metrics = request_metrics(run.requests)
    return Result(
        point,
        ttft=float(np.nanmean(metrics.ttft)),
        tpot=float(np.nanmean(metrics.tpot)),
        modelled=time_share(unroll(run))["modelled"],
    )


def sample(points: Sequence[Point], rows: int) -> list[Point]:
    """As many points, chosen by the hash of their id: always the same ones."""
    return sorted(points, key=lambda point: sha256(point.id.encode()).hexdigest())[:rows]


def statistics(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """For each metric: median and mean absolute relative error, and the mean signed one."""
    found = {}
    for metric in METRICS:
        errors: NDArray[np.float64] = np.array([result.error(metric) for result in results])
        found[metric] = {
            "median_ape": float(np.median(np.abs(errors))),
            "mape": float(np.mean(np.abs(errors))),
            "bias": float(np.mean(errors)),
        }
    return found


def band(point: Point) -> str:
    """The concurrency band of a point."""
    low, high = next(pair for pair in BANDS if point.concurrency <= pair[1])
    return f"{low} to {high} clients" if high < BANDS[-1][1] else f"{low} clients and more"


GROUPINGS: dict[str, Callable[[Point], str]] = {
    "all": lambda _: "all",
    "system": lambda point: point.system,
    "model": lambda point: point.model_path,
    "precision": lambda point: point.precision or "bf16",
    "concurrency": band,
}


def groups(points: Sequence[Point], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Coverage and errors by each grouping, for JSON and the table."""
    rows = []
    for grouping, of in GROUPINGS.items():
        for name in sorted({of(point) for point in points}):
            members = [result for result in results if of(result.point) == name]
            row = {"by": grouping, "group": name, "rows": sum(of(point) == name for point in points)}
            row |= {"simulated": len(members), **(statistics(members) if members else {})}
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The groups as Markdown."""
    head = "| | rows | simulated | TTFT median APE | MAPE | bias | TPOT median APE | MAPE | bias |"
    lines = [head, "|---|" + "---:|" * 8]
    for row in rows:
        cells = [
            f"{row[metric][name] * 100:+.1f} %".lstrip("+" if name != "bias" else "") for metric, name in _cells(row)
        ]
        cells = cells or ["–"] * 6
        lines.append(f"| {row['group']} | {row['rows']} | {row['simulated']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("median_ape", "mape", "bias")
    return [(metric, name) for metric in METRICS if metric in row for name in names]


def compare(points: Sequence[Point]) -> tuple[list[Result], Counter[str]]:
    """Replay points: the results, and how often each reason kept one from being simulated."""
    results: list[Result] = []
    refused: Counter[str] = Counter()
    for point in points:
        try:
            results.append(replay(point))
        except InputError as reason:
            refused[f"{point.model_path}: {reason}"] += 1
    return results, refused


def show(backend: str, rows: int | None, as_json: bool, details: bool) -> None:
    """Compare the sample and print it."""
    points = read_points(backend)
    chosen = list(points) if rows is None else sample(points, rows)
    results, refused = compare(chosen)
    by_group = groups(chosen, results)
    if as_json:
        document = {
            "backend": backend,
            "rows": len(chosen),
            "of": len(points),
            "groups": by_group,
            "refused": dict(refused),
            "points": [_document(result) for result in results],
        }
        print(json.dumps(clean(document), indent=1, allow_nan=False))
        return
    share = len(results) / len(chosen)
    print(f"{len(chosen)} of {len(points)} aggregated {backend} rows; {share * 100:.1f} % simulated.\n")
    print(table(by_group))
    for reason, count in refused.most_common():
        print(f"\nNot simulated ({count}): {reason}")
    if details:
        print()
        for result in results:
            print(json.dumps(clean(_document(result))))


def _document(result: Result) -> dict[str, Any]:
    point = result.point
    return {
        "id": point.id,
        "model": point.model_path,
        "precision": point.precision,
        "system": point.system,
        "version": point.version,
        "isl": point.isl,
        "osl": point.osl,
        "concurrency": point.concurrency,
        "tp": point.tp,
        "dp": point.dp,
        "ep": point.expert_parallel,
        "modelled": result.modelled,
        **{
            name: {
                "measured": getattr(point, name),
                "simulated": getattr(result, name),
                "error": result.error(name),
            }
            for name in METRICS
        },
    }


def main(arguments: list[str]) -> int:
    """The command; returns 2 after a wrong input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silicon", description=__doc__)
    parser.add_argument("--rows", type=int, default=120, help="size of the sample (120)")
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--backend", default="vllm", help="engine (vllm)")
    parser.add_argument("--json", action="store_true", help="print JSON, latencies in seconds")
    parser.add_argument("--details", action="store_true", help="print every point too, one JSON object a line")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.rows < 1:
            raise InputError(f"--rows {chosen.rows}: must be ≥ 1")
        show(chosen.backend, None if chosen.all else chosen.rows, chosen.json, chosen.details)
    except InputError as wrong:
        print(f"benchmarks.silicon: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
