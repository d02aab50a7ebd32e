"""Ablation: every cause is switched off once, and nothing else changes."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from windtunnel.cli import main
from windtunnel.perf.causes import ALL, Causes
from windtunnel.validation.ablation import CLIENT_PATH, NOTHING, variants
from windtunnel.validation.terms import PLAIN

ENGINE = {"name": "vllm", "version": "0.19.0", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096}
RUN = {"model": "Qwen/Qwen3-0.6B", "device": "l40s", "engine": ENGINE, "clock": "client"}
ROW = {"prompt_tokens": 100, "output_tokens": 20, "ttft_s": 0.05, "e2el_s": 0.2}


def test_each_cause_is_off_once() -> None:
    found = dict(variants())
    assert list(found) == [NOTHING, CLIENT_PATH, *(cause.name for cause in fields(Causes))]
    assert found.pop(NOTHING) == PLAIN
    assert not found.pop(CLIENT_PATH).client_path
    for name, terms in found.items():
        off = [cause.name for cause in fields(Causes) if not getattr(terms.causes, cause.name)]
        assert off == [name]
    assert all(getattr(ALL, cause.name) for cause in fields(Causes))


def test_a_table_of_what_each_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (json.dumps({"arrival_s": 0.05 * i, **ROW}) + "\n" for i in range(10))
    (tmp_path / "requests.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    assert main(["validate", str(tmp_path), "--ablation", "--json"]) == 0
    found = {one["without"]: one["runs"][tmp_path.name] for one in json.loads(capsys.readouterr().out)["without"]}
    assert found["client_path"]["ttft"] < found["nothing"]["ttft"]
    assert found["client_path"]["tpot"] == pytest.approx(found["nothing"]["tpot"])
    assert found["host_overhead"]["tpot"] < found["nothing"]["tpot"]
    assert main(["validate", str(tmp_path), "--ablation"]) == 0
    assert "| host overhead |" in capsys.readouterr().out
