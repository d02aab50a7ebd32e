"""trace: look at traces of requests, and convert them."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable
from windtunnel.scenario import Load

Answers = Literal["live", "recorded"]


def describe(
    trace: str,
    /,
    *,
    request_rate: float | None = None,
    columns: tuple[str, ...] = (),
    answers: Answers = "live",
    lanes: int | None = None,
    max_think_time: float | None = None,
    memory_tokens: tuple[int, ...] = (),
    as_json: Json = False,
) -> None:
    """Show requests, rate, burstiness and lengths of a trace; where prompts share text, what a prefix cache finds.

    What is found is counted with one request at a time, least recently used blocks of 16 tokens going first.

    Parameters
    ----------
    trace
        A file, a folder of agents' sessions, or a name of `windtunnel list traces`.
    request_rate
        Draw new arrivals at this many requests per second (inf: all at once); needed for files without times.
    columns
        Which columns of the file hold what: arrival=start_time,prompt_tokens=in,output_tokens=out.
    answers
        What later prompts of a session hold: what the server answers (live), or answers that were recorded.
    lanes
        Sessions in play at once; without it, all that the trace has.
    max_think_time
        Longest seconds between an answer and the session's next turn: longer ones are cut.
    memory_tokens
        Sizes of the cache to show; by default from 131,072 tokens on, doubling.
    as_json
        Print one JSON document instead of the tables.
    """
    from windtunnel.core.texts.reuse import MEMORIES, summary_of_reuse
    from windtunnel.workload import describe as numbers

    for tokens in memory_tokens:
        if tokens < 1:
            raise InputError(f"memory_tokens={tokens}: must be ≥ 1")
    cap = max_think_time
    load = Load(
        trace=trace, request_rate=request_rate, columns=columns, answers=answers, lanes=lanes, max_think_time=cap
    )
    workload = load.workload()
    summary = numbers(workload) | {"reuse": summary_of_reuse(workload, memory_tokens or MEMORIES)}
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
    answers: Answers = "live",
    lanes: int | None = None,
    max_request_tokens: int | None = None,
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
    answers
        What later prompts of a session hold: what the server answers (live), or answers that were recorded.
    lanes
        Sessions in play at once.
    max_request_tokens
        Longest request, prompt and output together: longer ones are cut, both in proportion.
    """
    from windtunnel.workload import builtin, builtin_names, cut_to, load_trace, save, with_lanes

    if target.suffix not in (".jsonl", ".parquet") and (target.is_file() or not target.exists()):
        raise InputError(f"target {str(target)!r}: must end in .jsonl or .parquet")
    require_writable("target", target)
    names = Load(trace=source, columns=columns).names_of_columns()
    if source in builtin_names():
        if trace_format is not None:
            raise InputError(f"format={trace_format!r}: is of a file, and {source!r} is built in: leave it out")
        workload = builtin(source, request_rate=request_rate)
    else:
        drawn = None if request_rate is None else Load(request_rate=request_rate).arrivals()
        rules: dict[str, Any] = {"arrivals": drawn, "sort": sort, "drop_empty": drop_empty, "answers": answers}
        workload = load_trace(source, trace_format, columns=names, **rules)
    if lanes is not None:
        workload = with_lanes(workload, lanes)
    if max_request_tokens is not None:
        workload = cut_to(workload, max_request_tokens)
    save(workload, target)
    sys.stdout.write("".join((f"{target}: {len(workload):,} requests\n", *(f"{note}\n" for note in workload.notes))))


def import_logs(
    logs: tuple[Path, ...],
    /,
    *,
    out: Annotated[Path, Parameter(group=OUTPUT)],
    columns: tuple[str, ...] = (),
    jitter: float = 0.0,
    dates: Literal["dmy", "mdy"] | None = None,
) -> None:
    """Read your own logs: guess columns and units, leave out what is no request, and write a load.

    Understood are CSV, JSON and JSON lines (.gz, folders) of gateways, OpenAI usage, OpenTelemetry (GenAI, OTLP),
    LiteLLM, Langfuse, vLLM and SGLang.

    Parameters
    ----------
    logs
        Files, or folders of files.
    out
        The file to write: NAME.parquet or NAME.jsonl.
    columns
        Where the guess is wrong: arrival=ts,prompt_tokens=in,output_tokens=out; dots for nested keys. Also
        session=chat_id,duration=latency_ms: turns wait for the answer before them; max_tokens, priority.
    jitter
        Spread requests that share a time over this many seconds.
    dates
        How 10/11/2026 is meant: day first (dmy) or month first (mdy).
    """
    from windtunnel.cli.terminal import facts_grid, number, show
    from windtunnel.workload import save
    from windtunnel.workload.logs import import_logs as read

    if not logs:
        raise InputError("logs: name at least one file or folder")
    if out.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"out {str(out)!r}: must end in .jsonl or .parquet")
    require_writable("out", out)
    names = Load(trace=str(logs[0]), columns=columns).names_of_columns()
    found = read(logs, names, jitter=jitter, dates=dates)
    save(found.workload, out)
    load = found.workload
    facts = [("columns", found.matched)]
    facts += [("note", text) for text in found.notes]
    if found.dropped:
        facts.append(("left out", found.left_out))
    prompts, outputs = (number(float(values.mean())) for values in (load.prompt_tokens, load.output_tokens))
    facts.append(
        ("load", f"{number(load.request_rate)} requests/s, {prompts} prompt and {outputs} output tokens on average")
    )
    facts.append(("next", f"windtunnel run MODEL --trace {out} --goodput ttft:500 tpot:50"))
    show(f"{out}: {len(load):,} requests", facts_grid(facts))
