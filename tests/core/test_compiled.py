"""Compiled code is kept on disk, and what is being compiled is said."""

import logging
from pathlib import Path

import numba
import pytest

from windtunnel.core import compiled


def doubled(x: float) -> float:
    """An entry."""
    return 2 * x


def test_an_entry_is_compiled_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "kernel_folder", lambda: tmp_path)
    with caplog.at_level(logging.INFO, logger=compiled.LOG.name):
        assert compiled.entry(doubled)(2.0) == 4.0
        assert caplog.messages == ["compiling doubled (once on this machine)", ""]
        assert compiled.entry(doubled)(3.0) == 6.0
    assert len(caplog.messages) == 2
    assert list(tmp_path.rglob("*.nbi"))


def test_a_settled_entry_looks_at_types_again_when_its_state_is_another() -> None:
    def first(state: tuple[float, ...], factor: float) -> float:
        return state[0] * factor

    made = compiled.Settled(numba.njit(first))
    one, other = (1.0, 2.0), (3, 4, 5)
    assert [made(one, 2.0), made(one, 3.0), made(other, 2.0), made(one, 2.0)] == [2.0, 3.0, 6.0, 2.0]
