"""What a workload's columns must satisfy: each rule raises InputError with row (from 1), value and way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.errors import InputError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
HashIds = tuple[Integers, Integers]

LARGEST = 2**40  # tokens; sums over a million requests stay exact in int64
LATEST = 1e11  # s; later times are no longer told apart by microseconds


class NoTrace(InputError):  # noqa: N818 - it says what is wrong
    """A file that has the columns of no trace: it may be a log."""


def first(condition: npt.NDArray[np.bool_]) -> int:
    """The first row where the condition holds, or -1."""
    row = int(np.argmax(condition)) if len(condition) else 0
    return row if len(condition) and condition[row] else -1


def integers(name: str, values: npt.ArrayLike, rows: int) -> Integers:
    """The values as a new int64 column of ``rows`` rows; a single number fills the column. Fractions are an error."""
    column = _column(name, values, rows)
    if column.dtype.kind == "f":
        row = first(~(np.isfinite(column) & (column == np.floor(column)) & (np.abs(column) < 2.0**62)))
        if row >= 0:
            raise InputError(f"row {row + 1}: {name}={column[row]:g}: must be a whole number")
    elif column.dtype.kind not in "iu" or int(column.max()) >= 2**63:
        raise InputError(f"{name}={column.tolist()[0]!r}: must be whole numbers")
    return column.astype(np.int64)


def floats(name: str, values: npt.ArrayLike, rows: int) -> Floats:
    """The values as a new float64 column of ``rows`` rows; a single number fills the column."""
    column = _column(name, values, rows)
    if column.dtype.kind not in "iuf":
        raise InputError(f"{name}={column.tolist()[0]!r}: must be numbers")
    return column.astype(np.float64)


def _column(name: str, values: npt.ArrayLike, rows: int) -> npt.NDArray[Any]:
    column = np.asarray(values)
    if column.ndim == 0:
        column = np.full(rows, column)
    if column.shape != (rows,):
        raise InputError(f"{name} has shape {column.shape}: must be ({rows},), one value per request")
    if rows == 0:
        raise InputError("the workload has no requests: give at least one row")
    return column


def ragged(ids: HashIds | Sequence[Sequence[int]] | None, rows: int) -> HashIds | None:
    """Hash ids as (offsets, values), from a list of lists or from that form itself."""
    if ids is None:
        return None
    if isinstance(ids, tuple) and len(ids) == 2 and isinstance(ids[0], np.ndarray):
        return np.array(ids[0], np.int64), np.array(ids[1], np.int64)
    if len(ids) != rows:
        raise InputError(f"hash_ids has {len(ids)} rows: must have {rows}, one list per request")
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return offsets, np.fromiter((block for row in ids for block in row), np.int64, int(offsets[-1]))


def turns(session: Integers) -> Integers:
    """For each request the row of the next request of its session, or -1."""
    follow = np.full(len(session), -1, np.int64)
    members = np.flatnonzero(session >= 0)
    grouped = members[np.argsort(session[members], kind="stable")]
    same = session[grouped[:-1]] == session[grouped[1:]]
    follow[grouped[:-1][same]] = grouped[1:][same]
    return follow


def later_turns(session: Integers) -> npt.NDArray[np.bool_]:
    """Whether each request follows another one of its session."""
    follow = turns(session)
    later = np.zeros(len(session), np.bool_)
    later[follow[follow >= 0]] = True
    return later


def check_lengths(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """All columns have as many rows as prompt_tokens, at least one."""
    rows = len(columns["prompt_tokens"])
    for name, column in columns.items():
        if len(column) != rows:
            raise InputError(f"{name} has {len(column)} rows: must have {rows}, one value per request")
    if rows == 0:
        raise InputError("the workload has no requests: give at least one row")


def check_values(columns: Mapping[str, npt.NDArray[Any]], later: npt.NDArray[np.bool_]) -> None:
    """The rules on single values: ranges of tokens, times, priorities and session numbers; ``later``: rows that wait
    for others."""
    for name in ("prompt_tokens", "output_tokens"):
        _must(columns[name] >= 1, name, columns[name], "must be ≥ 1 (trace convert --drop-empty leaves such rows out)")
        _must(columns[name] <= LARGEST, name, columns[name], "must be ≤ 2^40 tokens")
    limit, output = columns["max_tokens"], columns["output_tokens"]
    row = first(limit < output)
    if row >= 0:
        raise InputError(
            f"row {row + 1}: max_tokens={limit[row]}: must be ≥ output_tokens={output[row]}, or leave max_tokens out"
        )
    _must(limit <= LARGEST, "max_tokens", limit, "must be ≤ 2^40 tokens")
    _must(columns["session"] >= -1, "session", columns["session"], "must be ≥ 0, or -1 for its own request")
    think = columns["think_time"]
    _must(np.isfinite(think) & (think >= 0), "think_time", think, "must be finite seconds ≥ 0")
    arrival = columns["arrival"]
    fine = (np.isfinite(arrival) & (arrival >= 0)) | (np.isnan(arrival) & later)
    _must(fine, "arrival", arrival, "must be finite seconds ≥ 0 (only later turns of a session have none)")
    for name, times in (("arrival", arrival), ("think_time", think)):
        _must(~(times > LATEST), name, times, f"must be ≤ {LATEST:g} seconds: are these milliseconds?")


def _must(fine: npt.NDArray[np.bool_], name: str, values: npt.NDArray[Any], rule: str) -> None:
    row = first(~fine)
    if row >= 0:
        raise InputError(f"row {row + 1}: {name}={values[row]}: {rule}")


def check_sorted(arrival: Floats, rows: Integers) -> None:
    """Arrivals may not decrease; ``rows`` are their places in the source."""
    step = first(arrival[1:] < arrival[:-1])
    if step >= 0:
        raise InputError(
            f"row {rows[step + 1] + 1}: arrival={arrival[step + 1]:g} comes after {arrival[step]:g}: "
            "arrivals must not decrease; sort them with trace convert --sort"
        )


def check_order(arrival: Floats, later: npt.NDArray[np.bool_]) -> None:
    """Rows with an arrival come first, sorted; behind them exactly those that wait for others."""
    unreleased = np.isnan(arrival)
    row = first(unreleased != later)
    if row >= 0:
        raise InputError(
            f"row {row + 1}: arrival={arrival[row]} of a later turn: must be NaN; build it with Workload.from_columns"
        )
    row = first(unreleased[:-1] & ~unreleased[1:])
    if row >= 0:
        raise InputError(f"row {row + 2}: a request with an arrival behind later turns: use Workload.from_columns")
    released = arrival[~unreleased]
    check_sorted(released, np.arange(len(released)))


def check_hashes(hash_ids: HashIds | None, hash_block_size: int, prompt_tokens: Integers) -> None:
    """Offsets must frame the ids, no prompt may have more ids than blocks, and an id has the same ids before it."""
    if hash_ids is None:
        if hash_block_size:
            raise InputError(f"hash_block_size={hash_block_size}: goes with hash_ids, which are missing")
        return
    if hash_block_size < 1:
        raise InputError(f"hash_block_size={hash_block_size}: hash_ids need the tokens per block, ≥ 1")
    offsets, values = hash_ids
    framed = len(offsets) == len(prompt_tokens) + 1 and offsets[0] == 0 and offsets[-1] == len(values)
    if not framed or (np.diff(offsets) < 0).any():
        raise InputError("hash_ids offsets: must rise from 0 to the number of ids, one more than there are requests")
    blocks = -(-prompt_tokens // hash_block_size)
    row = first(np.diff(offsets) > blocks)
    if row >= 0:
        raise InputError(
            f"row {row + 1}: {offsets[row + 1] - offsets[row]} hash_ids for a prompt of {prompt_tokens[row]} tokens: "
            f"must be ≤ {blocks[row]} blocks of {hash_block_size}"
        )
    _check_beginnings(offsets, values)


def _check_beginnings(offsets: Integers, values: Integers) -> None:
    """An id stands for everything up to the end of its block: wherever it stands, the same id must stand before it."""
    if not len(values):
        return
    if _stand_alike(offsets, *dense(values)):
        return
    _, firsts, ids = np.unique(values, return_index=True, return_inverse=True)
    before = np.append(-1, ids)
    before[offsets[:-1]] = -1
    place = first(before[:-1] != before[:-1][firsts][ids])
    place_before = firsts[ids[place]]
    rows = np.searchsorted(offsets, [place, place_before], side="right")
    found = [f"{values[i - 1]}" if before[i] >= 0 else "nothing" for i in (place, place_before)]
    raise InputError(
        f"row {rows[0]}: hash id {values[place]} stands behind {found[0]}, but behind {found[1]} in row {rows[1]}: "
        "an id names a block and all before it; give other ids to blocks with other beginnings"
    )


PIECE = 1 << 20
"""Ids that are looked at together."""


def dense(values: Integers) -> tuple[Integers, int]:
    """(Ids as numbers ≥ 0, more than the largest): the same where they lie close enough, else numbered anew."""
    low, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if span <= 4 * len(values) + 1024:
        return values - low if low else values, span
    import pyarrow as pa

    numbers: Integers = pa.array(values).dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers, int(numbers.max()) + 1


def _stand_alike(offsets: Integers, ids: Integers, count: int) -> bool:
    """Whether each id stands behind the same one wherever it stands."""
    known = np.full(count, -2, np.int64)
    starts = offsets[:-1]
    for begin in range(0, len(ids), PIECE):
        piece = ids[begin : begin + PIECE]
        before = np.append(ids[begin - 1] if begin else -1, piece[:-1])
        low, high = np.searchsorted(starts, [begin, begin + len(piece)])
        before[starts[low:high] - begin] = -1
        new = known[piece] == -2
        known[piece[new]] = before[new]
        if (known[piece] != before).any():
            return False
    return True


def check_samples(sample_of: Integers, prompt_tokens: Integers, arrival: Floats, released_by_ends: bool) -> None:
    """The sequences of a request: rows one after the other that name the first of them, with its prompt and arrival.

    Closed loops and sessions have none, because it is not known which of their ends releases what follows.
    """
    if released_by_ends:
        raise InputError("n: sequences of one request do not go with sessions, lanes and closed loops: leave one out")
    rows = np.arange(len(prompt_tokens))
    if len(sample_of) != len(rows) or (sample_of > rows).any() or (sample_of < 0).any():
        raise InputError("sample_of: must name for each row itself, or the first of the rows before it")
    follows = np.append(False, sample_of[1:] == sample_of[:-1])
    wrong = first((sample_of != rows) & ~follows)
    if wrong >= 0:
        raise InputError(f"row {wrong + 1}: sample_of={sample_of[wrong]}: sequences of a request stand together")
    unlike = first((prompt_tokens != prompt_tokens[sample_of]) | (arrival != arrival[sample_of]))
    if unlike >= 0:
        raise InputError(f"row {unlike + 1}: has another prompt or arrival than the first sequence of its request")
