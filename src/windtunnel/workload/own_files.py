"""windtunnel's own workload files: JSON lines and Parquet, the same columns in both.

JSON lines may start with one object that has ``schema_version`` (and optionally ``name``, ``max_concurrency``,
``lanes``, ``hash_block_size``); every further line is a request. Values left out take their defaults. Parquet keeps the
same object as JSON under the key ``windtunnel`` of the file's metadata.

Version 2 has ``after``, ``begins`` and ``lanes``: numbers of requests there count the file's requests from 0. A file
without them is written as version 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from windtunnel.errors import InputError, unknown
from windtunnel.files import whole_file
from windtunnel.workload.columns import COLUMNS, Workload, take_hashes
from windtunnel.workload.graph import Edges
from windtunnel.workload.json_traces import block_lists, lists, plain_columns
from windtunnel.workload.rules import Integers, NoTrace
from windtunnel.workload.texts import Begins, earlier_first

SCHEMA_VERSIONS = (1, 2)
SINCE_2 = ("after", "begins", "lanes")
LISTS = ("hash_ids", "after", "begins")
KEYS = (*COLUMNS, "hash_ids", "hash_block_size", "after", "begins")
HEADER = ("schema_version", "name", "max_concurrency", "lanes", "hash_block_size")
DEFAULTS: dict[str, Any] = {"arrival": np.nan, "max_tokens": None, "priority": 0, "session": -1, "think_time": 0.0}
METADATA = b"windtunnel"

Columns = dict[str, Any]


def read_jsonl(rows: list[dict[str, Any]]) -> Columns:
    """Arguments of Workload.from_columns from the objects of a file's lines. Unknown keys are errors."""
    head = rows[0] if "schema_version" in rows[0] else {}
    settings = _settings(head)
    rows = rows[1:] if head else rows
    if not rows:
        raise InputError("has no requests below its first line")
    keys = set(KEYS)
    for number, row in enumerate(rows, start=1):
        if not row.keys() <= keys:
            raise _unknown_column(number, row, ours=bool(head))
    if head.get("schema_version") == 1:
        for name in SINCE_2:
            if name in head or any(name in row for row in rows):
                raise InputError(f"{name}: is of schema_version 2: write so in the first line")
    shared = {key: [row.get(key) for row in rows] for key in ("after", "begins") if any(key in row for row in rows)}
    return {**settings, **_plain(rows), **_blocks(rows, settings), **shared}


def read_plain(head: dict[str, Any], table: Any) -> Columns | None:
    """The same from columns (``json_traces.read_plain``); None for what takes a closer look."""
    settings = _settings(head) if "schema_version" in head else {}
    names = table.column_names
    old = head.get("schema_version") == 1 and any(name in settings or name in names for name in SINCE_2)
    if old or not table.num_rows or "hash_block_size" in names or not set(names) <= set(KEYS):
        return None
    found = plain_columns(table, names, DEFAULTS | {"max_tokens": 0})
    if found is None or not {"prompt_tokens", "output_tokens"} <= found.keys():
        return None
    if any(isinstance(column, tuple) != (name in LISTS) for name, column in found.items()):
        return None
    columns: Columns = {"hash_block_size": 0, **settings, **found}
    if "max_tokens" in names:
        given = table.column("max_tokens").is_valid().to_numpy()
        columns["max_tokens"] = np.where(given, found["max_tokens"], found["output_tokens"])
    if "after" in names and table.column("after").null_count:
        columns["after"] = table.column("after").to_pylist()
    if "begins" in names:
        columns["begins"] = pairs(table.column("begins"))
        if columns["begins"] is None:
            return None
    if "hash_ids" not in names:
        columns["hash_block_size"] = 0
    return columns


def pairs(column: Any) -> Begins | None:
    """(Rows, tokens) of pyarrow's lists of two, -1 and 0 where there is none; None where one has another length, or
    names no earlier row."""
    listed = lists(column)
    has = column.is_valid().to_numpy()
    if listed is None or (np.diff(listed[0])[has] != 2).any():
        return None
    rows, tokens = np.full(len(has), -1, np.int64), np.zeros(len(has), np.int64)
    rows[has], tokens[has] = listed[1][::2], listed[1][1::2]
    earlier = (rows[has] >= 0) & (rows[has] < np.flatnonzero(has))
    return (rows, tokens) if earlier.all() else None


def _unknown_column(number: int, row: dict[str, Any], ours: bool) -> InputError:
    stranger = next(key for key in row if key not in KEYS)
    kind = InputError if ours or {"prompt_tokens", "output_tokens"} <= row.keys() else NoTrace
    return kind(f"row {number}: {unknown('column', stranger, KEYS)}")


