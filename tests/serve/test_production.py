"""From production to a validated simulator, as the page has it: proxy, validate, calibrate, plan, watch.

Production is a server that is slower than its kernels, by host work that only the test knows.
"""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import yaml

from serve.endpoint import app, deployment, on_a_socket, real_time
from windtunnel.cli import main
from windtunnel.serve.proxy import Proxy, RunFolder, proxying
from windtunnel.serve.tokens import BytesRule
from windtunnel.simulate.live import live
from windtunnel.simulate.overheads import HostOverhead, Overheads

TRUE = 0.06
"""Seconds of host work a step: long beside what a busy machine adds to the times that clients see."""
HEAD = {
    "id": "production", "model": "Qwen/Qwen3-0.6B", "device": "h100", "hash_block_size": 16,
    "engine": {"name": "vllm", "version": "0.33.0", "max_num_seqs": 64},
}  # fmt: skip
PERF = ("--perf", "roofline")


async def clients(url: str) -> None:
    """A client every 160 ms, whose prompts and answers are of many lengths."""

    async def one(number: int) -> None:
        await asyncio.sleep(0.16 * number)
        body = {"prompt": f"{number} " * (40 + 97 * number % 900), "max_tokens": 8 + 7 * number % 30, "stream": True}
        assert (await found.post(f"{url}/v1/completions", json=body)).status_code == 200

    async with httpx.AsyncClient(timeout=60) as found:
        await asyncio.gather(*map(one, range(50)))


def error(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    """How far a simulation is off, in the means."""
    assert main(["validate", str(folder), *PERF, "--json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    return {name: float(found[name]["error"]["mean"]) for name in ("ttft", "tpot", "e2el")}


def test_the_way_from_production_to_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / "measured", tmp_path / "calibration.yaml"
    served = live(
        deployment(preset="vllm-0.33", max_num_seqs=64), perf="roofline", overheads=Overheads(HostOverhead(serial=TRUE))
    )
    served.warm_up()
    with on_a_socket(app(served, clock=real_time())) as url:
        proxy = proxying(Proxy(url, RunFolder(folder, HEAD), BytesRule(), 16))
        with on_a_socket(proxy) as passed:
            asyncio.run(clients(passed))
    before = error(folder, capsys)
    assert before["tpot"] < -0.5  # nobody told the simulation of the host

    assert main(["calibrate", str(folder), *PERF, "--output", str(file)]) == 0
    assert "after; written to" in capsys.readouterr().out
    serial = yaml.safe_load(file.read_text(encoding="utf-8"))["host"]["serial"]
    assert serial == pytest.approx(TRUE, rel=0.15)
    after = error(folder, capsys, "--calibration", str(file))
    assert abs(after["tpot"]) < 0.1 and abs(after["e2el"]) < 0.1

    server = ("Qwen/Qwen3-0.6B", *PERF, "--calibration", str(file), "--trace", str(folder), "--max-num-seqs", "64")
    goals = ("--goodput", "ttft:8000", "tpot:240", "--attainment", "0.95")
    assert main(["plan", *server, *goals, "--devices", "h100", "--max-num-batched-tokens", "2048", "--json"]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["ranking"]
    assert best["attainment"] >= 0.95 and best["latencies"]["tpot"]["mean"] > serial
    assert main(["watch", str(folder), "--model", *server, *goals, "--window", "60"]) == 0
    assert "no drift" in capsys.readouterr().out
