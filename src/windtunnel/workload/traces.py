"""Read a trace file of any known format into a Workload."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError, nearest, unknown
from windtunnel.files import parse_json
from windtunnel.workload import csv_traces, graph, json_traces, logs, own_files
from windtunnel.workload.agents import aiperf, guidellm, messages, weka
from windtunnel.workload.arrivals import Arrivals
from windtunnel.workload.columns import Workload, take_hashes
from windtunnel.workload.csv_traces import Table, header, read_table
from windtunnel.workload.rules import Floats, NoTrace, check_sorted, integers, ragged
from windtunnel.workload.synthetic import stream
from windtunnel.workload.transforms import spread, with_recorded_answers

Columns = dict[str, Any]
MEASURED = "requests.jsonl"
"""In the folder of a measured run, as windtunnel proxy writes it."""
GZIP = b"\x1f\x8b"

CSV_READERS: dict[str, tuple[Callable[[Table], Columns], tuple[str, ...], tuple[str, ...]]] = {
    # format: reader, columns it needs, columns that may be there too
    "azure": (csv_traces.read_azure, csv_traces.AZURE, ()),
    "burstgpt": (csv_traces.read_burstgpt, csv_traces.BURSTGPT, csv_traces.BURSTGPT_MORE),
    "vidur": (csv_traces.read_vidur, csv_traces.VIDUR, csv_traces.VIDUR_MORE),
    "lengths": (csv_traces.read_lengths, csv_traces.LENGTHS, csv_traces.VIDUR_MORE),
    "csv": (csv_traces.read_own, csv_traces.OWN, csv_traces.OWN_MORE),
}
CONVERSATIONS = {
    "guidellm": (guidellm.is_guidellm, guidellm.read_guidellm),
    "aiperf": (aiperf.is_aiperf, aiperf.read_aiperf),
}
"""Lines that are conversations: format → whether it is one, and the reader."""
OF_CONVERSATIONS, FIRST_BYTES = (b'"turns"', b'"orchestrator"', b'"prompt_0"'), 1 << 16
JSON_FORMATS = (*json_traces.TIMED_KINDS, "jsonl")
FORMATS = (*CSV_READERS, *JSON_FORMATS, "sharegpt", "parquet", "agents", "ragpulse", "messages", "aiperf", "guidellm")


def load_trace(
    path: str | Path,
    format: str | None = None,  # noqa: A002 - the flag's name
    *,
    arrivals: Arrivals | None = None,
    seed: int = 0,
    sort: bool = False,
    drop_empty: bool = False,
    jitter: float = 0.0,
    hash_block_size: int | None = None,
    max_concurrency: int | None = None,
    columns: Mapping[str, str] | None = None,
    answers: str = "live",
) -> Workload:
    """Read a trace; ``format`` (one of FORMATS) is found from the content unless given. Files may be gzipped.

    A folder holds a measured run, or agents' sessions, a file each. ``answers``: whether the next prompt of a session
    holds what the server answered (live), or what was recorded, which no cache of answers ever has.

    A file with the columns of no format is read as a log (``logs.import_logs``), and notes say what was taken for what.

    ``columns`` says which columns of a CSV file, or keys of JSON lines, hold what: our name → the file's, e.g.
    ``{"arrival": "start_time", "prompt_tokens": "input", "output_tokens": "output"}``; others are left out.

    Public traces start at their first request; windtunnel's own files keep their times. ``arrivals`` replaces the
    file's times, and is needed for files that have none. ``sort`` orders requests by time, where unsorted times are
    an error otherwise; ``drop_empty`` leaves out requests without prompt or output. ``jitter`` spreads requests that
    share a quantised time over up to this many seconds (see `spread`). ``hash_block_size`` overrides the format's
    tokens per hash id, ``max_concurrency`` the file's.
    Raises InputError, one line, starting with the path.
    """
    source = Path(path)
    try:
        if columns:
            found = _named_or_log(source, columns, timed=arrivals is None)
        else:
            found = _trace_or_log(source, format, hash_block_size, answers)
        found.setdefault("name", source.name.partition(".")[0] or source.stem)
        if max_concurrency is not None:
            found["max_concurrency"] = max_concurrency
        if drop_empty:
            found = _without_empty(found)
        _from_origin(found, sort)
        if arrivals is not None:
            found["arrival"] = _drawn(arrivals, found, seed)
        if "arrival" not in found:
            raise InputError("has lengths only: give arrivals, such as --request-rate 4 or --request-rate inf")
        if jitter:
            found["arrival"] = spread(np.asarray(found["arrival"], np.float64), jitter, stream(seed, "jitter"))
        workload = Workload.from_columns(**found, sort=sort)
        return with_recorded_answers(workload) if answers == "recorded" else workload
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _from_origin(columns: Columns, sort: bool) -> None:
    """Count a public trace's times from its first request; unsorted times are named as the file has them."""
    origin = columns.pop("origin", 0.0)
    if origin:
        if not sort:
            check_sorted(columns["arrival"], np.arange(len(columns["arrival"])))
        columns["arrival"] = columns["arrival"] - origin


