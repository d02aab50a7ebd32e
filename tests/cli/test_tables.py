"""Results for other programs: Markdown and CSV hold what the screen shows."""

import csv
import io

import pytest
from rich.text import Text

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.tables import FORM, brief, comma_separated, markdown
from windtunnel.cli.terminal import facts_grid, table

PARTS = (
    "A verdict\nin two lines",
    table(("name", "tokens"), [("a|b", "1,336"), ("c, d", "5,444-7,324")], "a title"),
    facts_grid([("cost", "$1.00/h"), ("next", "one\ntwo")]),
    Text("note: a remark"),
)
RUN = (
    "run",
    "Qwen/Qwen3-8B",
    "--isl",
    "200",
    "--osl",
    "20",
    "--num-prompts",
    "40",
    "--request-rate",
    "10",
    "--no-bands",
)


def test_markdown_has_tables_lists_and_quotes() -> None:
    assert markdown(PARTS).split("\n\n") == [
        "A verdict in two lines",
        "**a title**",
        "| name | tokens |\n|---|--:|\n| a\\|b | 1,336 |\n| c, d | 5,444-7,324 |",
        "- **cost**: $1.00/h\n- **next**: one; two",
        "> note: a remark\n",
    ]


def test_a_chat_gets_sentences_a_small_table_and_what_it_costs() -> None:
    assert brief(PARTS) == "A verdict in two lines\nname (tokens): a|b 1,336; c, d 5,444-7,324\ncost $1.00/h\n"


def test_a_run_in_brief_has_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[:-1], "--format", "brief"]) == DONE
    first, verdict, latencies, load, cost = capsys.readouterr().out.splitlines()
    assert first.startswith("Qwen/Qwen3-8B on 1 × H100 SXM")
    assert verdict.startswith("✓ GOAL MET") and "On a real server expect" in verdict
    assert latencies.startswith("latency, ms (p50 / p90 / p99 / p99 on a real server): first token (TTFT) ")
    assert load.startswith("load ") and "; throughput " in load
    assert cost.startswith("cost $") and "; confidence " in cost


def test_a_spreadsheet_reads_numbers_as_numbers() -> None:
    rows = list(csv.reader(io.StringIO(comma_separated(PARTS))))
    assert rows == [
        ["name", "tokens"],
        ["a|b", "1336"],
        ["c, d", "5,444-7,324"],
        [],
        ["cost", "$1.00/h"],
        ["next", "one; two"],
    ]


def test_a_form_holds_for_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--format", "md"]) == DONE
    assert "| first token (TTFT) |" in capsys.readouterr().out
    assert main([*RUN, "--format", "csv"]) == DONE
    assert "latency" in next(csv.reader(io.StringIO(capsys.readouterr().out)))[0]
    assert main([*RUN]) == DONE
    assert "| first" not in capsys.readouterr().out
    assert main([*RUN, "--format", "html"]) == WRONG
    assert "md" in capsys.readouterr().err


def test_a_long_fact_stays_one_text_in_markdown_and_is_wrapped_on_a_terminal() -> None:
    words = " ".join(["word"] * 40)
    told = FORM.set("md")
    try:
        assert markdown([facts_grid([("name", words)])]) == f"- **name**: {words}\n"
    finally:
        FORM.reset(told)
    assert ";" in markdown([facts_grid([("name", words)])])


def test_the_head_of_a_column_is_one_line_of_a_spreadsheet() -> None:
    whole = table(["TTFT\nms"], [["1"]])
    assert comma_separated([whole]) == "TTFT ms\n1\n"
