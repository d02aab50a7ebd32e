"""Public launch lines: each is read without a traceback, and whatever is missing is said in one line."""

import json
from pathlib import Path

import pytest

from benchmarks.launch_lines import measured

CORPUS = Path(__file__).parents[3] / "shared" / "launch_lines" / "corpus.jsonl"
FLAGS, WHOLE = 0.85, 0.75
"""Least shares of lines whose flags are all simulated or without effect, and which run with their model and device."""


def test_every_line_is_read() -> None:
    if not CORPUS.is_file():
        pytest.skip("the corpus of launch lines is not here")
    found = [each for _, each in measured(map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines()))]
    assert all(each.missing for each in found if not each.whole)
    assert all("\n" not in reason for each in found for reason in each.missing)
    assert sum(each.flags for each in found) >= FLAGS * len(found)
    assert sum(each.whole for each in found) >= WHOLE * len(found)
