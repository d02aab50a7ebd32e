"""What is quick stays quick: the package and its help load none of the heavy libraries."""

import subprocess
import sys

import pytest

HEAVY = ("aiconfigurator_core", "numba", "pandas", "plotly", "pyarrow", "pydantic", "scipy", "sklearn")
MODULES = 450
"""Most modules, those of Python included, that the help of the commands may load."""
CASES = {
    "import": "import windtunnel",
    "help": "from windtunnel.cli import main; main(['--help'])",
    "run help": "from windtunnel.cli import main; main(['run', '--help'])",
    "compare help": "from windtunnel.cli import main; main(['compare', '--help'])",
    "list": "from windtunnel.cli import main; main(['list', 'devices'])",
}


def run_python(code: str) -> str:
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("code", CASES.values(), ids=CASES.keys())
def test_no_heavy_library_is_loaded(code: str) -> None:
    out = run_python(f"{code}\nimport sys\nprint('loaded', *sorted(set(sys.modules) & set({HEAVY})))")
    assert out.splitlines()[-1] == "loaded"


def test_help_loads_little() -> None:
    out = run_python(f"{CASES['help']}\nimport sys\nprint('loaded', len(sys.modules), 'numpy' in sys.modules)")
    _, modules, numpy = out.splitlines()[-1].split()
    assert numpy == "False"
    assert int(modules) <= MODULES
