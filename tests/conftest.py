"""Hypothesis draws the same cases in every quick run; whoever asks for more cases (WINDTUNNEL_EQUALITY_CASES) gets new
ones."""

import os
import tempfile
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("new_cases", deadline=None)  # a slow machine is no failure
settings.register_profile("same_cases", derandomize=True, database=None, deadline=None)
for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)  # tables are as wide as they need to be, on every machine
os.environ["XDG_DATA_HOME"] = tempfile.gettempdir() + "/windtunnel-tests-have-no-data"  # the installed kernels answer
os.environ["WINDTUNNEL_STORE"] = ":memory:"  # no search finds what another test's has done
MINUTES = ("test_plain_python.py", "test_docs.py")
"""Files whose few tests take a minute each."""
few = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100")) <= 100
settings.load_profile("same_cases" if few else "new_cases")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several processes a file's tests stay in one of them: what they share is made and compiled once. Files are
    taken in the order in which they were collected."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, then those of many tests, so that several processes end together. Tests whose
    kernels take longer to compile than to do without run in plain Python, by core/test_plain_python."""
    tests_of = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in MINUTES, -tests_of[item.path], item.path))
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        return
    for item in items:
        if item.get_closest_marker("plain_python"):
            item.add_marker(pytest.mark.skip(reason="runs without the compiler, by core/test_plain_python"))
