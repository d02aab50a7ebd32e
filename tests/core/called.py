"""Functions of tests that call compiled parts of the core."""

from collections.abc import Callable
from typing import Any

import numba

from windtunnel.core.compiled import OPTIONS, PLAIN, compiler


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as an entry is: what it calls, directly or not, is linked into it. Nothing is kept on disk."""
    if PLAIN:
        return function
    made: Callable[..., Any] = numba.njit(**OPTIONS, pipeline_class=compiler().EntryCompiler)(function)
    return made
