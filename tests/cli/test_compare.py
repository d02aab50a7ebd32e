"""windtunnel compare: variants in the words of `run`, tables, files and exit codes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.compare import MISSED, loads
from windtunnel.scenario import Load, Scenario

QUICK = ("compare", "Qwen/Qwen3-8B", "--isl", "200", "--osl", "20", "--num-prompts", "40", "--request-rate", "10")

Capture = pytest.CaptureFixture[str]


def test_the_table(capsys: Capture) -> None:
    words = ("--with", "max_num_seqs=4", "--with", "--max-num-seqs 8 --no-async-scheduling", "--with", "replicas=2")
    assert main([*QUICK, "--seeds", "2", "--goodput", "ttft:500", *words]) == DONE
    out = capsys.readouterr().out
    for text in (
        "Qwen/Qwen3-8B on 1 × H100 SXM, vllm-0.32; random: 40 requests; 2 random draws",
        "max_num_seqs=4: worse: ", "on a real server", "async_scheduling=false", "replicas=2", "TTFT, mean", "goodput",
    ):  # fmt: skip
        assert text in out
    assert not re.search(r"…\s", out)  # nothing is cut off
    assert max(map(len, out.splitlines())) <= 100
    assert main([*QUICK, "--seeds", "2", "--goodput", "ttft:500", *words, "-v"]) == DONE
    out = capsys.readouterr().out
    for text in ("TTFT, p99, ms", "goodput, requests/s", "KV cache, %", "same", "±", "difference", "note: prefix"):
        assert text in out
    assert "on a real server (max_num_seqs=4): " in out
    assert main([*QUICK, "--seeds", "2", *words, "--no-bands"]) == DONE
    assert "on a real server" not in capsys.readouterr().out


def test_a_file_names_its_variants(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text("few: {max_num_seqs: 4}\nmany: {max-num-seqs: 64}\n", encoding="utf-8")
    assert main([*QUICK, "--seeds", "1", "--variants", str(file), "--with", "replicas=2", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert [variant["name"] for variant in found["variants"]] == ["baseline", "replicas=2", "few", "many"]
    assert [variant["words"] for variant in found["variants"]][2:] == [{"max_num_seqs": 4}, {"max_num_seqs": 64}]


def test_the_baseline_may_come_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("model: Qwen/Qwen3-8B\nnum_prompts: 20\nrandom_input_len: 50\n", encoding="utf-8")
    assert main(["compare", "--scenario", str(file), "--seeds", "1", "--with", "replicas=2", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["title"].endswith("random: 20 requests")


def test_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([*QUICK, "--seeds", "2", "--with", "max_num_seqs=4", "--report", str(page)]) == DONE
    assert "windtunnel comparison" in page.read_text(encoding="utf-8")


def test_variants_under_several_loads(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = (*QUICK, "--seeds", "2", "--with", "max_num_seqs=2", "--on", "request_rate=40", "--on", "--burstiness 0.3")
    assert main([*words, "--report", str(page)]) == DONE
    table = capsys.readouterr().out.partition("change from the baseline")[2]
    for text in ("first load", "request_rate=40", "--burstiness 0.3", "max_num_seqs=2: E2EL, mean"):
        assert text in table
    assert page.read_text(encoding="utf-8").count("windtunnel comparison") == 3
    assert main([*words, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)["loads"]
    assert len(found) == 3
    alone = [*QUICK[:-1], "40", "--seeds", "2", "--with", "max_num_seqs=2", "--json"]
    assert main(alone) == DONE
    assert json.loads(capsys.readouterr().out) == found[1]  # as if it were compared alone


def test_another_load_takes_the_place_of_its_source() -> None:
    random = Scenario(load=Load(random_input_len=100, random_output_len=10, random_range_ratio=0.5, request_rate=5.0))
    (_, trace, longer) = loads(random, ("trace=azure-code", "random_input_len=200"))
    assert trace.load == Load(trace="azure-code", request_rate=5.0)
    assert longer.load == replace(random.load, random_input_len=200)
    (_, drawn) = loads(trace, ("random_input_len=100",))
    assert drawn.load == Load(random_input_len=100, request_rate=5.0)


def test_a_missed_goal_is_the_exit_code() -> None:
    words = (*QUICK, "--seeds", "1", "--with", "max_num_seqs=4", "--goodput", "ttft:500")
    assert main([*words, "--slo", "ttft_p99=5"]) == DONE
    assert main([*words, "--slo", "ttft_p99=1ms"]) == MISSED
    assert main([*words, "--attainment", "0.9"]) == DONE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--with", "replicas=2", "--on", "max_num_seqs=4"), "on 'max_num_seqs=4': only words of the load"),
        (("--with", "replicas=2", "--on", "request_rate=10"), "this load is compared already"),
        ((), "at least one variant"),
        (("--with", "max_num_seq=4"), "did you mean 'max_num_seqs'?"),
        (("--with", "max_num_seqs"), "must be word=value"),
        (("--with", ""), "must be word=value"),
        (("--with", "max_num_seqs='4"), "no closing quotation"),
        (("--with", "max_num_seqs=4 max-num-seqs=5"), "max_num_seqs: given twice"),
        (("--with", "max_num_seqs=4", "--with", "--max-num-seqs 4"), "'max_num_seqs=4': given twice"),
        (("--with", "max_num_seqs=four"), "max_num_seqs='four'"),
        (("--with", "seed=1"), "same seeds"),
        (("--with", "max_num_seqs=4", "--seeds", "0"), "seeds=0: must be ≥ 1"),
        (("--with", "max_num_seqs=4", "--report", "."), "is a folder"),
        (("--variants", "none.yaml"), "cannot be read"),
        (("--variant", "none.yaml"), "--variants"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, capsys: Capture) -> None:
    assert main([*QUICK, *words]) == WRONG
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(("text", "message"), [("few: 4", "few: must be words"), ("- few", "must be lines")])
def test_a_file_of_something_else(text: str, message: str, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text(text, encoding="utf-8")
    assert main([*QUICK, "--variants", str(file)]) == WRONG
    assert message in capsys.readouterr().err
