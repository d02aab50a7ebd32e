"""bench: workloads, schedulers, engines, devices and any other words of run crossed in one file, in one table."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.files import require_writable, whole_file, write_whole

if TYPE_CHECKING:
    from windtunnel.metrics import Interval
    from windtunnel.report.bench import Row
    from windtunnel.scenario.bench import Measured
    from windtunnel.scenario.matrix import Matrix

DONE, MISSED = 0, 1
PAGE, TABLE = "bench.html", "bench.parquet"


def bench(
    file: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    workers: int | None = None,
    as_json: Json = False,
) -> int:
    """Simulate every combination of workloads, schedulers, engines, devices and settings that a file crosses.

    The file has words of run for all cases, and `matrix`: what is varied, axis by axis. Simulations run in parallel;
    each is kept in the output folder when it is done, so that a bench that was ended goes on. The folder also gets
    bench.html and bench.parquet. Exit codes: as windtunnel run; 1 if any case misses its goals.

    Parameters
    ----------
    file
        YAML or TOML; docs/bench.md says what it may hold. suite: the one that is shipped, of usual loads, schedulers,
        engines and devices, each at its capacity.
    output
        Folder for results; without it that of the file's name without its ending, next to the file.
    workers
        Processes; by default one per CPU.
    as_json
        Print every number of every run as one JSON document instead of the table.
    """
    from windtunnel.plan.workers import in_turn, processes
    from windtunnel.report.bench import bench_page
    from windtunnel.scenario.bench import bench as simulate_all
    from windtunnel.scenario.bench import require_bench_folder
    from windtunnel.scenario.matrix import found_file, read_matrix

    matrix = read_matrix(found_file(file))
    folder = file.with_suffix("") if output is None else output
    require_bench_folder(folder)
    for name in (PAGE, TABLE):
        require_writable("output", folder / name, in_new_folder=True)
    team = processes(workers)
    measured = _endpoint(matrix) if matrix.endpoint is not None else None
    rows = simulate_all(matrix, folder, in_turn() if team.workers == 1 else team, measured, _told)
    note = f"{len(matrix.cases)} cases, {matrix.seeds} {'seed' if matrix.seeds == 1 else 'seeds'} each"
    write_whole(folder / PAGE, [bench_page(file.stem, matrix.axes, matrix.load_axes, rows, note)])
    _write_table(folder / TABLE, matrix, rows)
    if as_json:
        show_json(_document(matrix, rows))
    else:
        _show(matrix, rows, folder)
    return DONE if all(row.meets_goals for row in rows) else MISSED


def _endpoint(matrix: "Matrix") -> "Measured":
    """What sends a load to the file's endpoint. Raises InputError where no server answers."""
    from windtunnel.cli.live.serve import require_extra

    require_extra()
    from windtunnel.serve.client import measured, served_model
    from windtunnel.serve.proxy import address

    assert matrix.endpoint is not None
    url = address(matrix.endpoint)
    model = served_model(url, matrix.endpoint_model)
    return lambda workload, seed, slo: measured(url, model, workload, seed, slo, exclude_warmup=matrix.exclude_warmup)


def _told(text: str) -> None:
    """Say on a terminal how far it is, in one line that is written over."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _write_table(path: Path, matrix: "Matrix", rows: "Sequence[Row]") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from windtunnel.report.bench import bench_columns

    found = bench_columns(matrix.axes, matrix.load_axes, rows)
    names = dict.fromkeys(name for row in found for name in row)
    columns = {name: [row.get(name) for row in found] for name in names}
    with whole_file(path) as file:
        pq.write_table(pa.table(columns), file, compression="zstd")


def _document(matrix: "Matrix", rows: "Sequence[Row]") -> dict[str, object]:
    from windtunnel.metrics import clean
    from windtunnel.metrics.comparison import plain

    def intervals(found: "Mapping[str, Interval]") -> dict[str, list[float]]:
        return {name: [each.mean, each.low, each.high] for name, each in found.items()}

    def names(row: "Row") -> dict[str, str]:
        places = matrix.load_axes if row.live else range(len(matrix.axes))
        return {matrix.axes[place]: name for place, name in zip(places, row.names, strict=True)}

    cases = [
        {
            "names": names(row),
            "kind": "measured" if row.live else "simulated",
            "words": {word: plain(value) for word, value in row.words.items()},
            "refusal": row.refusal or None,
            "runs": list(row.documents),
            "intervals": intervals(row.intervals),
            "against_measured": intervals(row.against),
        }
        for row in rows
    ]
    document: dict[str, object] = clean({"schema_version": 1, "axes": list(matrix.axes), "cases": cases})
    return document


def _show(matrix: "Matrix", rows: "Sequence[Row]", folder: Path) -> None:
    from windtunnel.cli.terminal import remarks, show, table, wrapped
    from windtunnel.report.bench import cells, differences, found_of, heads, pairs, shown, titles, warned_of

    if sys.stderr.isatty():
        _told("")
    measures, live = shown(rows), any(row.live for row in rows)
    lines = [cells(row, matrix.axes, matrix.load_axes, measures, live, halves=False) for row in rows if row.documents]
    found = table(heads(matrix.axes, measures, live), lines, left=len(matrix.axes) + live)
    for column in found.columns:
        column.no_wrap = True
    show(found)
    if live:
        against = [[*row.names, *differences(row, base)] for row, base in pairs(rows, matrix.load_axes)]
        show(table([*matrix.axes, *titles()], against, "simulated against measured", left=len(matrix.axes)))
    refused = [f"{' '.join(row.names)}: cannot run: {row.refusal}" for row in rows if row.refusal]
    warned = warned_of(rows)
    some = dict.fromkeys(name for names in warned.values() if names != ["all"] for name in names)
    everywhere = [text for text, names in warned.items() if names == ["all"]]
    which = [f"{len(some)} of {len(lines)} rows have their own warnings: {PAGE} lists them"] if some else []
    said = [f"{text}." for text in found_of(matrix.axes, matrix.load_axes, rows)]
    show(*map(wrapped, said), *remarks([*refused, *everywhere, *which]), f"kept in {folder}: {PAGE}, {TABLE}")
