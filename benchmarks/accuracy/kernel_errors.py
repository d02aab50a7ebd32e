"""Derive ``data/kernel_errors.toml`` from the kernel database: ``python -m benchmarks.accuracy.kernel_errors``.

Every engine's current tables on every device that has them; a family's errors are those of all its held-out points.
"""

import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.accuracy.held_out import ENGINES, SPLITS, Bench, HeldOut
from benchmarks.accuracy.kernel_sources import TABLES
from windtunnel.errors import InputError
from windtunnel.hardware import load_devices
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import measured_systems

NINETIETH = 1.645
"""90 % of a normal distribution lie within this many standard deviations, either side."""

UNREPEATED = 0.02
"""Assumed of a measured point where the database holds no repeats in its family."""

RULE = 0.15
"""Assumed of what is derived from a table by rule (chunks with context, decodes with chunks): no device has data."""

ASSUMED = {
    "elementwise": (0.1, 0.2, 0.3, 0.3, 0.3),
    "recurrence": (0.05, 0.1, 0.18, 0.3, 0.5),
    "scan": (0.05, 0.1, 0.2, 0.3, 0.4),
    "kimi_delta": (0.05, 0.15, 0.18, 0.3, 0.5),
    "compressed": (0.05, 0.06, 0.18, 0.2, 0.45),
    "hyper_connection": (0.05, 0.1, 0.18, 0.3, 0.5),
    "host": (0.5, 0.5, 0.5, 0.5, 0.5),
    "other": (0.1, 0.2, 0.25, 0.5, 0.7),
}
"""Families without a table to take points out of, or with a row for each kernel of a layer, in the order of NAMES.
Points left out of Kimi delta attention were predicted within these (tests/perf/kinds/test_kimi_delta.py)."""

NAMES = ("measured", "interpolated", "rule", "modelled", "roofline")


def benches() -> Iterator[Bench]:
    """Every device and engine with tables."""
    for backend in ENGINES:
        for system in measured_systems(backend):
            if system in load_devices():
                yield Bench(system, backend)


def spread(predicted: Floats, measured: Floats) -> float:
    """The standard deviation of a normal distribution with the errors' 90th percentile, in logs."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.abs(np.log(predicted / measured))
    size = size[np.isfinite(size)]
    return float(np.percentile(size, 90)) / NINETIETH if len(size) else float("nan")


def derive() -> dict[str, tuple[float, ...]]:
    """Family → errors in the order of NAMES."""
    found: dict[str, dict[str, list[HeldOut]]] = {}
    noises: dict[str, list[Floats]] = {}
    for bench in benches():
        sys.stderr.write(f"{bench.backend} on {bench.system}\n")
        for source in TABLES:
            for split in SPLITS:
                for entry in bench.held_out(source, split):
                    found.setdefault(entry.errors_of, {}).setdefault(split, []).append(entry)
                    noises.setdefault(entry.errors_of, []).append(entry.noise)
    table: dict[str, tuple[float, ...]] = {}
    for family, splits in found.items():
        parts = [_pooled(splits.get(split, [])) for split in SPLITS]
        repeated = np.concatenate(noises[family])
        whole = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        tokens, shapes = (spread(part[1], part[0]) for part in parts)
        measured = min(float(np.percentile(repeated, 90)) / NINETIETH if len(repeated) else UNREPEATED, tokens)
        modelled, rule = max(tokens, shapes), float(np.hypot(tokens, RULE))
        table[family] = (measured, tokens, rule, modelled, max(modelled, spread(whole[2], whole[0])))
    return table | ASSUMED


def _pooled(entries: list[HeldOut]) -> tuple[Floats, Floats, Floats]:
    """Measured, predicted, and by the roofline."""
    names = ("measured", "predicted", "roofline")
    found = [np.concatenate([getattr(one, name) for one in entries] or [np.zeros(0)]) for name in names]
    return found[0], found[1], found[2]


def render(table: dict[str, tuple[float, ...]]) -> str:
    """The text of the file."""
    lines = [
        "# Relative errors of kernel times (standard deviation of the log), by family and source.",
        "# Derived by `python -m benchmarks.accuracy.kernel_errors` from the kernel database of aiconfigurator-core:",
        f"# points taken out, predicted from the rest. The last {len(ASSUMED)} are assumed: no table of whole layers.",
        "",
    ]
    for family, values in table.items():
        errors = ", ".join(f"{name} = {value:.3f}" for name, value in zip(NAMES, values, strict=True))
        lines.append(f"{family} = {{ {errors} }}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(render(derive()))
    except InputError as wrong:
        sys.exit(str(wrong))
