"""The roofline page of a batch."""

from pathlib import Path

import pytest

from windtunnel.cli import main
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.explain import explain, parse_batch
from windtunnel.report.roofline import figure

POOL = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(max_model_len=4096))
BATCH = parse_batch("decode=8@1000,prefill=1x512")


@pytest.mark.parametrize("perf", ["modelled", "roofline"])
def test_no_operator_is_above_the_roof(perf: str) -> None:
    found = explain(POOL, BATCH, perf)
    drawn = figure(POOL, found)
    points = [trace for trace in drawn["data"] if trace["mode"] == "markers"]
    peak = max(POOL.device.flops.values())
    for trace in points:
        for intensity, rate in zip(trace["x"], trace["y"], strict=True):
            assert rate <= min(peak, intensity * POOL.device.memory_bandwidth) * 1.02
    roofs = {trace["name"] for trace in drawn["data"] if trace["mode"] == "lines"}
    assert roofs == {f"{rate} peak" for rate in POOL.device.flops}


def test_perfect_kernels_wait_for_no_host() -> None:
    perfect, modelled = (explain(POOL, BATCH, perf) for perf in ("roofline", "modelled"))
    assert perfect.total_seconds < modelled.total_seconds
    assert all(row.seconds == 0 for row in perfect.rows if row.group == "host")
    assert 0 < modelled.error < 1


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, served = tmp_path / "page.html", ("--model", "Qwen/Qwen3-0.6B", "--device", "l40s")
    assert main(["explain", *served, "--batch", str(BATCH), "--plot", "roofline", "--output", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "windtunnel roofline" in text
    assert "qkv_proj" in text
    assert "octaves" in capsys.readouterr().out
    assert main(["explain", *served, "--plot", "roof"]) == 2
