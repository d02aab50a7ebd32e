"""The page of estimators is what its command writes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.estimators.__main__ import SHARED, main
from benchmarks.page import PLACE, with_minus

DOCS = PLACE.parent
GIVEN = DOCS.parent / SHARED


def test_numbers_have_the_sign_of_a_minus() -> None:
    assert with_minus("a -1.69e-08, b-2 (-3)") == "a −1.69e-08, b-2 (−3)"


@pytest.mark.long  # a minute
@pytest.mark.skipif(not GIVEN.is_dir() or find_spec("sklearn") is None, reason="needs Vidur's profile and scikit-learn")
def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    words = [str(GIVEN / "vidur" / "profiling"), "--splitwise", str(GIVEN / "splitwise" / "perf_model.csv")]
    assert main([*words, "--output", str(tmp_path)]) == 0
    for path in DOCS.glob("estimators*"):
        assert (DOCS / path.name).read_text() == (tmp_path / path.name).read_text(), path.name
