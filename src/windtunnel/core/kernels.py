"""Compiled code on disk, in a file named after all that it was made of.

An entry is compiled for the types of its arguments, and the named tuples among them say which scheduler's rules it
holds. What it was made of are hence the module of the entry, those of these tuples, and all that they import, directly
or not; an edit elsewhere leaves it as it is, and so it does in another scheduler. numba's own key is the time stamp of
the entry's file, which misses edits of what it calls in other files.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from windtunnel.files import cache_folder

LOG = logging.getLogger(__name__)
"""Says what is being compiled when that begins, and an empty message when it ends: for those who wait."""
STARTED = time.time()
CHECKED = os.environ.get("NUMBA_BOUNDSCHECK", "0")
"""Whether compiled code looks at every index, which makes it other code."""
KEPT = 400
"""Files that are kept, up to a few megabytes each; those that were not used for longest go first."""

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT.name
IMPORT = re.compile(
    rf"^[ \t]*(?:from[ ]+({PACKAGE}[\w.]*)[ ]+import[ ]+(\([^)]*\)|[^\n]*)|import[ ]+({PACKAGE}[\w.]*))", re.M
)


# What an entry is made of.


def file_of(module: str) -> Path | None:
    """The source of a module: of this package by its name, whether it has been imported or not; None if there is
    none."""
    package, _, inner = module.partition(".")
    if package != PACKAGE:
        found = getattr(sys.modules.get(module), "__file__", None)
        return Path(found) if found else None
    path = f"{ROOT}/{inner.replace('.', '/')}"
    for found in (f"{path}.py", f"{path}/__init__.py"):
        if os.path.isfile(found):  # noqa: PTH113 - hundreds are asked for, which take 30 ms as Path
            return Path(found)
    return None


@cache
def imported_by(module: str) -> tuple[bytes, frozenset[str]]:
    """(The source of a module, the modules of this package that it names in its imports).

    Where a name is itself a module, that is what is imported, and not what its package holds.
    """
    file = file_of(module)
    source = file.read_bytes() if file else b""
    found = set()
    for of, names, alone in IMPORT.findall(source.decode()):
        for name in re.sub(r"#.*|[()]", "", names).split(",") if of else ():
            inner = f"{of}.{name.split()[0]}" if name.split() else of
            found.add(inner if file_of(inner) else of)
        if alone:
            found.add(alone)
    return source, frozenset(found)


def reached_from(modules: Iterable[str]) -> list[str]:
    """These modules and all that they import, directly or not, by name."""
    found: set[str] = set()
    ahead = list(modules)
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += imported_by(module)[1]
    return sorted(found)


def key_of(
    function: Callable[..., Any], signature: str, classes: Iterable[type], machine: tuple[str, ...]
) -> str | None:
    """Names the code of an entry for arguments of these types, with the named tuples among them; None: a source has
    been edited since it was imported, so that nobody knows what the code is made of."""
    modules = reached_from({function.__module__, *(each.__module__ for each in classes)})
    if any(_edited(file) for module in modules if (file := file_of(module))):
        return None
    versions = platform.python_version(), numba_version(), llvmlite.__version__, np.__version__, CHECKED
    names = [f"{each.__module__}.{each.__qualname__}" for each in classes]
    digest = hashlib.sha256(repr((versions, machine, function.__qualname__, signature, names)).encode())
    for module in modules:
        digest.update(hashlib.sha256(imported_by(module)[0]).digest())
    return f"{function.__name__}-{digest.hexdigest()[:32]}"


@cache
def numba_version() -> str:
    """What numba says of its version, without an import of it, which takes longer than a short run."""
    found = find_spec("numba")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "_version.py").read_text(encoding="utf-8")


def _edited(file: Path) -> bool:
    """Whether a file has been written since this process began; a time in the future says nothing."""
    return STARTED < file.stat().st_mtime <= time.time()


# The files.


def give_back_memory() -> None:
    """What this process has freed goes back to the system, where the C library (glibc) can: 40 MB that reading kernels
    has left, and as much again that LLVM leaves."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _write(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all, and make room for it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
    with suppress(FileNotFoundError):  # another process also makes room
        for _, old in sorted((kept.stat().st_mtime_ns, kept) for kept in path.parent.glob("*.kernel"))[:-KEPT]:
            old.unlink(missing_ok=True)


@cache
def kernel_folder() -> Path:
    """Where compiled code lies."""
    for candidate in (cache_folder(), Path(tempfile.gettempdir()) / f"windtunnel-{getuser()}"):
        folder = candidate / "kernels"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="windtunnel-"))
