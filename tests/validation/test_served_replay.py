"""Served points: how rows are read as servers, replayed and summed up."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from windtunnel.cli import main
from windtunnel.deployment import Deployment
from windtunnel.perf.database import find_systems
from windtunnel.simulate.run import Run
from windtunnel.validation import served_points, served_replay
from windtunnel.validation.comparison import Options
from windtunnel.validation.markdown import refusals, served_text
from windtunnel.workload.columns import Workload

HEADER = ",".join(served_points.COLUMNS)
LLAMA = "a,silicon_concurrency=4,vllm,0.19.0,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,,agg,128,16,1,1,1,1,20,8"


def served_point(**values: object) -> served_points.Point:
    plain = served_points.Point("a", "agg", "vllm", "0.19.0", "m", "", "h100_sxm", 100, 10, 4, 1, 1, False, 0.1, 0.02)
    return replace(plain, **values)  # type: ignore[arg-type]


def test_errors_of_served_points() -> None:
    one = served_point()
    results = [served_replay.Result(one, 0.1 * factor, 0.02, 0.0) for factor in (0.8, 1.1, 1.4)]
    results.append(served_replay.Result(one, reason="because"))
    (row,) = served_replay.groups(results)
    assert (row["rows"], row["simulated"]) == (4, 3)
    assert row["ttft"] == pytest.approx({"median_ape": 0.2, "mape": 0.7 / 3, "bias": 0.1})
    assert row["tpot"] == pytest.approx(dict.fromkeys(("median_ape", "mape", "bias"), 0.0), abs=1e-12)
    text = served_text(results)
    assert "| all | 4 | 3 | 20.0 % | 23.3 % | +10.0 % |" in text
    assert "Not simulated (1): because: m 1" in text
    assert served_replay.document(results)["coverage"] == 0.75


def test_reasons_that_differ_in_numbers_are_one_line() -> None:
    reasons = (("m", "size=3: must be 2"), ("n", "size=5: must be 2"), ("n", "not yet"))
    results = [served_replay.Result(served_point(model_path=model), reason=reason) for model, reason in reasons]
    assert refusals(results) == [
        "Not simulated (2): size=3: must be 2 (and the like): m 1, n 1",
        "Not simulated (1): not yet: n 1",
    ]


def test_groups_tell_apart_what_differs() -> None:
    results = [
        served_replay.Result(served_point(concurrency=n, system=s), 0.1, 0.02, 0.0) for n, s in ((4, "a"), (200, "b"))
    ]
    assert [row["group"] for row in served_replay.groups(results)] == [
        *("all", "a", "b", "a, vllm", "b, vllm", "1 to 8 clients", "129 clients and more")
    ]


def test_the_loop_of_a_served_point() -> None:
    loop = served_replay.workload(served_point())
    assert (len(loop), loop.max_concurrency) == (40, 4)
    assert loop.prompt_tokens.min() >= 80
    assert loop.prompt_tokens.max() <= 100
    even = served_replay.workload(served_point(backend="sglang", scripted=False))
    assert set(even.prompt_tokens) == {100}

    drifting = served_replay.workload(served_point(scripted=False))
    assert 95 <= drifting.prompt_tokens.min() < 100 < drifting.prompt_tokens.max() <= 105
    for nominal in (5, 100, 1000):  # outputs get out of step by as many tokens, however long they are
        outputs = served_replay.workload(served_point(scripted=False, osl=nominal)).output_tokens
        assert max(nominal - 16, 1) <= outputs.min() < nominal < outputs.max() <= nominal + 16


@pytest.mark.parametrize(("clients", "apart"), [(4, 2), (16, 4), (64, 8)])
def test_tensorrt_llms_equal_requests_get_out_of_step_by_the_root_of_the_clients(clients: int, apart: int) -> None:
    for nominal in (10, 100, 1000):  # by as many tokens, however long they are
        loop = served_replay.workload(
            served_point(backend="trtllm", scripted=False, osl=nominal, concurrency=clients, isl=128)
        )
        assert set(loop.prompt_tokens) == {128}
        assert set(loop.output_tokens) == set(range(nominal - apart, nominal + apart + 1))
    shortest = served_replay.workload(served_point(backend="trtllm", scripted=False, osl=1, isl=128))
    assert set(shortest.output_tokens) == {1, 2, 3}


def test_tensorrt_llm_served_one_model_with_a_place_less_than_clients() -> None:
    generated = {"backend": "trtllm", "version": "1.0.0rc3", "scripted": False, "concurrency": 16}
    found = {
        name: served_point(**generated, model_path=name, replicas=replicas).settings().get("max_num_seqs")
        for name, replicas in (("meta-llama/Llama-3.1-8B-Instruct", 2), ("Qwen/Qwen3-32B", 1))
    }
    assert list(found.values()) == [7, None]


def test_text_that_is_not_cut_to_a_number_of_tokens() -> None:
    loop = served_replay.workload(served_point(backend="sglang", scripted=False, isl=1000, osl=100))
    assert 950 <= loop.prompt_tokens.min() < 1000 < loop.prompt_tokens.max() <= 1050
    assert 84 <= loop.output_tokens.min() < 100 < loop.output_tokens.max() <= 116


@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")
def test_a_row_is_seen_by_the_client_that_measured_it() -> None:
    named = {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "concurrency": 16, "isl": 128}
    scripts, others = (served_point(**named, scripted=scripted) for scripted in (True, False))
    assert (scripts.client, others.client) == ("inferencex", "genai-perf")
    assert replace(others, isl=1000).client == "inferencex"
    asked: list[str] = []

    class Asked(Options):
        def run(self, deployment: Deployment, workload: Workload, client: str) -> Run:
            asked.append(client)
            return super().run(deployment, workload, client)

    for one in (scripts, others):
        served_replay.replay(one, Asked())
    assert asked == ["inferencex", "genai-perf"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"concurrency": 0}, "how many clients"),
        ({"ttft": float("nan")}, "no latencies"),
        ({"backend": "unknown", "model_path": "Qwen/Qwen3-8B"}, "'unknown' is not simulated"),
    ],
)
def test_a_row_that_cannot_be_simulated_says_why(values: dict[str, object], words: str) -> None:
    assert words in served_replay.replay(served_point(**values)).reason


def test_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, table = tmp_path / "rows.csv", tmp_path / "table.csv"
    file.write_text(f"{HEADER}\n{LLAMA}\n{LLAMA.replace('agg', 'disagg')}\n", encoding="utf-8")
    assert main(["validate", str(file), "--csv", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["simulated"]) == (2, 1)
    first, second = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    assert float(first["tpot_error"]) == found["points"][0]["tpot_error"]
    assert (second["tpot_simulated"], second["mode"]) == ("", "disagg")
    assert "how many prefill and decode workers" in second["reason"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,mode\na,agg\n", "no column silicon_data_source"),
        ("", "no column id"),
        (f"{HEADER}\n{LLAMA.replace('128', 'x')}\n", "rows.csv:2: invalid literal"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    assert main(["validate", str(tmp_path / "rows.csv")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")
def test_the_sample_is_always_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    points = served_points.read_points()
    assert len(points) == 5221
    chosen = served_replay.sample(points, 7)
    assert [one.id for one in chosen] == [one.id for one in served_replay.sample(points[::-1], 7)]
    assert main(["validate", "silicon_sample.csv", "--sample", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert main(["validate", "silicon_sample.csv", "--mode", "agg", "--sample", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["mode"] == "agg"
    assert main(["validate", "silicon_sample.csv", "--mode", "both"]) == 2
    assert main(["validate", "silicon_sample.csv", "--backend", "unknown"]) == 2
    assert main(["validate", "silicon_sample.csv", "--sample", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
