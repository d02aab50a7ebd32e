"""Ablation: every cause is switched off once, and nothing else changes."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from windtunnel.cli import main
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.simulate.overheads import ClientPath
from windtunnel.validation.ablation import CLIENT_PATHS, NOTHING, variants
from windtunnel.validation.comparison import PLAIN
from windtunnel.workload.columns import Workload

ENGINE = {"name": "vllm", "version": "0.19.0", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096}
RUN = {"model": "Qwen/Qwen3-0.6B", "device": "l40s", "engine": ENGINE, "clock": "client"}
ROW = {"prompt_tokens": 100, "output_tokens": 20, "ttft_s": 0.05, "e2el_s": 0.2}


def test_each_cause_is_off_once() -> None:
    found = dict(variants())
    assert list(found) == [NOTHING, *CLIENT_PATHS, *(cause.name for cause in fields(Corrections))]
    assert found.pop(NOTHING) == PLAIN
    paths = [found.pop(name) for name in CLIENT_PATHS]
    assert [options.client_path for options in paths] == [False, True, True]
    assert all(options.corrections == ALL for options in paths)
    workload, path = Workload.from_columns(prompt_tokens=[1, 1], output_tokens=1, max_concurrency=1), ClientPath()
    for options, off in zip(paths[1:], ("turnaround", "per_sequence"), strict=True):
        client = options.overheads.client
        assert client is not None
        found_path = {"turnaround": client.turnaround(workload, np.zeros(2)).any(), "per_sequence": client.per_sequence}
        assert {name for name, value in found_path.items() if not value} == {off}
        assert (client.request, client.first_token) == (path.request, path.first_token)
    for name, options in found.items():
        switched = [cause.name for cause in fields(Corrections) if not getattr(options.corrections, cause.name)]
        assert switched == [name]
    assert all(getattr(ALL, cause.name) for cause in fields(Corrections))


def test_a_table_of_what_each_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (json.dumps({"arrival_s": 0.05 * i, **ROW}) + "\n" for i in range(10))
    (tmp_path / "requests.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    assert main(["validate", str(tmp_path), "--ablation", "--json"]) == 0
    found = {one["without"]: one["runs"][tmp_path.name] for one in json.loads(capsys.readouterr().out)["without"]}
    assert found["client_path"]["ttft"] < found["nothing"]["ttft"]
    assert found["client_path"]["ttft"] < found["client_per_sequence"]["ttft"] < found["nothing"]["ttft"]
    assert found["client_path"]["tpot"] == pytest.approx(found["nothing"]["tpot"])
    assert found["host_overhead"]["tpot"] < found["nothing"]["tpot"]
    assert main(["validate", str(tmp_path), "--ablation"]) == 0
    assert "| host overhead |" in capsys.readouterr().out
