"""What sliders stop at can be simulated, and the tables of neighbours are made before they are asked for."""

import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from ui.words import SMALL
from windtunnel.cli import main
from windtunnel.files import PLACE
from windtunnel.serve.place import Place
from windtunnel.ui.asked import scenario_of
from windtunnel.ui.choices import FORESEEN, STOPS, choices, neighbours
from windtunnel.ui.foresight import Foresight, prepare


def test_every_name_and_stop_is_accepted() -> None:
    found = choices()
    for word, values in STOPS.items():
        for value in values:
            scenario_of({word: value})
    for word in ("engine", "scheduler"):
        for name in found[word]:
            scenario_of(SMALL | {word: name})
    for each in found["device"]:
        assert scenario_of({"device": each["name"]}).server.gpu().name == each["name"]


def test_neighbours_are_one_and_two_stops_away_the_nearest_first() -> None:
    words: dict[str, Any] = {"tensor_parallel_size": "2", "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    found = neighbours(words)
    moved = [next((name, each[name]) for name in FORESEEN if each[name] != words[name]) for each in found]
    assert moved[:3] == [("tensor_parallel_size", 4), ("max_num_seqs", 128), ("max_num_batched_tokens", 4096)]
    assert len(found) == 11  # there is no stop two below a tensor parallel size of 2
    assert all(sum(each[name] != words[name] for name in FORESEEN) == 1 for each in found)


def test_the_left_end_of_a_slider_knows_its_nearest_stops() -> None:
    batches = [each["max_num_seqs"] for each in neighbours({}) if "max_num_seqs" in each]
    sizes = [each["tensor_parallel_size"] for each in neighbours({}) if "tensor_parallel_size" in each]
    assert (batches, sizes) == ([8, 16], [2, 4])


def test_tables_are_prepared_and_what_cannot_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    prepare({"model": "nobody/nothing"})
    assert list(tmp_path.glob("*.npz")) == []
    prepare(SMALL)
    assert len(list(tmp_path.glob("*.npz"))) == 1


def test_foresight_prepares_neighbours_and_ends_with_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    before = set(active_children())
    found = Foresight()
    (process,) = set(active_children()) - before
    found.look(SMALL)
    for _ in range(3000):  # it gives way to all others, who may be many
        if list(tmp_path.glob("*.npz")):
            break
        time.sleep(0.1)
    assert list(tmp_path.glob("*.npz"))
    found.close()
    process.join(60)
    assert process.exitcode == 0
    found.look(SMALL)


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Place(port=0).bind() as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["ui", "Qwen/Qwen3-0.6B", "--perf", "roofline", "--num-prompts", "5", "--port", port]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"windtunnel: port={port}: cannot listen")
    assert message.count("\n") == 1
    assert main(["ui", "nobody/nothing", "--port", "0"]) == 2
    assert "unknown model" in capsys.readouterr().err
