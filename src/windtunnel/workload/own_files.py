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
from windtunnel.workload.columns import COLUMNS, Workload
from windtunnel.workload.json_traces import block_lists
from windtunnel.workload.texts import earlier_first

SCHEMA_VERSIONS = (1, 2)
SINCE_2 = ("after", "begins", "lanes")
KEYS = (*COLUMNS, "hash_ids", "hash_block_size", "after", "begins")
HEADER = ("schema_version", "name", "max_concurrency", "lanes", "hash_block_size")
DEFAULTS = {"arrival": np.nan, "max_tokens": None, "priority": 0, "session": -1, "think_time": 0.0}
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
            raise _unknown_column(number, row)
    if head.get("schema_version") == 1:
        for name in SINCE_2:
            if name in head or any(name in row for row in rows):
                raise InputError(f"{name}: is of schema_version 2: write so in the first line")
    shared = {key: [row.get(key) for row in rows] for key in ("after", "begins") if any(key in row for row in rows)}
    return {**settings, **_plain(rows), **_blocks(rows, settings), **shared}


def _unknown_column(number: int, row: dict[str, Any]) -> InputError:
    stranger = next(key for key in row if key not in KEYS)
    return InputError(f"row {number}: {unknown('column', stranger, KEYS)}")


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

    Raises InputError when the place cannot be written to.
    """
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
    number = np.argsort(order).tolist()
    for row in order.tolist():
        request = {key: column[row] for key, column in columns.items()}
        if request["arrival"] != request["arrival"]:
            del request["arrival"]
        if request["max_tokens"] == request["output_tokens"]:
            del request["max_tokens"]
        request = {key: value for key, value in request.items() if value != DEFAULTS.get(key, value + 1)}
        if offsets:
            request["hash_ids"] = values[offsets[row] : offsets[row + 1]]
        yield json.dumps(request | _relations(workload, row, number)) + "\n"


def _relations(workload: Workload, row: int, number: list[int]) -> dict[str, Any]:
    """What a row says of others, by their numbers in the file."""
    found: dict[str, Any] = {}
    if workload.after is not None:
        offsets, parents = workload.after
        found["after"] = sorted(number[parent] for parent in parents[offsets[row] : offsets[row + 1]].tolist())
    if workload.begins is not None and workload.begins[0][row] >= 0:
        found["begins"] = [number[int(workload.begins[0][row])], int(workload.begins[1][row])]
    return found


def _write_parquet(workload: Workload, file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = earlier_first(workload.begins, workload.waits)
    number = np.argsort(order).tolist()
    columns: dict[str, Any] = {key: pa.array(column[order]) for key, column in workload.columns().items()}
    relations = [_relations(workload, row, number) for row in order.tolist()]
    for key in ("after", "begins"):
        if getattr(workload, key) is not None:
            columns[key] = pa.array([found.get(key) for found in relations], pa.list_(pa.int64()))
    if workload.hash_ids:
        offsets, values = workload.hash_ids
        columns["hash_ids"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(_head(workload)).encode()})
    pq.write_table(table, file)


def read_parquet(path: Path) -> Columns:
    """Arguments of Workload.from_columns from a Parquet file. Unknown columns are errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    for name in table.column_names:
        if name not in KEYS:
            raise unknown("column", name, KEYS)
    for name in ("prompt_tokens", "output_tokens"):
        if name not in table.column_names:
            raise InputError(f"column {name} is missing: every request needs prompt_tokens and output_tokens")
    columns = _settings(json.loads((table.schema.metadata or {}).get(METADATA, b"{}")))
    for name in table.column_names:
        chunk = table.column(name).combine_chunks()
        if name == "hash_ids":
            columns[name] = _arrow_blocks(chunk)
        elif name == "hash_block_size":
            columns[name] = _single(chunk.unique().to_pylist())
        elif name == "arrival":
            columns[name] = _arrow_times(chunk)
        elif name in ("after", "begins"):
            columns[name] = chunk.to_pylist()
        elif chunk.null_count:
            raise InputError(f"row {chunk.is_null().index(True).as_py() + 1}: {name} is missing")
        else:
            columns[name] = chunk.to_numpy(zero_copy_only=False)
    return columns


def _single(sizes: list[Any]) -> int:
    if len(sizes) != 1 or type(sizes[0]) is not int:
        raise InputError(f"hash_block_size: {sizes}: must be one whole number for all requests")
    return sizes[0]


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
