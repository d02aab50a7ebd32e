"""ruff and mypy hold for the whole repository, so that one command checks everything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "tool", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=("lint", "format", "types")
)
def test_the_code_passes(tool: tuple[str, ...]) -> None:
    done = subprocess.run((sys.executable, "-m", *tool), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
