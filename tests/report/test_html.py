"""The page in a real browser: every plot drawn, nothing on the console, no request, nothing a name could inject."""

import json
import re
import time
from pathlib import Path

import handmade
import pytest

from benchmarks.browser import chromium
from report.browser import broken_rules, browser, busy, needs_axe, visit
from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import summary, unroll
from windtunnel.report import html_report
from windtunnel.simulate.run import Run

PLOTS = {"requests-cdf", "tokens-cdf", "timeline", "breakdown", "arrivals", "prompts", "outputs"}


def page(run: Run, slo: SLO | None = None) -> str:
    steps = unroll(run)
    return html_report(steps, summary(run, slo, steps=steps), slo)


@browser
def test_the_browser_draws_every_plot(tmp_path: Path) -> None:
    slo = SLO(ttft=0.3, tpot=0.05, percentiles=(PercentileLimit("ttft", 99, 2.0),))
    dom, log = visit(page(busy(2000), slo), tmp_path)
    assert "CONSOLE" not in log
    for name in PLOTS:
        part = re.search(rf'id="{name}".*?(?=<div class="panel"|<h2>|<footer)', dom, re.DOTALL)
        assert part, name
        assert part[0].count("<svg") >= 2, name
        assert re.search(r'<path[^>]* d="M', part[0]), name
    assert "owned" not in re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]  # type: ignore[index]
    assert 'data-requests="0"' in dom


@browser
@pytest.mark.parametrize("requests", [0, 1])
def test_the_browser_takes_a_run_of_almost_nothing(requests: int, tmp_path: Path) -> None:
    run = busy(1) if requests else handmade.run(handmade.requests(arrival=[]), handmade.iterations(), footprint=None)
    dom, log = visit(page(run), tmp_path)
    assert "CONSOLE" not in log
    assert dom.count("js-plotly-plot") >= len(PLOTS)


SLO_OF_A_PHONE = SLO(ttft=0.3, tpot=0.05)


@browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_phone_and_a_keyboard_reach_everything(width: int, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(busy(50), SLO_OF_A_PHONE), encoding="utf-8")
    with chromium() as shown:
        shown.open(file.as_uri(), width)
        shown.until("document.querySelectorAll('.js-plotly-plot').length >= 7")
        assert shown.run("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('.panel')].filter(each => each.scrollWidth > each.clientWidth)"
        assert shown.run(f"{wide}.length") == (2 if width == 390 else 0)
        assert shown.run(f"{wide}.every(each => each.tabIndex === 0)")


@browser
@needs_axe
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_axe_finds_nothing(width: int, dark: bool, tmp_path: Path) -> None:
    pages = {"run": page(busy(50), SLO_OF_A_PHONE), "pools": page(handmade.disaggregated())}
    with chromium() as shown:
        for name, text in pages.items():
            (tmp_path / name).with_suffix(".html").write_text(text, encoding="utf-8")
            shown.open((tmp_path / name).with_suffix(".html").as_uri(), width, dark=dark)
            shown.until("document.querySelectorAll('.js-plotly-plot').length >= 7")
            assert broken_rules(shown) == [], name


@browser
def test_the_browser_draws_the_parts_of_the_time_to_first_token(tmp_path: Path) -> None:
    dom, log = visit(page(handmade.disaggregated()), tmp_path)
    assert "CONSOLE" not in log
    part = re.search(r'id="first-token".*?(?=<h2>)', dom, re.DOTALL)
    assert part
    assert part[0].count('class="points"') >= 6


def test_a_page_of_pools() -> None:
    text = page(handmade.disaggregated())
    assert "Qwen/Qwen3-32B: prefill on 2 × H100 SXM, TP 2; decode on 2 × H100 SXM, TP 2</h1>" in text
    assert "<td>of TTFT: transfer</td><td>312 ms</td>" in text
    plots = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    bars = {bar["name"]: bar["x"] for bar in plots["first-token"]["data"]}
    assert bars["queue"] == [250, 500], "the slowest tenth is request 1"
    assert sum(values[0] for values in bars.values()) == 800
    for name in ("prefill", "decode"):
        assert f"<td>{name}</td><td>1 × 2 × H100 SXM</td>" in text
    assert "first-token" not in page(handmade.two_requests())


def test_the_page_is_whole_and_escaped() -> None:
    text = page(busy(50), SLO(ttft=0.3))
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script" not in outside
    assert "<img" not in outside
    assert not re.search(r"""(src|href)=["'](?!data:)""", outside)
    assert outside.count("&lt;script&gt;") >= 4
    assert "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2" in outside


def test_points_are_bounded_at_a_hundred_thousand_requests() -> None:
    run = busy(100_000)
    steps = unroll(run)
    result = summary(run, steps=steps)
    started = time.process_time()
    text = html_report(steps, result)
    assert time.process_time() - started < 3.0
    plots = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert set(plots) == PLOTS
    lengths = [len(trace["x"]) for figure in plots.values() for trace in figure["data"]]
    assert max(lengths) <= 2000
    assert len(text) < 6_000_000
