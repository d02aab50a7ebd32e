"""How far apart two measurements of one kernel are: ``python -m benchmarks.accuracy.kernel_noise [SYSTEMS]``.

A kernel database holds tables of several releases of an engine, which time the same shapes again. How far their times
lie apart is the noise floor below every prediction, with what the releases changed. SYSTEMS is the folder of a
database; without it, that of your own one (``windtunnel kernels add``) or of the installed package.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.accuracy import in_one_line
from windtunnel.deployment.versions import version_key
from windtunnel.errors import InputError
from windtunnel.perf.database import find_systems

TIME = "latency"
BESIDE = ("framework", "version", "device", "op_name", "power", "latency", "energy", "temp", "clock")
"""Beginnings of the columns that do not say which kernel it was."""
FEW = 50
"""Kernels in both tables from which they are compared."""

Floats = NDArray[np.float64]


def releases(systems: Path) -> Iterator[tuple[str, str, Path, Path]]:
    """(family, engine, table, the table of the engine's next release)."""
    tables: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for file in sorted(systems.glob("data/*/*/*/*/*.parquet")):
        *_, system, family, engine, release, name = file.parts
        if release[:1].isdigit():
            tables[system, family, engine, name].append(file)
    for (_, family, engine, _), files in tables.items():
        for one, following in pairwise(sorted(files, key=lambda file: version_key(file.parent.name))):
            yield family, engine, one, following


def again(one: Path, following: Path) -> Floats:
    """log(time ÷ time before) of the kernels that both tables hold."""
    before, after = (pq.read_table(file) for file in (one, following))
    keys = [name for name in before.column_names if name in after.column_names and not name.startswith(BESIDE)]
    if TIME not in before.column_names or TIME not in after.column_names or not keys:
        return np.empty(0)
    joined = _times(before, keys).join(_times(after, keys), keys, join_type="inner", right_suffix="_after")
    times = (joined.column(f"{TIME}_mean{suffix}").to_numpy() for suffix in ("", "_after"))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = np.diff(np.log(list(times)), axis=0)[0]
    return logs[np.isfinite(logs)]


def _times(table: Any, keys: Sequence[str]) -> Any:
    """The mean time of each kernel; keys as text, since joins leave out what is missing."""
    columns = {name: table.column(name).cast("string").fill_null("") for name in keys}
    named = type(table).from_pydict(columns | {TIME: table.column(TIME)})
    return named.group_by(list(keys)).aggregate([(TIME, "mean")])


def noise(systems: Path) -> Mapping[tuple[str, str], Floats]:
    """The logs of each family of kernels and engine. Raises InputError where no table was measured again."""
    found: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    for family, engine, one, following in releases(systems):
        logs = again(one, following)
        if len(logs) >= FEW:
            found[family, engine].append(logs)
    if not found:
        raise InputError(f"{systems}: no table of two releases: add a newer database with `windtunnel kernels add`")
    return {key: np.concatenate(logs) for key, logs in sorted(found.items())}


def report(found: Mapping[tuple[str, str], Floats]) -> str:
    """A table: how many kernels, the median of time ÷ time before, and how far half and nine tenths lie apart."""
    lines = [
        "| family | engine | kernels | time ÷ time before, median | half differ by less than | nine tenths |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for names, logs in [*((" | ".join(key), logs) for key, logs in found.items()), ("all | all", _all(found))]:
        half, most = np.expm1(np.quantile(np.abs(logs), (0.5, 0.9)))
        lines.append(f"| {names} | {len(logs):,} | {np.exp(np.median(logs)):.3f} | {half:.1%} | {most:.1%} |")
    return "\n".join(lines)


def _all(found: Mapping[tuple[str, str], Floats]) -> Floats:
    return np.concatenate(list(found.values()))


def database(paths: Sequence[str]) -> Path:
    """The folder that is said, or the one that is there. Raises InputError where there is none."""
    systems = Path(paths[0]) if paths else find_systems()
    if systems is None:
        raise InputError("no kernel database: pip install 'windtunnel[kernels]'")
    return systems


def main(paths: Sequence[str]) -> int:
    """Print the table; 2 after a wrong input."""
    return in_one_line(lambda: print(report(noise(database(paths)))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
