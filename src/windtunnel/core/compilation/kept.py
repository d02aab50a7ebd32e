"""What numba asks before it compiles an entry, and tells afterwards: code on disk; see ``core.kernels``."""

import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from windtunnel.core import kernels
from windtunnel.core.compilation.direct import RESULTS, WAY_IN, UnlikeError, packed, spread, way_in_path
from windtunnel.core.kernels import LOG, give_back_memory, key_of

OF_NUMBA = re.compile(rb"\0((?:numba|NRT)_\w+)(?=\0)")
"""Names of numba's functions among those of machine code."""
SVML = b"__svml"
"""Begins the names of functions of a library that numba loads where it is installed."""


def classes_in(kind: Any) -> Iterator[type]:
    """The named tuples in the type of an argument."""
    if isinstance(kind, types.BaseNamedTuple):
        named: Any = kind
        yield named.instance_class
    for inner in getattr(kind, "types", ()):
        yield from classes_in(inner)


class KeptCode(_Cache):
    """The compiled code of one entry: what numba asks before it compiles, and tells afterwards.

    To call machine code that is there, none of numba's tables of Python's and NumPy's functions, for which it imports
    SciPy too, have to be filled (half a second): the compiler does that itself.
    """

    fresh: tuple[Any, Any, bytes] | None = None
    """What was loaded or compiled last, until ``keep_way_in`` has seen it: the types, what numba says of the function,
    its machine code."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(kernels.kernel_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept code for arguments of these types, None if there is none."""
        found = None
        path = self._path(sig, target_context.codegen())
        if path is not None and path.exists():
            try:
                *_, arguments, payload = pickle.loads(path.read_bytes())
                found = CompileResult._rebuild(target_context, *payload) if arguments == sig else None
                self.fresh = None if found is None else (sig, found.fndesc, _object_of(payload))
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
            self.fresh = sig, data.fndesc, _object_of(code)
            with suppress(OSError):
                kernels._write(path, dumps((sig, (*code, "", starts, environments))))
        give_back_memory()
        LOG.info("")

    def keep_way_in(self, arguments: tuple[Any, ...]) -> None:
        """Keep the machine code for those who call it without numba, if these are the arguments it is for."""
        assert self.fresh is not None
        (kinds, made, code), self.fresh = self.fresh, None
        try:
            said, classes, _ = spread(arguments)
        except UnlikeError:
            return
        name, result = f"{WAY_IN}{made.llvm_func_name}", str(made.restype)
        if kinds != tuple(map(numba.typeof, arguments)) or result not in RESULTS:
            return
        path = way_in_path(self._function, said, classes)
        if path is not None and not path.exists() and b"\0" + name.encode() + b"\0" in code and SVML not in code:
            with suppress(OSError):
                absent = sorted({each.decode() for each in OF_NUMBA.findall(code)})
                kernels._write(path, packed(name, result, absent, code))

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        classes = [each for kind in sig for each in classes_in(kind)]
        key = key_of(self._function, str(sig), classes, codegen.magic_tuple())
        return None if key is None else kernels.kernel_folder() / f"{key}.kernel"

    def enable(self) -> None:
        """It always is."""

    def disable(self) -> None:
        """It never is."""

    def flush(self) -> None:
        """There is nothing to forget: another source, another file."""


def _object_of(payload: Sequence[Any]) -> bytes:
    """The machine code in what ``_reduce`` says."""
    _, kind, (code, _) = payload[0]
    assert kind == "object"
    return bytes(code)


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
