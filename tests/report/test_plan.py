"""The page of a search: whole, escaped, offline, and with limits that a browser can change."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import pytest
from plan.chosen import SURVEYED, Chosen, answer
from plan.planning import question, small_space

from report.browser import browser, visit
from windtunnel.plan.advice import Advice, advise
from windtunnel.plan.band import Band
from windtunnel.plan.bottleneck import Finding
from windtunnel.plan.capacity import Draws
from windtunnel.plan.disaggregation.together import Verdict
from windtunnel.plan.elimination import Entry
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.outcome import Margin
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints, Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.survey import survey
from windtunnel.plan.what_if import WhatIf, what_if
from windtunnel.plan.workers import in_turn
from windtunnel.report.plan import plan_page

CHANGE = """<script>
  const limit = document.getElementById("limit-ttft"), rows = document.getElementById("slice-rows");
  document.body.dataset.before = rows.rows[0].cells[3].textContent;
  limit.value = LIMIT;
  limit.dispatchEvent(new Event("input"));
  document.body.dataset.after = rows.rows.length ? rows.rows[0].cells[3].textContent : "none";
</script>"""


@pytest.fixture(scope="module")
def page() -> str:
    enumeration = small_space(tensor_parallel_size=(1,), max_num_batched_tokens=(256,)).enumerate()
    with Store() as store:
        answer = search(enumeration, question(), RatePerDollar(), top=2, store=store)
        other = {"chat": (question(), RatePerDollar()), "tighter": (question(goodput=("ttft:100",)), RatePerDollar())}
        what_ifs = what_if(enumeration, other, store=store)
        verdict = Verdict(0.5, None, "link", "ttft is long")
        return plan_page(answer, advise(answer), survey(answer, store, in_turn()), what_ifs, verdict)


def test_the_page_is_whole(page: str) -> None:
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    for text in (
        "Deploy",
        "vllm serve",
        "Ranking",
        "Other limits",
        "What limits each",
        "If the load changes",
        "tighter",
        "together: 2.00 times as good",
        "link: ttft is long",
    ):
        assert text in outside
    assert not re.search(r"""(src|href)=["'](?!data:)""", outside)


