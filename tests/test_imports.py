"""What is quick stays quick: the package and its help load none of the heavy libraries, and a run few of them."""

import os
import subprocess
import sys

import pytest

HEAVY = ("aiconfigurator_core", "numba", "pandas", "plotly", "pyarrow", "pydantic", "scipy", "sklearn")
MODULES = 330
"""Most modules, those of Python included, that the help of the commands may load."""
OURS = {"cli", "cli.arguments", "cli.help", "cli.tables", "errors", "files", "scenario", "scenario.words", "version"}
"""What it loads of this package."""
NOT_FOR_A_RUN = ("pandas", "plotly", "pyarrow", "sklearn", "multiprocessing", "sqlite3", "windtunnel.plan")
"""What no simulation needs, of a load that is made up; a trace may be in a table."""
CASES = {
    "import": "import windtunnel",
    "help": "from windtunnel.cli import main; main(['--help'])",
    "run help": "from windtunnel.cli import main; main(['run', '--help'])",
    "compare help": "from windtunnel.cli import main; main(['compare', '--help'])",
    "list": "from windtunnel.cli import main; main(['list', 'devices'])",
}


def run_python(code: str, plainly: bool = False) -> str:
    plain = {"NUMBA_DISABLE_JIT": "1"} if plainly else {}
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | plain)
    return done.stdout


@pytest.mark.parametrize("code", CASES.values(), ids=CASES.keys())
def test_no_heavy_library_is_loaded(code: str) -> None:
    out = run_python(f"{code}\nimport sys\nprint('loaded', *sorted(set(sys.modules) & set({HEAVY})))")
    assert out.splitlines()[-1] == "loaded"


def test_help_loads_little() -> None:
    out = run_python(f"{CASES['help']}\nimport sys\nprint(*sys.modules)")
    modules = out.splitlines()[-1].split()
    assert "numpy" not in modules
    assert {name.removeprefix("windtunnel.") for name in modules if name.startswith("windtunnel.")} == OURS
    assert len(modules) <= MODULES


def test_a_run_loads_what_it_needs() -> None:
    """In plain Python, which compiles nothing."""
    words = ["run", "--num-prompts", "3", "--no-bands", "--perf", "roofline"]
    out = run_python(f"from windtunnel.cli import main; main({words})\nimport sys\nprint(*sys.modules)", plainly=True)
    assert not set(out.splitlines()[-1].split()) & set(NOT_FOR_A_RUN)
