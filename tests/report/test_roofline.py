"""The roofline page of a batch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import main
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.explain import Explanation, Row, explain, parse_batch
from windtunnel.report.roofline import figure, roofline_page

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


def test_points_and_roofs_by_hand() -> None:
    """A product of 8e9 FLOPs over 2e9 bytes in 1 s, of which half a second is hidden: 4 FLOPs/byte at 8e9/s.

    The roofs go from a quarter of the least intensity to four times the greatest, with a knee at 1e12 / 1e11 = 10.
    """
    chip = replace(device("l40s"), flops={"bfloat16": 1e12, "fp8": 1e14}, memory_bandwidth=1e11)
    pool = replace(POOL, device=chip)
    product = row(
        "up", "gemm", seconds=0.5, hidden=0.5, flops=8e9, bytes=2e9, compute_share=0.008, bandwidth_share=0.02
    )
    attention = row(
        "attention", "attention", seconds=2.0, flops=3e9, bytes=3e9, compute_share=0.5, bandwidth_share=0.25
    )
    host = row("host", "host", seconds=0.25, flops=0.0, bytes=0.0, compute_share=0.0, bandwidth_share=0.0)
    sent = row("send", "communication", seconds=0.25, flops=1.0, bytes=1.0, compute_share=0.0, bandwidth_share=0.6)
    found = Explanation((product, attention, host, sent), 3.0, 2.75)
    drawn = figure(pool, found)
    points = {trace["name"]: (trace["x"], trace["y"], trace["meta"]) for trace in drawn["data"][:2]}
    assert points == {"gemm": ([4.0], [8e9], 0), "attention": ([1.0], [1.5e9], 1)}
    assert drawn["data"][0]["text"] == ["up: shape, at"]
    roofs = {trace["name"]: (trace["x"], trace["y"]) for trace in drawn["data"][2:]}
    assert roofs == {
        "bfloat16 peak": ([0.25, 10.0, 16.0], [2.5e10, 1e12, 1e12]),
        "fp8 peak": ([0.25, 16.0], [2.5e10, 1.6e12]),
    }
    assert [trace["meta"] for trace in drawn["data"][2:]] == [2, 3]
    assert drawn["layout"] == {
        "xaxis": {"title": {"text": "FLOPs per byte"}, "type": "log"},
        "yaxis": {"title": {"text": "FLOP/s"}, "type": "log"},
    }
    text = roofline_page(pool, "decode=1@1", found)
    assert "perfect kernels and no host: 1.16 s, 38.7 % of it" in text, "0.5 · 0.02 + 2 · 0.5 + 0.25 · 0.6 of 3 s"
    assert "step 3.00 s, ± 20.0 %" in text
    cells = re.findall("<td>(.*?)</td>", text)
    assert cells[:8] == ["up", "memory", "500 ms", "10.0 ms", "0.800 %", "2.00 %", "modelled", "± 20.0 %"]
    drawn = figure(pool, Explanation((host,), 0.25, 0.0))
    assert [trace["x"] for trace in drawn["data"]] == [[0.25, 4.0]] * 2, "nothing computes: around one FLOP a byte"


def row(name: str, group: str, **numbers: float) -> Row:
    """A row of a table, its time a fifth wrong."""
    usual: dict[str, Any] = {"count": 1, "share": 0.0, "bound": "memory", "source": "modelled", "distance": 0.0}
    return Row(name=name, group=group, shape="shape", at="at", error=0.2, **(usual | numbers))
