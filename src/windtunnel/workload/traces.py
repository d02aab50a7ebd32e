"""Read a trace file of any known format into a Workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError, nearest, unknown
from windtunnel.workload import csv_traces, json_traces, own_files
from windtunnel.workload.arrivals import Arrivals
from windtunnel.workload.columns import Workload, take_hashes
from windtunnel.workload.csv_traces import Table, header, read_table
from windtunnel.workload.rules import Floats, check_sorted, integers, later_turns, ragged
from windtunnel.workload.synthetic import stream

Columns = dict[str, Any]

CSV_READERS: dict[str, tuple[Callable[[Table], Columns], tuple[str, ...], tuple[str, ...]]] = {
    # format: reader, columns it needs, columns that may be there too
    "azure": (csv_traces.read_azure, csv_traces.AZURE, ()),
    "burstgpt": (csv_traces.read_burstgpt, csv_traces.BURSTGPT, csv_traces.BURSTGPT_MORE),
    "vidur": (csv_traces.read_vidur, csv_traces.VIDUR, csv_traces.VIDUR_MORE),
    "lengths": (csv_traces.read_lengths, csv_traces.LENGTHS, csv_traces.VIDUR_MORE),
    "csv": (csv_traces.read_own, csv_traces.OWN, csv_traces.OWN_MORE),
}
JSON_FORMATS = (*json_traces.TIMED_KINDS, "jsonl")
FORMATS = (*CSV_READERS, *JSON_FORMATS, "sharegpt", "parquet")


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
) -> Workload:
    """Read a trace; ``format`` (one of FORMATS) is found from the content unless given.

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
        found = _read_named(source, columns) if columns else _read(source, format, hash_block_size)
        found.setdefault("name", source.stem)
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
        return Workload.from_columns(**found, sort=sort)
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
    """New times for all requests but the later turns of sessions, which no clock releases."""
    rows = max(np.size(columns["prompt_tokens"]), 1)
    first = ~later_turns(integers("session", columns.get("session", -1), rows))
    drawn = np.full(rows, np.nan)
    drawn[first] = arrivals.times(int(first.sum()), stream(seed, "arrivals"))
    return drawn


def _read(path: Path, wanted: str | None, hash_block_size: int | None) -> Columns:
    if wanted is not None and wanted not in FORMATS:
        raise unknown("trace format", wanted, FORMATS)
    data = _bytes(path)
    if data[:4] == b"PAR1" or wanted == "parquet":
        return own_files.read_parquet(path)
    _check_text(data)
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if wanted == "sharegpt" or (wanted is None and start == b"["):
        return json_traces.read_sharegpt(data)
    if wanted in JSON_FORMATS or (wanted is None and start == b"{"):
        return _read_json_lines(data, wanted, hash_block_size)
    kind = _csv_kind(header(data), wanted)
    return CSV_READERS[kind][0](read_table(data))


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
        raise InputError("is a directory: give a trace file") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from None
    if not data.strip():
        raise InputError("is empty")
    return data


def _check_text(data: bytes) -> None:
    if data[:2] == b"\x1f\x8b":
        raise InputError("is compressed: unpack it first (gunzip)")
    try:
        data[:65536].decode("utf-8")
        text = b"\0" not in data[:65536]
    except UnicodeDecodeError as error:
        text = error.start > 65530 and len(data) > 65536
    if not text:
        raise InputError(f"is neither text nor Parquet: known formats are {', '.join(FORMATS)}; text must be UTF-8")


def _read_json_lines(data: bytes, wanted: str | None, hash_block_size: int | None) -> Columns:
    rows = json_traces.read_lines(data)
    keys = rows[0].keys()
    if wanted is None:
        timed = len(keys & set(json_traces.TIMED)) > len(keys & set(own_files.KEYS + own_files.HEADER) - {"hash_ids"})
        wanted = json_traces.timed_kind(rows) if timed else "jsonl"
    if wanted == "jsonl":
        return own_files.read_jsonl(rows)
    return json_traces.read_timed(rows, wanted, hash_block_size)


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
        raise InputError(
            f"columns {shown!r} fit no known trace format ({', '.join(FORMATS)}): say which column holds what, "
            "columns='arrival=…,prompt_tokens=…,output_tokens=…'"
        )
    missing = [name for name in needed if name not in names]
    strangers = [name for name in names if name not in needed and name not in more]
    if missing:
        raise InputError(f"column {missing[0]!r} of the {likely} format is missing; there are {', '.join(names)}")
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
    taken = {
        key: np.asarray(value)[kept] if isinstance(value, list | np.ndarray) else value
        for key, value in columns.items()
        if key not in ("hash_ids", "notes")
    }
    note = f"{rows - len(kept)} of {rows} rows left out: 0 prompt or output tokens"
    blocks = take_hashes(ragged(columns.get("hash_ids"), rows), kept)
    return {**taken, "hash_ids": blocks, "notes": [*columns.get("notes", ()), note]}


def spread(arrival: Floats, quantum: float, rng: np.random.Generator) -> Floats:
    """Spread requests that share a time uniformly over ``quantum`` seconds, at most to the next time; keeps the order.

    For traces whose clock ticks coarsely (Mooncake's conversation trace: about 3 s), which would arrive in bursts.
    """
    if not quantum > 0:
        raise InputError(f"jitter={quantum:g}: must be seconds > 0, or 0 for none")
    times, group = np.unique(arrival, return_inverse=True)
    room = np.minimum(np.diff(times, append=np.inf), quantum)
    offset = rng.random(len(arrival))
    offset = offset[np.lexsort((offset, group))]
    placed: Floats = np.empty(len(arrival))
    placed[np.argsort(group, kind="stable")] = offset
    return np.asarray(arrival + placed * room[group])
