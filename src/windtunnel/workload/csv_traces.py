"""Public traces in CSV: Azure, BurstGPT, Vidur and bare lengths. Each reader gives arguments of Workload.from_columns.

A file becomes columns of bytes first: fast where nothing is quoted, carefully elsewhere. A reader that finds no times
leaves ``arrival`` out. ``origin`` is the time of the trace's first request.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from windtunnel.errors import InputError, unknown
from windtunnel.workload.rules import Floats, Integers, first

EPOCH = 1e9
"""Seconds since 1970 from which on a time is taken for a date: 2001."""

Table = dict[str, list[bytes]]
"""Cells by column name, in the file's order; one cell per row."""

DELIMITERS = ",;\t|"
NEWLINE = ord("\n")


def header(data: bytes) -> list[str]:
    """The column names: the first line's cells."""
    line = data[:65536].removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].strip(b" \r")
    return [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(delimiter(data))]


def delimiter(data: bytes) -> str:
    """What separates the cells: the first of DELIMITERS that the header has, a comma if it has none."""
    line = data[:65536].partition(b"\n")[0].decode("utf-8", "replace")
    return next((letter for letter in DELIMITERS if letter in line), ",")


def read_table(data: bytes) -> Table:
    """Split a CSV with a header line; line ends may be LF or CRLF, the last one may be missing.

    Raises InputError for rows with too few or too many cells, and when there is no row below the header.
    """
    names, comma = header(data), delimiter(data)
    check_names(names)
    body = data.partition(b"\n")[2]
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n")
    body = body.rstrip(b"\n")
    if not body.strip():
        raise InputError("has no rows below its header")
    if b'"' not in body and _is_rectangular(body, len(names), ord(comma)):
        cells = body.replace(b"\n", comma.encode()).split(comma.encode())
        return {name: cells[index :: len(names)] for index, name in enumerate(names)}
    return _read_carefully(body, names, comma)


def check_names(names: Sequence[str]) -> None:
    """Raises InputError for a column that stands twice."""
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise InputError(f"column {twice[0]!r}: stands twice in the header: rename one")


def _is_rectangular(body: bytes, width: int, comma: int) -> bool:
    letters = np.frombuffer(body, np.uint8)
    separators = np.append(letters[(letters == comma) | (letters == NEWLINE)], np.uint8(NEWLINE))
    if len(separators) % width:
        return False
    lines = separators.reshape(-1, width)
    return bool((lines[:, -1] == NEWLINE).all() and (lines[:, :-1] == comma).all())


def _read_carefully(body: bytes, names: list[str], comma: str) -> Table:
    rows: list[list[bytes]] = []
    try:
        for row in csv.reader(io.StringIO(body.decode("utf-8", "replace")), delimiter=comma):
            if len(row) != len(names):
                raise InputError(f"row {len(rows) + 1}: has {len(row)} cells: must have {len(names)}, as the header")
            rows.append([cell.encode() for cell in row])
    except csv.Error as error:
        raise InputError(f"row {len(rows) + 1}: is no CSV: {error}") from None
    return {name: list(cells) for name, cells in zip(names, zip(*rows, strict=True), strict=True)}


def numbers(table: Table, name: str) -> Floats:
    """A column of numbers; InputError names the first cell that is none."""
    cells = table[name]
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        raise bad_cell(cells, name, float, "a number") from None


