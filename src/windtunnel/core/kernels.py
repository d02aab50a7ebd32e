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
import pickle
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from getpass import getuser
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from windtunnel.files import cache_folder

LOG = logging.getLogger(__name__)
"""Says what is being compiled when that begins, and an empty message when it ends: for those who wait."""
STARTED = time.time()
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


def classes_in(kind: Any) -> Iterator[type]:
    """The named tuples in the type of an argument."""
    if isinstance(kind, types.BaseNamedTuple):
        named: Any = kind
        yield named.instance_class
    for inner in getattr(kind, "types", ()):
        yield from classes_in(inner)


def key_of(function: Callable[..., Any], signature: tuple[Any, ...], machine: tuple[str, ...]) -> str | None:
    """Names the code of an entry for arguments of these types; None: a source has been edited since it was imported,
    so that nobody knows what the code is made of."""
    classes = [each for kind in signature for each in classes_in(kind)]
    modules = reached_from({function.__module__, *(each.__module__ for each in classes)})
    if any(_edited(file) for module in modules if (file := file_of(module))):
        return None
    versions = platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__
    names = [f"{each.__module__}.{each.__qualname__}" for each in classes]
    digest = hashlib.sha256(repr((versions, machine, function.__qualname__, str(signature), names)).encode())
    for module in modules:
        digest.update(hashlib.sha256(imported_by(module)[0]).digest())
    return f"{function.__name__}-{digest.hexdigest()[:32]}"


def _edited(file: Path) -> bool:
    """Whether a file has been written since this process began; a time in the future says nothing."""
    return STARTED < file.stat().st_mtime <= time.time()


# The files.


class KeptCode(_Cache):
    """The compiled code of one entry: what numba asks before it compiles, and tells afterwards.

    To call machine code that is there, none of numba's tables of Python's and NumPy's functions, for which it imports
    SciPy too, have to be filled (half a second): the compiler does that itself.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(kernel_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept code for arguments of these types, None if there is none."""
        found = None
        path = self._path(sig, target_context.codegen())
        if path is not None and path.exists():
            try:
                *_, arguments, payload = pickle.loads(path.read_bytes())
                found = CompileResult._rebuild(target_context, *payload) if arguments == sig else None
                os.utime(path)
            except Exception:  # whatever pickle makes of half a file, or of one that is no longer readable
                found = None
        if found is None:
            LOG.info("compiling %s (once on this machine)", _subject(self._function, sig))
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what has been compiled, if there is room; otherwise it is compiled again the next time."""
        path = self._path(sig, data.codegen)
        if path is not None and not data.library.has_dynamic_globals:
            *code, _types, starts, environments = data._reduce()
            with suppress(OSError):
                _write(path, dumps((sig, (*code, "", starts, environments))))
        give_back_memory()
        LOG.info("")

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        key = key_of(self._function, sig, codegen.magic_tuple())
        return None if key is None else kernel_folder() / f"{key}.kernel"

    def enable(self) -> None:
        """It always is."""

    def disable(self) -> None:
        """It never is."""

    def flush(self) -> None:
        """There is nothing to forget: another source, another file."""


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


def _subject(function: Callable[..., Any], signature: Any) -> str:
    """What a user knows of an entry: the scheduler that its first argument, a State, belongs to; or the package of
    the entry."""
    state = signature[0]
    if "extra" not in getattr(state, "fields", ()):
        package = function.__module__.split(".")[:2]
        return ".".join(package) if package[0] == "windtunnel" else function.__name__
    extra = state.types[state.fields.index("extra")]
    kinds: Any = [extra] if isinstance(extra, types.BaseNamedTuple) else extra.types
    places = (kind.instance_class.__module__.rpartition(".schedulers.")[2] for kind in kinds)
    names = list(dict.fromkeys(place.partition(".")[0] for place in places))
    return f"the scheduler{'s' if len(names) > 1 else ''} {' and '.join(names)}"


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
