"""The decorators of everything that is compiled.

numba optimises each function and makes machine code of it, with all that it calls, whether Python calls it or not: of
functions nested eight deep, eight times. Here functions that only compiled functions call are translated to LLVM's
language, and the rest is left to the entry that Python calls: it links all of them once, and optimises what comes out.
That is less than half of the work.

numba is imported when something has to be compiled, not earlier: machine code that is kept is called without it
(``core.compilation.direct``). With ``NUMBA_DISABLE_JIT=1`` the decorators leave plain Python functions, through which a
debugger steps.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any, TypeVar, cast

from windtunnel.core.compilation.direct import CALLED, Code, UnlikeError, code_for, spread

Function = TypeVar("Function", bound=Callable[..., Any])

PLAIN = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
"""Nothing is compiled."""
PREPARATIONS: list[Callable[[], None]] = []
ONE_AT_A_TIME = RLock()


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
"""Of every compiled function: no fast-math, so additions keep their order; ``_nrt``: nothing is allocated, so nothing
is reference-counted; nothing in C calls it."""

INNER: dict[str, Any] = OPTIONS | {"no_cpython_wrapper": True}
"""Of those that only compiled functions call."""


@cache
def compiler() -> ModuleType:
    """What compiles, after all preparations."""
    from windtunnel.core.compilation import compiler as found

    found.let_compiled_code_see(Compiled)
    while PREPARATIONS:
        PREPARATIONS.pop()()
    return found


def before_compiling(prepare: Callable[[], None]) -> None:
    """Have something done with numba before anything is compiled: at once, if it is there already."""
    if PLAIN:
        return
    PREPARATIONS.append(prepare)
    if compiler.cache_info().currsize:
        PREPARATIONS.pop()()


class Compiled:
    """A function that becomes numba's when somebody needs that."""

    def __init__(self, function: Callable[..., Any], make: str, options: dict[str, Any]) -> None:
        self.py_func, self.__doc__, self.__name__ = function, function.__doc__, function.__name__
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self._make, self._options = make, options
        self._made: Any = None

    @property
    def made(self) -> Any:
        """numba's function."""
        if self._made is None:
            with ONE_AT_A_TIME:
                self._made = self._made or getattr(compiler(), self._make)(self.py_func, self._options)
        return self._made

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it."""
        return self.made(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.made, name)


class Entry(Compiled):
    """One that Python calls: as long as numba is not there, without it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, "entry_of", OPTIONS)
        self._codes: dict[str, Code | None] = {}
        self._left = CALLED
        self.settled: dict[str, Callable[..., Any]] = {}
        """The code for arguments of these types, for ``Settled``."""

    @property
    def waits_for_numba(self) -> bool:
        """Whether nothing has needed numba's function yet."""
        return self._made is None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it."""
        whole = not named and len(arguments) == self.py_func.__code__.co_argcount
        if whole and self._left and self._made is None and "numba" not in sys.modules:
            self._left -= 1
            try:
                said, classes, table = spread(arguments)
            except UnlikeError:
                self._left = 0
            else:
                if said not in self._codes:
                    self._codes[said] = code_for(self.py_func, said, classes)
                if (code := self._codes[said]) is not None:
                    return code(table)
        made = self.made
        result = made(*arguments, **named)
        if made._cache.fresh is not None and whole:
            made._cache.keep_way_in(arguments)
        return result


def chosen_by_types(function: Callable[..., Any], choose: Callable[..., Any], **options: bool) -> None:
    """Let compiled code call ``function``, in whose place it finds what ``choose`` says for the types of the
    arguments."""

    def prepare() -> None:
        from windtunnel.core.compilation.compiler import overloaded

        overloaded(function, choose, INNER | options)

    before_compiling(prepare)


def instructions(function: Function) -> Function:
    """A function for compiled code, of LLVM's instructions: numba's ``intrinsic``."""
    return function if PLAIN else cast(Function, Compiled(function, "intrinsic_of", {}))


def part(function: Function) -> Function:
    """Compile into each caller: handing over arrays costs more than most functions do. For one or two callers."""
    return _inner(function, forceinline=True)


def compiled(function: Function) -> Function:
    """Compile once, to be called: for what is rare, or large and called from several places. Said to numba: otherwise
    what a ``part`` calls would be one too."""
    return _inner(function, forceinline=False)


def _inner(function: Function, **options: bool) -> Function:
    return function if PLAIN else cast(Function, Compiled(function, "dispatcher_of", INNER | options))


def entry(function: Function) -> Function:
    """Compile what Python calls, and keep the machine code of it and all that it calls on disk."""
    return function if PLAIN else cast(Function, Entry(function))


class Settled:
    """An entry that is called again and again with the same State: to find out which of its codes fits the arguments'
    types costs 13 µs, and the call itself half a one. So types are looked at when the State is a new one, not oftener;
    all other arguments must keep theirs. As long as the entry does without numba, this does."""

    def __init__(self, made: Callable[..., Any]) -> None:
        self._made: Any = made
        self._code: Callable[..., Any] = made
        self._state: Any = None
        self._codes = made.settled if isinstance(made, Entry) else {}

    def __call__(self, state: Any, *rest: Any) -> Any:
        """Call it."""
        if state is not self._state:
            self._settle(state, *rest)
        return self._code(state, *rest)

    def _settle(self, *arguments: Any) -> None:
        if PLAIN or (isinstance(self._made, Entry) and self._made.waits_for_numba):
            return
        try:
            said = spread(arguments)[0]
        except UnlikeError:
            said = ""
        if not said or said not in self._codes:
            import numba

            self._codes[said] = self._made.compile(tuple(map(numba.typeof, arguments)))
        self._state, self._code = arguments[0], self._codes[said]
