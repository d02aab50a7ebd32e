"""trace: look at traces of requests, and convert them."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable
from windtunnel.scenario import Load


def describe(
    trace: str, /, *, request_rate: float | None = None, columns: tuple[str, ...] = (), as_json: Json = False
) -> None:
    """Show requests, rate, burstiness and lengths of a trace.

    Parameters
    ----------
    trace
        A file, or a name of `windtunnel list traces`.
    request_rate
        Draw new arrivals at this many requests per second (inf: all at once); needed for files without times.
    columns
        Which columns of the file hold what: arrival=start_time,prompt_tokens=in,output_tokens=out.
    as_json
        Print one JSON document instead of the tables.
    """
    from windtunnel.workload import describe as numbers

    workload = Load(trace=trace, request_rate=request_rate, columns=columns).workload()
    summary = numbers(workload)
    if as_json:
        show_json(summary)
    else:
        from windtunnel.cli.terminal import show_workload

        show_workload(workload, summary)


def convert(
    source: str,
    target: Annotated[Path, Parameter(group=OUTPUT)],
    /,
    *,
    sort: Annotated[bool, Parameter(negative=())] = False,
    drop_empty: Annotated[bool, Parameter(negative=())] = False,
    request_rate: float | None = None,
    trace_format: Annotated[str | None, Parameter(name="--format")] = None,
    columns: tuple[str, ...] = (),
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
        Draw new arrivals at this many requests per second (inf: all at once); needed for files without times.
    trace_format
        The source's format, where its content does not tell.
    columns
        Which columns of the source hold what: arrival=start_time,prompt_tokens=in,output_tokens=out.
    """
    from windtunnel.workload import builtin, builtin_names, load_trace, save

    if target.suffix not in (".jsonl", ".parquet") and (target.is_file() or not target.exists()):
        raise InputError(f"target {str(target)!r}: must end in .jsonl or .parquet")
    require_writable("target", target)
    names = Load(trace=source, columns=columns).names_of_columns()
    if source in builtin_names():
        if trace_format is not None:
            raise InputError(f"format={trace_format!r}: is of a file, and {source!r} is built in: leave it out")
        workload = builtin(source, request_rate=request_rate)
    else:
        arrivals = None if request_rate is None else Load(request_rate=request_rate).arrivals()
        workload = load_trace(source, trace_format, arrivals=arrivals, sort=sort, drop_empty=drop_empty, columns=names)
    save(workload, target)
    sys.stdout.write(f"{target}: {len(workload):,} requests\n")
