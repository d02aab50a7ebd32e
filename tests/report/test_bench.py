"""The page and the columns of a bench, from rows whose numbers are chosen."""

import json
import re
from math import inf
from typing import Any

import pytest

from windtunnel.metrics import Interval
from windtunnel.report.bench import (
    Row,
    bench_columns,
    bench_page,
    cells,
    differences,
    findings,
    heads,
    pairs,
    shown,
    titles,
    warned_of,
)

AXES = ("model", "rate")
A = {"schema_version": 1, "ttft": {"mean": 0.1, "p99": 0.2}, "gpus": 8, "goodput": None, "warnings": ["hot", "hot"]}
B = A | {"ttft": {"mean": 0.3, "p99": 0.2}, "warnings": ["hot", "cold"]}
SIMULATED = Row(("small", "2"), {"isl": 100}, documents=(A, B))
OTHER = Row(("large", "2"), documents=(A | {"ttft": {"mean": 0.4, "p99": 0.8}, "gpus": 16}, B))
REFUSED = Row(("huge", "2"), refusal="too <large>")
LIVE = Row(("2",), live=True, documents=(A, A))
ROWS = (SIMULATED, OTHER, REFUSED, LIVE)


def test_measures_that_no_row_has_are_left_out() -> None:
    assert [measure.name for measure in shown(ROWS)] == ["ttft.mean", "ttft.p99", "gpus"]
    assert heads(AXES, shown(ROWS), live=True) == ["model", "rate", "", "TTFT, ms", "TTFT p99, ms", "GPUs"]
    assert heads(AXES, shown(ROWS), live=False) == ["model", "rate", "TTFT, ms", "TTFT p99, ms", "GPUs"]


def test_cells_by_hand() -> None:
    """Means of 100 and 300 ms: 200 ± 12.706 · 141.4 / √2; no half where both seeds agree, and none of a count."""
    measures = shown(ROWS)
    assert cells(SIMULATED, AXES, (1,), measures, live=True) == ["small", "2", "simulated", "200 ± 1,271", "200", "8"]
    assert cells(SIMULATED, AXES, (1,), measures, live=False, halves=False) == ["small", "2", "200", "200", "8"]
    assert cells(LIVE, AXES, (1,), measures, live=True) == ["–", "2", "measured", "100", "200", "8"]
    assert cells(Row(("x", "1")), AXES, (1,), measures, live=False) == ["x", "1", "–", "–", "–"]


def test_simulations_stand_beside_what_was_measured_under_their_load() -> None:
    elsewhere = Row(("small", "9"), documents=(A,))
    assert list(pairs((*ROWS, elsewhere), (1,))) == [(SIMULATED, LIVE), (OTHER, LIVE)]
    base = Row(("2",), live=True, documents=({"ttft": {"mean": 0.2}, "tpot": {"mean": 0.0}},))
    row = Row(("s", "2"), against={"ttft.mean": Interval(-0.05, 0.01, 2), "tpot.mean": Interval(1.0, 0.0, 2)})
    assert titles() == ["TTFT", "TPOT", "E2EL", "output"]
    assert differences(row, base) == ["−25.0 %", "–", "–", "–"]
    assert differences(Row(("s", "2"), against={"ttft.mean": Interval(0.05, 0.01, 2)}), base)[0] == "+25.0 %"


def test_warnings_name_whom_they_are_of_once() -> None:
    assert warned_of((SIMULATED, OTHER, REFUSED)) == {"hot": ["all"], "cold": ["all"]}
    calm = Row(("calm", "2"), documents=({"ttft": {"mean": 0.1}},))
    assert warned_of((SIMULATED, calm)) == {"hot": ["small 2"], "cold": ["small 2"]}


def figure(text: str, place: int) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1])[f"measure-{place}"])


def test_the_page_has_a_table_of_all_and_a_point_for_each() -> None:
    text = bench_page("<title>", AXES, (1,), ROWS, "a & b")
    for part in (
        "<h1>&lt;title&gt;</h1>",
        "a &amp; b",
        "Simulated against measured",
        "What to know",
        "What cannot run",
        "<td>too &lt;large&gt;</td>",
        "<td>large</td><td>2</td><td>simulated</td>",
    ):
        assert part in text
    assert text.count("<td>huge</td>") == 1, "only where it says why it cannot run"
    drawn = figure(text, 0)
    (trace,) = drawn["data"]
    assert (trace["name"], trace["y"]) == ("2", ["small", "large", "measured"])
    assert trace["x"] == [200.0, 350.0, 100.0]
    assert trace["error_x"]["array"] == pytest.approx([1270.62, 635.31, 0.0], rel=1e-5)
    assert drawn["layout"]["xaxis"] == {"title": {"text": "TTFT (ms)"}, "type": "log"}
    assert drawn["layout"]["showlegend"] is False
    assert drawn["layout"]["height"] == 140 + 24 * 3
    assert '"measure-1"' not in text, "percentiles are in the table only"


