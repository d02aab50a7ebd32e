"""The core's functions without the compiler, through which a debugger steps, make the same schedules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULERS = Path(__file__).with_name("schedulers")


@pytest.mark.parametrize("name", ["test_vllm.py"])
def test_equality_holds_without_the_compiler(name: str) -> None:
    some = os.environ | {"NUMBA_DISABLE_JIT": "1", "WINDTUNNEL_EQUALITY_CASES": "10"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "equal", str(SCHEDULERS / name))
    done = subprocess.run(command, env=some, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
