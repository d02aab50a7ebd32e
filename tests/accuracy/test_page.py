"""Pages of tables: the tables are written again, and nothing else changes."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import chart
from benchmarks.accuracy.page import execute, main, rendered
from windtunnel.errors import InputError

PAGE = "# A\n\n<!-- windtunnel validate x --csv 'a b' -->\nold\n<!-- end -->\n\nprose\n"


def test_a_table_is_what_its_command_prints() -> None:
    asked: list[list[str]] = []

    def run(words: list[str]) -> int:
        asked.append(words)
        sys.stdout.write("| new |\n\n")
        return 0

    found = rendered(PAGE, run)
    assert asked == [["windtunnel", "validate", "x", "--csv", "a b"]]
    assert found == PAGE.replace("old", "\n| new |\n")
    assert rendered(found, run) == found


def test_a_command_that_fails_leaves_the_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    assert main([str(path)], lambda _: 2) == 2
    assert "exit code 2" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == PAGE
    assert main([str(tmp_path / "none.md")], lambda _: 0) == 2


def test_pages_run_the_product_and_the_kernel_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["windtunnel", "--version"]) == 0
    assert capsys.readouterr().out.strip()
    with pytest.raises(InputError, match="must begin with windtunnel or python -m benchmarks"):
        execute(["ls"])


def test_the_chart_is_that_of_the_table() -> None:
    table = (chart.DOCS / "accuracy.md").read_text(encoding="utf-8")
    found = chart.medians(table)
    assert set(found) == set(chart.ROWS)
    page = (chart.DOCS.parent / "accuracy.md").read_text(encoding="utf-8")
    for row in ("all", "vllm", "sglang", "trtllm", "h100_sxm", "h200_sxm", "b200_sxm"):
        steps, first = found[row]
        assert re.search(rf"^\| {chart.ROWS[row]} \| [\d,]+ \| {first} % \| {steps} % \|", page, re.MULTILINE)
    assert (chart.DOCS / "accuracy.svg").read_text(encoding="utf-8") == chart.chart(found)
