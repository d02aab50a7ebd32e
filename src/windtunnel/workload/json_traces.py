"""Public traces in JSON: Mooncake, vLLM's timed_trace and RAGPulse (a request a line), ShareGPT (one array).

Each reader gives arguments of Workload.from_columns; one that finds no times leaves ``arrival`` out. Large files of
plain numbers are read as columns; all others, and all with a mistake, as objects, whose errors name the row.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.errors import InputError, nearest
from windtunnel.files import parse_json
from windtunnel.workload.csv_traces import Columns, check_arrivals, from_start
from windtunnel.workload.rules import LARGEST, HashIds, NoTrace, floats, integers
from windtunnel.workload.texts import of_hashes

TIMED_KINDS = {"mooncake": (1e3, 512), "timed_trace": (1.0, 16)}
"""Formats with the keys TIMED, Mooncake's and vLLM's: units of a timestamp in a second, and tokens of a hash id unless
told otherwise."""
TIMED = ("timestamp", "input_length", "output_length")
CHARACTERS_PER_TOKEN = 4
LARGE = 1 << 20
"""Bytes of JSON lines from which columns are read: below, an object a line is as quick."""
BLOCK = 1 << 24
"""Bytes that are parsed at once; a longer line is none of a plain file."""

Plain = dict[str, npt.NDArray[Any] | HashIds]
"""Key → int64 or float64 numbers, NaN or absent where a line has none; or lists of integers, as (offsets, values)."""


def read_lines(data: bytes) -> list[dict[str, Any]]:
    """One JSON object per line; empty lines are skipped. InputError names the first line that is none."""
    lines = [line for line in data.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()]
    try:
        rows = parse_json(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return list(rows)
    except InputError:
        pass
    for number, line in enumerate(lines, start=1):
        try:
            fine, why = isinstance(parse_json(line), dict), "must be a JSON object"
        except InputError as error:
            fine, why = False, str(error)
        if not fine:
            kind = NoTrace if len(lines) > 1 and document(data) is not None else InputError
            raise kind(f"row {number}: {shorten(line)}: {why}")
    raise InputError("must have one JSON object per line")


def document(data: bytes) -> Any:
    """The whole as one JSON document; None where it is none."""
    try:
        return parse_json(data)
    except InputError:
        return None


def read_plain(data: bytes) -> tuple[dict[str, Any], Any] | None:
    """(The object of the first line, the other lines as a table of pyarrow's), where that is sure to be what
    ``read_lines`` finds: one plain ASCII object a line, no null. None where it is not.

    A first line without ``schema_version`` is also a row of the table.
    """
    end = data.find(b"\n") + 1
    if len(data) < LARGE or not 0 < end < len(data):
        return None
    try:
        head = parse_json(data[:end])
    except InputError:
        return None
    if not isinstance(head, dict):
        return None
    start = end if "schema_version" in head else 0
    breaks = data.count(b"}\n{", max(start - 2, 0)) + data.count(b"}\r\n{", max(start - 3, 0))
    rows = breaks + (start == 0)
    if not (data.isascii() or data[end:].isascii()) or data.find(b"null", start) >= 0:
        return None
    table = _parsed(data, start)
    return None if table is None or table.num_rows != rows else (head, table)


def _parsed(data: bytes, start: int) -> Any:
    """What pyarrow makes of the lines; None where it makes nothing of them."""
    import pyarrow as pa
    import pyarrow.json

    options = pyarrow.json.ReadOptions(use_threads=False, block_size=BLOCK)
    try:
        table = pyarrow.json.read_json(pa.BufferReader(pa.py_buffer(data).slice(start)), read_options=options)
    except pa.ArrowException:
        return None
    return table


def plain_columns(table: Any, keys: Collection[str], missing: Mapping[str, float] | None = None) -> Plain | None:
    """The columns under these keys that the table has; None where one is no plain one: a list where a number should be,
    a text, a number too large, or none at all where there is nothing to put in its place."""
    found: Plain = {}
    for key in keys:
        if key in table.column_names:
            column = _plain_column(table.column(key), (missing or {}).get(key))
            if column is None:
                return None
            found[key] = column
    return found


def _plain_column(column: Any, missing: float | None) -> npt.NDArray[Any] | HashIds | None:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) and kind.value_type == pa.int64():
        return lists(column)
    if kind not in (pa.int64(), pa.float64()) or (column.null_count and missing is None):
        return None
    if not np.isfinite(column.drop_null().to_numpy()).all():
        return None
    if column.null_count:
        column = (column.cast(pa.float64()) if isinstance(missing, float) else column).fill_null(missing)
    numbers: npt.NDArray[Any] = column.to_numpy()
    return numbers


def lists(column: Any) -> HashIds | None:
    """Lists of integers, in pyarrow's pieces, as (offsets, values), empty where there is none; None if a value is
    missing."""
    counts, parts = [np.zeros(1, np.int64)], []
    for chunk in column.chunks:
        values = chunk.flatten()
        if values.null_count:
            return None
        counts.append(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
        parts.append(values.to_numpy())
    return np.cumsum(np.concatenate(counts)), np.concatenate([np.zeros(0, np.int64), *parts])


def shorten(line: bytes) -> str:
    """The start of a line, printable."""
    text = line[:40].decode("utf-8", "replace")
    return repr(text + "…" if len(line) > 40 else text)


def column(rows: list[dict[str, Any]], key: str) -> list[Any]:
    """The numbers under a key; InputError names the first row where it is missing or no number."""
    values = [row.get(key) for row in rows]
    for number, value in enumerate(values, start=1):
        if not isinstance(value, int | float) or isinstance(value, bool):
            if value is None and key not in rows[number - 1]:
                meant = nearest(key, rows[number - 1])
                raise InputError(
                    f"row {number}: {key} is missing" + (f"; did you mean it by {meant!r}?" if meant else "")
                )
            raise InputError(f"row {number}: {key}={value!r}: must be a number")
    return values


def block_lists(rows: list[dict[str, Any]]) -> list[list[int]] | None:
    """The hash ids of every row, or None where no row has any; InputError names a row that is no list of integers."""
    if not any("hash_ids" in row for row in rows):
        return None
    lists = [row.get("hash_ids") or [] for row in rows]
    for number, ids in enumerate(lists, start=1):
        if not isinstance(ids, list) or not all(type(block) is int and -(2**63) <= block < 2**63 for block in ids):
            raise InputError(f"row {number}: hash_ids={repr(ids)[:40]}: must be a list of 64-bit integers")
    return lists


def read_measured(data: bytes, head: Any) -> Columns:
    """The load of a measured run, from its requests, in the order of their ends, and its run.json: what windtunnel
    proxy writes."""
    rows = read_lines(data)
    order = np.argsort(column(rows, "arrival_s"), kind="stable")
    rows = [rows[place] for place in order]
    found: Columns = {"arrival": column(rows, "arrival_s")}
    found |= {name: column(rows, name) for name in ("prompt_tokens", "output_tokens")}
    if (blocks := block_lists(rows)) is not None:
        size = head.get("hash_block_size", 16) if isinstance(head, Mapping) else 16
        found |= {"hash_ids": blocks, "hash_block_size": int(size)}
    return found


def read_timed(rows: list[dict[str, Any]], kind: str, hash_block_size: int | None = None) -> Columns:
    """A trace of one of TIMED_KINDS. AIPerf's lines may have ``session_id``, and ``delay`` (ms) after the session's
    line before, in place of a timestamp; see ``_turns``."""
    units_per_second, block = TIMED_KINDS[kind]
    notes: list[str] = []
    known = [row["timestamp"] for row in rows if isinstance(row.get("timestamp"), int | float)]
    start = {"timestamp": min(known, default=0.0)}
    times = [row if {"delay", "session_id"}.isdisjoint(row) else start | row for row in rows]
    arrival = floats("timestamp", column(times, "timestamp"), len(rows)) / units_per_second
    check_arrivals(arrival)
    ids = block_lists(rows)
    found: Columns = {
        **from_start(arrival, notes),
        "prompt_tokens": integers("input_length", column(rows, "input_length"), len(rows)),
        "output_tokens": integers("output_length", column(rows, "output_length"), len(rows)),
        "hash_ids": ids,
        "hash_block_size": (hash_block_size or block) if ids is not None else 0,
        "notes": notes,
    }
    return found | _turns(rows, found)


def plain_timed(table: Any, kind: str | None, hash_block_size: int | None = None) -> Columns | None:
    """The same from columns: of ``kind``, or of the one that the hash ids tell; None where it takes a closer look."""
    if not {"session_id", "delay"}.isdisjoint(table.column_names) or not set(TIMED) <= set(table.column_names):
        return None
    found = plain_columns(table, (*TIMED, "hash_ids"))
    if found is None or any(isinstance(found[key], tuple) for key in TIMED):
        return None
    times, prompt, output = (found[key] for key in TIMED)
    ids = found.get("hash_ids")
    if not (ids is None or isinstance(ids, tuple)):
        return None
    kind = kind or (None if ids is None else _kind_of(np.asarray(prompt), np.diff(ids[0])))
    if kind is None:
        return None
    units_per_second, block = TIMED_KINDS[kind]
    notes: list[str] = []
    arrival = np.asarray(times).astype(np.float64) / units_per_second
    check_arrivals(arrival)
    return {
        **from_start(arrival, notes),
        "prompt_tokens": integers("input_length", np.asarray(prompt), len(arrival)),
        "output_tokens": integers("output_length", np.asarray(output), len(arrival)),
        "hash_ids": ids,
        "hash_block_size": (hash_block_size or block) if ids is not None else 0,
        "notes": notes,
    }


def _turns(rows: list[dict[str, Any]], found: Columns) -> Columns:
    """Which lines are turns of a session, and how long each comes after the one before. A session's first line has a
    whole prompt; later ones have what they add to all before it, answers included (aiperf 0.13,
    dataset/loader/base_trace_loader.py: DELTAS_WITHOUT_RESPONSES)."""
    if not any("session_id" in row for row in rows):
        if any("delay" in row for row in rows):
            raise InputError("delay: counts from the line before of its session: give session_id, too")
        return {}
    names = [None if row.get("session_id") is None else str(row["session_id"]) for row in rows]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    delays = column([{"delay": 0.0} | row for row in rows], "delay")
    prompts, outputs, ids = found["prompt_tokens"].tolist(), found["output_tokens"].tolist(), found["hash_ids"]
    before, latest = [-1] * len(rows), dict[str, int]()
    for row, name in enumerate(names):
        if name is not None:
            before[row] = latest.get(name, -1)
            latest[name] = row
        if before[row] >= 0:
            prompts[row] += prompts[before[row]] + outputs[before[row]]
    lengths = integers("prompt_tokens", prompts, len(rows))
    begins: Any = [(row, prompts[row] + outputs[row]) if row >= 0 else None for row in before]
    if ids is not None:
        own = [blocks if row < 0 else [] for row, blocks in zip(before, ids, strict=True)]
        offsets = np.concatenate([[0], np.cumsum([len(blocks) for blocks in own])]).astype(np.int64)
        flat = np.array([each for blocks in own for each in blocks], dtype=np.int64)
        others, tokens = of_hashes((offsets, flat), found["hash_block_size"], lengths)
        shared = zip(others.tolist(), tokens.tolist(), strict=True)
        begins = [pair if pair[0] >= 0 else turn for pair, turn in zip(shared, begins, strict=True)]
    return {
        "session": [-1 if name is None else numbers[name] for name in names],
        "think_time": floats("delay", delays, len(rows)) / 1e3,
        "prompt_tokens": lengths,
        "hash_ids": None,
        "hash_block_size": 0,
        "begins": begins if any(begins) else None,
    }


def timed_kind(rows: list[dict[str, Any]]) -> str:
    """Tell Mooncake from timed_trace, whose keys are the same, by the size of a block.

    The one of 512 and 16 tokens for which every prompt has exactly as many hash ids as it has blocks. Sessions are
    AIPerf's, in Mooncake's units.
    """
    if any("session_id" in row for row in rows):
        return "mooncake"
    ids = block_lists(rows)
    if ids is not None:
        prompt = np.array(column(rows, "input_length"))
        kind = _kind_of(prompt, np.array([len(row) for row in ids]))
        if kind is not None:
            return kind
    raise InputError(
        "timestamps may be ms (mooncake) or s (timed_trace) and the hash ids do not tell: name the format, "
        "as in trace convert --format mooncake"
    )


def _kind_of(prompt: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> str | None:
    """The format in whose blocks every prompt has as many ids as that."""
    alike = (kind for kind, (_, size) in TIMED_KINDS.items() if (counts == np.ceil(prompt / size)).all())
    return next(alike, None)


def read_sharegpt(data: bytes) -> Columns:
    """ShareGPT: the first two turns of each conversation are prompt and output, as in vLLM's benchmark; no times.

    A turn's length is its own number ``tokens`` where it has one, else ⌈characters / 4⌉ (an estimate, noted).
    Conversations without two non-empty turns are left out.
    """
    try:
        entries = parse_json(data)
    except InputError as error:
        raise InputError(f"is {error}") from None
    lengths, estimated = [], 0
    for number, entry in enumerate(entries, start=1):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise NoTrace(
                f"row {number}: has no list of conversations, so this is not ShareGPT's form: "
                "windtunnel trace import reads other JSON"
            )
        pair = [_turn_tokens(number, turn) for turn in turns[:2]]
        if len(pair) == 2 and min(tokens for tokens, _ in pair) > 0:
            lengths.append([tokens for tokens, _ in pair])
            estimated += any(guessed for _, guessed in pair)
    if not lengths:
        raise InputError("no conversation has two non-empty turns")
    notes = []
    if len(lengths) < len(entries):
        notes.append(f"{len(entries) - len(lengths)} of {len(entries)} conversations left out: fewer than two turns")
    if estimated:
        notes.append(f"token counts of {estimated} requests are estimated: 4 characters a token")
    prompt, output = np.array(lengths, np.int64).T
    return {"prompt_tokens": prompt.copy(), "output_tokens": output.copy(), "notes": notes}


def _turn_tokens(number: int, turn: Any) -> tuple[int, bool]:
    """Tokens of a turn and whether they are estimated."""
    if isinstance(turn, dict):
        tokens, text = turn.get("tokens"), turn.get("value")
        if type(tokens) is int and 0 <= tokens <= LARGEST:
            return tokens, False
        if isinstance(text, str):
            return math.ceil(len(text) / CHARACTERS_PER_TOKEN), True
    raise InputError(f"row {number}: a turn has neither a text 'value' nor a count 'tokens'")


RAGPULSE_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""Parts of RAGPulse's prompts, in their order (github.com/flashserve/RAGPulse at 3672232)."""
RAGPULSE = {"timestamp", "input_length", "output_length", "hash_ids", "session_id"}


def is_ragpulse(row: Mapping[str, Any]) -> bool:
    """Whether a line has this form."""
    return row.keys() <= RAGPULSE and isinstance(row.get("hash_ids"), dict)


def read_ragpulse(rows: list[dict[str, Any]], pieces: Mapping[str, Any]) -> Columns:
    """RAGPulse: prompts made of pieces, which are shared where they stand behind the same ones. ``pieces``: tokens of
    each id, which names a piece, and not what stands before it.

    Its sessions are only named: each request has its own time. Raises InputError for what is missing.
    """
    notes: list[str] = []
    try:
        ordered = sorted(rows, key=lambda row: float(row["timestamp"]))
        if ordered != rows:
            rows, notes = ordered, ["requests are put into the order of their times"]
        arrival = np.array([float(row["timestamp"]) for row in rows])
        prompt = integers("input_length", [int(row["input_length"]) for row in rows], len(rows))
        output = integers("output_length", [int(row["output_length"]) for row in rows], len(rows))
        begins = _shared_pieces(rows, prompt.tolist(), {str(name): int(tokens) for name, tokens in pieces.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"is not as RAGPulse writes it ({type(error).__name__}: {error})") from None
    check_arrivals(arrival)
    return {
        **from_start(arrival, notes),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "begins": begins,
        "notes": notes,
    }


def _shared_pieces(
    rows: list[dict[str, Any]], prompts: list[int], pieces: Mapping[str, int]
) -> list[tuple[int, int] | None]:
    """By the longest sequence of pieces from the start that an earlier prompt had."""
    nodes: dict[tuple[int, str], int] = {}
    writers: list[int] = []
    found: list[tuple[int, int] | None] = []
    for number, row in enumerate(rows):
        node, tokens, best = -1, 0, None
        for part in RAGPULSE_PARTS:
            for piece in map(str, row["hash_ids"].get(part) or ()):
                tokens += pieces[piece]
                following = nodes.get((node, piece))
                if following is None:
                    following = nodes[node, piece] = len(nodes)
                    writers.append(number)
                else:
                    other = writers[following]
                    best = other, min(tokens, prompts[number], prompts[other])
                node = following
        found.append(best if best and best[1] else None)
    return found
