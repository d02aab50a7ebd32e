"""The page of a search: whole, escaped, offline, and with limits that a browser can change."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan.planning import question, small_space

from report.browser import browser, visit
from windtunnel.plan.advice import advise
from windtunnel.plan.apart.together import Verdict
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import Store
from windtunnel.plan.survey import survey
from windtunnel.plan.what_if import what_if
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
    verdict = re.search(r'class="verdict good">(.*?): ', page)
    assert verdict and verdict[1] == best["name"]
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
    for name in ("pareto", "cost", "capacities", "heat"):
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
