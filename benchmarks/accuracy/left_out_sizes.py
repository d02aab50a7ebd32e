"""Static batches of MI300X, one size of model left out: ``python -m benchmarks.accuracy.left_out_sizes points.jsonl``.

The share of the peak that vLLM 0.6.1 attained (``predictor.AMD_2024``) is chosen anew of SHARES by the models of the
other size, and the batches of the size that is left out are predicted with it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from windtunnel.deployment import Deployment
from windtunnel.model.layers import MoE
from windtunnel.perf import predictor
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.validation.comparison import Options
from windtunnel.validation.measured_points import MeasuredPoint, read_measured_points
from windtunnel.validation.point_replay import replay
from windtunnel.workload.columns import Workload

DEVICE = "mi300x"
SHARES = (0.055, 0.065, 0.075, 0.085, 0.1, 0.12)


@dataclass(frozen=True)
class OfShare(Options):
    """Simulations with tables of one share, which no other run may find on disk."""

    tables: dict[str, list[Tabulated]] = field(default_factory=dict)

    def run(self, deployment: Deployment, workload: Workload, client: str) -> Run:  # noqa: ARG002 - engines' clocks
        """Simulate on the clock of the engine."""
        pool = str(deployment.pools[0].spec())
        if pool not in self.tables:
            self.tables[pool] = batch_times(deployment, cache=False)
        return simulate(deployment, workload, overheads=self.overheads, tables=self.tables[pool])


def of_size(point: MeasuredPoint) -> str:
    """The size of a point's model: the larger one has experts."""
    experts = any(isinstance(layer.mlp, MoE) for _, layer in point.pool().model.layers)
    return "47B (experts)" if experts else "7 and 8B"


def error(points: Sequence[MeasuredPoint], share: float) -> float:
    """Median relative error of the latencies of points, with this share."""
    before, predictor.AMD_2024 = predictor.AMD_2024, share
    try:
        options = OfShare()
        return median(abs(replay(point, options).error("latency")) for point in points)
    finally:
        predictor.AMD_2024 = before


def left_out(points: Sequence[MeasuredPoint]) -> dict[str, tuple[float, float]]:
    """Size → the share that the other sizes choose, and the error with it."""
    sizes: dict[str, list[MeasuredPoint]] = {}
    for point in points:
        sizes.setdefault(of_size(point), []).append(point)
    found = {}
    for size, members in sizes.items():
        others = [point for point in points if of_size(point) != size]
        share = min(SHARES, key=lambda share: error(others, share))
        found[size] = share, error(members, share)
    return found


def main(paths: Sequence[str]) -> int:
    """Print a line for each size."""
    points = [point for point in read_measured_points(Path(paths[0])) if point.device == DEVICE]
    for size, (share, missed) in left_out(points).items():
        print(f"{size} left out: the others choose {share:g} of the peak, median error {missed:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