def whole_numbers(table: Table, name: str) -> Integers:
    """A column of whole numbers (``12`` or ``12.0``); InputError names the first cell that is none."""
    cells = table[name]
    try:
        if b"_" not in b"".join(cells):  # which Python takes for a part of a number
            return np.array(list(map(int, cells)), np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([_whole(cell) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        raise bad_cell(cells, name, _whole, "a whole number") from None


def _whole(cell: bytes) -> int:
    number = float(cell)
    if b"_" in cell or not (abs(number) < 2.0**62 and number.is_integer()):
        raise ValueError(cell)
    return int(number)


def bad_cell(cells: list[bytes], name: str, parse: Callable[[bytes], object], wanted: str) -> InputError:
    """The error for the first cell that ``parse`` refuses."""
    for number, cell in enumerate(cells, start=1):
        try:
            parse(cell)
        except (ValueError, OverflowError):
            return InputError(f"row {number}: {name}={cell.decode('utf-8', 'replace')!r}: must be {wanted}")
    return InputError(f"{name}: must be {wanted}")


Columns = dict[str, Any]

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
BURSTGPT_MORE = ("Session ID", "Elapsed time")
VIDUR = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
VIDUR_MORE = ("num_total_tokens", "pd_ratio", "num_block_tokens")


def read_azure(table: Table) -> Columns:
    """Azure LLM inference traces of 2023 and 2024: wall-clock times with up to nine fraction digits, UTC."""
    return {
        "arrival": wall_clock(table["TIMESTAMP"]),
        "prompt_tokens": whole_numbers(table, "ContextTokens"),
        "output_tokens": whole_numbers(table, "GeneratedTokens"),
    }


OWN = ("prompt_tokens", "output_tokens")
OWN_MORE = ("arrival", "max_tokens", "priority", "session", "think_time")
MILLISECONDS = "arrival_ms"
"""Another name of the time of arrival, for those that count milliseconds."""


def read_own(table: Table) -> Columns:
    """windtunnel's own columns; times are seconds and stay."""
    return {name: _own(table, name) for name in table}


def read_named(table: Table, names: Mapping[str, str]) -> Columns:
    """The columns that are named: our name → the file's. Times count from the first request.

    Raises InputError for a name that is not ours, or not the file's.
    """
    for ours, theirs in names.items():
        if ours not in (*OWN, *OWN_MORE, MILLISECONDS):
            raise unknown("column", ours, (*OWN, *OWN_MORE, MILLISECONDS))
        if theirs not in table:
            raise unknown("column of the file", theirs, table)
    names = {**{ours: ours for ours in OWN if ours not in names}, **names}
    for ours in OWN:
        if names[ours] not in table:
            raise InputError(f"columns: {ours} is missing: say which column holds it, {ours}=…")
    found: Columns = {ours: _own({ours: table[theirs]}, ours) for ours, theirs in names.items()}
    notes: list[str] = []
    if MILLISECONDS in found:
        found["arrival"] = found.pop(MILLISECONDS) / 1000
    if "arrival" in found:
        check_arrivals(found["arrival"])
        found |= from_start(found["arrival"], notes)
    return found | {"notes": notes}


def _own(table: Table, name: str) -> Any:
    """A column by our name: seconds or a time of day, seconds, or whole numbers."""
    if name in ("arrival", MILLISECONDS):
        first_cell = table[name][0].decode("utf-8", "replace")
        return wall_clock(table[name]) if first_cell[4:5] == "-" else numbers(table, name)
    return numbers(table, name) if name == "think_time" else whole_numbers(table, name)


def wall_clock(cells: list[bytes]) -> Floats:
    """Seconds since the earliest of UTC times like ``2023-11-16 18:17:03.9799600`` (``+00:00`` or ``Z`` may follow)."""
    if any(b"+" in cells[i] or cells[i].endswith(b"Z") for i in (0, -1)):
        cells = [cell.removesuffix(b"Z").removesuffix(b"+00:00") for cell in cells]
    try:
        if min(map(len, cells)) < len("2023-11-16 18:17:03"):
            raise ValueError
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns of other time zones
            # As text: from many bytes numpy 2 casts without Python's lock, and an error there ends the process.
            moments = np.array(cells, dtype="S").astype("U").astype("datetime64[ns]")
    except (ValueError, Warning):
        raise bad_cell(cells, "TIMESTAMP", _moment, "a time such as 2023-11-16 18:17:03.9799600 (UTC)") from None
    row = first(np.isnat(moments))
    if row >= 0:
        raise InputError(f"row {row + 1}: TIMESTAMP={cells[row].decode()!r}: must be a time")
    return np.asarray((moments - moments.min()).astype(np.int64) / 1e9)


def _moment(cell: bytes) -> datetime:
    text = cell.decode("ascii")
    moment = datetime.fromisoformat(text[:19])
    if len(text) < 19 or (text[19:] and not (text[19] == "." and text[20:].isdigit())):
        raise ValueError(text)
    return moment


def read_burstgpt(table: Table) -> Columns:
    """BurstGPT: seconds; rows without response tokens are failed requests and left out."""
    arrival, prompt = numbers(table, "Timestamp"), whole_numbers(table, "Request tokens")
    output = whole_numbers(table, "Response tokens")
    served = output != 0
    if not served.any():
        raise InputError("every row has 0 response tokens, which means failed: no request is left")
    failed = len(served) - int(served.sum())
    notes = (
        [f"{failed} of {len(served)} rows left out: 0 response tokens mean that the request failed"] if failed else []
    )
    check_arrivals(arrival)
    return {
        **from_start(arrival[served], notes),
        "prompt_tokens": prompt[served],
        "output_tokens": output[served],
        "notes": notes,
    }


def read_vidur(table: Table) -> Columns:
    """Vidur's replay traces: arrived_at in s, prefill and decode tokens."""
    notes: list[str] = []
    arrival = numbers(table, "arrived_at")
    check_arrivals(arrival)
    return {**from_start(arrival, notes), **read_lengths(table), "notes": notes}


def read_lengths(table: Table) -> Columns:
    """Vidur's length traces: prefill and decode tokens, no times."""
    return {
        "prompt_tokens": whole_numbers(table, "num_prefill_tokens"),
        "output_tokens": whole_numbers(table, "num_decode_tokens"),
    }


def check_arrivals(arrival: Floats) -> None:
    """Times of a trace must be finite and not negative; checked before they are moved to start at 0."""
    row = first(~(np.isfinite(arrival) & (arrival >= 0)))
    if row >= 0:
        raise InputError(f"row {row + 1}: arrival={arrival[row]:g}: must be finite seconds ≥ 0")


def from_start(arrival: Floats, notes: list[str]) -> Columns:
    """Times and their origin, the first request, from which `load_trace` counts; a note says so where that matters."""
    origin = float(arrival.min())
    if origin > 0:
        dated = EPOCH < origin < 10 * EPOCH
        when = (
            f"of {datetime.fromtimestamp(origin, UTC):%Y-%m-%d %H:%M} UTC" if dated else f"{origin:g} s into the trace"
        )
        notes.append(f"times count from the first request, {when}")
    return {"arrival": arrival, "origin": origin}
