"""What surrounds the command line: what a first run says while it compiles."""

import logging
import sys

import pytest

from windtunnel.__main__ import what_is_compiled_is_said


@pytest.mark.parametrize(("terminal", "said"), [(False, "windtunnel: compiling it (once)\n"), (True, "")])
def test_a_first_run_says_what_is_compiled(
    terminal: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("windtunnel.core.kernels")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with what_is_compiled_is_said():
        log.info("compiling it (once)")
        log.info("")
    log.warning("after it nothing is said")
    assert capsys.readouterr().err == said
