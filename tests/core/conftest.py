"""Tests without the compiler, in a process of their own: where its kernels would take longer than many cases."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import config

import windtunnel.core
from windtunnel.core import loop

PLAIN = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
IN_PLAIN_PYTHON = pytest.mark.skipif(not PLAIN, reason="runs without the compiler, which takes longer than many cases")
WITH_THE_COMPILER = pytest.mark.skipif(PLAIN, reason="starts tests without the compiler")
HERE = Path(__file__).parent
CORE = str(Path(windtunnel.core.__file__).parent)
PLAINLY = (
    "schedulers/test_sglang_order.py",
    "schedulers/test_sglang_overlap.py",
    "schedulers/test_sglang_radix.py",
    "schedulers/test_sglang_rules.py",
    "schedulers/vllm_v0/test_caching.py",
    "schedulers/vllm_v0/test_chunked.py",
    "schedulers/vllm_v1/test_encoder_time.py",
    "schedulers/vllm_v1/test_steady.py",
    "test_theory_pipelines.py",
    "texts/test_window.py",
)
"""Files of small cases, which test_plain_python runs."""


def in_plain_python(cases: int, *files: str | Path, some: str = "", marked: str = "not long") -> str:
    """Run the tests of these files, those whose names hold ``some`` and that are ``marked`` so, with this number of
    random cases; what pytest prints."""
    surroundings = os.environ | {"NUMBA_DISABLE_JIT": "1", "WINDTUNNEL_EQUALITY_CASES": str(cases)}
    options = ("-q", "-p", "no:cacheprovider", "-k", some, "-m", marked)
    command = (sys.executable, "-m", "pytest", *options, *map(str, files))
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files of small cases."""
    files = {HERE / name for name in PLAINLY}
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.plain_python)


class FromTheStart(np.ndarray[Any, Any]):
    """An array that ``core`` may not index from the end, as compiled code cannot."""

    def __getitem__(self, index: Any) -> Any:
        _require_no_sign(index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _require_no_sign(index)
        super().__setitem__(index, value)


class RecordsFromTheStart(FromTheStart, np.recarray[Any, Any]):
    """The same of records."""


def _require_no_sign(index: Any) -> None:
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, int | np.integer) and each < 0 and sys._getframe(2).f_code.co_filename.startswith(CORE):
            raise AssertionError(f"index {each}: compiled code reads and writes elsewhere")


def _checked(value: Any) -> Any:
    """The same arrays, which look at indices."""
    if isinstance(value, np.ndarray):
        return value.view(RecordsFromTheStart if isinstance(value, np.recarray) else FromTheStart)
    if isinstance(value, tuple):
        return type(value)(*map(_checked, value)) if hasattr(value, "_fields") else tuple(map(_checked, value))
    return value


if PLAIN:
    unchecked = loop.loop
    loop.loop = lambda *arguments: unchecked(*map(_checked, arguments))
