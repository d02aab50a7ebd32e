"""windtunnel plan and study: the words of the issue, tables, JSON, exit codes and stores."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.plan.command import MISSED, Kept
from windtunnel.cli.plan.flags import Axes, split
from windtunnel.plan.space import Constraints

SMALL = (
    *("plan", "Llama-3.1-8B", "--devices", "h100,l40s", "--tensor-parallel-size", "1", "--max-num-seqs", "8", "32"),
    *(
        "--max-num-batched-tokens",
        "512",
        "--axis",
        "max_model_len=2048",
        "quantization=stored",
        "kv_cache_dtype=auto",
        "--isl",
        "300",
        "--osl",
        "40",
    ),
    *("--num-prompts", "200", "--perf", "modelled", "--executor", "serial", "--seeds", "2"),
)
GOODPUT = ("--goodput", "ttft:300", "tpot:30")

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *words: str, code: int = DONE) -> dict[str, Any]:
    assert main([*SMALL, *words, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_table_says_what_to_deploy(capsys: Capture) -> None:
    assert main([*SMALL, *GOODPUT]) == DONE
    out = capsys.readouterr().out
    for text in (
        "Best value: 1 × H100 SXM",
        "on 9 of 10 real servers",
        "requests/s per $/h",
        "confidence",
        "vllm serve",
    ):
        assert text in out
    assert "--max-num-seqs 32" in out
    assert "4 configurations" not in out
    assert main([*SMALL, *GOODPUT, "--verbose"]) == DONE
    out = capsys.readouterr().out
    for text in ("4 configurations", "breaks first", "next cheaper"):
        assert text in out


def test_json_is_one_document(capsys: Capture) -> None:
    found = answer(capsys, *GOODPUT, "--top", "2")
    assert found["points"] == 4
    assert len(found["ranking"]) == 2
    first, second = found["ranking"]
    assert first["value"] >= second["value"]
    assert first["value"] == pytest.approx(first["request_rate"] / first["price_per_hour"])
    low, said, high = sorted(found["advice"]["band"]["rates"])
    assert low <= said <= high
    assert said == pytest.approx(first["request_rate"], rel=0.02)


def test_a_target_rate_is_served_at_the_least_cost(capsys: Capture) -> None:
    found = answer(capsys, *GOODPUT, "--target-request-rate", "60")
    best = found["ranking"][0]
    assert found["objective"] == "cost for 60 requests/s"
    assert best["request_rate"] == 60
    assert best["value"] == best["price_per_hour"] == pytest.approx(min(row["value"] for row in found["ranking"]))
    assert "least_outstanding" in found["advice"]["routing"] or best["replicas"] == 1
    gpus = answer(capsys, *GOODPUT, "--target-request-rate", "60", "--objective", "gpus")
    assert gpus["unit"] == "GPUs"


def test_impossible_limits_exit_with_one(capsys: Capture) -> None:
    found = answer(capsys, "--goodput", "ttft:1", code=MISSED)
    assert found["ranking"] == []
    assert found["advice"]["closest"]["limits_times"] > 1
    assert main([*SMALL, "--goodput", "ttft:1"]) == MISSED
    assert "Nothing meets the goal on 9 of 10 real servers: the closest needs" in capsys.readouterr().out


def test_a_repeat_finds_what_a_search_has_done(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WINDTUNNEL_STORE", str(tmp_path / "plans.db"))
    first, again = answer(capsys, *GOODPUT), answer(capsys, *GOODPUT)
    assert (again["trials"], again["reused"]) == (0, first["trials"])
    assert again["ranking"] == first["ranking"]


def test_a_cache_that_cannot_be_written_keeps_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("WINDTUNNEL_STORE")
    monkeypatch.setenv("WINDTUNNEL_CACHE", str(tmp_path / "file"))
    with Kept().opened() as store:
        assert store.path == ":memory:"
    assert "simulations are not kept" in capsys.readouterr().err
    monkeypatch.setenv("WINDTUNNEL_CACHE", str(tmp_path / "folder"))
    with Kept().opened() as store:
        assert store.path == str(tmp_path / "folder" / "plans.db")


def test_a_store_is_a_study(capsys: Capture, tmp_path: Path) -> None:
    store, target = str(tmp_path / "studies.db"), tmp_path / "trials.parquet"
    first = answer(capsys, *GOODPUT, "--store", store, "--study", "one")
    again = answer(capsys, *GOODPUT, "--store", store, "--study", "one")
    assert first["trials"] > 0
    assert (again["trials"], again["reused"]) == (0, first["trials"])
    answer(capsys, "--goodput", "ttft:500", "--store", store, "--study", "two")
    assert main(["study", "list", store]) == DONE
    out = capsys.readouterr().out
    assert "one" in out and "two" in out
    assert main(["study", "show", store, "one", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["answer"]["ranking"] == first["ranking"]
    assert main(["study", "show", store, "one"]) == DONE
    assert "max_num_seqs 32" in capsys.readouterr().out
    assert main(["study", "compare", store, "one", "two"]) == DONE
    assert "question.goodput.ttft" in capsys.readouterr().out
    assert main(["study", "export", store, str(target), "--study", "one"]) == DONE
    import pyarrow.parquet as pq

    table = pq.read_table(target)
    assert table.num_rows == first["trials"]
    assert {"rate", "met", "ttft_p99", "cpu_seconds"} <= set(table.column_names)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plan", "--devices", "h1000"), "unknown device 'h1000'"),
        (("plan", "--max-num-seqs", "many"), "max_num_seqs=['many']"),
        (("plan", "--axis", "max_num_sec=3"), "did you mean 'max_num_seqs'"),
        (("plan", "--axis", "max_num_seqs"), "must be WORD=VALUE"),
        (("plan", "--gpus", "h100"), "must be DEVICE=NUMBER"),
        (("plan", "--address", "auto"), "add --executor ray"),
        (("plan", "--workers", "0"), "workers=0"),
        (("plan", "--top", "0"), "top=0"),
        (("plan", "--target-request-rate", "3", "--objective", "energy"), "is for the objectives"),
        (("plan", "--target-request-rate", "3", "--axis", "replicas=1,2"), "are found for a target rate"),
        (("plan", "--max-concurrency", "3", "--isl", "9", "--objective", "cost"), "has no rate"),
        (("plan", "--space", "none.yaml"), "cannot be read"),
        (("plan", "--axis", "block_size=16", "block_size=32"), "block_size is given twice"),
        (("plan", "--max-num-seqs", "4", "--axis", "max-num-seqs=8"), "max_num_seqs is given twice"),
        (("plan", "--axis", "device=l40s"), "name devices by --devices l40s"),
        (("plan", "--gpus", "h100=4", "h100=5"), "h100 is given twice"),
        (("plan", "--ratio", "2"), "add --pools separate"),
        (("plan", "--isl", "9", "--perf", "measurd"), "did you mean 'measured'"),
        (("plan", "--isl", "9", "--perf", "profile:none"), "no such folder"),
        (("plan", "Llama-3.1-70B", "--devices", "a10", "--tensor-parallel-size", "1"), "none of"),
        (("plan", "--tolerance", "0"), "tolerance=0"),
        (("study", "list", "none.db"), "there is no such file"),
    ],
)
def test_wrong_words_are_one_line(capsys: Capture, words: tuple[str, ...], text: str) -> None:
    assert main(list(words)) == WRONG
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_size_of_the_scheduler_is_no_axis() -> None:
    """Else points that differ in nothing would be ranked beside each other."""
    constraints = Constraints()
    fixed = Axes(axis=("scheduler=sarathi:chunk=256",)).space("Qwen/Qwen3-8B", constraints, None)
    assert "max_num_batched_tokens" not in fixed.axes
    assert "max_num_seqs" in fixed.axes
    free = Axes(axis=("scheduler=sarathi",)).space("Qwen/Qwen3-8B", constraints, None)
    assert len(free.axes["max_num_batched_tokens"]) == 5
    asked = Axes(axis=("scheduler=sarathi:chunk=256",), max_num_batched_tokens=("256", "512"))
    assert len(asked.space("Qwen/Qwen3-8B", constraints, None).axes["max_num_batched_tokens"]) == 2


def test_a_look_at_an_empty_file_leaves_it_empty(capsys: Capture, tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    assert main(["study", "list", str(empty)]) == WRONG
    assert "is empty" in capsys.readouterr().err
    assert empty.read_bytes() == b""


def test_by_default_what_people_deploy_is_searched_and_ends_are_passed(capsys: Capture, tmp_path: Path) -> None:
    """The fp8 winner has fewer GPUs than the weights as stored, and stands at no end of an axis that was not given."""
    words = ("--axis", "max_model_len=2048", "--devices", "h100", "--tensor-parallel-size", "1", "--perf", "modelled")
    load = ("--isl", "300", "--osl", "40", "--num-prompts", "200", "--executor", "serial", "--seeds", "1", "--top", "1")
    rate = ("--target-request-rate", "150", "--max-num-batched-tokens", "512", "1024")
    command = ("plan", "Llama-3.1-8B", *words, *load, *rate, *GOODPUT, "--confidence", "0.5")
    assert main([*command, "--launch", str(tmp_path / "launch"), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    best = found["ranking"][0]
    assert best["settings"]["quantization"] == "fp8"
    assert best["settings"]["router"] in ("round_robin", "least_outstanding", "vllm_dp")
    assert "max_num_seqs" not in found["advice"]["at_an_end_of"]
    assert found["trials"] > 0
    assert found["reused"] == 0
    assert "node.sh" in [path.name for path in (tmp_path / "launch").iterdir()]
    assert main([*command, "--axis", "quantization=stored", "kv_cache_dtype=auto", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["ranking"][0]["value"] > best["value"]


def test_settings_of_a_router_stay_together() -> None:
    assert split(("round_robin,prefix_aware:prefix=1,queue=3,kv=0,random",)) == [
        "round_robin",
        "prefix_aware:prefix=1,queue=3,kv=0",
        "random",
    ]
    assert split(("none,tier=host capacity=1e12", "a=1,b=2")) == ["none", "tier=host capacity=1e12", "a=1", "b=2"]
