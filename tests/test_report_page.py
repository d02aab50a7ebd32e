"""The page in a real browser: every plot drawn, nothing on the console, no request, nothing a name could inject."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import summary, unroll
from windtunnel.report import html_report
from windtunnel.simulate.run import Run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=10000",
    "--window-size=1280,4000",
]
PLOTS = {"requests-cdf", "tokens-cdf", "timeline", "breakdown", "arrivals", "prompts", "outputs"}
COUNT = """<script>document.body.dataset.requests = performance.getEntriesByType("resource")
  .filter((entry) => !entry.name.startsWith("data:")).length</script>"""
EVIL = '<script>document.title="owned"</script><img src=x onerror=alert(1)>'
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


def page(run: Run, slo: SLO | None = None) -> str:
    steps = unroll(run)
    return html_report(steps, summary(run, slo, steps=steps), slo)


def busy(number: int) -> Run:
    """A run with a row for every request, groups and sources, and hostile names."""
    rng = np.random.default_rng(number)
    arrival = np.sort(rng.random(number) * number / 5)
    first = arrival + rng.lognormal(-1.5, 0.6, number)
    output = rng.integers(1, 400, number)
    requests = handmade.requests(
        arrival=arrival, scheduled=arrival, first_token=first, finish=first + 0.03 * output, output_tokens=output,
        prompt_tokens=rng.integers(1, 4000, number),
    )  # fmt: skip
    log = handmade.iterations(
        *({"start": 0.2 * row, "steps": 4, "decodes": 1 + row % 60, "used_blocks": row % 99} for row in range(number))
    )
    times = handmade.flat_times(0.04)
    parts = {"measured": handmade.flat_times(0.03), "modelled": handmade.flat_times(0.01)}
    groups = {"gemm": handmade.flat_times(0.03), EVIL: handmade.flat_times(0.01)}
    manifest = {
        "workload": {"name": EVIL, "requests": number, "request_rate": 5.0},
        "warnings": [EVIL],
        "provenance": [{"operator": EVIL, "source": "measured", "rows": 12}],
    }
    return handmade.run(requests, log, times=times, sources=(parts,), groups=(groups,), manifest=manifest)


def visit(text: str, folder: Path) -> tuple[str, str]:
    """The page's DOM after its scripts, and the browser's log."""
    file = folder / "report.html"
    file.write_text(text.replace("</body>", COUNT + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


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
