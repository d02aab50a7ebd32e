"""Derive ``data/served_errors.toml`` from served points: ``python -m benchmarks.accuracy.served_errors``.

The (model, system) groups of the points fall into two halves by the hash of their names. The ends of the bands are
quantiles of the first half; the share of the second half's measured values within them is printed with the file, and
that of other halves drawn at random.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.simulate.error_band import LEVEL, ServedErrors
from windtunnel.validation.served_points import Point, read_points
from windtunnel.validation.served_replay import Result, replay

FLOORS = (0.02, 0.05, 0.1, 0.2, 0.4)
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Never 0: most served points are near the data, and would make a run far from it look as certain."""

DRAWS = 200

LATER = ("nvidia/Qwen3-32B-NVFP4 on b200_sxm", "nvidia/Qwen3-32B-NVFP4 on gb200")
"""Groups first simulated after the halves were drawn. They are in the second half, so that no group which decided a
number changes sides."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Sample:
    """Served points that were simulated: log of measured over simulated, and the error of their kernels."""

    group: NDArray[np.str_]
    engine: NDArray[np.str_]
    error: Floats
    tpot: Floats
    ttft: Floats

    def part(self, keep: Mask) -> "Sample":
        """The points of a mask."""
        return Sample(self.group[keep], self.engine[keep], self.error[keep], self.tpot[keep], self.ttft[keep])


def sample(results: Sequence[Result]) -> Sample:
    """The sample behind the bands, from replayed points."""
    known = [result for result in results if not result.reason]
    return Sample(
        np.array([group_of(result.point) for result in known]),
        np.array([result.point.backend for result in known]),
        np.array([result.kernel_error for result in known]),
        np.array([np.log(result.point.tpot / result.tpot) for result in known]),
        np.array([np.log(result.point.ttft / result.ttft) for result in known]),
    )


def group_of(point: Point) -> str:
    """Model and system of a point."""
    return f"{point.model_path} on {point.system}"


def first_half(groups: NDArray[np.str_]) -> Mask:
    """Every other group in the order of the hash of its name, none of LATER."""
    names = sorted(set(groups.tolist()) - set(LATER), key=lambda name: sha256(name.encode()).hexdigest())
    return np.isin(groups, names[::2])


def fit_engines(points: Sample) -> dict[str, ServedErrors]:
    """One band of steps for all, since groups of models and systems are few; the first token's by each engine's own
    points, whose admission is simulated more or less closely."""
    step = fit_step(points)
    return {str(name): first_token(points.part(points.engine == name), step) for name in np.unique(points.engine)}


def fit_step(points: Sample) -> ServedErrors:
    """The narrowest band of steps, of those tried, that holds LEVEL of the tpot, each side missing as many."""
    best, narrowest = None, np.inf
    for floor in FLOORS:
        for scale in SCALES:
            spread = np.hypot(floor, scale * points.error)
            low, high = ends(points.tpot / spread)
            width = float(np.mean((high - low) * spread))
            if width < narrowest:
                best, narrowest = ServedErrors(floor, scale, low, high, 0.0, 0.0), width
    assert best is not None
    return best


def first_token(points: Sample, step: ServedErrors) -> ServedErrors:
    """The band of steps, widened for the first token by what the ttft of these points has beyond its ends."""
    spread = np.hypot(step.floor, step.scale * points.error)
    low, high = ends(points.ttft - step.step_low * spread)[0], ends(points.ttft - step.step_high * spread)[1]
    return replace(step, first_token_low=low, first_token_high=high)


def ends(values: Floats) -> tuple[float, float]:
    """The quantiles that leave out (1 − LEVEL) / 2 on each side, but a band contains what it is around."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return min(float(low), 0.0), max(float(high), 0.0)


def contained(points: Sample, by_engine: Mapping[str, ServedErrors]) -> tuple[float, float]:
    """Share of the measured tpot and of the measured ttft within their bands; an engine without any counts as out."""
    inside = np.zeros((2, len(points.error)), dtype=bool)
    for place, (engine, error) in enumerate(zip(points.engine, points.error, strict=True)):
        if str(engine) in by_engine:
            errors = by_engine[str(engine)]
            for row, (value, band) in enumerate(((points.tpot, errors.step), (points.ttft, errors.first_token))):
                low, high = np.log(band(float(error)))
                inside[row, place] = low <= value[place] <= high
    return float(inside[0].mean()), float(inside[1].mean())


def random_halves(points: Sample, draws: int = DRAWS) -> list[tuple[float, float]]:
    """Shares within the bands of the other half, for halves of the groups drawn at random."""
    names, random = np.unique(points.group), np.random.default_rng(0)
    found = []
    for _ in range(draws):
        chosen = np.isin(points.group, random.permutation(names)[: len(names) // 2])
        found.append(contained(points.part(~chosen), fit_engines(points.part(chosen))))
    return found


def report(points: Sample) -> str:
    """What the check on the other halves found, in words."""
    half = first_half(points.group)
    errors = fit_engines(points.part(half))
    inside, other = contained(points.part(half), errors), contained(points.part(~half), errors)
    draws = np.array(random_halves(points))
    good = float(np.mean((draws[:, 0] >= 0.85) & (draws[:, 0] <= 0.95)))
    return (
        f"Of the first half's {int(half.sum()):,} points the bands hold {inside[0]:.1%} of the measured tpot and "
        f"{inside[1]:.1%} of the ttft; of the other half's {int((~half).sum()):,} points {other[0]:.1%} and "
        f"{other[1]:.1%}. Of {len(draws)} halves of the groups drawn at random, the median holds "
        f"{np.median(draws[:, 0]):.1%} and {np.median(draws[:, 1]):.1%} of the other half; tpot is within 85-95 % in "
        f"{good:.0%} of them."
    )


def render(points: Sample) -> str:
    """The text of the file."""
    errors = fit_engines(points.part(first_half(points.group)))
    lines = [
        "# How far measured servers are from simulated ones, in logs; windtunnel/simulate/error_band.py reads them.",
        "# Derived by `python -m benchmarks.accuracy.served_errors` from the first half of the served points.",
    ]
    for engine, values in errors.items():
        lines += ["", f"[{engine}]", *(f"{name} = {value:.4f}" for name, value in vars(values).items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        everything = sample([replay(point) for point in read_points() if point.mode == "agg"])
    except InputError as wrong:
        sys.exit(str(wrong))
    sys.stdout.write(render(everything))
    sys.stderr.write(report(everything) + "\n")
