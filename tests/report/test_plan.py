"""The page of a search: whole, escaped, offline, and with limits that a browser can change."""

import json
import re
from pathlib import Path

import pytest
from planning import question, small_space

from report.browser import browser, visit
from windtunnel.plan.advice import advise
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import Store
from windtunnel.plan.survey import survey
from windtunnel.plan.what_if import what_if
from windtunnel.plan.workers import in_turn
from windtunnel.report.plan import plan_page, write_plan

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
        return plan_page(
            answer, advise(answer), survey(answer, store, in_turn()), what_if(enumeration, other, store=store)
        )


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


def test_where_nothing_holds_the_page_says_by_how_much(tmp_path: Path) -> None:
    enumeration = small_space(device=("h100",), tensor_parallel_size=(1,), max_num_seqs=(4,)).enumerate()
    answer = search(enumeration, question(goodput=("ttft:1",)), RatePerDollar())
    write_plan(tmp_path / "plan.html", answer, advise(answer), ())
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "No configuration keeps the limits. The closest" in text
