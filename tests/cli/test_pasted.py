"""--from: launch lines in the command line."""

import json

import pytest

from windtunnel.cli import main

LINE = "vllm serve Qwen/Qwen3-8B -tp 2 --port 8000 --attention-backend FLASHINFER --offload-group-size 4"


def test_a_line_is_told_flag_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--from", LINE, "--dry-run", "--json", "--max-num-seqs", "32", "--device", "b200"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [word["flag"] for word in document["used"]] == ["-tp", "--attention-backend"]
    assert [word["flag"] for word in document["ignored"]] == ["--port"]
    assert [word["flag"] for word in document["not_simulated"]] == ["--offload-group-size"]
    (pool,) = document["deployment"]["pools"]
    assert (pool["device"], pool["engine"]["tensor_parallel_size"], pool["engine"]["max_num_seqs"]) == (
        "b200_sxm",
        2,
        32,
    )
    assert main(["run", "--from", LINE, "--dry-run"]) == 0
    assert "without effect" in capsys.readouterr().out


def test_what_both_sides_have_is_said_once_and_the_rest_with_its_side(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [
        f"{role}: vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs {n}" for role, n in (("prefill", 8), ("decode", 64))
    ]
    words = ["run", *(word for side in sides for word in ("--from", side)), "--dry-run"]
    assert main(words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" -")]
    assert rows == [
        ["-tp", "2", "tensor_parallel_size"],
        ["--max-num-seqs", "(prefill)", "8", "max_num_seqs"],
        ["--max-num-seqs", "(decode)", "64", "max_num_seqs"],
    ]
    assert main([*words, "--json"]) == 0
    assert [word["role"] for word in json.loads(capsys.readouterr().out)["used"]] == ["prefill"] * 2 + ["decode"] * 2


def test_what_is_not_simulated_is_said_and_strict_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--from", LINE, "--num-prompts", "3", "--no-bands", "--json", "--perf", "modelled"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema_version"]
    assert "not simulated: --offload-group-size" in captured.err
    assert main([*words, "--strict"]) == 2
    assert "from: not simulated: --offload-group-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "ls"], "starts no server"),
        (["--dry-run"], "needs a launch line"),
        (["--from", "vllm serve Qwen/Qwen3-8B -tp 3"], "tensor_parallel_size=3"),
    ],
)
def test_bad_lines_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    (*_, last) = capsys.readouterr().err.splitlines()
    assert says in last


def test_serve_takes_sides(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [word for role in ("prefill", "decode") for word in ("--from", f"{role}: vllm serve Qwen/Qwen3-8B")]
    assert main(["serve", *sides, "--port", "0", "--store", "tier=host capacity=1e9"]) == 2
    assert "store: served live behind mixed pools" in capsys.readouterr().err


def test_serve_tells_a_line_without_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--from", LINE, "--dry-run"]) == 0
    assert "Qwen/Qwen3-8B on one server of 2 h100_sxm GPUs is simulated" in capsys.readouterr().out


def test_explain_reads_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--from", LINE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pool"]["engine"]["tensor_parallel_size"] == 2


def test_lines_of_whole_servers_are_set_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [word for more in ("-tp 2 --max-num-seqs 8", "") for word in ("--from", f"vllm serve Qwen/Qwen3-8B {more}")]
    load = ["--num-prompts", "3", "--seeds", "1", "--no-bands", "--perf", "modelled", "--json"]
    assert main(["compare", *lines, *load]) == 0
    names = [variant["name"] for variant in json.loads(capsys.readouterr().out)["variants"]]
    assert names == ["baseline", "tensor_parallel_size=1 max_num_seqs=default"]
    assert main(["compare", *lines[:2], *lines[:2], *load]) == 2
    assert "line 2 says what the first one says" in capsys.readouterr().err


def test_explain_takes_a_line_with_drafts_and_short_requests(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = '{"method": "mtp", "num_speculative_tokens": 2}'
    line = f"vllm serve Qwen/Qwen3-8B --max-model-len 2048 --speculative-config '{drafts}'"
    assert main(["explain", "--from", line, "--json", "--perf", "modelled"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["batch"] == "decode=32@2047,prefill=1x2048@0"
    assert "explained without drafts" in captured.err


def test_a_line_is_served_where_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--from", "vllm serve Qwen/Qwen3-8B --port 99999 --served-model-name mine"]) == 2
    assert "port=99999" in capsys.readouterr().err
