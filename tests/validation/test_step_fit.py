"""Step fit: errors that the tests plant in steps are found again, and a run takes what is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from windtunnel.cli import main
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics.evidence import server_key
from windtunnel.model import load_model
from windtunnel.perf.batch_times import whole
from windtunnel.perf.explain import Batch
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.simulate.overheads import HostOverhead, KernelFactors, Overheads, read_overheads
from windtunnel.validation.step_fit import fit_steps
from windtunnel.validation.step_records import StepRecord

SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}
POOL = Pool(load_model("Qwen/Qwen3-8B"), device("l40s"), Engine(preset="vllm-0.19", **SETTINGS))  # type: ignore[arg-type]
PLANTED = Overheads(
    HostOverhead(serial=3e-3, serial_per_sequence=50e-6),
    kernels=KernelFactors(products=1.25, attention=0.8, prompts=1.4),
)


def batches(number: int) -> list[Batch]:
    """Decodes at many contexts, two of five with chunks of prompts."""
    rng, found = np.random.default_rng(3), []
    for _ in range(number):
        decodes = int(rng.integers(1, 60))
        chunks = [
            (int(rng.integers(16, 600)), int(rng.choice([0, 1024]))) for _ in range(int(rng.choice([0, 0, 0, 1, 2])))
        ]
        found.append(Batch(decodes, decodes * int(rng.integers(50, 7000)), tuple(chunks)))
    return found


def steps(planted: Overheads, noise: float, number: int = 400) -> list[StepRecord]:
    """Steps of a server with these overheads, that repeats itself within a noise; one of fifty was interrupted."""
    times, rng = planted.applied(whole(tabulate(POOL).times)), np.random.default_rng(5)
    return [
        StepRecord(
            f"steps.jsonl:{line}",
            one,
            times.batch(one.decodes, one.kv_tokens, list(one.chunks))
            * float(np.exp(noise * rng.normal()))
            * (3.0 if line % 50 == 0 else 1.0),
        )
        for line, one in enumerate(batches(number), 1)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_planted_errors_are_found_again(noise: float) -> None:
    found = fit_steps(POOL, steps(PLANTED, noise))
    for name in ("products", "attention", "prompts"):
        assert getattr(found.overheads.kernels, name) == pytest.approx(getattr(PLANTED.kernels, name), rel=0.05)
    host = found.overheads.host
    for requests in (1, 60):
        work = host.serial + requests * host.serial_per_sequence
        assert work == pytest.approx(3e-3 + requests * 50e-6, abs=1e-3)
    assert found.before["all"].median > 0.15
    assert found.after["all"].median < 0.001 + noise
    assert abs(found.after["all"].total) < 0.1
    assert found.fitted == 300
    assert found.before["decodes"].steps + found.before["prompts"].steps == found.before["all"].steps == 100
    assert found.helps
    assert found.overheads.agreement is not None
    assert found.overheads.agreement.server == server_key(POOL.spec())


def test_what_steps_do_not_tell_stays_as_it_is() -> None:
    alone = [one for one in steps(PLANTED, 0.0, 900) if not one.batch.chunks]
    assert fit_steps(POOL, alone).overheads.kernels.prompts == 1.0
    same = fit_steps(POOL, steps(Overheads(), 0.0))
    assert same.after["all"].median < 1e-3
    assert same.overheads.kernels.products == pytest.approx(1.0, abs=1e-3)


def test_steps_that_cannot_be_fitted() -> None:
    few = steps(PLANTED, 0.0, 40)
    with pytest.raises(InputError, match="39 steps: must be at least 40"):
        fit_steps(POOL, few[:39])
    longer = StepRecord("steps.jsonl:41", Batch(1, 9000), 0.1)
    with pytest.raises(InputError, match=r"steps.jsonl:41: 9000 is beyond max_model_len=\d+: correct max_model_len"):
        fit_steps(POOL, [*few, longer])
    drafts = Engine(num_speculative_tokens=2, acceptance_length=1.5, **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="speculative decoding"):
        fit_steps(Pool(POOL.model, POOL.device, drafts), few)


def test_the_command_writes_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "decodes": one.batch.decodes,
            "kv_tokens": one.batch.kv_tokens,
            "chunks": [list(pair) for pair in one.batch.chunks],
            "seconds": one.seconds,
        }
        for one in steps(PLANTED, 0.01, 200)
    ]
    file, output = tmp_path / "steps.jsonl", tmp_path / "c.yaml"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["calibrate", "--steps", str(file), "--output", str(output)]) == 2
    assert "run.json" in capsys.readouterr().err
    engine = {"name": "vllm", "version": "0.19.0", **SETTINGS}
    run = {"model": "Qwen/Qwen3-8B", "device": "l40s", "engine": engine}
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    assert main(["calibrate", str(tmp_path), "--steps", str(file), "--output", str(output)]) == 2
    capsys.readouterr()
    assert main(["calibrate", "--steps", str(file), "--output", str(output)]) == 0
    assert "50 steps that decided nothing: " in capsys.readouterr().out
    written = yaml.safe_load(output.read_text(encoding="utf-8"))
    held = written["errors_of_held_out_steps"]["all"]
    assert held["median_before"] > 3 * held["median_after"]
    found = read_overheads(output)
    assert found.kernels.prompts == pytest.approx(1.4, rel=0.05)
    assert found.agreement is not None
    assert found.agreement.first_token is None
