"""Machine code that is called without numba, which takes longer to import than a short run takes in all.

Beside the function that numba calls, an entry has a *way in* (``core.compilation.compiler``). It takes the address of
a table of values, eight bytes each, and passes them on as numba would: a number as it is, an array as seven values or
more (nothing, nothing, how many, bytes of one, its address, its shape, its strides), a tuple as those of what it holds.
What the machine code needs else, it finds in this process: nothing of numba, which ``kept`` makes sure of.
"""

import ctypes
import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.core import kernels
from windtunnel.core.kernels import key_of

WAY_IN = "way_in."
"""Begins the name of a way in; the function's own follows."""
STANDARD = {"numba_nextafter": "nextafter"}
"""Functions of numba's that are those of C by another name."""
MOST_SAID = 4096
"""Types of arrays that are remembered, at most."""
CALLED = 50
"""How often an entry is called without numba. Each such call looks at all values again; numba remembers their types."""
RESULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int64": ("q", int),
    "float64": ("d", float),
    "bool": ("?", bool),
    "none": ("q", lambda _: None),
}
"""numba's name of the type of a result → (how it lies in memory, what Python gets)."""
RETURNED = (0, -2)
"""What a function compiled by numba says when it has returned a value, or None."""


class UnlikeError(Exception):
    """Values that numba alone knows how to pass on."""


def spread(values: tuple[Any, ...]) -> tuple[str, list[type], list[int]]:
    """(The types of values, the classes of named tuples among them, the table of a way in).

    Raises:
        UnlikeError: there is something else than numbers, arrays, None, and tuples of these.
    """
    said: list[str] = []
    classes: list[type] = []
    table: list[int] = []
    _spread(values, said, classes, table)
    return " ".join(said), classes, table


