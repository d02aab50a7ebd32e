"""Tests without the compiler, in a process of their own: where its kernels would take longer than many cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

PLAIN = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
IN_PLAIN_PYTHON = pytest.mark.skipif(not PLAIN, reason="runs without the compiler, which takes longer than many cases")
WITH_THE_COMPILER = pytest.mark.skipif(PLAIN, reason="starts tests without the compiler")


def in_plain_python(cases: int, *files: str | Path, some: str = "") -> str:
    """Run the tests of these files, those whose names hold ``some``, with this number of random cases; what pytest
    prints."""
    surroundings = os.environ | {"NUMBA_DISABLE_JIT": "1", "WINDTUNNEL_EQUALITY_CASES": str(cases)}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, *map(str, files))
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
