"""plan with several models, and with several loads that one deployment must serve."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.test_plan import GOODPUT
from windtunnel.cli import DONE, WRONG, main

FLAGS = (
    *("--tensor-parallel-size", "1", "--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--quantization"),
    *("stored", "--kv-cache-dtype", "auto", "--router", "round_robin", "--axis", "max_model_len=2048"),
)
REST = ("--num-prompts", "200", "--perf", "modelled", "--executor", "serial", "--seeds", "1", *GOODPUT)
TWO = ("plan", "Qwen/Qwen3-4B", "Llama-3.1-8B", "--devices", "h100,l40s", *FLAGS, *REST)
LOADS = ("--isl", "300", "--osl", "40", "--load", "@10", "prompts*2@40")

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_of_several_models_the_best_is_planned(capsys: Capture) -> None:
    found = document(capsys, *TWO, "--isl", "300", "--osl", "40")
    models = found["models"]
    assert set(models) == {"Qwen/Qwen3-4B", "Llama-3.1-8B"}
    best = max(models, key=lambda model: models[model]["this load"]["value"])
    assert models[best]["this load"]["regret"] == 0.0
    assert found["ranking"][0]["value"] == models[best]["this load"]["value"]
    assert main([*TWO, "--isl", "300", "--osl", "40"]) == DONE
    out = capsys.readouterr().out
    assert f"vllm serve {best}" in out.replace("meta-llama/", "")
    assert "best for this load" in out and "extra" in out


def test_one_deployment_serves_several_loads(capsys: Capture) -> None:
    loads = ("--isl", "300", "--osl", "40", "--load", "@10", "@60")
    found = document(capsys, *TWO, *loads)
    assert set(found["models"]["Llama-3.1-8B"]) == {"@10", "@60"}
    together = found["all_loads"]
    assert together["value"] == max(one["value"] for one in together["loads"].values())
    assert "under each of 2 loads" in found["recommendation"][0]
    assert main([*TWO, *loads, "--weights", "3", "1"]) == DONE
    assert "weighted mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), "one of them stands twice"),
        (("--axis", "model=a,b"), "name models before the flags: plan a b"),
        (("--load", "@1", "@1"), "one of them stands twice"),
        (("--load", "@1", "--weights", "1", "2"), "weights: 2 for 1 of --load"),
        (("--load", "+30%"), "multiplies a rate"),
        (("a", "b", "--from", "vllm serve c"), "a launch line has one"),
        (("Qwen/Qwen3-4B", "Llama-3.1-8B", "--pools", "both"), "compares two kinds of one model"),
    ],
)
def test_what_contradicts_is_refused_in_a_line(capsys: Capture, words: tuple[str, ...], said: str) -> None:
    assert main(["plan", *words, *REST, "--isl", "300"]) == WRONG
    error = capsys.readouterr().err
    assert said in error.splitlines()[-1]


def test_a_file_has_several_models(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "model: {Qwen/Qwen3-4B: {device: l40s}, Llama-3.1-8B: {}}\ndevice: h100\nmax_num_seqs: 32\n"
        "max_num_batched_tokens: 512\nmax_model_len: 2048\n"
    )
    found = document(capsys, "plan", "--space", str(file), *REST, "--isl", "300", "--osl", "40")["models"]
    devices = {model: found[model]["this load"]["settings"]["device"] for model in found}
    assert devices == {"Qwen/Qwen3-4B": "l40s", "Llama-3.1-8B": "h100"}


def test_of_goodput_the_worst_draw_counts(capsys: Capture) -> None:
    """Its value is the least that the same deployment has under each draw alone; a trace at its own times has one."""
    load = (
        "--isl",
        "300",
        "--osl",
        "40",
        "--num-prompts",
        "60",
        "--request-rate",
        "20",
        "--goodput",
        "ttft:1000",
        "tpot:45",
    )
    search = ("--objective", "goodput-per-gpu", "--max-gpus", "1", "--perf", "modelled", "--executor", "serial")
    one = ("plan", "Llama-3.1-8B", "--devices", "h100", *FLAGS, *load, *search)
    each = [document(capsys, *one, "--seeds", "1", "--seed", str(k))["ranking"][0]["value"] for k in range(3)]
    assert document(capsys, *one, "--seeds", "3")["ranking"][0]["value"] == pytest.approx(min(each))
    assert max(each) > min(each)
