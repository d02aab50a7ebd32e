"""The one decorator of all compiled functions, with a disk cache that notices a change in any of them."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from getpass import getuser
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import config

from windtunnel.perf.tabulate.cache import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])


OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
"""Of every compiled function; ``_nrt``: nothing is allocated in it, so no references are counted."""


@cache
def kernel_folder() -> Path:
    """Where compiled code lives: a folder named after the content of all core sources.

    numba's own key is the time stamp of the file of one function and misses edits of what it calls in other files.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for candidate in (cache_folder(), Path(tempfile.gettempdir()) / f"windtunnel-{getuser()}"):
        folder = candidate / "kernels" / digest.hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="windtunnel-"))


def kernel(function: Function) -> Function:
    """Compile ``function`` without the interpreter lock; no fast-math, so additions keep their order.

    It becomes part of every function that calls it: handing over arrays costs more than most kernels do. If
    references were counted, each hand-over of a State would count all its arrays, at ten times the cost of a step.
    """
    return _compiled(function, inline=True)


def called_kernel(function: Function) -> Function:
    """The same for what is large, and either rare or a loop of its own: it is compiled once, not with each caller."""
    return _compiled(function, inline=False)


def _compiled(function: Function, inline: bool) -> Function:
    previous = config.CACHE_DIR  # type: ignore[attr-defined]
    config.CACHE_DIR = str(kernel_folder())  # type: ignore[attr-defined]
    try:
        return cast(Function, numba.njit(**OPTIONS, forceinline=inline)(function))
    finally:
        config.CACHE_DIR = previous  # type: ignore[attr-defined]
