"""plan --from: the user's line, what to change in it, and what that saves."""

import json

import pytest

from windtunnel.cli import main
from windtunnel.cli.plan.line import Change, Judged, changed_flags
from windtunnel.deployment import Engine, Pool

LINE = "vllm serve Qwen/Qwen3-8B --max-num-seqs 8 --max-model-len 4096 --port 1"
FLAGS = [
    "--goodput",
    "ttft:2000",
    "tpot:50",
    "--isl",
    "256",
    "--osl",
    "32",
    "--num-prompts",
    "100",
    "--request-rate",
    "10",
    "--max-num-batched-tokens",
    "2048",
    "--tensor-parallel-size",
    "1",
    "--kv-cache-dtype",
    "auto",
    "--seeds",
    "1",
    "--perf",
    "modelled",
    "--executor",
    "serial",
    "--json",
]


def test_more_seats_are_what_a_line_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", LINE, *FLAGS, "--max-num-seqs", "8,64"]) == 0
    found = json.loads(capsys.readouterr().out)["line"]
    assert any(change == "max_num_seqs 8 → 64" for change in found["changes"])
    assert any(change == "--max-num-seqs 8 → 64" for change in found["flags"])
    assert found["best_rate"] > found["rate"] > 0
    assert found["saves"] == pytest.approx(1 - found["rate"] / found["best_rate"])


def test_the_line_runs_on_the_device_that_is_named_and_is_among_what_is_searched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--from", LINE.replace("--max-num-seqs 8 ", ""), *FLAGS, "--device", "a100_sxm"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not any(change.startswith("device") for change in found["line"]["changes"])
    assert "device" not in printed.err
    assert found["line"]["best_rate"] >= found["line"]["rate"] > 0


def test_both_sides_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [word for role in ("prefill", "decode") for word in ("--from", f"{role}: {LINE}")]
    assert main(["plan", *sides, *FLAGS]) == 2
    assert "plan changes the line of one whole server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("vllm-0.32", [("--kv-cache-dtype", "not set", "fp8"), ("--max-num-seqs", "8", "16")]),
        ("sglang-0.5", [("--kv-cache-dtype", "not set", "fp8_e4m3"), ("--max-running-requests", "8", "16")]),
        ("trtllm-1.0", [("--max_batch_size", "8", "16"), ("kv_cache_config.dtype", "not set", "fp8")]),
    ],
)
def test_changes_are_told_in_the_words_of_the_engine(preset: str, changes: list[tuple[str, str, str]]) -> None:
    line, best = (
        Pool("Qwen/Qwen3-8B", "h100", Engine(preset, max_model_len=4096, max_num_seqs=seats, kv_cache_dtype=dtype))  # type: ignore[arg-type]
        for seats, dtype in ((8, "auto"), (16, "fp8"))
    )
    assert sorted(changed_flags(line, best)) == changes
    judged = Judged(
        1.0, 2.0, 1, 2.0, 2.0, 1, (Change("device", "a", "b"), Change("x", "1", "2")), flags=(Change("--x", "1", "2"),)
    )
    assert [change.name for change in judged.shown] == ["device", "--x"]


def test_what_is_said_of_a_line() -> None:
    better = Judged(10.0, 2.0, 1, 20.0, 2.0, 1, (Change("a", "1", "2"),))
    assert better.saves == pytest.approx(0.5)
    assert better.sentence == (
        "Your line serves 10 requests/s within the limits on 1 GPU. With the changes below it serves 20 on 1 GPU: "
        "a request costs 50 % less."
    )
    assert better.spec()["changes"] == ["a 1 → 2"]
    unpriced = better._replace(price_per_hour=0.0, best_gpus=2)
    assert unpriced.saves == pytest.approx(0.0)
    nothing = "Nothing that was searched serves a request for less."
    assert unpriced.sentence.endswith(nothing) and not unpriced.helps
    assert unpriced._replace(best_rate=40.0).sentence.endswith("on 2 GPUs: a request takes 50 % less GPU time.")
    assert better._replace(best_rate=8.0).sentence.endswith(nothing)
    assert better._replace(rate=0.0).sentence == (
        "Your line keeps the limits at no rate. With the changes below it serves 20 on 1 GPU."
    )
    assert better._replace(changes=()).sentence.endswith(nothing)
    assert better._replace(rate=float("inf")).spec()["rate"] is None