def test_the_numbers_of_the_limits_are_those_of_the_survey(page: str) -> None:
    found = re.search(r'id="plan-data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert data["slo"]["ttft"] == {"statistic": "p90", "limit": 0.4}
    for one in data["configurations"]:
        rates = [point["rate"] for point in one["points"]]
        assert rates == sorted(rates)
        assert len(rates) == 10
        assert all(len(values) == 5 for values in one["points"][0]["values"].values())


FIRST = """<script>
  const row = document.getElementById("slice-rows").rows[0];
  document.body.dataset.first = [...row.cells].map((cell) => cell.textContent).join("|");
</script>"""


@browser
def test_under_the_limits_asked_for_the_page_says_what_the_search_says(page: str, tmp_path: Path) -> None:
    found = re.search(r'id="plan-data">(.*?)</script>', page, re.DOTALL)
    assert found
    best = json.loads(found[1])["found"][0]
    verdict = re.search(r'class="verdict good">Best value: (\d+) × (.*?) \(', page)
    assert verdict and (int(verdict[1]), verdict[2]) == (best["gpus"], "H100 SXM")
    dom, _ = visit(page.replace("</body>", FIRST + "</body>"), tmp_path)
    shown = re.search(r'data-first="([^"]*)"', dom)
    assert shown
    name, gpus, price, rate, _ = shown[1].split("|")
    assert (name, int(gpus)) == (best["name"], best["gpus"])
    assert (float(price), float(rate)) == pytest.approx((best["price"], best["rate"]), rel=0.01)
    assert "winner" in [trace.get("name") for trace in pareto_of(page)]


def pareto_of(page: str) -> list[dict[str, Any]]:
    figures = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert figures
    return list(json.loads(figures[1])["pareto"]["data"])


@browser
@pytest.mark.parametrize(("limit", "meaning"), [("90", "tighter"), ("0.001", "none")])
def test_the_winner_changes_with_the_limits(page: str, tmp_path: Path, limit: str, meaning: str) -> None:
    dom, log = visit(page.replace("</body>", CHANGE.replace("LIMIT", limit) + "</body>"), tmp_path)
    assert "CONSOLE" not in log
    assert 'data-requests="0"' in dom
    for name in ("pareto", "capacities", "heat"):
        assert re.search(rf'id="{name}"[^>]*js-plotly-plot|class="[^"]*js-plotly-plot[^"]*" id="{name}"', dom), name
    before, after = (re.search(rf'data-{name}="([^"]*)"', dom) for name in ("before", "after"))
    assert before and after
    if meaning == "none":
        assert after[1] == "none"
    else:
        assert float(after[1]) < float(before[1])


def test_where_nothing_holds_the_page_says_by_how_much() -> None:
    enumeration = small_space(device=("h100",), tensor_parallel_size=(1,), max_num_seqs=(4,)).enumerate()
    answer = search(enumeration, question(goodput=("ttft:1",)), RatePerDollar())
    text = plan_page(answer, advise(answer), ())
    assert "No configuration keeps the limits. The closest" in text


def chosen(objective: Any = None) -> Chosen:
    """A search whose winner uses four fifths of one limit; what was left out is counted."""
    found = answer(objective=objective)
    assert found.entries[1].held is not None
    held = replace(found.entries[1].held, margins=(Margin("ttft p90", 0.32, 0.4),))
    others = {place: Entry(place, "bounded", 0.0) for place in (5, 6)}
    enumeration = Enumeration((), Counter({"does not fit": 1200}))
    return replace(
        found,
        entries={1: replace(found.entries[1], held=held), **others},
        enumeration=enumeration,
        trials=1000,
        reused=234,
    )


def advised(found: Chosen, **more: Any) -> Advice:
    """What follows from it, in words that were chosen."""
    run = handmade.two_requests()
    run.manifest["warnings"] = ["<hot>"]
    deployment, rate = found.measured(found.entries[1])
    band = Band(
        "evidence it is", ("low", "why"), "known to be bad", None, None, (9.0, 7.0, 5.0), 0.0, (float("nan"),) * 3, ()
    )
    findings = (Finding("KV memory", 0.5, "blocks are short", "buy more"),)
    usual: dict[str, Any] = {
        "entry": found.entries[1], "deployment": deployment, "rate": rate, "run": run, "findings": findings,
        "binding": Margin("ttft p90", 0.5, 0.4), "routing": "any router", "cheaper": "fails", "ends": "",
        "draws": Draws((), 0.05), "band": band,
    }  # fmt: skip
    return Advice(**(usual | more))


def table_rows(text: str) -> list[list[str]]:
    bare = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", bare)]


def test_the_words_of_the_page_by_hand() -> None:
    found = chosen()
    text = plan_page(found, advised(found), SURVEYED)
    assert ", requests/s per $/h: 6 × H100 SXM, $21.60/h</h1>" in text
    assert '<p class="sub">synthetic; 1,200 configurations, 1,234 simulations of 300 requests' in text
    assert '<p class="verdict good">Best value: 6 × H100 SXM (3 replicas of 2 GPUs, TP 2) for $21.60/h' in text
    assert "<li>known to be bad</li><li>&lt;hot&gt;</li>" in text
    assert "the 2 configurations with the best promises" in text
    assert "Start one replica of 3" in text
    assert text.count('data-copy="serve-0"') == 1
    rows = table_rows(text)
    for row in (
        ["rate", "7.00 requests/s within the goal"],
        ["capacity", "7 requests/s (5 to 9 on a real server)"],
        ["capacity", "not found: the load is too short to fill the replicas"],
        ["ttft p90", "ttft p90 is 320 ms, the limit 400 ms"],
        ["breaks first", "at the next higher load, ttft p90 is 500 ms, the limit 400 ms"],
        ["limited by KV memory", "blocks are short; buy more"],
        ["next cheaper", "fails"],
        ["router", "any router"],
        ["1,200", "cannot run: does not fit"],
        ["2", "ruled out by a bound, without a simulation"],
        ["1", "simulated exactly"],
        ["h100, TP 2", "3", "6", "21.60", "7.00", "2.00", "80.0 %"],
    ):
        assert row in rows
    assert "If the load changes" not in text
    heads = re.findall("<th>(.*?)</th>", text)
    assert heads[:7] == [
        "configuration", "replicas", "GPUs", "$/h", "requests/s", found.objective.unit, "TTFT limit used"
    ]  # fmt: skip
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert {name: figure["data"] for name, figure in figures.items() if name != "pareto"} == {
        "capacities": [], "heat": []
    }  # fmt: skip


def test_what_is_not_known_is_not_said() -> None:
    found = chosen()
    band = replace(advised(found).band, known_bad=None)
    text = plan_page(found, advised(found, draws=None, binding=None, findings=(), band=band), SURVEYED)
    names = {row[0] for row in table_rows(text) if row}
    assert not names & {"breaks first", "limited by KV memory", "separate or together"}
    assert "known to be bad" not in text and "<li>&lt;hot&gt;</li>" in text


def test_a_cost_is_told_once_and_a_single_replica_without_its_number() -> None:
    """The unit of what is sought is a column already: no second one."""

    class One(Chosen):
        """A search that found one replica."""

        def measured(self, entry: Entry) -> Any:
            """The candidate itself."""
            return self.contenders[entry.index].candidate.scaled(1), 7.0

    found = One(**vars(chosen(LeastForRate(5.0, Constraints()))))
    entry = replace(found.entries[1], promise=-7.2)
    found = replace(found, entries={1: entry})
    text = plan_page(found, advised(found, entry=entry), SURVEYED)
    assert '<p class="verdict good">Buy 2 × H100 SXM (one replica of 2 GPUs, TP 2) for $7.20/h' in text
    heads = re.findall("<th>(.*?)</th>", text)
    assert found.objective.unit == "$/h" and heads.count("$/h") == 2, "of the ranking and of other limits"
    assert ["h100, TP 2", "1", "2", "7.20", "80.0 %"] in table_rows(text)


def test_what_a_change_of_the_load_costs() -> None:
    found, none = chosen(), replace(answer(), entries={})
    regrets = {"chat": {"chat": 0.0, "code": 0.25}, "code": {"chat": 0.125}}
    text = plan_page(found, None, (), WhatIf({"chat": found, "code": none}, regrets))
    rows = table_rows(text)
    assert ["chat", "h100, TP 2"] in rows and ["code", "nothing keeps the limits"] in rows
    assert ["chat", "0 %", "25.0 %"] in rows
    assert ["code", "12.5 %", "100 %"] in rows, "what has no regret does not keep the limits at all"
    assert "<h2>Deploy</h2>" not in text


def test_without_a_winner_nothing_is_ranked() -> None:
    impossible = {1: Entry(1, "impossible", float("-inf"), stretch=2.5)}
    text = plan_page(replace(chosen(), entries=impossible), None, ())
    assert "No configuration keeps the limits. The closest, h100, TP 2, needs them 2.50 times as long." in text
    assert "Nothing keeps the limits." in text
    assert ["1", "miss the goal even for a single request"] in table_rows(text)
    nothing = plan_page(replace(chosen(), entries={}), None, ())
    assert "No configuration keeps the limits.</p>" in nothing
