"""The page's figures are those of ``windtunnel run``, whichever stage and however they are asked for."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ui.words import SMALL, ask, stages
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.ui.bench import SMALL as FIRST
from windtunnel.ui.bench import Bench, Latest

APART = {"prefill": "replicas=1", "decode": ["replicas=2 max_num_seqs=16"], "link": "bandwidth=5e10"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"goodput": "ttft:300 tpot:50", "attainment": "0.9"},
    "text": {"num_prompts": "60", "max_num_seqs": "8", "enable_prefix_caching": "false", "seed": "3"},
    "lists": {"goodput": ["ttft:300", "tpot:50"], "slo": ["ttft_p99=0.3"], "scheduler": "sarathi:chunk=256"},
    "apart": APART,
    "trace": {"trace": "azure-conv", "random_input_len": None, "random_output_len": None, "replicas": 2},
}


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints with --json."""
    assert main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_exports_give_the_page_s_figures(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = SMALL | case
    shown = stages(words)[-1]
    assert shown["stage"] == "ends"
    (answer,) = ask(("POST", "/api/export", {"words": words}))
    exported = answer.json()
    command = shlex.split(exported["command"])
    assert command[:2] == ["windtunnel", "run"]
    assert run(command[1:], capsys) == shown["document"]
    file = tmp_path / "scenario.yaml"
    file.write_text(exported["yaml"], encoding="utf-8")
    assert run(["run", "--scenario", str(file)], capsys) == shown["document"]
    assert [each["name"] for each in exported["serve"]] == [pool["name"] for pool in stages(words)[-2]["pools"]]


def test_a_small_load_comes_first() -> None:
    words = SMALL | {"num_prompts": 2 * FIRST + 1}
    found = stages(words)
    assert [each["stage"] for each in found] == ["small", "whole", "ends"]
    assert [each["requests"] for each in found] == [2 * FIRST + 1] * 3
    assert [each["document"]["requests"]["total"] for each in found] == [FIRST, 2 * FIRST + 1, 2 * FIRST + 1]
    assert found[1]["document"] == {key: found[2]["document"][key] for key in found[1]["document"]}
    assert [each["stage"] for each in stages(SMALL)] == ["whole", "ends"]


def test_what_is_drawn_agrees_with_the_document() -> None:
    whole = stages(SMALL)[0]
    run_document, curve = whole["document"], whole["curves"]["ttft"]
    median = curve["seconds"][curve["percent"].index(50)]
    assert median == pytest.approx(run_document["ttft"]["p50"], rel=1e-3)
    assert curve["seconds"] == sorted(curve["seconds"])
    low, high = whole["factors"]["ttft"]
    assert low <= 1 <= high
    assert sum(whole["time"].values()) == pytest.approx(1)
    (pool,) = whole["pools"]
    assert pool["memory"]["KV cache"] > 0
    assert pool["kv_tokens"] == run_document["kv_blocks"] * 16
    assert whole["usd_per_million"] == pytest.approx(run_document["cost_usd"] * 1e6 / (60 * 20))
    assert 0 < max(whole["lines"]["running"]) <= 60


def test_the_report_is_that_of_run() -> None:
    (answer,) = ask(("POST", "/api/report", {"words": SMALL}))
    assert answer.headers["content-type"].startswith("text/html")
    assert "Qwen3-0.6B" in answer.text
    assert "Where the time goes" in answer.text


def test_the_last_runs_are_kept_and_others_forgotten() -> None:
    bench = Bench({})
    first = bench.flight(SMALL)
    assert bench.flight(dict(reversed(SMALL.items()))) is first
    assert bench.flight(SMALL | {"seed": 1}) is not first
    kept: Latest[list[str]] = Latest(2)
    one = kept.get("a", lambda: ["a"])
    kept.get("b", list)
    assert kept.get("a", list) is one
    kept.get("c", list)
    assert kept.get("a", list) is one
    assert kept.get("b", lambda: ["new"]) == ["new"]


def test_what_cannot_run_is_said_before_the_first_stage() -> None:
    with pytest.raises(InputError, match="no tensor parallel size fits"):
        next(Bench({}).stages({"model": "meta-llama/Llama-3.1-405B", "device": "l4"}))