def _drawn(arrivals: Arrivals, columns: Columns, seed: int) -> Floats:
    """New times for all requests but those that wait for others, which no clock releases."""
    rows = max(np.size(columns["prompt_tokens"]), 1)
    session = integers("session", columns.get("session", -1), rows)
    first = ~graph.waiting_rows(graph.edges(columns.get("after"), session) or graph.chains(session))
    drawn = np.full(rows, np.nan)
    drawn[first] = arrivals.times(int(first.sum()), stream(seed, "arrivals"))
    return drawn


def _trace_or_log(path: Path, wanted: str | None, hash_block_size: int | None, answers: str) -> Columns:
    """What a trace holds; a file that has the columns of no trace is read as a log, if it can be."""
    try:
        return _read(path, wanted, hash_block_size, answers)
    except NoTrace:
        if wanted is not None:
            raise
        try:
            found = logs.import_logs([path])
        except InputError:
            pass
        else:
            return _of_log(found)
        raise


def _named_or_log(path: Path, names: Mapping[str, str], *, timed: bool) -> Columns:
    """The named columns as they are, if every row has them and, where ``timed``, is in order; else as a log's, whose
    sessions say when their turns came and not how long their users thought."""
    try:
        if "duration" in names or ("session" in names and "think_time" not in names):
            raise InputError("is a log")
        found = _read_named(path, names)
        if timed and "arrival" in found:
            check_sorted(found["arrival"], np.arange(len(found["arrival"])))
    except NoTrace:
        raise
    except InputError:
        found = {}
    if found and ("arrival" in found or not timed):
        return found
    return _of_log(logs.import_logs([path], names))


def _of_log(found: logs.Imported) -> Columns:
    return {**found.workload.columns(), "after": found.workload.after, "notes": found.said}


def _read(path: Path, wanted: str | None, hash_block_size: int | None, answers: str) -> Columns:
    if wanted is not None and wanted not in FORMATS:
        raise unknown("trace format", wanted, FORMATS)
    if path.is_dir():
        return _read_folder(path, answers)
    data = _bytes(path)
    if data[:4] == b"PAR1" or wanted == "parquet":
        return own_files.read_parquet(path)
    _check_text(data)
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if wanted == "sharegpt" or (wanted is None and start == b"["):
        return json_traces.read_sharegpt(data)
    if wanted == "agents" or (wanted is None and start == b"{" and _is_one_session(data)):
        return weka.read_sessions([(path.name, _session(data))], answers)
    if wanted in (*JSON_FORMATS, "ragpulse", "messages", *CONVERSATIONS) or (wanted is None and start == b"{"):
        return _read_json_lines(path, data, wanted, hash_block_size, answers)
    kind = _csv_kind(header(data), wanted)
    return CSV_READERS[kind][0](read_table(data))


