"""The experiments on schedulers: what the page says holds, and the page is what the command writes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import charts, startup
from benchmarks.page import PLACE, Findings, table, written
from benchmarks.schedulers import allocation, batching, chunking, fairness, mindspore, order, triggers
from benchmarks.schedulers.__main__ import EXPERIMENTS, FOLDER, files

NAMES = re.compile(r"\{(\w+)")


def test_mindspores_table_is_a_line() -> None:
    call, token, error, worst = mindspore.fitted()
    assert 0.020 < call < 0.030
    assert 6e-5 < token < 9e-5
    assert error < 0.05
    assert worst < 0.10


def test_mindspores_two_runs_imply_the_overhead() -> None:
    """The inverse: calls of h + c give back the seconds of both runs."""
    rest = mindspore.DECODE_SECONDS + mindspore.OTHER_SECONDS
    for first in (600.0, 677.0):
        overhead, prompt = mindspore.implied(first)
        assert rest + 1500 * (overhead + prompt) == pytest.approx(first)
        assert rest + 750 * (overhead + 2 * prompt) == pytest.approx(mindspore.TUNED_SECONDS)
    assert mindspore.implied(mindspore.PREFILL_SECONDS + rest)[1] < 0


def test_mindspores_phases_come_back_and_the_five_runs_are_in_order() -> None:
    """Few slots, 128 slots, two prompts in a call, two to five; the phases are the report's to the millisecond, and
    nothing is fitted to the 436.9 s."""
    whole = mindspore.PREFILL_SECONDS + mindspore.DECODE_SECONDS + mindspore.OTHER_SECONDS
    assert mindspore.phases(whole, 1) == pytest.approx((575_318, 168_259, 15_592), abs=1)
    runs = [
        mindspore.by_parts(whole, places, batch).seconds
        for places, batch in ((1, 1), (7, 1), (24, 1), (128, 1), (128, 2))
    ]
    tuned = mindspore.by_parts(whole, 128, 2, mindspore.CODE_MOST).seconds
    assert tuned == pytest.approx(mindspore.TUNED_SECONDS, rel=0.05)
    assert tuned < runs[-1]
    assert runs == sorted(runs, reverse=True)
    assert mindspore.shapes(whole, 2) == 2


def test_a_static_batch_lasts_as_long_as_its_longest_request() -> None:
    """Of batches drawn with replacement from {1, 3}: the longest of n is 3 but for 2^-n."""
    values = np.array([1, 3] * 500)
    assert batching.spread_factor(values) == pytest.approx((3 - 2 * 0.5**batching.PLACES) / 2)


def test_every_number_of_a_text_is_measured_and_every_chart_is_shown() -> None:
    for name in EXPERIMENTS:
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert NAMES.search(text)
        assert re.findall(r"\]\(([\w-]+\.svg)\)", text), name


def test_tables_are_markdown() -> None:
    assert table(("", "a"), [("x", 1234.5), ("y", 0.001234)]) == "|  | a |\n|---|--:|\n| x | 1,234 |\n| y | 0.00123 |"


def test_texts_need_all_their_numbers() -> None:
    with pytest.raises(KeyError):
        written(FOLDER / "order.md", Findings({"rate": 1.0}))


def test_charts_place_their_points() -> None:
    drawn = charts.lines("title & more", "x", "y", {"a": [(1.0, 0.0), (3.0, 10.0)]})
    left, right = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert (float(left[0]), float(right[0])) == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert float(left[1]) == charts.HEIGHT - charts.BOTTOM > float(right[1]) >= charts.TOP
    assert "title &amp; more" in drawn
    assert drawn.count("<text") > 6


def test_a_legend_stays_on_the_chart() -> None:
    names = ["a name of thirty-three characters"] * 4
    drawn = charts.lines("title", "x", "y", {f"{name}{i}": [(1, 1), (2, 2)] for i, name in enumerate(names)})
    boxes = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="11"', drawn)
    assert len(set(boxes)) == 4
    assert len({y for _, y in boxes}) > 1
    assert min(float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)) > max(int(y) for _, y in boxes) + 11


def test_bars_are_as_high_as_their_values() -> None:
    drawn = charts.bars("title", "y", {"a": {"one": 5.0, "two": 10.0}})
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="#(?!fff)', drawn)][-2:]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)


@pytest.fixture(scope="module")
def facts() -> Mapping[str, Mapping[str, Any]]:
    return {name: module.findings().facts for name, module in EXPERIMENTS.items()}


def test_the_claims_of_the_page_hold(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Each verdict of the page as an inequality."""
    found = facts["batching"]
    assert found["equal"] == pytest.approx(1.0, abs=0.01)
    assert 1 < found["chat"] < found["wide"] < 10 < found["short_wide"] < 20
    assert max(found["paged_chat"], found["paged_wide"]) < 10
    assert found["paged_equal"] > 2
    assert found["dynamic"] < 0.01
    found = facts["order"]
    assert found["batch_gain"] > 5
    assert found["speed_gain"] > 2
    assert found["mixed_speed"] > 0
    assert max(found["mixed_tpot"], found["mixed_gap"]) < 0 < found["mixed_ttft_ms"]
    found = facts["chunking"]
    assert found["stall"] > 3
    assert found["gap"] < found["gap_of_mixing"] < 0
    assert found["mean_of_mixing"] < 10 * found["mean_of_chunks"] - 0.1
    assert found["ttft_ms"] > 0
    assert found["small_ttft"] > 5


