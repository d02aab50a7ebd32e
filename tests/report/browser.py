"""Pages in a real browser, and a run whose names are hostile."""

import os
import subprocess
from pathlib import Path

import handmade
import numpy as np
import pytest

from benchmarks.browser import ALONE, CHROMIUM, Page
from windtunnel.simulate.run import Run

FLAGS = [
    *ALONE,
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=10000",
    "--window-size=1280,4000",
]
COUNT = """<script>document.body.dataset.requests = performance.getEntriesByType("resource")
  .filter((entry) => !entry.name.startsWith("data:")).length</script>"""
EVIL = '<script>document.title="owned"</script><img src=x onerror=alert(1)>'
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
"""Where axe-core is, which is no part of this repository."""
needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason="no axe-core: npm install axe-core somewhere, AXE_CORE=…/axe.min.js"
)


def broken_rules(page: Page) -> list[list[str]]:
    """What axe-core finds on a page: impact, rule, element."""
    page.run(AXE.read_text(encoding="utf-8") + ";1")
    found: list[list[str]] = page.run(
        "axe.run().then(found => found.violations.map(each => [each.impact, each.id, each.nodes[0].html]))"
    )
    return found


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
