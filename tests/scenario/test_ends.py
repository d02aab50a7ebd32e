"""What is simulated beside a run may end where the run does not: it is said in its place, and the run is reported."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.metrics import bands
from windtunnel.scenario import Goals, Load, Scenario, Server
from windtunnel.scenario import compare as comparing
from windtunnel.scenario.compare import compare
from windtunnel.scenario.ends import with_ends
from windtunnel.scenario.sweep import sweep
from windtunnel.simulate.simulate import batch_times, simulate

NEVER_EVICTS = """
from windtunnel import Decision


class NeverEvicts:
    \"\"\"All that run decode while there are blocks, and who waits joins if its prompt fits.\"\"\"

    def schedule(self, now, waiting, running, limits):
        free = limits.num_blocks - sum(one.num_blocks for one in running)
        tokens, budget = {}, limits.max_num_batched_tokens
        for one in (*running, *waiting):
            wanted = one.num_tokens - one.num_computed_tokens
            blocks = limits.blocks(one.num_computed_tokens + wanted) - one.num_blocks
            if blocks <= free and wanted <= budget:
                tokens[one], free, budget = wanted, free - blocks, budget - wanted
        return Decision(tokens)
"""
WHY = "NeverEvicts: 40 requests never finish"
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_model_len": 2000}
"""For nine requests of 1,000 tokens, but not for what they generate."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A scheduler that never evicts: at a high load all wait for memory that nobody gives back."""
    found = tmp_path / "mine.py"
    found.write_text(NEVER_EVICTS)
    return f"{found}:NeverEvicts"


def flags(file: str, rate: float) -> list[str]:
    load = {"random_input_len": 1000, "random_output_len": 200, "num_prompts": 40, "request_rate": rate}
    words = ROOM | load | {"perf": "modelled", "scheduler": file}
    return [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def scenario(file: str, rate: float | None = 1.0) -> Scenario:
    load = Load(random_input_len=1000, random_output_len=200, num_prompts=40, request_rate=rate)
    found = Scenario(Server("Qwen/Qwen3-8B", perf="modelled"), load=load)
    engine = replace(found.server.engine, scheduler=file, **ROOM)
    return replace(found, server=replace(found.server, engine=engine))


def test_a_run_whose_flood_never_ends_is_reported(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "Qwen/Qwen3-8B", *flags(file, 1), "-v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "40 requests" in shown
    assert f"not found, all requests at once: {WHY}" in shown
    assert main(["run", "Qwen/Qwen3-8B", *flags(file, 1), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bands"]
    assert found["not_found"]["capacity"].startswith(f"all requests at once: {WHY}")
    assert "capacity" not in found
    assert found["tpot"]["mean"] is not None


def test_a_run_that_never_ends_is_an_error(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "Qwen/Qwen3-8B", *flags(file, 100)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(f"windtunnel: {WHY}")


def test_a_sweep_whose_rates_cannot_be_found_wants_rates(file: str) -> None:
    with pytest.raises(InputError, match=rf"rates: not known, all requests at once: {WHY}.*: give --rates"):
        sweep(scenario(file, None))
    assert [point.keeps_up for point in sweep(scenario(file, None), (1.0,))] == [True]


def fails(*_: Any, **__: Any) -> Any:
    raise InputError("stuck")


def test_bands_at_an_unchanged_rate_that_are_not_found_are_those_at_the_same_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Scenario(Server("Qwen/Qwen3-8B", perf="modelled"), load=Load(num_prompts=20, request_rate=1.0))
    deployment, workload = asked.deployment(), asked.load.workload()
    tables = batch_times(deployment, "modelled")
    around = replace(bands(simulate(deployment, workload, tables=tables)), unchanged_rate=True)
    monkeypatch.setattr(sys.modules["windtunnel.simulate.simulate"], "simulate", fails)  # not that of the flood
    found = with_ends(around, asked, deployment, workload, tables)
    assert found.not_found == {"unchanged rate": "faster and slower steps: stuck"}
    assert not found.unchanged_rate
    assert found.around("tpot", "mean") == replace(around, unchanged_rate=False, perfect=found.perfect).around(
        "tpot", "mean"
    )
    assert dict(found.words())["ranges"].startswith("90 % of comparable servers, the same load relative to")
    assert dict(found.words())["unchanged rate"] == "not found, faster and slower steps: stuck"
    monkeypatch.setattr(sys.modules["windtunnel.simulate.bounds"], "with_perfect_kernels", fails)
    goals = replace(asked, goals=Goals())
    found = with_ends(replace(around, unchanged_rate=False), goals, deployment, workload, tables)
    assert found.not_found == {"roofline": "with perfect kernels: stuck"}
    assert found.perfect is None


def test_a_comparison_whose_ends_never_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Scenario(Server("Qwen/Qwen3-8B", perf="modelled"), load=Load(num_prompts=20, request_rate=1.0))
    monkeypatch.setattr(comparing, "_ends", fails)
    found = compare(asked, {"few": {"max_num_seqs": 1}}, seeds=1)
    assert found.variants[1].ends is None
    assert any(one == "few: no band of servers, faster and slower steps: stuck" for one in found.warnings)