def _settings(head: dict[str, Any]) -> Columns:
    for key in head:
        if key not in HEADER:
            raise unknown("key of the first line", key, HEADER)
    version = head.get("schema_version", SCHEMA_VERSIONS[0])
    if version not in SCHEMA_VERSIONS or isinstance(version, bool):
        raise InputError(f"schema_version={version!r}: this windtunnel reads versions 1 and 2")
    for key in ("max_concurrency", "lanes", "hash_block_size"):
        if type(head.get(key, 0)) is not int:
            raise InputError(f"{key}={head[key]!r}: must be a whole number")
    if not isinstance(head.get("name", ""), str):
        raise InputError(f"name={head['name']!r}: must be text")
    return {key: value for key, value in head.items() if key != "schema_version"}


def _plain(rows: list[dict[str, Any]]) -> Columns:
    columns: Columns = {}
    for key in COLUMNS:
        if not any(key in row for row in rows):
            if key not in DEFAULTS:
                raise InputError(f"row 1: {key} is missing: every request needs prompt_tokens and output_tokens")
            continue
        if key == "max_tokens":
            values = [row.get(key, row.get("output_tokens")) for row in rows]
        else:
            values = [row.get(key, DEFAULTS.get(key)) for row in rows]
        columns[key] = _numbers(key, values)
    return columns


def _numbers(key: str, values: list[Any]) -> list[Any]:
    for number, value in enumerate(values, start=1):
        if isinstance(value, bool) or not isinstance(value, int | float):
            if value is None and key == "arrival":
                continue
            raise InputError(f"row {number}: {key}={'missing' if value is None else repr(value)}: must be a number")
    return [np.nan if value is None else value for value in values] if key == "arrival" else values


def _blocks(rows: list[dict[str, Any]], settings: Columns) -> Columns:
    sizes = {row["hash_block_size"] for row in rows if "hash_block_size" in row}
    sizes |= {settings["hash_block_size"]} if settings.get("hash_block_size") else set()
    if len(sizes) > 1:
        raise InputError(f"hash_block_size: {', '.join(map(str, sorted(sizes)))}: must be the same for all requests")
    ids = block_lists(rows)
    if ids is None:
        return {"hash_block_size": 0}
    size = sizes.pop() if sizes else 0
    if type(size) is not int:
        raise InputError(f"hash_block_size={size!r}: must be a whole number")
    return {"hash_ids": ids, "hash_block_size": size}


def _head(workload: Workload) -> dict[str, Any]:
    if workload.sample_of is not None:
        raise InputError("n: no file has sequences of one request: write the workload without, and add them again")
    if workload.images[0]:
        raise InputError(f"images={workload.images}: no file has them: write the workload without, and add them again")
    new = workload.after is not None or workload.begins is not None or workload.lanes > 0
    head: dict[str, Any] = {"schema_version": 2 if new else 1, "name": workload.name}
    for name in ("max_concurrency", "lanes"):
        if getattr(workload, name):
            head[name] = getattr(workload, name)
    if workload.hash_block_size:
        head["hash_block_size"] = workload.hash_block_size
    return head


def save(workload: Workload, path: str | Path) -> None:
    """Write ``.parquet`` or, under any other name, JSON lines. The file appears whole or not at all.

    Raises InputError when the place cannot be written to, and for a load of which a window counts.
    """
    if workload.measured is not None:
        raise InputError("replay: a file of requests has no window: write the sessions, and replay them")
    with whole_file(Path(path)) as file:
        if Path(path).suffix == ".parquet":
            _write_parquet(workload, file)
        else:
            file.writelines(line.encode() for line in _lines(workload))


def _lines(workload: Workload) -> Iterable[str]:
    yield json.dumps(_head(workload)) + "\n"
    columns = {key: column.tolist() for key, column in workload.columns().items()}
    offsets, values = (part.tolist() for part in workload.hash_ids) if workload.hash_ids else ([], [])
    order = earlier_first(workload.begins, workload.waits)
    after, begins = _numbered(workload, order)
    starts, parents = (part.tolist() for part in after) if after else ([], [])
    others, tokens = (part.tolist() for part in begins) if begins else ([], [])
    for place, row in enumerate(order.tolist()):
        request = {key: column[row] for key, column in columns.items()}
        if request["arrival"] != request["arrival"]:
            del request["arrival"]
        if request["max_tokens"] == request["output_tokens"]:
            del request["max_tokens"]
        request = {key: value for key, value in request.items() if value != DEFAULTS.get(key, value + 1)}
        if offsets:
            request["hash_ids"] = values[offsets[row] : offsets[row + 1]]
        if starts:
            request["after"] = parents[starts[place] : starts[place + 1]]
        if others and others[place] >= 0:
            request["begins"] = [others[place], tokens[place]]
        yield json.dumps(request) + "\n"


