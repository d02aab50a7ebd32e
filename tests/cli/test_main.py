"""What surrounds the command line: what a first run says while it compiles."""

import logging
import sys

import pytest

from windtunnel.__main__ import say_what_is_compiled


@pytest.mark.parametrize(("terminal", "said"), [(False, "windtunnel: compiling it (once)\n"), (True, "")])
def test_a_first_run_says_what_is_compiled(
    terminal: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("windtunnel.core.kernels")
    before = list(log.handlers)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    try:
        say_what_is_compiled()
        log.info("compiling it (once)")
        log.info("")
    finally:
        log.handlers[:] = before
    assert capsys.readouterr().err == said