def _read_folder(path: Path, answers: str) -> Columns:
    if (path / MEASURED).is_file():
        return json_traces.read_measured(_bytes(path / MEASURED), parse_json(_bytes(path / "run.json").decode()))
    return weka.read_sessions(_folder(path), answers)


def _folder(path: Path) -> Iterator[tuple[str, Any]]:
    """The sessions of a folder, by the names of their files."""
    files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not files:
        raise InputError(
            "is a folder without .json or .json.gz files: give a trace file, or a folder of agents' sessions"
        )
    for file in files:
        yield file.name, _session(_bytes(file), file.name)


def _session(data: bytes, name: str = "") -> Any:
    """A session's document. Raises InputError if it has another form."""
    from pydantic_core import from_json

    try:
        document = from_json(data)
    except ValueError as error:
        raise InputError(f"{name}: is not JSON ({error})".removeprefix(": ")) from None
    if not weka.is_session(document):
        keys = ", ".join(weka.KEYS)
        raise InputError(f"{name}: is no session of an agent, an object with {keys}".removeprefix(": "))
    return document


def _is_one_session(data: bytes) -> bool:
    """Whether a file is one JSON object in the form of an agent's session."""
    return all(f'"{key}"'.encode() in data for key in weka.KEYS) and weka.is_session(json_traces.document(data))


def _read_named(path: Path, names: Mapping[str, str]) -> Columns:
    """The named columns of a CSV file, or keys of JSON lines."""
    data = _bytes(path)
    _check_text(data)
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
        return csv_traces.read_named(read_table(data), names)
    rows = json_traces.read_lines(data)
    table = {key: [str(row.get(key, "")).encode() for row in rows] for key in rows[0]}
    return csv_traces.read_named(table, names)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = nearest(path.name, beside)
        raise InputError("no such file" + (f"; did you mean {meant!r}?" if meant else "")) from None
    except IsADirectoryError:
        raise InputError("is a folder: give a trace file") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from None
    if data[:2] == GZIP:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"is compressed, and cannot be unpacked: {error}") from None
    if not data[:4096].strip() and not data.strip():
        raise InputError("is empty: give a file with a request a line, or a name of windtunnel list traces")
    return data


def _check_text(data: bytes) -> None:
    try:
        data[:65536].decode("utf-8")
        text = b"\0" not in data[:65536]
    except UnicodeDecodeError as error:
        text = error.start > 65530 and len(data) > 65536
        if not text and b"\0" not in data[:65536]:
            raise InputError("is not UTF-8 text (iconv -f latin1 -t utf-8 converts it), nor Parquet") from None
    if not text:
        raise InputError(f"is neither text nor Parquet: known formats are {', '.join(FORMATS)}; text must be UTF-8")


def _read_json_lines(path: Path, data: bytes, wanted: str | None, hash_block_size: int | None, answers: str) -> Columns:
    if wanted == "messages" or (wanted is None and messages.has_messages(data)):
        return messages.read_messages(json_traces.read_lines(data), answers)
    if wanted in CONVERSATIONS or (wanted is None and any(word in data[:FIRST_BYTES] for word in OF_CONVERSATIONS)):
        talks = json_traces.read_lines(data)
        kinds = [kind for kind, (fits, _) in CONVERSATIONS.items() if fits(talks[0])]
        if wanted or kinds:
            return CONVERSATIONS[wanted or kinds[0]][1](talks)
    plain = json_traces.read_plain(data)
    if plain is not None:
        found = _plain_lines(*plain, wanted, hash_block_size)
        if found is not None:
            return found
    rows = json_traces.read_lines(data)
    if wanted == "ragpulse" or (wanted is None and json_traces.is_ragpulse(rows[0])):
        return json_traces.read_ragpulse(rows, _pieces(path))
    if wanted is None:
        wanted = json_traces.timed_kind(rows) if _is_timed(rows[0]) else "jsonl"
    if wanted == "jsonl":
        return own_files.read_jsonl(rows)
    return json_traces.read_timed(rows, wanted, hash_block_size)


