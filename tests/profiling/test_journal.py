"""The journal: a profile that was stopped goes on where it was, and only under the same settings."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.profiling.clock import reading
from windtunnel.profiling.journal import NAME, open_journal

KEY = ("mlp_up_proj", 1, 8, 0)
SETTING = {"device": "x", "repeats": 3}


def test_what_was_measured_is_there_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, SETTING)
    journal.add(KEY, reading([1.0, 2.0, 6.0]))
    journal.add(("attn_decode", 1, 8, 64), "out of memory")
    again = open_journal(tmp_path, SETTING)
    assert again.readings == journal.readings == {KEY: reading([1.0, 2.0, 6.0])}
    assert again.readings[KEY].median == 2.0
    assert again.skipped == {("attn_decode", 1, 8, 64): "out of memory"}


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, SETTING)
    journal.add(KEY, reading([1.0]))
    journal.add(("add", 1, 8, 0), reading([1.0]))
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text[:-20])
    again = open_journal(tmp_path, SETTING)
    assert set(again.readings) == {KEY}
    again.add(("add", 1, 8, 0), reading([3.0]))
    assert len(open_journal(tmp_path, SETTING).readings) == 2


def test_other_settings_and_other_files_are_refused(tmp_path: Path) -> None:
    open_journal(tmp_path, SETTING)
    with pytest.raises(InputError, match="begun with repeats=3, now 5"):
        open_journal(tmp_path, SETTING | {"repeats": 5})
    (tmp_path / NAME).write_text("something else\n")
    with pytest.raises(InputError, match="not a journal of windtunnel profile"):
        open_journal(tmp_path, SETTING)
