"""windtunnel replay: what it prints and writes, and what it refuses."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.replay import SCHEDULERS

Capture = pytest.CaptureFixture[str]
REQUESTS = [{"id": "a", "arrival": 0.5, "prompt_len": 20, "output_len": 2}]


def recording(folder: Path, config: dict[str, Any], requests: list[dict[str, Any]] = REQUESTS) -> str:
    path = folder / "small.in.json"
    path.write_text(json.dumps({"config": config, "requests": requests}))
    return str(path)


def test_one_json_object_a_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["replay", recording(tmp_path, {}), "--scheduler", "vllm-0.32"]) == DONE
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["type"] for record in records] == ["header", "step", "step", "summary"]
    assert records[1]["scheduled"] == {"a": 20}
    assert (records[1]["t_start"], records[1]["t_end"], records[2]["t_end"]) == (0.5, 0.512, 0.522102)


def test_output_is_written_whole(tmp_path: Path, capsys: Capture) -> None:
    words = ["replay", recording(tmp_path, {}), "--scheduler", "vllm-0.10"]
    target = tmp_path / "out.jsonl"
    assert main([*words, "--output", str(target)]) == DONE
    assert capsys.readouterr().out == ""
    main(words)
    assert target.read_text() == capsys.readouterr().out


def test_nothing_is_left_of_a_refused_replay(tmp_path: Path, capsys: Capture) -> None:
    words = ["replay", recording(tmp_path, {"max_num_seq": 3}), "--scheduler", "vllm-0.32"]
    assert main([*words, "--output", str(tmp_path / "out.jsonl")]) == WRONG
    assert "did you mean 'max_num_seqs'?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["small.in.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FILE", "--scheduler", "vllm-0.9"], "unknown scheduler 'vllm-0.9': did you mean 'vllm-0.33'?"),
        (["missing.in.json", "--scheduler", "vllm-0.32"], "not a recording's input"),
        (["FILE", "--scheduler", "vllm-0.32", "--output", "."], "is a folder: give the name of a file"),
        (["FILE"], "--scheduler"),
    ],
)
def test_bad_words_are_one_line(tmp_path: Path, capsys: Capture, words: list[str], message: str) -> None:
    path = recording(tmp_path, {})
    assert main(["replay", *(path if word == "FILE" else word for word in words)]) == WRONG
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prompt_len": 10**30}, "prompt_len=1000000000000000000000000000000: must be a number, at most 10,000,000"),
        ({"arrival": float("nan")}, "arrival=nan: must be a number"),
        ({"prefix": [["a", [3]]]}, "request 'a': has a value of a wrong kind"),
        ({"images": [[[], 1, "x"]]}, "request 'a': has a value of a wrong kind"),
    ],
)
def test_a_request_that_is_none_is_one_line(
    tmp_path: Path, capsys: Capture, words: dict[str, object], message: str
) -> None:
    path = Path(recording(tmp_path, {}))
    document = json.loads(path.read_text())
    document["requests"][0] |= words
    path.write_text(json.dumps(document))
    assert main(["replay", str(path), "--scheduler", "vllm-0.32"]) == WRONG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", sorted(set(SCHEDULERS.values())))
def test_every_scheduler_has_its_replay(module: str) -> None:
    assert callable(import_module(module).replay)