def test_the_other_claims_of_the_page_hold(facts: Mapping[str, Mapping[str, Any]]) -> None:
    def gain(kind: str, factor: int, rule: str, other: str) -> float:
        return allocation.speed(kind, factor, rule) / allocation.speed(kind, factor, other)

    exact, demand = "prompt and declared output", "on demand"
    assert gain("writing", 1, demand, "longest sequence") > 1.3 > gain("summaries", 1, demand, "longest sequence")
    assert gain("writing", 4, demand, exact) > gain("writing", 1, demand, exact)
    assert gain("writing", 1, "peak looked ahead", "on demand, prompt first") > 0.97
    assert gain("chat", 4, "peak looked ahead", "on demand, prompt first") < 0.95
    found = facts["allocation"]
    assert found["batch_demand"] > found["batch_exact"] > found["batch_longest"]
    assert found["evicted"] > found["evicted_prompt"] > found["evicted_ahead"] > 0
    assert found["discard_until"] == 10
    assert found["swap_loses"] > 0.4 > found["swap_gains"] > 0.03
    found = facts["mindspore"]
    assert found["two_gain"] < -0.2 < found["low_gain"] < 0 < found["none_gain"]
    assert found["best_of_24"] < found["best"]
    assert found["tuned_short"] < mindspore.TUNED_SECONDS < found["tuned_long"]
    assert mindspore.occupancy(128, 20) < 20 / 128 < mindspore.occupancy(24, 20)
    found = facts["triggers"]
    assert found["tpot_at_16"] < 0
    assert found["ttft_ms_at_16"] > found["ttft_ms_at_1"]
    assert found["costly_gain"] < found["best_gain"]
    assert found["mixed_e2el"] < found["gain_at_16"] < 0
    assert found["mixed_ttft_ms"] < found["ttft_ms_at_16"]
    assert found["ratio_ttft"] > 1
    found = facts["fairness"]
    assert found["shortest_ttft"] < found["fcfs_ttft"]
    assert found["shortest_wait"] > 1.5
    assert found["high_most"] > 20 * found["usual_most"]
    assert found["urgent_strict"] < found["urgent_aged"] < found["urgent_fcfs"]
    assert found["others_fcfs"] < found["others_aged"] < found["others_fcfs"] + found["age"] < found["others_strict"]


def test_the_page_is_what_the_command_writes() -> None:
    now = files()
    assert {name: (PLACE / name).read_text(encoding="utf-8") for name in now} == now


MODULES = (batching, order, chunking, allocation, mindspore, triggers, fairness)


def test_every_experiment_is_on_the_page() -> None:
    assert set(EXPERIMENTS.values()) == set(MODULES)
    folder = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "__main__", "machine", "page"}
    assert folder == set(EXPERIMENTS)


def test_start_up_is_measured_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def once(checkout: Path, cache: Path, arguments: list[str]) -> tuple[float, float]:
        asked.append(f"{checkout.name} {cache.name} {arguments[-1]}")
        return {"new": 1.0, "old": 2.0}[checkout.name] + len(asked), 100.0 * len(asked)

    monkeypatch.setattr(startup, "once", once)
    startup.show("warm", *startup.measure([Path("new"), Path("old")], [Path("0"), Path("1")], ["run"], 2))
    assert asked == ["new 0 run", "old 1 run", "new 0 run", "old 1 run"]
    assert capsys.readouterr().out == "| warm | 2.00 | 300 | 4.00 | 400 | 0.60 |\n"