def test_without_measurements_loads_have_colours_and_single_runs_no_bars() -> None:
    rows = [Row((rate,), documents=(A,)) for rate in ("2", "4")]
    text = bench_page("t", ("rate",), (0,), rows, "")
    drawn = figure(text, 0)
    assert [(trace["name"], trace["y"], trace["meta"]) for trace in drawn["data"]] == [
        ("2", ["simulated"], 0), ("4", ["simulated"], 1)
    ]  # fmt: skip
    assert all("error_x" not in trace for trace in drawn["data"])
    assert (drawn["layout"]["showlegend"], drawn["layout"]["height"]) == (True, 164)
    for absent in ("Simulated against measured", "What cannot run"):
        assert absent not in text
    (trace,) = figure(bench_page("t", ("model",), (), rows, ""), 0)["data"]
    assert trace["name"] == "all"
    assert "What to know" not in bench_page("t", ("model",), (), [Row(("a",), documents=({"gpus": 1},))], "")


def test_columns_have_a_row_for_each_case_and_seed() -> None:
    found = bench_columns(AXES, (1,), ROWS)
    assert len(found) == 7
    assert found[1] == {
        "model": "small", "rate": "2", "kind": "simulated", "words": '{"isl": 100}', "refusal": "", "repetition": 1,
        "ttft_mean": 0.3, "ttft_p99": 0.2, "gpus": 8.0, "goodput": None,
    }  # fmt: skip
    assert [row["repetition"] for row in found] == [0, 1, 0, 1, 0, 0, 1]
    assert found[4] == {
        "model": "huge", "rate": "2", "kind": "simulated", "words": "{}", "refusal": "too <large>", "repetition": 0
    }  # fmt: skip
    assert (found[5]["model"], found[5]["rate"], found[5]["kind"]) == ("", "2", "measured")
    (row,) = bench_columns(("gpus",), (), [Row(("8",), documents=({"gpus": 8},))])
    assert (row["gpus"], row["gpus_value"]) == ("8", 8.0), "a number does not replace the name of an axis"


def test_every_measure_has_its_unit() -> None:
    """Seconds in ms but for whole requests; shares in per cent; a count without digits after the point."""
    document = {
        "ttft": {"mean": 0.1, "p99": 0.25}, "tpot": {"mean": 0.0125}, "e2el": {"mean": 2.5},
        "output_throughput": 1500.0, "goodput": 1.5, "attainment": 0.95, "gpus": 12.0,
        "cost_per_million_output_tokens": 3.25,
    }  # fmt: skip
    row = Row(("a",), documents=(document,))
    measures = shown([row])
    assert heads(("model",), measures, live=False) == [
        "model", "TTFT, ms", "TTFT p99, ms", "TPOT, ms", "E2EL, s", "output, tokens/s", "goodput, requests/s",
        "good, %", "GPUs", "cost, $/M tokens",
    ]  # fmt: skip
    assert cells(row, ("model",), (), measures, live=False) == [
        "a", "100", "250", "12.5", "2.50", "1,500", "1.50", "95.0", "12", "3.25",
    ]  # fmt: skip
    assert (row.live, row.meets_goals, row.refusal) == (False, True, "")


def case(capacity: float, per_dollar: float | None = None) -> dict[str, Interval]:
    found = {"capacity": capacity} | ({} if per_dollar is None else {"capacity_per_dollar": per_dollar})
    return {name: Interval(value, inf, 1) for name, value in found.items()}


CASES: dict[tuple[str, ...], dict[str, Interval]] = {
    ("chat", "a", "big"): case(8.0, 1.0),
    ("chat", "b", "big"): case(4.0, 0.5),
    ("chat", "a", "small"): case(2.0, 2.0),
    ("chat", "b", "small"): case(2.0, 2.0),
    ("code", "a", "big"): case(0.0, 0.0),
    ("code", "b", "big"): case(0.0, 0.0),
}


def test_the_best_of_each_load_and_what_each_axis_decides() -> None:
    chat, code, server, device = findings(("load", "server", "device"), (0,), CASES)
    assert chat.startswith("chat: most a big (8") and "most for its price b small (2" in chat
    assert code == "code: nothing keeps the limits"
    assert server.endswith("a 100 %, b 71 %")  # the square root of 1/2 × 1
    assert device.endswith("big 100 %, small 35 %")  # the square root of 1/4 × 1/2


def test_a_case_that_fails_is_counted() -> None:
    (said, *_) = findings(("load", "device"), (0,), {("chat", "x"): case(1.0), ("chat", "y"): case(0.0)})
    assert said == "chat: most x (1.00 requests/s); 1 of 2 keep the limits at no rate"


def test_other_benches_have_none() -> None:
    assert findings(("device",), (), {("h100",): {"ttft.mean": Interval(1.0, 0.0, 1)}}) == []