def _plain_lines(head: Columns, table: Any, wanted: str | None, hash_block_size: int | None) -> Columns | None:
    """The columns of plain lines, equal to those of objects; None where only objects tell."""
    if wanted == "ragpulse" or (wanted is None and json_traces.is_ragpulse(head)):
        return None
    if wanted == "jsonl" or (wanted is None and not _is_timed(head)):
        return own_files.read_plain(head, table)
    return json_traces.plain_timed(table, wanted, hash_block_size)


def _is_timed(row: Columns) -> bool:
    """Whether a line has rather the keys of Mooncake and timed_trace than our own."""
    ours = set(own_files.KEYS + own_files.HEADER) - {"hash_ids"}
    return len(row.keys() & set(json_traces.TIMED)) > len(row.keys() & ours)


def _pieces(path: Path) -> dict[str, Any]:
    """Tokens of the pieces of RAGPulse's prompts, from the file beside the trace."""
    name = f"{path.name.partition('.')[0]}_parts.json"
    beside = next((path.with_name(one) for one in (name, f"{name}.gz") if path.with_name(one).is_file()), None)
    if beside is None:
        raise InputError(f"needs the tokens of its prompts' pieces: put {name} (or .gz) beside it")
    found = json_traces.document(_bytes(beside))
    if not isinstance(found, dict):
        raise InputError(f"{beside.name}: must be one JSON object, piece: tokens")
    return found


def _csv_kind(names: list[str], wanted: str | None) -> str:
    candidates = [wanted] if wanted in CSV_READERS else list(CSV_READERS)
    for kind in candidates:
        _, needed, more = CSV_READERS[kind]
        if set(needed) <= set(names) <= {*needed, *more}:
            return kind
    likely = max(candidates, key=lambda kind: len(set(CSV_READERS[kind][1]) & set(names)))
    _, needed, more = CSV_READERS[likely]
    if not set(needed) & set(names):
        shown = ", ".join(names[:6])[:80]
        raise NoTrace(
            f"columns {shown!r} fit no known trace format ({', '.join(FORMATS)}): say which column holds what, "
            "columns='arrival=…,prompt_tokens=…,output_tokens=…'"
        )
    missing = [name for name in needed if name not in names]
    strangers = [name for name in names if name not in needed and name not in more]
    if missing:
        raise NoTrace(
            f"column {missing[0]!r} of the {likely} format is missing; there are {', '.join(names)}: windtunnel trace "
            f"import finds out which is which, or say it: columns='{missing[0]}=…'"
        )
    raise unknown(f"column of the {likely} format", strangers[0], (*needed, *more))


def _without_empty(columns: Columns) -> Columns:
    """Leave out requests without prompt or output, and say how many."""
    rows = max(np.size(columns["prompt_tokens"]), np.size(columns["output_tokens"]))
    prompt = integers("prompt_tokens", columns["prompt_tokens"], rows)
    output = integers("output_tokens", columns["output_tokens"], rows)
    kept = np.flatnonzero((prompt != 0) & (output != 0))
    if len(kept) == rows:
        return columns
    if not len(kept):
        raise InputError("every row has 0 prompt or output tokens: no request is left")
    if columns.get("after") is not None or columns.get("begins") is not None:
        raise InputError(
            f"{rows - len(kept)} rows have 0 prompt or output tokens, and others wait for or begin with them"
        )
    taken = {
        key: np.asarray(value)[kept] if isinstance(value, list | np.ndarray) else value
        for key, value in columns.items()
        if key not in ("hash_ids", "notes")
    }
    note = f"{rows - len(kept)} of {rows} rows left out: 0 prompt or output tokens"
    blocks = take_hashes(ragged(columns.get("hash_ids"), rows), kept)
    return {**taken, "hash_ids": blocks, "notes": [*columns.get("notes", ()), note]}
