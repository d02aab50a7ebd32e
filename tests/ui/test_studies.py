"""Stored studies: a store of plan, a sweep and a run as points, and files that are none of these."""

import json
from pathlib import Path

import pytest
from plan.planning import chat, question, small_space

from ui.words import SMALL, ask
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.plan.objective import RatePerDollar
from windtunnel.ui.studies import listed, points

LOAD = ("--random-input-len", "200", "--random-output-len", "20", "--num-prompts", "60")
PLAIN = ("Qwen/Qwen3-0.6B", "--perf", "roofline", *LOAD)


def test_a_sweep_and_a_run_are_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sweep", *PLAIN, "--rates", "20", "80", "--json"])
    document = json.loads(capsys.readouterr().out)
    (tmp_path / "sweep.json").write_text(json.dumps(document), encoding="utf-8")
    main(["run", *PLAIN, "--request-rate", "20", "--no-bands", "--output", str(tmp_path / "flown"), "--json"])
    run = json.loads(capsys.readouterr().out)
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    names = {each["study"]: each["kind"] for each in listed([tmp_path])}
    assert names == {"flown": "run", "other.json": "unreadable", "sweep.json": "sweep"}
    found = points([tmp_path], "sweep.json")
    assert [point["values"]["request_rate"] for point in found["points"]] == [20.0, 80.0]
    assert found["points"][0]["values"]["ttft_p99"] == document["points"][0]["ttft"]["p99"]
    assert found["knee"] == document["knee"]
    (point,) = points([tmp_path], "flown")["points"]
    assert point["values"]["tpot_p50"] == run["tpot"]["p50"]
    (answer,) = ask(("GET", "/api/study?name=sweep.json", None), studies=[tmp_path])
    assert answer.json() == found


def test_a_search_has_its_settings_back(tmp_path: Path) -> None:
    """Every simulation that was not stopped early, with the settings that lead to its key."""
    from windtunnel.plan.search import search
    from windtunnel.plan.store import Store

    space = small_space(device=("h100",), max_num_seqs=(4, 16), max_num_batched_tokens=(1024,))
    asked = question(chat(200))
    path = tmp_path / "store.db"
    with Store(path) as store:
        store.begin("mine", asked.digest, "rate", {"space": space.spec(), "question": asked.spec()})
        answer = search(space.enumerate(with_price=True), asked, RatePerDollar(), store=store)
        store.finish("mine", answer.to_json())
        trials = store.trials(asked.digest)
    found = points([path], "store.db: mine")["points"]
    whole = [trial for trial in trials if not trial["outcome"]["stopped"]]
    assert len(found) == len(whole) > 0
    for point, trial in zip(found, whole, strict=True):
        assert point["values"]["request_rate"] == trial["rate"]
        assert point["values"]["ttft_p99"] == trial["outcome"]["latencies"]["ttft"]["p99"]
        assert point["met"] == bool(trial["met"])
        assert "h100" in point["label"]
    best = answer.to_json()["ranking"][0]
    assert any(point["values"]["price_per_hour"] == pytest.approx(best["price_per_hour"]) for point in found)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        listed([tmp_path / "nothing"])
    with pytest.raises(InputError, match="unknown study"):
        points([tmp_path], "x")
    (tmp_path / "sweep.json").write_text('{"knee": 1, "points": [{}]}', encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read"):
        points([tmp_path], "sweep.json")
    assert main(["ui", *PLAIN[:1], "--studies", str(tmp_path / "nothing")]) == 2
    assert SMALL["model"] == PLAIN[0]
