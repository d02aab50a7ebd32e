"""Calibration: overheads that the tests put into a run are found again."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from windtunnel.cli import main
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics import request_metrics
from windtunnel.metrics.evidence import server_key
from windtunnel.model import load_model
from windtunnel.simulate.overheads import ClientPath, HostOverhead, KernelFactors, Overheads
from windtunnel.simulate.simulate import simulate
from windtunnel.workload.columns import Workload

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096}
POOL = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(preset="vllm-0.19", **SETTINGS))  # type: ignore[arg-type]
ASKED = Workload.from_columns(
    arrival=[0.07 * i for i in range(60)],
    prompt_tokens=[50 + 37 * i % 400 for i in range(60)],
    output_tokens=[10 + 13 * i % 60 for i in range(60)],
)


def record(folder: Path, overheads: Overheads, on: str = "l40s", asked: Workload = ASKED) -> Path:
    """A run of this deployment with these overheads, on this device."""
    pool = Pool(POOL.model, device(on), POOL.engine)
    metrics = request_metrics(simulate(Deployment((pool,)), asked, overheads=overheads).requests)
    rows = zip(asked.arrival, asked.prompt_tokens, asked.output_tokens, metrics.ttft, metrics.e2el, strict=True)
    names = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2el_s")
    folder.mkdir()
    lines = (json.dumps(dict(zip(names, map(float, row), strict=True))) + "\n" for row in rows)
    (folder / "requests.jsonl").write_text("".join(lines), encoding="utf-8")
    engine = {"name": "vllm", "version": "0.19.0", **SETTINGS}
    clock = "client: inferencex" if overheads.client else "engine"
    run = {"model": "Qwen/Qwen3-0.6B", "device": on, "engine": engine, "clock": clock}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def test_overheads_of_host_and_client_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = Overheads(HostOverhead(serial=4e-3), ClientPath(request=0.03))
    folder, file = record(tmp_path / "run", true), tmp_path / "c.yaml"
    assert main(["calibrate", str(folder), "--output", str(file)]) == 0
    assert "after; written to" in capsys.readouterr().out
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert found["host"]["serial"] == pytest.approx(4e-3, rel=0.1)
    assert found["client"]["request"] == pytest.approx(0.03, rel=0.1)
    (errors,) = found["errors_of_the_means"]
    assert errors["tpot"]["before"] < -0.2
    assert abs(errors["tpot"]["after"]) < 0.01
    assert found["agreement"]["server"] == list(server_key(POOL.spec()))
    assert found["agreement"]["steps"] == pytest.approx(-errors["tpot"]["after"], abs=1e-3)
    assert main(["validate", str(folder), "--calibration", str(file), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["ttft"]["error"]["mean"] == pytest.approx(errors["ttft"]["after"], abs=1e-4)


def test_what_a_step_costs_is_told_from_what_a_request_in_it_does(tmp_path: Path) -> None:
    rng, arrival = np.random.default_rng(1), [0.0]
    for together in (1, 2, 4, 8):
        for _ in range(60):
            arrival.append(arrival[-1] + rng.uniform(0.5, 1.5) / together)
    asked = Workload.from_columns(
        arrival=arrival,
        prompt_tokens=rng.integers(50, 400, len(arrival)),
        output_tokens=rng.integers(50, 150, len(arrival)),
    )
    true = HostOverhead(serial=6e-3, serial_per_sequence=0.5e-3)
    folder, file = record(tmp_path / "run", Overheads(true), asked=asked), tmp_path / "c.yaml"
    assert main(["calibrate", str(folder), "--output", str(file)]) == 0
    found = yaml.safe_load(file.read_text(encoding="utf-8"))["host"]
    assert found["serial"] == pytest.approx(6e-3, rel=0.05)
    assert found["serial_per_sequence"] == pytest.approx(0.5e-3, rel=0.05)


def test_a_calibration_of_ones_own_run_narrows_the_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    load = ["--model", "Qwen/Qwen3-0.6B", "--device", "l40s", "--isl", "100", "--osl", "20", "--num-prompts", "20"]
    widths = []
    for server in (["somebody", "else"], list(server_key(Pool(POOL.model, POOL.device, Engine()).spec()))):
        agreement = {"server": server, "steps": 0.0, "first_token": 0.0}
        file.write_text(yaml.safe_dump({"schema_version": 1, "agreement": agreement}), encoding="utf-8")
        assert main(["run", *load, "--calibration", str(file), "--json"]) == 0
        bands = json.loads(capsys.readouterr().out)["bands"]
        widths.append(bands["tpot"]["mean"][1] - bands["tpot"]["mean"][0])
    assert widths[1] < widths[0]
    assert bands["evidence"].startswith("your own run")


def test_a_run_takes_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    load = (
        "--model",
        "Qwen/Qwen3-0.6B",
        "--device",
        "l40s",
        "--isl",
        "100",
        "--osl",
        "20",
        "--num-prompts",
        "5",
        "--json",
    )
    means = []
    for serial in (0.0, 0.01):
        file.write_text(yaml.safe_dump({"schema_version": 1, "host": {"serial": serial}}), encoding="utf-8")
        assert main(["run", *load, "--calibration", str(file)]) == 0
        means.append(json.loads(capsys.readouterr().out)["tpot"]["mean"])
    assert means[1] - means[0] == pytest.approx(0.01)


def test_different_clocks_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [record(tmp_path / name, Overheads(client=path)) for name, path in (("a", None), ("b", ClientPath()))]
    assert main(["calibrate", *map(str, folders), "--output", str(tmp_path / "c.yaml")]) == 2
    assert main(["calibrate", str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert ["cannot be calibrated together" in errors[0], "no measured runs" in errors[1]] == [True, True]
    assert not (tmp_path / "c.yaml").exists()


def test_kernels_of_a_device_that_was_never_measured_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    true, file = Overheads(kernels=KernelFactors(products=0.7, attention=0.7, prompts=0.7)), tmp_path / "c.yaml"
    folder = record(tmp_path / "run", true, on="rtx_4090")
    assert main(["calibrate", str(folder), "--output", str(file)]) == 0
    capsys.readouterr()
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert all(found["kernels"][name] < 1 for name in ("products", "prompts"))
    (errors,) = found["errors_of_the_means"]
    assert errors["tpot"]["before"] > 0.2
    assert abs(errors["tpot"]["after"]) < 0.02
    assert main(["validate", str(folder), "--calibration", str(file), "--json"]) == 0
    assert abs(json.loads(capsys.readouterr().out)["tpot"]["error"]["mean"]) < 0.02
