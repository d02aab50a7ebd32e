"""A plugin for pytest: which test runs which lines of the package, and how long it takes.

``REACHED=FILE pytest -p benchmarks.reached`` writes ``{test: [seconds, {path: lines}]}`` to the file as JSON. Without
the variable it only keeps hypothesis from looking for the smallest failure, since any will do here.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest

PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
FILE = os.environ.get("REACHED", "")
PACKAGE = str(Path(__file__).parents[1] / "src" / "windtunnel") + os.sep

hypothesis.settings.register_profile("mutation", phases=PHASES, deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("mutation")

_tests: dict[str, tuple[float, dict[str, list[int]]]] = {}
_lines: dict[str, set[int]] = {}
_left: dict[CodeType, set[int]] = {}
"""Of each piece of code the lines that the test has not run; once there are none it is no longer watched."""


def _trace(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ARG001
    path = frame.f_code.co_filename
    if not path.startswith(PACKAGE):
        return None
    left = _left.get(frame.f_code)
    if left is None:
        lines = {line for *_, line in frame.f_code.co_lines() if line is not None}
        left = _left[frame.f_code] = lines - {frame.f_lineno} or lines  # no line event tells of the head
    if not left:
        return None
    add, done = _lines.setdefault(path, set()).add, left.discard

    def line(inner: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            add(inner.f_lineno)
            done(inner.f_lineno)
        return line

    return line


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch one test with its fixtures."""
    if not FILE:
        return (yield)
    _lines.clear()
    _left.clear()
    began = time.process_time()
    threading.settrace(_trace)
    sys.settrace(_trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        lines = {path.removeprefix(PACKAGE): sorted(each) for path, each in _lines.items()}
        _tests[item.nodeid] = (time.process_time() - began, lines)


def pytest_sessionfinish() -> None:
    """Write what was seen."""
    if FILE:
        Path(FILE).write_text(json.dumps(_tests), encoding="utf-8")
