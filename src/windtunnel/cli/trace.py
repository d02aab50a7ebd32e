"""trace: look at traces of requests, and convert them."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import Json, show_json
from windtunnel.scenario import Load
from windtunnel.scenario.output_files import check_folder


def describe(trace: str, /, *, request_rate: float | None = None, as_json: Json = False) -> None:
    """Show requests, rate, burstiness and lengths of a trace.

    Parameters
    ----------
    trace
        A file, or a name of `windtunnel list traces`.
    request_rate
        Draw new arrivals, so many a second (inf: all at once); needed for files without times.
    as_json
        Print one JSON document instead of the tables.
    """
    from windtunnel.workload import describe as numbers

    workload = Load(trace=trace, request_rate=request_rate).workload()
    summary = numbers(workload)
    if as_json:
        show_json(summary)
    else:
        from windtunnel.cli.terminal import show_workload

        show_workload(workload, summary)


def convert(
    source: str,
    target: Path,
    /,
    *,
    sort: Annotated[bool, Parameter(negative=())] = False,
    drop_empty: Annotated[bool, Parameter(negative=())] = False,
    request_rate: float | None = None,
    trace_format: Annotated[str | None, Parameter(name="--format")] = None,
) -> None:
    """Write a trace as windtunnel's own JSON lines, or as Parquet if the target's name ends so.

    Parameters
    ----------
    source
        A trace in any format that is read, or a name of `windtunnel list traces`.
    target
        The file to write: NAME.jsonl or NAME.parquet.
    sort
        Order requests by arrival; otherwise times that run backwards are an error.
    drop_empty
        Leave out requests without prompt or output tokens; otherwise they are an error.
    request_rate
        Draw new arrivals, so many a second (inf: all at once); needed for files without times.
    trace_format
        The source's format, where its content does not tell.
    """
    from windtunnel.workload import builtin, builtin_names, load_trace, save

    check_folder("target", target, target.parent)
    if source in builtin_names():
        workload = builtin(source, request_rate=request_rate)
    else:
        arrivals = None if request_rate is None else Load(request_rate=request_rate).arrivals()
        workload = load_trace(source, trace_format, arrivals=arrivals, sort=sort, drop_empty=drop_empty)
    save(workload, target)
    sys.stdout.write(f"{target}: {len(workload):,} requests\n")