def _numbered(workload: Workload, order: Integers) -> tuple[Edges | None, Begins | None]:
    """What rows say of others, by their places in this order of all rows: ``after``, ascending, and ``begins``."""
    number = np.argsort(order)
    after, begins = workload.after, workload.begins
    if after is not None:
        starts, parents = take_hashes(after, order) or after
        named = number[parents]
        after = starts, named[np.lexsort((named, np.repeat(np.arange(len(order)), np.diff(starts))))]
    if begins is not None:
        others = begins[0][order]
        begins = np.where(others >= 0, number[others], -1), begins[1][order]
    return after, begins


def _write_parquet(workload: Workload, file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = earlier_first(workload.begins, workload.waits)
    after, begins = _numbered(workload, order)
    columns: dict[str, Any] = {key: pa.array(column[order]) for key, column in workload.columns().items()}
    if after is not None:
        columns["after"] = pa.ListArray.from_arrays(pa.array(after[0].astype(np.int32)), pa.array(after[1]))
    if begins is not None:
        has = begins[0] >= 0
        starts = pa.array(np.append(0, 2 * np.cumsum(has)).astype(np.int32), mask=np.append(~has, False))
        columns["begins"] = pa.ListArray.from_arrays(starts, pa.array(np.stack(begins, axis=1)[has].ravel()))
    if workload.hash_ids:
        offsets, values = take_hashes(workload.hash_ids, order) or workload.hash_ids
        columns["hash_ids"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(_head(workload)).encode()})
    pq.write_table(table, file)


def read_parquet(path: Path) -> Columns:
    """Arguments of Workload.from_columns from a Parquet file, column by column. Unknown columns are errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:  # read_table would import pandas, where there is one
            schema = file.schema_arrow
            for name in schema.names:
                if name not in KEYS:
                    raise unknown("column", name, KEYS)
            for name in ("prompt_tokens", "output_tokens"):
                if name not in schema.names:
                    raise InputError(f"column {name} is missing: every request needs prompt_tokens and output_tokens")
            columns = _settings(json.loads((schema.metadata or {}).get(METADATA, b"{}")))
            for name in schema.names:
                columns[name] = _column(name, file.read(columns=[name], use_threads=False).column(0))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    pa.default_memory_pool().release_unused()
    return columns


def _column(name: str, values: Any) -> Any:
    """A column of pyarrow's as an argument of Workload.from_columns."""
    if name in ("after", "begins"):
        return _arrow_relations(name, values)
    chunk = values.combine_chunks()
    if name == "hash_ids":
        return _arrow_blocks(chunk)
    if name == "hash_block_size":
        return _single(chunk.unique().to_pylist())
    if name == "arrival":
        return _arrow_times(chunk)
    if chunk.null_count:
        raise InputError(f"row {chunk.is_null().index(True).as_py() + 1}: {name} is missing")
    return chunk.to_numpy(zero_copy_only=False)


def _single(sizes: list[Any]) -> int:
    if len(sizes) != 1 or type(sizes[0]) is not int:
        raise InputError(f"hash_block_size: {sizes}: must be one whole number for all requests")
    return sizes[0]


def _arrow_relations(name: str, column: Any) -> Any:
    """Numbers of rows out of lists of integers; anything else is left to the checks of ``Workload``, with their
    errors."""
    import pyarrow as pa

    if pa.types.is_list(column.type) and column.type.value_type == pa.int64():
        found = pairs(column) if name == "begins" else None if column.null_count else lists(column)
        if found is not None:
            return found
    return column.to_pylist()


def _arrow_times(chunk: Any) -> Any:
    import pyarrow as pa

    if not (pa.types.is_floating(chunk.type) or pa.types.is_integer(chunk.type)):
        raise InputError(f"arrival: must be numbers, not {chunk.type}")
    return chunk.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)


def _arrow_blocks(chunk: Any) -> tuple[Any, Any]:
    import pyarrow as pa

    listed = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
    if not (listed and pa.types.is_integer(chunk.type.value_type)) or chunk.flatten().null_count:
        raise InputError(f"hash_ids: must be lists of whole numbers, not {chunk.type}")
    lists = chunk.fill_null([]) if chunk.null_count else chunk
    offsets = lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False).astype(np.int64)
    return offsets - offsets[0], values[offsets[0] : offsets[-1]]
