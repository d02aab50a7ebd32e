"""A CSV file's bytes as columns of bytes: fast where nothing is quoted, careful elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import numpy as np

from windtunnel.errors import InputError
from windtunnel.workload.rules import Floats, Integers

Table = dict[str, list[bytes]]
"""Cells by column name, in the file's order; one cell per row."""

COMMA, NEWLINE = ord(","), ord("\n")


def header(data: bytes) -> list[str]:
    """The column names: the first line's cells."""
    line = data[:65536].removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].strip()
    return [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(",")]


def read_table(data: bytes) -> Table:
    """Split a CSV with a header line; line ends may be LF or CRLF, the last one may be missing.

    Raises InputError for rows with too few or too many cells, and when there is no row below the header.
    """
    names = header(data)
    body = data.partition(b"\n")[2]
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n")
    body = body.rstrip(b"\n")
    if not body.strip():
        raise InputError("has no rows below its header")
    if b'"' not in body and _is_rectangular(body, len(names)):
        cells = body.replace(b"\n", b",").split(b",")
        return {name: cells[index :: len(names)] for index, name in enumerate(names)}
    return _read_carefully(body, names)


def _is_rectangular(body: bytes, width: int) -> bool:
    letters = np.frombuffer(body, np.uint8)
    separators = np.append(letters[(letters == COMMA) | (letters == NEWLINE)], np.uint8(NEWLINE))
    if len(separators) % width:
        return False
    lines = separators.reshape(-1, width)
    return bool((lines[:, -1] == NEWLINE).all() and (lines[:, :-1] == COMMA).all())


def _read_carefully(body: bytes, names: list[str]) -> Table:
    rows: list[list[bytes]] = []
    try:
        for row in csv.reader(io.StringIO(body.decode("utf-8", "replace"))):
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
        return np.array(list(map(int, cells)), np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([_whole(cell) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        raise bad_cell(cells, name, _whole, "a whole number") from None


def _whole(cell: bytes) -> int:
    number = float(cell)
    if not (abs(number) < 2.0**62 and number.is_integer()):
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