def _spread(value: Any, said: list[str], classes: list[type], table: list[int]) -> None:
    kind = type(value)
    if isinstance(value, tuple):
        if hasattr(kind, "_fields"):
            classes.append(kind)
        said.append(f"{kind.__module__}.{kind.__qualname__}[{len(value)}]")
        for each in value:
            _spread(each, said, classes, table)
    elif kind is np.ndarray:
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        said.append(f"{_said_of(value.dtype)}{value.ndim}{layout}{flags.writeable:d}{flags.aligned:d}")
        table += (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
    elif kind in (int, np.int64):
        said.append("int64")
        table.append(int(value))
    elif kind in (float, np.float64):
        said.append("float64")
        table += struct.unpack("q", struct.pack("d", value))
    elif kind in (bool, np.bool_):
        said.append("bool")
        table.append(int(value))
    elif value is None:
        said.append("none")
        table.append(0)
    else:
        raise UnlikeError(kind.__name__)


SAID: dict[int, tuple[Any, str]] = {}
"""Identity of a type of array → (it, so that no other one gets its place, what is said of it)."""


def _said_of(dtype: Any) -> str:
    """What tells types apart. NumPy's own way of finding out whether one of records is known takes longer than this."""
    found = SAID.get(id(dtype))
    if found is None:
        if len(SAID) > MOST_SAID:
            SAID.clear()
        found = SAID[id(dtype)] = dtype, f"{dtype.str}{dtype.itemsize}{dtype.descr if dtype.fields else ''}"
    return found[1]


@cache
def machine() -> tuple[str, ...]:
    """What code is made for: as numba says it."""
    from llvmlite import binding

    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def way_in_path(function: Callable[..., Any], said: str, classes: list[type]) -> Path | None:
    """Where the code is kept that these arguments of an entry need; None: nobody knows."""
    key = key_of(function, said, classes, machine())
    return None if key is None else kernels.kernel_folder() / f"{key}.direct.kernel"


def code_for(function: Callable[..., Any], said: str, classes: list[type]) -> "Code | None":
    """The way in for such arguments, None if there is none yet, or none that can be read."""
    try:
        path = way_in_path(function, said, classes)
        if path is None or not path.exists():
            return None
        code = Code(path)
        os.utime(path)
    except Exception:  # half a file, another processor, a system that does not let us: numba says what is wrong
        return None
    return code


class Code:
    """The way in of an entry, for arguments of the same types."""

    def __init__(self, path: Path) -> None:
        head, code = path.read_bytes().split(b"\n", 1)
        self._said = json.loads(head)
        if len(code) != self._said["bytes"]:
            raise ValueError("half a file")
        self._layout, self._result = RESULTS[self._said["result"]]
        self._engine = _engine_of(code, self._said["absent"])
        address = self._engine.get_function_address(self._said["name"])
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        self._call = prototype(address)

    def __call__(self, table: list[int]) -> Any:
        """Call it."""
        result, values = ctypes.create_string_buffer(8), (ctypes.c_int64 * len(table))(*table)
        ended = self._call(ctypes.addressof(result), ctypes.addressof(values))
        assert ended in RETURNED, ended
        return self._result(struct.unpack_from(self._layout, result)[0])


def packed(name: str, result: str, absent: list[str], code: bytes) -> bytes:
    """The content of a file that ``Code`` reads; ``absent``: functions of numba's that other ways in need."""
    said = {"name": name, "result": result, "absent": absent, "bytes": len(code)}
    return json.dumps(said).encode() + b"\n" + code


def _engine_of(code: bytes, absent: list[str]) -> Any:
    """LLVM's memory with this code in it. What is never called stands for functions that are not here."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name in absent:
        found = getattr(ctypes.CDLL(None), STANDARD.get(name, "abort"))
        binding.add_symbol(name, ctypes.cast(found, ctypes.c_void_p).value)
    target = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def text_of_way_in(name: str, given: list[Any]) -> str:
    """In LLVM's language: the function that takes a table and calls that of this name, whose arguments have these
    types, as llvmlite says them; the first two say where its result and its error go."""
    lines: list[str] = []
    named: dict[str, str] = {}
    at, passed = 0, []
    for kind in given[2:]:
        value, at = _read(kind, at, lines, named)
        passed.append(f"{_word(kind, named)} {value}")
    return "\n".join(
        (
            *named.values(),
            f'declare i32 @"{name}"({", ".join(_word(kind, named) for kind in given)})',
            f'define i32 @"{WAY_IN}{name}"(ptr %result, ptr %table) {{',
            "%error = alloca ptr",
            *lines,
            f'%ended = call i32 @"{name}"({", ".join(("ptr %result", "ptr %error", *passed))})',
            "ret i32 %ended",
            "}",
        )
    )


def _read(kind: Any, at: int, lines: list[str], named: dict[str, str]) -> tuple[str, int]:
    """(An argument, or a part of one, which begins at this place of the table; where the next one begins)."""
    word = _word(kind, named)
    if kind.is_struct or kind.is_array:
        whole = "poison"
        inner = list(kind.elements) * (kind.element_count if kind.is_array else 1)
        for i, each in enumerate(inner):
            value, at = _read(each, at, lines, named)
            lines.append(f"%whole{len(lines)} = insertvalue {word} {whole}, {_word(each, named)} {value}, {i}")
            whole = lines[-1].split(" ", 1)[0]
        return whole, at
    lines.append(f"%at{at} = getelementptr i64, ptr %table, i64 {at}")
    if word == "i1":
        lines += [f"%byte{at} = load i8, ptr %at{at}", f"%value{at} = trunc i8 %byte{at} to i1"]
    else:
        lines.append(f"%value{at} = load {word}, ptr %at{at}")
    return f"%value{at}", at + 1


def _word(kind: Any, named: dict[str, str]) -> str:
    """How a type is written; of a struct with a name, that, and what it is goes to ``named``."""
    text = str(kind)
    if not (kind.is_struct and kind.name):
        for each in kind.elements if kind.is_struct or kind.is_array else ():
            _word(each, named)
        return text
    word = text.split(" = ", maxsplit=1)[0]
    if word not in named:
        named[word] = text
        for each in kind.elements:
            _word(each, named)
    return word
