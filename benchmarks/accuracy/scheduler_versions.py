"""Served points of SGLang by the rules of two of its versions: ``python -m benchmarks.accuracy.scheduler_versions``.

The points are those of silicon_sample.csv, all or so many (the first argument); each server ran a release between 0.5.0
and 0.5.10. A line for each release: the median error of the mean times, either way, and its median with the sign; with
the rules of 0.4.6, those of 0.5.23, and with the preset that stands for the release.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from windtunnel.deployment import Deployment
from windtunnel.deployment.presets import PRESETS
from windtunnel.deployment.versions import nearest_preset, version_key
from windtunnel.errors import InputError
from windtunnel.validation.served_points import Served, read_points
from windtunnel.validation.served_replay import METRICS, Result, replay, sample

OLD, NEW = "sglang-0.4.6", "sglang-0.5"


def with_rules(deployment: Deployment, preset: str) -> Deployment:
    """The same servers of another version: of these two only the scheduler differs, also where it is named with
    settings."""
    pools = []
    for pool in deployment.pools:
        _, colon, settings = (pool.engine.scheduler or "").partition(":")
        named = f"{PRESETS[preset].rules}{colon}{settings}" if pool.engine.scheduler else None
        pools.append(replace(pool, engine=replace(pool.engine, preset=preset, scheduler=named)))
    return replace(deployment, pools=tuple(pools))


def both(point: Served) -> tuple[Result, Result] | None:
    """A point by the old rules and by the new ones; None where it cannot be simulated."""
    try:
        deployment = point.deployment()
    except InputError:
        return None
    old, new = (replay(point, deployment=with_rules(deployment, preset)) for preset in (OLD, NEW))
    return None if old.reason or new.reason else (old, new)


def cells(results: Sequence[Result]) -> str:
    """Errors of the mean time to first token, and per output token."""
    found = []
    for metric in METRICS:
        errors = [result.error(metric) for result in results]
        found.append(f"{median(map(abs, errors)):.1%} ({median(errors):+.1%})")
    return " | ".join(found)


def main() -> None:
    """Print a line for every release, and one for all."""
    points = [point for point in read_points() if point.backend == "sglang"]
    found: dict[str, list[tuple[Result, Result]]] = defaultdict(list)
    for point in sample(points, int(sys.argv[1])) if len(sys.argv) > 1 else points:
        if pair := both(point):
            found[point.version].append(pair)
    print("| release | points | 0.4.6: TTFT | TPOT | 0.5.23: TTFT | TPOT | stands for it |")
    print("|---|---:|---:|---:|---:|---:|---|")
    rows = [(version, found[version]) for version in sorted(found, key=version_key)]
    for name, pairs in [*rows, ("all", [pair for _, each in rows for pair in each])]:
        old, new = zip(*pairs, strict=True)
        chosen = "" if name == "all" else nearest_preset("sglang", name)
        print(f"| {name} | {len(pairs)} | {cells(old)} | {cells(new)} | {chosen} |")


if __name__ == "__main__":
    main()
